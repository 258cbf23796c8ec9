"""The layers of DFlash and DSpark: those of Qwen3, with keys and values of two kinds of rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, rotate_half

from mmspec.open_types import Keywords

__all__ = ["BlockLayer", "GroupedConvolution", "near"]


class BlockAttention(Qwen3Attention):
    """Attention of a block to the context before it and to itself.

    Attributes:
        sinks: [heads] logits beside those of the keys, without values; None for none.
    """

    def __init__(self, config: Qwen3Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        heads = config.num_attention_heads
        self.sinks = nn.Parameter(torch.zeros(heads)) if getattr(config, "sinks", False) else None

    def forward(
        self,
        block: Tensor,
        context: Tensor,
        turns: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        """Attend.

        Args:
            block: [B, n, d] rows with queries.
            context: [B, c, d] new rows before them.
            turns: cosines and sines of all rows, each [B, c + n, rotary numbers of a head].
            mask: [B or 1, 1, n, keys], boolean or additive; unused without a block.
            cache: of earlier rows; it keeps those of both kinds.

        Returns:
            [B, n, d].
        """
        rows = torch.cat([context, block], 1)
        q = self.q_norm(self._heads(self.q_proj(block)))
        k, v = self.k_norm(self._heads(self.k_proj(rows))), self._heads(self.v_proj(rows))
        cos, sin = (turn[:, None] for turn in turns)
        asking = slice(context.shape[1], None)
        q, k = turned(q, cos[:, :, asking], sin[:, :, asking]), turned(k, cos, sin)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        if not block.shape[1]:  # only the context was read
            return block
        groups = self.num_key_value_groups
        if self.sinks is None:
            settings: Keywords = {"scale": self.scaling, "enable_gqa": groups > 1}
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **settings)
        else:
            k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
            out = attend_with_sinks(q * self.scaling, k, v, mask, self.sinks)
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, rows: Tensor) -> Tensor:
        """[B, n, heads * head_dim] -> [B, heads, n, head_dim]."""
        heads: Tensor = rows.unflatten(2, (-1, self.head_dim))
        return heads.transpose(1, 2)


class GroupedConvolution(nn.Module):
    """Causal convolution over the slots of each block, before and behind a part of a layer (DFlash 2).

    Its kernels have a fixed part of their own for each channel, and one for each group of channels that
    depends on the slot; both kernels are made from the rows before the part.
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        width, self.taps = config.hidden_size, config.conv_taps
        self.group, self.block = config.conv_group, config.block
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, width))
        self.kernel_projection = nn.Linear(width, 2 * self.taps * (width // self.group), bias=False)

    def around(self, part: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Run a part of a layer on rows [B, m * block, d] of m blocks, with a convolution on both sides."""
        changes = self.kernel_projection(rows).unflatten(-1, (2, self.taps, -1))
        before, behind = (self.base_kernel + changes.repeat_interleave(self.group, -1)).unbind(-3)
        return self.convolve(part(self.convolve(rows, before)), behind)

    def convolve(self, rows: Tensor, kernel: Tensor) -> Tensor:
        """Convolve rows [B, m * block, d] with kernels [B, m * block, taps, d] of each slot."""
        blocks = rows.reshape(len(rows), -1 if rows.numel() else 0, self.block, rows.shape[-1])
        shifted = [F.pad(blocks, (0, 0, tap, 0))[:, :, : self.block] for tap in range(self.taps)]
        return (torch.stack(shifted, -2).reshape(kernel.shape) * kernel).sum(-2)


class BlockLayer(Qwen3DecoderLayer):
    """A layer of Qwen3 that denoises a block."""

    def __init__(self, config: Qwen3Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = BlockAttention(config, layer_idx)
        convolves = getattr(config, "conv_taps", 0) > 0
        self.attention_conv = GroupedConvolution(config) if convolves else None
        self.mlp_conv = GroupedConvolution(config) if convolves else None

    def forward(
        self,
        block: Tensor,
        context: Tensor,
        turns: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        """Denoise a block [B, n, d]; arguments: see `BlockAttention`."""

        def attend(rows: Tensor) -> Tensor:
            attended: Tensor = self.self_attn(rows, context, turns, mask, cache)
            return attended

        block = block + around(self.attention_conv, attend, self.input_layernorm(block))
        return block + around(self.mlp_conv, self.mlp, self.post_attention_layernorm(block))


def around(convolution: GroupedConvolution | None, part: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Run a part of a layer on rows, with a convolution on both sides if there is one."""
    return part(rows) if convolution is None else convolution.around(part, rows)


def turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first numbers of heads [..., head_dim], as many as the tables have."""
    turning = heads[..., : cos.shape[-1]]
    done = turning * cos + rotate_half(turning) * sin
    return done if done.shape == heads.shape else torch.cat([done, heads[..., cos.shape[-1] :]], -1)


def attend_with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor) -> Tensor:
    """Attention of scaled queries [B, h, n, d] to keys [B, h, m, d], and to one logit [h] without a value."""
    scores = q @ k.transpose(2, 3)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    aside = sinks[:, None, None].expand(*scores.shape[:3], 1)
    shares = torch.cat([scores, aside], -1).softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return shares[..., :-1].to(v.dtype) @ v


def near(asking: Tensor, keys: Tensor, window: int | None, causal: bool) -> Tensor:
    """[..., n, m] whether rows at positions [..., n] see those at [..., m], by window and causality."""
    distance = asking[..., None] - keys[..., None, :]
    seen = torch.ones_like(distance, dtype=torch.bool) if window is None else distance < window
    return seen & (distance >= 0) if causal else seen
