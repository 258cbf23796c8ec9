"""Neighbour tables equal brute force, are kept beside the model, and refuse a codebook that does not fit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from mmspec.core.image_grid import ImageGrid
from mmspec.errors import InputError
from mmspec.trees import neighbours
from mmspec.trees.neighbours import find_neighbours, neighbour_table
from tests.trees.codes import Codes, random_codes


def brute_force(codebook: Tensor, count: int, metric: str) -> list[list[int]]:
    vectors = codebook.double().tolist()

    def distance(a: list[float], b: list[float]) -> float:
        if metric == "l2":
            return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))
        lengths = (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5
        return 1 - sum(x * y for x, y in zip(a, b, strict=True)) / lengths

    table = []
    for index, vector in enumerate(vectors):
        others = [(distance(vector, other), j) for j, other in enumerate(vectors) if j != index]
        table.append([j for _, j in sorted(others)[:count]])
    return table


@pytest.mark.parametrize(
    ("metric", "size", "count", "dimensions"),
    [("l2", 1, 0, 3), ("cosine", 2, 1, 1), ("l2", 50, 7, 3), ("cosine", 50, 7, 3), ("l2", 50, 49, 8)],
)
def test_a_table_equals_brute_force(metric: str, size: int, count: int, dimensions: int) -> None:
    codebook = torch.randn(size, dimensions, generator=torch.Generator().manual_seed(3))
    table = find_neighbours(codebook, count, metric)
    assert table.dtype is torch.int16 and table.shape == (size, count)
    assert table.tolist() == brute_force(codebook, count, metric)


def at_folder(target: Codes, folder: Path) -> SimpleNamespace:
    return SimpleNamespace(**vars(target), model=SimpleNamespace(name_or_path=str(folder)))


def test_a_table_is_read_back_from_the_models_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = at_folder(random_codes(40), tmp_path)
    table = neighbour_table(target, 5, "l2")
    (file,) = tmp_path.iterdir()
    assert "l2" in file.name and "-5-" in file.name
    monkeypatch.setattr(neighbours, "find_neighbours", None)
    assert torch.equal(neighbour_table(target, 5, "l2"), table)


@pytest.mark.parametrize(
    "target",
    [
        Codes(None, 8),
        Codes(torch.zeros(9, 2), 8),
        Codes(torch.zeros(8), 8),
        Codes(torch.full((8, 2), float("nan")), 8),
        Codes(torch.zeros(8, 2), 9, ImageGrid(2, 2, 7)),
    ],
    ids=["none", "too many", "no vectors", "NaN", "not the grid's"],
)
def test_a_codebook_that_does_not_fit_the_vocabulary_is_named(target: Codes) -> None:
    with pytest.raises(InputError) as caught:
        neighbour_table(target, 2, "l2")
    assert caught.value.argument == "codebook"
