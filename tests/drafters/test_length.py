"""Draft length: the size that pays on this device is taken, and no output depends on it."""

from __future__ import annotations

from itertools import count

import pytest

from mmspec.accelerators import build_accelerator
from mmspec.accelerators.accelerator import Accelerator
from mmspec.acceptance.matching import SampleAndMatch
from mmspec.decoding.sampling import Sampler
from mmspec.drafters.draft_model import DraftModelDrafter
from mmspec.drafters.eagle import EagleDrafter
from mmspec.drafters.length import LONGEST_PAUSE, PAUSE, TRIALS, CostModel, PacedDrafter
from mmspec.drafters.none import NoDrafter
from mmspec.errors import InputError, UnknownArgumentError
from tests.contracts.checks import PROMPTS, llama
from tests.contracts.running import decode, generate
from tests.drafters import eagle_checks, flash_checks, length_checks
from tests.drafters.flash_checks import answer, inputs_of, target_of
from tests.drafters.length_checks import Device, paced

LENGTHS = [{"length": "confidence", "stop_below": 0.05}, {"length": "cost"}]


@pytest.mark.parametrize(("rate", "best", "rows"), [(0.95, 3, 1), (0.7, 2, 4), (0.7, 2, 1), (0.45, 1, 4)])
def test_the_size_that_pays_best_is_taken(rate, best, rows):
    """S = tau / (1 + c_draft * passes + c_verify(n)), with costs in plain rounds of 10 ms."""
    draft, passes, verify, depths = 0.12, (0, 1, 3, 9), (0.0, 0.05, 0.2, 0.5), (0, 1, 3, 9)
    costs = [1 + draft * steps + more for steps, more in zip(passes, verify, strict=True)]
    tau = [sum(rate**depth for depth in range(deepest + 1)) for deepest in depths]
    pays = [tokens / cost for tokens, cost in zip(tau, costs, strict=True)]
    assert pays.index(max(pays)) == best
    model, device = CostModel(depths[1:]), Device([0.01 * cost for cost in costs], rate, rows)
    choices = device.run(model, 600)
    assert choices[: 4 * TRIALS] == [choice for choice in range(4) for _ in range(TRIALS)]
    assert set(choices[4 * TRIALS :]) == {0, 1, 2, 3}, "the others have a round now and then"
    speed = sum(tau[choice] for choice in choices) / sum(costs[choice] for choice in choices)
    assert speed > 0.9 * max(pays)
    assert model.speedup(best) == pytest.approx(pays[best], rel=0.25)


def test_depths_that_were_never_reached_are_guessed_from_those_that_were():
    model = CostModel((2, 8))
    for _ in range(TRIALS):
        model.record(0, [1], 1.0)
    for _ in range(40):
        model.record(1, [3], 1.2)  # all that a short draft can give
    model.record(2, [9], 1.5)
    assert model.speedup(2) > 1.5 * model.speedup(1)


def test_nothing_is_drafted_where_nothing_pays_and_trials_get_rarer():
    model, device = CostModel((1, 4)), Device((1.0, 1.5, 5.0), 0.3)
    assert device.run(model, 3 * TRIALS + PAUSE)[3 * TRIALS :] == [0] * PAUSE
    choices = device.run(model, 6000)
    drafted = [index for index, choice in enumerate(choices) if choice]
    assert max(b - a for a, b in zip(drafted, drafted[1:], strict=False)) > LONGEST_PAUSE
    lost = sum(device.seconds[choice] for choice in choices) / len(choices)  # of tokens, there are as many
    assert lost < 1.03


def test_what_is_accepted_rarely_but_at_length_has_its_chance():
    model, choices = CostModel((8,)), []
    for index in range(200):
        choices.append(model.choose())
        found = choices[-1] == 1 and index % 11 == 10
        model.record(choices[-1], [9 if found else 1], 1.1 if choices[-1] else 1.0)
    assert choices.count(1) > 150


def test_drafting_is_taken_up_again_when_it_pays():
    model, hard, easy = CostModel((2, 8)), Device((1.0, 1.3, 2.0), 0.05), Device((1.0, 1.3, 2.0), 0.95)
    assert hard.run(model, 100)[-40:].count(0) >= 38
    assert easy.run(model, 200)[-40:].count(2) >= 38
    assert hard.run(model, 120)[-30:].count(0) >= 28  # the text changed: nothing is accepted any more
    assert easy.run(model, 200)[-40:].count(2) >= 38


def test_a_round_lasts_from_one_proposal_to_the_next_and_gives_what_a_row_grew_by():
    clock = count()
    drafter = DraftModelDrafter(llama(), 3)
    models = {3: length_checks.Script(drafter.sizes, (1, 0, 2))}
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


@pytest.mark.parametrize(
    ("name", "family", "temperature", "batch"),
    [
        ("eagle", "llava", 0.0, 1),
        ("eagle", "qwen2_5_vl", 0.9, 3),
        ("flash", "llava", 0.9, 3),
        ("flash", "qwen2_5_vl", 0.0, 1),
        ("draft_model", "llava", 0.0, 3),
        ("draft_model", "qwen2_5_vl", 0.9, 3),
        ("copy", "llava", 0.9, 3),
        ("copy", "qwen2_5_vl", 0.0, 1),
    ],
)
def test_no_output_depends_on_the_size_of_drafts(name, family, temperature, batch):
    target, sampler = target_of(family), Sampler(temperature)
    inputs = list(inputs_of(family).values())[:batch]
    expected = answer(target, NoDrafter(), inputs, sampler, 16).outputs()
    models = {
        "eagle": eagle_checks.head_for(target),
        "flash": flash_checks.head_for(target),
        "draft_model": target,
    }
    options = {"model": models[name]} if name in models else {"min_match": 1}
    for length in LENGTHS:
        if name == "copy" and length["length"] == "confidence":
            continue
        accelerator = build_accelerator(name, **options, **length).fit(target)
        drafter = accelerator.drafter if accelerator.costs is None else paced(accelerator.drafter)
        assert answer(target, drafter, inputs, sampler, 16).outputs() == expected


def test_measured_costs_outlive_a_call_and_not_a_change_of_target():
    accelerator = build_accelerator("draft_model", model=llama(), length="cost").fit(llama())
    for drafter in (PacedDrafter(accelerator.drafter, accelerator.costs) for _ in range(2)):
        decode(llama(), PROMPTS, drafter)
        (known,) = accelerator.costs.values()
    assert list(accelerator.costs) == [len(PROMPTS)]
    assert known.speedup(1) > 0
    assert accelerator.fit(llama()).costs == {}


def test_greedy_output_is_that_of_generate():
    target = llama()
    drafter = EagleDrafter(eagle_checks.head_for(target)).fit(target)
    assert decode(target, PROMPTS, paced(drafter)).outputs == [generate(target.model, p) for p in PROMPTS]


@pytest.mark.parametrize("kind", ["eagle", "medusa", "hydra", "hydra, without prefix attention"])
def test_resized_drafts_are_those_of_the_slow_way(kind):
    length_checks.resized_drafts_are_those_of_the_slow_way(kind)


def test_guided_drafts_of_changing_sizes():
    length_checks.resized_drafts_are_those_of_the_slow_way(scale=3.0)


@pytest.mark.parametrize("pace", [(1,), (0, 2, 1)])
def test_the_distribution_is_kept_where_chains_stop_early(pace):
    length_checks.confident_distribution(pace=pace)


def test_a_higher_threshold_drafts_less():
    target, head = llama(), eagle_checks.head_for(llama())
    passes = [
        decode(
            target, PROMPTS, EagleDrafter(head).stopping_below(least).fit(target), max_new_tokens=24
        ).stats.draft_passes
        for least in (0.001, 0.5, 0.9)
    ]
    assert passes[0] > passes[1] > passes[2]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("eagle", {"length": "costs"}, "cost"),
        ("eagle", {"length": "confidence", "stop_below": 0.0}, "stop_below"),
        ("eagle", {"length": "cost", "stop_below": 0.5}, "stop_below"),
        ("eagle", {"length": "confidence", "tree": "eagle"}, "dynamic tree"),
        ("copy", {"length": "confidence"}, "CopyDrafter"),
        ("none", {"length": "cost"}, "one size"),
        ("sjd", {"length": "cost"}, "one size"),
    ],
)
def test_what_cannot_be_is_refused(name, options, message):
    if name == "eagle":
        options = {"model": eagle_checks.head_for(llama()), **options}
    with pytest.raises(InputError, match=message):
        build_accelerator(name, **options)


def test_a_mistyped_option_names_the_nearest():
    with pytest.raises(UnknownArgumentError, match="length"):
        build_accelerator("copy", lenght="cost")


def test_fixed_is_the_default():
    accelerator = build_accelerator("copy")
    assert accelerator.costs is None
    assert Accelerator("copy", NoDrafter(), SampleAndMatch()).costs is None


def test_the_draft_model_has_read_what_it_was_left_out_of():
    length_checks.draft_model_is_always_right()
