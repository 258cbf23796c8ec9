"""Draft length: the fastest size on the device is chosen, and outputs do not depend on it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count, takewhile
from statistics import fmean
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmspec.accelerators import build_accelerator
from mmspec.core.draft import DraftKind
from mmspec.core.sampling import Sampler
from mmspec.heads.drafter import HeadDrafter
from mmspec.heads.feature_session import FeatureSession, GrownTreeDrafter, GrownTreeSession
from mmspec.methods.copy.drafter import CopyDrafter
from mmspec.methods.dflash.drafter import BlockSession
from mmspec.methods.draft_model.drafter import DraftModelDrafter
from mmspec.targets.causal import CausalTarget
from mmspec.trees.pacing import (
    DEFAULT_PACING,
    PacedDrafter,
    PruningPolicy,
    SizePolicy,
)
from mmspec.trees.pacing.costs import PassTimes
from mmspec.trees.rejection import SpeculativeSampling
from tests.contracts.checks import PROMPTS, check_words, llama
from tests.contracts.running import FanOutTarget, decode, random_prompts
from tests.methods import dflash_checks
from tests.methods.eagle_checks import WORDS, Examined, Gullible, SlowWay, few_words, head_for, paths_of
from tests.methods.heads_checks import drafter_for
from tests.methods.naive_eagle import NaiveEagle
from tests.methods.naive_heads import NaiveHydra, NaiveMedusa
from tests.oracles import tree_of
from tests.tiny_models import tiny_lm_v8
from tests.trees.length_checks import PruningScript, Script, Scripts, paced

TRIALS, LONG_TRIAL = DEFAULT_PACING.trials, DEFAULT_PACING.longest_trial
PAUSE, LONGEST_PAUSE = DEFAULT_PACING.first_pause, DEFAULT_PACING.longest_pause


@dataclass
class Device:
    """Device on which rounds take given seconds, and a text whose tokens are predicted at some rate.

    Attributes:
        seconds: of a round of each choice.
        rate: how often a drafted token is right, if those before it are.
        rows: of a batch.
    """

    seconds: Sequence[float]
    rate: float
    rows: int = 1
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    def run(self, model: SizePolicy, rounds: int) -> list[int]:
        """The choices that a model makes in so many rounds."""
        choices = []
        for _ in range(rounds):
            choices.append(model.choose())
            tokens = [self.tokens(model.depths[choices[-1]]) for _ in range(self.rows)]
            model.record(choices[-1], tokens, self.seconds[choices[-1]])
        return choices

    def tokens(self, depth: int) -> int:
        """Tokens of a round of one row."""
        return 1 + next((right for right in range(depth) if self.dice.random() >= self.rate), depth)


@pytest.mark.parametrize(("rate", "best", "rows"), [(0.95, 1, 1), (0.7, 2, 4), (0.7, 2, 1), (0.45, 3, 4)])
def test_the_size_that_pays_best_is_taken(rate, best, rows):
    """S = tau / (1 + c_draft * passes + c_verify(n)), with costs in plain rounds of 10 ms."""
    draft, passes, verify, depths = 0.12, (0, 9, 3, 1), (0.0, 0.5, 0.2, 0.05), (0, 9, 3, 1)
    costs = [1 + draft * steps + more for steps, more in zip(passes, verify, strict=True)]
    tau = [sum(rate**depth for depth in range(deepest + 1)) for deepest in depths]
    pays = [tokens / cost for tokens, cost in zip(tau, costs, strict=True)]
    assert pays.index(max(pays)) == best
    model, device = SizePolicy(depths[1:]), Device([0.01 * cost for cost in costs], rate, rows)
    choices = device.run(model, 600)
    assert choices[: 2 * TRIALS] == [0] * TRIALS + [3] * TRIALS, "the cheapest size is tried first"
    assert set(choices[2 * TRIALS :]) == {0, 1, 2, 3}, "the others have a round now and then"
    speed = sum(tau[choice] for choice in choices) / sum(costs[choice] for choice in choices)
    assert speed > 0.9 * max(pays)
    assert model.speedup(best) == pytest.approx(pays[best], rel=0.25)


def test_nothing_is_drafted_where_nothing_pays_and_trials_get_rarer():
    model, device = SizePolicy((4, 1)), Device((1.0, 5.0, 1.5), 0.3)
    begin = device.run(model, TRIALS + LONG_TRIAL + PAUSE)
    assert "0" * PAUSE in "".join(map(str, begin)), "a pause follows the trial"
    assert begin.count(1) <= 2, "what costs much is prepared once and tried once"
    choices = device.run(model, 6000)
    drafted = [index for index, choice in enumerate(choices) if choice]
    assert max(b - a for a, b in zip(drafted, drafted[1:], strict=False)) > LONGEST_PAUSE
    lost = sum(device.seconds[choice] for choice in choices) / len(choices)  # of tokens, there are as many
    assert lost < 1.03


def test_lucky_rounds_do_not_shorten_pauses():
    """Rounds that yield 8 % less than they cost, by a clock that is wrong by up to 10 % each time."""
    drafted = 0
    for seed in range(40):
        model, dice = SizePolicy((4, 1)), random.Random(seed)
        device = Device((1.0, 1.3, 1.12), 0.04, dice=dice)
        for _ in range(600):
            choice = model.choose()
            tokens = device.tokens(model.depths[choice])
            model.record(choice, [tokens], device.seconds[choice] * dice.uniform(0.9, 1.1))
            drafted += choice > 0
    assert drafted < 40 * 6 * LONG_TRIAL, "pauses of 32, 64, 128 and 256 rounds: about five trials"


@pytest.mark.parametrize("prepared", [1.0, 400.0])
def test_the_first_round_of_a_size_may_take_long(prepared: float) -> None:
    """Compiling, capturing or packing takes hundreds of plain rounds, once for each size."""
    model, first = SizePolicy((8, 2)), {0, 1, 2}
    for _ in range(60):
        choice = model.choose()
        seconds = 1.0 + 0.1 * model.depths[choice] + (prepared if choice in first else 0.0)
        first.discard(choice)
        model.record(choice, [1 + model.depths[choice]], seconds)
    assert model.cost(1) == pytest.approx(1.8) and model.cost(2) == pytest.approx(1.2)
    assert model.choose() == 1


class Rounds:
    """Rounds of a device, and of a drafter whose candidates are right as often as they are rated.

    Attributes:
        seconds: of a round by its number of candidates, drafting left out.
        drafting: seconds of the drafter.
        rows: whose candidates are right independently of each other.
    """

    def __init__(
        self, seconds: Callable[[int], float], drafting: float, shares: Sequence[float], rows: int = 1
    ) -> None:
        self.seconds, self.drafting, self.shares, self.rows = seconds, drafting, shares, rows
        self.dice = random.Random(0)

    def run(self, model: PruningPolicy, rounds: int) -> tuple[list[int], float]:
        """Candidates that a model keeps in so many rounds of chains, and a row's tokens by the seconds."""
        kept, tokens, time = [], 0.0, 0.0
        for _ in range(rounds):
            rests, share = model.rests(), self.dice.choice(self.shares)
            paths = [share**depth for depth in range(1, 17)]
            choice = 0 if rests else model.choose([list(accumulate(paths, initial=1.0))])
            nodes, drafting = model.nodes[choice], 0.0 if rests else self.drafting
            given = [
                1 + next((n for n in range(nodes) if self.dice.random() >= share), nodes)
                for _ in range(self.rows)
            ]
            seconds = self.seconds(nodes) + drafting
            model.record(choice, given, seconds, drafting, levels=int(drafting > 0))
            kept, tokens, time = [*kept, nodes], tokens + fmean(given), time + seconds
        return kept, tokens / time


def steps(nodes: int) -> float:
    """Seconds of a round on a CPU that computes up to three rows in the time of one."""
    return 1.0 if not nodes else 1.2 if nodes <= 2 else 1.8 + 0.05 * nodes


def test_as_many_candidates_are_kept_as_pay_in_a_round():
    rounds, model = Rounds(steps, 0.0, (0.02, 0.3, 0.95)), PruningPolicy((16, 8, 4, 2, 1))
    kept, speed = rounds.run(model, 400)
    assert {0, 16} <= set(kept[20:]) and speed > 1.9
    fixed = [
        Rounds(steps, 0.0, rounds.shares).run(Always(model.nodes[1:], size), 400)[1] for size in (1, 2, 4)
    ]
    assert speed > 1.15 * max(fixed), "no size does as well in all rounds"


class Always(PruningPolicy):
    """Keeps as many candidates in every round."""

    def __init__(self, nodes: Sequence[int], size: int) -> None:
        super().__init__(nodes)
        self.size = size

    def rests(self) -> bool:
        return False

    def choose(self, sums: Sequence[Sequence[float]]) -> int:
        return self.size


def test_a_drafter_that_costs_more_than_it_gives_rests():
    kept, speed = Rounds(steps, 0.3, (0.1,)).run(PruningPolicy((8, 4, 2, 1)), 2000)
    assert speed > 0.96
    assert "0" * LONGEST_PAUSE in "".join(map(str, kept))
    model = PruningPolicy((8, 4, 2, 1))
    kept, speed = Rounds(steps, 0.3, (0.9,)).run(model, 400)
    assert speed > 1.5 and kept.count(0) < 20
    assert model.cost(1) == pytest.approx(2.2), (
        "of the round without the drafter, whose time is spent by then"
    )


def test_what_never_pays_costs_little_and_what_pays_keeps_its_gain():
    """With speed that drifts by 10 %, costs are at most 6 % of 128 rounds, 2 % of 1,000, 5 % of a gain."""

    def speed(share: float, rounds: int, seed: int) -> float:
        drift, dice = count(), random.Random(seed)

        def seconds(nodes: int) -> float:
            return steps(nodes) * (1 + 0.1 * math.sin(next(drift) / 25 + seed)) * dice.lognormvariate(0, 0.05)

        device = Rounds(seconds, 0.3, (share,))
        device.dice = dice
        return device.run(PruningPolicy((16, 8, 4, 2, 1)), rounds)[1]

    assert fmean(speed(0.1, 128, seed) for seed in range(8)) > 0.94
    assert fmean(speed(0.1, 1000, seed) for seed in range(8)) > 0.98
    gained = fmean(speed(0.8, 400, seed) for seed in range(8))
    always = Rounds(steps, 0.3, (0.8,)).run(Always((16, 8, 4, 2, 1), 2), 400)[1]
    assert gained > 0.95 * always


@pytest.mark.parametrize("drafting", [0.0, 0.2], ids=["free", "by a model"])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.8])
def test_drafts_rest_where_rows_are_many_and_come_back(drafting: float, share: float) -> None:
    """A device that computes six nodes in the time of one: throughput by rows, each for 64 x 64 tokens."""

    def speed(rows: int) -> tuple[int, float]:
        """Drafted rounds, and tokens in the time of a plain round of so many rows."""

        def seconds(nodes: int) -> float:
            return max(1.0, rows * (1 + nodes) / 6) / max(1.0, rows / 6)

        kept, gained = Rounds(seconds, drafting, (share,)).run(paced.policy_for(rows), 4096 // rows)
        return sum(map(bool, kept)), gained

    head = GrownTreeDrafter(head_for(few_words()), num_draft_tokens=16, depth=4, top_k=4)
    paced = PacedDrafter(head if drafting else CopyDrafter(), {})
    wide, slow = speed(64)  # nothing is known before
    assert wide <= 1 and slow > 0.97
    narrow, fast = speed(1)
    assert narrow > 2000 and fast > 1.1 or share * (1 + drafting) < 0.4
    for rows in (2, 4, 8, 16, 32, 64):
        drafted, gained = speed(rows)
        assert gained > 0.97
        assert rows < 8 or drafted <= 4096 // rows // 16
    assert speed(1)[1] > 0.99 * fast
    assert list(paced.policies) == [64, 1, 2, 4, 8, 16, 32]


def test_drafts_go_on_in_wide_batches_where_further_tokens_cost_less() -> None:
    """A device on which the second token costs as much as seventeen later ones."""

    def speed(rows: int) -> tuple[int, float]:
        def seconds(nodes: int) -> float:
            tokens = torch.tensor([rows * (1 + nodes), rows])
            several, plain = (8 + 0.25 * tokens + 4 * (tokens > 1)).tolist()
            return several / plain

        kept, gained = Rounds(seconds, 0.4, (0.9,), rows).run(paced.policy_for(rows), 1024 // rows)
        return sum(map(bool, kept)), gained

    head = GrownTreeDrafter(head_for(few_words()), num_draft_tokens=16, depth=4, top_k=4)
    paced = PacedDrafter(head, {})
    for rows in (1, 2, 4, 8, 16, 32):
        drafted, gained = speed(rows)
        assert drafted > 0.5 * 1024 // rows and gained > 1.05


def test_the_time_of_a_forward_pass_follows_from_those_with_fewer_and_more_tokens() -> None:
    passes = PassTimes(replace(DEFAULT_PACING, node_cost=0.1))
    assert passes(4) == 0.0
    passes.record(2, 1.1)
    assert [passes(1), passes(2), passes(12)] == pytest.approx([1.0, 1.1, 2.1])  # 0.1 for each token
    passes.record(12, 5.1)
    assert [passes(7), passes(22)] == pytest.approx([3.1, 9.1])
    for seconds in (1.3, 1.3):  # the median counts
        passes.record(2, seconds)
    assert passes(2) == 1.3
    passes = PassTimes(replace(DEFAULT_PACING, node_cost=0.1))
    passes.record(1, 1.0)
    passes.record(4, 1.0)
    assert passes(5) > 1.05, "few tokens can be free where more of them are not"


@pytest.mark.parametrize(("seconds", "pause"), [(2.25, 56), (2.5, 64), (50.0, LONGEST_PAUSE)])
def test_a_pause_is_longer_after_a_trial_that_lost_more(seconds: float, pause: int) -> None:
    """A trial of one round, where a plain one takes half a second."""
    model = PruningPolicy((4, 2, 1), config=replace(DEFAULT_PACING, stall=math.inf))
    for _ in range(TRIALS):
        model.record(0, [1], 0.5, 0.0, 0)
    assert not model.rests()
    model.record(1, [1], seconds, 0.0, 0)
    rests = list(takewhile(bool, (model.rests() for _ in range(2 * LONGEST_PAUSE))))
    assert len(rests) == pause


def test_a_part_of_a_tree_keeps_its_paths() -> None:
    tokens = torch.tensor([[9, 1, 2, 3, 4, 5], [9, 6, 7, 8, 0, 0]])
    draft = tree_of(tokens, [0, 0, 0, 1, 3, 2], DraftKind.POINT)
    part = draft.part_of([[2, 1, 3], [1]], 4)
    assert paths_of(part, 0) == {(2,), (1,), (1, 3)} and paths_of(part, 1) == {(6,)}
    assert part.tokens.shape == (2, 5) and part.max_depth <= draft.max_depth
    nothing = draft.part_of([[], []], 0)
    assert nothing.tokens.tolist() == [[9], [9]] and not nothing.max_depth


def test_a_round_lasts_from_one_proposal_to_the_next_and_gives_what_a_row_grew_by():
    clock = count()
    drafter = DraftModelDrafter(llama(), 3)
    models = {3: Script(drafter.sizes, (1, 0, 2))}
    run = decode(
        llama(), PROMPTS, PacedDrafter(drafter, models, lambda: float(next(clock))), max_new_tokens=18
    )
    whole = {1: 4, 0: 1, 2: 3}  # a model that drafts for itself is always right
    rounds = models[3].rounds
    assert [(choice, given) for choice, given, _ in rounds[:4]] == [
        (choice, [whole[choice]] * 3) for choice in (1, 0, 2, 1)
    ]
    assert {seconds for _, _, seconds in rounds} == {1.0}
    assert run.stats.draft_passes > 0


@pytest.mark.parametrize("kind", ["eagle", "dflash", "draft_model"])
def test_prompts_are_read_before_the_first_draft_and_on_no_rounds_clock(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, now, read, seconds = llama(), [0.0], list[str](), list[float]()
    inner: Any = {
        "eagle": lambda: GrownTreeDrafter(head_for(target)).fit(target),
        "dflash": lambda: dflash_checks.drafter_for(target),
        "draft_model": lambda: DraftModelDrafter(CausalTarget(llama().model), 3),
    }[kind]()
    reader, name = {
        "eagle": (FeatureSession, "_read_prompts"),
        "dflash": (BlockSession, "_read_prompts"),
        "draft_model": (inner.model, "prefill"),
    }[kind]
    untimed = getattr(reader, name)

    def timed(*args: Any) -> Any:
        read.append(kind)
        now[0] += 100.0
        return untimed(*args)

    def watched(record: Callable[..., None]) -> Callable[..., None]:
        def recorded(model: Any, *told: Any) -> None:
            seconds.append(told[2])
            record(model, *told)

        return recorded

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(reader, name, timed)
    decode(target, PROMPTS, paced(inner, [0]), max_new_tokens=12)
    assert not read, "nothing was drafted"
    drafter = PacedDrafter(inner, Scripts((0, 0, 2, 1)), clock)
    for model in (Script, PruningScript):
        monkeypatch.setattr(model, "record", watched(model.record))
    decode(target, PROMPTS, drafter, max_new_tokens=12)
    assert read == [kind], "once, for the first draft"
    assert len(seconds) >= 3
    assert max(seconds) < 100.0


def test_measured_costs_outlive_a_call_and_not_a_change_of_target():
    accelerator = build_accelerator("draft_model", model=llama(), length="cost").fit(llama())
    for drafter in (PacedDrafter(accelerator.drafter, accelerator.costs) for _ in range(2)):
        decode(llama(), PROMPTS, drafter)
        (known,) = accelerator.costs.values()
    assert list(accelerator.costs) == [len(PROMPTS)]
    assert known.speedup(1) > 0
    assert accelerator.fit(llama()).costs == {}


@pytest.mark.parametrize(
    ("name", "options", "temperature", "expected"),
    [
        ("copy", {}, 0.0, True),
        ("copy", {}, 1.0, True),
        ("copy", {"length": "fixed"}, 0.0, False),
        ("draft_model", {"model": "llama"}, 1.0, True),
        ("draft_model", {"model": "llama", "sampling": "sampled"}, 0.0, True),
        ("draft_model", {"model": "llama", "sampling": "sampled"}, 1.0, False),
        ("draft_model", {"model": "llama", "sampling": "sampled", "length": "cost"}, 1.0, True),
        ("draft_model", {"model": "llama", "length": "confidence"}, 1.0, False),
        ("copy", {"acceptance": "typical"}, 1.0, False),
        ("copy", {"acceptance": "top_beta"}, 0.0, False),
        ("draft_model", {"model": "llama", "sampling": "sampled", "acceptance": "lantern"}, 0.0, True),
        ("none", {}, 0.0, False),
        ("sjd", {}, 1.0, False),
    ],
)
def test_sizes_are_chosen_where_no_token_can_depend_on_them(
    chosen_by_cost, name, options, temperature, expected
):
    options = {key: llama() if value == "llama" else value for key, value in options.items()}
    accelerator = build_accelerator(name, **options)
    assert chosen_by_cost(accelerator, Sampler(temperature)) is expected


@pytest.mark.parametrize(
    ("kind", "slow_way", "scale"),
    [("eagle", NaiveEagle, 3.0), ("medusa", NaiveMedusa, 1.0), ("hydra", NaiveHydra, 1.0)],
)
@pytest.mark.every(3)
def test_drafts_after_pruned_ones_are_those_of_the_slow_way(
    kind: str, slow_way: SlowWay, scale: float
) -> None:
    """Drafts that are pruned and rounds left out, in float64: the head has read all that was committed."""
    target, sizes = few_words(), {"num_draft_tokens": 12, "depth": 4, "top_k": 4}
    head: HeadDrafter = (
        GrownTreeDrafter(head_for(target), **sizes).fit(target)
        if kind == "eagle"
        else drafter_for(kind, target, **sizes)
    )
    examined, prompts = Examined(head, 24, slow_way), random_prompts(2, WORDS, longest=6, seed=4)
    how: dict[str, Any] = {"max_new_tokens": 24}
    if scale != 1:
        how["negatives"] = random_prompts(2, WORDS, longest=6, seed=9)
    run = decode(target, prompts, paced(examined), Gullible(), Sampler(1.0, guidance_scale=scale), **how)
    assert examined.drafts >= 8, "some drafts were compared"
    assert len(run.stats.accepted_histogram) >= 3
    assert max(run.stats.drafted) < 12 * max(run.stats.rounds) / 2, "most drafts were pruned"


def test_the_distribution_is_kept_where_chains_of_changing_sizes_stop_early() -> None:
    target, small = FanOutTarget(tiny_lm_v8()), FanOutTarget(tiny_lm_v8(seed=5))
    drafter = paced(DraftModelDrafter(small, 3, "sampled").stopping_below(0.3), (0, 2, 1))
    run = check_words(target, drafter, SpeculativeSampling(), Sampler(1.0), 6_000, length=4)
    drafted = sum(run.stats.drafted) / sum(run.stats.rounds)
    assert 0.1 < drafted < 2.5, "some chains were cut short, others were not"


class Operators(TorchDispatchMode):
    """Counts operators, views left out."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **kwargs or {})


def test_a_head_that_rests_adds_no_operators_to_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it has rested: earlier rounds are not copied again."""
    target = few_words()
    head = GrownTreeDrafter(head_for(target), num_draft_tokens=12, depth=4, top_k=4).fit(target)
    counts: list[int] = []
    real = GrownTreeSession.observe

    def counted(session: Any, *told: Any) -> None:
        with Operators() as operators:
            real(session, *told)
        counts.append(operators.count)

    monkeypatch.setattr(GrownTreeSession, "observe", counted)
    decode(target, random_prompts(2, WORDS, longest=6, seed=4), paced(head, [0]), max_new_tokens=24)
    assert len(counts) > 20 and not any(counts)
