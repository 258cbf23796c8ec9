"""The best candidates: against sorting by hand, the kernel against torch with ties and NaN, planted bugs."""

import math
import sys

import pytest
import torch

from mmspec.kernels import best
from tests.kernels.hopper import SHARED_MEMORY, Kernel, compile_for_hopper
from tests.kernels.planting import plant
from tests.kernels.trees import guarded

# rows, candidates, how many are wanted
SHAPES = [(1, 1, 1), (3, 7, 3), (2, 16, 16), (2, 33, 40), (2, 200, 61), (0, 4, 2), (2, 5, 0)]


def make(rows, size, seed=0, device="cpu"):
    """Few different scores, so that there are ties; infinite ones; higher ones behind the end."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.tensor([-math.inf, -2.5, -1.0, -0.0, 0.0, 1e-9, math.inf])
    drawn = torch.randint(len(levels), (rows, size), generator=generator)
    return guarded((rows, size), math.inf, torch.float32).copy_(levels[drawn]).to(device)


@pytest.mark.parametrize(("rows", "size", "count"), SHAPES)
@pytest.mark.parametrize("ascending", [False, True])
def test_the_highest_come_first_and_equal_ones_in_their_order(rows, size, count, ascending):
    scores = make(rows, size)
    found = best(scores, count, ascending)
    for row, values in enumerate(scores.tolist()):
        expected = sorted(range(size), key=lambda i: (-values[i], i))[:count]
        assert found[row].tolist() == (sorted(expected) if ascending else expected)


def compare(both, scores, count):
    for ascending in (False, True):
        ours, expected = both(best, scores, count, ascending)
        assert ours.dtype == expected.dtype and torch.equal(ours, expected)


@pytest.mark.parametrize(("rows", "size", "count"), SHAPES)
def test_the_kernel_gives_what_torch_gives(rows, size, count, both, device):
    for seed in range(2):
        compare(both, make(rows, size, seed, device), count)


def test_numbers_that_are_none_come_first(both, device):
    scores = torch.tensor([[0.0, math.nan, math.inf, math.nan, -1.0]], device=device)
    compare(both, scores, 3)
    assert best(scores, 3).tolist() == [[1, 3, 2]]


BUGS = {
    "the later one of equal scores": ("other[None, :] < own", "other[None, :] > own"),
    "equal scores share a rank": ("higher | (equal &", "higher | ((own[:, None] < 0) & equal &"),
    "what lies behind the end": ("before & (other < size)[None, :]", "before"),
    "NaN is not ranked": (
        "theirs_nan[None, :] & ~mine_nan[:, None]",
        "theirs_nan[None, :] & mine_nan[:, None]",
    ),
    "one too few": ("chosen = (rank < count)", "chosen = (rank < count - 1)"),
    "ascending by rank": ("if ASCENDING:", "if False:"),
    "the first block alone": ("range(0, size, BLOCK)", "range(0, tl.minimum(size, BLOCK), BLOCK)"),
    "scores of the first row": ("scores_ptr += row * size", "scores_ptr += 0 * row"),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_planted_in_the_kernel_is_seen(name, both, device, tmp_path, monkeypatch):
    plant(monkeypatch, tmp_path, "best_triton", *BUGS[name])
    monkeypatch.setattr(sys.modules["mmspec.kernels.best_triton"], "ELEMENTS", 512)  # several blocks
    scores = make(3, 33, device=device)
    scores[0, 4], scores[1, -1] = math.nan, math.inf
    with pytest.raises(AssertionError):
        compare(both, scores, 9)
        compare(both, scores[:, :7].clone(), 7)


def test_it_compiles_for_hopper_without_spills():
    types = {"scores_ptr": "*fp32", "index_ptr": "*i64", "size": "i32", "count": "i32"}
    kernels = [
        Kernel(
            "best_triton",
            "_best_kernel",
            types,
            {"ASCENDING": ascending, "SIZE": size, "BLOCK": block},
            (),
            8,
        )
        for size, block in ((16, 16), (128, 64), (512, 16), (4096, 2))
        for ascending in (False, True)
    ]
    for made in compile_for_hopper(kernels):
        assert made.spilled == 0 and made.shared <= SHARED_MEMORY


def test_it_is_an_op_of_torch():
    torch.library.opcheck(best.op, (make(2, 9), 4, True))
    torch.library.opcheck(best.op, (make(2, 9), 4, False))


def test_it_compiles_into_one_graph():
    scores = make(2, 9)
    compiled = torch.compile(best, fullgraph=True)
    assert torch.equal(compiled(scores, 4, True), best(scores, 4, True))
