"""The staircase: its number of forwards, the cells that each cell sees, and raster order as a window."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LogitsProcessorList

from mmspec.accelerators import ACCELERATORS, build_accelerator
from mmspec.decoding.image_grid import ImageGrid
from mmspec.decoding.interfaces import TargetOutput
from mmspec.decoding.sampling import Sampler
from mmspec.drafters.staircase import StaircaseDrafter
from mmspec.errors import InputError
from mmspec.targets import CausalTarget
from mmspec.targets.llamagen import LlamaGenTarget
from tests.drafters import staircase_checks as checks
from tests.drafters.staircase_checks import (
    GUIDED,
    SAMPLED,
    begin,
    draw,
    lines,
    rasters,
    requests_of,
    run,
    zipar,
)
from tests.tiny_models import tiny_llama, tiny_mistral_sliding


def steps_of(rows: int, columns: int, window: int | None) -> int:
    """Forwards of an image by the published rule: a row begins when the one above is a window ahead."""
    lag, decoded, forwards = StaircaseDrafter(window).lag(columns), [0] * rows, 0
    while min(decoded) < columns:
        above = [columns, *decoded]
        open_rows = [row for row in range(rows) if above[row] >= min(decoded[row] + lag, columns)]
        decoded = [min(count + (row in open_rows), columns) for row, count in enumerate(decoded)]
        forwards += 1
    return forwards


SHAPES = [(1, 5, 2), (3, 5, 1), (3, 5, 2), (4, 3, 3), (6, 4, 2)]


@pytest.mark.parametrize(("rows", "columns", "window"), SHAPES)
def test_forwards_are_the_columns_and_a_window_for_each_further_row(
    rows: int, columns: int, window: int
) -> None:
    assert steps_of(rows, columns, window) == columns + (rows - 1) * window
    grid = ImageGrid(rows, columns, 62, row_end=62, ending=(63,))
    _, stats = draw(lines(), zipar(window), requests_of(lines(), 2, grid))
    assert stats.target_forwards == columns + (rows - 1) * window
    assert stats.rounds == [stats.target_forwards - 1] * 2


def test_published_counts() -> None:
    """2412.04062: 24 x 24 at s = 8 and Lumina's 48 x 48 at s = 16 (syntax is free), raster order at s = C."""
    assert [StaircaseDrafter().lag(columns) for columns in (24, 48, 2)] == [8, 16, 1]
    shapes = [(24, 24, 8), (48, 48, 16), (16, 16, 16)]
    assert [steps_of(*shape) for shape in shapes] == [208, 800, 256]


@pytest.mark.parametrize(
    ("rows", "sampler", "adaptive"),
    [
        (1, Sampler(), True),
        (3, SAMPLED, False),
        (3, SAMPLED, True),
        (3, GUIDED, False),
        (1, GUIDED, True),
        (3, Sampler(guidance_scale=3.0), True),
    ],
)
def test_the_widest_window_is_plain_decoding_token_for_token(
    rows: int, sampler: Sampler, adaptive: bool
) -> None:
    for target in (rasters(), lines()):
        requests = requests_of(target, rows)
        plain, _ = draw(target, build_accelerator("none"), requests, sampler)
        assert draw(target, zipar(target.grid.columns, adaptive=adaptive), requests, sampler)[0] == plain


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_additive_masks_and_sliding_windows_reach_the_places(attention: str) -> None:
    """A window of 8 tokens, less than two rows: a key's distance counts places, wherever it is written."""
    model = tiny_mistral_sliding()
    model.set_attn_implementation(attention)
    target = checks.LinedTarget(model)
    requests = requests_of(target, 2)
    plain, _ = draw(target, build_accelerator("none"), requests, Sampler())
    assert draw(target, zipar(target.grid.columns), requests, Sampler())[0] == plain
    checks.equals_naive(target, 2, Sampler(0.7), sliding=model.config.sliding_window)


def test_drafts_in_each_row_give_the_staircases_own_tokens_in_fewer_forwards() -> None:
    checks.drafts_give_the_staircase()


def test_rows_of_a_batch_are_the_images_drawn_alone() -> None:
    for target in (rasters(), lines()):
        for accelerator in (zipar(2), zipar(2, adaptive=True)):
            requests = requests_of(target, 3)
            together, _ = draw(target, accelerator, requests)
            assert [row for row in together[:1]] == draw(target, accelerator, requests[:1])[0]
            assert len({tuple(row) for row in together}) == 3


def test_cells_see_what_the_rule_says_recomputed_without_a_cache() -> None:
    checks.rasters_equal_naive()


def test_rows_with_an_end_token_begin_after_it() -> None:
    checks.lines_equal_naive()


def test_places_without_keys_do_not_matter() -> None:
    checks.unwritten_places_do_not_matter()


@pytest.mark.parametrize("acceptance", ["speculative_sampling", "sample_and_match"])
def test_a_judged_first_token_has_the_distribution_of_the_wider_window(acceptance: str) -> None:
    checks.first_tokens_follow_the_wider_window(acceptance=acceptance)


def test_an_adaptive_window_lies_between_two_fixed_ones() -> None:
    requests = requests_of(rasters(), 3)
    narrow, wide = (draw(rasters(), zipar(window), requests)[1].target_forwards for window in (2, 3))
    forwards = draw(rasters(), zipar(2, adaptive=True), requests)[1].target_forwards
    assert narrow <= forwards <= wide


def test_greedy_images_need_no_noise() -> None:
    requests = requests_of(rasters(), 2)
    images = [draw(rasters(), zipar(2), requests, Sampler(), seed=seed)[0] for seed in (0, 1)]
    assert images[0] == images[1]


def test_an_image_cut_short_is_the_beginning_of_the_whole() -> None:
    requests = requests_of(lines(), 2)
    whole, _ = draw(lines(), zipar(2), requests)
    assert draw(lines(), zipar(2), requests, tokens=8)[0] == [row[:8] for row in whole]


def test_it_is_labelled_lossy_without_a_bound() -> None:
    assert ACCELERATORS["zipar"].promise[0] == zipar(2).exactness == "lossy"


def test_windows_outside_the_image_are_refused() -> None:
    for window in (0, -1, 5, 2.0, True, "8"):
        with pytest.raises(InputError, match="zipar_window"):
            build_accelerator("zipar", zipar_window=window).fit(rasters())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"zipar_window": 1, "adaptive": True}, "zipar_window"),
        ({"adaptive": "yes"}, "adaptive"),
        ({"window": 0}, "window"),
        ({"window": 2, "adaptive": True}, "window"),
        ({"zipar_windw": 8}, "zipar_window"),
        ({"acceptance": "greedy_typo"}, "acceptance"),
        ({"adaptive": True, "acceptance": "typical"}, "speculative_sampling"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], named: str) -> None:
    with pytest.raises(InputError, match=named):
        build_accelerator("zipar", **options)  # type: ignore[arg-type]


def test_what_has_no_cells_or_no_order_is_refused() -> None:
    with pytest.raises(InputError, match="image tokens"):
        zipar(2).fit(CausalTarget(tiny_llama()))
    requests = requests_of(rasters(), 1)
    with pytest.raises(InputError, match="logits_processor"):
        draw(rasters(), zipar(2), requests, Sampler(processors=[LogitsProcessorList()]))
    with pytest.raises(InputError, match="max_new_tokens"):
        draw(rasters(), zipar(2), requests, tokens=17)


def test_a_batch_is_refused_before_its_prompts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaGenTarget, "prefill", None)
    requests = requests_of(rasters(), 1)
    with pytest.raises(InputError, match="max_new_tokens"):
        draw(rasters(), zipar(2), requests, tokens=17)
    with pytest.raises(InputError, match="logits_processor"):
        draw(rasters(), zipar(2), requests, Sampler(processors=[LogitsProcessorList()]))


def test_a_cell_whose_logits_are_no_numbers_ends_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, real = requests_of(rasters(), 3), LlamaGenTarget.score
    whole, stats = draw(rasters(), zipar(2), requests)
    calls = []

    def broken(*arguments: Any) -> TargetOutput:
        output = real(*arguments)
        calls.append(len(output.logits))
        if len(calls) == 6:  # cells 5 and 8 .. of rows 1 and 2
            output.logits[1] = float("nan")
        return output

    monkeypatch.setattr(LlamaGenTarget, "score", broken)
    canvas = begin(rasters(), requests)
    for _ in run(rasters(), zipar(2), requests, canvas):
        pass
    assert [reason for reason in canvas.finish_reasons] == ["length", "error", "length"]
    assert [error is None for error in canvas.errors] == [True, False, True]
    outputs = canvas.outputs()
    assert outputs[::2] == whole[::2]
    assert outputs[1] == whole[1][: len(outputs[1])] and len(outputs[1]) < 16
