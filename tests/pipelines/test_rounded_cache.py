"""`quantize_cache`: rounded keys and values, by transformers' own `generate` and by every kind of loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from mmspec import MMSpecPipeline
from mmspec.decoding.rounded_states import pack_states, unpack_states
from mmspec.errors import InputError
from tests.tiny_models import tiny_image, user_message

ASKED = [
    user_message("what is there ?", [tiny_image()]),
    user_message("which colour is it , and where ?", [tiny_image(3)]),
]
SHORT: dict[str, Any] = {"max_new_tokens": 24, "min_new_tokens": 24}


def rounded(states: Tensor, bits: int) -> Tensor:
    return unpack_states(pack_states(states, bits), bits, states.dtype)


class RoundingCache(DynamicCache):
    """What a user of transformers would write: every key and value is rounded before it is kept."""

    bits = 8

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        new = (
            rounded(each.transpose(1, 2), self.bits).transpose(1, 2) for each in (key_states, value_states)
        )
        return super().update(*new, *args, **kwargs)


@pytest.mark.parametrize("bits", [8, 4])
def test_states_are_rounded_to_equal_steps_of_their_range(bits: int) -> None:
    states = torch.randn(3, 5, 2, 16, generator=torch.Generator().manual_seed(0)) * 7
    states[0, 0, 0], states[0, 0, 1] = 2.5, 0.0  # of no range
    packed = pack_states(states, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (3, 5, 2, 16 * bits // 8 + 8)
    step = (states.amax(-1) - states.amin(-1)) / (2**bits - 1)
    found = unpack_states(packed, bits, torch.float32)
    assert ((found - states).abs() <= step[..., None] * 0.5001 + 1e-6).all()
    assert torch.equal(found[0, 0], states[0, 0])
    for row in found.flatten(0, 2):
        assert len(row.unique()) <= 2**bits
    assert torch.allclose(rounded(found, bits), found, atol=1e-5), "once more changes nothing"


@pytest.mark.parametrize("bits", [8, 4])
def test_words_are_those_of_generate_with_a_rounding_cache(bits: int, checkpoints: Path) -> None:
    pipe: Any = MMSpecPipeline.from_pretrained(checkpoints / "llava", accelerator="none")
    plain = pipe(ASKED, **SHORT)
    pipe.quantize_cache(bits)
    outputs = pipe(ASKED, **SHORT)
    for row, turns in enumerate(ASKED):
        inputs = pipe._prepare(turns, SHORT).requests[0].inputs
        caches = RoundingCache(), RoundingCache()
        for cache in caches:
            cache.bits = bits
        logits = pipe.model(**inputs, past_key_values=caches[0]).logits[:, -1]
        state, output = pipe.target.prefill([inputs], 64)
        state.close()
        assert torch.allclose(output.logits[:, 0], logits, atol=1e-5)
        assert not torch.allclose(pipe.model(**inputs).logits[:, -1], logits, atol=1e-4)
        ids = pipe.model.generate(
            **inputs, past_key_values=caches[1], do_sample=False, min_new_tokens=24, max_new_tokens=24
        )
        assert ids[0, inputs["input_ids"].shape[1] :].tolist() == outputs.tokens[row]
    pipe.quantize_cache(None)
    assert pipe(ASKED, **SHORT).tokens == plain.tokens


@pytest.mark.parametrize(
    ("family", "settings"),
    [("llava", {}), ("qwen2_5_vl", {"temperature": 0.9, "seed": 3, "guidance_scale": 1.5})],
)
def test_exact_accelerators_keep_the_words_of_the_rounded_model(
    family: str, settings: dict[str, Any], checkpoints: Path
) -> None:
    """In batches, and where the beginning of a prompt is known."""
    pipe: Any = MMSpecPipeline.from_pretrained(checkpoints / family, accelerator="none")
    pipe.quantize_cache(4)
    expected = pipe(ASKED, **SHORT, **settings)
    pipe.set_accelerator("copy", length="fixed")
    found = pipe(ASKED, **SHORT, **settings)
    assert found.tokens == expected.tokens and found.stats.acceptance_length > 1
    pipe.enable_prefix_cache()
    for _ in range(2):
        again = pipe(ASKED, **SHORT, **settings)
        assert again.tokens == expected.tokens
    assert again.stats.cached_prompt_tokens > 0


def test_buffers_are_smaller(checkpoints: Path) -> None:
    pipe: Any = MMSpecPipeline.from_pretrained(checkpoints / "llava", accelerator="none")
    sizes = {}
    for bits in (None, 8, 4):
        pipe.quantize_cache(bits)
        request = pipe._prepare(ASKED[0], SHORT).requests[0]
        state, _ = pipe.target.prefill([request.inputs], 64)
        sizes[bits] = state.cache.nbytes()
        assert pipe._plan_memory(1).cache == 1024 * sizes[bits] // state.cache.plan.capacity
        state.close()
    width = pipe.target.config.get_text_config().head_dim
    assert sizes[8] / sizes[None] == (width + 8) / (4 * width) and sizes[4] < sizes[8]


def test_other_bits_and_other_models_are_refused(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe: Any = MMSpecPipeline.from_pretrained(checkpoints / "llava")
    for wrong in (2, 16, True, "8"):
        with pytest.raises(InputError, match="bits: got .*8, 4, or None"):
            pipe.quantize_cache(wrong)
    for name, value in (("by_blocks", True), ("vector_size", 8)):
        with monkeypatch.context() as patch:
            patch.setattr(type(pipe.target), name, value)
            with pytest.raises(InputError, match="one token after the other"):
                pipe.quantize_cache(8)
    assert pipe.target.cache_bits is None
