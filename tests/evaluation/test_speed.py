"""Timing with injected clocks: the order of the runs, and the figures made of them."""

from collections import Counter

import pytest
import torch

from mmspec.decoding.stats import DecodingStats, merge_stats
from mmspec.errors import InputError
from mmspec.evaluation.examples import Example
from mmspec.evaluation.speed.record import as_json, summarise
from mmspec.evaluation.speed.timing import Decoded, TimedRun, batches_of, measure
from mmspec.evaluation.speed.tuning import best_of

CPU = torch.device("cpu")


def stats(new_tokens=10, rounds=9, accepted=0, drafted=0, histogram=None, **more) -> DecodingStats:
    return DecodingStats(
        new_tokens=[new_tokens],
        rounds=[rounds],
        target_forwards=rounds + 1,
        accepted=[accepted],
        drafted=[drafted],
        accepted_histograms=[Counter(histogram or {0: rounds})],
        **more,
    )


def run(accelerator, repeat, seconds, *, batch=0, tokens=(1, 2), category="", of=None) -> TimedRun:
    return TimedRun(
        accelerator, repeat, batch, category, seconds, Decoded([list(tokens)], [of or stats()]), 5, "x"
    )


class Clock:
    """A clock that only decoders advance."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def decoders(clock, log, **seconds):
    def make(name, duration):
        def decode(batch):
            log.append((name, batch[0].identifier))
            clock.now += duration
            return Decoded([[1] for _ in batch], [stats()])

        return decode

    return {name: make(name, duration) for name, duration in seconds.items()}


def test_accelerators_take_turns_on_every_batch_after_a_warm_up():
    clock, log = Clock(), []
    batches = [[Example(("a",), identifier="a")], [Example(("b",), identifier="b")]]
    runs = list(measure(decoders(clock, log, none=2.0, copy=1.0), batches, 2, CPU, clock=clock))
    assert log[:2] == [("none", "a"), ("copy", "a")]  # warm-up, not reported
    assert log[2:6] == [("none", "a"), ("copy", "a"), ("copy", "b"), ("none", "b")]
    assert log[6:] == [("copy", "a"), ("none", "a"), ("none", "b"), ("copy", "b")]
    assert [(one.accelerator, one.seconds) for one in runs[:2]] == [("none", 2.0), ("copy", 1.0)]
    plain, copied = summarise(runs, ["none", "copy"])
    assert (plain.seconds, copied.seconds) == (4.0, 2.0)
    assert (plain.speedup, copied.speedup) == (1.0, 2.0)
    assert copied.samples == 2
    assert copied.repeats == 2
    assert plain.peak_memory_bytes > 0


def test_the_ratio_is_of_medians_and_its_range_is_of_repeats():
    plain, fast = [1.0, 2.0, 9.0], [1.0, 4.0, 3.0]
    runs = [run("none", i, s) for i, s in enumerate(plain)] + [run("copy", i, s) for i, s in enumerate(fast)]
    baseline, record = summarise(runs, ["none", "copy"])
    assert record.seconds == 3.0
    assert record.speedup == pytest.approx(2 / 3)  # one slow repeat of plain decoding does not make us fast
    assert (record.speedup_min, record.speedup_max) == (0.5, 3.0)
    assert baseline.speedup == baseline.speedup_min == baseline.speedup_max == 1.0


def test_the_share_of_identical_outputs_counts_every_repeat():
    runs = [run("none", r, 1.0, batch=b) for r in range(2) for b in range(2)]
    runs += [
        run("copy", r, 1.0, batch=b, tokens=(1, 3) if r == b == 1 else (1, 2))
        for r in range(2)
        for b in range(2)
    ]
    plain, record = summarise(runs, ["none", "copy"])
    assert plain.identical == 1.0
    assert record.identical == 0.75


def test_figures_come_from_one_repeat_and_times_from_all():
    of = stats(
        10, 4, accepted=5, drafted=8, histogram={0: 1, 1: 1, 2: 2}, prefill_seconds=0.25, draft_seconds=0.5
    )
    runs = [run("none", r, 2.0) for r in range(2)] + [run("copy", r, 2.0, of=of) for r in range(2)]
    settings, own = {"model": "m"}, {"copy": {"parameters": 3}}
    found = summarise(runs, ["none", "copy"], settings=settings, own=own)
    record = found[1]
    assert (record.new_tokens, record.target_forwards) == (10, 5)
    assert record.acceptance_length == 9 / 4
    assert record.acceptance_rate == 5 / 8
    assert record.acceptance_by_position == [0.75, 0.5]
    assert record.tokens_per_second == 5.0
    assert record.time_to_first_token == 0.25
    assert record.time["draft"] == 0.25
    assert record.step_compression == 10 / 5  # forwards of plain decoding over its own
    value = as_json(found)
    assert value["settings"] == settings and [one.get("parameters") for one in value["records"]] == [None, 3]
    assert "settings" not in value["records"][1] and "own" not in value["records"][1]


def test_categories_are_told_apart():
    runs = []
    for name, times in {"none": (1.0, 3.0), "copy": (1.0, 1.0)}.items():
        runs += [
            run(name, 0, s, batch=b, category=c) for b, (s, c) in enumerate(zip(times, "ab", strict=True))
        ]
    assert [summarise(runs, ["none", "copy"], category=c)[1].speedup for c in "ab"] == [1.0, 3.0]
    assert summarise(runs, ["none", "copy"])[1].speedup == 2.0


def test_an_interrupted_measurement_keeps_whole_repeats():
    runs = [run(name, r, 1.0, batch=b) for r in range(2) for b in range(2) for name in ("none", "copy")]
    assert summarise(runs[:-1], ["none", "copy"])[1].repeats == 1  # the second repeat lacks one run
    assert summarise(runs[:3], ["none", "copy"])[1].samples == 1  # and now the first one lacks one
    with pytest.raises(InputError, match="finished"):
        summarise(runs[:1], ["none", "copy"])


def test_batches_hold_one_category_each():
    examples = [Example(("x",), category=c) for c in "ababa"]
    batches = batches_of(examples, 2)
    assert [[example.category for example in batch] for batch in batches] == [["a", "a"], ["a"], ["b", "b"]]
    with pytest.raises(InputError):
        batches_of(examples, 0)


def test_there_is_no_ratio_without_plain_decoding():
    with pytest.raises(InputError, match="none"):
        next(measure({"copy": lambda batch: Decoded([], [])}, [[Example(("x",))]], 1, CPU))


def test_merged_stats_are_those_of_one_call():
    one = stats(10, 4, 5, 8, {0: 1, 2: 3}, draft_passes=3, target_seconds=0.5)
    other = stats(7, 6, 0, 2, {0: 6}, draft_passes=4, target_seconds=0.25)
    merged = merge_stats([one, other])
    assert merged.new_tokens == [10, 7]
    assert merged.target_forwards == 12
    assert merged.accepted_histogram == {0: 7, 2: 3}
    assert merged.acceptance_length == (9 + 6) / 10
    assert (merged.draft_passes, merged.target_seconds) == (7, 0.75)


def test_decoding_is_timed_without_the_prompts():
    def timed(name, repeat, batch, decoding, tokens):
        of = stats(tokens, tokens - 1, seconds=4.0 + decoding, prefill_seconds=4.0)
        return run(name, repeat, 5.0 + decoding, batch=batch, of=of)

    runs = [timed("none", 0, 0, 10.0, 11), timed("none", 0, 1, 90.0, 91), timed("none", 0, 2, 0.0, 1)]
    runs += [timed("copy", 0, 0, 2.0, 11), timed("copy", 0, 1, 90.0, 91), timed("copy", 0, 2, 0.0, 1)]
    plain, record = summarise(runs, ["none", "copy"])
    assert record.decode_speedup == pytest.approx(100 / 92)  # long answers dominate
    assert record.speedup == pytest.approx((100 + 15) / (92 + 15))
    assert plain.decode_speedup == 1.0


def test_the_parts_of_the_time_and_the_passes_of_the_drafter():
    parts = {"prompt_seconds": 2.0, "draft_seconds": 1.0, "target_seconds": 4.0, "verify_seconds": 0.5}
    runs = [run("none", 0, 10.0), run("copy", 0, 10.0, of=stats(10, 3, draft_passes=12, **parts))]
    _, record = summarise(runs, ["none", "copy"])
    assert record.time == pytest.approx(
        {"prompt": 0.2, "target": 0.4, "draft": 0.1, "verify": 0.05, "rest": 0.25}
    )
    assert record.draft_passes == 4.0  # in each of three rounds


def searched(by):
    clock, log = Clock(), []
    times = {"none": 8.0, "few": 2.0, "quick": 1.0, "slow": 3.0, "only": 0.5}
    made = decoders(clock, log, **times)

    def of(name, forwards):
        def decode(batch):
            made[name](batch)
            return Decoded([[1] for _ in batch], [stats(10, forwards - 1)])

        return decode

    forwards = {"none": 10, "few": 3, "quick": 5, "slow": 9, "only": 2}
    groups = [["none"], ["few", "quick", "slow"], ["only"]]
    batches = [[Example((name,), identifier=name)] for name in "ab"]
    named = {name: of(name, count) for name, count in forwards.items()}
    return best_of(groups, named, batches, CPU, by, clock={"clock": clock}), log


@pytest.mark.parametrize(("by", "best"), [("seconds", "quick"), ("forwards", "few")])
def test_the_best_of_several_settings_is_found_and_a_single_one_is_not_searched(by, best):
    found, log = searched(by)
    assert list(found) == ["none", best, "only"]
    assert found["only"] == {} and found[best]["slow"] == {"seconds": 3.0, "forwards": 9.0}
    assert {name for name, _ in log} == {"none", "few", "quick", "slow"}


def test_a_search_by_anything_else_is_refused():
    with pytest.raises(InputError, match="best"):
        searched("luck")
