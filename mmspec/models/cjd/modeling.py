"""The head of corrected Jacobi decoding: a small autoregressive model over a window of stale states.

In a Jacobi window the target has said something about every place ahead, but given drafts that have changed
since. The head reads, place by place, the token that stands there now, the one that stood there, and the
target's hidden states from then; and corrects the distribution of the next place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu

from mmspec.models.cjd.configuration import CorrectorConfig
from mmspec.models.feature_head import DraftingHead

__all__ = ["CHANGED", "SAME", "UNKNOWN", "CorrectorHead", "Memory"]

SAME, CHANGED, UNKNOWN = range(3)  # of a place: its token stands, was replaced, or the target has not read it
ROPE_BASE = 1000.0
EXCLUDED = -1e4  # in place of -inf, which has no gradient; its probability is 0 all the same

Memory = list[tuple[Tensor, Tensor]]
"""Keys and values [B, heads, n, c] of the rows that each layer has read."""


class Attention(nn.Module):
    """Attention of rows to those before them, at places counted within the window."""

    def __init__(self, config: CorrectorConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(
        self, rows: Tensor, turn: Tensor, past: tuple[Tensor, Tensor] | None, mask: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Attend: rows [B, n, w], their rotations [n, c/2] complex -> rows, and keys and values of all."""
        q, k, v = self.qkv(rows).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, turn), rotate(k, turn)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(attended.transpose(1, 2).flatten(2)), (k, v)


class Layer(nn.Module):
    """A layer of the head: attention and a gated feed-forward, each behind a norm."""

    def __init__(self, config: CorrectorConfig) -> None:
        super().__init__()
        width, inner = config.width, 8 * config.width // 3 // 8 * 8
        self.attention = Attention(config)
        self.attention_norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.mlp_norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(
        self, rows: Tensor, turn: Tensor, past: tuple[Tensor, Tensor] | None, mask: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run the layer; arguments as of `Attention`."""
        attended, known = self.attention(self.attention_norm(rows), turn, past, mask)
        rows = rows + attended
        gate, value = self.up(self.mlp_norm(rows)).chunk(2, -1)
        return rows + self.down(silu(gate) * value), known


class Corrections(NamedTuple):
    """Stale distributions as the head corrects them.

    Attributes:
        logits: [B, n, V] guided, not warped.
        likeliest: [B, n, k] the tokens that are corrected; None for all.
    """

    logits: Tensor
    likeliest: Tensor | None

    def at(self, place: int) -> Corrections:
        """Those of one place, [B, 1, ...]."""
        here = slice(place, place + 1)
        return Corrections(self.logits[:, here], None if self.likeliest is None else self.likeliest[:, here])


class CorrectorHead(DraftingHead):
    """Corrects the stale distributions of a Jacobi window, one place after another.

    A row stands for a place: its token now and before, and the target's hidden states there, of the
    conditional and the unconditional prompt.
    """

    config: CorrectorConfig
    config_class = CorrectorConfig
    base_model_prefix = "cjd"
    main_input_name = "rows"

    def __init__(self, config: CorrectorConfig) -> None:
        super().__init__(config)
        size, width = config.hidden_size, config.width
        self.of_states = nn.Linear(2 * size, width, bias=False)
        self.of_new = nn.Linear(size, width, bias=False)
        self.of_old = nn.Linear(size, width, bias=False)
        self.flags = nn.Embedding(3, width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.sharpness = nn.Linear(width, 1)
        self.to_states = nn.Linear(width, size, bias=False)
        self.corrections = nn.Linear(width, config.vocabulary, bias=False)
        self.post_init()
        for part in (self.sharpness, self.to_states, self.corrections):  # at first, what is stale stays
            nn.init.zeros_(part.weight)

    def stale_rows(self, states: Tensor, old: Tensor, is_known: Tensor) -> Tensor:
        """Make the part of rows that is known before the window is drawn.

        Args:
            states: [..., 2d] hidden states of the target.
            old: [..., d] what entered the target's first layer for the token that the states are of.
            is_known: [...] whether there are any states.

        Returns:
            [..., w].
        """
        rows: Tensor = self.of_states(states.to(self.dtype)) - self.of_old(self._normed(old))
        return rows.where(is_known[..., None], 0.0)

    def fresh_rows(self, new: Tensor, flags: Tensor) -> Tensor:
        """Make the part of rows that the token drawn for a place decides.

        Args:
            new: [..., d] what enters the target's first layer for it.
            flags: [...] SAME, CHANGED or UNKNOWN.

        Returns:
            [..., w], to be added to the other part.
        """
        rows: Tensor = self.of_new(self._normed(new)) + self.flags(flags)
        return rows

    def forward(
        self, rows: Tensor, memory: Memory | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Memory]:
        """Run the layers.

        Args:
            rows: [B, n, w] of consecutive places.
            memory: of the rows before.
            mask: [B, 1, n, m] True where a row attends to one of all m; None for all.

        Returns:
            [B, n, w] states, normed, and the memory with these rows.
        """
        first = 0 if memory is None else memory[0][0].shape[2]
        turn = self._turns(first, rows)
        known = []
        for index, layer in enumerate(self.layers):
            rows, read = layer(rows, turn, None if memory is None else memory[index], mask)
            known.append(read)
        return self.norm(rows), known

    def stale(self, logits: Tensor) -> Corrections:
        """Find the tokens that are corrected, of guided logits [B, n, V]; -inf where one is excluded."""
        count, logits = self.config.corrections, logits.clamp_min(EXCLUDED)
        if not 0 < count < logits.shape[-1]:
            return Corrections(logits, None)
        return Corrections(logits, logits.topk(count, -1, sorted=False).indices)

    def outputs(self, read_out: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        """[V, w] what a state adds to each logit: by the target's output matrix, and by its own.

        Args:
            read_out: the target's output matrix, [1, n, d] -> [1, n, V].
            dtype: of its inputs.
        """
        through = read_out(self.to_states.weight.T[None].to(dtype))[0].T
        return through.to(self.dtype) + self.corrections.weight

    def correct(self, states: Tensor, stale: Corrections, outputs: Tensor) -> Tensor:
        """Correct stale distributions.

        Args:
            states: [B, n, w] of the places before.
            stale: of the places.
            outputs: [V, w] as of `outputs`.

        Returns:
            [B, n, V] logits.
        """
        sharpened: Tensor = stale.logits * self.sharpness(states).exp().to(stale.logits.dtype)
        if stale.likeliest is None:
            return sharpened + (states @ outputs.T).to(sharpened.dtype)
        chosen = embedding(stale.likeliest, outputs)  # [B, n, k, w]
        change = (chosen @ states[..., None])[..., 0]
        return sharpened.scatter_add(-1, stale.likeliest, change.to(sharpened.dtype))

    def _normed(self, embeddings: Tensor) -> Tensor:
        """Embeddings of unit scale, whatever that of the target's are."""
        normed: Tensor = rms_norm(embeddings.float(), (embeddings.shape[-1],), eps=1e-12).to(self.dtype)
        return normed

    def _turns(self, first: int, rows: Tensor) -> Tensor:
        """[n, c/2] rotations of consecutive places."""
        channels = self.config.width // self.config.num_heads
        rates = ROPE_BASE ** (-torch.arange(0, channels, 2, device=rows.device) / channels)
        place = torch.arange(first, first + rows.shape[1], device=rows.device)
        angles = place[:, None] * rates
        return torch.polar(torch.ones_like(angles), angles)


def rotate(values: Tensor, turn: Tensor) -> Tensor:
    """Rotate neighbouring channels: [B, heads, n, c] by [n, c/2]."""
    pairs = torch.view_as_complex(values.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2).to(values.dtype)


def join_states(states: Tensor, rows: int) -> Tensor:
    """Put conditional and unconditional states side by side: [R, n, d] -> [B, n, 2d]; R is B or 2B."""
    halves: Sequence[Tensor] = states.split(rows)
    return torch.cat([halves[0], halves[-1]], -1)
