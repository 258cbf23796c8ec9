"""Relaxed rules: in closed form, from their own decisions, they keep their bounds and report what they do."""

from __future__ import annotations

import pytest
import torch

from mmspec.acceptance import ACCEPTANCE_RULES
from mmspec.acceptance.budget import Budget
from mmspec.acceptance.cool import Cool
from mmspec.acceptance.groups import cluster_codes, cluster_ratio, rank_ratio
from mmspec.acceptance.lantern import Lantern
from mmspec.acceptance.rejection import RecursiveRejection, SpeculativeSampling
from mmspec.acceptance.relaxation import RelaxedSampling
from mmspec.acceptance.suffix import Suffix
from mmspec.decoding.draft import Draft, DraftKind
from mmspec.decoding.random_stream import Purpose, RandomStream
from mmspec.decoding.sampling import Sampler, Scores
from mmspec.errors import InputError
from tests.acceptance import relaxed_checks as checks
from tests.acceptance import slow_rules
from tests.acceptance.codes import fitted, random_codes
from tests.acceptance.exact_law import exact_law, point_law
from tests.contracts.mutation import PlantedBug
from tests.contracts.running import decode
from tests.contracts.toy import dirichlet, toy_law, toy_target
from tests.oracles import SampledTreeDrafter

IID, WITHOUT = DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT
RELAXATION, GROUPS = "mmspec.acceptance.relaxation:RelaxedSampling", "mmspec.acceptance.groups"
BUDGET, LANTERN = "mmspec.acceptance.budget:Budget", "mmspec.acceptance.lantern:Lantern"
BUGS = {
    "all k neighbours leave, under a bound": PlantedBug(
        f"{LANTERN}.leaving",
        (("near.cumsum(-1) <=", "near.cumsum(-1) <= 9 +"),),
        checks.lantern_removes_little,
    ),
    "the budget is spent by every sibling": PlantedBug(
        f"{BUDGET}.remaining",
        (("allowance - judgement.tv[:, None]", "allowance"),),
        checks.siblings_share_the_budget,
    ),
    "the budget is not scaled to": PlantedBug(
        f"{BUDGET}.mass", ((".clamp_max(1.0)", ".clamp_min(1.0)"),), checks.budgets_hold
    ),
    "the loop goes over the budget": PlantedBug(
        f"{BUDGET}.mass", ((".clamp_max(1.0)", ".clamp_min(1.0)"),), checks.loops_stay_within_the_budget
    ),
    "the residual is p": PlantedBug(
        f"{RELAXATION}.residual", (("else residual(p, q)", "else p"),), checks.budgets_hold
    ),
    "overlapping groups": PlantedBug(
        f"{GROUPS}:rank_ratio",
        (("(0, surplus)).unflatten(-1, (-1, size))", "(0, surplus + size)).unfold(-1, 2 * size, size)"),),
        checks.groups_accept_at_least_the_exact_mass,
    ),
    "excluded tokens count in their group": PlantedBug(
        f"{GROUPS}:rank_ratio",
        ((".where(ordered > 0, 0.0)\n    surplus", "\n    surplus"),),
        checks.groups_accept_at_least_the_exact_mass,
    ),
    "p(x) = 0 accepted by groups": PlantedBug(
        "mmspec.acceptance.grouped:Grouped.mass",
        (("rank_ratio(p, q,", "rank_ratio(p + 1e-9, q,"),),
        checks.excluded_tokens_stay_excluded,
    ),
    "p(x) = 0 accepted for its neighbours": PlantedBug(
        f"{LANTERN}.raised", (("near.where(p > 0, 0.0)", "near"),), checks.excluded_tokens_stay_excluded
    ),
    "p(x) = 0 accepted within the budget": PlantedBug(
        f"{BUDGET}.mass", ((".where(p > 0, 0.0)", ""),), checks.excluded_tokens_stay_excluded
    ),
    "half of the variation is reported": PlantedBug(
        "mmspec.acceptance.relaxation:RelaxedSampling.judge",
        (("total_variation(output, p)", "total_variation(output, p) / 2"),),
        checks.acceptance_is_paid_for,
    ),
    "the released law is measured without what neighbours lend": PlantedBug(
        f"{LANTERN}.reference_law", (("common * spread", "0 * spread"),), checks.acceptance_is_paid_for
    ),
}
CHECKS = {planted.check.__name__: planted.check for planted in BUGS.values()}


@pytest.mark.parametrize("name", CHECKS)
def test_the_real_code_passes(name: str) -> None:
    CHECKS[name]()


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name: str) -> None:
    with BUGS[name].planted(), pytest.raises(AssertionError):
        BUGS[name].check()


def budget_rules(delta: float) -> dict[str, Budget]:
    return {
        "neighbours": fitted(Budget(delta, neighbours=2), 6),
        "groups": Budget(delta, "groups", group_size=2),
        "omega": Budget(delta, "omega"),
    }  # type: ignore[dict-item]


@pytest.mark.parametrize("relaxation", ["neighbours", "groups", "omega"])
@pytest.mark.parametrize("sampler", [Sampler(1.0), Sampler(0.7, top_k=4)], ids=str)
def test_without_a_budget_it_is_the_exact_rule_token_for_token(relaxation: str, sampler: Sampler) -> None:
    rule = budget_rules(0.0)[relaxation]
    for exact, widths, kind in (
        (SpeculativeSampling(), (1, 1, 1), IID),
        (RecursiveRejection(), (3, 2), IID),
        (RecursiveRejection(), (2, 2), WITHOUT),
    ):
        drafter = SampledTreeDrafter(toy_law(), widths, kind)
        runs = [
            decode(toy_target(), [(1, 2)] * 300, drafter, each, sampler, max_new_tokens=12, seed=8)
            for each in (exact, rule)
        ]
        assert runs[0].outputs == runs[1].outputs
        assert runs[1].stats.tv_max < 1e-6


def test_with_the_whole_budget_it_accepts_all_that_lantern_does() -> None:
    p, q = checks.random_laws(50)
    whole, lantern = (fitted(rule, 6) for rule in (Budget(1.0, neighbours=3), Lantern(1.0, neighbours=3)))
    assert isinstance(whole, RelaxedSampling) and isinstance(lantern, RelaxedSampling)
    allowance = torch.ones_like(p[:, :1])
    mass = whole.mass(p, q, allowance)
    torch.testing.assert_close(mass, lantern.mass(p, q, allowance), rtol=0, atol=1e-12)
    assert (mass.sum(-1) > torch.minimum(p, q).sum(-1)).any()


def test_more_budget_accepts_more() -> None:
    p, q = checks.random_laws(50)
    for relaxation in ("neighbours", "groups", "omega"):
        rates = [
            exact_law(budget_rules(delta)[relaxation], p, q, 1, IID).acceptance.mean()
            for delta in (0.0, 0.05, 0.2, 1.0)
        ]
        assert rates == sorted(rates) and rates[0] < rates[-1], relaxation


def test_the_omega_of_a_place_spends_its_budget() -> None:
    """The least omega that spends it, so that what is relaxed is spread as COOL-SD spreads it."""
    p, q = dirichlet(2, 50, 8, seed=2)
    allowance = torch.full_like(p[:, :1], 0.05)
    omega = 1 / Budget(0.05, "omega").inverse_omega(p, q, allowance)
    spent = (torch.minimum(q, omega * p) - p).clamp_min(0).sum(-1)
    enough = (q - p).clamp_min(0).sum(-1) > 0.05
    assert enough.any() and ((spent - 0.05).abs()[enough] < 1e-3).all() and (spent[enough] >= 0.05).all()


@pytest.mark.parametrize("delta", [-0.1, 1.1, float("nan"), "0.1", True])
@pytest.mark.parametrize("rule", [Budget, Lantern])
def test_a_delta_outside_zero_to_one_is_named(rule: type, delta: object) -> None:
    with pytest.raises(InputError) as caught:
        rule(delta=delta)
    assert caught.value.argument == "delta"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("budget", {"relaxation": "tokens"}),
        ("budget", {"neighbours": 0}),
        ("budget", {"metric": "l1"}),
        ("budget", {"group_size": 0}),
        ("lantern", {"lam": 1.0}),
        ("lantern", {"neighbours": 2.5}),
        ("lantern++", {"lam": float("nan")}),
        ("grouped", {"group_size": True}),
        ("grouped", {"partition": "colour"}),
        ("cool", {"omega": 0.9}),
        ("cool", {"nu": -1.0}),
        ("suffix", {"confidence": 1.5}),
    ],
)
def test_a_setting_out_of_range_is_named(name: str, options: dict[str, object]) -> None:
    with pytest.raises(InputError) as caught:
        ACCEPTANCE_RULES[name](**options)
    assert caught.value.argument == next(iter(options))


def test_rules_say_what_they_promise() -> None:
    assert [Budget(delta).promise for delta in (0.0, 0.1, 0.25)] == ["exact", "tv<=0.1", "tv<=0.25"]
    assert (Budget.exactness, Budget.bound) == ("bounded", "delta per token")
    for name in ("lantern", "lantern++", "grouped", "cool", "suffix"):
        assert ACCEPTANCE_RULES[name]().promise == "lossy"


def test_a_rule_that_was_not_fitted_says_so() -> None:
    draft = Draft.chain(torch.zeros(1, 2, dtype=torch.long), IID, torch.full((1, 2, 4), 0.25))
    random, emitted = RandomStream.from_seed(0, 1), torch.ones(1, dtype=torch.long)
    for name, options in (
        ("budget", {}),
        ("lantern", {}),
        ("grouped", {"reference": True}),
        ("grouped", {"partition": "codebook"}),
    ):
        with pytest.raises(TypeError, match="fit"):
            ACCEPTANCE_RULES[name](**options).verify(
                draft, Scores(torch.zeros(1, 2, 4), False), random, emitted
            )


LIMITS = {"delta": {"delta": 0.1}, "delta 1": {"delta": 1.0}, "lam": {"lam": 3.0}}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("syntax", [0, 2])
def test_lantern_of_one_deterministic_candidate_equals_the_loop(limit: str, syntax: int) -> None:
    rule = checks.rule_of("lantern", syntax=syntax, neighbours=3, **LIMITS[limit])
    assert isinstance(rule, Lantern)
    table = rule.nearest.tolist()
    p = checks.random_laws(48)[0]
    tokens = torch.arange(6).repeat(8)
    output = point_law(rule, p, tokens[:, None]).output
    added = 0
    for row, (law, x) in enumerate(zip(p.tolist(), tokens.tolist(), strict=True)):
        top = rule.delta if rule.lam is None else (rule.lam - 1) * law[x]
        near = table[x] if x < len(table) else []
        expected = slow_rules.lantern_of_one_point(law, x, near, top)
        torch.testing.assert_close(output[row].tolist(), expected, rtol=0, atol=1e-10)
        added += slow_rules.prefix(law, near, top)[0] > 0
    assert added > 5


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("siblings", [1, 2, 3])
def test_released_lantern_of_deterministic_siblings_equals_the_loop(limit: str, siblings: int) -> None:
    rule = checks.rule_of("lantern", syntax=1, neighbours=2, reference=True, **LIMITS[limit])
    assert isinstance(rule, Lantern) and rule.nearest.shape[1] == 3, "k + 1"
    p = checks.random_laws(40)[0]
    tokens = torch.rand(40, 6, generator=torch.Generator().manual_seed(2)).argsort(-1)[:, :siblings]
    output = point_law(rule, p, tokens).output
    for row, (law, tuple_) in enumerate(zip(p.tolist(), tokens.tolist(), strict=True)):
        expected = slow_rules.released_lantern(law, tuple_, None, rule.nearest.tolist(), 2, limit_of(rule))
        torch.testing.assert_close(output[row].tolist(), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("siblings", [1, 2])
def test_released_lantern_of_sampled_siblings_equals_the_loop(limit: str, siblings: int) -> None:
    rule = checks.rule_of("lantern", syntax=1, neighbours=2, reference=True, **LIMITS[limit])
    assert isinstance(rule, Lantern)
    p, q = checks.random_laws(6)
    output = exact_law(rule, p, q, siblings, WITHOUT).output
    for case in range(6):
        draws = draws_without_replacement(q[case].tolist(), siblings)
        expected = torch.zeros(6, dtype=torch.float64)
        for tokens, weight in draws:
            law = slow_rules.released_lantern(
                p[case].tolist(), tokens, q[case].tolist(), rule.nearest.tolist(), 2, limit_of(rule)
            )
            expected += weight * torch.tensor(law, dtype=torch.float64)
        torch.testing.assert_close(output[case], expected, rtol=0, atol=1e-9)


def limit_of(rule: Lantern):  # type: ignore[no-untyped-def]
    return lambda p_x: rule.delta if rule.lam is None else (rule.lam - 1) * p_x


def draws_without_replacement(q: list[float], siblings: int) -> list[tuple[list[int], float]]:
    if siblings == 0:
        return [([], 1.0)]
    draws = []
    for x, weight in enumerate(q):
        if weight > 0:
            left = slow_rules.scaled([0.0 if v == x else q[v] for v in range(len(q))], [0.0] * len(q))
            rest = draws_without_replacement(left, siblings - 1)
            draws += [([x, *tokens], weight * other) for tokens, other in rest]
    return draws


def test_released_lantern_at_temperature_zero_takes_what_its_neighbours_make_the_likeliest() -> None:
    """Accepts x where p(x) + c(x) is the largest of all, and follows the deepest such path."""
    rule = fitted(Lantern(0.5, neighbours=1, reference=True), 6)
    logits = dirichlet(40, 4, 6, seed=3, concentration=2.0).log()
    tokens = torch.randint(6, (40, 4), generator=torch.Generator().manual_seed(0))
    draft = Draft.tree(tokens, [0, 0, 0, 2], DraftKind.POINT)
    random = RandomStream.from_seed(0, 40)
    verdict = rule.verify(draft, Scores(logits, True), random, torch.ones(40, dtype=torch.long))
    table, relaxed = rule.nearest.tolist(), 0  # type: ignore[attr-defined]
    for row in range(40):
        p = logits[row].softmax(-1).tolist()

        def passes(node: int, parent: int, row: int = row, p: list[list[float]] = p) -> bool:
            x = int(tokens[row, node])
            raised = p[parent][x] + slow_rules.prefix(p[parent], table[x][:1], 0.5)[0]
            return raised >= max(p[parent])

        first = [node for node in (1, 2) if passes(node, 0)]
        deep = 2 in first and passes(3, 2)
        expected = [2, 3] if deep else first[:1]
        assert verdict.path[row, 1 : len(expected) + 1].tolist() == expected
        assert verdict.accepted[row] == len(expected)
        assert verdict.next_token[row] == logits[row, ([0, *expected])[-1]].argmax()
        relaxed += bool(expected) and int(tokens[row, expected[0]]) != int(logits[row, 0].argmax())
    assert relaxed > 0 and verdict.tv is not None and verdict.tv.max() == 1


def test_groups_by_rank_equal_the_loop_and_are_a_partition() -> None:
    p, q = checks.random_laws(40, 23)
    for size in (1, 4, 14, 40):
        ratios = rank_ratio(p, q, size)
        expected = [
            slow_rules.ranked_groups(*laws, size) for laws in zip(p.tolist(), q.tolist(), strict=True)
        ]
        torch.testing.assert_close(ratios, torch.tensor(expected, dtype=p.dtype), rtol=0, atol=1e-12)
    exact = torch.minimum(p, q)
    torch.testing.assert_close(q * rank_ratio(p, q, 1), exact, rtol=0, atol=1e-15)


def test_released_groups_equal_the_loop() -> None:
    """Ranks r - 7 to r + 6 with both filters; the lowest seven ranks by the exact rule; p(x) = 0 may pass."""
    vocabulary, syntax = 24, 2
    codes = random_codes(vocabulary, syntax)
    rule = ACCEPTANCE_RULES["grouped"](reference=True).fit(codes)
    assert isinstance(rule, RelaxedSampling)
    p, q = checks.random_laws(30, vocabulary)
    p = p.masked_fill(p < 0.02, 0.0)
    p, q = p / p.sum(-1, keepdim=True), q.clamp_min(1e-4) / q.clamp_min(1e-4).sum(-1, keepdim=True)
    accepted = rule.mass(p, q, p[:, :1]) / q
    assert codes.codebook is not None
    vectors = codes.codebook.double().tolist()
    expected = [
        slow_rules.released_groups(*laws, vectors) for laws in zip(p.tolist(), q.tolist(), strict=True)
    ]
    torch.testing.assert_close(accepted, torch.tensor(expected, dtype=p.dtype), rtol=0, atol=1e-9)
    assert (accepted[p == 0] > 0).any(), "as released, a token of probability zero may be accepted"
    assert (accepted * q).sum(-1).mean() > torch.minimum(p, q).sum(-1).mean()


def test_clusters_of_codes_hold_near_codes_and_judge_syntax_alone() -> None:
    centres = torch.tensor([[0.0, 0], [9, 0], [0, 9], [9, 9]])
    noise = torch.randn(4, 10, 2, generator=torch.Generator().manual_seed(0))
    cluster = cluster_codes((centres[:, None] + 0.1 * noise).flatten(0, 1), 4)
    assert [len(set(part.tolist())) for part in cluster.split(10)] == [1] * 4 and len(
        set(cluster.tolist())
    ) == 4
    p, q = checks.random_laws(200, 43)
    accepted = q * cluster_ratio(p, q, cluster, 4)
    assert (accepted.sum(-1) >= torch.minimum(p, q).sum(-1) - 1e-12).all()
    torch.testing.assert_close(accepted[:, 40:], torch.minimum(p, q)[:, 40:], rtol=0, atol=1e-15)


def test_cools_schedule_falls_and_never_below_the_exact_rule() -> None:
    depth = torch.arange(4, dtype=torch.float64)
    assert torch.allclose(Cool(3.0, nu=0.7).allowance(depth), (3 * torch.exp(-0.7 * depth)).clamp_min(1))
    assert Cool(3.0, nu=0.7).allowance(depth).tolist()[2:] == [1.0, 1.0]
    assert torch.allclose(
        Cool(2.0, nu=0.0, mu=0.1).allowance(depth), torch.full((4,), 2.0).double() * 0.904837418
    )
    p, q = checks.random_laws(50)
    torch.testing.assert_close(exact_law(Cool(1.0), p, q, 1, IID).output, p, rtol=0, atol=1e-11)
    gained = exact_law(Cool(2.0), p, q, 1, IID)
    assert (gained.acceptance >= torch.minimum(p, q).sum(-1) - 1e-11).all()
    assert torch.allclose(gained.acceptance, torch.minimum(q, 2 * p).sum(-1), rtol=0, atol=1e-11)


def test_joint_runs_equal_the_loop() -> None:
    generator = torch.Generator().manual_seed(6)
    p_x, q_x, u = torch.rand(3, 400, 7, dtype=torch.float64, generator=generator)
    p_x[:40, 3] = 0.0
    accepted = Suffix(0.8).accepts(p_x, q_x, u).long().cumprod(-1).sum(-1)
    rows = zip(p_x.tolist(), q_x.tolist(), u.tolist(), strict=True)
    assert accepted.tolist() == [slow_rules.joint_runs(*row, 0.8) for row in rows]
    assert len(set(accepted.tolist())) > 5


def test_where_probabilities_fall_joint_runs_are_speculative_sampling() -> None:
    rows, steps, vocabulary = 200, 4, 5
    p, q = dirichlet(2, rows, steps + 1, vocabulary, seed=7)
    tokens = p[:, :-1].argmax(-1)
    p_x = p[:, :-1].gather(-1, tokens[..., None])[..., 0]
    order = p_x.argsort(-1, descending=True)
    p = torch.cat([p[:, :-1].gather(1, order[..., None].expand(-1, -1, vocabulary)), p[:, -1:]], 1)
    tokens = torch.cat([torch.zeros(rows, 1, dtype=torch.long), tokens.gather(1, order)], 1)
    draft, scores = Draft.chain(tokens, IID, q), Scores(p.log(), False)
    random, emitted = RandomStream.from_seed(1, rows), torch.ones(rows, dtype=torch.long)
    exact, joint = (rule.verify(draft, scores, random, emitted) for rule in (SpeculativeSampling(), Suffix()))
    assert torch.equal(exact.accepted, joint.accepted) and torch.equal(exact.next_token, joint.next_token)
    assert joint.tv is None and len(set(exact.accepted.tolist())) > 2


def test_a_dear_rule_measures_one_judged_place_a_round() -> None:
    """LANTERN over a chain of sampled tokens: the place is one that was judged, and the others are NaN."""
    rule = fitted(Lantern(0.3, neighbours=2), 6)
    rows = 300
    laws = dirichlet(rows, 5, 6, seed=1)
    q = dirichlet(rows, 5, 6, seed=2) * 0.3 + 0.7 * laws.roll(1, 1)
    random = RandomStream.from_seed(2, rows)
    tokens = (q.log() + random.gumbel(torch.arange(5).expand(rows, 5), Purpose.DRAFT, 6, q.dtype)).argmax(-1)
    emitted = torch.arange(rows)
    verdict = rule.verify(Draft.chain(tokens, IID, q), Scores(laws.log(), False), random, emitted)
    assert verdict.tv is not None
    measured = ~verdict.tv.isnan()
    assert measured.sum(-1).tolist() == [1] * rows
    place = measured.long().argmax(-1)
    assert (place <= verdict.accepted).all() and len(set(place.tolist())) == 4
    for row in range(0, rows, 20):
        at = int(place[row])
        law = exact_law(rule, laws[row, at][None], q[row, at + 1][None], 1, IID)
        assert law.tv is not None and abs(float(law.tv - verdict.tv[row, at])) < 1e-9


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("name", ["budget", "lantern", "lantern++", "grouped", "cool", "suffix"])
def test_single_precision_and_a_draft_of_nothing_are_no_exception(name: str, nodes: int) -> None:
    rule = checks.rule_of(name)
    p, q = (law.float().view(20, nodes, 6) for law in checks.random_laws(20 * nodes))
    draft = Draft.chain(q.argmax(-1), IID, q)
    verdict = rule.verify(
        draft, Scores(p.log(), False), RandomStream.from_seed(0, 20), torch.ones(20, dtype=torch.long)
    )
    assert ((p[torch.arange(20), verdict.accepted].gather(1, verdict.next_token[:, None])) > 0).all()
    if name == "budget":
        assert verdict.tv is not None and (verdict.tv <= 0.1 + 1e-6).all()
