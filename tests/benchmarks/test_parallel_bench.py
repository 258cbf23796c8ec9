"""Tasks whose results for a perfect model are known in closed form."""

from __future__ import annotations

import math

import pytest

from benchmarks.parallel_bench import TASKS, decode, is_right
from mmspec.methods.entropy_bound.policy import EntropyBound
from mmspec.methods.threshold.policy import Threshold
from mmspec.places.confidence import LowConfidence
from mmspec.places.policies import PlaceRule
from mmspec.places.sequential import Sequential

WORDS, SAMPLES = 6, 4000


def shuffled(group: int) -> float:
    """Return the probability of a permutation when the places of each group are drawn independently."""
    chance, left = 1.0, WORDS
    while left:
        together = min(group, left)
        chance *= math.perm(left, together) / left**together
        left -= together
    return chance


def replaced(group: int) -> float:
    """Return the probability that exactly one word is replaced."""
    chance, before, left = 0.0, 1.0, WORDS
    while left:
        together, share = min(group, left), 1 / left
        chance += before * together * share * (1 - share) ** (together - 1)
        before *= (1 - share) ** together
        left -= together
    return chance


@pytest.mark.parametrize("group", [1, 2, 4, 6])
@pytest.mark.parametrize("task", TASKS)
def test_a_rule_of_so_many_places_is_right_as_often_as_the_closed_form(task: str, group: int) -> None:
    """Within three standard deviations. `sequential` has the same result, because all places are alike."""
    expected = {"copy": 1.0, "replace": replaced(group), "shuffle": shuffled(group)}[task]
    if group == WORDS:
        known = {"copy": 1.0, "replace": (1 - 1 / WORDS) ** (WORDS - 1)}
        known["shuffle"] = math.factorial(WORDS) / WORDS**WORDS
        assert expected == pytest.approx(known[task])
    rules: tuple[PlaceRule, ...] = (Sequential(group),)
    if task != "replace" or group in (1, WORDS):  # the most confident places are those of unchanged words
        rules = (*rules, LowConfidence(group))
    for rule in rules:
        outputs, forwards = decode(task, rule, WORDS, SAMPLES)
        found = is_right(task, outputs).double().mean().item()
        deviation = math.sqrt(expected * (1 - expected) / SAMPLES)
        assert abs(found - expected) <= 3 * deviation + 1e-12
        assert set(forwards.tolist()) == {math.ceil(WORDS / group)}


def test_rules_that_adapt_decide_a_copy_at_once_and_a_shuffle_one_by_one() -> None:
    for rule in (Threshold(threshold=0.9), EntropyBound(entropy_bound=0.1)):
        outputs, forwards = decode("copy", rule, WORDS, 50)
        assert is_right("copy", outputs).all() and set(forwards.tolist()) == {1}
        outputs, forwards = decode("shuffle", rule, WORDS, 50)
        assert is_right("shuffle", outputs).all() and set(forwards.tolist()) == {WORDS}
