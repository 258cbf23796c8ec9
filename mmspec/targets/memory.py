"""Memory that decoding takes, planned before any of it is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mmspec.decoding.recurrent import RECURRENT_LAYERS
from mmspec.errors import InputError

__all__ = ["MemoryPlan", "cached_bytes"]

TABLES = 4  # of numbers for every token of the vocabulary at a node: logits, their warped form, p, q


def cached_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token of one row takes in the layers that cache any."""
    text = config.get_text_config(decoder=True)
    count, numbers = text.num_hidden_layers, 0
    kinds = getattr(text, "layer_types", None) or [""] * count
    configs = getattr(text, "per_layer_config", None) or [text] * count  # layers of one model may differ
    for layer in range(count - (getattr(text, "num_kv_shared_layers", None) or 0)):
        if kinds[layer] not in RECURRENT_LAYERS:
            own = configs[layer]
            heads = getattr(own, "num_key_value_heads", None) or own.num_attention_heads
            width = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
            numbers += 2 * heads * width
    return numbers * dtype.itemsize


@dataclass(frozen=True)
class MemoryPlan:
    """Peak memory of decoding, in bytes: what stays, without the temporaries of a forward.

    Attributes:
        weights: of the target and of the drafter.
        cache: keys and values of all rows.
        logits: of the nodes of a round, and the distributions made of them.
    """

    weights: int
    cache: int
    logits: int

    @classmethod
    def of(
        cls, target: Any, rows: int, tokens: int, nodes: int, drafter: nn.Module | None = None
    ) -> MemoryPlan:
        """Plan for a batch.

        Args:
            target: the target; a masked one caches nothing.
            rows: of its forwards: twice the batch under guidance.
            tokens: of each row, prompt included.
            nodes: of the largest draft.
            drafter: the drafter's own model.
        """
        models = [target.model, *([] if drafter is None else [drafter])]
        weights = {
            id(one): one.nbytes for model in models for one in model.parameters()
        }  # heads may share some
        caches = not target.any_order
        return cls(
            sum(weights.values()),
            rows * tokens * cached_bytes(target.model.config, target.model.dtype) if caches else 0,
            0 if target.vector_size else rows * nodes * target.vocabulary * TABLES * torch.float32.itemsize,
        )

    @property
    def total(self) -> int:
        """Bytes of all."""
        return self.weights + self.cache + self.logits

    def check(self, rows: int, device: torch.device) -> None:
        """Raise InputError if a GPU that holds the weights has too little memory left for the rest."""
        if device.type != "cuda":
            return
        free, more = torch.cuda.mem_get_info(device)[0], self.cache + self.logits
        if more > free:
            raise InputError(
                "batch_sizes", rows, f"fewer: {megabytes(more)} are needed, and {megabytes(free)} are free"
            )

    def __str__(self) -> str:
        parts = f"{megabytes(self.weights)} of weights, {megabytes(self.cache)} of keys and values"
        return f"{megabytes(self.total)} planned: {parts}, {megabytes(self.logits)} of logits"


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
