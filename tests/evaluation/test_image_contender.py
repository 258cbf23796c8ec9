"""Identity checks of image models, and measurements during generation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mmspec.core.statistics import DecodingStats
from mmspec.evaluation.contenders import (
    contender,
    image_examples,
    prepare_images,
)
from mmspec.evaluation.identity.checks import ImageCheck
from mmspec.evaluation.identity.comparison import IdentityReport
from mmspec.evaluation.quality import variation
from mmspec.evaluation.quality.variation import drawn_in
from mmspec.pipelines import MMSpecPipeline
from mmspec.trees.matching import SampleAndMatch
from mmspec.trees.rejection import SpeculativeSampling
from tests.evaluation.planted import accept_everything, stale_noise
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
@pytest.mark.every(2)
def test_exact_accelerators_pass(pipe: Any, name: str, options: dict[str, Any], modes: list[str]) -> None:
    report = check(pipe, name, **options)
    assert report.passed and report.exactness == "exact"
    assert [one.mode for one in report.comparisons] == modes
    assert all(one.tokens == 4 * GRID**2 for one in report.comparisons)
    assert any("by design" in note for note in report.notes) == ("distribution" in modes)


def test_planted_bugs_are_found(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeculativeSampling, "verify", accept_everything)
    greedy, distribution = check(pipe, "sjd", window=8).comparisons
    assert not greedy.passed and not distribution.passed and distribution.distribution is not None
    monkeypatch.undo()
    monkeypatch.setattr(SampleAndMatch, "verify", stale_noise)
    accelerated = contender(pipe, "sjd", coupling="exact", window=8)
    examples = image_examples(pipe, 2)
    made = ImageCheck(accelerated, contender(pipe, "none"), examples)
    assert made.greedy().passed and not made.sampled().passed


@pytest.mark.parametrize(("window", "nothing"), [(GRID, True), (GRID - 1, False), (1, False)])
def test_a_staircase_is_measured_against_raster_order(pipe: Any, window: int, nothing: bool) -> None:
    made = contender(pipe, "zipar", zipar_window=window)
    for scale in (1.0, 2.0):
        found = made.watch([image_examples(pipe, 3)], guidance_scale=scale)["tv"]
        assert (found["max"] < 1e-5) == nothing
        assert found["mean"] <= found["max"] <= 1


def test_the_variation_is_that_of_the_distributions_used(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row is in raster order; the second begins without the end of the first."""
    made, measured = contender(pipe, "zipar", zipar_window=2), []
    batch = image_examples(pipe, 2)
    monkeypatch.setattr(DecodingStats, "count_measured", lambda self, *given: measured.append(given[1]))
    prepared = prepare_images(made.enter(), batch, seeds=[0, 1])
    monkeypatch.setattr(variation, "drawn_in", lambda step: measured.clear() or drawn_in(step))  # by the rule
    variation.measure_variation(prepared)
    assert len(measured) == 2 * (GRID**2 - 1)  # all but the first, of both images
    for image in (measured[: GRID**2 - 1], measured[GRID**2 - 1 :]):
        assert max(image[: GRID - 1]) < 1e-5 and image[GRID - 1] > 1e-3
    assert contender(pipe, "none").watch([batch]) == {}
