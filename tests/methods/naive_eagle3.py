"""Slow drafting with an EAGLE-3 head: its layer written out, one path at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from mmspec.methods.eagle3.head import Eagle3Config, Eagle3Head
from tests.methods.naive_eagle import NaiveEagle, Path, read_whole

UNKNOWN = -1e30  # logit of tokens that are not in the draft vocabulary


class NaiveEagle3(NaiveEagle):
    """The head on one request, by its weights alone."""

    head: Eagle3Head

    def logits(self, prompt: dict[str, Any], output: list[int], path: Path) -> Tensor:
        """[V] raw, of one prompt."""
        key = id(prompt), len(output)
        if key not in self.known:
            taps, positions = read_whole(self.target, prompt, output, (0, *self.head.config.taps))
            states = torch.cat([taps[tap] for tap in self.head.config.taps], -1)[0]
            self.known[key] = taps[0][0, 1:], states @ self.weight("fc").T, positions
        embeddings, features, positions = self.known[key]
        features = features[:-1]
        if self.head.config.mrope_section is None:
            places = torch.arange(len(embeddings) + len(path)).expand(3, -1)
        else:  # each row where the target has the token before its own
            places = positions.expand(3, -1, -1)[:, 0]
            places = torch.cat([places[:, :-1], places[:, -1:] + torch.arange(len(path))], -1)
        for token in path:
            features = torch.cat([features, self.state(embeddings, features, places)[None]])
            embeddings = torch.cat([embeddings, self.target.embed(torch.tensor([token]))])
        scores = self.weight("lm_head") @ self.normed(self.state(embeddings, features, places), "norm")
        known = torch.arange(len(scores)) + (0 if self.head.d2t is None else self.head.d2t)
        return torch.full((self.target.vocabulary,), UNKNOWN, dtype=scores.dtype).scatter(0, known, scores)

    def weight(self, name: str) -> Tensor:
        return self.head.get_parameter(f"{name}.weight")

    def normed(self, hidden: Tensor, name: str) -> Tensor:
        scale = (hidden.square().mean(-1, keepdim=True) + self.head.config.rms_norm_eps).rsqrt()
        return hidden * scale * self.weight(name)

    def state(self, embeddings: Tensor, features: Tensor, places: Tensor) -> Tensor:
        """[d] of the last row, before the norm: rows [n, d] stand at places [3, >= n]."""
        layer, config = "decoder.layers.0.", self.head.config
        both = [
            self.normed(embeddings, f"{layer}input_layernorm"),
            self.normed(features, f"{layer}hidden_norm"),
        ]
        rows = torch.cat(both, -1)
        size, groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads
        query, key, value = (
            (rows @ self.weight(f"{layer}self_attn.{name}_proj").T).unflatten(-1, (-1, size))
            for name in "qkv"
        )
        axes = axes_of(config)
        query, key = (rotated(each, places[axes, : len(rows)].T, config.rope_theta) for each in (query, key))
        heads, near = [], config.sliding_window or len(rows)
        key, value = key[-near:], value[-near:]
        for head in range(config.num_attention_heads):
            scores = key[:, head // groups] @ query[-1, head] / math.sqrt(size)
            heads.append(scores.softmax(-1) @ value[:, head // groups])
        hidden = features[-1] + self.weight(f"{layer}self_attn.o_proj") @ torch.cat(heads)
        inner = self.normed(hidden, f"{layer}post_attention_layernorm")
        gate, up = (self.weight(f"{layer}mlp.{name}_proj") @ inner for name in ("gate", "up"))
        return hidden + self.weight(f"{layer}mlp.down_proj") @ (silu(gate) * up)


def axes_of(config: Eagle3Config) -> list[int]:
    """The axis that each frequency follows."""
    half, section = config.head_dim // 2, config.mrope_section
    if section is None:
        return [0] * half
    if not config.mrope_interleaved:
        return [axis for axis in range(3) for _ in range(section[axis])]
    axes = [0] * half
    for axis in (1, 2):
        for turn in range(section[axis]):
            if 3 * turn + axis < half:
                axes[3 * turn + axis] = axis
    return axes


def rotated(heads: Tensor, places: Tensor, theta: float) -> Tensor:
    """Rotary embedding of heads [n, H, size] at places [n, size / 2], one for each frequency."""
    half = heads.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float32) / half)  # as transformers: in single
    angle = (places * frequency)[:, None].to(heads)
    first, second = heads.split(half, -1)
    return torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1
    )
