"""Joint verification of runs equals its loop, and is the exact rule where runs are single tokens."""

from __future__ import annotations

import torch

from mmspec.acceptance.rejection import SpeculativeSampling
from mmspec.acceptance.suffix import Suffix
from mmspec.decoding.distribution import Categorical, Scores
from mmspec.decoding.draft import Draft, DraftKind
from mmspec.decoding.random_stream import RandomStream
from tests.acceptance import slow_rules
from tests.contracts.toy import dirichlet

IID = DraftKind.IID


def test_joint_runs_equal_the_loop() -> None:
    generator = torch.Generator().manual_seed(6)
    p_x, q_x, u = torch.rand(3, 400, 7, dtype=torch.float64, generator=generator)
    p_x[:40, 3] = 0.0
    accepted = Suffix(0.8).count_accepted(p_x, q_x, u)
    rows = zip(p_x.tolist(), q_x.tolist(), u.tolist(), strict=True)
    assert accepted.tolist() == [slow_rules.joint_runs(*row, 0.8) for row in rows]
    exact = ((u * q_x <= p_x) & (p_x > 0)).long().cumprod(-1).sum(-1)
    assert (accepted >= exact).all() and (accepted > exact).sum() > 20


def test_where_probabilities_fall_joint_runs_are_speculative_sampling() -> None:
    rows, steps, vocabulary = 200, 4, 5
    p, q = dirichlet(2, rows, steps + 1, vocabulary, seed=7)
    tokens = p[:, :-1].argmax(-1)
    p_x = p[:, :-1].gather(-1, tokens[..., None])[..., 0]
    order = p_x.argsort(-1, descending=True)
    p = torch.cat([p[:, :-1].gather(1, order[..., None].expand(-1, -1, vocabulary)), p[:, -1:]], 1)
    tokens = torch.cat([torch.zeros(rows, 1, dtype=torch.long), tokens.gather(1, order)], 1)
    draft, scores = Draft.chain(tokens, IID, Categorical(q)), Scores(p.log(), False)
    random, emitted = RandomStream.from_seed(1, rows), torch.ones(rows, dtype=torch.long)
    exact, joint = (rule.verify(draft, scores, random, emitted) for rule in (SpeculativeSampling(), Suffix()))
    assert torch.equal(exact.accepted, joint.accepted) and torch.equal(exact.next_token, joint.next_token)
    assert joint.tv is None and len(set(exact.accepted.tolist())) > 2
