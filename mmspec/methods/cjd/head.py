"""The head of corrected Jacobi decoding: a small autoregressive model over a window of stale states.

In a Jacobi window the target has predicted every place ahead, but from drafts that have changed since. For
each place the head reads its token now, its token when the target read it, and the target's hidden states of
that time; it corrects the distribution of the next place.

The head runs over the window several times in a round. A pass is short, because everything that does not
depend on the tokens drawn in this round is computed once. Learned vectors encode the places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn.functional import embedding, normalize, rms_norm, scaled_dot_product_attention, silu
from transformers import PreTrainedConfig

from mmspec.heads.configuration import WindowHeadConfig
from mmspec.heads.model import WindowHead
from mmspec.open_types import Keywords

__all__ = ["EXCLUDED", "CorrectorConfig", "CorrectorHead", "Memory", "Tables"]

NARROW, SHARE = 96, 8  # the width of a head is an eighth of its target's, but at least 96

# of a place: its token is the same, it was replaced, or the target has not read it
SAME, CHANGED, UNKNOWN = range(3)
EXCLUDED = -1e4  # in place of -inf, which has no gradient; the probability is 0 as well

Memory = list[tuple[Tensor, Tensor]]
"""Keys and values [B, heads, n, c] of the rows that each layer has read."""


@strict
class CorrectorConfig(WindowHeadConfig):
    """Config of a head that corrects stale distributions of a Jacobi window.

    Attributes:
        width: of its layers.
        num_layers, num_heads: of attention.
        context: number of newest committed tokens that it reads before the window.
        corrected, passes: defaults of decoding.
        longest: largest window that it can correct.
    """

    model_type = "mmspec_cjd"
    width: int = NARROW
    num_layers: int = 2
    num_heads: int = 4
    context: int = 32
    corrected: int = 31
    passes: int = 4
    longest: int = 64

    def validate_architecture(self) -> None:
        """Raise ValueError for settings that cannot be built; called by `strict`."""
        least = min(self.width, self.num_layers, self.num_heads, self.context, self.window, self.passes)
        if least < 1 or not 0 <= self.corrected < self.window <= self.longest:
            raise ValueError("sizes must be at least 1, corrected below window, and window at most longest")
        if self.width % self.num_heads:
            raise ValueError(f"width must be a multiple of num_heads, {self.num_heads}; got {self.width}")

    @classmethod
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> Keywords:
        width = min(int(text.hidden_size), max(NARROW, int(text.hidden_size) // SHARE))
        return super().sizes_for(text, vocabulary) | {"width": width // 8 * 8}


class LayerWeights(NamedTuple):
    """Weights of a layer, transposed to [in, out], with the scales of its norms multiplied into them."""

    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor


class Attention(nn.Module):
    """Weights of attention."""

    def __init__(self, config: CorrectorConfig) -> None:
        super().__init__()
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)


class Layer(nn.Module):
    """Weights of a layer: attention and a gated feed-forward, each after a norm."""

    def __init__(self, config: CorrectorConfig) -> None:
        super().__init__()
        width, inner = config.width, 8 * config.width // 3 // 8 * 8
        self.attention = Attention(config)
        self.attention_norm = nn.RMSNorm(width)
        self.mlp_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def weights(self) -> LayerWeights:
        """Return a copy of the weights, as an argument of `run_layer`."""
        qkv = self.attention.qkv.weight * scale_of(self.attention_norm)
        up = self.up.weight * scale_of(self.mlp_norm)
        parts = (qkv, self.attention.out.weight, up, self.down.weight)
        return LayerWeights(*(part.T.contiguous() for part in parts))


def scale_of(norm: nn.RMSNorm) -> Tensor:
    """Scale [w] by which a row of length one is multiplied to equal the norm's output."""
    scale: Tensor = norm.weight * norm.weight.shape[0] ** 0.5
    return scale


def run_layer(
    rows: Tensor, weights: LayerWeights, heads: int, past: tuple[Tensor, Tensor] | None, mask: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Run a layer: rows [B, n, w] -> rows, and the keys and values of all rows that they attend to."""
    q, k, v = (normalize(rows, dim=-1) @ weights.qkv).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    if past is not None:
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    attended = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    rows = rows + attended.transpose(1, 2).flatten(2) @ weights.out
    gate, value = (normalize(rows, dim=-1) @ weights.up).chunk(2, -1)
    return rows + (silu(gate) * value) @ weights.down, (k, v)


class Tables(NamedTuple):
    """Tensors that a head computes once for all steps, from its weights and its target's.

    Attributes:
        new, old: [V + 1, w] parts of rows, by the token now and before; zeros at V, for no token.
        layers: weights of each.
        outputs: [w, V] matrix from states to corrections of logits, through the target's output matrix and
            through the head's own.
    """

    new: Tensor
    old: Tensor
    layers: Sequence[LayerWeights]
    outputs: Tensor

    def of_new(self, tokens: Tensor) -> Tensor:
        """Parts of rows for new tokens; zeros for -1, no token."""
        return embedding(tokens % len(self.new), self.new)

    def of_old(self, tokens: Tensor) -> Tensor:
        """Parts of rows for old tokens; zeros for -1, no token."""
        return embedding(tokens % len(self.old), self.old)


class CorrectorHead(WindowHead):
    """Corrects the stale distributions of a Jacobi window, one place after another.

    A row encodes a place: its token now and before, and the target's hidden states there, of the conditional
    and the unconditional prompt.
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
        self.norm = nn.RMSNorm(width)
        self.sharpness = nn.Linear(width, 1)
        self.to_states = nn.Linear(width, size, bias=False)
        self.corrections = nn.Linear(width, config.vocabulary, bias=False)
        self.post_init()
        for part in (self.sharpness, self.to_states, self.corrections):  # the initial head changes nothing
            nn.init.zeros_(part.weight)

    def tables(
        self, embed: Callable[[Tensor], Tensor], read_out: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> Tables:
        """Make the tables from the target's embedding and output matrix, which reads states of that dtype."""
        tokens = torch.arange(self.config.vocabulary, device=self.device)[None]
        vectors = embed(tokens)[0].float()
        unit = rms_norm(vectors, vectors.shape[-1:], eps=1e-12).to(self.dtype)
        none = unit.new_zeros(1, self.config.width)
        new, old = (torch.cat([part(unit), none]) for part in (self.of_new, self.of_old))
        through = read_out(self.to_states.weight.T[None].to(dtype))[0]
        outputs = (through.to(self.dtype) + self.corrections.weight.T).contiguous()
        return Tables(new, old, [cast(Layer, layer).weights() for layer in self.layers], outputs)

    def rows(self, states: Tensor, old: Tensor, is_known: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """Make the rows of consecutive places, without the parts of tokens that are not drawn yet.

        Args:
            states: [B, n, w] of `of_states`; any values where the target's are unknown.
            old: [B, n] the tokens of these states; -1 for no token.
            is_known: [B, n] whether there are any states.

        Returns:
            Two tensors [B, n, w], for places whose token stays and for places whose token is replaced.
        """
        known = states - tables.of_old(old)
        known = known.where(is_known[..., None], 0.0) + self.places.weight[: states.shape[1]]
        other = embedding(torch.where(is_known, CHANGED, UNKNOWN), self.flags.weight)
        return known + self.flags.weight[SAME], known + other

    def forward(
        self, rows: Tensor, mask: Tensor, memory: Memory | None, tables: Tables
    ) -> tuple[Tensor, Memory]:
        """Run the layers over rows [B, n, w] of consecutive places; return normed states and the memory."""
        known = []
        for index, weights in enumerate(tables.layers):
            past = None if memory is None else memory[index]
            rows, read = run_layer(rows, weights, self.config.num_heads, past, mask)
            known.append(read)
        return normalize(rows, dim=-1) * scale_of(self.norm), known

    def revise(
        self, rows: Tensor, mask: Tensor, memory: Memory | None, stale: Tensor, tables: Tables
    ) -> tuple[Tensor, Memory]:
        """Run the layers over C chains [B * C, n, w] of a window, and correct their places.

        The last m rows of each chain are of the places before those of `stale` [B, C * m, V].
        """
        batch, places = stale.shape[:2]
        states, known = self(rows, mask, memory, tables)
        states = states[:, -(places * batch // len(rows)) :].reshape(batch, places, -1)
        return self.correct(states, stale, tables), known

    def correct(self, states: Tensor, stale: Tensor, tables: Tables) -> Tensor:
        """Correct stale guided logits [B, n, V], never -inf, with states [B, n, w] of the places before."""
        sharpened: Tensor = stale * self.sharpness(states).exp().to(stale.dtype)
        return sharpened + (states @ tables.outputs).to(sharpened.dtype)
