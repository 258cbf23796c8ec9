"""Sampling kernels: warped logits and tokens as of the torch forms, which are the library's own samplers."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.kernels import Warping, sample_tokens, sampling, warp_logits

WARPINGS = {
    "plain": Warping(),
    "greedy, guided": Warping((0.0,), guidance_scale=(3.0,)),
    "top-k": Warping((0.7,), (5,)),
    "top-p": Warping((1.3,), top_p=(0.8,)),
    "a nucleus of one": Warping((1.0,), top_p=(1e-9,)),
    "min-p": Warping((0.9,), min_p=(0.1,)),
    "all, guided": Warping((0.8,), (9,), (0.7,), (0.05,), (2.5,)),
    "rows of their own": Warping(
        (0.0, 0.7, 1.0), (3, 0, 20), (1.0, 0.6, 0.9), (0.0, 0.02, 0.0), (2.0, 1.0, 4.0)
    ),
}


def logits_for(
    warping: Warping, size: int, device: Any = "cpu", ties: bool = False, nodes: int = 1
) -> Tensor:
    """[3 or 6, n, V] logits in a tensor whose guard bands are NaN; with excluded tokens, and with ties."""
    generator = torch.Generator().manual_seed(size)
    rows = 3 * (1 + warping.is_guided)
    guarded = torch.full((rows, nodes + 2, size + 8), math.nan)
    logits = guarded[:, 1:-1, 4:-4]
    logits[:] = 3 * torch.randn(rows, nodes, size, generator=generator)
    if ties:
        logits.div_(3).round_()
    if size > 10:
        logits[:3, :, : size // 5] = -math.inf
    return guarded.to(device)[:, 1:-1, 4:-4]


def noise_for(device: Any, nodes: int = 1) -> tuple[Tensor, Tensor]:
    """Keys and places of three lanes."""
    key = torch.tensor([[1, 2], [3, 4], [5, 6]], device=device)
    return key, torch.arange(7, 7 + 3 * nodes, device=device).view(3, nodes)


def tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are too long for one program, and have several tiles."""
    module = sys.modules["mmspec.kernels.sampling_triton"]
    monkeypatch.setattr(module, "RESIDENT", 0)
    monkeypatch.setattr(module, "TILE", 32)


@pytest.fixture(params=["held", "tiled"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that holds a row, and those for rows that are too long for it."""
    pytest.importorskip("mmspec.kernels.sampling_triton")
    if request.param == "tiled":
        tile(monkeypatch)


def compare(
    both: Callable[..., Any], device: Any, warping: Warping, size: int, ties: bool = False, nodes: int = 1
) -> None:
    """Both forms of both ops; a token may differ where two scores are equal but for rounding."""
    logits, (key, place) = logits_for(warping, size, device, ties, nodes), noise_for(device, nodes)
    kernel, twin = both(warp_logits, logits, warping)
    assert torch.equal(kernel == -math.inf, twin == -math.inf)
    torch.testing.assert_close(kernel, twin, rtol=1e-5, atol=1e-5)
    (tokens, finite), (expected, usable) = both(sample_tokens, logits, warping, key, place, 1, 2)
    assert finite.all() and usable.all()
    noise = sampling.philox_gumbel(key, place, 1, size, 2)
    drawn = torch.tensor(warping.temperature, device=device).view(-1, 1, 1) > 0
    scores = twin + torch.where(drawn, noise, 0.0)
    gap = scores.gather(-1, expected[..., None]) - scores.gather(-1, tokens[..., None])
    assert gap.abs().max() < 1e-5, "another token than the likeliest with its noise"
    if not ties:
        assert torch.equal(tokens, expected)


HELD = [("held", name) for name in WARPINGS]
TILED = [("tiled", name) for name in ("greedy, guided", "top-p", "all, guided", "rows of their own")]


@pytest.mark.parametrize(("path", "name"), HELD + TILED, indirect=["path"])
@pytest.mark.every(5)  # with rows of their own, in both kernels
def test_the_kernels_give_what_torch_gives(both, device, path, name):
    compare(both, device, WARPINGS[name], 37)


@pytest.mark.parametrize(
    ("path", "name"), [("held", "top-k"), ("held", "top-p"), ("tiled", "top-p")], indirect=["path"]
)
def test_ties_are_kept_at_the_kth_value_and_dropped_in_order_at_the_edge_of_a_nucleus(
    both, device, path, name
):
    compare(both, device, WARPINGS[name], 37, ties=True)
    equal = torch.zeros(1, 1, 8, device=device)
    kernel, twin = both(warp_logits, equal, Warping(top_p=(0.5,)))
    assert torch.equal(kernel, twin) and kernel.isfinite().sum() == 4
    kernel, twin = both(warp_logits, equal, Warping(top_k=(2,)))
    assert torch.equal(kernel, twin) and kernel.isfinite().all()


def test_rows_that_are_not_finite_are_seen(both, device, path):
    logits = torch.zeros(4, 1, 40, device=device)
    logits[0, 0, 3], logits[1, 0, 39], logits[2] = math.nan, math.inf, -math.inf
    key, place = torch.ones(4, 2, dtype=torch.long, device=device), torch.arange(4, device=device)[:, None]
    for warping in (Warping((0.5,), (7,), (0.9,)), Warping()):
        for tokens, finite in both(sample_tokens, logits, warping, key, place, 0):
            assert finite[:, 0].tolist() == [False, False, False, True]
            assert ((tokens >= 0) & (tokens < 40)).all()
    for warped in both(warp_logits, logits, Warping((0.5,), (7,))):
        assert warped.amax(-1).isfinite()[:, 0].tolist() == [False, False, False, True]


def test_nodes_of_a_tree_share_the_noise_of_their_depth(both, device, path):
    logits, key = torch.zeros(2, 4, 50, device=device), noise_for(device)[0][:2]
    place = torch.tensor([[3, 4], [8, 9]], device=device)
    node = torch.tensor([[0, 1, 1, 0]] * 2, device=device)
    for tokens, _ in both(sample_tokens, logits, Warping(), key, place, 0, 0, node):
        assert torch.equal(tokens[:, 1], tokens[:, 2]) and torch.equal(tokens[:, 0], tokens[:, 3])
        assert torch.equal(tokens[:, :2], sample_tokens(logits[:, :2], Warping(), key, place, 0)[0])


def test_tokens_are_drawn_from_the_warped_distribution():
    logits = torch.tensor([[[0.0, 1.0, -1.0, 2.0, 0.5, -math.inf]]])
    warping = Warping((0.8,), (4,), (0.97,))
    place = torch.arange(40_000)[None]
    tokens, _ = sample_tokens(logits.expand(1, 40_000, -1), warping, torch.tensor([[5, 6]]), place, 0)
    p = (logits / 0.8).topk(4).values.softmax(-1)
    expected = torch.zeros(6).scatter(0, (logits / 0.8).topk(4).indices[0, 0], p[0, 0]) * 40_000
    kept = expected > 0
    observed = torch.bincount(tokens[0], minlength=6)
    assert not observed[~kept].any()
    assert ((observed - expected)[kept] ** 2 / expected[kept]).sum() < 3 + 5 * math.sqrt(6)
