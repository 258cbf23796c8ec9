"""Philox: published vectors, the meaning of counter words, distributions; kernels equal to their twins."""

import math

import pytest
import torch

from mmspec.kernels import philox4x32, philox_gumbel, philox_uniform
from mmspec.kernels.backend import INTERPRETED, tl, triton, use_triton
from mmspec.kernels.philox import gumbel_tile

ONES = 0xFFFFFFFF
# counters, key, words: kat_vectors of Random123 1.14, philox4x32 with 10 rounds.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counters", "key", "words"), KNOWN_ANSWERS)
def test_words_are_the_published_ones(counters, key, words):
    assert philox4x32(torch.tensor(counters), torch.tensor(key)).tolist() == words


def test_words_equal_arithmetic_with_python_integers():
    generator = torch.Generator().manual_seed(0)
    counters = torch.randint(0, 2**32, (100, 4), generator=generator)
    keys = torch.randint(0, 2**32, (100, 2), generator=generator)
    words = philox4x32(counters, keys)
    for counter, key, result in zip(counters.tolist(), keys.tolist(), words.tolist(), strict=True):
        assert result == encrypt_with_integers(counter, key)


def encrypt_with_integers(counter: list[int], key: list[int]) -> list[int]:
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = second >> 32 ^ c1 ^ k0, second & ONES, first >> 32 ^ c3 ^ k1, first & ONES
        k0, k1 = k0 + 0x9E3779B9 & ONES, k1 + 0xBB67AE85 & ONES
    return [c0, c1, c2, c3]


def test_uniforms_stay_inside_the_open_interval_where_rounding_would_leave_it(monkeypatch):
    # Words whose upper 24 bits are all ones come up once in 16 million draws; here they always do.
    def always(word: int) -> None:
        words = torch.full((1, 1, 1, 4), word)
        monkeypatch.setattr("mmspec.kernels.philox.encrypt_on_host", lambda counters, key: words)

    always(ONES)
    for dtype in (torch.float32, torch.float64):
        assert philox_uniform(torch.tensor([[0, 0]]), torch.tensor([[0]]), 0, 4, dtype=dtype).max() < 1
    always(0)
    noise = philox_gumbel(torch.tensor([[0, 0]]), torch.tensor([[0]]), 0, 4)
    assert torch.allclose(noise, torch.tensor(-math.log(2**-25)))  # the naive log(1 - u) would give infinity


def test_uniforms_have_the_moments_and_pairs_of_independent_draws():
    draws = philox_uniform(torch.tensor([[0, 99]]), torch.arange(500)[None], 5, 400, dtype=torch.float64)[0]
    n = draws.numel()  # 200,000
    assert abs(draws.mean() - 1 / 2) < 5 * math.sqrt(1 / 12 / n)
    assert abs(draws.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    centred = (draws - 1 / 2) * math.sqrt(12)
    neighbours = [  # elements, words of one block, positions
        (centred[:, 1:], centred[:, :-1]),
        (centred[:, 4:], centred[:, :-4]),
        (centred[1:], centred[:-1]),
    ]
    for left, right in neighbours:
        assert abs((left * right).mean()) < 5 / math.sqrt(left.numel())
    cells = torch.histc(draws, 64, 0, 1)
    chi_square = ((cells - n / 64) ** 2 / (n / 64)).sum()
    assert chi_square < 63 + 5 * math.sqrt(2 * 63)


def test_streams_steps_positions_and_keys_are_unrelated():
    def draw(key=(1, 2), position=3, stream=0, step=0):
        return philox_uniform(
            torch.tensor([key]), torch.tensor([[position]]), stream, 40_000, step, torch.float64
        ).flatten()

    base = draw() - 1 / 2
    for other in (draw(key=(2, 2)), draw(key=(1, 3)), draw(position=4), draw(stream=1), draw(step=1)):
        assert abs((base * (other - 1 / 2)).mean()) * 12 < 5 / math.sqrt(40_000)


SHAPES = [(1, 1, 1), (1, 3, 5), (2, 1, 128), (3, 2, 511), (2, 2, 513), (1, 1, 1030), (0, 2, 4), (2, 3, 0)]


def philox_arguments(batch: int, nodes: int, device: torch.device | str = "cpu") -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1000 * batch + nodes)
    key = torch.randint(0, 2**32, (batch, 2), generator=generator)
    return key.to(device), torch.randint(0, 2**31, (batch, nodes), generator=generator).to(device)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.every(2)
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


@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [(None, "cuda", True), ("torch", "cuda", False), ("triton", "cuda", True), (None, "cpu", False)],
)
def test_triton_runs_on_cuda_unless_the_environment_says_otherwise(monkeypatch, backend, device, expected):
    pytest.importorskip("triton")
    monkeypatch.delenv("MMSPEC_BACKEND", raising=False)
    if backend:
        monkeypatch.setenv("MMSPEC_BACKEND", backend)
    assert use_triton(torch.device(device)) is expected


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


@triton.jit
def noise_kernel(key_ptr, out_ptr, SIZE: tl.constexpr):
    start = tl.program_id(0) * SIZE
    position, stream, step = tl.full((), 7, tl.int64), tl.full((), 3, tl.int64), tl.full((), 5, tl.int64)
    noise = gumbel_tile(key_ptr, position, stream, step, start, SIZE)
    tl.store(out_ptr + start + tl.arange(0, SIZE), noise)


def test_noise_inside_kernels_is_that_of_the_op(device: torch.device) -> None:
    """Bit for bit on a GPU, whose logarithms both call; up to rounding in the interpreter."""
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1 or a GPU")
    key = torch.tensor([[12345, 67890]], device=device)
    out = torch.empty(4096, device=device)
    noise_kernel[(8,)](key, out, SIZE=512)
    expected = philox_gumbel(key, torch.tensor([[7]], device=device), 3, len(out), 5)[0, 0]
    assert expected.min() < -1.5 and expected.max() > 6
    if device.type == "cuda":
        assert torch.equal(out, expected)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
