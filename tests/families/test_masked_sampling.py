"""Sampled text of masked models against exact enumeration of their own samplers.

Each draws a candidate at every open place, keeps the surest, and draws the others again in the next step.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from mmspec.accelerators import build_accelerator
from mmspec.core.plain import NoDrafter
from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.core.sampling import Sampler
from mmspec.families.masked_language.modeling import LLaDA2Config
from mmspec.families.masked_language.target import MaskedTarget
from tests.contracts.distributions import ALARM, chi_square
from tests.contracts.running import decode
from tests.families.naive_masked import scores_of
from tests.tiny_models import MASKED_MODELS
from tests.tiny_models.masked import masked_target
from tests.tiny_models.weights import scale_head_to_entropy

WORDS, MASK, ROWS, SEED = 6, 5, 3000, 11
#: Two places after a prompt fill a block of four. For these prompts it matters in one model or
#: another whose probability the confidence is.
CASES = [
    (Sampler(1.0), [3, 1]),
    (Sampler(0.6), [3, 1]),
    (Sampler(2.0), [4, 0]),
    (Sampler(1.0, top_p=0.6), [1, 4]),
]


@functools.cache
def model_of(kind: str) -> PreTrainedModel:
    if kind != "llada2":
        return MASKED_MODELS[kind](WORDS, nats=1.2)
    torch.manual_seed(3)
    config = LLaDA2Config(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        initializer_range=0.3,
        block_length=4,
        mask_token_id=MASK,
        pad_token_id=0,
    )
    # grouped products of experts take no doubles, and transformers may choose them
    how = {"experts_implementation": "eager"}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **how).eval().double()
    scale_head_to_entropy(model, 1.2)
    return model


def enumerated(kind: str, sampler: Sampler, prompt: list[int]) -> Tensor:
    """[V, V] probabilities of both tokens, of which the surer candidate is kept."""
    model = model_of(kind)
    block, shift = model.config.block_length, int(model.config.predicts == "next")

    def read(tail: list[int]) -> tuple[Tensor, Tensor]:
        """Probabilities [2, V] of candidates, and those that say how sure they are."""
        scores = torch.tensor(scores_of(model, [*prompt, *tail], block), dtype=torch.float64)
        scores = scores[len(prompt) - shift :][:2]
        scores[:, MASK] = -torch.inf
        drawn = sampler.warp(scores[None])[0].softmax(-1)
        return drawn, scores.softmax(-1) if kind == "llada" else drawn

    p, sure = read([MASK, MASK])
    joint = torch.zeros(WORDS, WORDS, dtype=torch.float64)
    for one in range(MASK):
        for other in range(MASK):
            weight = p[0, one] * p[1, other]
            if sure[0, one] >= sure[1, other]:
                joint[one] += weight * read([one, MASK])[0][1]
            else:
                joint[:, other] += weight * read([MASK, other])[0][0]
    return joint


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("kind", "case"),  # LLaDA alone has confidences of its own, which every case may tell apart
    [*(("llada", case) for case in range(4)), ("sdar", 0), ("dream", 3), ("llada2", 1)],
)
def test_samples_follow_the_models_own_sampler(kind: str, case: int) -> None:
    target, (sampler, prompt) = MaskedTarget(model_of(kind)), CASES[case]
    how: dict[str, Any] = {"max_new_tokens": 2, "seed": SEED}
    run = decode(target, [prompt] * ROWS, NoDrafter().fit(target), None, sampler, **how)
    rows = torch.tensor(run.outputs)
    counts = torch.bincount(rows[:, 0] * WORDS + rows[:, 1], minlength=WORDS**2)
    assert chi_square(counts, enumerated(kind, sampler, prompt).flatten()).p_value > ALARM


@pytest.mark.parametrize("kind", ["sdar", "llada2"])
def test_walks_over_states_sample_what_plain_decoding_samples(kind: str) -> None:
    """Bitwise, and with predictions made from the noise of later states."""
    target, sampler = MaskedTarget(model_of(kind)), Sampler([0.0, 0.7, 1.0, 1.3], top_k=[0, 0, 0, 3])
    prompts, how = [[3, 1, 4], [2, 2], [4, 1, 3, 0, 2], [1]], {"max_new_tokens": 22, "seed": SEED}
    plain = decode(target, prompts, NoDrafter().fit(target), None, sampler, **how)  # type: ignore[arg-type]
    made = build_accelerator("freedave").fit(target)
    fast = decode(target, prompts, made.drafter, made.rule, sampler, **how)  # type: ignore[arg-type]
    assert fast.outputs == plain.outputs
    assert sum(fast.stats.accepted) > 10


def test_noise_of_places_that_come_from_left_to_right_is_theirs_alone() -> None:
    """The noise of a place does not depend on the chosen places, so the text of a seed stays the same."""
    target, prompt = masked_target(model_of("sdar"), order="left_to_right"), [3, 1]
    how: dict[str, Any] = {"max_new_tokens": 6, "seed": SEED}
    run = decode(target, [prompt], NoDrafter().fit(target), None, Sampler(1.0), **how)
    stream, text = RandomStream.from_seed(SEED, 1), list[int]()
    for place in range(6):
        known = [*prompt, *text]
        shown = [*known, *[MASK] * (4 - len(known) % 4)]
        scores = torch.tensor(scores_of(model_of("sdar"), shown, 4), dtype=torch.float64)[len(known)]
        scores[MASK] = -torch.inf
        noise = stream.gumbel(torch.tensor([[place]]), Purpose.TARGET, WORDS, torch.float64)[0, 0]
        text.append(int((scores + noise).argmax()))
    assert run.outputs == [text]
