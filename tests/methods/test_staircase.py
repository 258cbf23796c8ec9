"""The staircase: its number of forwards, the cells that each cell sees, and raster order as a window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.accelerators import build_accelerator
from mmspec.core import cache as cache_module
from mmspec.core.cache import RaggedLayer
from mmspec.core.image_grid import Grammar, ImageGrid
from mmspec.core.interfaces import PromptOutput, TargetOutput
from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.core.sampling import Sampler
from mmspec.families.llamagen.target import LlamaGenTarget
from mmspec.methods.zipar.drafter import StaircaseDrafter
from mmspec.targets import ImageTokenTarget
from mmspec.targets.image_tokens import ImageState
from tests.contracts import distributions
from tests.contracts.checks import joint_of
from tests.contracts.running import fan_out
from tests.methods.naive_staircase import naive_image
from tests.methods.staircase_checks import (
    GUIDED,
    LINES,
    SAMPLED,
    begin,
    draw,
    lines,
    rasters,
    requests_of,
    run,
    tiny_llamagen,
    zipar,
)
from tests.tiny_models import tiny_mistral_sliding
from tests.trees.jacobi_checks import ToyImages

SAMPLES = 4_000  # few, because each is an image with work on the host; planted bugs have p < 1e-20


def steps_of(rows: int, columns: int, window: int | None) -> int:
    """Forwards of an image by the published rule: a row begins when the one above is a window ahead."""
    lag, decoded, forwards = StaircaseDrafter(window).lag(columns), [0] * rows, 0
    while min(decoded) < columns:
        above = [columns, *decoded]
        open_rows = [row for row in range(rows) if above[row] >= min(decoded[row] + lag, columns)]
        decoded = [min(count + (row in open_rows), columns) for row, count in enumerate(decoded)]
        forwards += 1
    return forwards


@pytest.mark.parametrize(("rows", "columns", "window"), [(1, 5, 2), (3, 5, 2), (4, 3, 3), (6, 4, 2)])
def test_forwards_are_the_columns_and_a_window_for_each_further_row(
    rows: int, columns: int, window: int
) -> None:
    assert steps_of(rows, columns, window) == columns + (rows - 1) * window
    grid = ImageGrid(rows, columns, 62, row_end=62, ending=(63,))
    _, stats = draw(lines(), zipar(window), requests_of(lines(), 2, grid))
    assert stats.target_forwards == columns + (rows - 1) * window
    assert stats.rounds == [stats.target_forwards - 1] * 2


def equals_naive(
    target: ImageTokenTarget, window: int, sampler: Sampler, rows: int = 2, sliding: int | None = None
) -> None:
    """Check that images of the loop equal those of the rule, without a cache and with an explicit mask."""
    requests = requests_of(target, rows)
    outputs, stats = draw(target, zipar(window), requests, sampler)
    stream = RandomStream.from_seed(5, rows)

    def forward(ids: Sequence[int], places: Sequence[int], mask: Tensor) -> Tensor:
        if sliding is not None:
            place = torch.tensor(places)
            mask = mask & (place[:, None] - place < sliding)
        additive = torch.zeros(mask.shape, dtype=target.dtype).masked_fill(~mask, float("-inf"))[None, None]
        inputs = torch.tensor([list(ids)]), torch.tensor([list(places)]), additive
        names = ("input_ids", "position_ids", "attention_mask")
        return target.model(**dict(zip(names, inputs, strict=True))).logits[0]

    for row, request in enumerate(requests):

        def choose(logits: list[Tensor], index: int, row: int = row) -> int:
            codes = torch.stack(logits)[:, None, : target.grid.codebook_size]
            p = distributions.reference_distribution(codes, sampler)[0]
            noise = stream.gumbel(
                torch.full((rows, 1), index), Purpose.TARGET, target.vocabulary, torch.float64
            )
            return int((p.log() + noise[row, 0, : len(p)]).argmax())

        prompts = [request.prompt_tokens]
        if sampler.guidance_scale != 1:
            assert request.negative_inputs is not None
            prompts.append(request.negative_inputs["input_ids"][0].tolist())
        expected, forwards = naive_image([forward] * len(prompts), prompts, target.grid, window, choose)
        assert outputs[row] == expected, f"window {window}, row {row}"
        assert stats.target_forwards == forwards


@pytest.mark.parametrize("target", [rasters, lines])
def test_cells_see_what_the_rule_says_recomputed_without_a_cache(
    target: Callable[[], ImageTokenTarget],
) -> None:
    for window, sampler in ((1, SAMPLED), (2, GUIDED), (3, SAMPLED)):
        equals_naive(target(), window, sampler)


def test_drafts_in_each_row_give_the_staircases_own_tokens_in_fewer_forwards() -> None:
    saved = 0
    for target, lag, sampler, window, seed in (
        (rasters(), 2, Sampler(0.5), 4, 5),
        (rasters(), 3, GUIDED, 3, 8),
        (lines(), 2, Sampler(0.9), 4, 6),
        (lines(), 3, Sampler(0.9), 2, 7),
        (lines(), 5, Sampler(0.5), 4, 5),
    ):
        requests = requests_of(target, 3)
        plain, slow = draw(target, zipar(lag), requests, sampler, seed=seed)
        tokens, fast = draw(target, zipar(lag, window=window), requests, sampler, seed=seed)
        assert tokens == plain, f"lag {lag}, window {window}"
        assert all(few <= many for few, many in zip(fast.nfe, slow.nfe, strict=True))
        saved += sum(slow.nfe) - sum(fast.nfe)
    assert saved > 5


def test_places_without_keys_do_not_matter_and_rows_are_the_images_drawn_alone() -> None:
    def allocate(layer: RaggedLayer, states: Tensor) -> Tensor:
        return states.new_full((layer.plan.rows, layer.plan.capacity, states.shape[1], states.shape[3]), 1e4)

    for target in (rasters(), lines()):
        for accelerator in (zipar(2), zipar(2, adaptive=True)):
            requests = requests_of(target, 3)
            clean = draw(target, accelerator, requests)[0]
            assert clean[:1] == draw(target, accelerator, requests[:1])[0]
            assert len({tuple(row) for row in clean}) == 3
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(RaggedLayer, "_allocate", allocate)
                assert draw(target, accelerator, requests)[0] == clean


class FanOut(LlamaGenTarget):
    """Runs equal prompts once, so that thousands of rows start quickly."""

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[ImageState, PromptOutput]:
        rows = len(prompts)
        one, output = super().prefill(prompts[:1], capacity, taps)
        many = fan_out(one.cache, self, rows, capacity)
        state = replace(
            one,
            cache=many,
            offset=one.offset.repeat(rows),
            prompt_lengths=one.prompt_lengths * rows,
            grammar=Grammar([self.grid.forced] * rows, self.device),
        )
        return state, PromptOutput(output.logits.expand(rows, -1, -1))


def test_a_judged_first_token_has_the_distribution_of_the_wider_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With s = C - 1 the second prediction sees the whole row above, as in raster order."""
    codes, columns = 4, 3
    monkeypatch.setattr(cache_module, "CAPACITY_BLOCK", 16)
    target = FanOut(tiny_llamagen(codes, columns, torch.float32))
    requests = requests_of(target, 1) * SAMPLES
    outputs, _ = draw(target, zipar(columns - 1, adaptive=True), requests, Sampler(1.0), tokens=columns + 1)
    joint = joint_of(target, requests[0].prompt_tokens, columns + 1, Sampler(1.0))
    cells = (torch.tensor(outputs) * codes ** torch.arange(columns, -1, -1)).sum(-1)
    fit = distributions.chi_square(torch.bincount(cells, minlength=joint.numel()), joint.flatten())
    assert fit.p_value > distributions.ALARM, fit


@pytest.mark.parametrize(
    ("rows", "sampler", "adaptive"),
    [
        (1, Sampler(), True),
        (3, SAMPLED, True),
        (3, GUIDED, False),
        (3, Sampler(guidance_scale=3.0), True),
    ],
)
@pytest.mark.every(2)
def test_the_widest_window_is_plain_decoding_token_for_token(
    rows: int, sampler: Sampler, adaptive: bool
) -> None:
    for target in (rasters(), lines()):
        requests = requests_of(target, rows)
        plain, _ = draw(target, build_accelerator("none"), requests, sampler)
        assert draw(target, zipar(target.grid.columns, adaptive=adaptive), requests, sampler)[0] == plain


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_additive_masks_and_sliding_windows_reach_the_places(attention: str) -> None:
    """With a window of 8 tokens, less than two rows, distances count places, not columns of the cache."""
    model = tiny_mistral_sliding()
    model.set_attn_implementation(attention)
    target = ToyImages(model, LINES)
    requests = requests_of(target, 2)
    plain, _ = draw(target, build_accelerator("none"), requests, Sampler())
    assert draw(target, zipar(target.grid.columns), requests, Sampler())[0] == plain
    equals_naive(target, 2, Sampler(0.7), sliding=model.config.sliding_window)


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
