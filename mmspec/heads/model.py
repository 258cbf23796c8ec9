"""Models that draft from their target's hidden states.

One layer reads a row for every token, made of the token's embedding and of the target's hidden state at the
token before it. A head makes such rows of whole prompts, whose images it may compress, and of later tokens.
It has no reference to a target: the caller passes the target's states.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import AutoConfig, AutoModel, Cache, PreTrainedModel

from mmspec.errors import InputError
from mmspec.heads.configuration import HeadConfig, WindowHeadConfig
from mmspec.transformers_versions import CACHE
from mmspec.visual_tokens.spans import ImageSpan
from mmspec.visual_tokens.splice import PromptRows

__all__ = ["EMBEDDINGS", "HIDDEN", "DraftingHead", "FeatureHead", "Prompts", "WindowHead"]

EMBEDDINGS, HIDDEN = 0, -1  # taps: the input of the first layer, and that of the target's output matrix


@dataclass(frozen=True)
class Prompts:
    """Whole prompts, or whole sequences, as inputs of a head; padded on the right.

    Attributes:
        embeddings: [B, L, d] of the tokens, as inputs of the target's first layer.
        features: [B, L, d] at the same tokens; `FeatureHead.fuse` reads those of the tokens before.
        lengths: B.
        spans: B lists of images.
        questions: [B] index of the token that represents the question: the last before the answer.
    """

    embeddings: Tensor
    features: Tensor
    lengths: Sequence[int]
    spans: Sequence[Sequence[ImageSpan]]
    questions: Tensor


class DraftingHead(PreTrainedModel):
    """A model that drafts for its target from the target's hidden states.

    A subclass with its own config is registered with the auto classes of transformers, which then load the
    folders that `mmspec train drafter` writes.

    It may draft a part of the target's tokens: token i of its draft vocabulary is the target's i + d2t[i]. A
    new head drafts the target's first tokens, which are the frequent ones where a vocabulary was built by
    merges; `learn_vocabulary` chooses others.

    Attributes:
        d2t: [V'] offsets of those tokens; None if it drafts all.
    """

    config: HeadConfig
    config_class = HeadConfig
    d2t: Tensor | None

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        known = config.draft_size
        self.register_buffer("d2t", torch.zeros(known, dtype=torch.long) if known else None)

    def __init_subclass__(cls, **kwargs: object) -> None:
        config = vars(cls).get("config_class")  # its own, not an inherited one
        super().__init_subclass__(**kwargs)
        if config is not None:
            AutoConfig.register(config.model_type, config, exist_ok=True)
            AutoModel.register(config, cls, exist_ok=True)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the weights, and move computed tables without a cast.

        Rotary frequencies in bfloat16 are off by up to 1/256, which shifts the position after some hundred
        tokens.
        """
        tables = [
            (module._buffers, name, table)
            for module in self.modules()
            for name, table in module._buffers.items()
            if name in module._non_persistent_buffers_set and table is not None
        ]
        super()._apply(fn, recurse)
        for buffers, name, table in tables:
            moved = buffers[name]
            if moved is not None and not table.is_meta:
                buffers[name] = table.to(moved.device)
        return self

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden states of the target that it reads; see `TargetOutput.taps`."""
        return tuple(getattr(self.config, "taps", (HIDDEN,)))

    @property
    def draft_tokens(self) -> Tensor | None:
        """[V'] the target's tokens that it drafts, ascending; None if it drafts all of them."""
        offsets = self.d2t
        return None if offsets is None else torch.arange(len(offsets), device=offsets.device) + offsets

    @property
    def rows_read(self) -> Tensor | None:
        """[V'] rows of the target's output matrix that read its states; None for all or none."""
        return self.draft_tokens if self.config.reads_targets_matrix else None

    def learn_vocabulary(self, tokens: Tensor) -> None:
        """Set the draft vocabulary to these tokens of the target [V']; an own output matrix is not changed.

        Raises:
            InputError: their number differs, one is not a token of the target or is there twice, or the head
                drafts all tokens.
        """
        chosen, known, most = tokens.unique(), self.config.draft_size, self.config.vocabulary
        fits = len(chosen) == known > 0 and chosen[0] >= 0 and chosen[-1] < most
        if self.d2t is None or not fits:
            rule = f"must be {known} different tokens from 0 to {most - 1}"
            raise InputError("tokens", tokens.tolist()[:8], rule)
        chosen = chosen.to(self.d2t.device)
        self.d2t = chosen - torch.arange(known, device=chosen.device)


class WindowHead(DraftingHead):
    """A head on the target's states in a Jacobi window, of the conditional and the unconditional prompt."""

    config: WindowHeadConfig

    def join(self, taps: Mapping[int, Tensor], rows: int) -> Tensor:
        """Join all states of a place: [R, n, d] at each tap -> [B, n, 2d * taps]; R is B or 2B.

        Those of inner layers are scaled to one length.
        """
        parts = []
        for tap in self.taps:
            states = taps[tap] if tap == HIDDEN else rms_norm(taps[tap], taps[tap].shape[-1:])
            halves = states.split(rows)
            parts += [halves[0], halves[-1]]
        return torch.cat(parts, -1)


class FeatureHead(DraftingHead):
    """A head of one layer over rows of tokens and features, which are made from the states at the taps.

    Attributes:
        decoder: the layer, as a transformers decoder without embedding and final norm.
    """

    decoder: PreTrainedModel
    main_input_name = "rows"
    _supports_sdpa = True
    _supports_attention_backend = True

    @property
    def position_lag(self) -> int | None:
        """Distance from a row's token back to the token whose position in the target the row has.

        None if a row's position is its index in the head's own sequence.
        """
        return 0

    @property
    def one_axis(self) -> bool:
        """Whether that position is the token's index, although the target's positions have several axes."""
        return bool(getattr(self.config, "one_axis", False))

    def join(self, states: Sequence[Tensor]) -> Tensor:
        """Hidden states at the taps, each [..., d] -> features [..., d]; by default there is one tap."""
        (feature,) = states
        return feature

    def embed(self, tokens: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Embed tokens [...] after the prompts, with the target's `embed` unless the head has its own."""
        own: nn.Embedding | None = getattr(self, "embed_tokens", None)
        return embed(tokens) if own is None else own(tokens)

    @abstractmethod
    def fuse(self, embeddings: Tensor, features: Tensor, summary: Tensor | None = None) -> Tensor:
        """Make the rows [B, n, w] of text tokens.

        Args:
            embeddings: [B, n, d] of the tokens, as inputs of the target's first layer.
            features: [B, n, d] of the tokens before them.
            summary: [B, s] that of `PromptRows`, from the prompts before the tokens.
        """

    def read_prompts(self, prompts: Prompts) -> PromptRows:
        """Make the rows of whole prompts, without the first token's; by default images are not compressed."""
        rows = self.fuse(prompts.embeddings[:, 1:], prompts.features[:, :-1])
        slot = torch.arange(1, 1 + rows.shape[1], device=rows.device).expand(len(rows), -1)
        within = slot < torch.tensor(prompts.lengths, device=rows.device)[:, None]
        return PromptRows(rows, [length - 1 for length in prompts.lengths], slot.where(within, -1), slot)

    def forward(
        self,
        rows: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        cache: Cache | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Run the layer.

        Args:
            rows: [B, n, w] from `fuse` or `read_prompts`.
            position_ids: [B, n], or [3, B, n] as in the target.
            attention_mask: as the decoder's layers accept it; None is causal.
            cache: keys and values of earlier rows.

        Returns:
            [B, n, d] the head's state at the rows.
        """
        if attention_mask is None and cache is None:
            # else transformers reads a gap between positions, where an image was, as two packed sequences
            attention_mask = torch.ones(rows.shape[:2], dtype=torch.long, device=rows.device)
        output = self.decoder(
            inputs_embeds=rows,
            position_ids=position_ids,
            attention_mask=attention_mask,
            use_cache=cache is not None,
            **{CACHE: cache},
            **kwargs,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def logits(self, hidden: Tensor, read_out: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits [..., V], or [..., V'] of `draft_tokens`, of the token after states [..., d]."""
        return read_out(hidden)
