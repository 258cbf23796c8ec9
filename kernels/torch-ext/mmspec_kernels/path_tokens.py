"""Tokens along the paths of a draft, and the penalty on tokens that occur there.

Every node has the tokens of its prompt, of the output so far, and of its ancestors and itself.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .backend import launcher, operator, tl, triton, use_triton

NOTHING = -1
BLOCK = 1024


def _fake_paths(
    prompts: Tensor,
    output: Tensor,
    emitted: Tensor,
    tokens: Tensor,
    ancestors: Tensor | None,
    depth: Tensor | None,
    max_depth: int,
) -> Tensor:
    return tokens.new_empty(*tokens.shape, prompts.shape[1] + output.shape[1] + max_depth)


@operator(fake=_fake_paths)
def path_tokens(
    prompts: Tensor,
    output: Tensor,
    emitted: Tensor,
    tokens: Tensor,
    ancestors: Tensor | None,
    depth: Tensor | None,
    max_depth: int,
) -> Tensor:
    """Write the tokens before each node one after another, with the node's own.

    Args:
        prompts: [B, P] int64 ids, padded in front with -1. The last one, or the last of the output, is the
            root.
        output: [B, C] int64 ids.
        emitted: [B] int64 number of output tokens.
        tokens: [B, n] int64 ids of the nodes; that of the root is not read.
        ancestors: [B, n, n] bool from `tree_paths`; None for chains.
        depth: [B, n] int64 from `tree_paths`; None for chains.
        max_depth: upper bound D of the depths; n - 1 for chains.

    Returns:
        [B, n, P + C + D] ids; the output starts at column P, and columns without a token hold -1.
    """
    if use_triton(tokens.device):
        return path_tokens_triton(prompts, output, emitted, tokens, ancestors, depth, max_depth)
    rows, nodes = tokens.shape
    end = prompts.shape[1] + emitted[:, None]
    line = pad(torch.cat([prompts, output], 1), (0, max_depth))
    width = line.shape[1]
    index = torch.arange(width, device=line.device)
    line = line.masked_fill(index >= end, NOTHING)[:, None]
    if not max_depth:
        return line.repeat(1, nodes, 1)
    if ancestors is None or depth is None:
        index = torch.arange(nodes, device=line.device)
        ancestors, depth = (index <= index[:, None]).expand(rows, -1, -1), index.expand(rows, -1)
    # tokens off the path go to an extra column that is dropped
    column = torch.where(ancestors, (end + depth - 1)[:, None], width)[:, :, 1:]
    paths = pad(line, (0, 1)).repeat(1, nodes, 1)
    paths.scatter_(2, column, tokens[:, None, 1:].expand_as(column))
    return paths[..., :-1].contiguous()


def _fake_penalized(logits: Tensor, paths: Tensor, first: Tensor, penalty: Tensor) -> Tensor:
    return logits.new_empty(logits.shape)


@operator(fake=_fake_penalized)
def penalize_tokens(logits: Tensor, paths: Tensor, first: Tensor, penalty: Tensor) -> Tensor:
    """Divide the positive logits of tokens on each path by a penalty, and multiply the negative ones.

    This is the repetition penalty of CTRL (1909.05858), with the bits of transformers' own.

    Args:
        logits: [B, n, V].
        paths: [B, n, W] ids from `path_tokens`; ids outside the V tokens are ignored.
        first: [B] int64 column from which tokens count.
        penalty: [B] in float32, or float64 for logits in float64.

    Returns:
        [B, n, V] new logits.
    """
    if use_triton(logits.device) and logits.dtype != torch.float64:
        return penalize_tokens_triton(logits, paths, first, penalty)
    rows, nodes, vocabulary = logits.shape
    counts = torch.arange(paths.shape[2], device=paths.device) >= first[:, None, None]
    counts = counts & (paths >= 0) & (paths < vocabulary)
    start = torch.arange(0, logits.numel(), vocabulary, device=paths.device).view(rows, nodes, 1)
    # ids that do not count go to an extra element that is dropped
    place = torch.where(counts, start + paths, logits.numel())
    scores = pad(logits.flatten(), (0, 1))
    found, by = scores.take(place), penalty[:, None, None]
    divided = found * by.reciprocal() if found.is_cuda else found / by  # as torch divides by a number there
    penalized = torch.where(found < 0, found * by, divided).to(scores.dtype)
    scores.scatter_(0, place.flatten(), penalized.flatten())
    return scores[:-1].view(logits.shape)


@launcher
def path_tokens_triton(
    prompts: Tensor,
    output: Tensor,
    emitted: Tensor,
    tokens: Tensor,
    ancestors: Tensor | None,
    depth: Tensor | None,
    max_depth: int,
) -> Tensor:
    """Launch `path_tokens`: prompts [B, P], output [B, C], tokens [B, n] -> [B, n, P + C + D]."""
    paths = _fake_paths(prompts, output, emitted, tokens, ancestors, depth, max_depth)
    rows, nodes, width = paths.shape
    if paths.numel():
        prompts, output = (each if each.stride(1) == 1 else each.contiguous() for each in (prompts, output))
        _path_tokens_kernel[rows * nodes, triton.cdiv(width, BLOCK)](
            prompts,
            output,
            emitted.contiguous(),
            tokens.contiguous(),
            None if ancestors is None else ancestors.contiguous().view(torch.int8),
            None if depth is None else depth.contiguous(),
            paths,
            nodes,
            prompts.shape[1],
            width,
            prompts.stride(0),
            output.stride(0),
            NODES=triton.next_power_of_2(nodes),
            BLOCK=BLOCK,
        )
    return paths


@launcher
def penalize_tokens_triton(logits: Tensor, paths: Tensor, first: Tensor, penalty: Tensor) -> Tensor:
    """Launch `penalize_tokens`: logits [B, n, V], paths [B, n, W] -> [B, n, V]."""
    rows, nodes, vocabulary = logits.shape
    width = paths.shape[2]
    logits, penalized = logits.contiguous(), logits.clone(memory_format=torch.contiguous_format)
    if logits.numel() and width:
        _penalize_kernel[rows * nodes, triton.cdiv(width, BLOCK)](
            logits,
            paths.contiguous(),
            first.contiguous(),
            penalty.contiguous(),
            penalized,
            nodes,
            vocabulary,
            width,
            BLOCK=BLOCK,
            DIVIDES=not logits.is_cuda,
        )
    return penalized


@triton.jit
def _path_tokens_kernel(
    prompts_ptr,
    output_ptr,
    emitted_ptr,
    tokens_ptr,
    ancestors_ptr,  # None for chains
    depth_ptr,  # None for chains
    paths_ptr,
    nodes,
    prompt,
    width,
    prompt_stride,
    output_stride,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row, node = place // nodes, place % nodes
    end = prompt + tl.load(emitted_ptr + row)
    length = end + node if depth_ptr is None else end + tl.load(depth_ptr + place)
    paths_ptr += place * width
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    of_prompt = column < prompt
    token = tl.load(prompts_ptr + row * prompt_stride + column, mask=of_prompt, other=-1)
    of_output = (column >= prompt) & (column < end)
    later = tl.load(output_ptr + row * output_stride + column - prompt, mask=of_output, other=-1)
    # columns of the nodes are written by the first program alone
    kept = (column < width) & ((column < end) | (column >= length))
    tl.store(paths_ptr + column, tl.where(of_prompt, token, later), mask=kept)
    if tl.program_id(1) == 0:
        index = tl.arange(0, NODES)
        within = (index > 0) & (index < nodes)
        if depth_ptr is None:
            on_path = within & (index <= node)
            depth = index.to(tl.int64)
        else:
            on_path = tl.load(ancestors_ptr + place * nodes + index, mask=within, other=0) != 0
            depth = tl.load(depth_ptr + row * nodes + index, mask=within, other=0)
        own = tl.load(tokens_ptr + row * nodes + index, mask=within, other=0)
        tl.store(paths_ptr + end + depth - 1, own, mask=on_path)


@triton.jit
def _penalize_kernel(
    logits_ptr,
    paths_ptr,
    first_ptr,
    penalty_ptr,
    penalized_ptr,  # a copy of the logits
    nodes,
    vocabulary,
    width,
    BLOCK: tl.constexpr,
    DIVIDES: tl.constexpr,  # else multiplies by the reciprocal, as torch divides by a number on CUDA
):
    place = tl.program_id(0).to(tl.int64)
    row = place // nodes
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    counts = (column < width) & (column >= tl.load(first_ptr + row))
    token = tl.load(paths_ptr + place * width + column, mask=counts, other=-1)
    counts &= (token >= 0) & (token < vocabulary)
    penalty = tl.load(penalty_ptr + row)
    # read from the given logits, so that a token that occurs twice is penalized once
    score = tl.load(logits_ptr + place * vocabulary + token, mask=counts, other=0).to(tl.float32)
    one = tl.full([], 1.0, tl.float32)
    smaller = tl.div_rn(score, penalty) if DIVIDES else score * tl.div_rn(one, penalty)
    score = tl.where(score < 0, score * penalty, smaller)
    tl.store(
        penalized_ptr + place * vocabulary + token, score.to(penalized_ptr.dtype.element_ty), mask=counts
    )
