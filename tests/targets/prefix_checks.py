"""Checks of prompts read in two parts: tests run them on the code, planted bugs on mutants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.decoding.sampling import Sampler
from mmspec.drafters.none import NoDrafter
from mmspec.targets import CausalTarget, VisionLanguageTarget
from mmspec.targets.prefix import PrefixCache
from tests.drafters.flash_checks import answer
from tests.tiny_models import (
    VISION_LANGUAGE_FAMILIES,
    encode,
    tiny_image,
    tiny_images,
    tiny_llama,
    user_message,
)

FAMILIES = ["llava", "qwen2_5_vl"]
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
    target.prefix_cache = None if limit is None else PrefixCache(limit)
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


def a_conversation_is_read_as_afresh(family: str = "qwen2_5_vl") -> None:
    """Turn by turn: keys, values, logits, hidden states, positions; every known token is known."""
    taps = (0, 1, -1)
    inputs = inputs_of(family, torch.float64)
    target, fresh = (target_of(family, torch.float64, limit) for limit in (PLENTY, None))
    before = 0
    for case in CONVERSATION:
        length, known = assert_states_agree(target, fresh, [inputs[case]], taps)
        assert known == before, case
        before = length


def another_image_is_no_hit(family: str = "llava") -> None:
    """The same words about another image of the same size."""
    inputs = inputs_of(family, torch.float64)
    target, fresh = (target_of(family, torch.float64, limit) for limit in (PLENTY, None))
    assert_states_agree(target, fresh, [inputs["first"]])
    *_, known = assert_states_agree(target, fresh, [inputs["another image"]])
    assert known == 0


def rows_of_a_batch_share(family: str = "llava") -> None:
    """Three rows: the second knows the image of the first; a later batch hits in two rows of three."""
    inputs = inputs_of(family, torch.float64)
    target, fresh = (target_of(family, torch.float64, limit) for limit in (PLENTY, None))
    names = ["first", "another question", "no image"]
    *_, known = assert_states_agree(target, fresh, [inputs[case] for case in names], (-1,))
    shared = common(inputs["first"], inputs["another question"])
    assert known == shared
    names = ["second", "another image", "no image, second"]
    *_, known = assert_states_agree(target, fresh, [inputs[case] for case in names], (-1,))
    assert known == inputs["first"]["input_ids"].shape[1] + inputs["no image"]["input_ids"].shape[1]


def common(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> int:
    """Number of leading tokens that two prompts share."""
    pairs = zip(one["input_ids"][0].tolist(), other["input_ids"][0].tolist(), strict=False)
    return next(index for index, (ours, theirs) in enumerate(pairs) if ours != theirs)


def changed_weights_are_no_hit() -> None:
    """A step of training in between makes the cache miss."""
    inputs = inputs_of("llava", torch.float64)
    target, fresh = (target_of("llava", torch.float64, limit) for limit in (PLENTY, None))
    assert_states_agree(target, fresh, [inputs["first"]])
    for each in (target, fresh):
        with torch.no_grad():
            each.model.get_input_embeddings().weight.mul_(1.5)
    *_, known = assert_states_agree(target, fresh, [inputs["second"]])
    assert known == 0


def callers_may_write_into_their_tensors() -> None:
    """Prompts come in a buffer that is used again, for another image and with other words."""
    inputs = inputs_of("llava", torch.float64)
    target, fresh = (target_of("llava", torch.float64, limit) for limit in (PLENTY, None))
    buffer = {name: value.clone() for name, value in inputs["first"].items()}
    assert_states_agree(target, fresh, [buffer])
    for name, value in buffer.items():
        value.copy_(inputs["another image"][name])
    *_, known = assert_states_agree(target, fresh, [buffer])
    assert known == 0


def other_taps_are_no_hit() -> None:
    """A prompt read without hidden states does not serve a drafter that needs them; the reverse does."""
    inputs = inputs_of("llava", torch.float64)
    target, fresh = (target_of("llava", torch.float64, limit) for limit in (PLENTY, None))
    assert assert_states_agree(target, fresh, [inputs["first"]])[-1] == 0
    assert assert_states_agree(target, fresh, [inputs["second"]], (0, -1))[-1] == 0
    expected = inputs["second"]["input_ids"].shape[1]
    assert assert_states_agree(target, fresh, [inputs["third, with a new image"]], (-1,))[-1] == expected


@contextmanager
def counted(model: nn.Module) -> Iterator[dict[str, list[int]]]:
    """Count the model's work meanwhile: tokens per forward, and calls of the vision tower."""
    seen: dict[str, list[int]] = {"tokens": [], "images": []}
    parts: Any = model.model
    tower = getattr(parts, "vision_tower", getattr(parts, "visual", None))

    def count_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        seen["tokens"].append((args[0] if args else kwargs["hidden_states"]).shape[1])

    def count_images(module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        pixels = args[0] if args else next(iter(kwargs.values()))
        seen["images"].append(len(kwargs["grid_thw"]) if "grid_thw" in kwargs else len(pixels))

    handles = [
        model.get_decoder().layers[0].register_forward_pre_hook(count_tokens, with_kwargs=True),
        tower.register_forward_pre_hook(count_images, with_kwargs=True),
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def known_images_are_not_read(family: str = "qwen2_5_vl") -> None:
    """The model is run on what is new alone: tokens, and images."""
    inputs, target = inputs_of(family), target_of(family)
    lengths = [inputs[case]["input_ids"].shape[1] for case in CONVERSATION]
    with counted(target.model) as seen:
        for case in CONVERSATION:
            answer(target, NoDrafter(), [inputs[case]], Sampler(), 1)
    assert seen["tokens"] == [lengths[0], lengths[1] - lengths[0], lengths[2] - lengths[1]]
    assert seen["images"] == [1, 1], "one for the first turn, none for the second, the new one for the third"
