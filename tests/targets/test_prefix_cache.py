"""Prompts that begin like earlier ones: outputs of a fresh run, and what is known is not read again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mmspec.decoding.interfaces import Drafter
from mmspec.decoding.sampling import Sampler
from mmspec.drafters.copy import CopyDrafter
from mmspec.drafters.eagle import EagleDrafter
from mmspec.drafters.flash import FlashDrafter
from mmspec.drafters.none import NoDrafter
from mmspec.errors import InputError
from mmspec.targets import CausalTarget
from mmspec.targets.prefix import PrefixCache, PromptIdentity, identify
from tests.contracts.mutation import PlantedBug
from tests.contracts.running import decode
from tests.drafters import eagle_checks, flash_checks
from tests.drafters.flash_checks import answer
from tests.targets import prefix_checks
from tests.targets.loop import generate
from tests.targets.prefix_checks import CONVERSATION, FAMILIES, PLENTY, inputs_of, target_of
from tests.tiny_models import VISION_LANGUAGE_FAMILIES, tiny_lm, tiny_qwen2_mixed_sliding

DRAFTERS: dict[str, Callable[[CausalTarget], Drafter]] = {
    "none": lambda target: NoDrafter(),
    "copy": lambda target: CopyDrafter(),
    "eagle": lambda target: EagleDrafter(eagle_checks.head_for(target), 8, depth=3, top_k=3),
    "flash": lambda target: FlashDrafter(flash_checks.head_for(target)),
}
QUESTIONS = (*CONVERSATION, "another question", "another image", "the image twice", "no image", "first")
TARGET, PREFIX = "mmspec.targets.causal:CausalTarget", "mmspec.targets.prefix"


@pytest.mark.parametrize("family", [*FAMILIES, "llava_next", "qwen3_vl"])
def test_a_conversation_is_read_as_afresh(family: str) -> None:
    prefix_checks.a_conversation_is_read_as_afresh(family)


@pytest.mark.parametrize("family", sorted(VISION_LANGUAGE_FAMILIES))
def test_every_family_answers_as_generate(family: str) -> None:
    target, inputs, known = target_of(family), inputs_of(family), {}
    for case in QUESTIONS:
        run = answer(target, NoDrafter(), [inputs[case]], Sampler(), 12)
        assert run.outputs() == [generate(target.model, inputs[case], 12)], case
        known[case] = run.stats.cached_prompt_tokens
    assert known["second"] == inputs["first"]["input_ids"].shape[1]
    assert known["another question"] == prefix_checks.common(inputs["first"], inputs["another question"])
    assert known["another image"] == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_drafts_and_answers_as_afresh(name: str, family: str) -> None:
    """In float64, where outputs are bitwise: turn by turn, then as rows of a batch that hit differently."""
    inputs = inputs_of(family, torch.float64)
    target, fresh = (target_of(family, torch.float64, limit) for limit in (PLENTY, None))
    batches = [[case] for case in CONVERSATION] + [["another question", "another image", CONVERSATION[2]]]
    for sampler in (Sampler(), Sampler(0.8, top_p=0.95)):
        for cases in batches:
            rows = [inputs[case] for case in cases]
            ours, theirs = (
                answer(each, DRAFTERS[name](each).fit(each), rows, sampler, 12, seed=range(len(rows)))
                for each in (target, fresh)
            )
            assert ours.outputs() == theirs.outputs(), (cases, sampler)
            assert ours.stats.accepted_histogram == theirs.stats.accepted_histogram, (cases, sampler)
            assert ours.stats.drafted == theirs.stats.drafted, (cases, sampler)
            assert theirs.stats.cached_prompt_tokens == 0
            assert ours.stats.cached_prompt_tokens > 0 or cases == [CONVERSATION[0]]


@pytest.mark.parametrize("family", FAMILIES)
def test_known_images_are_not_read(family: str) -> None:
    prefix_checks.known_images_are_not_read(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_image_is_no_hit(family: str) -> None:
    prefix_checks.another_image_is_no_hit(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_batch_share(family: str) -> None:
    prefix_checks.rows_of_a_batch_share(family)


def test_changed_weights_are_no_hit() -> None:
    prefix_checks.changed_weights_are_no_hit()


def test_callers_may_write_into_their_tensors() -> None:
    prefix_checks.callers_may_write_into_their_tensors()


def test_other_taps_are_no_hit() -> None:
    prefix_checks.other_taps_are_no_hit()


def test_eager_attention() -> None:
    target, inputs = target_of("qwen2_5_vl"), inputs_of("qwen2_5_vl")
    target.model.set_attn_implementation("eager")
    for case in CONVERSATION:
        run = answer(target, NoDrafter(), [inputs[case]], Sampler(), 12)
        assert run.outputs() == [generate(target.model, inputs[case], 12)], case
        assert bool(run.stats.cached_prompt_tokens) == (case != CONVERSATION[0])


@pytest.mark.parametrize("make", [tiny_lm, tiny_qwen2_mixed_sliding])
def test_text_and_guidance(make: Callable[[], torch.nn.Module]) -> None:
    """Full and sliding attention; the unconditional rows have prefixes of their own."""
    model = make().double()  # type: ignore[attr-defined]
    target, fresh = CausalTarget(model), CausalTarget(model)
    target.prefix_cache = PrefixCache(PLENTY)
    words = torch.arange(30).remainder(model.config.vocab_size).tolist()
    for length in (10, 17, 30):
        prompts, negatives = [words[:length]], [words[::-1][: length - 3]]
        sampler = Sampler(guidance_scale=1.5)
        ours, theirs = (
            decode(each, prompts, sampler=sampler, negatives=negatives, max_new_tokens=12)
            for each in (target, fresh)
        )
        assert ours.outputs == theirs.outputs
        assert ours.stats.cached_prompt_tokens == {10: 0, 17: 10 + 7, 30: 17 + 14}[length]


def prompt_of(*tokens: int, images: torch.Tensor | None = None, end: int = 0) -> PromptIdentity:
    media = {} if images is None else {"pixel_values": images}
    return PromptIdentity(torch.tensor(tokens), torch.arange(len(tokens))[None], media, end, 0)


def states_of(prompt: PromptIdentity) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """One layer, one head of 25 float32: 200 bytes a token, besides 16 of its id and position."""
    keys = torch.zeros(len(prompt.tokens), 1, 25)
    return {0: (keys, keys + 1)}


def test_what_was_used_longest_ago_goes_first() -> None:
    prompts = [prompt_of(*[first] * 4) for first in (1, 2, 3, 4)]
    cache = PrefixCache(3 * 4 * 216)
    for prompt in prompts[:3]:
        cache.keep(prompt, states_of(prompt), {})
    assert cache.nbytes() == cache.max_bytes
    found = cache.find(prompt_of(1, 1, 1, 1, 9), ())
    assert found is not None and found.length == 4
    cache.keep(prompts[3], states_of(prompts[3]), {})
    assert [int(entry.prompt.tokens[0]) for entry in cache.entries] == [3, 1, 4]
    large = prompt_of(*range(20))
    cache.keep(large, states_of(large), {})
    assert [int(entry.prompt.tokens[0]) for entry in cache.entries] == [3, 1, 4], "too large to be kept"


def test_a_longer_prompt_replaces_its_beginning() -> None:
    cache = PrefixCache(PLENTY)
    image = torch.rand(1, 3, 2, 2)
    one, longer = prompt_of(1, 2, images=image, end=1), prompt_of(1, 2, 3, images=image, end=1)
    more = prompt_of(1, 2, 3, 1, images=torch.cat([image, image]), end=4)
    for prompt in (one, longer):
        cache.keep(prompt, states_of(prompt), {})
    assert [entry.prompt for entry in cache.entries] == [longer]
    cache.keep(more, states_of(more), {})
    assert [entry.prompt for entry in cache.entries] == [longer, more], "one image fits where two do not"
    cache.keep(longer, states_of(longer), {0: torch.zeros(1, 3, 8)})
    assert len(cache.entries) == 2 and [len(entry.taps) for entry in cache.entries] == [0, 1]
    cache.keep(longer, states_of(longer), {})
    assert len(cache.entries) == 3, "what drafters need of it is not forgotten"


def test_the_last_token_is_always_read_and_a_short_beginning_does_not_pay() -> None:
    cache, prompt = PrefixCache(PLENTY), prompt_of(1, 2, 3, 4)
    cache.keep(prompt, states_of(prompt), {})
    again = cache.find(prompt, ())
    assert again is not None and again.length == len(again.states[0][0]) == 3
    assert cache.find(prompt_of(1, 2, *[9] * 6), ()) is not None
    assert cache.find(prompt_of(1, 2, *[9] * 7), ()) is None


def test_half_a_image_is_not_taken_over() -> None:
    cache, image = PrefixCache(PLENTY), torch.rand(1, 3, 2, 2)
    prompt = prompt_of(1, 7, 7, 7, 2, images=image, end=4)
    cache.keep(prompt, states_of(prompt), {})
    assert cache.find(prompt_of(1, 7, 7, 7, images=image, end=4), ()) is None
    assert cache.find(prompt_of(1, 7, 7, 3, images=image, end=3), ()) is None


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
    assert identify(model, inputs) is not None
    assert identify(model, {**inputs, **more}) is None


def test_placeholders_and_images_go_together() -> None:
    model, inputs = target_of("llava").model, dict(inputs_of("llava")["first"])
    positions = torch.arange(inputs["input_ids"].shape[1])[None]
    assert identify(model, {"input_ids": inputs["input_ids"], "position_ids": positions}) is None
    words = inputs["input_ids"].clamp(max=3)
    images = {"pixel_values": inputs["pixel_values"]}
    assert identify(model, {"input_ids": words, "position_ids": positions, **images}) is None


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, None])
def test_a_limit_is_a_positive_number_of_bytes(limit: object) -> None:
    with pytest.raises(InputError, match="max_bytes"):
        PrefixCache(limit)  # type: ignore[arg-type]


BUGS = {
    "images are not compared": PlantedBug(
        f"{PREFIX}:PromptIdentity.shared_with",
        (("not torch.equal(own, other[: len(own)])", "False"),),
        prefix_checks.another_image_is_no_hit,
    ),
    "positions of the rest start at zero": PlantedBug(
        f"{TARGET}._read_rest",
        (("{**rest, ", '{**rest, "position_ids": torch.arange(length - known.length)[None], '),),
        lambda: prefix_checks.a_conversation_is_read_as_afresh("llava"),
    ),
    "positions of the rest are counted, not those of M-RoPE": PlantedBug(
        f"{TARGET}._read_rest",
        (("{**rest, ", '{**rest, "position_ids": torch.arange(known.length, length)[None], '),),
        prefix_checks.a_conversation_is_read_as_afresh,
    ),
    "hidden states of the rest alone": PlantedBug(
        f"{TARGET}._read_prompt",
        (("torch.cat([known.taps[tap], hidden[tap]], 1)", "hidden[tap]"),),
        prefix_checks.a_conversation_is_read_as_afresh,
    ),
    "keys of the rest alone": PlantedBug(
        f"{TARGET}._read_rest",
        (("cache.load(alone", "(lambda states: None)(alone"),),
        prefix_checks.a_conversation_is_read_as_afresh,
    ),
    "every row gets the first row's states": PlantedBug(
        f"{TARGET}._read_prompt",
        (("cache.row_states(row,", "cache.row_states(0,"),),
        prefix_checks.rows_of_a_batch_share,
    ),
    "weights are not compared": PlantedBug(
        f"{PREFIX}:PromptIdentity.shared_with",
        (("self.weights != prompt.weights", "False"),),
        prefix_checks.changed_weights_are_no_hit,
    ),
    "the caller's own tensors are kept": PlantedBug(
        f"{PREFIX}:own_copy",
        (('.to("cpu", copy=True)', '.to("cpu")'),),
        prefix_checks.callers_may_write_into_their_tensors,
    ),
    "nothing is found": PlantedBug(
        f"{PREFIX}:PrefixCache.find",
        (("if not fitting:", "if fitting or not fitting:"),),
        prefix_checks.known_images_are_not_read,
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name: str) -> None:
    bug = BUGS[name]
    with bug.planted(), pytest.raises(AssertionError):
        bug.check()
