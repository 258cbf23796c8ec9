"""Axial transformers (1912.12180) over image tokens: a LlamaGen of single rows, and summaries of rows above.

The outer stack makes a summary of each cell from the rows above its own; all cells of a row are computed
together. The inner stack adds the summaries to the tokens of a row, each of which sees its row alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from mmspec.families.llamagen.configuration import LlamaGenConfig
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM, LlamaGenModel

__all__ = ["AxialConfig", "AxialForCausalLM", "AxialModel"]


@strict
class AxialConfig(LlamaGenConfig):
    """Config of an axial transformer; `num_hidden_layers` are those of the inner stack.

    Attributes:
        outer_layers: layers of the outer stack.
    """

    model_type = "axial"

    outer_layers: int = 8


class AxialModel(LlamaGenModel):
    """The inner stack."""

    config: AxialConfig
    config_class = AxialConfig


class AxisAttention(nn.Module):
    """Attention along one axis of an image, with a residual connection."""

    def __init__(self, config: AxialConfig) -> None:
        super().__init__()
        self.heads, size = config.num_attention_heads, config.hidden_size
        self.norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.query_key_value = nn.Linear(size, 3 * size, bias=False)
        self.output = nn.Linear(size, size, bias=False)

    def forward(self, states: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attend along the last axis but one.

        Args:
            states: [..., n, d].
            before: [..., m, 2 d] keys and values before them, which makes the attention causal; None for
                attention of all to all.

        Returns:
            [..., n, d], and [..., m + n, 2 d] all keys and values.
        """
        size, is_causal = states.shape[-1], before is not None
        query, new = self.query_key_value(self.norm(states)).split([size, 2 * size], -1)
        known = new if before is None else torch.cat([before, new], -2)
        query, key, value = (
            each.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for each in (query, *known.chunk(2, -1))
        )
        place = torch.arange(known.shape[-2], device=states.device)
        sees = place <= place[-states.shape[-2] :, None] if is_causal else None
        attended = scaled_dot_product_attention(query, key, value, attn_mask=sees)
        output: Tensor = states + self.output(attended.transpose(-2, -3).flatten(-2))
        return output, known


class OuterLayer(nn.Module):
    """Attention of all cells of a row, attention of each cell to its column above, and a feed-forward."""

    def __init__(self, config: AxialConfig) -> None:
        super().__init__()
        self.row, self.column = AxisAttention(config), AxisAttention(config)
        self.norm, self.mlp = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps), LlamaMLP(config)

    def forward(self, states: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Process rows [B, h, W, d] after the keys and values [B, W, r, 2 d] of rows above; return both."""
        columns, known = self.column(self.row(states)[0].transpose(1, 2), before)
        states = columns.transpose(1, 2)
        return states + self.mlp(self.norm(states)), known


class AxialForCausalLM(LlamaGenForCausalLM):
    """Axial transformer: predicts the tokens of a row from its summary and the tokens to the left.

    Example:
        >>> shape = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "outer_layers": 2}
        >>> model = AxialForCausalLM(AxialConfig(vocab_size=64, grid_size=4, **shape)).eval()
        >>> begin = model.begin(torch.tensor([[64 + 207]]))
        >>> model.image_logits(begin, torch.zeros(1, 16, dtype=torch.long)).shape
        torch.Size([1, 16, 64])
    """

    config: AxialConfig
    config_class = AxialConfig
    decoder_class = AxialModel

    def __init__(self, config: AxialConfig) -> None:
        super().__init__(config)
        self.rows = nn.Embedding(config.grid_size, config.hidden_size)
        self.columns = nn.Embedding(config.grid_size, config.hidden_size)
        self.outer = nn.ModuleList(OuterLayer(config) for _ in range(config.outer_layers))
        self.post_init()

    def begin(self, input_ids: Tensor, caption_features: Tensor | None = None) -> Tensor:
        """Return the mean vector [B, d] of prompts, which stands before the image and before each row."""
        mean: Tensor = self.model.embed(input_ids, caption_features).mean(1)
        return mean

    def nothing(self, begin: Tensor) -> list[Tensor]:
        """Keys and values of no rows, for each layer of the outer stack: [B, W, 0, 2 d]."""
        shape = len(begin), self.config.grid_size, 0, 2 * self.config.hidden_size
        return [begin.new_empty(shape)] * len(self.outer)

    def summarise(
        self, begin: Tensor, above: Tensor, before: Sequence[Tensor], first: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the outer stack on consecutive rows.

        Args:
            begin: [B, d] of the prompts.
            above: [B, h, W] tokens of the row above each; of any value above row 0.
            before: for each layer, keys and values [B, W, first, 2 d] of the rows above these.
            first: number of these rows.

        Returns:
            The summaries [B, h, W, d], and the keys and values with those of the rows.
        """
        states = self.model.embed_tokens(above)
        row = first + torch.arange(above.shape[1], device=above.device)
        states = torch.where(row[:, None, None] == 0, begin[:, None, None], states)
        states = states + self.rows(row)[:, None] + self.columns.weight
        known = []
        for layer, keys in zip(self.outer, before, strict=True):
            states, kept = layer(states, keys)
            known.append(kept)
        return states, known

    def row_logits(self, begin: Tensor, tokens: Tensor, summaries: Tensor, first: int) -> Tensor:
        """Logits [B, h, W, V] of rows from `first` on, given their tokens [B, h, W] and summaries."""
        size, width = tokens.shape[1:]
        left = self.model.embed_tokens(tokens[..., :-1])
        inputs = torch.cat([begin[:, None, None].expand(-1, size, 1, -1), left], 2) + summaries
        place = self.config.prefix_length + first * width + torch.arange(size * width, device=tokens.device)
        states = self.model(
            inputs_embeds=inputs.flatten(0, 1),
            position_ids=place.view(size, width).repeat(len(tokens), 1),
            attention_mask=torch.ones_like(tokens.flatten(0, 1)),
            use_cache=False,
        ).last_hidden_state
        logits: Tensor = self.lm_head(states).unflatten(0, (-1, size))
        return logits

    def image_logits(self, begin: Tensor, tokens: Tensor) -> Tensor:
        """Logits [B, N, V] of all tokens [B, N] of images, in one pass over all rows, for training."""
        rows = tokens.unflatten(1, (self.config.grid_size, -1))
        summaries, _ = self.summarise(begin, rows.roll(1, 1), self.nothing(begin), 0)
        return self.row_logits(begin, rows, summaries, 0).flatten(1, 2)
