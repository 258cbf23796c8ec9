"""Prompts that share a prefix with earlier ones: outputs of a new run, without computing the prefix again."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from mmspec.core.interfaces import Drafter
from mmspec.core.plain import NoDrafter
from mmspec.core.sampling import Sampler
from mmspec.heads.feature_session import GrownTreeDrafter
from mmspec.methods.copy.drafter import CopyDrafter
from mmspec.methods.flash.drafter import FlashDrafter
from mmspec.targets import CausalTarget, VisionLanguageTarget
from mmspec.targets.encoded_images import Encoded
from mmspec.targets.prefix import PrefixCache, PromptIdentity, identify
from tests.methods import eagle_checks, flash_checks
from tests.methods.flash_checks import answer
from tests.targets.loop import generate
from tests.tiny_models import (
    VISION_LANGUAGE_FAMILIES,
    encode,
    tiny_image,
    tiny_images,
    tiny_llama,
    user_message,
)
from tests.versions import TAKES_ENCODED_IMAGES

PLENTY = 2**30
IMAGE, ANOTHER, *_ = tiny_images()
FIRST = user_message("what is there ?", [IMAGE])


def after(turns: list[dict[str, Any]], reply: str, following: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation that goes on."""
    return [*turns, {"role": "assistant", "content": [{"type": "text", "text": reply}]}, *following]


SECOND = after(FIRST, "a red circle", user_message("which colour is it ?"))
MESSAGES = {
    "first": FIRST,
    "second": SECOND,
    "third, with a new image": after(SECOND, "red", user_message("and there ?", [ANOTHER])),
    "another question": user_message("what colour is it ?", [IMAGE]),
    "another image": user_message("what is there ?", [tiny_image(7, IMAGE.size)]),
    "the image twice": user_message("what is there ?", [IMAGE, IMAGE]),
    "no image": user_message("what is there ?"),
    "no image, second": after(user_message("what is there ?"), "a red circle", user_message("why ?")),
}
CONVERSATION = ("first", "second", "third, with a new image")


def target_of(family: str, dtype: torch.dtype = torch.float32, limit: int | None = PLENTY) -> CausalTarget:
    """Make a fresh target with an empty prefix cache; without a limit, one that has none."""
    if family == "text":
        target = CausalTarget(tiny_llama(vocab=128).to(dtype))
    else:
        target = VisionLanguageTarget(VISION_LANGUAGE_FAMILIES[family]()[0].to(dtype))
    target.prefix_cache = None if limit is None else PrefixCache(limit, block=1)
    return target


def inputs_of(family: str, dtype: torch.dtype = torch.float32) -> dict[str, dict[str, Any]]:
    """The model's inputs for every one of `MESSAGES`; for text alone, of those without an image."""
    _, processor = VISION_LANGUAGE_FAMILIES["llava" if family == "text" else family]()
    cases = [case for case in MESSAGES if family != "text" or case.startswith("no image")]
    return {
        case: {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in encode(processor, MESSAGES[case]).items()
        }
        for case in cases
    }


def assert_states_agree(
    target: CausalTarget, fresh: CausalTarget, batch: Sequence[Mapping[str, Any]], taps: Sequence[int] = ()
) -> list[int]:
    """Prefill a batch with both targets. Returns the tokens of each row, and how many of all were known."""
    lengths = [inputs["input_ids"].shape[1] for inputs in batch]
    with torch.inference_mode():
        state, output = target.prefill(batch, max(lengths) + 8, taps)
        expected_state, expected = fresh.prefill(batch, max(lengths) + 8, taps)
    assert close(output.logits, expected.logits), "logits"
    for tap in taps:
        for row, hidden in enumerate(expected.taps[tap]):
            assert close(output.taps[tap][row], hidden), f"hidden states at {tap} of row {row}"
    assert torch.equal(state.offset, expected_state.offset), "offset"
    assert torch.equal(state.cache.lengths, expected_state.cache.lengths), "lengths"
    for row, length in enumerate(lengths):
        ours, theirs = (each.cache.row_states(row, length) for each in (state, expected_state))
        assert ours.keys() == theirs.keys(), f"layers of row {row}"
        for layer, states in theirs.items():
            assert all(map(close, ours[layer], states)), f"keys or values of row {row}, layer {layer}"
    assert expected.cached_tokens == 0
    return [*lengths, output.cached_tokens]


def close(ours: Tensor, theirs: Tensor) -> bool:
    """Equal up to the rounding of float64."""
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9)


DRAFTERS: dict[str, Callable[[CausalTarget], Drafter]] = {
    "none": lambda target: NoDrafter(),
    "copy": lambda target: CopyDrafter(),
    "eagle": lambda target: GrownTreeDrafter(eagle_checks.head_for(target), 8, depth=3, top_k=3),
    "flash": lambda target: FlashDrafter(flash_checks.head_for(target)),
}
QUESTIONS = (*CONVERSATION, "another question", "another image", "the image twice", "no image", "first")


@pytest.mark.parametrize("family", ["llava_next", "qwen2_5_vl"])
def test_a_conversation_is_read_as_afresh(family: str) -> None:
    """Turn by turn: keys, values, logits, hidden states, positions; every known token is known."""
    taps = (0, 1, -1)
    inputs = inputs_of(family, torch.float64)
    target, fresh = (target_of(family, torch.float64, limit) for limit in (PLENTY, None))
    before = 0
    for case in CONVERSATION:
        length, known = assert_states_agree(target, fresh, [inputs[case]], taps)
        assert known == before, case
        before = length


def test_rows_of_a_batch_share() -> None:
    """Three rows: the second knows the image of the first; a later batch hits in two rows of three."""
    inputs = inputs_of("llava", torch.float64)
    target, fresh = (target_of("llava", torch.float64, limit) for limit in (PLENTY, None))
    names = ["first", "another question", "no image"]
    *_, known = assert_states_agree(target, fresh, [inputs[case] for case in names], (-1,))
    shared = common(inputs["first"], inputs["another question"])
    assert known == shared + common(inputs["first"], inputs["no image"]), "the tokens before the image too"
    names = ["second", "another image", "no image, second"]
    *_, known = assert_states_agree(target, fresh, [inputs[case] for case in names], (-1,))
    assert known == inputs["first"]["input_ids"].shape[1] + inputs["no image"]["input_ids"].shape[1]


def common(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> int:
    """Number of leading tokens that two prompts share."""
    pairs = zip(one["input_ids"][0].tolist(), other["input_ids"][0].tolist(), strict=False)
    return next(index for index, (ours, theirs) in enumerate(pairs) if ours != theirs)


def test_known_images_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model runs on new tokens and images only."""
    inputs, target = inputs_of("qwen2_5_vl"), target_of("qwen2_5_vl")
    lengths = [inputs[case]["input_ids"].shape[1] for case in CONVERSATION]
    seen: dict[str, list[int]] = {"tokens": [], "images": []}
    parts: Any = target.model.model
    decoder, tower = type(parts.language_model), type(parts.visual)  # a hook would disable the cache
    decode_all, see = decoder.forward, tower.forward

    def counted_decoder(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen["tokens"].append(kwargs["inputs_embeds"].shape[1])
        return decode_all(self, *args, **kwargs)

    def counted_tower(self: nn.Module, pixels: Tensor, grid_thw: Tensor, **kwargs: Any) -> Any:
        seen["images"].append(len(grid_thw))
        return see(self, pixels, grid_thw, **kwargs)

    monkeypatch.setattr(decoder, "forward", counted_decoder)
    monkeypatch.setattr(tower, "forward", counted_tower)
    for case in CONVERSATION:
        answer(target, NoDrafter(), [inputs[case]], Sampler(), 1)
    assert seen["tokens"] == [lengths[0], lengths[1] - lengths[0], lengths[2] - lengths[1]]
    assert seen["images"] == [1, 1], "one for the first turn, none for the second, the new one for the third"


@pytest.mark.parametrize("family", sorted(VISION_LANGUAGE_FAMILIES))
@pytest.mark.every(4)
def test_every_family_answers_as_generate(family: str) -> None:
    target, inputs, known = target_of(family), inputs_of(family), {}
    for case in QUESTIONS:
        run = answer(target, NoDrafter(), [inputs[case]], Sampler(), 6)
        assert run.outputs() == [generate(target.model, inputs[case], 6)], case
        known[case] = run.stats.cached_prompt_tokens
    assert known["second"] == inputs["first"]["input_ids"].shape[1]
    assert known["another question"] == common(inputs["first"], inputs["another question"])
    assert known["another image"] == 0


@pytest.mark.parametrize(
    ("name", "family"),
    [("none", "qwen2_5_vl"), ("copy", "llava"), ("eagle", "qwen2_5_vl"), ("flash", "llava")],
)
@pytest.mark.every(2)
def test_every_drafter_drafts_and_answers_as_afresh(name: str, family: str) -> None:
    """In float64, with bitwise equality: turn by turn, then as rows of a batch with different hits."""
    inputs = inputs_of(family, torch.float64)
    target, fresh = (target_of(family, torch.float64, limit) for limit in (PLENTY, None))
    batches = [[case] for case in CONVERSATION] + [["another question", "another image", CONVERSATION[2]]]
    for sampler in (Sampler(), Sampler(0.8, top_p=0.95)):
        for cases in batches:
            rows = [inputs[case] for case in cases]
            ours, theirs = (
                answer(each, DRAFTERS[name](each).fit(each), rows, sampler, 8, seed=range(len(rows)))
                for each in (target, fresh)
            )
            assert ours.outputs() == theirs.outputs(), (cases, sampler)
            assert ours.stats.accepted_histogram == theirs.stats.accepted_histogram, (cases, sampler)
            assert ours.stats.drafted == theirs.stats.drafted, (cases, sampler)
            assert theirs.stats.cached_prompt_tokens == 0
            assert ours.stats.cached_prompt_tokens > 0 or cases == [CONVERSATION[0]]


def prompt_of(*tokens: int) -> PromptIdentity:
    return PromptIdentity(torch.tensor(tokens), torch.arange(len(tokens))[None], (), state=0)


def states_of(prompt: PromptIdentity) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """One layer, one head of 25 float32: 200 bytes a token, besides 16 of its id and position."""
    keys = torch.zeros(len(prompt.tokens), 1, 25)
    return {0: (keys, keys + 1)}


def test_the_last_token_is_always_read_and_a_short_beginning_does_not_pay() -> None:
    cache, prompt = PrefixCache(PLENTY, block=1), prompt_of(1, 2, 3, 4)
    cache.keep(prompt, states_of(prompt), {})
    again = cache.find(prompt, ())
    assert again is not None and again.length == len(again.states[0][0]) == 3
    assert cache.find(prompt_of(1, 2, *[9] * 6), ()) is not None
    assert cache.find(prompt_of(1, 2, *[9] * 7), ()) is None


@pytest.mark.parametrize(
    "more",
    [
        {"token_type_ids": torch.zeros(1, 12)},
        {"cross_attention_mask": torch.zeros(1, 12)},
        {"mm_encoder_outputs": {"image": None}},
        {"mm_token_type_ids": torch.zeros(1, 12)},
        {"image_sizes": None},
    ],
    ids=lambda more: next(iter(more)),
)
def test_what_cannot_be_cut_is_read_whole(more: dict[str, object]) -> None:
    model, inputs = target_of("llava").model, dict(inputs_of("llava")["first"])
    inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1])[None]
    del inputs["attention_mask"]
    assert identify(model, inputs, 0) is not None
    assert identify(model, {**inputs, **more}, 0) is None


@pytest.mark.skipif(not TAKES_ENCODED_IMAGES, reason="models of this transformers do not take encoded images")
@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_threads_encode_an_image_once_for_its_prefill(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests with one image, prepared at once: the prefills run no encoder, and count one hit."""
    inputs, runs = inputs_of(family), list[object]()
    target, fresh = target_of(family), target_of(family, limit=None)
    kind = type(target.model.model)
    see = kind.get_image_features

    @functools.wraps(see)
    def counted(*args: Any, **kwargs: Any) -> Any:
        runs.append(args)
        time.sleep(0.05)  # so that the other thread asks meanwhile
        return see(*args, **kwargs)

    monkeypatch.setattr(kind, "get_image_features", counted)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(target.encode_ahead, [inputs["first"], inputs["another question"]]))
    assert len(runs) == 1
    monkeypatch.setattr(target.prefix_cache, "find", lambda *args: None)
    before = len(runs)
    with torch.inference_mode():
        for case in ("first", "another question"):
            state, output = target.prefill([inputs[case]], 64)
            assert len(runs) == before
            other, expected = fresh.prefill([inputs[case]], 64)
            assert torch.equal(output.logits, expected.logits)
            before = len(runs)
            state.close()
            other.close()
    images = target.prefix_cache.images  # type: ignore[union-attr]
    assert (images.queries, images.hits) == (2, 1)


def test_a_prefill_waits_for_an_image_of_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the memory of the image is held until the prefill's stream has read it."""
    first, second, seen, event = torch.ones(2), torch.zeros(3), list[Any](), Any
    stream = SimpleNamespace(wait_event=seen.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(Tensor, "record_stream", lambda each, by: seen.append((id(each), by)))
    output = ModelOutput(pooler_output=[first], deepstack_features=[second])
    assert Encoded(output, event).awaited() is output
    assert seen == [event, (id(first), stream), (id(second), stream)]


def test_placeholders_and_images_go_together() -> None:
    model, inputs = target_of("llava").model, dict(inputs_of("llava")["first"])
    positions = torch.arange(inputs["input_ids"].shape[1])[None]
    assert identify(model, {"input_ids": inputs["input_ids"], "position_ids": positions}, 0) is None
    words = inputs["input_ids"].clamp(max=3)
    images = {"pixel_values": inputs["pixel_values"]}
    assert identify(model, {"input_ids": words, "position_ids": positions, **images}, 0) is None
