"""Rules that choose places of a block, in mmspec's tests of such rules."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mmspec.accelerators import build_accelerator
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.families.masked_language.target import MaskedTarget
from mmspec_extras.methods.learned.filter import CommitFilter, CommitFilterConfig
from tests.contracts.running import decode
from tests.core import test_callers_defaults
from tests.families.naive_masked import scores_of
from tests.places import test_policies as test_places
from tests.places.test_policies import END, LENGTH, PROMPTS, At, Pick, Seen, model_of, noise_of, see, surest


def by_factor(factor: float) -> Pick:
    def pick(seen: list[Seen], at: At) -> set[int]:
        ranked = sorted(seen, key=lambda one: (-one.sure, one.place))
        count = 0
        while count < len(ranked) and (count + 2) * (1 - ranked[count].sure) < factor:
            count += 1
        return surest(seen, max(1, count))

    return pick


def prophet(gap: float) -> Pick:
    def pick(seen: list[Seen], at: At) -> set[int]:
        best = [sorted(one.scores, reverse=True)[:2] for one in seen]
        mean = sum(first - second for first, second in best) / len(best)
        bar = gap if at.progress < 0.33 else gap * 2 / 3 if at.progress < 0.67 else gap / 3
        return {one.place for one in seen} if mean >= bar else surest(seen, 1)

    return pick


def weighted(least: float, count: int | None) -> Pick:
    """EOSER with one place per step, or ASS if `count` is None: 1, 2, 4, ... places, then all."""

    def pick(seen: list[Seen], at: At) -> set[int]:
        if count is None:
            steps = int(math.log2(at.size))
            step = int(math.log2(at.decided + 1))
            grown = (2 ** (step + 1) - 1) / 2**steps
            many = 2**step if step < max(steps, 1) - 1 else len(seen)
        else:
            grown, many = (at.begin + at.decided) / at.length, count
        weight = least + (1 - least) * min(grown, 1.0)
        return surest(seen, many, lambda one: one.sure * (weight if one.token == END else 1.0))

    return pick


CASES: list[tuple[str, dict[str, Any], Pick]] = [
    ("factor", {"factor": 2.0}, by_factor(2.0)),
    ("factor", {"factor": 4.0}, by_factor(4.0)),
    ("prophet", {"gap": 0.0}, prophet(0.0)),
    ("prophet", {"gap": 1.2}, prophet(1.2)),
    ("prophet", {"gap": 99.0}, prophet(99.0)),
    ("end_weight", {"end_weight": 0.1}, weighted(0.1, 1)),
    ("end_weight", {"end_weight": 1.0}, lambda seen, at: surest(seen, 1)),
    ("ascending", {}, weighted(0.01, None)),
]


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.8)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("name", "options", "pick"), CASES)
def test_tokens_and_forwards_are_those_of_lists(
    name: str, options: dict[str, Any], pick: Pick, sampler: Sampler
) -> None:
    test_places.test_tokens_and_forwards_are_those_of_lists(name, options, pick, sampler)


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.8)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("least", [0.12, 0.3, 2.0])
def test_blocks_that_end_at_delimiters_are_those_of_lists(least: float, sampler: Sampler) -> None:
    """AdaBlock (2509.26432): the surest delimiter in the window ends the block."""
    window, longest, bar, delimiters = 6, 4, 0.25, {1, 2, 3, 5, 7, 11, 13}
    model = model_of("llada")
    mask, stream = model.config.mask_token_id, RandomStream.from_seed(5, len(PROMPTS))
    options = {"delimiters": sorted(delimiters), "delimiter_threshold": least, "threshold": bar}
    options |= {"block_length": longest, "window": window / LENGTH + 1e-9}
    made = build_accelerator("adablock", **options).fit(MaskedTarget(model))
    how = {"max_new_tokens": LENGTH, "seed": 5}
    run = decode(MaskedTarget(model), PROMPTS, made.drafter, made.rule, sampler, **how)
    sizes = set()
    for row, prompt in enumerate(PROMPTS):
        output, is_open, end, forwards = [mask] * LENGTH, [True] * LENGTH, 0, 0
        while any(is_open):
            begin = is_open.index(True)
            scores = scores_of(model, [*prompt, *output])[len(prompt) :]
            forwards += 1
            noise = noise_of(stream, row, is_open.count(False))
            seen = {
                place: see(scores[place], place, mask, noise, sampler, own=True) for place in range(LENGTH)
            }
            if begin >= end:
                looked = [seen[place] for place in range(begin, min(begin + window, LENGTH))]
                sure = [(-one.sure, one.place) for one in looked if one.token in delimiters]
                found = bool(sure) and -min(sure)[0] >= least
                end = min(sure)[1] + 1 if found else min(begin + longest, LENGTH)
                sizes.add(end - begin)
            left = [seen[place] for place in range(begin, end) if is_open[place]]
            for place in surest(left, 1) | {one.place for one in left if one.sure >= bar}:
                output[place], is_open[place] = seen[place].token, False
        assert run.outputs[row] == output and run.stats.nfe[row] == forwards
    assert len(sizes) > 2 or least == 2.0


def test_every_rule_decides_something_and_nothing_that_is_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test_places.OPTIONS, "learned", {"filter": CommitFilter(CommitFilterConfig(8))})
    test_places.test_every_rule_decides_something_and_nothing_that_is_not_open()


def test_rules_are_lossy_and_refuse_settings_out_of_range() -> None:
    bad = {"factor": ("factor", -1.0), "prophet": ("gap", -1.0), "end_weight": ("end_weight", 1.5)}
    for name, (option, value) in (bad | {"ascending": ("places_per_step", 0)}).items():
        assert build_accelerator(name, block_length=4).exactness == "lossy"
        with pytest.raises(InputError, match=option):
            build_accelerator(name, **{option: value})


@pytest.mark.parametrize("name", ["end_weight", "prophet"])
def test_callers_defaults_do_not_matter(name: str, tmp_path: Any) -> None:
    test_callers_defaults.test_masked_models_decide_the_same_places("llada", name, tmp_path)
