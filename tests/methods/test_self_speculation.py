"""Self-speculation: masked blocks after each candidate draft the next tokens in the same forward pass."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from mmspec.accelerators import build_accelerator
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.families.masked_language.modeling import LLaDAConfig
from mmspec.families.masked_language.target import MaskedTarget
from mmspec.methods.self_speculation.drafter import BlockTree, SelfSpeculationDrafter
from mmspec.targets import CausalTarget
from tests.contracts.running import FanOutTarget, Run, decode
from tests.tiny_models import randomise, scale_head_to_entropy, tiny_llama

WORDS, LENGTH = 32, 24
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 1]]


@functools.cache
def both(nats: float = 1.5) -> PreTrainedModel:
    """A model that predicts the next token, and fills masks."""
    config = LLaDAConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        mask_token_id=WORDS - 1,
        block_length=4,
        predicts="next",
        is_causal=True,
    )
    model: PreTrainedModel = randomise(AutoModelForCausalLM.from_config(config), 3).double()
    scale_head_to_entropy(model, nats)
    return model.eval()


def run_of(accelerator: Any, sampler: Sampler, rows: list[int], **more: Any) -> Run:
    target = CausalTarget(both())
    made = accelerator.fit(target)
    prompts = [PROMPTS[row] for row in rows]
    settings = {"max_new_tokens": LENGTH, "seed": [*rows], **more}
    return decode(target, prompts, made.drafter, made.rule, sampler, **settings)


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.7), Sampler(1.2, top_k=5)], ids=str)
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.every(2)
def test_output_is_that_of_plain_decoding(sampler: Sampler, count: int) -> None:
    plain = run_of(build_accelerator("none"), sampler, [0, 1, 2])
    fast = run_of(build_accelerator("self_speculation", num_draft_tokens=count), sampler, [0, 1, 2])
    assert fast.outputs == plain.outputs
    assert 0 < sum(fast.stats.accepted) <= sum(fast.stats.drafted)
    for row in range(3):
        alone = run_of(build_accelerator("self_speculation", num_draft_tokens=count), sampler, [row])
        assert alone.outputs == [plain.outputs[row]]


def test_drafts_are_what_a_block_of_masks_says_behind_the_accepted_tokens() -> None:
    """Against forwards of the model over the output so far and masks that see each other."""
    model, masks, seen = both(), 3, []

    class Watched(SelfSpeculationDrafter):
        def fit(self, target: Any) -> Any:
            fitted = super().fit(target)
            fitted.session = lambda drafter, batch: watch(SelfSpeculationDrafter.session(drafter, batch))
            return fitted

    def watch(session: Any) -> Any:
        propose = session.propose

        def watched(canvas: Any) -> BlockTree:
            draft: BlockTree = propose(canvas)
            emitted = int(canvas.emitted[0])
            drafted = draft.tokens[0, 1 : draft.chain_nodes].tolist()
            seen.append((canvas.tokens[0, :emitted].tolist(), drafted))
            return draft

        session.propose = watched
        return session

    made = build_accelerator("self_speculation", num_draft_tokens=masks)
    made = type(made)(made.name, Watched(masks), made.rule)
    run_of(made, Sampler(), [0])
    checked = 0
    for output, drafted in seen[1:]:
        known = [*PROMPTS[0], *output[:-1]]  # the root replaces the first mask
        ids = torch.tensor([[*known, *[WORDS - 1] * masks]])
        length, total = len(known), ids.shape[1]
        sees = torch.ones(total, total, dtype=torch.bool).tril()
        sees[length:, length:] = True
        logits = model(ids, attention_mask=sees[None, None]).logits[0, length:]
        assert drafted == logits.argmax(-1).tolist()
        checked += 1
    assert checked > 5


def test_the_joint_distribution_of_two_tokens_is_the_targets() -> None:
    """Many rows of one prompt, by the total variation to the exact distribution."""
    rows, sampler = 1500, Sampler(1.0, top_k=4)
    target = FanOutTarget(both())
    made = build_accelerator("self_speculation", sampling="sampled", num_draft_tokens=2).fit(target)
    prompts = [PROMPTS[1]] * rows
    run = decode(target, prompts, made.drafter, made.rule, sampler, max_new_tokens=4, seed=[*range(rows)])
    counts: dict[tuple[int, ...], int] = {}
    for output in run.outputs:
        counts[tuple(output[1:3])] = counts.get(tuple(output[1:3]), 0) + 1
    exact: dict[tuple[int, ...], float] = {}

    def after(tokens: list[int]) -> dict[int, float]:
        logits = both()(torch.tensor([tokens])).logits[0, -1]
        best = logits.topk(4)
        return dict(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))

    for one, p in after(PROMPTS[1]).items():
        for two, q in after([*PROMPTS[1], one]).items():
            for three, r in after([*PROMPTS[1], one, two]).items():
                exact[two, three] = exact.get((two, three), 0.0) + p * q * r
    distance = sum(abs(counts.get(pair, 0) / rows - exact.get(pair, 0.0)) for pair in {*counts, *exact}) / 2
    expected = sum((share * (1 - share) / rows) ** 0.5 for share in exact.values()) * 0.4
    assert distance < 2 * expected


def test_models_that_were_not_trained_for_both_are_refused() -> None:
    drafter = SelfSpeculationDrafter()
    for target in (CausalTarget(tiny_llama()), MaskedTarget(both())):
        with pytest.raises(InputError, match="masked blocks"):
            drafter.fit(target)
    with pytest.raises(InputError, match="sampling"):
        SelfSpeculationDrafter(sampling="greedy")
