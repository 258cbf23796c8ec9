"""Timing with injected clocks, figures of runs with their intervals, memory and energy."""

from collections import Counter

import numpy as np
import pytest
import torch

from mmspec.core.statistics import DecodingStats
from mmspec.errors import InputError
from mmspec.evaluation.examples import Example
from mmspec.evaluation.speed.record import as_json, speedup_interval, summarise
from mmspec.evaluation.speed.timing import Decoded, TimedRun, measure, watch_memory
from mmspec.evaluation.speed.tuning import best_of

CPU = torch.device("cpu")
MEGABYTE = 2**20


def stats(new_tokens=10, rounds=9, accepted=0, drafted=0, histogram=None, **more) -> DecodingStats:
    return DecodingStats(
        new_tokens=[new_tokens],
        rounds=[rounds],
        drafted_rounds=[rounds if drafted else 0],
        target_forwards=rounds + 1,
        accepted=[accepted],
        drafted=[drafted],
        accepted_histograms=[Counter(histogram or {0: rounds})],
        **more,
    )


def run(
    accelerator, repeat, seconds, *, batch=0, tokens=(1, 2), category="", of=None, pixels=0.0
) -> TimedRun:
    decoded = Decoded([list(tokens)], [of or stats()], pixels)
    return TimedRun(accelerator, repeat, batch, category, seconds, decoded, 5, "x")


class Clock:
    """A clock that only decoders advance."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def decoder(self, seconds, log, name, of=None):
        def decode(batch):
            log.append((name, batch[0].identifier))
            self.now += seconds
            return Decoded([[1] for _ in batch], [of or stats()])

        return decode


BATCHES = [[Example((name,), identifier=name)] for name in "ab"]


def test_accelerators_take_turns_on_every_batch_after_a_warm_up():
    clock, log = Clock(), []
    decoders = {name: clock.decoder(seconds, log, name) for name, seconds in (("none", 2.0), ("copy", 1.0))}
    runs = list(measure(decoders, BATCHES, 2, CPU, clock=clock))
    assert log[:2] == [("none", "a"), ("copy", "a")]  # warm-up, not reported
    assert log[2:6] == [("none", "a"), ("copy", "a"), ("copy", "b"), ("none", "b")]
    assert log[6:] == [("copy", "a"), ("none", "a"), ("none", "b"), ("copy", "b")]
    plain, copied = summarise(runs, ["none", "copy"])
    assert (plain.seconds, copied.seconds) == (4.0, 2.0)
    assert (plain.speedup, copied.speedup) == (1.0, 2.0)
    assert (copied.samples, copied.repeats) == (2, 2)
    assert plain.peak_memory_bytes > 0
    with pytest.raises(InputError, match="none"):
        next(measure({"copy": decoders["copy"]}, BATCHES, 1, CPU))


def test_the_ratio_is_of_medians_and_its_range_is_of_repeats():
    plain, fast = [1.0, 2.0, 9.0], [1.0, 4.0, 3.0]
    runs = [run("none", i, s) for i, s in enumerate(plain)] + [run("copy", i, s) for i, s in enumerate(fast)]
    baseline, record = summarise(runs, ["none", "copy"])
    assert record.seconds == 3.0
    assert record.speedup == pytest.approx(2 / 3)  # the slow repeat of plain decoding has no effect
    assert (record.speedup_min, record.speedup_max) == (0.5, 3.0)
    assert baseline.speedup == baseline.speedup_min == baseline.speedup_max == 1.0


def test_figures_come_from_one_repeat_and_times_from_all():
    parts = {"prompt_seconds": 0.5, "draft_seconds": 0.25, "target_seconds": 0.5, "verify_seconds": 0.25}
    counts = {"accepted": 5, "drafted": 8, "histogram": {0: 1, 1: 1, 2: 2}, "draft_passes": 12}
    of = stats(10, 4, **counts, prefill_seconds=0.25, **parts)
    runs = [run("none", r, 2.0) for r in range(2)] + [run("copy", r, 2.0, of=of) for r in range(2)]
    settings, own = {"model": "m"}, {"copy": {"parameters": 3}}
    found = summarise(runs, ["none", "copy"], settings=settings, own=own)
    record = found[1]
    assert (record.new_tokens, record.target_forwards) == (10, 5)
    assert (record.acceptance_length, record.acceptance_rate) == (9 / 4, 5 / 8)
    assert record.acceptance_by_position == [0.75, 0.5]
    assert (record.tokens_per_second, record.time_to_first_token) == (5.0, 0.25)
    assert record.time == {"prompt": 0.25, "target": 0.25, "draft": 0.125, "verify": 0.125, "rest": 0.25}
    assert record.draft_passes == 3.0  # in each of four rounds
    assert record.step_compression == 10 / 5  # forwards of plain decoding over its own
    value = as_json(found)
    assert value["settings"] == settings and [one.get("parameters") for one in value["records"]] == [None, 3]
    assert "settings" not in value["records"][1] and "own" not in value["records"][1]


def test_an_interrupted_measurement_keeps_whole_repeats():
    runs = [run(name, r, 1.0, batch=b) for r in range(2) for b in range(2) for name in ("none", "copy")]
    assert summarise(runs[:-1], ["none", "copy"])[1].repeats == 1  # the second repeat lacks one run
    assert summarise(runs[:3], ["none", "copy"])[1].samples == 1  # and now the first one lacks one
    with pytest.raises(InputError, match="finished"):
        summarise(runs[:1], ["none", "copy"])


def test_decoding_is_timed_without_the_prompts_and_images_without_their_pixels():
    def timed(name, batch, decoding, tokens):
        of = stats(tokens, tokens - 1, seconds=4.0 + decoding, prefill_seconds=4.0)
        return run(name, 0, 6.0 + decoding, batch=batch, of=of, pixels=1.0)

    runs = [timed("none", 0, 10.0, 11), timed("none", 1, 90.0, 91), timed("none", 2, 0.0, 1)]
    runs += [timed("copy", 0, 2.0, 11), timed("copy", 1, 90.0, 91), timed("copy", 2, 0.0, 1)]
    plain, record = summarise(runs, ["none", "copy"])
    assert record.decode_speedup == pytest.approx(100 / 92)  # long answers dominate
    assert record.speedup == pytest.approx((100 + 15) / (92 + 15))
    assert record.speedup_with_pixels == pytest.approx((100 + 18) / (92 + 18))
    assert (plain.decode_speedup, plain.pixel_seconds, plain.seconds) == (1.0, 3.0, 115.0)


@pytest.mark.parametrize(("by", "best"), [("seconds", "quick"), ("forwards", "few")])
def test_the_best_of_several_settings_is_found_and_a_single_one_is_not_searched(by, best):
    clock, log = Clock(), []
    figures = {"none": (8.0, 10), "few": (2.0, 3), "quick": (1.0, 5), "slow": (3.0, 9), "only": (0.5, 2)}
    decoders = {name: clock.decoder(s, log, name, stats(10, n - 1)) for name, (s, n) in figures.items()}
    found = best_of([["none"], ["few", "quick", "slow"], ["only"]], decoders, BATCHES, CPU, by, clock=clock)
    assert list(found) == ["none", best, "only"]
    assert found["only"] == {} and found[best]["slow"] == {"seconds": 3.0, "forwards": 9.0}
    assert {name for name, _ in log} == {"none", "few", "quick", "slow"}
    with pytest.raises(InputError, match="best"):
        best_of([["none"]], decoders, BATCHES, CPU, "luck")


def test_an_interval_covers_what_it_should():
    """For random ratios around 2, the interval of 40 prompts contains the true ratio in 95 % of trials."""
    generator, held, widths = np.random.default_rng(1), 0, []
    for _ in range(60):
        ours = generator.uniform(1, 3, 40)
        plain = ours * generator.normal(2.0, 0.5, 40)
        low, high = speedup_interval([plain], [ours])
        assert low <= plain.sum() / ours.sum() <= high
        held += low <= 2.0 <= high
        widths.append(high - low)
    assert 51 <= held <= 60
    normal = 2 * 1.96 * 0.5 / 40**0.5 * (1 + 1 / 12) ** 0.5  # weighted by seconds, uniform from 1 to 3
    assert np.median(widths) == pytest.approx(normal, rel=0.1)


# In a separate process: after other tests, a new tensor could reuse memory, which would not be measured.


@pytest.mark.gpu
def test_on_a_gpu_the_allocator_is_asked():
    device = torch.device("cuda")
    kind, peak = watch_memory(device)
    held = torch.ones(64 * MEGABYTE // 4, device=device)
    assert kind == "cuda allocated" and peak() >= held.nbytes
