"""Masked models with a cache: blocks, policies and images, compared with slow decoding."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from mmspec.accelerators import build_accelerator
from mmspec.core.canvas import Stopping
from mmspec.core.plain import NoDrafter
from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.families.masked_language.target import MaskedTarget
from mmspec.families.masked_language.unmasking import UnmaskingDrafter
from mmspec.places.confidence import LowConfidence
from mmspec.transformers_versions import cache_name
from tests.contracts.running import Run, decode
from tests.families import naive_masked
from tests.families.naive_masked import Choose
from tests.targets.loop import decode as decode_inputs
from tests.tiny_models import encode, tiny_images, tiny_llava, user_message
from tests.tiny_models.masked import MASKED_MODELS, masked_target

WORDS, MASK, LENGTH, SEED = 32, 31, 11, 5
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 1]]
SAMPLED = Sampler(0.9, top_k=12)


@functools.cache
def target(kind: str) -> MaskedTarget:
    return MaskedTarget(MASKED_MODELS[kind](WORDS))


def chooser(row: int, sampler: Sampler, kind: str = "llada") -> Choose:
    """Choose tokens of one of three rows with its noise; the mask is never chosen.

    Confidences are those of each model's code: of LLaDA's scores as they are.
    """
    stream = RandomStream.from_seed(SEED, len(PROMPTS))

    def choose(scores: list[float], place: int, decided: int) -> tuple[int, list[float]]:
        logits = torch.tensor(scores, dtype=torch.float64)
        logits[MASK] = -torch.inf
        if sampler.greedy:
            return int(logits.argmax()), logits.softmax(-1).tolist()
        warped = sampler.warp(logits[None, None])[0, 0]
        index = torch.full((len(PROMPTS), 1), place)
        noise = stream.at(decided).gumbel(index, Purpose.REDRAW, WORDS, torch.float64)[row, 0]
        judged = logits if kind == "llada" else warped
        return int((warped + noise).argmax()), judged.softmax(-1).tolist()

    return choose


def unmask(kind: str, drafter: Any, rule: LowConfidence, sampler: Sampler, **settings: Any) -> Run:
    model = target(kind)
    settings = {"max_new_tokens": LENGTH, "seed": SEED, **settings}
    return decode(model, PROMPTS, drafter.fit(model), rule, sampler, **settings)


@pytest.mark.parametrize("sampler", [Sampler(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", MASKED_MODELS)
def test_plain_decoding_is_that_of_the_slow_way(kind: str, sampler: Sampler) -> None:
    """One place per forward pass, for ragged prompts in a batch; blocks of SDAR begin inside the prompt."""
    slow = naive_masked.unmask_blocks if kind == "sdar" else naive_masked.unmask_everywhere
    run = unmask(kind, NoDrafter(), LowConfidence(3), sampler)
    for row, prompt in enumerate(PROMPTS):
        expected = slow(target(kind).model, prompt, LENGTH, chooser(row, sampler, kind))
        assert (run.outputs[row], run.stats.rounds[row]) == expected
    assert run.stats.target_forwards == max(run.stats.rounds)


@pytest.mark.parametrize("name", ["none", "freedave", "threshold"])
@pytest.mark.parametrize("sampler", [Sampler(), SAMPLED], ids=["greedy", "sampled"])
def test_a_limit_does_not_change_the_text_before_it(name: str, sampler: Sampler) -> None:
    """The last block of an SDAR is filled completely, then cut; rows end at different places of it."""
    model = target("sdar")
    made = build_accelerator(name).fit(model)

    def texts(length: int) -> list[list[int]]:
        how: dict[str, Any] = {"max_new_tokens": length, "seed": SEED}
        return decode(model, PROMPTS, made.drafter, made.rule, sampler, **how).outputs

    whole = texts(LENGTH)
    for length in range(1, LENGTH):
        assert texts(length) == [row[:length] for row in whole], length


@pytest.mark.parametrize("places", [2, 3])
@pytest.mark.parametrize("kind", MASKED_MODELS)
def test_several_places_a_forward(kind: str, places: int) -> None:
    slow = naive_masked.unmask_blocks if kind == "sdar" else naive_masked.unmask_everywhere
    blocks: dict[str, Any] = {} if kind == "sdar" else {"block": 4}
    drafter = UnmaskingDrafter(block_length=None if kind == "sdar" else 4)
    run = unmask(kind, drafter, LowConfidence(places), SAMPLED)
    for row, prompt in enumerate(PROMPTS):
        choose = chooser(row, SAMPLED, kind)
        expected = slow(target(kind).model, prompt, LENGTH, choose, places=places, **blocks)
        assert (run.outputs[row], run.stats.rounds[row]) == expected


@pytest.mark.parametrize("sampler", [Sampler(), SAMPLED], ids=["greedy", "sampled"])
def test_what_is_doubted_is_masked_again(sampler: Sampler) -> None:
    again = 0
    for block, places, threshold in ((None, 3, 0.4), (4, 2, 0.6), (6, 4, 1.0)):
        emitted: list[list[int]] = []
        rule = LowConfidence(places, remask_below=threshold)
        watch = lambda canvas, emitted=emitted: emitted.append(list(canvas.output_lengths))  # noqa: E731
        run = unmask("llada", UnmaskingDrafter(block), rule, sampler, watch=watch)
        for row, prompt in enumerate(PROMPTS):
            choose = chooser(row, sampler)
            model = target("llada").model
            slow = naive_masked.unmask_doubting(model, prompt, LENGTH, choose, threshold, block, places)
            assert (run.outputs[row], run.stats.rounds[row]) == slow[:2]
            again += slow[2]
        ends = {0, LENGTH, *range(0, LENGTH, block or LENGTH)}
        assert {length for lengths in emitted for length in lengths} <= ends, (
            "not before all of it is settled"
        )
    assert again > 10


def cached_unmasking(prompt: Sequence[int], block: int, policy: str, choose: Choose) -> list[int]:
    """Unmask with keys of a transformers cache: of the first forward of each block, outside the block."""
    model, output, start = target("llada").model, [MASK] * LENGTH, len(prompt)
    for begin in range(0, LENGTH, block):
        end, kept = min(begin + block, LENGTH), None
        while MASK in output[begin:end]:
            sequence = [*prompt, *output]
            high = start + (end if kept is not None and policy == "dual" else LENGTH)
            low = 0 if kept is None else start + begin
            cache = DynamicCache()
            for layer, (keys, values) in enumerate(kept or ()):
                outside = [*range(low), *range(high, start + LENGTH)]
                cache.update(keys[:, :, outside], values[:, :, outside], layer)
            everything = torch.zeros(1, 1, high - low, start + LENGTH, dtype=torch.float64)
            read = model(
                torch.tensor([sequence[low:high]]),
                attention_mask=everything,
                position_ids=torch.arange(low, high)[None],
                **{cache_name(model.forward): cache},
            ).logits[0].tolist()  # fmt: skip
            if kept is None:
                kept = [(layer.keys, layer.values) for layer in cache.layers]
            scores = [[0.0]] * low + read
            inside = [place for place in range(begin, end) if output[place] == MASK]
            count = LENGTH - output.count(MASK)
            decided = naive_masked.most_confident(scores[start:], inside, choose, 1, count)
            for place, token in decided.items():
                output[place] = token
    return output


@pytest.mark.parametrize("policy", ["prefix", "dual"])
@torch.inference_mode()
def test_cached_keys_are_those_of_the_blocks_first_forward(policy: str) -> None:
    exact = unmask("llada", UnmaskingDrafter(4), LowConfidence(), SAMPLED)
    run = unmask("llada", UnmaskingDrafter(4, policy), LowConfidence(), SAMPLED)
    for row, prompt in enumerate(PROMPTS):
        assert run.outputs[row] == cached_unmasking(prompt, 4, policy, chooser(row, SAMPLED))
    assert run.outputs != exact.outputs, "a policy that changes nothing proves nothing"
    alone = unmask("llada", UnmaskingDrafter(1, policy), LowConfidence(), SAMPLED)
    plain = unmask("llada", UnmaskingDrafter(1), LowConfidence(), SAMPLED)
    assert alone.outputs == plain.outputs, "blocks of one are all read anew"
    fitted = UnmaskingDrafter(4, policy).fit(target("llada"))
    assert (
        fitted.exactness == "lossy" and UnmaskingDrafter(4, policy).fit(target("sdar")).exactness == "exact"
    )


@torch.inference_mode()
def test_images_of_prompts_are_embedded_once() -> None:
    """A model with bidirectional attention and ragged prompts; slow decoding embeds images every time."""
    (base, processor), images = tiny_llava(), tiny_images()
    asked = user_message("what is there ?", images[:1]), user_message("which colour is it ?", images[1:3])
    prompts = [dict(encode(processor, messages)) for messages in asked]
    mask = 33  # stands in neither prompt
    model, expected = base.double(), []
    for prompt in prompts:
        output, start = [mask] * 5, prompt["input_ids"].shape[1]
        while mask in output:
            ids = torch.cat([prompt["input_ids"], torch.tensor([output])], 1)
            everything = torch.zeros(1, 1, ids.shape[1], ids.shape[1], dtype=torch.float64)
            inputs = {"pixel_values": prompt["pixel_values"].double(), "attention_mask": everything}
            p = (
                model(ids, **inputs)
                .logits[0, start:]
                .index_fill(-1, torch.tensor(mask), -torch.inf)
                .softmax(-1)
            )
            p = p.where(torch.tensor(output)[:, None] == mask, -1.0)
            place = int(p.amax(-1).argmax())
            output[place] = int(p[place].argmax())
        expected.append(output)
    calls = list[int]()
    tower = model.model.vision_tower
    tower.register_forward_hook(lambda *_: calls.append(1))
    target = masked_target(model, mask_token_id=mask)
    run = decode_inputs(target, build_accelerator("none").fit(target), prompts, Stopping(5))
    assert run.outputs == expected and len(calls) == len(prompts)


def test_a_block_that_was_not_learnt_is_refused() -> None:
    with pytest.raises(InputError, match="block_length"):
        UnmaskingDrafter(8).fit(target("sdar"))
    with pytest.raises(InputError, match="cache"):
        UnmaskingDrafter(cache="both")
