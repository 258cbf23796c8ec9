"""Ratios of groups: kernels equal torch, among equally likely tokens too; by rank, by cluster, by window."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.acceptance.grouped import Clusters
from mmspec.kernels import cluster_ratio, rank_ratio, rank_ratio_at, window_ratio
from tests.acceptance import slow_rules
from tests.kernels.hopper import SHARED_MEMORY, Kernel, compile_for_hopper
from tests.kernels.planting import plant

Both = Callable[..., tuple[Any, Any]]
UNIT = 2**-10  # masses are multiples of it, so that every sum is exact in float32


def dyadic(*shape: int, seed: int) -> Tensor:
    """[..., V] masses with exact sums, many of them equal or zero; around each row lies NaN."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 12, shape, generator=generator) - 2
    guarded = torch.full((shape[0], *(size + 2 for size in shape[1:])), float("nan"))
    inner = guarded[..., 1:-1, 1:-1] if len(shape) > 2 else guarded[..., 1:-1]
    inner.copy_(counts.clamp_min(0) * UNIT)
    return inner


def masses(*shape: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """p and q, which share no strides; every other zero of p is negative."""
    p, q = dyadic(*shape, seed=1), dyadic(*shape, seed=2)
    every_other = torch.arange(shape[-1]) % 2 == 0
    p.copy_(torch.where((p == 0) & every_other, -0.0, p))
    return p.to(device), q.contiguous().to(device)


def some_tokens(*shape: int, device: torch.device) -> Tensor:
    """[..., m] tokens: all where there is one place, else two a place, of which one is the last."""
    if len(shape) == 2 and shape[0] == 1:
        return torch.arange(shape[-1], device=device)[None]
    x = torch.randint(shape[-1], (*shape[:-1], 2), generator=torch.Generator().manual_seed(3))
    x[..., 0] = shape[-1] - 1
    return x.to(device)


def clusters(codes: int, count: int, device: torch.device) -> tuple[Tensor, ...]:
    """Clusters of all sizes, some of them empty."""
    cluster = torch.rand(codes, generator=torch.Generator().manual_seed(4)).square().mul(count - 1).long()
    return tuple(part.to(device) for part in Clusters.sorted(cluster, count))


def ranks_agree(both: Both, device: torch.device, cases: tuple[tuple[Any, ...], ...]) -> None:
    for shape, size in cases:
        p, q = masses(*shape, device=device)
        kernel, twin = both(rank_ratio, p, q, size)
        torch.testing.assert_close(kernel, twin, rtol=1e-6, atol=0)
        kernel, twin = both(rank_ratio_at, p, q, some_tokens(*shape, device=device), size)
        torch.testing.assert_close(kernel, twin, rtol=1e-6, atol=0)


def clusters_agree(both: Both, device: torch.device) -> None:
    for shape, codes, count in (((2, 9), 9, 3), ((2, 2, 45), 41, 12), ((1, 5), 4, 1)):
        p, q = masses(*shape, device=device)
        kernel, twin = both(cluster_ratio, p, q, *clusters(codes, count, device))
        torch.testing.assert_close(kernel, twin, rtol=1e-6, atol=0)


def windows_agree(both: Both, device: torch.device, cases: tuple[tuple[Any, ...], ...]) -> None:
    """Vectors so near, and masses so large, that each filter lets some tokens through."""
    for shape, codes, dimensions in cases:
        p, q = masses(*shape, device=device)
        p, q = p * 30, q * 30  # differences of probability up to .29
        vectors = torch.randn(codes, dimensions, generator=torch.Generator().manual_seed(5)).to(device)
        codebook = 0.6 * vectors / dimensions**0.5
        kernel, twin = both(window_ratio, p, q, codebook)
        torch.testing.assert_close(kernel, twin, rtol=1e-5, atol=0)
        x = some_tokens(*shape, device=device)
        kernel, twin = both(window_ratio, p, q, codebook, x)
        torch.testing.assert_close(kernel, twin, rtol=1e-5, atol=0)


SMALL_RANKS = (((1, 23), 5), ((2, 2, 11), 3))
RANKS = (((1, 1), 1), ((2, 7), 1), *SMALL_RANKS, ((3, 19), 14), ((2, 40), 33))
SMALL_WINDOWS = (((1, 20), 20, 2), ((2, 2, 13), 11, 3))
WINDOWS = (((1, 4), 4, 1), *SMALL_WINDOWS, ((2, 140), 135, 70))


def test_kernels_by_rank_equal_torch(both: Both, device: torch.device) -> None:
    ranks_agree(both, device, RANKS)


def test_kernels_by_cluster_equal_torch(both: Both, device: torch.device) -> None:
    clusters_agree(both, device)


def test_kernels_by_window_equal_torch(both: Both, device: torch.device) -> None:
    windows_agree(both, device, WINDOWS)


def in_small_tiles(both: Both, device: torch.device, patch: pytest.MonkeyPatch) -> None:
    """As a vocabulary of 184,622 is in tiles of 4096: with a ragged last one."""
    patch.setattr("mmspec.kernels.selection_triton.TILE", 8)
    ranks_agree(both, device, SMALL_RANKS)
    windows_agree(both, device, SMALL_WINDOWS)


def test_candidates_of_several_tiles_are_merged(
    both: Both, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    in_small_tiles(both, device, monkeypatch)


def test_groups_larger_than_a_program_holds(
    both: Both, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("mmspec.kernels.groups_triton.MEMBERS", 4)
    ranks_agree(both, device, (((2, 23), 9),))
    clusters_agree(both, device)


def test_groups_of_a_token_equal_the_loops(both: Both, device: torch.device) -> None:
    """The kernels against Python, in float32: groups by rank, and the released windows."""
    generator = torch.Generator().manual_seed(6)
    p, q = torch.rand(2, 2, 15, generator=generator).pow(3).unbind(0)
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    tokens = torch.arange(15).expand(2, -1)
    kernel, _ = both(rank_ratio_at, p.to(device), q.to(device), tokens.to(device), 4)
    pairs = list(zip(p.tolist(), q.tolist(), strict=True))
    expected = torch.tensor([slow_rules.ranked_groups(*pair, 4) for pair in pairs])
    torch.testing.assert_close(kernel.cpu(), expected, rtol=1e-5, atol=1e-6)
    codebook = torch.randn(13, 2, generator=generator)
    kernel, _ = both(window_ratio, p.to(device), q.to(device), codebook.to(device), tokens.to(device))
    expected = torch.tensor([slow_rules.released_groups(*pair, codebook.tolist()) for pair in pairs])
    torch.testing.assert_close(kernel.cpu(), expected, rtol=1e-5, atol=1e-6)


BUGS = {
    "of equally likely tokens the higher index comes first": (
        "selection_triton",
        "index, x = vocabulary - 1 - index, vocabulary - 1 - x",
        "index, x = index + 0, x + 0",
    ),
    "one rank too many below": ("groups_triton", "lane < SIZE - 1 - above", "lane < SIZE - above"),
    "one rank too few above": ("groups_triton", "lane - (SIZE - 1) < above", "lane - (SIZE - 1) < above - 1"),
    "the last tile's candidates are lost": (
        "selection_triton",
        "mask=slot < tiles * WIDTH",
        "mask=slot < (tiles - 1) * WIDTH",
    ),
    "ranks are counted in the first tile": (
        "groups_triton",
        "mask=tile < tiles, other=0",
        "mask=tile < 1, other=0",
    ),
    "a candidate is taken twice": (
        "selection_triton",
        "below = tl.where(below == best, NONE_BELOW, below)",
        "below = tl.where(below == best - 1, NONE_BELOW, below)",
    ),
    "groups begin one later": (
        "groups_triton",
        "begin = tl.minimum(group * size, listed)",
        "begin = tl.minimum(group * size + 1, listed)",
    ),
    "the exact rule from rank eight on": (
        "windows_triton",
        "tl.int32), 0) == BELOW",
        "tl.int32), 0) == BELOW + 1",
    ),
    "the window of all tokens is a rank off": ("windows_triton", "+ (step >= BELOW)", "+ (step > BELOW)"),
    "places of a batch are mixed": (
        "groups_triton",
        "batch, place = place // places, place % places\n    tile = ",
        "batch = place // places\n    tile = ",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(
    name: str, both: Both, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importers = ("groups_triton", "windows_triton") if BUGS[name][0] == "selection_triton" else ()
    plant(monkeypatch, tmp_path, *BUGS[name], importers)
    with pytest.raises(AssertionError):
        in_small_tiles(both, device, monkeypatch)


CLUSTER_BUGS = {
    "syntax is in the last cluster": ("single = listed + group - groups", "single = listed + 0 * group"),
    "a cluster ends one early": (
        "single = listed + group - groups",
        "end = tl.maximum(begin, end - 1)\n    single = listed + group - groups",
    ),
    "q's mass on excluded tokens counts": ("mask=inside & (p > 0), other=0.0", "mask=inside, other=0.0"),
}


@pytest.mark.parametrize("name", CLUSTER_BUGS)
def test_a_planted_bug_of_clusters_is_caught(
    name: str, both: Both, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, tmp_path, "groups_triton", *CLUSTER_BUGS[name])
    with pytest.raises(AssertionError):
        clusters_agree(both, device)


def test_ops_are_whole_under_the_compiler() -> None:
    p, q = (part.clone() for part in masses(2, 3, 20, device=torch.device("cpu")))
    x, codebook = some_tokens(2, 3, 20, device=p.device), torch.randn(18, 2)
    calls: list[tuple[Any, tuple[object, ...]]] = [
        (rank_ratio, (p, q, 3)),
        (rank_ratio_at, (p, q, x, 3)),
        (cluster_ratio, (p, q, *clusters(18, 4, p.device))),
        (window_ratio, (p, q, codebook)),
        (window_ratio, (p, q, codebook, x)),
    ]
    for op, arguments in calls:
        torch.library.opcheck(op.op, arguments)
        assert torch.equal(torch.compile(op, fullgraph=True)(*arguments), op(*arguments))


FLOATS = dict.fromkeys(("p_ptr", "q_ptr", "out_ptr", "ordered_ptr", "codebook_ptr"), "*fp32")
LONGS = dict.fromkeys(("x_ptr", "taken_ptr", "order_ptr", "members_ptr"), "*i64")
INTEGERS = "places tokens vocabulary tiles codes dimensions members_stride listed groups size batch_stride"
INTEGERS += " place_stride p_batch_stride p_place_stride q_batch_stride q_place_stride"
SCALARS = dict.fromkeys(INTEGERS.split(), "i32") | {"difference": "fp32", "distance": "fp32"}
TYPES = FLOATS | LONGS | SCALARS | {"before_ptr": "*i32"}


def shipped() -> list[Kernel]:
    """Vocabularies of 16,384 and of 184,622; groups of 14 and of 32; vectors of 8 and of 256 dimensions."""
    made = []
    for below, above, width, lower in ((7, 6, 16, False), (13, 13, 32, True), (31, 31, 64, True)):
        sizes = {"BELOW": below, "ABOVE": above, "WIDTH": width, "TILE": 4096, "LOWER_INDEX_ABOVE": lower}
        made.append(Kernel("selection_triton", "_select_kernel", TYPES, sizes, warps=8))
    for size, width in ((14, 32), (32, 64)):
        for tiles in (4, 64):
            sizes = {"SIZE": size, "WIDTH": width, "TILES": tiles, "SLOTS": tiles * width}
            made.append(Kernel("groups_triton", "_rank_merge_kernel", TYPES, sizes))
    for block in (8, 64):
        sizes = {"BELOW": 7, "ABOVE": 6, "WIDTH": 16, "SLOTS": 1024, "BLOCK": block}
        made.append(Kernel("windows_triton", "_window_merge_kernel", TYPES, sizes))
    for block in (4, 8, 16):
        sizes = {"BELOW": 7, "ABOVE": 6, "RANKS": 64, "BLOCK": block}
        made.append(Kernel("windows_triton", "_windows_kernel", TYPES, sizes))
    groups = [{"GROUPS": 1024 // width, "WIDTH": width} for width in (1, 16, 1024)]
    for sizes in groups:
        made.append(Kernel("groups_triton", "_groups_kernel", TYPES, {"starts_ptr": None, **sizes}))
        made.append(Kernel("groups_triton", "_groups_kernel", TYPES | {"starts_ptr": "*i64"}, sizes))
    return made


def test_kernels_compile_for_hopper_without_spills() -> None:
    pytest.importorskip("triton")
    for kernel, compiled in zip(shipped(), compile_for_hopper(shipped()), strict=True):
        assert compiled.spilled == 0, (kernel.name, kernel.constants, compiled[:3])
        assert compiled.shared <= SHARED_MEMORY, kernel
        assert "ld.global" in compiled.ptx and "atom" not in compiled.ptx, kernel.name
