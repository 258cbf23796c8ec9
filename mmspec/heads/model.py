"""Models that draft from their target's hidden states.

One layer reads a row for every token, made of the token's embedding and of the target's hidden state at the
token before it. A head makes such rows of whole prompts, whose images it may compress, and of later tokens.
It knows no target: whoever runs it hands over what the target computed.
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

EMBEDDINGS, HIDDEN = 0, -1  # taps: what enters the first layer, and what the target's head reads


@dataclass(frozen=True)
class Prompts:
    """Whole prompts, or whole sequences, as a head reads them; padded on the right.

    Attributes:
        embeddings: [B, L, d] of the tokens, as they enter the target's first layer.
        features: [B, L, d] at the same tokens; `FeatureHead.fuse` takes those of the tokens before.
        lengths: B.
        spans: B lists of images.
        questions: [B] index of the token that asks about them: the last before the answer.
    """

    embeddings: Tensor
    features: Tensor
    lengths: Sequence[int]
    spans: Sequence[Sequence[ImageSpan]]
    questions: Tensor


class DraftingHead(PreTrainedModel):
    """A model that drafts for its target from the target's hidden states.

    A subclass with a config of its own is made known to the auto classes of transformers, which then load the
    folders that `mmspec train drafter` writes.

    It may know a part of the target's tokens, its draft vocabulary, whose token i is the target's i + d2t[i].
    A new head knows the target's first tokens, which are the frequent ones where a vocabulary was built by
    merges; `learn_vocabulary` chooses others.

    Attributes:
        d2t: [V'] offsets of those tokens; None if it knows all.
    """

    config: HeadConfig
    config_class = HeadConfig
    d2t: Tensor | None

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        known = config.draft_size
        self.register_buffer("d2t", torch.zeros(known, dtype=torch.long) if known else None)

    def __init_subclass__(cls, **kwargs: object) -> None:
        config = vars(cls).get("config_class")  # its own, not that of a class above
        super().__init_subclass__(**kwargs)
        if config is not None:
            AutoConfig.register(config.model_type, config, exist_ok=True)
            AutoModel.register(config, cls, exist_ok=True)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the weights, and move the tables that were computed: their number format stays.

        Rotary frequencies in bfloat16 are off by up to 1/256 of themselves, which after some hundred tokens
        is another position.
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
        """[V'] the target's tokens that it knows, ascending; None if it knows all of them."""
        offsets = self.d2t
        return None if offsets is None else torch.arange(len(offsets), device=offsets.device) + offsets

    @property
    def rows_read(self) -> Tensor | None:
        """[V'] rows of the target's output matrix that its states are read out by; None for all or none."""
        return self.draft_tokens if self.config.reads_targets_matrix else None

    def learn_vocabulary(self, tokens: Tensor) -> None:
        """Draft these tokens of the target [V'] from now on; an output matrix of its own is for others then.

        Raises:
            InputError: another number of tokens, one that is no token of the target, or one twice; or the
                head knows all tokens.
        """
        chosen, known, most = tokens.unique(), self.config.draft_size, self.config.vocabulary
        fits = len(chosen) == known > 0 and chosen[0] >= 0 and chosen[-1] < most
        if self.d2t is None or not fits:
            raise InputError("tokens", tokens.tolist()[:8], f"{known} different tokens from 0 to {most - 1}")
        chosen = chosen.to(self.d2t.device)
        self.d2t = chosen - torch.arange(known, device=chosen.device)


class WindowHead(DraftingHead):
    """A head on the target's states in a Jacobi window, of the conditional and the unconditional prompt."""

    config: WindowHeadConfig

    def join(self, taps: Mapping[int, Tensor], rows: int) -> Tensor:
        """Put all states of a place side by side: [R, n, d] at each tap -> [B, n, 2d * taps]; R is B or 2B.

        Those of inner layers are scaled to one length.
        """
        parts = []
        for tap in self.taps:
            states = taps[tap] if tap == HIDDEN else rms_norm(taps[tap], taps[tap].shape[-1:])
            halves = states.split(rows)
            parts += [halves[0], halves[-1]]
        return torch.cat(parts, -1)


class FeatureHead(DraftingHead):
    """A head of one layer over rows of tokens and features, which are made of the states at the taps.

    Attributes:
        decoder: the layer, as a transformers decoder without embedding and last norm.
    """

    decoder: PreTrainedModel
    main_input_name = "rows"
    _supports_sdpa = True
    _supports_attention_backend = True

    @property
    def position_lag(self) -> int | None:
        """Distance back from a row's token to the one whose target position the row has.

        None if a row's position is its index in the head's own sequence.
        """
        return 0

    @property
    def one_axis(self) -> bool:
        """Whether that position is the token's index, though the target's positions have several axes."""
        return bool(getattr(self.config, "one_axis", False))

    def join(self, states: Sequence[Tensor]) -> Tensor:
        """Hidden states at the taps, each [..., d] -> features [..., d]; by default there is one tap."""
        (feature,) = states
        return feature

    def embed(self, tokens: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Embed tokens [...] that come after the prompts, by the target's `embed` unless it has its own."""
        own: nn.Embedding | None = getattr(self, "embed_tokens", None)
        return embed(tokens) if own is None else own(tokens)

    @abstractmethod
    def fuse(self, embeddings: Tensor, features: Tensor, summary: Tensor | None = None) -> Tensor:
        """Make the rows [B, n, w] of text tokens.

        Args:
            embeddings: [B, n, d] of the tokens, as they enter the target's first layer.
            features: [B, n, d] of the tokens before them.
            summary: [B, s] that of `PromptRows`, from prompts that the tokens come after.
        """

    def read_prompts(self, prompts: Prompts) -> PromptRows:
        """Make the rows of whole prompts, each but the first token's; by default images are as they are."""
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
            position_ids: [B, n], or [3, B, n] as a target counts them.
            attention_mask: as the decoder's layers take it; None is causal.
            cache: keys and values of the rows before.

        Returns:
            [B, n, d] the head's state at the rows.
        """
        if attention_mask is None and cache is None:
            # else transformers takes a gap between positions, where an image was, for two sequences in one
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
