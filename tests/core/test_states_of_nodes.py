"""Nodes that the state embeds with a table."""

from __future__ import annotations

import torch
from torch.testing import assert_close

from mmspec.core.draft import DraftKind, Tree
from mmspec.core.sampling import Sampler
from mmspec.core.verdict import Path
from tests.contracts.checks import PROMPTS, VOCABULARY, precise
from tests.contracts.running import decode
from tests.oracles import tree_of

SAMPLER, NEW_TOKENS = Sampler(0.8), 24
PRECISE = dict(rtol=0, atol=1e-10)  # of float64, in forwards of other shapes


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
