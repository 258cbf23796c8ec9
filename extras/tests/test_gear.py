"""GEAR: packed blocks against a plain quantiser, and decoding against transformers over the same keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from extras.tests.running import outputs_alone, outputs_of
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError, UnsupportedModelError
from mmspec.pipelines import VisionLanguagePipeline
from mmspec.targets import CausalTarget
from mmspec.transformers_versions import CACHE
from mmspec_extras.gear import Packing, compressed
from mmspec_extras.gear.cache import AXES
from tests.contracts.running import Recorder, decode, random_prompts
from tests.oracles import OracleDrafter, RandomTreeDrafter
from tests.tiny_models import tiny_llama, tiny_llava, tiny_lm, tiny_mistral_sliding

PACKING = Packing(bits=2, rank=1, outliers=1, block=8)
PROMPTS = [*random_prompts(2, seed=6), *random_prompts(1, shortest=17, longest=19, seed=2)]
TOKENS, VOCABULARY = 42, 64


@pytest.mark.parametrize("along", AXES)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_are_those_of_a_plain_quantiser(bits: int, along: int) -> None:
    states = torch.randn(3, 2, 16, 8, generator=torch.Generator().manual_seed(1))
    packing = Packing(bits, rank=0, outliers=0, block=16)
    packed = packing.pack(states, along)
    low = states.amin(along, True).half().float()
    step = ((states.amax(along, True) - low) / (2**bits - 1)).half().float()
    expected = low + step * ((states - low) / step).round().clamp(0, 2**bits - 1)
    torch.testing.assert_close(packing.unpack(packed, along, torch.float32), expected)
    assert packed.codes.nbytes == states.numel() * bits // 8


@pytest.mark.parametrize("along", AXES)
def test_rank_and_outliers_lower_the_error(along: int) -> None:
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(4, 2, 64, 32, generator=generator)
    states += 20 * states * (torch.rand(states.shape, generator=generator) < 0.01)
    packings = [Packing(2, 0, 0), Packing(2, 4, 0), Packing(2, 4, 1)]
    read = [packing.unpack(packing.pack(states, along), along, torch.float32) for packing in packings]
    errors = [float((each - states).norm() / states.norm()) for each in read]
    assert errors[0] > errors[1] * 1.05 and errors[1] > errors[2] * 1.5
    extremes = states.argmax(along, True)
    torch.testing.assert_close(read[2].gather(along, extremes), states.gather(along, extremes).half().float())
    same = torch.full((1, 1, 64, 32), 0.75)
    assert torch.equal(packings[2].unpack(packings[2].pack(same, along), along, torch.float32), same)


@torch.inference_mode()
def said_over_compressed_keys(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, one forward pass each over a cache of transformers in which old blocks are packed."""
    output = model(input_ids=torch.tensor([prompt]), **{CACHE: DynamicCache()})
    held = [(layer.keys, layer.values) for layer in output.past_key_values.layers]
    tokens: list[int] = []
    while True:
        tokens.append(int(output.logits[0, -1].argmax()))
        if len(tokens) == count:
            return tokens
        place, size = len(prompt) + len(tokens) - 1, PACKING.block
        old, cache = max(0, place // size - 1), DynamicCache()
        for index, layer in enumerate(held):
            shown = []
            for states, along in zip(layer, AXES, strict=True):
                read = [
                    PACKING.unpack(PACKING.pack(block, along), along, states.dtype)
                    for block in states[:, :, : old * size].split(size, 2)
                    if block.shape[2]
                ]
                shown.append(torch.cat([*read, states[:, :, old * size :]], 2))
            cache.update(*shown, index)
        output = model(
            input_ids=torch.tensor([tokens[-1:]]),
            position_ids=torch.tensor([[place]]),
            **{CACHE: cache},
        )
        held = [
            (torch.cat([keys, new.keys[:, :, -1:]], 2), torch.cat([values, new.values[:, :, -1:]], 2))
            for (keys, values), new in zip(held, output.past_key_values.layers, strict=True)
        ]


@pytest.fixture(scope="module")
def target() -> Any:
    return compressed(Recorder(tiny_lm()), PACKING)


@pytest.fixture(scope="module")
def said(target: CausalTarget) -> dict[tuple[int, ...], list[int]]:
    return {tuple(each): said_over_compressed_keys(target.model, list(each), TOKENS) for each in PROMPTS}


@pytest.mark.parametrize("kind", ["none", "chain", "tree", "random"])
def test_text_is_that_of_transformers_over_the_same_keys(target: Any, said: Any, kind: str) -> None:
    drafter = {
        "none": None,
        "chain": OracleDrafter(said, 7, VOCABULARY, corruption=0.1),
        "tree": OracleDrafter(said, 4, VOCABULARY, corruption=0.2, siblings=1),
        "random": RandomTreeDrafter(8, VOCABULARY, said, seed=3),
    }[kind]
    run = decode(target, PROMPTS, drafter, max_new_tokens=TOKENS)
    assert run.outputs == list(said.values())
    assert not drafter or run.stats.acceptance_rate > 0


def test_packed_blocks_are_bitwise_those_of_plain_decoding() -> None:
    """Sampled in float32, where forward passes of one node and of many differ in the last bits."""
    recorder: Any = compressed(Recorder(tiny_llama()), PACKING)
    sampler, stored = Sampler(0.8), []
    text = decode(recorder, PROMPTS[:1], sampler=sampler, max_new_tokens=TOKENS).outputs
    stored.append(recorder.state.cache.plan.stored[0].layers)
    drafter = OracleDrafter({tuple(PROMPTS[0]): text[0]}, 7, VOCABULARY, corruption=0.2)
    assert decode(recorder, PROMPTS[:1], drafter, sampler=sampler, max_new_tokens=TOKENS).outputs == text
    stored.append(recorder.state.cache.plan.stored[0].layers)
    for index, layer in stored[0].items():
        for own, other in zip(layer, stored[1][index], strict=True):
            blocks = min(len(own.codes), len(other.codes))  # the last round may have committed more
            assert blocks > 3
            assert all(torch.equal(a[:blocks], b[:blocks]) for a, b in zip(own, other, strict=True))


def test_rows_come_and_go_with_their_packed_blocks() -> None:
    pipe: Any = VisionLanguagePipeline(*tiny_llava())
    pipe.target = compressed(pipe.target, Packing(bits=4, block=16))
    pipe.set_accelerator("copy", num_draft_tokens=4, length="fixed")
    alone = [single.tokens for single in outputs_alone(pipe, 22)]
    assert [found.tokens for found in outputs_of(pipe, 22)] == alone


def test_bytes_are_those_of_the_packed_parts(target: Any) -> None:
    decode(target, PROMPTS[2:], max_new_tokens=TOKENS)
    cache = target.state.cache
    (row,), buffers = cache.plan.stored, sum(layer.nbytes() for layer in cache.ragged)
    blocks, heads, size = row.length // 8, 2, 8
    codes, scales, factors, outliers = 8 * size // 4, 2 * 2 * 8, 2 * (8 + size), 8 * 2 * (1 + 2)
    assert cache.nbytes() - buffers == 2 * 2 * blocks * heads * (codes + scales + factors + outliers)
    assert target.state.nbytes() == cache.nbytes()


def test_what_cannot_be_compressed_is_refused(target: Any) -> None:
    for name, value in (("bits", 3), ("block", 12), ("rank", -1), ("outliers", 32)):
        with pytest.raises(InputError, match=name):
            Packing(**{name: value})
    with pytest.raises(InputError, match="num_draft_tokens must be below 8"):
        decode(target, PROMPTS[:1], RandomTreeDrafter(12, VOCABULARY, {tuple(PROMPTS[0]): [1] * 60}))
    with pytest.raises(UnsupportedModelError, match="full attention"):
        decode(compressed(CausalTarget(tiny_mistral_sliding()), PACKING), PROMPTS)
