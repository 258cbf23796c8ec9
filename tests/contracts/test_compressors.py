"""The contract of every registered compressor, and planted bugs that it catches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mmspec.compressors import COMPRESSORS, Compressor, build_compressor
from mmspec.errors import InputError, UnknownArgumentError
from mmspec.visual_tokens.tokens import VisualTokens, nowhere, raster

WIDTH = 8
# name -> options; a newly registered compressor needs a line here
OPTIONS: dict[str, dict[str, object]] = {
    "none": {},
    "identity": {},
    "latent": {"tokens": 6},
    "pooling": {"tokens": 6},
    "attention_pruning": {"tokens": 6},
    "similarity_pruning": {"tokens": 6},
    "convolution": {"tokens": 6},
    "resampler": {"tokens": 3, "heads": 2},
    "gate": {"branches": {"pooling": {"tokens": 4}, "latent": {"tokens": 3}, "none": {}}},
    "vispec": {"tokens": 2, "heads": 2},
}
GRIDS = {
    "square": raster(4, 4),
    "wide": raster(2, 9),
    "one token": raster(1, 1),
    "base and tiles": torch.cat([raster(3, 3), raster(4, 6), nowhere(4)]),
    "class token": torch.cat([nowhere(1), raster(2, 2)]),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def build(name: str) -> Compressor:
    torch.manual_seed(3)
    return build_compressor(name, WIDTH, **OPTIONS[name]).eval()


def images(*names: str, longest: int = 0) -> VisualTokens:
    """Images of these grids with features keyed by the grid, padded with noise to at least `longest`."""
    longest = max([longest, *(len(GRIDS[name]) for name in names)])
    features = random(len(names), longest, WIDTH, seed=99)
    mask = torch.zeros(len(names), longest, dtype=torch.bool)
    boxes = torch.rand(len(names), longest, 4)
    for image, name in enumerate(names):
        count = len(GRIDS[name])
        features[image, :count] = random(count, WIDTH, seed=list(GRIDS).index(name))
        mask[image, :count], boxes[image, :count] = True, GRIDS[name]
    return VisualTokens(features, mask, boxes)


def questions(*names: str) -> Tensor:
    return torch.cat([random(1, WIDTH, seed=50 + list(GRIDS).index(name)) for name in names])


def compress(compressor: Compressor, *names: str, longest: int = 0) -> VisualTokens:
    return compressor(images(*names, longest=longest), questions(*names))


def assert_same(got: VisualTokens, due: VisualTokens, label: object = None) -> None:
    count = min(got.mask.shape[1], due.mask.shape[1])
    assert not got.mask[:, count:].any() and not due.mask[:, count:].any(), label
    assert torch.equal(got.mask[:, :count], due.mask[:, :count]), label
    for ours, theirs in ((got.features, due.features), (got.boxes, due.boxes)):
        used = got.mask[:, :count, None]
        torch.testing.assert_close(ours[:, :count].where(used, 0.0), theirs[:, :count].where(used, 0.0))
    assert (got.summary is None) == (due.summary is None), label
    if got.summary is not None:
        torch.testing.assert_close(got.summary, due.summary)


def shape_is_known_without_looking() -> None:
    for name in OPTIONS:
        compressor = build(name)
        for grid, boxes in GRIDS.items():
            made = compress(compressor, grid)
            count = len(boxes) if compressor.tokens is None else compressor.tokens
            assert made.features.shape == (1, count, WIDTH), (name, grid)
            assert made.mask.shape == (1, count) and made.boxes.shape == (1, count, 4), (name, grid)
            assert made.features.isfinite().all(), (name, grid)
            assert (made.summary is not None) == compressor.summarises, name
            if compressor.tokens and name != "gate":
                assert made.mask.any(), (name, grid)


def padding_changes_nothing() -> None:
    """Ragged batches equal single rows, for any content of the padding."""
    for name in OPTIONS:
        compressor = build(name)
        batch = compress(compressor, *GRIDS, longest=50)
        for row, grid in enumerate(GRIDS):
            alone = compress(compressor, grid)
            summary = None if batch.summary is None else batch.summary[row : row + 1]
            part = [getattr(batch, field)[row : row + 1] for field in ("features", "mask", "boxes")]
            assert_same(VisualTokens(*part, summary), alone, (name, grid))


def images_do_not_mix() -> None:
    """Changing one image does not change the tokens of other images, bitwise."""
    for name in OPTIONS:
        compressor, given = build(name), images(*GRIDS)
        asked = questions(*GRIDS)
        before = compressor(given, asked)
        other = VisualTokens(given.features.clone(), given.mask, given.boxes)
        other.features[1] = random(given.features.shape[1], WIDTH, seed=7)
        changed = compressor(other, torch.cat([asked[:1], -asked[1:2], asked[2:]]))
        others = [row for row in range(len(GRIDS)) if row != 1]
        for field in ("features", "mask", "boxes", "summary"):
            if getattr(before, field) is not None:
                assert torch.equal(getattr(before, field)[others], getattr(changed, field)[others]), name
        if before.mask[1].any():
            assert not torch.equal(before.features[1], changed.features[1]), name


def order_of_images_is_kept() -> None:
    for name in OPTIONS:
        compressor, order = build(name), ["wide", "square", "base and tiles"]
        forwards, backwards = compress(compressor, *order), compress(compressor, *reversed(order))
        flipped = [None if part is None else part.flip(0) for part in vars(backwards).values()]
        assert_same(forwards, VisualTokens(*flipped), name)  # type: ignore[arg-type]


def gradients_flow() -> None:
    for name in OPTIONS:
        compressor = build(name).train()
        given, asked = images("square", "base and tiles"), questions("square", "base and tiles")
        features = given.features.requires_grad_()
        for attempt in range(8):  # a gate in training draws its branch
            torch.manual_seed(attempt)
            made = compressor(VisualTokens(features, given.mask, given.boxes), asked)
            used = made.features.where(made.mask[..., None], 0.0)
            total = (used * random(*used.shape, seed=4)).sum()
            if made.summary is not None:
                total = total + made.summary.pow(2).sum()
            if total.requires_grad:
                total.backward()
        if compressor.tokens == 0:
            continue
        assert features.grad is not None and features.grad.isfinite().all(), name
        assert not features.grad[~given.mask].any(), f"{name}: padding has no gradient"
        reached = features.grad[0].abs().sum(-1) > 0
        assert reached.sum() >= (6 if "pruning" in name else 16), name
        for parameter, value in compressor.named_parameters():
            assert value.grad is not None and value.grad.abs().sum() > 0, f"{name}: {parameter}"


def half_precision_stays() -> None:
    for name in OPTIONS:
        given, asked = images(*GRIDS), questions(*GRIDS)
        precise = build(name)(given, asked)
        coarse = build(name).bfloat16()(
            VisualTokens(given.features.bfloat16(), given.mask, given.boxes), asked.bfloat16()
        )
        assert coarse.features.dtype == torch.bfloat16 and coarse.boxes.dtype == torch.float32, name
        if "pruning" not in name:  # they may choose other tokens
            torch.testing.assert_close(coarse.features.float(), precise.features, rtol=0.05, atol=0.05)


def no_images_at_all() -> None:
    for name in OPTIONS:
        nothing = VisualTokens(
            torch.zeros(0, 0, WIDTH), torch.zeros(0, 0, dtype=torch.bool), torch.zeros(0, 0, 4)
        )
        made = build(name)(nothing, torch.zeros(0, WIDTH))
        assert len(made.features) == 0 and made.features.shape[2] == WIDTH, name


CONTRACT = [
    shape_is_known_without_looking,
    padding_changes_nothing,
    images_do_not_mix,
    order_of_images_is_kept,
    gradients_flow,
    half_precision_stays,
    no_images_at_all,
]


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_every_compressor_obeys(check: Callable[[], None]) -> None:
    check()


def test_every_registered_compressor_is_tested_here() -> None:
    assert set(OPTIONS) == set(COMPRESSORS)


@pytest.mark.parametrize("name", ["latent", "resampler", "vispec", "similarity_pruning", "attention_pruning"])
def test_order_within_an_image_does_not_matter(name: str) -> None:
    compressor, given = build(name), images("base and tiles")
    order = torch.randperm(given.mask.shape[1], generator=torch.Generator().manual_seed(1))
    shuffled = VisualTokens(given.features[:, order], given.mask[:, order], given.boxes[:, order])
    asked = questions("square")
    left, right = (compressor(each, asked).features[0] for each in (given, shuffled))
    if "pruning" in name:  # kept tokens stand in reading order
        left, right = (kept[kept[:, 0].argsort()] for kept in (left, right))
    torch.testing.assert_close(left, right)


@pytest.mark.parametrize(
    ("name", "options", "argument"),
    [
        ("latent", {"tokens": 0}, "tokens"),
        ("pooling", {"tokens": 5000}, "tokens"),
        ("convolution", {"kernel": 0}, "kernel"),
        ("resampler", {"heads": 3}, "heads"),
        ("gate", {"branches": {}}, "branches"),
        ("gate", {"branches": {"identity": {}}}, "branches"),
        ("latnet", {}, "compressor"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict[str, object], argument: str) -> None:
    with pytest.raises(InputError, match=f"^{argument}"):
        build_compressor(name, WIDTH, **options)


def test_options_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UnknownArgumentError, match="tokens"):
        build_compressor("latent", WIDTH, token=3)
    with pytest.raises(UnknownArgumentError, match="no options"):
        build_compressor("none", WIDTH, tokens=3)
