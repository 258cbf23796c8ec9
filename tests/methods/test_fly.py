"""FLy: deferred rejections equal the loop, distances equal counts, and greedy texts follow the target."""

from __future__ import annotations

import math

import pytest
import torch

from mmspec.core.distributions import Categorical, Scores
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.random_stream import RandomStream
from mmspec.errors import InputError
from mmspec.methods.fly.rule import FLy
from mmspec.trees.rejection import SpeculativeSampling
from mmspec.trees.verification import place_uniforms
from tests.contracts.toy import dirichlet
from tests.methods import slow_rules
from tests.oracles import next_token

ROWS, LENGTH, WORDS = 400, 7, 5


def given(kind: DraftKind, greedy: bool) -> tuple[Tree, Scores]:
    generator = torch.Generator().manual_seed(2)
    p, q = dirichlet(ROWS, LENGTH + 1, WORDS, seed=4), dirichlet(ROWS, LENGTH, WORDS, seed=5)
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(ROWS, LENGTH)
    likely = torch.rand(ROWS, LENGTH, generator=generator) < 0.8
    if kind is DraftKind.POINT:
        tokens = torch.where(likely, p[:, :-1].argmax(-1), tokens)
    logits = p.log()
    logits[:, :, 4] = torch.where(torch.arange(ROWS)[:, None] % 2 == 0, -torch.inf, logits[:, :, 4])
    drawn_from = None if kind is DraftKind.POINT else Categorical(q)
    draft = Tree.chain(torch.cat([torch.zeros(ROWS, 1, dtype=torch.long), tokens], 1), kind, drawn_from)
    return draft, Scores(logits, greedy)


@pytest.mark.parametrize(("kind", "greedy"), [("point", True), ("point", False), ("iid", False)])
@pytest.mark.parametrize(
    "rule", [FLy(window=2), FLy(), FLy(window=1, entropy_threshold=0.6, entropy_top_k=2)]
)
def test_a_rejection_is_deferred_as_in_the_loop(kind: str, greedy: bool, rule: FLy) -> None:
    draft, scores = given(DraftKind(kind), greedy)
    random, emitted = RandomStream.from_seed(0, ROWS), torch.arange(ROWS)
    path, tv = rule.measure(draft, scores, random, emitted)
    uniforms = place_uniforms(draft, random, emitted, 1, torch.float64)[..., 0].tolist()
    window, most, more = rule.window or 6, rule.entropy_top_k, 0
    for row in range(ROWS):
        natives, entropies, chances = [], [], []
        for place in range(LENGTH):
            token, q = int(draft.tokens[row, place + 1]), 1.0
            spread = scores.logits[row, place].softmax(-1).tolist()
            p = scores.p[row, place].tolist()
            if kind == "iid":
                q = float(draft.q.p[row, place, token])  # type: ignore[union-attr]
            natives.append(p[token] > 0 and uniforms[row][place] * q <= p[token])
            best = sorted(spread, reverse=True)[:most]
            impossible = spread[token] == 0
            entropies.append(-1.0 if impossible else sum(-one * math.log(one) for one in best if one))
            chances.append(1 - min(1.0, p[token] / q))
        due = slow_rules.deferred(natives, entropies, window, rule.entropy_threshold)
        assert int(path.accepted[row]) == due
        more += due > slow_rules.deferred(natives, entropies, window, math.inf)
        for place in range(LENGTH):
            forced = [*natives]
            forced[place] = False
            after = slow_rules.deferred(forced[place:], entropies[place:], window, rule.entropy_threshold)
            expected = chances[place] if after else 0.0
            assert float(tv[row, place]) == pytest.approx(expected, abs=1e-9)
    assert more > 10 or window == 6, "it accepts more than the exact rule"


@pytest.mark.parametrize("rule", [FLy(entropy_threshold=100.0), FLy(window=LENGTH)])
def test_without_deferred_rejections_it_is_the_exact_rule(rule: FLy) -> None:
    draft, scores = given(DraftKind.IID, greedy=False)
    random, emitted = RandomStream.from_seed(0, ROWS), torch.arange(ROWS)
    path, tv = rule.measure(draft, scores, random, emitted)
    exact = SpeculativeSampling().verify(draft, scores, random, emitted)
    assert torch.equal(path.accepted, exact.accepted) and not tv.any()
    assert torch.equal(next_token(path), next_token(exact))


@pytest.mark.parametrize("name", ["window", "entropy_threshold", "entropy_top_k"])
def test_a_setting_out_of_range_is_named(name: str) -> None:
    with pytest.raises(InputError) as caught:
        FLy(**{name: -1})  # type: ignore[arg-type]
    assert caught.value.argument == name
