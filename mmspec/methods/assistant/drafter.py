"""Drafter of Gemma 4's assistants, which read the target's hidden state and its keys and values.

Assistants keep no cache. Every drafted token has the position of the newest committed one and attends to the
committed tokens alone, so that all nodes of a level are computed together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from mmspec.core.cache import RaggedCache, additive_mask, mask_width
from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft
from mmspec.core.indexing import pick
from mmspec.core.interfaces import AnyTarget
from mmspec.core.session import PromptBatch
from mmspec.errors import InputError
from mmspec.heads.drafter import HeadDrafter, StateSession
from mmspec.methods.assistant.head import AssistantHead

__all__ = ["AssistantDrafter"]

KINDS = ("full_attention", "sliding_attention")


class AssistantSession(StateSession):
    """An assistant that drafts for one batch.

    Attributes:
        cache: of the target.
        layers: of the target whose keys and values are read, by kind.
    """

    head: AssistantHead

    def __init__(self, drafter: HeadDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        if batch.prefill.cache is None:
            rule = "must be a model that caches keys and values, which the assistant reads"
            raise InputError("target", type(self.target.model).__name__, rule)
        self.cache: RaggedCache = batch.prefill.cache
        self.layers = storing_layers(self.target.config)

    def propose(self, canvas: Canvas) -> Draft:
        growth, hidden = self.growth(canvas), self.hidden[:, None]
        states, seen = self._context()
        while True:
            self.passes += 1
            tokens = self._copied(growth.tokens)
            count = tokens.shape[1]
            masks = {kind: mask[:, None, None].expand(-1, -1, count, -1) for kind, mask in seen.items()}
            positions = self.cache.lengths[:, None].expand(-1, count)
            logits, hidden = self.head(self.target.embed(tokens), hidden, positions, states, masks)
            parent = growth.grow(self._log_probabilities(self._guided(logits)))
            if growth.is_grown:
                return self.rated(growth)
            hidden = pick(hidden, self._copied(parent))

    def _context(self) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
        """Keys and values of the committed tokens, and additive masks [R, length] of the visible ones."""
        cache, text = self.cache, self.target.config.get_text_config(decoder=True)
        width = min(mask_width(cache.longest, cache.lengths.device), cache.plan.capacity)
        place = torch.arange(width, device=cache.lengths.device)
        behind = cache.lengths[:, None] - 1 - place  # distance from the last committed token
        seen = {
            "full_attention": behind >= 0,
            "sliding_attention": (behind >= 0) & (behind <= text.sliding_window),
        }
        states = {}
        for kind, layer in self.layers.items():
            stored: Any = cache.layers[layer]
            states[kind] = stored.keys[:, :width].transpose(1, 2), stored.values[:, :width].transpose(1, 2)
        return states, {kind: additive_mask(seen[kind], self.hidden.dtype) for kind in self.layers}


class AssistantDrafter(HeadDrafter):
    """Drafts a tree with an assistant that reads its target's keys and values.

    Args: see `HeadDrafter`.
    """

    session = AssistantSession
    model: AssistantHead
    rows_move = False  # a leaving row would take its keys along

    def check(self, target: AnyTarget) -> None:
        super().check(target)
        if target.config is None or set(storing_layers(target.config)) != set(KINDS):
            rule = f"needs a target with layers of {' and '.join(KINDS)}"
            raise InputError("drafter", self.title, rule)


def storing_layers(config: PreTrainedConfig) -> dict[str, int]:
    """Return the last layer of each kind that keeps keys and values."""
    text = config.get_text_config(decoder=True)
    count = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", None) or 0)
    return {kind: layer for layer, kind in enumerate((getattr(text, "layer_types", None) or [])[:count])}
