"""Attention of the nodes of a draft: compared with float64, kernel with torch form, and no leaks."""

import pytest
import torch

from mmspec.kernels import tree_attention, tree_paths
from mmspec.kernels.tree_attention import parts_of

NAN = float("nan")
CLOSE = {
    torch.float32: 1e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}  # relative; stores round, or truncate


def inputs(
    lengths: list[int],
    nodes: int = 5,
    group: int = 1,
    key_heads: int = 1,
    dim: int = 16,
    width: int = 160,
    shape: str = "tree",
    window: int | None = None,
    blind: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
):
    """Arguments of `tree_attention` over buffers [B, capacity, heads, d] in which what is stale is NaN."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    query = torch.randn(rows, nodes, key_heads * group, dim, generator=generator).to(dtype).transpose(1, 2)
    key, value = torch.full((2, rows, width + 7, key_heads, dim), NAN, dtype=dtype)
    length, index = torch.tensor(lengths), torch.arange(nodes)
    if shape == "window":  # of Jacobi decoding: all nodes see the same slots, of which some hold nothing yet
        visible = torch.arange(nodes + 3).expand(rows, 1, -1) % 3 != 1
        depth = index.expand(rows, nodes)
    else:
        parents = (torch.rand(rows, nodes, generator=generator) * index).long()
        if shape == "chain":
            parents = (index - 1).clamp_min(0).expand(rows, nodes)
        visible, depth = tree_paths(parents, nodes)
    first = torch.zeros(rows, 1, dtype=torch.long)
    if window is not None:
        first = (length[:, None] + depth - window + 1).clamp_min(0)
        visible = visible & (depth[:, :, None] - depth[:, None] < window)
    if blind:
        first = first + 1000
    for row in range(rows):
        slots = lengths[row] + visible[row].any(0).nonzero()[:, 0]
        places = torch.cat([torch.arange(lengths[row]), slots])
        for buffer in (key, value):
            drawn = torch.randn(len(places), key_heads, dim, generator=generator)
            buffer[row, places] = drawn.to(dtype)
    key, value = (buffer[:, :width].transpose(1, 2) for buffer in (key, value))
    return query, key, value, first, length, visible, dim**-0.5


def expected(query, key, value, first, lengths, visible, scale):
    """Softmax attention in float64, a node and a head at a time."""
    rows, heads, nodes, dim = query.shape
    out = torch.zeros(rows, nodes, heads, dim, dtype=torch.float64)
    for row in range(rows):
        for node in range(nodes):
            length = int(lengths[row])
            own = visible[row, node % visible.shape[1]].nonzero()[:, 0] + length
            start = min(int(first[row, node % first.shape[1]]), length)
            columns = torch.cat([torch.arange(start, length), own])
            for head in range(heads if len(columns) else 0):
                shared = head * key.shape[1] // heads
                logits = key[row, shared, columns].double() @ query[row, head, node].double() * scale
                out[row, node, head] = logits.softmax(0) @ value[row, shared, columns].double()
    return out


def distance(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.double() - reference.double()).norm() / reference.double().norm())


CASES = {
    "one node, no committed token": dict(lengths=[0], nodes=1),
    "ragged rows at the edges of blocks": dict(lengths=[0, 31, 32, 33, 64, 96]),
    "groups of 4": dict(lengths=[40, 7], group=4, key_heads=2),
    "groups of 7, more queries than a tile": dict(lengths=[37, 64], nodes=5, group=7),
    "groups of 8": dict(lengths=[3, 128], group=8),
    "heads of 80": dict(lengths=[50], dim=80),
    "heads of 9": dict(lengths=[50], dim=9, key_heads=3),
    "a chain in a window": dict(lengths=[0, 4, 70], shape="chain", window=6, nodes=9),
    "a tree in a window of two blocks": dict(lengths=[100, 127], window=64, nodes=18),
    "windows behind the committed tokens": dict(lengths=[70, 3], nodes=9, blind=True),
    "a window that is shorter than the draft": dict(lengths=[40], shape="chain", window=2, nodes=9),
    "all nodes see the same": dict(lengths=[5, 64], shape="window", nodes=6, group=2),
    "more slots than committed tokens": dict(lengths=[3, 1], shape="window", nodes=70),
    "three parts": dict(lengths=[300, 0, 140], width=520, nodes=3),
}


@pytest.mark.parametrize("name", CASES)
def test_kernel_and_torch_form_are_softmax_attention(both, name):
    arguments = inputs(**CASES[name])
    reference = expected(*arguments)
    kernel, torch_form = both(tree_attention, *arguments)
    assert kernel.shape == torch_form.shape and kernel.is_contiguous()
    assert distance(kernel, torch_form) < CLOSE[torch.float32]
    assert distance(torch_form, reference) < 1e-6
    exact = tree_attention(*(x.double() for x in arguments[:3]), *arguments[3:])
    assert distance(exact, reference) < 1e-13


@pytest.mark.parametrize(("dtype", "nodes"), [(torch.float16, 30), (torch.bfloat16, 5)])
def test_half_precision_is_near_float64(both, dtype, nodes):
    arguments = inputs([90, 20], nodes=nodes, group=3, dtype=dtype)
    for out in both(tree_attention, *arguments):
        assert out.dtype == dtype
        assert distance(out, expected(*arguments)) < CLOSE[dtype]


def test_a_node_that_sees_nothing_gives_zeros(both):
    query, key, value, first, lengths, visible, scale = inputs([0, 20], width=300)
    visible = visible.index_fill(1, torch.tensor([3]), False)
    for out in both(tree_attention, query, key, value, first, lengths, visible, scale):
        assert (out[0, 3] == 0).all() and out.isfinite().all() and (out[1] != 0).any()


def test_a_row_is_the_same_in_any_batch(both):
    many = inputs([70, 10, 131], width=300)
    alone = [x[2:] if isinstance(x, torch.Tensor) else x for x in many]
    together, _ = both(tree_attention, *many)
    one, _ = both(tree_attention, *alone)
    assert distance(together[2:], one) < 1e-6


def test_parts_follow_from_shapes_and_fill_the_device():
    assert parts_of(1, 100) == 1
    assert parts_of(4, 4096) == 32  # one row of Qwen2.5-VL-7B: 4 heads of keys
    assert parts_of(4, 65536) == 64
    assert parts_of(300, 4096) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(
    ("nodes", "group", "dim"), [(1, 1, 64), (2, 7, 128), (21, 7, 128), (64, 4, 80), (64, 1, 32)]
)
def test_cuda_is_near_float64(dtype, nodes, group, dim):
    cpu = inputs([0, 700, 1024], nodes, group, key_heads=4, dim=dim, width=1200, dtype=dtype, window=600)
    on_cuda = tree_attention(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in cpu))
    assert distance(on_cuda.cpu(), expected(*cpu)) < max(CLOSE[dtype], 1e-5)
