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


def test_of_equally_near_codes_the_lower_index_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lattice, where most distances are shared, some vectors twice; in blocks of a few rows."""
    monkeypatch.setattr(neighbours, "BLOCK_ELEMENTS", 100)
    side = torch.arange(5.0)
    codebook = torch.cartesian_prod(side, side)[
        torch.randperm(25, generator=torch.Generator().manual_seed(1))
    ]
    codebook = torch.cat([codebook, codebook[:6]])
    for count in (1, 3, 12, 30):
        assert find_neighbours(codebook, count, "l2").tolist() == brute_force(codebook, count, "l2")


def test_indices_beyond_sixteen_bits_are_held_in_thirty_two(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.iinfo(torch.int16).max + 1 == neighbours.INT16_CODES
    monkeypatch.setattr(neighbours, "INT16_CODES", 8)
    kinds = [find_neighbours(torch.randn(size, 2), 3, "l2").dtype for size in (8, 9)]
    assert kinds == [torch.int16, torch.int32]


def at_folder(target: Codes, folder: Path) -> SimpleNamespace:
    return SimpleNamespace(**vars(target), model=SimpleNamespace(name_or_path=str(folder)))


def test_a_table_is_read_back_from_the_models_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = at_folder(random_codes(40), tmp_path)
    table = neighbour_table(target, 5, "l2")
    (file,) = tmp_path.iterdir()
    assert "l2" in file.name and "-5-" in file.name
    monkeypatch.setattr(neighbours, "find_neighbours", None)
    assert torch.equal(neighbour_table(target, 5, "l2"), table)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "nonsense", "another"])
def test_a_damaged_cache_is_computed_anew(tmp_path: Path, damage: str) -> None:
    target = at_folder(random_codes(40), tmp_path)
    table = neighbour_table(target, 5, "l2")
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        content[-3] ^= 1
    elif damage == "another":
        neighbours.write_table(file, find_neighbours(torch.randn(30, 2), 5, "l2"))
        content = bytearray(file.read_bytes())
    file.write_bytes({"truncated": content[:60], "nonsense": b"no table"}.get(damage, content))
    assert torch.equal(neighbour_table(target, 5, "l2"), table)
    assert torch.equal(neighbours.read_table(file, 40, 5), table), "and is whole again"


def test_other_codebooks_metrics_and_counts_have_files_of_their_own(tmp_path: Path) -> None:
    for codes in (random_codes(40), random_codes(40, seed=1)):
        for metric in neighbours.METRICS:
            for count in (4, 5):
                target = at_folder(codes, tmp_path)
                expected = find_neighbours(codes.codebook, count, metric)
                assert torch.equal(neighbour_table(target, count, metric), expected)
    assert len(list(tmp_path.iterdir())) == 8


def test_a_folder_that_cannot_be_written_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    target = at_folder(random_codes(40), tmp_path)
    expected = find_neighbours(target.codebook, 5, "l2")
    assert torch.equal(neighbour_table(target, 5, "l2"), expected) and not list(tmp_path.iterdir())
    assert torch.equal(neighbour_table(at_folder(random_codes(40), tmp_path / "none"), 5, "l2"), expected)


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


def test_a_codebook_narrower_than_the_head_gives_a_table_of_the_codes() -> None:
    """Without a grid, tokens past the codebook are marks: they have no neighbours and are nobody's."""
    codes = random_codes(40)
    marked = Codes(codes.codebook, 43)
    assert torch.equal(neighbour_table(marked, 4, "l2"), neighbour_table(codes, 4, "l2"))
