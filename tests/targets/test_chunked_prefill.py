"""Prompts that are read in chunks: keys, states, logits and outputs of prompts that are read whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from mmspec.core.chunked_prefill import finish
from mmspec.core.sampling import Sampler
from mmspec.targets import CausalTarget, VisionLanguageTarget
from mmspec.targets.prefix import PrefixCache
from mmspec.visual_tokens.spans import find_images
from tests.methods.flash_checks import answer
from tests.targets.loop import generate
from tests.targets.test_causal_identity import prompt
from tests.targets.test_prefix_cache import CONVERSATION, DRAFTERS, close, inputs_of
from tests.tiny_models import HYBRID_TEXT_MODELS, STEPPED_MODELS, TEXT_MODELS, VISION_LANGUAGE_FAMILIES

LENGTHS = [45, 7, 24]  # longer than all windows, as short as a chunk, and a multiple of it
SIZE = 8
MODELS = {**TEXT_MODELS, **HYBRID_TEXT_MODELS}
SPLIT = [name for name in MODELS if name not in STEPPED_MODELS]
Prompts = Sequence[Mapping[str, Any]]


def text_target(name: str) -> CausalTarget:
    model = MODELS[name]()
    if name == "gemma2":  # its soft cap exists in eager attention alone, whose softmax is in float32
        model.set_attn_implementation("eager")
    elif name in TEXT_MODELS:  # recurrent states are in float32
        model = model.double()
    return CausalTarget(model)


@torch.inference_mode()
def chunks_of(target: CausalTarget, prompts: Prompts) -> list[int]:
    """Tokens of every forward pass of a prefill."""
    prefill, seen = target.chunked_prefill(prompts, 64), list[int]()
    while True:
        try:
            seen.append(next(prefill))
        except StopIteration as end:
            end.value[0].close()
            return seen


@torch.inference_mode()
def assert_read_alike(target: CausalTarget, prompts: Prompts, size: int, taps: Sequence[int] = ()) -> None:
    """Read prompts in chunks and whole: logits, hidden states, keys, values and recurrent states agree."""

    def close(ours: Tensor, theirs: Tensor) -> bool:
        tolerance = 1e-9 if target.dtype == torch.float64 else 1e-4
        return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)

    lengths = [inputs["input_ids"].shape[1] for inputs in prompts]
    target.prefill_tokens = size
    state, output = finish(target.chunked_prefill(prompts, max(lengths) + 8, taps))
    target.prefill_tokens = None
    expected_state, expected = target.prefill(prompts, max(lengths) + 8, taps)
    assert close(output.logits, expected.logits), "logits"
    for tap in taps:
        assert all(map(close, output.taps[tap], expected.taps[tap])), f"hidden states at {tap}"
    assert torch.equal(state.offset, expected_state.offset), "offset"
    assert torch.equal(state.cache.lengths, expected_state.cache.lengths), "lengths"
    for row, length in enumerate(lengths):
        ours, theirs = (each.cache.row_states(row, length) for each in (state, expected_state))
        for layer, states in theirs.items():
            assert all(map(close, ours[layer], states)), f"keys or values of row {row}, layer {layer}"
        for own, other in zip(state.cache.recurrent, expected_state.cache.recurrent, strict=True):
            mine, known = own.row_states(row), other.row_states(row)
            assert all(close(mine[key], known[key]) for key in known), f"recurrent state of row {row}"
    state.close()
    expected_state.close()


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.every(3)
def test_every_layer_continues(name: str) -> None:
    target, prompts = text_target(name), [prompt(length) for length in LENGTHS]
    taps = () if name == "gemma3n" else (0, 1, -1)  # Gemma 3n has several streams
    assert_read_alike(target, prompts, SIZE, taps)
    assert_read_alike(target, prompts, 1)
    target.prefill_tokens = SIZE
    assert sorted(chunks_of(target, prompts)) == [5, 7, *[8] * 8]


@pytest.mark.parametrize("name", sorted({*TEXT_MODELS, "qwen3_5"}))
@pytest.mark.every(3)
def test_short_prompts_share_a_forward_pass(name: str) -> None:
    """Padding to half of the longest; recurrent layers read each prompt alone."""
    target, lengths = text_target(name), [9, 45, 24, 12, 30, 6]
    prompts = [prompt(length) for length in lengths]
    assert_read_alike(target, prompts, 200, () if name == "gemma3n" else (0, 1, -1))
    target.prefill_tokens = 200
    is_recurrent = name in HYBRID_TEXT_MODELS
    assert chunks_of(target, prompts) == (lengths if is_recurrent else [3 * 45, 3 * 12])


@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "not stored"])
def test_prompts_share_a_forward_pass_behind_stored_prefixes(is_stored: bool) -> None:
    """Prompts that share most of their tokens: the first one is read, and then the rest of the others."""
    target, shared = text_target("qwen2_mixed_sliding"), torch.arange(40)[None] % 20 + 3
    prompts = [{"input_ids": torch.cat([shared, prompt(end)["input_ids"]], 1)} for end in (9, 5, 7)]
    target.prefix_cache, target.prefill_tokens = PrefixCache(2**30, block=8), 100
    lengths = [each["input_ids"].shape[1] for each in prompts]
    with torch.inference_mode():
        if is_stored:
            finish(target.chunked_prefill(prompts[:1], 64, (0, -1)))[0].close()
        state, output = finish(target.chunked_prefill(prompts, 64, (0, -1)))
        target.prefix_cache = target.prefill_tokens = None
        expected_state, expected = target.prefill(prompts, 64, (0, -1))
    assert output.cached == [48 if is_stored else 0, 40, 40]
    assert close(output.logits, expected.logits)
    assert all(
        close(*pair) for tap in (0, -1) for pair in zip(output.taps[tap], expected.taps[tap], strict=True)
    )
    for row, length in enumerate(lengths):
        ours, theirs = (each.cache.row_states(row, length) for each in (state, expected_state))
        assert all(close(*pair) for layer in theirs for pair in zip(ours[layer], theirs[layer], strict=True))
    for each in (state, expected_state):
        each.close()


@pytest.mark.parametrize("name", ["llama", "qwen2_mixed_sliding", "gemma2", "qwen3_5"])
def test_a_ragged_batch_answers_as_generate(name: str) -> None:
    target, prompts = text_target(name), [prompt(length) for length in LENGTHS]
    target.prefill_tokens = SIZE
    for drafter in ("none", "copy"):
        made = DRAFTERS[drafter](target)
        run = answer(target, made, prompts, Sampler(), 20)
        assert run.outputs() == [generate(target.model, row, 20) for row in prompts]


def tiny_gemma3() -> Any:
    """A Gemma 3 with four tokens for each image, which attend to one another, and a window of eight."""
    torch.manual_seed(0)
    text = {
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "head_dim": 8,
    }
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8}
    text |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 4}
    sizes = {"mm_tokens_per_image": 4, "image_token_index": 59, "boi_token_index": 58}
    config = Gemma3Config(text_config=text, vision_config=vision, **sizes)
    return Gemma3ForConditionalGeneration(config).eval().requires_grad_(False).double()


@pytest.fixture(scope="module")
def gemma3() -> tuple[VisionLanguageTarget, list[dict[str, Tensor]]]:
    """A target, and prompts with two images, with one and with none."""
    image, prompts = [58, *[59] * 4, 57], []
    for tokens in (
        [*range(3, 12), *image, 8, 9, 4, *image, *range(20, 33)],
        [5, *image, 9, 7],
        [*range(3, 20)],
    ):
        ids = torch.tensor([tokens])
        inputs = {"input_ids": ids, "token_type_ids": (ids == 59).long()}
        if count := tokens.count(58):
            inputs["pixel_values"] = (
                torch.linspace(-1, len(tokens), count * 768).sin().view(count, 3, 16, 16).double()
            )
        prompts.append(inputs)
    return VisionLanguageTarget(tiny_gemma3()), prompts


def test_images_that_attend_to_themselves_are_read_whole(gemma3: Any) -> None:
    """Gemma 3: text before and after an image is split, and short prompts with images share a pass."""
    target, prompts = gemma3
    for size in (1, 5, 64):
        assert_read_alike(target, prompts, size, (0, -1))
    target.prefill_tokens = 5
    assert chunks_of(target, prompts[:1]) == [5, 5, 5, 4, 5, 5, 5, 3]
    run = answer(target, DRAFTERS["copy"](target), prompts, Sampler(), 12)
    assert run.outputs() == [generate(target.model, row, 12) for row in prompts]


def test_prompts_with_such_images_continue_stored_ones(gemma3: Any) -> None:
    target, prompts = gemma3
    tail = {"input_ids": torch.tensor([[7, 9]]), "token_type_ids": torch.zeros(1, 2, dtype=torch.long)}
    more = [prompts[0] | {name: torch.cat([prompts[0][name], tail[name]], 1) for name in tail}]
    target.prefix_cache, target.prefill_tokens = PrefixCache(2**30, block=4), None
    with torch.inference_mode():
        target.prefill(prompts[:1], 64)[0].close()
        state, output = target.prefill(more, 64)
        target.prefix_cache = None
        other, expected = target.prefill(more, 64)
    assert output.cached_tokens == prompts[0]["input_ids"].shape[1] and close(output.logits, expected.logits)
    state.close()
    other.close()


@pytest.mark.parametrize("name", STEPPED_MODELS)
def test_models_whose_mixers_step_token_by_token_read_whole(name: str) -> None:
    target, prompts = CausalTarget(MODELS[name]()), [prompt(length) for length in LENGTHS]
    target.prefill_tokens = SIZE
    assert chunks_of(target, prompts) == LENGTHS


def test_hooks_of_users_see_whole_prompts() -> None:
    target, prompts = text_target("llama"), [prompt(length) for length in LENGTHS]
    target.prefill_tokens = SIZE
    target.model.model.layers[0].register_forward_hook(lambda module, args, output: None)
    assert chunks_of(target, prompts) == LENGTHS


@pytest.mark.parametrize("family", sorted(VISION_LANGUAGE_FAMILIES))
@pytest.mark.every(3)
def test_images_are_not_split(family: str) -> None:
    """Two images, with text before, between and after them; chunks are shorter than most images."""
    inputs = inputs_of(family, torch.float64)
    target = VisionLanguageTarget(VISION_LANGUAGE_FAMILIES[family]()[0].double())
    prompts = [inputs[case] for case in ("third, with a new image", "no image", "the image twice")]
    assert_read_alike(target, prompts, 4, (0, -1))
    target.prefill_tokens = 4
    edges = list(accumulate(chunks_of(target, prompts[:1])))
    spans = find_images(target.config, prompts[0])
    assert edges[-1] == prompts[0]["input_ids"].shape[1] and len(edges) > 3
    assert not any(span.start < edge < span.stop for span in spans for edge in edges)


@pytest.mark.parametrize(
    ("name", "family"),
    [("none", "qwen2_5_vl"), ("copy", "llava"), ("eagle", "qwen2_5_vl"), ("flash", "llava")],
)
@pytest.mark.every(2)
def test_every_drafter_answers_as_with_whole_prompts(name: str, family: str) -> None:
    inputs = inputs_of(family, torch.float64)
    target = VisionLanguageTarget(VISION_LANGUAGE_FAMILIES[family]()[0].double())
    drafter, rows = DRAFTERS[name](target).fit(target), [inputs[case] for case in CONVERSATION]
    for sampler in (Sampler(), Sampler(0.8, top_p=0.95)):
        found = []
        for size in (None, 5):
            target.prefill_tokens = size
            run = answer(target, drafter, rows, sampler, 12, seed=range(len(rows)))
            found.append((run.outputs(), run.stats.drafted, run.stats.accepted))
        assert found[0] == found[1]


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_the_prefix_cache_fills_and_hits(family: str) -> None:
    """Turn by turn: every known token is known, and the rest is read in chunks."""
    inputs = inputs_of(family, torch.float64)
    target = VisionLanguageTarget(VISION_LANGUAGE_FAMILIES[family]()[0].double())
    target.prefix_cache, target.prefill_tokens = PrefixCache(2**30, block=1), 4
    before = 0
    for case in CONVERSATION:
        row = inputs[case]
        with torch.inference_mode():
            state, output = target.prefill([row], 64, (0, -1))
            state.close()
            assert output.cached_tokens == before
        before = row["input_ids"].shape[1]
        run = answer(target, DRAFTERS["none"](target), [row], Sampler(), 6)
        assert run.outputs() == [generate(target.model, row, 6)]


def test_prefills_that_are_given_up_leave_no_hooks() -> None:
    target = text_target("llama")
    target.prefill_tokens = SIZE
    prefill = target.chunked_prefill([prompt(45)], 64, (0, -1))
    with torch.inference_mode():
        next(prefill)
        next(prefill)
        prefill.close()
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in target.model.modules())


def test_batches_decode_between_chunks() -> None:
    """A batch that is decoded while another prompt is read: its hidden states and keys are its own."""
    target, taps = text_target("qwen2_mixed_sliding"), (0, -1)
    long = [prompt(45)]
    drafter: Callable[..., Any] = DRAFTERS["copy"]
    alone = answer(target, drafter(target), [prompt(20)], Sampler(), 9).outputs()
    target.prefill_tokens = SIZE
    with torch.inference_mode():
        prefill = target.chunked_prefill(long, 64, taps)
        for _ in range(3):
            next(prefill)
            assert answer(target, drafter(target), [prompt(20)], Sampler(), 9).outputs() == alone
        state, output = finish(prefill)
        target.prefill_tokens = None
        other, expected = target.prefill(long, 64, taps)
    assert close(output.logits, expected.logits)
    assert all(close(output.taps[tap][0], expected.taps[tap][0]) for tap in taps)
    for each in (state, other):
        each.close()
