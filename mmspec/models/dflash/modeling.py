"""The heads of DFlash and DSpark: layers of Qwen3 whose keys and values are of two kinds of rows.

Rows of the context are made of the target's hidden states and are the same for every layer; those of the
block are the newest token and noise, which every layer denoises. A block sees the context and all of itself;
in some layers of some heads only what is near, or of itself only what comes before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from mmspec.models.dflash.configuration import DFlashConfig, DSparkConfig
from mmspec.models.dflash.domino import DominoHead
from mmspec.models.dflash.layers import BlockLayer, near
from mmspec.models.feature_head import DraftingHead
from mmspec.models.published_layer import SLIDING, PartialRotary

__all__ = ["DFlashHead", "DSparkHead"]


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
        rotary = Qwen3RotaryEmbedding if config.rotary_dim == config.head_dim else PartialRotary
        self.rotary_emb = rotary(layers)
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

    def near(self, asking: Tensor, keys: Tensor) -> list[Tensor]:
        """Masks of each layer, [..., n, m]: whether slots at positions [..., n] see rows at [..., m]."""
        window = self.config.sliding_window
        rules = [(window if kind == SLIDING else None, causal) for kind, causal in self.config.layers]
        made = {rule: near(asking, keys, *rule) for rule in {*rules}}
        return [made[rule] for rule in rules]

    def forward(
        self,
        block: Tensor,
        context: Tensor,
        positions: Tensor,
        mask: Tensor | Sequence[Tensor] | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Denoise blocks, and keep the rows of the context.

        Args:
            block: [B, n, d] from `slots`; n may be 0, to read a context alone.
            context: [B, c, d] from `join`, the rows that are new.
            positions: [B or 1, c + n] of all of them.
            mask: as of `BlockAttention`, or one for each layer; None without rows before: all that is near.
            cache: of the rows before.

        Returns:
            [B, n, d] normed states of the slots.
        """
        turns = self.rotary_emb(context, positions)
        plain = not any(self.config.causal) and self.config.sliding_window is None
        if mask is None and not plain:
            mask = [seen[:, None] for seen in self.near(positions[:, context.shape[1] :], positions)]
        masks = [mask] * len(self.layers) if mask is None or isinstance(mask, Tensor) else mask
        for layer, seen in zip(self.layers, masks, strict=True):
            block = layer(block, context, turns, seen, cache)
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
        """Bias of slots' logits by the tokens [...] before them, whose states are [..., d].

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
