"""The heads of DFlash and DSpark: layers of Qwen3 whose keys and values are of two kinds of rows.

Rows of the context are made of the target's hidden states and are the same for every layer; those of the
block are the newest token and noise, which every layer denoises. A block sees the context and all of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from mmspec.models.dflash.configuration import DFlashConfig, DSparkConfig
from mmspec.models.dflash.domino import DominoHead
from mmspec.models.feature_head import DraftingHead

__all__ = ["DFlashHead", "DSparkHead"]


class BlockAttention(Qwen3Attention):
    """Attention of a block to the context before it and to all of itself."""

    def forward(  # type: ignore[override]  # queries are of some rows alone
        self,
        block: Tensor,
        context: Tensor,
        turns: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        """Attend.

        Args:
            block: [B, n, d] rows that ask.
            context: [B, c, d] rows that are new, before them.
            turns: cosines and sines of all rows, each [B, c + n, head_dim].
            mask: [B or 1, 1, n, keys], boolean or additive; unused without a block.
            cache: of the rows before; it keeps those of both kinds.

        Returns:
            [B, n, d].
        """
        rows = torch.cat([context, block], 1)
        q = self.q_norm(self._heads(self.q_proj(block)))
        k, v = self.k_norm(self._heads(self.k_proj(rows))), self._heads(self.v_proj(rows))
        cos, sin = (turn[:, None] for turn in turns)
        asking = slice(context.shape[1], None)
        q = q * cos[:, :, asking] + rotate_half(q) * sin[:, :, asking]
        k = k * cos + rotate_half(k) * sin
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        if not block.shape[1]:  # the context was read alone
            return block
        groups = self.num_key_value_groups > 1
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scaling, enable_gqa=groups)
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, rows: Tensor) -> Tensor:
        """[B, n, heads * head_dim] -> [B, heads, n, head_dim]."""
        heads: Tensor = rows.unflatten(2, (-1, self.head_dim))
        return heads.transpose(1, 2)


class BlockLayer(Qwen3DecoderLayer):
    """A layer of Qwen3 that denoises a block."""

    def __init__(self, config: Qwen3Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = BlockAttention(config, layer_idx)

    def forward(  # type: ignore[override]  # as of its attention
        self,
        block: Tensor,
        context: Tensor,
        turns: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        """Denoise a block [B, n, d]; arguments as of `BlockAttention`."""
        block = block + self.self_attn(self.input_layernorm(block), context, turns, mask, cache)
        denoised: Tensor = block + self.mlp(self.post_attention_layernorm(block))
        return denoised


class MarkovHead(nn.Module):
    """Bias of the token before on the logits of a slot (DSpark, 2607.05147).

    "vanilla" is W2 W1[token]; "gated" gates the middle by the slot's state; "rnn" also reads a state of all
    tokens of the block so far.
    """

    def __init__(self, config: DFlashConfig, vocabulary: int) -> None:
        super().__init__()
        rank, width = config.markov_rank, config.hidden_size
        self.kind, self.rank = config.markov, rank
        self.markov_w1 = nn.Embedding(config.vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def forward(self, tokens: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Bias of tokens [...] on the slots after them, whose states are [..., d].

        Args:
            tokens, hidden: see above.
            state: [..., rank] of the slots before; None at the first.

        Returns:
            [..., V'] the bias; and the state for the next slot, None where there is none.
        """
        told = self.markov_w1(tokens)
        if self.kind == "gated":
            told = torch.sigmoid(self.gate_proj(torch.cat([hidden, told], -1))) * told
        elif self.kind == "rnn":
            state = torch.zeros_like(told) if state is None else state
            joint = self.joint_proj(torch.cat([state, told, hidden], -1))
            gate, candidate, out = joint.chunk(3, -1)
            gate = gate.sigmoid()
            state, told = gate * state + (1 - gate) * candidate.tanh(), out.tanh()
        bias: Tensor = self.markov_w2(told)
        return bias, state


class ConfidenceHead(nn.Module):
    """Probability that a slot's token is accepted, from the slot's state and the token before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, features: Tensor) -> Tensor:
        """[..., width] -> [...] logits."""
        logits: Tensor = self.proj(features)[..., 0]
        return logits


class DFlashHead(DraftingHead):
    """Predicts the tokens after the newest one, each from its own slot, in one pass (DFlash, 2602.06036).

    It has no embedding, and no output matrix unless its vocabulary is a part of the target's.
    """

    config: DFlashConfig
    config_class = DFlashConfig
    base_model_prefix = "dflash"
    _supports_sdpa = True

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        width, layers = config.hidden_size, config.layers_config()
        self.fc = nn.Linear(len(config.taps) * width, width, bias=False)
        self.hidden_norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(layers, index) for index in range(config.num_layers))
        self.norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(layers)
        self.layers_config = layers
        self.mask_embedding = nn.Parameter(torch.empty(width)) if config.mask_token is None else None
        known = config.draft_vocabulary
        self.lm_head = nn.Linear(width, known, bias=False) if known else None
        self.d2t: Tensor | None
        self.register_buffer("d2t", torch.zeros(known, dtype=torch.long) if known else None)
        words = known or config.vocabulary
        self.markov_head: MarkovHead | DominoHead | None = None
        if config.markov == "domino":
            self.markov_head = DominoHead(width, config.memory, config.markov_rank, words)
        elif config.markov:
            self.markov_head = MarkovHead(config, words)
        reads = width + (config.markov_rank if config.markov and config.confidence_with_markov else 0)
        self.confidence_head = ConfidenceHead(reads) if config.confidence else None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.mask_embedding is not None:
            nn.init.normal_(self.mask_embedding, std=self.config.initializer_range)

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(self.config.taps)

    @property
    def draft_tokens(self) -> Tensor | None:
        return None if self.d2t is None else torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def join(self, states: Sequence[Tensor]) -> Tensor:
        """Hidden states at the taps, each [..., d] -> rows of the context [..., d]."""
        rows: Tensor = self.hidden_norm(self.fc(torch.cat([*states], dim=-1)))
        return rows

    def slots(self, newest: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows of blocks [..., n, d] as they enter the first layer.

        Args:
            newest: [...] the tokens that the blocks begin with.
            embed: the target's embedding.
        """
        known = embed(newest)[..., None, :]
        if self.mask_embedding is not None:
            noise = self.mask_embedding.to(known)
        else:
            noise = embed(torch.full_like(newest.flatten()[:1, None], self.config.mask_token or 0))[0, 0]
        return torch.cat([known, noise.expand(*known.shape[:-2], self.config.block - 1, -1)], -2)

    def forward(
        self,
        block: Tensor,
        context: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Denoise blocks, and keep the rows of the context.

        Args:
            block: [B, n, d] from `slots`; n may be 0, to read a context alone.
            context: [B, c, d] from `join`, the rows that are new.
            positions: [B or 1, c + n] of all of them.
            mask: as of `BlockAttention`.
            cache: of the rows before.

        Returns:
            [B, n, d] normed states of the slots.
        """
        turns = self.rotary_emb(context, positions)
        for layer in self.layers:
            block = layer(block, context, turns, mask, cache)
        states: Tensor = self.norm(block)
        return states

    def logits(self, hidden: Tensor, read_out: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits [..., V or V'] of the slots' states [..., d], without what the tokens before say."""
        return read_out(hidden) if self.lm_head is None else self.lm_head(hidden)

    def told(
        self,
        level: int,
        before: Tensor,
        hidden: Tensor,
        state: Tensor | None,
        embed: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        """What tokens [...] say of the slots after them, whose states are [..., d].

        Args:
            level: of the slots in their blocks; 0 for the first that predicts.
            before, hidden: see above.
            state: [..., r] of the level before; None at the first.
            embed: the target's embedding.

        Returns:
            [..., V'] what is added to the logits; and the state for the next level, None where there is none.
        """
        if isinstance(self.markov_head, DominoHead):
            bias, after = self.markov_head(embed(before), hidden, state)
            return (bias if level >= self.config.plain_slots else torch.zeros_like(bias)), after
        if self.markov_head is None:
            return hidden.new_zeros(()), None
        told: tuple[Tensor, Tensor | None] = self.markov_head(before, hidden, state)
        return told

    def confidences(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Logits [...] of acceptance of slots with states [..., d] behind tokens [...]."""
        if self.confidence_head is None:
            return torch.full_like(hidden[..., 0], torch.inf)
        if isinstance(self.markov_head, MarkovHead) and self.config.confidence_with_markov:
            hidden = torch.cat([hidden, self.markov_head.markov_w1(before)], -1)
        judged: Tensor = self.confidence_head(hidden)
        return judged


class DSparkHead(DFlashHead):
    """Predicts as DFlash does, and each token knows the one before it (DSpark, 2607.05147)."""

    config: DSparkConfig
    config_class = DSparkConfig
    base_model_prefix = "dspark"
