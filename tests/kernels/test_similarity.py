"""Most similar vectors and means of merged ones: equal to float64; kernels equal to torch; ties."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from mmspec.kernels import merge_vectors, most_similar
from tests.kernels.hopper import SHARED_MEMORY, Kernel, compile_for_hopper
from tests.kernels.planting import plant

Both = Callable[..., tuple[Any, Any]]


def guarded(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[P, n, d] vectors, every second row and the ends of rows of a tensor of NaN."""
    sets, rows, width = shape
    inner = torch.full((sets, 2 * rows + 1, width + 2), float("nan"), dtype=dtype)[:, 1::2, 1:-1]
    inner.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    return inner


def pairs(sets: int, rows: int, columns: int, width: int, device: torch.device, dtype: Any) -> Any:
    """Vectors a, of which one is zero, vectors b, and which of b there are: none in the first set."""
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


def most_similar_is_right(both: Both, device: torch.device, cases: Any = PAIRS) -> None:
    for shape in cases:
        for dtype in FLOATS:
            arguments = pairs(*shape, device, dtype)
            for found in both(most_similar, *arguments):
                check_similarity(found, *arguments)


def ties_go_to_the_lowest(both: Both, device: torch.device) -> None:
    """Vectors of 16 signs, whose norms and products are exact, so that many are equally similar."""
    for dtype in FLOATS:
        a, b, mask = (part.sign() for part in pairs(2, 9, 70, 16, device, dtype))
        kernel, twin = both(most_similar, a, b, mask.bool())
        matrix = cosines(a, b, mask.bool())
        ties = (matrix == matrix.amax(-1, keepdim=True)) & mask.bool()[:, None]
        assert ties[1].sum() > 2 * len(ties[1]) and torch.equal(twin[1], ties.int().argmax(-1))
        assert torch.equal(kernel[0], twin[0]) and torch.equal(kernel[1], twin[1])


def test_most_similar_equals_the_matrix_in_double_precision(both: Both, device: torch.device) -> None:
    most_similar_is_right(both, device)


def test_of_equally_similar_vectors_the_first_is_chosen(both: Both, device: torch.device) -> None:
    ties_go_to_the_lowest(both, device)


def merged(sets: int, members: int, width: int, count: int, device: torch.device) -> Any:
    values = guarded(sets, members, width, seed=4)
    generator = torch.Generator().manual_seed(5)
    weights = torch.randint(1, 5, (sets, members), generator=generator).float()
    target = torch.randint(-1, count, (sets, members), generator=generator)
    target[target == count // 2] = -1  # nothing is merged into that one
    values[(target < 0)[..., None].expand_as(values)] = float("nan")
    return values.to(device), weights.to(device), target.to(device), count


MERGED = ((1, 1, 1, 1), (2, 9, 5, 4), (2, 7, 300, 6))


def merges_agree(both: Both, device: torch.device) -> None:
    for shape in MERGED:
        kernel, twin = both(merge_vectors, *merged(*shape, device))
        torch.testing.assert_close(kernel[0], twin[0], rtol=1e-5, atol=1e-6)
        assert torch.equal(kernel[1], twin[1])


def test_merge_kernel_equals_torch(both: Both, device: torch.device) -> None:
    merges_agree(both, device)


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


def test_gradients_reach_what_was_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under every backend: where a gradient is wanted the torch form runs."""
    monkeypatch.setenv("MMSPEC_BACKEND", "triton")
    values = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    weights, target = torch.ones(2, 6), torch.tensor([[0, 1, 0, -1, 2, 2]]).expand(2, -1)
    assert torch.autograd.gradcheck(lambda x: merge_vectors(x, weights.double(), target, 3)[0], values)
    single = values.detach().float().requires_grad_()
    merge_vectors(single, weights, target, 3)[0].sum().backward()
    assert single.grad is not None and not single.grad[:, 3].any()


BUGS = {
    "of equally similar ones the last": ("better = highest > best", "better = highest >= best"),
    "of equally similar ones in a block the last": (
        "first_of = tl.min(tl.where(",
        "first_of = tl.max(tl.where(",
    ),
    "what does not exist is chosen": (
        "tl.where(exists[None, :], ",
        "tl.where(exists[None, :] == exists[None, :], ",
    ),
    "b is not normalised": ("product / tl.maximum(tl.sqrt(b_square), EPSILON)[None, :]", "product"),
    "a is not normalised": ("best / tl.maximum(tl.sqrt(a_square), EPSILON)", "best"),
    "the norm of a is that of all blocks": (
        "        a_square = tl.zeros([ROWS], dtype=tl.float32)\n        for first",
        "        for first",
    ),
    "the tail of the width is not masked": ("(depth < width)[None, :]", "(depth < width + 1)[None, :]"),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(
    name: str, both: Both, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, tmp_path, "similarity_triton", *BUGS[name])
    with pytest.raises(AssertionError):
        ties_go_to_the_lowest(both, device)
        most_similar_is_right(both, device, PAIRS[-1:])


MERGE_BUGS = {
    "one too few is merged": ("tl.load(starts + 1))", "tl.load(starts + 1) - 1)"),
    "those of no target are merged, too": (
        "range(tl.load(starts),",
        "range(tl.load(starts) * (slot > 0),",
    ),
    "weights are left out": ("mean += weight * tl.load", "mean += tl.load"),
    "empty ones are divided by zero": ("tl.where(total > 0, total, 1.0)", "total"),
}


@pytest.mark.parametrize("name", MERGE_BUGS)
def test_a_planted_bug_of_merging_is_caught(
    name: str, both: Both, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, tmp_path, "similarity_triton", *MERGE_BUGS[name])
    with pytest.raises(AssertionError):
        merges_agree(both, device)


def test_ops_are_whole_under_the_compiler() -> None:
    cpu = torch.device("cpu")
    a, b, mask = pairs(2, 5, 3, 8, cpu, torch.float32)
    values, *rest = merged(2, 9, 5, 4, cpu)
    calls: list[tuple[Any, tuple[object, ...]]] = [
        (most_similar, (a, b, mask)),
        (merge_vectors, (values.nan_to_num(), *rest)),
    ]
    for op, arguments in calls:
        torch.library.opcheck(op.op, arguments)
        compiled = torch.compile(op, fullgraph=True)(*arguments)
        assert all(map(torch.equal, compiled, op(*arguments)))


def shipped() -> list[Kernel]:
    """Features of 16 and of 32 bits."""
    kernels = []
    longs = dict.fromkeys(("index_ptr", "order_ptr", "starts_ptr"), "*i64")
    floats = dict.fromkeys(("similarity_ptr", "weights_ptr", "total_ptr"), "*fp32")
    integers = "rows columns width a_set_stride a_row_stride b_set_stride b_row_stride members count"
    strides = ("width", "a_set_stride", "a_row_stride", "b_set_stride", "b_row_stride")
    strides += ("set_stride", "member_stride")
    types = longs | floats | dict.fromkeys([*integers.split(), *strides], "i32") | {"mask_ptr": "*i1"}
    for dtype, block, depth in (("bf16", 64, 64), ("fp16", 64, 64), ("fp32", 32, 32)):
        vectors = dict.fromkeys(("a_ptr", "b_ptr", "values_ptr", "mean_ptr"), f"*{dtype}")
        sizes: dict[str, object] = {"ROWS": block, "COLUMNS": block, "DEPTH": depth, "UPCAST": False}
        module = "similarity_triton"
        kernels.append(Kernel(module, "_most_similar_kernel", types | vectors, sizes, strides))
        kernels.append(Kernel(module, "_merge_kernel", types | vectors, {"WIDTH": 256}, strides))
    return kernels


def test_kernels_compile_for_hopper_without_spills() -> None:
    pytest.importorskip("triton")
    for kernel, compiled in zip(shipped(), compile_for_hopper(shipped()), strict=True):
        assert compiled.spilled == 0, (kernel.name, compiled[:3])
        assert compiled.shared <= SHARED_MEMORY and "atom" not in compiled.ptx
        if kernel.name == "_most_similar_kernel":
            assert "cp.async" in compiled.ptx
            assert ("wgmma" in compiled.ptx) == (kernel.types["a_ptr"] != "*fp32")
