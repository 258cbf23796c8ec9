"""Losslessness checks and reports of models that draw."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmspec.accelerators import build_accelerator
from mmspec.acceptance.matching import SampleAndMatch
from mmspec.acceptance.rejection import SpeculativeSampling
from mmspec.decoding.stats import DecodingStats
from mmspec.errors import InputError
from mmspec.evaluation.contenders import (
    contender,
    decode_images,
    describe_accelerator,
    image_examples,
    prepare_images,
)
from mmspec.evaluation.examples import Example
from mmspec.evaluation.identity.checks import ImageCheck
from mmspec.evaluation.identity.comparison import IdentityReport
from mmspec.evaluation.quality.variation import VariationMeter
from mmspec.evaluation.speed.record import Record, summarise
from mmspec.evaluation.speed.report import REQUIRED, check_context, image_report
from mmspec.evaluation.speed.timing import Decoded, TimedRun
from mmspec.pipelines import MMSpecPipeline
from tests.drafters.staircase_checks import rasters
from tests.evaluation.planted import accept_everything, stale_noise
from tests.evaluation.test_bench_reports import text
from tests.tiny_models.llamagen import GRID, save_llamagen


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pipe: Any = MMSpecPipeline.from_pretrained(save_llamagen(tmp_path_factory.mktemp("tiny"), "class"))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def check(pipe: Any, name: str, samples: int = 4, **options: Any) -> IdentityReport:
    accelerated, plain = contender(pipe, name, **options), contender(pipe, "none")
    made = ImageCheck(accelerated, plain, image_examples(pipe, samples), batch_size=3, seed=2)
    calls: list[int] = []
    made = replace(made, on_output=lambda: calls.append(1))
    report = made.report(list(made.comparisons()))
    assert len(calls) == made.outputs
    return report


@pytest.mark.parametrize(
    ("name", "options", "modes"),
    [
        ("none", {}, ["greedy", "sampled"]),
        ("copy", {"min_match": 1}, ["greedy", "sampled"]),
        ("sjd", {"coupling": "exact", "window": 8}, ["greedy", "sampled"]),
        ("sjd", {"window": 8}, ["greedy", "distribution"]),
    ],
)
def test_exact_accelerators_pass(pipe: Any, name: str, options: dict[str, Any], modes: list[str]) -> None:
    report = check(pipe, name, **options)
    assert report.passed and report.exactness == "exact"
    assert [one.mode for one in report.comparisons] == modes
    assert all(one.tokens == 4 * GRID**2 for one in report.comparisons)
    assert any("by design" in note for note in report.notes) == ("distribution" in modes)


@pytest.mark.parametrize("window", [2, GRID])
def test_a_staircase_is_lossy_by_its_own_account(pipe: Any, window: int) -> None:
    report = check(pipe, "zipar", zipar_window=window)
    assert not report.passed
    assert report.notes[0].startswith("StaircaseDrafter is lossy by its own account")
    assert all(one.passed for one in report.comparisons) == (window == GRID)


def test_planted_bugs_are_found(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeculativeSampling, "verify", accept_everything)
    greedy, distribution = check(pipe, "sjd", window=8).comparisons
    assert not greedy.passed and not distribution.passed and distribution.distribution is not None
    monkeypatch.undo()
    monkeypatch.setattr(SampleAndMatch, "verify", stale_noise)
    accelerated = contender(pipe, "sjd", coupling="exact", window=8)
    examples = image_examples(pipe, 2)
    made = ImageCheck(accelerated, contender(pipe, "none"), examples)
    assert made.greedy().passed
    assert not made.sampled().passed


def test_half_precision_ties_are_told_from_bugs(pipe: Any) -> None:
    """The gap that is reported is that of the two best, noise included: in float32 far from a tie."""
    comparison = check(pipe, "zipar", zipar_window=2).comparisons[0]
    assert all(difference.gap > 0 and difference.gap_ulp > 2 for difference in comparison.differences)
    assert all(difference.position >= 2 for difference in comparison.differences)


@pytest.mark.parametrize(("window", "nothing"), [(GRID, True), (GRID - 1, False), (1, False)])
def test_a_staircase_is_measured_against_raster_order(pipe: Any, window: int, nothing: bool) -> None:
    made = contender(pipe, "zipar", zipar_window=window)
    for scale in (1.0, 2.0):
        found = made.watch([image_examples(pipe, 3)], guidance_scale=scale)["tv"]
        assert (found["max"] < 1e-5) == nothing
        assert found["mean"] <= found["max"] <= 1


def test_the_variation_is_that_of_the_distributions_used(pipe: Any) -> None:
    """The first row is in raster order; the second begins without the end of the first."""
    made = contender(pipe, "zipar", zipar_window=2)
    batch = image_examples(pipe, 2)
    meter, call = VariationMeter(), prepare_images(made.enter(), batch, seeds=[0, 1])
    for step in call.rounds():
        meter.watch(step)
    meter.finish(call.calls[-1])
    assert sorted(meter.measured) == list(range(1, GRID**2))
    assert all(len(values) == 2 for values in meter.measured.values())
    assert max(max(meter.measured[cell]) for cell in range(1, GRID)) < 1e-5
    assert min(meter.measured[GRID]) > 1e-3
    assert contender(pipe, "none").watch([batch]) == {}


def test_examples_are_classes_in_turn(pipe: Any) -> None:
    examples = image_examples(pipe, 7, seed=4)
    assert [example.label for example in examples] == [4, 0, 1, 2, 3, 4, 0]
    assert len({example.identifier for example in examples}) == 7


def test_promises_are_in_words() -> None:
    assert describe_accelerator(build_accelerator("none")) == {"window": 1, "promise": "exact"}
    zipar = build_accelerator("zipar", zipar_window=2).fit(rasters())  # 4 x 4 cells
    assert describe_accelerator(zipar) == {"window": 3, "promise": "lossy, no bound"}
    typical = describe_accelerator(build_accelerator("copy", acceptance="typical"))
    assert typical["promise"].startswith("lossy, TV at most 1 - min(")


SETTINGS = {
    **{"dtype": "float32", "batch_size": 1, "guidance_scale": 2.0, "temperature": 1.0, "top_k": 0},
    **{"top_p": None, "min_p": None, "baseline": "plain decoding", "model": "m", "task": "generate"},
}
OWN = {
    "none": {"window": 1, "promise": "exact"},
    "zipar": {"window": 2, "promise": "lossy, no bound"},
    "gsd": {"window": 32, "promise": "tv<=0.1"},
}


def records(**changed: Any) -> list[Record]:
    runs = []
    for name, forwards, seconds in (("none", 16, 5.0), ("zipar", 8, 3.0), ("gsd", 4, 2.0)):
        stats = DecodingStats(name, new_tokens=[16], rounds=[forwards - 1], target_forwards=forwards)
        stats.cache_bytes = 1000
        if name == "gsd":
            stats.count_measured("tv", 0.3, 0.2, 6)
        decoded = Decoded([[forwards] * 16], [stats], pixel_seconds=1.0)
        runs.append(TimedRun(name, 0, 0, "", seconds, decoded))
    own = {name: {**OWN[name], **changed.get(name, {})} for name in OWN}
    return summarise(runs, list(OWN), settings=SETTINGS, own=own)


def test_a_record_has_ratios_with_and_without_pixels() -> None:
    plain, zipar, gsd = records()
    assert (plain.nfe_mean, zipar.nfe_max, gsd.step_compression) == (16, 8, 4)
    assert (zipar.speedup, zipar.speedup_with_pixels) == (2.0, pytest.approx(5 / 3))
    assert (gsd.seconds, gsd.pixel_seconds, gsd.state_bytes) == (1.0, 1.0, 1000)
    assert plain.tv is None and zipar.tv is None
    assert gsd.tv == {"mean": pytest.approx(0.05), "max": 0.2}
    assert gsd.own["promise"] == "tv<=0.1"


@pytest.mark.parametrize("width", [80, 160])
def test_the_table_says_what_was_measured(width: int) -> None:
    shown = text(image_report(records(), width=width), width)
    assert "…" not in shown
    for part in ("2.00x", "lossy, no", "tv<=0.1", "0.050", "guidance 2", "top-k off", "16.0"):
        assert part in shown, part
    assert ("left out on a narrow screen" in shown) == (width == 80)


def test_no_speed_up_without_what_it_depends_on() -> None:
    first, record, _ = records()
    for name in REQUIRED:
        silent = {part: {**getattr(record, part)} for part in ("settings", "own")}
        for kept in silent.values():
            kept.pop(name, None)
        with pytest.raises(InputError, match=name):
            image_report([first, replace(record, **silent)])
    for promise in ("lossy", "", "nearly exact", None):
        with pytest.raises(InputError, match="promise"):
            check_context(records(zipar={"promise": promise})[1])


def test_no_speed_up_without_forwards() -> None:
    with pytest.raises(InputError, match="forwards"):
        check_context(replace(records()[1], nfe_mean=0.0))


def test_prompts_are_drawn_as_they_are_written(tmp_path: Path) -> None:
    pipe: Any = MMSpecPipeline.from_pretrained(save_llamagen(tmp_path / "captions", "caption"))
    pipe.set_progress_bar_config(disable=True)
    drawn = decode_images(pipe, [Example(("a red circle",))], seeds=[3], output_type="latent")
    assert drawn.tokens == pipe("a red circle", seed=3, output_type="latent").tokens
    assert len(image_examples(pipe, 2)) == 2
