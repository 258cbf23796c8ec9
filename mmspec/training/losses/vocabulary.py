"""Beginnings of a new head: the tokens that it drafts, and an output matrix of its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mmspec.heads.model import DraftingHead
from mmspec.targets import CausalTarget
from mmspec.training.data.conversations import ConversationRows
from mmspec.training.data.sequences import DrafterData

__all__ = ["choose_vocabulary", "take_rows", "token_counts"]

VOCABULARY_BATCHES = 128


def choose_vocabulary(head: DraftingHead, data: DrafterData, batches: int = VOCABULARY_BATCHES) -> None:
    """Let a new head of a reduced vocabulary know the tokens that are learnt most often, then the first ones.

    Every process counts the same: all texts that are given, or batches of data that are made in each step.
    """
    if head.draft_tokens is None:
        return
    if isinstance(data, ConversationRows) and not data.regenerate:
        learnt: Iterable[Tensor] = data.learnt_texts()
    else:
        drawn = (example for step in range(batches) for example in data.batch(step, 0).examples)
        learnt = (example.inputs["input_ids"][0][example.learnt].cpu() for example in drawn)
    count = token_counts(learnt, head.config.vocabulary)
    often = count.sort(descending=True, stable=True).indices
    head.learn_vocabulary(often[: head.config.draft_size])


def token_counts(texts: Iterable[Tensor], vocabulary: int) -> Tensor:
    """[V] occurrences of each token in texts [L]."""
    count = torch.zeros(vocabulary, dtype=torch.long)
    for tokens in texts:
        count += torch.bincount(tokens, minlength=len(count))
    return count


@torch.no_grad()
def take_rows(head: DraftingHead, target: CausalTarget) -> None:
    """Let a new head's own output matrix, if any, begin as the target's rows of the tokens that it drafts.

    It stays as it is where the target's are of another width, or do not lie open (`output_rows`).
    """
    matrix: nn.Linear | None = getattr(head, "lm_head", None)
    if matrix is None:
        return
    known = head.draft_tokens
    rows = target.output_rows(torch.arange(head.config.vocabulary) if known is None else known)
    if rows is not None and rows[0].shape == matrix.weight.shape:
        matrix.weight.copy_(rows[0])
