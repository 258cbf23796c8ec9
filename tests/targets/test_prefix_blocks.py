"""The prefix cache by blocks: shared once, bounded, with replies and with encoded images.

Outputs are compared, bitwise in float64, with those of a target without a cache.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.core.plain import NoDrafter
from mmspec.core.sampling import Sampler
from mmspec.methods.copy.drafter import CopyDrafter
from mmspec.targets import CausalTarget, VisionLanguageTarget
from mmspec.targets.media_items import MediaItem, find_items
from mmspec.targets.memory import cached_bytes
from mmspec.targets.prefix import HOST_BYTES, PrefixCache, PromptIdentity, identify, media_of
from tests.contracts.running import decode
from tests.methods.flash_checks import answer
from tests.tiny_models import (
    VISION_LANGUAGE_FAMILIES,
    encode,
    tiny_image,
    tiny_images,
    tiny_llama,
    user_message,
)
from tests.versions import TAKES_ENCODED_IMAGES

IMAGE, ANOTHER, *_ = tiny_images()
PLENTY = 2**28


def text_target(limit: int | None = PLENTY, block: int = 16) -> CausalTarget:
    target = CausalTarget(tiny_llama(vocab=128).double())
    target.prefix_cache = None if limit is None else PrefixCache(limit, block)
    return target


def cache_of(target: CausalTarget) -> PrefixCache:
    assert target.prefix_cache is not None
    return target.prefix_cache


@functools.cache
def family_of(name: str) -> tuple[Any, Any]:
    return VISION_LANGUAGE_FAMILIES[name]()


def image_target(name: str, limit: int | None = PLENTY) -> VisionLanguageTarget:
    target = VisionLanguageTarget(VISION_LANGUAGE_FAMILIES[name]()[0].double())
    target.prefix_cache = None if limit is None else PrefixCache(limit)
    return target


def inputs_of(name: str, turns: list[dict[str, Any]]) -> dict[str, Any]:
    _, processor = family_of(name)
    encoded = encode(processor, turns).items()
    return {key: value.double() if value.is_floating_point() else value for key, value in encoded}


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


SYSTEM = random_tokens(70, 0)


@pytest.mark.parametrize("block", [1, 3, 16])
@pytest.mark.parametrize("drafter", [None, CopyDrafter(min_match=1)], ids=["none", "copy"])
def test_a_next_turn_reads_the_new_message_alone(block: int, drafter: Any) -> None:
    """The cache knows the prompt and the reply, except for its last token."""
    target, fresh = text_target(block=block), text_target(None)
    prompt = SYSTEM
    for turn in range(4):
        run = decode(target, [prompt], drafter, max_new_tokens=21)
        assert run.outputs == decode(fresh, [prompt], max_new_tokens=21).outputs
        assert run.stats.cached_prompt_tokens == (len(prompt) - 6 if turn else 0)
        prompt = [*prompt, *run.outputs[0], *random_tokens(5, turn)]


def test_a_row_that_ends_early_keeps_its_own_tokens_alone() -> None:
    """Rows end at different tokens, in the middle of accepted drafts, while others go on."""
    target, fresh = text_target(), text_target(None)
    prompts = [[*SYSTEM, *random_tokens(5, seed)] for seed in range(3)]
    whole = decode(fresh, prompts, max_new_tokens=30).outputs
    end = whole[1][9]
    expected = decode(fresh, prompts, max_new_tokens=30, end=[end]).outputs
    assert len({len(row) for row in expected}) > 1
    run = decode(target, prompts, CopyDrafter(min_match=1), max_new_tokens=30, end=[end])
    assert run.outputs == expected
    longer = [[*prompt, *row, *random_tokens(4, 9)] for prompt, row in zip(prompts, expected, strict=True)]
    again = decode(target, longer, max_new_tokens=12)
    assert again.outputs == decode(fresh, longer, max_new_tokens=12).outputs
    assert again.stats.cached_prompt_tokens == sum(len(row) - 5 for row in longer)


def test_a_row_with_an_error_stores_no_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    target = text_target()
    forward, count = target.forward, 0

    def fail_later(*arguments: Any, **keywords: Any) -> Tensor:
        nonlocal count
        count += 1
        logits = forward(*arguments, **keywords)
        return logits * torch.nan if count == 4 else logits

    monkeypatch.setattr(target, "forward", fail_later)
    run = decode(target, [SYSTEM], max_new_tokens=21)
    assert len(run.outputs[0]) == 3
    expected = text_target()
    expected.prefix_cache, before = PrefixCache(PLENTY), len(cache_of(target))
    decode(expected, [SYSTEM], max_new_tokens=1)
    assert before == len(cache_of(expected)), "the blocks of the prompt alone"


def test_conversations_share_their_system_prompt_once() -> None:
    target = text_target()
    decode(target, [SYSTEM], max_new_tokens=1)
    alone = len(cache_of(target))
    for seed in range(10):
        run = decode(target, [[*SYSTEM[:64], *random_tokens(16, seed + 1)]], max_new_tokens=1)
        assert run.stats.cached_prompt_tokens == 64
    assert len(cache_of(target)) == alone + 10


def test_memory_is_bounded_and_the_least_recently_used_goes_first() -> None:
    fresh = text_target(None)
    limit = 12 * (16 * cached_bytes(fresh.config, torch.float64) + HOST_BYTES)
    target = text_target(limit * 8 // 7 + 8)  # an eighth is for images
    cache = cache_of(target)
    for seed in range(12):
        prompt = [*SYSTEM[:48], *random_tokens(40, 100 + seed)]
        run = decode(target, [prompt], max_new_tokens=4)
        assert run.outputs == decode(fresh, [prompt], max_new_tokens=4).outputs
        assert run.stats.cached_prompt_tokens == (48 if seed else 0), "the shared blocks are used each time"
        assert cache.nbytes() <= cache.max_bytes and len(cache) <= 12
    assert len(cache) == 12 and cache.usage == 1.0
    first = decode(target, [[*SYSTEM[:48], *random_tokens(40, 100), 5]], max_new_tokens=4)
    assert first.stats.cached_prompt_tokens == 48, "the rest of the first prompt was dropped"


def test_a_limit_below_one_block_stores_nothing() -> None:
    target = text_target(1000)
    for _ in range(2):
        assert decode(target, [SYSTEM], max_new_tokens=4).stats.cached_prompt_tokens == 0
    assert len(cache_of(target)) == cache_of(target).nbytes() == 0


def test_memory_that_runs_out_lowers_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    target, fresh = text_target(), text_target(None)
    decode(target, [SYSTEM], max_new_tokens=2)
    allocate = Tensor.new_empty

    def refuse(self: Tensor, *size: Any, **how: Any) -> Tensor:
        if size and size[0] > 64:
            raise torch.OutOfMemoryError("no memory")
        return allocate(self, *size, **how)

    monkeypatch.setattr(Tensor, "new_empty", refuse)
    for seed in range(4):
        prompt = random_tokens(600, seed)
        outputs = decode(target, [prompt], max_new_tokens=4).outputs
        assert outputs == decode(fresh, [prompt], max_new_tokens=4).outputs
    assert len(cache_of(target)) == 64
    again = decode(target, [[*prompt, 7]], max_new_tokens=4)
    assert again.stats.cached_prompt_tokens == len(prompt) + 3 - 3 and len(cache_of(target)) == 64


def test_new_taps_are_stored_for_known_blocks() -> None:
    """A tap that is new to the cache empties it; one that blocks lack is added to them."""
    target, fresh = text_target(), text_target(None)
    one, other = ({"input_ids": torch.tensor([tokens])} for tokens in (SYSTEM, random_tokens(70, 1)))
    calls: list[tuple[Any, tuple[int, ...], int]] = [
        *((one, (), 0), (one, (0,), 0), (one, (0,), 69), (one, (), 69)),
        *((other, (), 0), (other, (), 69), (other, (0,), 0), (other, (0,), 69)),
        *((one, (0, 1), 0), (one, (1,), 69), (one, (0,), 69)),
    ]
    for prompt, taps, known in calls:
        with torch.inference_mode():
            state, output = target.prefill([prompt], 90, taps)
            expected_state, expected = fresh.prefill([prompt], 90, taps)
        assert output.cached_tokens == known, taps
        assert torch.allclose(output.logits, expected.logits, atol=1e-9)
        for tap in taps:
            assert torch.allclose(output.taps[tap][0], expected.taps[tap][0], atol=1e-9)
        for each in (state, expected_state):
            each.close()


@pytest.mark.parametrize("change", ["tokens", "positions", "state", "image"])
def test_a_block_depends_on_all_of_its_inputs(change: str) -> None:
    item = MediaItem(2, 5, b"a" * 16)
    one = PromptIdentity(torch.arange(9), torch.arange(9)[None], (item,), state=1)
    other: dict[str, Any] = {
        "tokens": {"tokens": one.tokens + (one.tokens == 3)},
        "positions": {"positions": one.positions + (one.positions == 3)},
        "state": {"state": 2},
        "image": {"items": (MediaItem(2, 5, b"b" * 16),)},
    }[change]
    changed = PromptIdentity(**{**vars_of(one), **other})
    assert one.ends(4) == [2, 5, 9]
    agree = [a == b for a, b in zip(one.keys(4), changed.keys(4), strict=True)]
    assert agree == [change != "state", False, False]


def vars_of(prompt: PromptIdentity) -> dict[str, Any]:
    return {name: getattr(prompt, name) for name in ("tokens", "positions", "items", "state", "offset")}


SPLIT = ("llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # families with one item per image


@pytest.mark.parametrize("name", sorted(VISION_LANGUAGE_FAMILIES))
@pytest.mark.every(4)
def test_images_have_their_tokens_rows_and_digest(name: str) -> None:
    model, _ = family_of(name)

    def items_of(*images: Any) -> tuple[MediaItem, ...]:
        inputs = inputs_of(name, user_message("what is there ?", images))
        inputs.pop("attention_mask", None)
        return find_items(model.config, inputs, media_of(inputs))

    (one,), (other,), both = items_of(IMAGE), items_of(ANOTHER), items_of(IMAGE, ANOTHER)
    assert items_of() == () and one.digest != other.digest and items_of(IMAGE) == (one,)
    inputs = inputs_of(name, user_message("what is there ?", [IMAGE, ANOTHER]))
    assert len(both) == (2 if name in SPLIT else len(both))
    if len(both) == 2:
        assert [item.digest for item in both] == [one.digest, other.digest]
        whole = [torch.cat([item.part(inputs)[key] for item in both]) for key in both[0].rows]
        assert all(torch.equal(inputs[key], each) for key, each in zip(both[0].rows, whole, strict=True))
        tokens = inputs["input_ids"][0]
        assert all(len(tokens[item.start : item.stop].unique()) <= 2 for item in both)


def encoder_runs(target: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the forward passes of a vision encoder; hooks would switch the cache off."""
    parts, runs = target.model.model, list[int]()
    tower = type(getattr(parts, "vision_tower", None) or getattr(parts, "visual", None) or parts.vision_model)
    see = tower.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        runs.append(1)
        return see(self, *args, **kwargs)

    monkeypatch.setattr(tower, "forward", counted)
    return runs


needs_encoded_images = pytest.mark.skipif(
    not TAKES_ENCODED_IMAGES, reason="models of this transformers do not take encoded images"
)


@needs_encoded_images
@pytest.mark.parametrize("name", [*SPLIT, "llava_onevision", "smolvlm"])
@pytest.mark.every(3)
def test_a_known_image_behind_another_text_is_not_encoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, fresh = image_target(name), image_target(name, None)
    text, image = {"type": "text", "text": "which colour ?"}, {"type": "image", "image": IMAGE}
    runs = encoder_runs(target, monkeypatch)
    prompts = [user_message("what is there ?", [IMAGE]), [{"role": "user", "content": [text, image]}]]
    prompts += [user_message("and now ?", [ANOTHER, IMAGE])]
    for index, turns in enumerate(prompts):
        inputs = inputs_of(name, turns)
        before = len(runs)
        run = answer(target, NoDrafter(), [inputs], Sampler(), 6)
        encoded = len(runs) - before
        assert run.outputs() == answer(fresh, NoDrafter(), [inputs], Sampler(), 6).outputs(), index
        assert encoded == [1, 0, 1][index]
    images = cache_of(target).images
    assert images.hits >= 1 and (images.queries, images.hits) == (4, 2) or name not in SPLIT
    assert 0 < images.nbytes() <= images.max_bytes


@needs_encoded_images
def test_encoded_images_belong_to_the_weights_and_are_bounded() -> None:
    target, fresh = image_target("llava"), image_target("llava", None)
    images = cache_of(target).images
    inputs = inputs_of("llava", user_message("what is there ?", [IMAGE]))
    for scale in (1.0, 0.5):
        for each in (target, fresh):
            with torch.no_grad():
                each.model.model.multi_modal_projector.linear_1.weight.mul_(scale)
        outputs = [answer(each, NoDrafter(), [inputs], Sampler(), 6).outputs() for each in (target, fresh)]
        assert outputs[0] == outputs[1]
    assert (len(images), images.hits) == (2, 0)
    images.max_bytes = images.nbytes()
    for seed in range(3):
        message = user_message("what is there ?", [tiny_image(20 + seed, IMAGE.size)])
        answer(target, NoDrafter(), [inputs_of("llava", message)], Sampler(), 1)
        assert len(images) == 2 and images.nbytes() == images.max_bytes


def test_another_image_with_equal_tokens_shares_the_text_before_it() -> None:
    target = image_target("llava")
    model = target.model
    identities = []
    for image in (IMAGE, tiny_image(7, IMAGE.size)):
        inputs = inputs_of("llava", user_message("what is there ?", [image]))
        del inputs["attention_mask"]
        inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1])[None]
        found = identify(model, inputs, 0)
        assert found is not None
        identities.append(found)
    one, other = identities
    assert torch.equal(one.tokens, other.tokens) and len(one.items) == 1
    agree = [a == b for a, b in zip(one.keys(1), other.keys(1), strict=True)]
    assert agree == [place < one.items[0].start for place in range(len(one.tokens))]
