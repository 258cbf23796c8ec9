"""Slow computation of a DFlash block: from the head's weights, one slot at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mmspec.methods.dflash.head import DFlashHead


def frequencies(head_dim: int, theta: float, rotary: dict[str, object]) -> tuple[Tensor, float]:
    """Return the frequencies of the rotated part of a head, and the scale of its tables."""
    kind = rotary.get("rope_type", "default")
    if kind == "default":
        part = int(head_dim * rotary.get("partial_rotary_factor", 1.0))  # type: ignore[call-overload]
        return 1.0 / theta ** (torch.arange(0, part, 2, dtype=torch.float32) / part), 1.0
    reach = {"max_position_embeddings": 4096, "head_dim": head_dim, "num_attention_heads": 1}
    rope = {"rope_theta": theta, **rotary}
    found: tuple[Tensor, float] = ROPE_INIT_FUNCTIONS[kind](LlamaConfig(rope_parameters=rope, **reach))
    return found


def rotated(heads: Tensor, places: Tensor, frequency: Tensor, scale: float, pairs: bool) -> Tensor:
    """Rotate the first numbers of heads [n, H, size] at places [n, f], in pairs of neighbours or halves."""
    angle = (places * frequency)[:, None]  # in single precision, as transformers
    turning, rest = heads[..., : 2 * len(frequency)], heads[..., 2 * len(frequency) :]
    first, second = turning.unflatten(-1, (-1, 2)).unbind(-1) if pairs else turning.chunk(2, -1)
    cos, sin = ((scale * each).to(heads) for each in (angle.cos(), angle.sin()))
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat([torch.stack(turned, -1).flatten(-2) if pairs else torch.cat(turned, -1), rest], -1)


def axes_of(count: int, section: list[int], interleaved: bool) -> list[int]:
    """The axis of each of `count` frequencies, one by one."""
    if not interleaved:
        return [axis for axis, width in enumerate(section) for _ in range(width)]
    axes = [index % 3 for index in range(count)]
    return [axis if index < 3 * section[axis] else 0 for index, axis in enumerate(axes)]


def naive_kernels(head: DFlashHead, name: str, rows: Tensor) -> list[Tensor | None]:
    """Kernels [n, taps, d] before and behind a part of a layer, channel by channel; None without any."""
    taps, weights = head.config.conv_taps, head.state_dict()
    if not taps:
        return [None, None]
    width = rows.shape[-1]
    groups = width // head.config.conv_group
    said = rows @ weights[f"{name}.kernel_projection.weight"].T
    made: list[Tensor | None] = []
    for side in range(2):
        kernel = torch.empty(len(rows), taps, width, dtype=rows.dtype)
        for tap in range(taps):
            for channel in range(width):
                place = (side * taps + tap) * groups + channel // head.config.conv_group
                fixed = weights[f"{name}.base_kernel"][side, tap, channel]
                kernel[:, tap, channel] = fixed + said[:, place]
        made.append(kernel)
    return made


def convolved(rows: Tensor, kernel: Tensor | None) -> Tensor:
    """Sum of each row [n, d] and those before it, each times its kernel [n, taps, d]."""
    if kernel is None:
        return rows
    made = torch.zeros_like(rows)
    for slot in range(len(rows)):
        for tap in range(min(slot + 1, kernel.shape[1])):
            made[slot] += kernel[slot, tap] * rows[slot - tap]
    return made


def naive_block(
    head: DFlashHead, context: Tensor, block: Tensor, places: Tensor | None = None, pairs: bool = False
) -> Tensor:
    """States [n, d] of a block [n, d] behind a whole context [c, d], at indices or places [3, c + n]."""
    config, weights = head.config, head.state_dict()
    before, slots = len(context), len(block)
    frequency, scale = frequencies(config.head_dim, config.rope_theta, config.rotary)
    at = torch.arange(before + slots)[:, None].expand(-1, len(frequency))
    if places is not None and config.mrope_section is not None:
        axes = axes_of(len(frequency), config.mrope_section, config.mrope_interleaved)
        at = torch.stack([places[axis] for axis in axes], -1)
    groups = config.num_attention_heads // config.num_key_value_heads

    def normed(rows: Tensor, name: str) -> Tensor:
        scale = (rows.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        return rows * scale * weights[name]

    def through(rows: Tensor, name: str) -> Tensor:
        bias = weights.get(f"{name}.bias")
        return rows @ weights[f"{name}.weight"].T + (0 if bias is None else bias)

    for index in range(config.num_layers):
        name = f"layers.{index}.self_attn."
        asking = normed(block, f"layers.{index}.input_layernorm.weight")
        kernels = naive_kernels(head, f"layers.{index}.attention_conv", asking)
        asking = convolved(asking, kernels[0])
        rows = torch.cat([context, asking])
        query, key, value = (
            through(rows, f"{name}{one}_proj").unflatten(-1, (-1, config.head_dim)) for one in "qkv"
        )
        query, key = normed(query, f"{name}q_norm.weight"), normed(key, f"{name}k_norm.weight")
        query, key = (rotated(each, at, frequency, scale, pairs) for each in (query, key))
        sliding = config.sliding_window is not None
        if config.layer_types:
            sliding = config.layer_types[index] == "sliding_attention"
        window = config.sliding_window if sliding else None
        causal = bool(config.causal) and config.causal[index]
        made = []
        for slot in range(before, before + slots):
            seen = [
                place
                for place in range(before + slots)
                if not (causal and place > slot) and (window is None or slot - place < window)
            ]
            keys, values = (each[seen].repeat_interleave(groups, 1) for each in (key, value))
            shares = ((keys * query[slot]).sum(-1) / math.sqrt(config.head_dim)).exp()
            total = shares.sum(0) + (weights[f"{name}sinks"].exp() if config.sinks else 0)
            made.append(((shares / total)[..., None] * values).sum(0).flatten())
        block = block + convolved(through(torch.stack(made), f"{name}o_proj"), kernels[1])
        inner = normed(block, f"layers.{index}.post_attention_layernorm.weight")
        kernels = naive_kernels(head, f"layers.{index}.mlp_conv", inner)
        inner = convolved(inner, kernels[0])
        gate, up = (inner @ weights[f"layers.{index}.mlp.{one}_proj.weight"].T for one in ("gate", "up"))
        inner = (silu(gate) * up) @ weights[f"layers.{index}.mlp.down_proj.weight"].T
        block = block + convolved(inner, kernels[1])
    return normed(block, "norm.weight")
