"""Sampling kernels: warped logits and tokens as of the torch forms, which are the library's own samplers."""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.kernels import Warping, sample_tokens, sampling, warp_logits
from tests.kernels.hopper import SHARED_MEMORY, Kernel, compile_for_hopper

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


def logits_for(warping: Warping, size: int, device: Any = "cpu", ties: bool = False) -> Tensor:
    """[3 or 6, 1, V] logits in a tensor whose guard bands are NaN; with excluded tokens, and with ties."""
    generator = torch.Generator().manual_seed(size)
    rows = 3 * (1 + warping.is_guided)
    guarded = torch.full((rows, 3, size + 8), math.nan)
    guarded[:, 1:2, 4:-4] = 3 * torch.randn(rows, 1, size, generator=generator)
    if ties:
        guarded = guarded.round()
    if size > 10:
        guarded[:3, 1:2, 4 : 4 + size // 5] = -math.inf
    return guarded.to(device)[:, 1:2, 4:-4]


def noise_for(device: Any) -> tuple[Tensor, Tensor]:
    return torch.tensor([[1, 2], [3, 4], [5, 6]], device=device), torch.arange(7, 10, device=device).view(
        3, 1
    )


@pytest.fixture(params=["held", "tiled"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel that holds a row, and those for rows that are too long for it."""
    module = pytest.importorskip("mmspec.kernels.sampling_triton")
    if request.param == "tiled":
        monkeypatch.setattr(module, "RESIDENT", 0)
        monkeypatch.setattr(module, "TILE", 32)
    return request.param


def compare(both: Callable[..., Any], device: Any, warping: Warping, size: int, ties: bool = False) -> None:
    """Both forms of both ops; a token may differ where two scores are equal but for rounding."""
    logits, (key, place) = logits_for(warping, size, device, ties), noise_for(device)
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


@pytest.mark.parametrize("name", WARPINGS)
def test_the_kernels_give_what_torch_gives(both, device, path, name):
    compare(both, device, WARPINGS[name], 37)


@pytest.mark.parametrize("size", [1, 16, 33, 130])
def test_rows_of_any_length(both, device, path, size):
    compare(both, device, Warping((0.7,), (9,), (1.0,), (0.01,), (2.5,)), size)


@pytest.mark.parametrize("name", ["top-k", "top-p"])
def test_ties_are_kept_at_the_kth_value_and_dropped_in_order_at_the_edge_of_a_nucleus(
    both, device, path, name
):
    compare(both, device, WARPINGS[name], 37, ties=True)
    equal = torch.zeros(1, 1, 8, device=device)
    kernel, twin = both(warp_logits, equal, Warping(top_p=(0.5,)))
    assert torch.equal(kernel, twin) and kernel.isfinite().sum() == 4
    kernel, twin = both(warp_logits, equal, Warping(top_k=(2,)))
    assert torch.equal(kernel, twin) and kernel.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_first(both, device, path, dtype):
    warping = Warping((0.7,), (20,), (0.9,), (0.0,), (2.0,))
    logits = logits_for(warping, 70, device).to(dtype)
    kernel, twin = both(warp_logits, logits, warping)
    torch.testing.assert_close(kernel, twin, rtol=1e-5, atol=1e-5)


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


ALL, ROWS = WARPINGS["all, guided"], WARPINGS["rows of their own"]
BUGS = {
    "one key too many passes for k": ("_cut", "reached >= k", "reached > k", WARPINGS["top-k"]),
    "the nucleus keeps its edge out": ("_cut", "bound - below)", "bound - below + 1)", WARPINGS["top-p"]),
    "min-p forgotten": ("_cut", "tl.maximum(value, lowest)", "value", WARPINGS["min-p"]),
    "no unconditional normaliser": ("_guide", "u - u_top - tl.log(u_sum)", "u - u_top", ALL),
    "noise of the first tile everywhere": ("gumbel_tile", "start // 4 + ", "", Warping()),
    "a mask off by one": ("_row_kernel", "inside = index < size", "inside = index < size + 1", Warping()),
    "the first tile wins": ("_choice_kernel", "tl.argmax(best, 0)", "0", Warping()),
    "settings of another row": ("_settings", "settings_ptr + row", "settings_ptr + (row + 1) % rows", ROWS),
}
TILED = ("noise of the first tile everywhere", "the first tile wins")


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(both, device, monkeypatch, tmp_path, name):
    if device.type == "cuda":
        pytest.skip("bugs are planted in interpreted kernels")
    module = pytest.importorskip("mmspec.kernels.sampling_triton")
    function, right, wrong, warping = BUGS[name]
    source, body = inspect.getsource(module), inspect.getsource(getattr(module, function).fn)
    assert right in body, "plant the bug anew"
    # The interpreter reads the source of a kernel from its file.
    file = tmp_path / "sampling_triton.py"
    file.write_text(source.replace(body, body.replace(right, wrong)))
    spec = importlib.util.spec_from_file_location(module.__name__, file)
    mutant = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, mutant)
    spec.loader.exec_module(mutant)
    if name in TILED:
        monkeypatch.setattr(mutant, "RESIDENT", 0)
        monkeypatch.setattr(mutant, "TILE", 32)
    with pytest.raises((AssertionError, IndexError)):
        compare(both, device, warping, 37, ties=True)
        compare(both, device, warping, 37)


def shipped() -> list[Kernel]:
    words = dict.fromkeys(("key_ptr", "place_ptr", "stream_ptr", "step_ptr", "node_ptr", "token_ptr"), "*i64")
    sizes = dict.fromkeys(("size", "batch", "rows", "settings_rows", "nodes", "places", "tiles"), "i32")
    strides = {"batch_stride": "i64", "row_stride": "i64"}
    row = words | sizes | strides | {"settings_ptr": "*fp32", "finite_ptr": "*i1"}
    flags = {"TOP_K": True, "TOP_P": True}
    held = [
        Kernel(
            "sampling_triton",
            "_row_kernel",
            row | {"logits_ptr": dtype},
            flags | {"GUIDED": True, "MIN_P": True, "INDEX_BITS": 13, "BLOCK": block, "warped_ptr": None},
            warps=max(1, min(16, block // 512)),
        )
        for dtype, block in (("*bf16", 8192), ("*fp32", 8192))
    ]
    return held


def test_the_kernels_compile_for_hopper_without_spills():
    pytest.importorskip("triton")
    kernels = shipped()
    for kernel, compiled in zip(kernels, compile_for_hopper(kernels), strict=True):
        assert compiled.spilled == 0 and compiled.shared <= SHARED_MEMORY, kernel
        assert "mul.hi.u32" in compiled.ptx  # Philox with 32-bit counters


def test_the_ops_are_registered_as_torch_wants_them():
    warping = WARPINGS["all, guided"]
    logits, (key, place) = logits_for(warping, 12).contiguous(), noise_for("cpu")
    word = torch.tensor([[1]])
    torch.library.opcheck(sampling.warped.op, (logits, *warping))
    torch.library.opcheck(sampling.warped.op, (logits, *Warping()))
    torch.library.opcheck(sampling.sampled.op, (logits, key, place, word, word, None, *warping))


def test_sampling_is_compiled_without_a_break():
    warping = WARPINGS["all, guided"]
    logits, (key, place) = logits_for(warping, 12), noise_for("cpu")
    compiled = torch.compile(sample_tokens, fullgraph=True, backend="aot_eager")
    expected = sample_tokens(logits, warping, key, place, 1)
    for ours, theirs in zip(compiled(logits, warping, key, place, 1), expected, strict=True):
        assert torch.equal(ours, theirs)
