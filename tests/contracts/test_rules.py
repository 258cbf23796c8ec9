"""The contract of every registered acceptance rule, with every kind of draft that it supports."""

from __future__ import annotations

import functools

import pytest
import torch

from mmspec.core.decoder import is_sound
from mmspec.core.distributions import Categorical, Scores
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.interfaces import AcceptanceRule, Drafter
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.core.verdict import Path
from mmspec.plugins import RULES
from mmspec.trees.rejection import SpeculativeSampling
from tests.contracts import distributions
from tests.contracts.checks import PROMPTS, VOCABULARY, llama
from tests.contracts.running import decode, generate
from tests.contracts.toy import dirichlet, toy_distribution, toy_target
from tests.oracles import OracleDrafter, RandomTreeDrafter, SampledTreeDrafter, next_token, tree_of
from tests.trees.codes import fitted

IID, WITHOUT = DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT
SOUND = [
    (name, kind)
    for name in RULES
    # see tests/vectors/test_rules.py, tests/families/test_masked.py and test_diffusion_gemma.py,
    # and tests/methods/test_freedave.py; rules that read hidden states have tests of their own
    if issubclass(RULES[name], AcceptanceRule)
    and issubclass(Scores, RULES[name].distribution)
    and not RULES[name].taps
    for kind in DraftKind
    if kind in RULES[name].sound_for
]
JUDGED = dict.fromkeys(name for name, _ in SOUND)
EXACT = [
    (name, kind) for name, kind in SOUND if RULES[name].exactness == "exact" and not RULES[name].greedy_only
]


def rule_of(name: str, vocabulary: int) -> AcceptanceRule:
    """Build a registered rule with its defaults, fitted to a target with that many codes."""
    return fitted(RULES[name](), vocabulary)


def drafters_of(kind: DraftKind, vocabulary: int) -> list[Drafter]:
    """Chains and trees of one kind."""
    if kind in (IID, WITHOUT):
        distribution = toy_distribution() if vocabulary == 6 else dirichlet(vocabulary, vocabulary, seed=3)
        return [SampledTreeDrafter(distribution, widths, kind) for widths in ((1, 1, 1), (3, 2))]
    random_trees = RandomTreeDrafter(6, vocabulary)
    random_trees.kind = kind
    if vocabulary == 6:
        return [random_trees]
    known = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, answers(), strict=True)}
    oracles = [OracleDrafter(known, 4, vocabulary, 0.2, siblings, kind) for siblings in (0, 1)]
    return [random_trees, *oracles]


@functools.cache
def answers() -> list[list[int]]:
    return [generate(llama().model, prompt, 24) for prompt in PROMPTS]


def kinds_of(name: str) -> list[DraftKind]:
    return [kind for rule, kind in SOUND if rule == name]


@pytest.mark.parametrize("name", [name for name in JUDGED if RULES[name].keeps_greedy])
@pytest.mark.every(6)
def test_greedy_decoding_gives_the_arg_max_whatever_was_drafted(name: str) -> None:
    for kind in kinds_of(name):
        drafters = [d for d in drafters_of(kind, VOCABULARY) if is_sound(RULES[name], d)]
        assert drafters
        for drafter in drafters:
            run = decode(llama(), PROMPTS, drafter, rule_of(name, VOCABULARY), max_new_tokens=24)
            assert run.outputs == answers(), (kind, type(drafter))


@pytest.mark.parametrize(("name", "kind"), EXACT)
@pytest.mark.every(4)
def test_exact_rules_keep_the_targets_distribution(name: str, kind: DraftKind) -> None:
    rule = rule_of(name, 6)
    drafter = [d for d in drafters_of(kind, 6) if is_sound(type(rule), d)][-1]
    distributions.check_distribution(toy_target(), drafter, rule, Sampler(temperature=0.8, top_k=5))


def test_a_rule_says_what_it_promises() -> None:
    for name in RULES:
        rule = RULES[name]
        if issubclass(rule, AcceptanceRule):
            assert rule.sound_for <= set(DraftKind) and rule.sound_for, name
        assert rule.exactness in ("exact", "bounded", "approximate", "lossy"), name
        assert rule.bound is None or rule.exactness != "exact", name
        assert rule.bound is not None or rule.exactness != "bounded", name


@pytest.mark.parametrize("name", JUDGED)
def test_a_verdict_does_not_depend_on_the_other_rows(name: str) -> None:
    rule, rows = rule_of(name, 5), 7
    parents = [0, 0, 1, 2] if rule.chains_only else [0, 0, 0, 1]
    q = dirichlet(rows, 4, 5, seed=1)
    scores = Scores(dirichlet(rows, 4, 5, seed=2).log(), greedy=False)
    random, emitted = RandomStream.from_seed(3, rows), torch.arange(rows)

    def judge(kind: DraftKind, which: slice) -> Path:
        drawn_from = Categorical(q[which, 1:]) if kind in (IID, WITHOUT) else None
        draft = tree_of(q[which].argmax(-1), parents, kind, drawn_from)
        own = Scores(scores.logits[which], False)
        return rule.verify(draft, own, RandomStream(random.keys[which]), emitted[which])

    for kind in kinds_of(name):
        together = judge(kind, slice(None))
        for row in range(rows):
            alone = judge(kind, slice(row, row + 1))
            assert alone.accepted == together.accepted[row] and next_token(alone) == next_token(together)[row]
            kept = int(alone.accepted) + 1
            assert alone.nodes[0, :kept].tolist() == together.nodes[row, :kept].tolist()


@pytest.mark.parametrize(
    "name",  # these have no distribution per place
    [
        name
        for name in JUDGED
        if RULES[name].exactness != "exact" and name not in ("typical", "top_beta", "suffix")
    ],
)
def test_a_rule_that_is_not_exact_measures_what_it_does_at_the_places_it_judged(name: str) -> None:
    rule = rule_of(name, 6)
    bound = rule.promise.bound if rule.exactness == "bounded" else 1.0
    for drafter in (drafter for kind in kinds_of(name) for drafter in drafters_of(kind, 6)):
        if not is_sound(type(rule), drafter):
            continue
        run = decode(toy_target(), [(1, 2)] * 50, drafter, rule, Sampler(1.0), max_new_tokens=8)
        assert 0 < run.stats.tv_places <= sum(run.stats.drafted)
        assert 0 < run.stats.tv_max <= bound + 1e-6


@pytest.mark.parametrize("name", JUDGED)
def test_padding_is_never_accepted(name: str) -> None:
    rule = rule_of(name, 5)
    one = torch.nn.functional.one_hot(torch.full((4, 3), 2), 5).double()
    tokens, valid = torch.full((4, 3), 2), torch.tensor([[True, False, True]] * 4)
    scores = Scores(one.log().clamp_min(-40.0), greedy=False)
    for kind in kinds_of(name):
        draft = Tree.chain(tokens, kind, Categorical(one[:, 1:]) if kind in (IID, WITHOUT) else None, valid)
        verdict = rule.verify(draft, scores, RandomStream.from_seed(0, 4), torch.ones(4, dtype=torch.long))
        assert verdict.accepted.tolist() == [0] * 4 and next_token(verdict).tolist() == [2] * 4, kind


def test_a_rejection_rule_refuses_a_draft_without_its_distribution() -> None:
    """Greedy and coupled drafts have no q, so there is no ratio."""
    draft = Tree.chain(torch.zeros(1, 2, dtype=torch.long), DraftKind.POINT)
    scores = Scores(torch.zeros(1, 2, 3), greedy=False)
    with pytest.raises(TypeError, match="no q"):
        SpeculativeSampling().verify(
            draft, scores, RandomStream.from_seed(0, 1), torch.ones(1, dtype=torch.long)
        )
