"""Tokens along paths and the penalty on them: against walking down, the kernels against torch."""

import pytest
import torch

from mmspec.kernels import path_tokens, penalize_tokens, tree_paths
from tests.kernels.trees import path_up, random_tree

SHAPES = [(1, 1, 0.5), (3, 2, 0.5), (4, 17, 0.2), (2, 70, 0.3), (1, 1, None), (3, 16, None)]


def drafted(rows, nodes, lean, width=5, device="cpu"):
    """Arguments of `path_tokens`, whose output is a slice of longer rows; and the parents."""
    generator = torch.Generator().manual_seed(rows * nodes)
    tree = random_tree(rows, nodes, 0, 1.0 if lean is None else lean)
    prompts, line, tokens = (
        torch.randint(0, 9, (rows, size), generator=generator) for size in (width, width + 2, nodes)
    )
    padding = torch.arange(width) < torch.randint(0, width, (rows, 1), generator=generator)
    emitted = torch.randint(0, width, (rows,), generator=generator)
    paths = (None, None) if lean is None else tree_paths(tree.parents, tree.max_depth)
    given = prompts.masked_fill(padding, -1), line[:, 1:], emitted, tokens, *paths
    moved = [each if each is None else each.to(device) for each in given]
    return (*moved, tree.max_depth), tree.parents.tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_each_row_holds_prompt_output_and_path(shape):
    (prompts, output, emitted, tokens, *paths, deepest), parents = drafted(*shape)
    found = path_tokens(prompts, output, emitted, tokens, *paths, deepest)
    for row, above in enumerate(parents):
        before = [*prompts[row].tolist(), *output[row, : int(emitted[row])].tolist()]
        for node in range(len(above)):
            expected = [*before, *tokens[row, path_up(above, node)[1:]].tolist()]
            assert found[row, node].tolist() == [*expected, *[-1] * (found.shape[2] - len(expected))]


@pytest.mark.every(3)
@pytest.mark.parametrize("width", [5, 1500])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_of_paths_gives_what_torch_gives(shape, width, both, device):
    kernel, twin = both(path_tokens, *drafted(*shape, width, device)[0])
    assert torch.equal(kernel, twin) and kernel.dtype == twin.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [4, 1500])
def test_the_kernel_of_the_penalty_gives_what_torch_gives(dtype, width, both, device):
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(3, 4, 50, generator=generator).to(device, dtype)
    logits[0, 0, :3] = torch.tensor([float("-inf"), float("nan"), 0.0])
    paths = torch.randint(-1, 53, (3, 4, width), generator=generator).to(device)
    first = torch.tensor([0, 2, 2**40], device=device)
    penalty = torch.tensor([1.05, 0.3, 1.0], device=device, dtype=torch.promote_types(dtype, torch.float32))
    before = logits.clone()
    kernel, twin = both(penalize_tokens, logits, paths, first, penalty)
    cut = (
        dtype == torch.bfloat16 and device.type == "cpu"
    )  # the interpreter rounds to bfloat16 by cutting off
    torch.testing.assert_close(kernel, twin, rtol=2**-7 if cut else 0, atol=0, equal_nan=True)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(twin[2], logits[2]) and not torch.equal(twin[1], logits[1])


def test_no_rows_and_no_tokens(both, device):
    arguments, _ = drafted(2, 4, None, device=device)
    kernel, twin = both(
        path_tokens, *(each[:0] if isinstance(each, torch.Tensor) else each for each in arguments)
    )
    assert kernel.shape == twin.shape == (0, 4, 14)
    logits, nothing = (
        torch.zeros(1, 1, 5, device=device),
        torch.zeros(1, 1, 0, dtype=torch.long, device=device),
    )
    for found in both(penalize_tokens, logits, nothing, nothing[0, 0].new_zeros(1), logits[0, 0, :1]):
        assert torch.equal(found, logits)
