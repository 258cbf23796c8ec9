"""Outputs other than one grid: scales of an image, frames of a video; errors of code that needs a grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmspec.accelerators import build_accelerator
from mmspec.core.image_grid import FREE, GridSequence, ImageGrid, Layout
from mmspec.core.interfaces import Request
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.targets import CausalTarget, ImageTokenTarget
from mmspec.targets.image_tokens import FORCED
from tests.methods import corrected_checks
from tests.methods.staircase_checks import CLASSES, CODES, draw, rasters
from tests.tiny_models import tiny_lm
from tests.trees.jacobi_checks import GRID, images

SAMPLED = Sampler(0.9, top_k=40)
SCALES = [ImageGrid(side, side, CODES) for side in (1, 2, 3)]
FRAME = ImageGrid(2, 3, 62, row_end=62, ending=(63,))
VIDEO = GridSequence((FRAME, FRAME, FRAME, ImageGrid(2, 3, 62)))


def request(first: int, layout: Layout) -> Request:
    """A prompt, and an output for a target with a grammar."""
    return Request(
        {"input_ids": torch.tensor([[first]]), FORCED: torch.tensor([layout.forced])}, layout=layout
    )


def test_grids_one_after_another() -> None:
    scales = GridSequence(tuple(SCALES))
    assert (scales.length, scales.codebook_size) == (1 + 4 + 9, CODES)
    assert scales.forced == (FREE,) * 14 and scales.codes(range(20)) == list(range(14))
    rows = (FREE, FREE, FREE, 62) * 2
    assert VIDEO.forced == (*(*rows, 63) * 3, *[FREE] * 6) and VIDEO.length == 33
    output = [token if token != FREE else index for index, token in enumerate(VIDEO.forced)]
    assert VIDEO.codes(output[:12]) == [0, 1, 2, 4, 5, 6, 9, 10, 11]
    with pytest.raises(InputError, match=r"grids must have exactly one.*got \[9, 24\]"):
        GridSequence((SCALES[0], ImageGrid(1, 1, 9)))
    with pytest.raises(InputError, match="grids"):
        GridSequence(())


def targets_and_requests() -> list[tuple[str, Any, list[Request]]]:
    """Scales without syntax; videos, an image of another size and the default one in a batch; no grammar."""
    scales, text = GridSequence(tuple(SCALES)), CausalTarget(tiny_lm())
    classes = [request(CODES + index % CLASSES, scales) for index in range(2)]
    small = ImageGrid(3, 2, 62, row_end=62, ending=(63,))
    mixed = [
        request(5, VIDEO),
        request(6, small),
        Request({"input_ids": torch.tensor([[7, 8]])}, layout=GRID),
    ]
    words = [Request({"input_ids": torch.tensor([[5, 6]])}, layout=GridSequence((ImageGrid(1, 30, 64),)))]
    return [("scales", rasters(), classes), ("videos", images(), mixed), ("words", text, words)]


@pytest.mark.parametrize(("name", "target", "requests"), targets_and_requests())
@pytest.mark.parametrize("sampler", [SAMPLED, Sampler()], ids=["sampled", "greedy"])
@pytest.mark.every(2)
def test_windows_draw_any_layout_as_plain_decoding_does(
    name: str, target: ImageTokenTarget, requests: list[Request], sampler: Sampler
) -> None:
    layouts = [each.layout for each in requests if each.layout is not None]
    tokens = max(layout.length for layout in layouts)
    expected, plain = draw(target, build_accelerator("none"), requests, sampler, tokens)
    for layout, output in zip(layouts, expected, strict=True):
        wanted = zip(output, layout.forced, strict=False)
        assert all(forced in (FREE, token) for token, forced in wanted)
        assert max(layout.codes(output)) < layout.codebook_size
    ways: list[dict[str, Any]] = [{}, {"init": "uniform"}, {"front": "2x2", "window": 4}]
    if target.grid is not None:
        ways.append({"init": "repeat"})
    for options in ways:
        method = build_accelerator("sjd", **{"window": 8, "coupling": "exact", **options})
        drawn, stats = draw(target, method, requests, sampler, tokens)
        assert drawn == expected, (name, options)
        # syntax is known before the target says it
        assert stats.target_forwards < plain.target_forwards + (name != "videos"), options
    if sampler.greedy:
        assert draw(target, build_accelerator("sjd", window=8), requests, sampler, tokens)[0] == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zipar", "image layout must be the grid of a single image, whose rows zipar reads; got '33 tokens'"),
        (
            "sjd",
            "image layout must be the grid of a single image, whose rows init=above reads; got '33 tokens'",
        ),
        ("cjd", "image size must have rows of 6 tokens.*got '33 tokens'"),
    ],
)
def test_who_goes_by_rows_refuses_other_layouts_before_the_prompt_is_read(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("the prompt was read")

    options: dict[str, dict[str, Any]] = {
        "zipar": {},
        "sjd": {"window": 8, "init": "above"},
        "cjd": {"model": corrected_checks.head_for(images(), columns=6)},
    }
    accelerator = build_accelerator(name, **options[name])
    monkeypatch.setattr(images(), "prefill", read)
    with pytest.raises(InputError, match=message):
        draw(images(), accelerator, [request(5, VIDEO)], SAMPLED)
