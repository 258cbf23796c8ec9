"""Most similar vectors and means of merged vectors: accuracy against float64, kernels against torch, ties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from mmspec_extras.compressors.similarity import merge_vectors, most_similar

Both = Callable[..., tuple[Any, Any]]


def guarded(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return vectors [P, n, d] in a tensor of NaN: every second row, without the ends of rows."""
    sets, rows, width = shape
    inner = torch.full((sets, 2 * rows + 1, width + 2), float("nan"), dtype=dtype)[:, 1::2, 1:-1]
    inner.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    return inner


def pairs(sets: int, rows: int, columns: int, width: int, device: torch.device, dtype: Any) -> Any:
    """Return vectors a (one is zero), vectors b, and which vectors of b exist: none in the first set."""
    a, b = guarded(sets, rows, width, seed=1, dtype=dtype), guarded(sets, columns, width, seed=2, dtype=dtype)
    a[:, 0] = 0
    mask = torch.rand(sets, columns, generator=torch.Generator().manual_seed(3)) < 0.8
    mask[0] = False
    return a.to(device), b.to(device), mask.to(device)


def cosines(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    matrix = cosine_similarity(a.double()[:, :, None], b.double()[:, None], dim=-1)
    return matrix.masked_fill(~mask[:, None], float("-inf"))


PAIRS = ((1, 1, 1, 1), (2, 5, 3, 8), (2, 35, 70, 40))
FLOATS = (torch.float32, torch.bfloat16)


def check_similarity(found: tuple[Tensor, Tensor], a: Tensor, b: Tensor, mask: Tensor) -> None:
    matrix, (similarity, index) = cosines(a, b, mask), found
    highest = matrix.amax(-1)
    torch.testing.assert_close(similarity.double(), highest, rtol=1e-5, atol=1e-6)
    chosen = matrix.gather(-1, index[..., None])[..., 0]
    torch.testing.assert_close(chosen, highest, rtol=0, atol=1e-6)
    assert not index[0].any() and similarity[0].isneginf().all(), "there is nothing to be similar to"


def test_most_similar_equals_the_matrix_in_double_precision(both: Both, device: torch.device) -> None:
    for shape in PAIRS:
        for dtype in FLOATS:
            arguments = pairs(*shape, device, dtype)
            for found in both(most_similar, *arguments):
                check_similarity(found, *arguments)


def merged(sets: int, members: int, width: int, count: int, device: torch.device) -> Any:
    values = guarded(sets, members, width, seed=4)
    generator = torch.Generator().manual_seed(5)
    weights = torch.randint(1, 5, (sets, members), generator=generator).float()
    target = torch.randint(-1, count, (sets, members), generator=generator)
    target[target == count // 2] = -1  # this slot is empty
    values[(target < 0)[..., None].expand_as(values)] = float("nan")
    return values.to(device), weights.to(device), target.to(device), count


MERGED = ((1, 1, 1, 1), (2, 9, 5, 4), (2, 7, 300, 6))


def test_merge_kernel_equals_torch(both: Both, device: torch.device) -> None:
    for shape in MERGED:
        kernel, twin = both(merge_vectors, *merged(*shape, device))
        torch.testing.assert_close(kernel[0], twin[0], rtol=1e-5, atol=1e-6)
        assert torch.equal(kernel[1], twin[1])


def test_means_equal_a_loop_in_double_precision_and_mass_is_conserved() -> None:
    values, weights, target, count = merged(2, 9, 5, 4, torch.device("cpu"))
    mean, total = merge_vectors(values, weights, target, count)
    for each in range(2):
        for slot in range(count):
            chosen = target[each] == slot
            share = weights[each, chosen].double()
            expected = (share[:, None] * values[each, chosen].double()).sum(0) / share.sum().clamp_min(1e-9)
            torch.testing.assert_close(mean[each, slot].double(), expected, rtol=1e-5, atol=1e-6)
    kept = weights.where(target >= 0, 0.0)
    torch.testing.assert_close(total.sum(-1), kept.sum(-1))
    mass = (mean * total[..., None]).sum(1)
    torch.testing.assert_close(mass, (values.nan_to_num() * kept[..., None]).sum(1))
