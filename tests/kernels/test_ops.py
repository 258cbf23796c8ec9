"""Every op of `mmspec.kernels`, on the arguments on which `benchmarks/gpu` times it."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from benchmarks.gpu.kernel_cases import CASES, KernelCase
from mmspec import kernels
from mmspec.kernels import philox, sampling

OPS = {case.op: case for case in CASES}


def called(case: KernelCase, function: Any = None) -> Any:
    """Results of an op, and its arguments afterwards: some are written to."""
    torch.manual_seed(0)
    arguments = case.make(case.tiny, torch.device("cpu"))
    return (function or case.function)(*arguments), arguments


def test_every_op_has_a_case() -> None:
    missing = {*kernels.OPS} - set(OPS)
    assert not missing, f"benchmarks/gpu/kernel_cases.py: add a KernelCase for {sorted(missing)}"
    assert set(OPS) <= {*kernels.OPS} and len(OPS) == len(CASES)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.every(4)
def test_it_is_registered_as_torch_wants_it_and_stays_whole_under_the_compiler(op: str) -> None:
    case = OPS[op]
    torch.manual_seed(0)
    if hasattr(case.function, "op"):  # else it calls one that is
        torch.library.opcheck(case.function.op, copy.deepcopy(case.make(case.tiny, torch.device("cpu"))))
    compiled = torch.compile(case.function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(called(case, compiled), called(case), rtol=0, atol=0, equal_nan=True)


def test_ops_that_functions_call_are_registered_too() -> None:
    logits, key, place = torch.randn(4, 3, 12), torch.tensor([[1, 2], [3, 4]]), torch.arange(6).view(2, 3)
    word = torch.tensor([[1]])
    warping = kernels.Warping((0.8,), (9,), (0.7,), (0.05,), (2.5,))
    torch.library.opcheck(philox.uniforms.op, (key, place, word, place, 5, torch.float32))
    torch.library.opcheck(sampling.warped.op, (logits, *warping))
    torch.library.opcheck(sampling.warped.op, (logits, *kernels.Warping()))
    torch.library.opcheck(sampling.sampled.op, (logits, key, place, word, word, None, *warping))


def test_kernel_and_twin_have_one_dtype_and_shape(both: Any) -> None:
    shape = partial(tree_map_only, torch.Tensor, lambda x: (x.shape, x.dtype))
    for op, case in OPS.items():
        (kernel, _), (twin, _) = both(called, case)
        assert shape(kernel) == shape(twin), op
