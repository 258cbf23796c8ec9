"""What all heads have in common that draft from their target's hidden states.

One layer reads a row for every token: what the token is, and what the target made of the token before it. A
head says how such rows come about, of whole prompts (images may be compressed there) and of later tokens.
It knows no target: whoever runs it hands over what the target computed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from mmspec.visual_tokens.spans import ImageSpan

__all__ = ["EMBEDDINGS", "HIDDEN", "DraftingHead", "FeatureHead", "PromptRows"]

EMBEDDINGS, HIDDEN = 0, -1  # taps: what enters the first layer, and what the target's head reads


@dataclass(frozen=True)
class PromptRows:
    """The rows of prompts, padded on the right.

    Attributes:
        rows: [B, M, w] what enters the head's layer.
        lengths: B numbers of rows.
        source: [B, M] index in the prompt of the token that a row is of; -1 for what a compressor made, and
            for padding.
        slot: [B, M] index in the prompt of the token whose position id a row has. Not read of heads that
            count their rows.
        summary: [B, s] what every later row is told of the prompt's images; None if there is no such thing.
    """

    rows: Tensor
    lengths: Sequence[int]
    source: Tensor
    slot: Tensor
    summary: Tensor | None = None


class DraftingHead(PreTrainedModel):
    """A model that drafts for its target from the target's hidden states."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden states of the target that it reads; see `TargetOutput.taps`."""
        return (HIDDEN,)

    @property
    def draft_tokens(self) -> Tensor | None:
        """[V'] the target's tokens that it knows, ascending; None if it knows all of them."""
        return None


class FeatureHead(DraftingHead):
    """A head of one layer over rows of tokens and features, which are made of the states at the taps.

    Attributes:
        decoder: the layer, as a transformers decoder without embedding and last norm.
        counts_rows: True if a row's position is its index in the head's own sequence; False if rows have the
            position ids that the target gives their tokens.
    """

    counts_rows: ClassVar[bool] = False
    decoder: PreTrainedModel
    main_input_name = "rows"
    _supports_sdpa = True
    _supports_attention_backend = True

    def join(self, states: Sequence[Tensor]) -> Tensor:
        """Hidden states at the taps, each [..., d] -> features [..., d]; by default there is one tap."""
        (feature,) = states
        return feature

    @abstractmethod
    def fuse(self, embeddings: Tensor, features: Tensor, summary: Tensor | None = None) -> Tensor:
        """The rows of text tokens.

        Args:
            embeddings: [B, n, d] of the tokens, as they enter the target's first layer.
            features: [B, n, d] of the tokens before them.
            summary: [B, s] that of `PromptRows`, from prompts that the tokens come after.

        Returns:
            [B, n, w].
        """

    @abstractmethod
    def read_prompts(
        self,
        embeddings: Tensor,
        features: Tensor,
        lengths: Sequence[int],
        spans: Sequence[Sequence[ImageSpan]],
        questions: Tensor,
    ) -> PromptRows:
        """The rows of whole prompts, their images compressed if the head does that.

        Args:
            embeddings, features: [B, L, d] at each token, padded on the right; unlike in `fuse`, both
                belong to the same token.
            lengths: B.
            spans: B lists of images.
            questions: [B] index of the token that asks about them: the last before the answer.
        """

    def forward(
        self,
        rows: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """One pass of the layer.

        Args:
            rows: [B, n, w] from `fuse` or `read_prompts`.
            position_ids: [B, n], or [3, B, n] as a target counts them.
            attention_mask: as the decoder's layers take it; None is causal.
            past_key_values: keys and values of the rows before.

        Returns:
            [B, n, d] the head's state at the rows.
        """
        if attention_mask is None and past_key_values is None:
            # else transformers takes a gap between positions, where an image was, for two sequences in one
            attention_mask = torch.ones(rows.shape[:2], dtype=torch.long, device=rows.device)
        output = self.decoder(
            inputs_embeds=rows,
            position_ids=position_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=past_key_values is not None,
            **kwargs,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def logits(self, hidden: Tensor, read_out: Callable[[Tensor], Tensor]) -> Tensor:
        """What a state says of the next token.

        Args:
            hidden: [..., d] features that the head predicts.
            read_out: the target's output matrix.

        Returns:
            [..., V], or [..., V'] of `draft_tokens`.
        """
        return read_out(hidden)
