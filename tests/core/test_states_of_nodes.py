"""Hidden states of nodes that rules read, and nodes that the state embeds with a table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.core.distributions import Scores
from mmspec.core.draft import Draft, DraftKind, Tree
from mmspec.core.interfaces import Drafter, TargetOutput
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.core.verdict import Measured, Path, Verdict
from mmspec.methods.copy.drafter import CopyDrafter
from mmspec.methods.draft_model.drafter import DraftModelDrafter
from mmspec.targets import CausalTarget
from mmspec.trees.matching import SampleAndMatch
from tests.contracts.checks import PROMPTS, VOCABULARY, precise
from tests.contracts.running import decode
from tests.oracles import tree_of
from tests.tiny_models import tiny_lm

SAMPLER, NEW_TOKENS = Sampler(0.8), 24
PRECISE = dict(rtol=0, atol=1e-10)  # of float64, in forwards of other shapes


class JudgeOfStates(SampleAndMatch):
    """Decides as its base does, by logits that it computes of the hidden states of the nodes."""

    taps = (1, -1)

    def __init__(self) -> None:
        self.read: list[tuple[Tree, dict[int, Tensor], Tensor]] = []

    def decide(
        self, draft: Draft, output: TargetOutput, scores: Scores, random: RandomStream, first: Tensor
    ) -> tuple[Verdict, Measured]:
        self.read.append((draft.lanes, output.taps, first))
        own = SAMPLER(precise().head(output.taps[-1]), draft, [], first)
        return super().decide(draft, replace(output, logits=own.raw), own, random, first)


@pytest.mark.parametrize(
    "drafter",
    [CopyDrafter(4, top_k=1), DraftModelDrafter(CausalTarget(tiny_lm(seed=22)), 3)],
    ids=["copy", "draft_model"],
)
def test_a_rule_reads_the_hidden_states_of_every_node(drafter: Drafter) -> None:
    settings = dict(sampler=SAMPLER, max_new_tokens=NEW_TOKENS, seed=7)
    rule = JudgeOfStates()
    run = decode(precise(), PROMPTS, drafter, rule, **settings)  # type: ignore[arg-type]
    assert run.outputs == decode(precise(), PROMPTS, **settings).outputs  # type: ignore[arg-type]
    assert sum(run.stats.accepted) > 0 and max(draft.max_depth for draft, _, _ in rule.read) > 1

    compared = 0
    for draft, taps, first in rule.read:
        assert set(taps) == {1, -1} and draft.is_chain
        for row, emitted in enumerate(first.tolist()):
            if emitted == NEW_TOKENS:  # the row has ended
                continue
            ids = [*PROMPTS[row], *run.outputs[row][:emitted], *draft.tokens[row, 1:].tolist()]
            states = hidden_states(ids)
            for tap, found in taps.items():
                assert_close(found[row], states[tap][-draft.tokens.shape[1] :], **PRECISE)
            compared += 1
    assert compared >= len(PROMPTS) * NEW_TOKENS / drafter.max_nodes


@torch.inference_mode()
def hidden_states(ids: list[int]) -> list[Tensor]:
    """[L, d] what enters each layer, and the final states, normed."""
    output = precise().model(torch.tensor([ids]), output_hidden_states=True)
    return [states[0] for states in output.hidden_states]


def test_query_nodes_are_embedded_by_the_state_and_leave_nothing() -> None:
    target = precise()
    expected = torch.tensor(decode(target, PROMPTS, max_new_tokens=12).outputs)
    prompts = [{"input_ids": torch.tensor([list(prompt)])} for prompt in PROMPTS]
    queries = torch.randn(2, target.config.hidden_size, generator=torch.Generator().manual_seed(2)).double()
    wrong = (expected[:, 1:2] + 1) % VOCABULARY
    ordinary = torch.cat([expected[:, :2], wrong, expected[:, 2:3]], 1)  # the wrong one is in between
    probes = torch.tensor([VOCABULARY, VOCABULARY + 1]).expand(len(PROMPTS), 2)
    drafts = [
        tree_of(tokens, [0, 0, 0, 1, 3, 4][: tokens.shape[1]], DraftKind.POINT)
        for tokens in (ordinary, torch.cat([ordinary, probes], 1))
    ]

    with torch.inference_mode():
        (plain, _), (state, _) = target.prefill(prompts, 64), target.prefill(prompts, 64)
        state.queries = queries
        without, logits = target.score(plain, drafts[0]).logits, target.score(state, drafts[1]).logits
        assert_close(logits[:, :4], without, **PRECISE)
        for row, prompt in enumerate(PROMPTS):
            known = target.embed(torch.tensor([[*prompt, *expected[row, :3].tolist()]]))
            found = target.model(inputs_embeds=torch.cat([known, queries[None]], 1)).logits
            assert_close(logits[row, 4:], found[0, -2:], **PRECISE)
        active = torch.ones(len(PROMPTS), dtype=torch.bool)
        for draft, each in zip(drafts, (plain, state), strict=True):
            path = Path.at(draft, torch.full((len(PROMPTS),), 3), expected[:, 3])
            target.commit(each, draft, path, active)
            each.tighten([4] * len(PROMPTS))
        for row, prompt in enumerate(PROMPTS):
            length = len(prompt) + 3
            kept, due = (each.cache.row_states(row, length) for each in (state, plain))
            for layer, pair in due.items():
                assert_close(kept[layer], pair, **PRECISE)
        assert torch.equal(state.cache.lengths, plain.cache.lengths)
        for place in range(3, 11):
            draft = Tree.chain(expected[:, place : place + 1], DraftKind.POINT)
            token = target.score(state, draft).logits[:, 0].argmax(-1)
            assert torch.equal(token, expected[:, place + 1])
            target.commit(state, draft, Path.root(draft, token), active)
