"""The Triton kernels of Philox give the numbers of their twins: interpreted, and on a GPU if there is one."""

import pytest
import torch

from mmspec.kernels import philox, philox4x32, philox_gumbel, philox_uniform

SHAPES = [(1, 1, 1), (1, 3, 5), (2, 1, 128), (3, 2, 511), (2, 2, 513), (1, 1, 1030), (0, 2, 4), (2, 3, 0)]


def philox_arguments(batch: int, nodes: int, device: torch.device | str = "cpu") -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1000 * batch + nodes)
    key = torch.randint(0, 2**32, (batch, 2), generator=generator)
    return key.to(device), torch.randint(0, 2**31, (batch, nodes), generator=generator).to(device)


@pytest.mark.parametrize("shape", SHAPES)
def test_uniforms_are_those_of_the_twin_bit_for_bit(both, device, shape):
    batch, nodes, count = shape
    key, position = philox_arguments(batch, nodes, device)
    stream = torch.arange(nodes, device=device) + 2**31
    for words in ((1, count, 2**32 - 1), (stream, count, position + 1), (stream[:1], count, 0)):
        for dtype in (torch.float32, torch.float64):
            kernel, twin = both(philox_uniform, key, position, *words, dtype)
            assert torch.equal(kernel, twin)


@pytest.mark.parametrize(
    ("counters", "key"), [((4,), (2,)), ((300, 4), (2,)), ((3, 1, 4), (5, 2)), ((0, 4), (2,))]
)
def test_words_are_those_of_the_twin_bit_for_bit(both, device, counters, key):
    words = [torch.randint(0, 2**32, shape).to(device) for shape in (counters, key)]
    kernel, twin = both(philox4x32, *words)
    assert torch.equal(kernel, twin)


def test_the_ops_are_registered_as_torch_wants_them():
    key, position = philox_arguments(2, 3)
    word = torch.tensor([[1]])
    torch.library.opcheck(philox4x32.op, (torch.randint(0, 2**32, (3, 1, 4)), key))
    torch.library.opcheck(philox.uniforms.op, (key, position, word, position, 5, torch.float32))


def test_the_noise_is_compiled_without_a_break():
    key, position = philox_arguments(2, 3)
    compiled = torch.compile(philox_gumbel, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(key, position, 1, 5), philox_gumbel(key, position, 1, 5))


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
