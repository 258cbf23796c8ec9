"""The Triton kernels give the numbers of their torch twins: interpreted, and on a GPU if there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmspec.kernels import philox4x32, philox_gumbel, philox_uniform

ROOT = Path(__file__).resolve().parents[2]
SHAPES = [(1, 1, 1), (1, 3, 5), (2, 1, 128), (3, 2, 511), (2, 2, 513), (1, 1, 1030), (0, 2, 4), (2, 3, 0)]


def philox_arguments(batch: int, nodes: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * batch + nodes)
    key = torch.randint(0, 2**32, (batch, 2), generator=generator)
    return key.to(device), torch.randint(0, 2**31, (batch, nodes), generator=generator).to(device)


def run(source: str, environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


INTERPRETED = """
import torch
from mmspec.kernels import philox4x32, philox_uniform
from mmspec.kernels.philox_triton import philox4x32_triton, philox_uniform_triton
from tests.kernels.test_triton_twins import SHAPES, philox_arguments

for batch, nodes, count in SHAPES:
    key, position = philox_arguments(batch, nodes)
    stream = torch.arange(nodes) + 2**31
    for dtype in (torch.float32, torch.float64):
        for arguments in ((1, count, 2**32 - 1, dtype), (stream, count, position + 1, dtype)):
            ours = philox_uniform_triton(key, position, *arguments)
            assert torch.equal(ours, philox_uniform(key, position, *arguments)), (batch, nodes, count, dtype)

for counters_shape, key_shape in (((4,), (2,)), ((300, 4), (2,)), ((3, 1, 4), (5, 2)), ((0, 4), (2,))):
    counters = torch.randint(0, 2**32, counters_shape)
    key = torch.randint(0, 2**32, key_shape)
    assert torch.equal(philox4x32_triton(counters, key), philox4x32(counters, key)), counters_shape
"""


def test_interpreted_kernels_give_the_numbers_of_the_twins():
    pytest.importorskip("triton")
    # Triton reads the variable when a kernel is defined, so the interpreter needs a process of its own.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run(INTERPRETED, environment)


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from mmspec.kernels import philox_triton as kernels

WORDS = dict(counters_ptr="*i64", key_ptr="*i64", out_ptr="*i64", size="i32")
UNIFORM = dict.fromkeys(("key_ptr", "position_ptr", "stream_ptr", "step_ptr"), "*i64")
UNIFORM |= dict(nodes="i32", count="i32")
for kernel, types in (
    (kernels._words_kernel, WORDS),
    (kernels._uniform_kernel, UNIFORM | dict(out_ptr="*fp32")),
    (kernels._uniform_kernel, UNIFORM | dict(out_ptr="*fp64")),
):
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs={"BLOCK": kernels.BLOCK})
    binary = compile(source, target=GPUTarget("cuda", 90, 32))
    assert "mul.hi.u32" in binary.asm["ptx"]
"""


def test_kernels_compile_for_hopper_without_a_gpu():
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run(COMPILED, environment)


@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [(None, "cuda", True), ("torch", "cuda", False), ("triton", "cuda", True), (None, "cpu", False)],
)
def test_triton_runs_on_cuda_unless_the_environment_says_otherwise(monkeypatch, backend, device, expected):
    pytest.importorskip("triton")
    from mmspec.kernels.backend import use_triton

    monkeypatch.delenv("MMSPEC_BACKEND", raising=False)
    if backend:
        monkeypatch.setenv("MMSPEC_BACKEND", backend)
    assert use_triton(torch.device(device)) is expected


def test_an_unknown_backend_is_an_error(monkeypatch):
    from mmspec.kernels.backend import use_triton

    monkeypatch.setenv("MMSPEC_BACKEND", "cuda")
    with pytest.raises(ValueError, match=r"'cuda'; allowed: torch, triton"):
        use_triton(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "nodes", "count"), [*SHAPES, (4, 64, 32_000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cuda_gives_the_numbers_of_the_cpu(batch, nodes, count, dtype):
    arguments = (3, count, 1, dtype)
    key, position = philox_arguments(batch, nodes)
    on_cuda = philox_uniform(key.cuda(), position.cuda(), *arguments)
    assert torch.equal(on_cuda.cpu(), philox_uniform(key, position, *arguments))
    # log and log1p differ in the last bits between devices
    noise = philox_gumbel(key.cuda(), position.cuda(), *arguments).cpu()
    assert torch.allclose(noise, philox_gumbel(key, position, *arguments), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_cuda_gives_the_words_of_the_cpu():
    counters, key = torch.randint(0, 2**32, (3, 1, 100, 4)), torch.randint(0, 2**32, (5, 1, 2))
    assert torch.equal(philox4x32(counters.cuda(), key.cuda()).cpu(), philox4x32(counters, key))
