"""The head of corrected Jacobi decoding: a small autoregressive model over a window of stale states.

In a Jacobi window the target has said something about every place ahead, but given drafts that have changed
since. The head reads, place by place, the token that stands there now, the one that stood there, and the
target's hidden states from then; and corrects the distribution of the next place.

It passes over the window several times in a round, so that each pass is kept short: all that does not depend
on the tokens drawn in this round is computed once, and places are told apart by learned vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from mmspec.models.cjd.configuration import CorrectorConfig
from mmspec.models.feature_head import WindowHead

__all__ = ["EXCLUDED", "Corrections", "CorrectorHead", "Memory", "Tables"]

SAME, CHANGED, UNKNOWN = range(3)  # of a place: its token stands, was replaced, or the target has not read it
EXCLUDED = -1e4  # in place of -inf, which has no gradient; its probability is 0 all the same

Memory = list[tuple[Tensor, Tensor]]
"""Keys and values [B, heads, n, c] of the rows that each layer has read."""


class Attention(nn.Module):
    """Attention of rows to those before them."""

    def __init__(self, config: CorrectorConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(
        self, rows: Tensor, past: tuple[Tensor, Tensor] | None, mask: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Attend: rows [B, n, w] -> rows, and the keys and values of all."""
        q, k, v = self.qkv(rows).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
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
        self, rows: Tensor, past: tuple[Tensor, Tensor] | None, mask: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run the layer; arguments as of `Attention`."""
        attended, known = self.attention(self.attention_norm(rows), past, mask)
        rows = rows + attended
        gate, value = self.up(self.mlp_norm(rows)).chunk(2, -1)
        return rows + self.down(silu(gate) * value), known


class Tables(NamedTuple):
    """What a head makes of each token of its target, once for all steps.

    Attributes:
        new, old: [V + 1, w] parts of rows, by the token now and before; zeros at V, for no token.
        outputs: [V, w] what a state adds to each logit: by the target's output matrix, and by its own.
    """

    new: Tensor
    old: Tensor
    outputs: Tensor


class Corrections(NamedTuple):
    """Stale distributions as the head corrects them.

    Attributes:
        logits: [B, n, V] guided, not warped.
        likeliest: [B, n, k] the tokens that are corrected; None for all.
    """

    logits: Tensor
    likeliest: Tensor | None

    def repeat(self, copies: int) -> Corrections:
        """The same, so many times one after another."""
        likeliest = None if self.likeliest is None else self.likeliest.repeat(1, copies, 1)
        return Corrections(self.logits.repeat(1, copies, 1), likeliest)


class CorrectorHead(WindowHead):
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
        self.of_states = nn.Linear(2 * len(config.taps) * size, width, bias=False)
        self.of_new = nn.Linear(size, width, bias=False)
        self.of_old = nn.Linear(size, width, bias=False)
        self.flags = nn.Embedding(3, width)
        self.places = nn.Embedding(config.context + config.longest - 1, width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.sharpness = nn.Linear(width, 1)
        self.to_states = nn.Linear(width, size, bias=False)
        self.corrections = nn.Linear(width, config.vocabulary, bias=False)
        self.post_init()
        for part in (self.sharpness, self.to_states, self.corrections):  # at first, what is stale stays
            nn.init.zeros_(part.weight)

    def tables(
        self, embed: Callable[[Tensor], Tensor], read_out: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> Tables:
        """Read the target's embedding and output matrix.

        Args:
            embed: tokens [1, V] -> what enters the target's first layer [1, V, d].
            read_out: final hidden states [1, n, d] -> logits [1, n, V].
            dtype: of the target.
        """
        tokens = torch.arange(self.config.vocabulary, device=self.device)[None]
        vectors = embed(tokens)[0].float()
        unit = rms_norm(vectors, vectors.shape[-1:], eps=1e-12).to(self.dtype)
        none = unit.new_zeros(1, self.config.width)
        new, old = (torch.cat([part(unit), none]) for part in (self.of_new, self.of_old))
        through = read_out(self.to_states.weight.T[None].to(dtype))[0].T
        return Tables(new, old, through.to(self.dtype) + self.corrections.weight)

    def rows(self, states: Tensor, old: Tensor, is_known: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """Make the rows of consecutive places as far as they are known before any token is drawn.

        Args:
            states: [B, n, 2d * taps] of `join`; anything where they are unknown.
            old: [B, n] the tokens that they are of; -1 for no token.
            is_known: [B, n] whether there are any states.
            tables: of the target.

        Returns:
            [B, n, w] where the token stays, and where another comes in its place; the new token's part is
            still to be added.
        """
        known = self.of_states(states.to(self.dtype)) - embedding(old % len(tables.old), tables.old)
        known = known.where(is_known[..., None], 0.0) + self.places.weight[: states.shape[1]]
        other = embedding(torch.where(is_known, CHANGED, UNKNOWN), self.flags.weight)
        return known + self.flags.weight[SAME], known + other

    def forward(self, rows: Tensor, mask: Tensor, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """Run the layers.

        Args:
            rows: [B, n, w] of consecutive places.
            mask: [B, 1, n, m] True where a row attends to one of all m.
            memory: of the rows before.

        Returns:
            [B, n, w] states, normed, and the memory with these rows.
        """
        known = []
        for index, layer in enumerate(self.layers):
            rows, read = layer(rows, None if memory is None else memory[index], mask)
            known.append(read)
        return self.norm(rows), known

    def revise(
        self, rows: Tensor, mask: Tensor, memory: Memory | None, stale: Corrections, tables: Tables
    ) -> tuple[Tensor, Memory]:
        """Run the layers over C chains of a window, and correct their places.

        Args:
            rows: [B * C, n, w]; the last m of each chain are of the places before the corrected ones.
            mask, memory: as of `forward`.
            stale: of C * m places.
            tables: of the target.

        Returns:
            [B, C * m, V] logits, and the memory.
        """
        batch, places = stale.logits.shape[:2]
        states, known = self(rows, mask, memory)
        states = states[:, -(places * batch // len(rows)) :].reshape(batch, places, -1)
        return self.correct(states, stale, tables), known

    def stale(self, logits: Tensor) -> Corrections:
        """Find the tokens that are corrected, of guided logits [B, n, V]; -inf where one is excluded."""
        count, logits = self.config.corrections, logits.clamp_min(EXCLUDED)
        if not 0 < count < logits.shape[-1]:
            return Corrections(logits, None)
        return Corrections(logits, logits.topk(count, -1, sorted=False).indices)

    def correct(self, states: Tensor, stale: Corrections, tables: Tables) -> Tensor:
        """Correct stale distributions: states [B, n, w] of the places before -> logits [B, n, V]."""
        sharpened: Tensor = stale.logits * self.sharpness(states).exp().to(stale.logits.dtype)
        if stale.likeliest is None:
            return sharpened + linear(states, tables.outputs).to(sharpened.dtype)
        chosen = embedding(stale.likeliest, tables.outputs)  # [B, n, k, w]
        change = (chosen @ states[..., None])[..., 0]
        return sharpened.scatter_add(-1, stale.likeliest, change.to(sharpened.dtype))
