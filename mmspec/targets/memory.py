"""Memory plan of decoding, computed before any memory is allocated.

The memory of recurrent states, for each row and for each node of a draft, is measured on the mixers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from mmspec.core.cache import RaggedCache
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.recurrent import RECURRENT_LAYERS, Paths
from mmspec.errors import InputError
from mmspec.models.free_memory import free_bytes
from mmspec.models.replaced import Replacement, replaced_forwards
from mmspec.models.weights import execution_device
from mmspec.targets.mixers import closed_form, find_mixers, mixer_on_tree
from mmspec.targets.model_target import AnyModelTarget
from mmspec.transformers_versions import cache_name

__all__ = ["MemoryPlan", "StateMemory", "cached_bytes", "check_draft", "measure_states"]

TABLES = 4  # arrays over the vocabulary for each node: logits, warped logits, p, q


def cached_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token of one row, over all layers with a KV cache."""
    text = config.get_text_config(decoder=True)
    count, numbers = text.num_hidden_layers, 0
    kinds = getattr(text, "layer_types", None) or [""] * count
    configs = getattr(text, "per_layer_config", None) or [text] * count  # layers of a model may differ
    for layer in range(count - (getattr(text, "num_kv_shared_layers", None) or 0)):
        if kinds[layer] not in RECURRENT_LAYERS:
            own = configs[layer]
            heads = getattr(own, "num_key_value_heads", None) or own.num_attention_heads
            width = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
            numbers += 2 * heads * width
    return numbers * dtype.itemsize


@dataclass(frozen=True)
class MemoryPlan:
    """Persistent memory of decoding in bytes, without the temporaries of a forward pass.

    Attributes:
        weights: of the target and of the drafter.
        cache: keys and values of all rows.
        logits: of the nodes of a round, and their distributions.
    """

    weights: int
    cache: int
    logits: int

    @classmethod
    def of(
        cls, target: AnyModelTarget, rows: int, tokens: int, nodes: int, drafter: nn.Module | None = None
    ) -> MemoryPlan:
        """Plan for a batch.

        Args:
            target: the target; a MAR model has no cache.
            rows: of its forward passes: twice the batch under guidance.
            tokens: of each row, prompt included.
            nodes: of the largest draft.
            drafter: the drafter's own model.
        """
        models = [target.model, *([] if drafter is None else [drafter])]
        weights = {
            id(one): one.nbytes for model in models for one in model.parameters()
        }  # heads may share weights
        caches = not target.any_order
        return cls(
            sum(weights.values()),
            rows * tokens * cached_bytes(target.model.config, target.model.dtype) if caches else 0,
            0 if target.vector_size else rows * nodes * target.vocabulary * TABLES * torch.float32.itemsize,
        )

    @property
    def total(self) -> int:
        """Sum of all, in bytes."""
        return self.weights + self.cache + self.logits

    def check(self, rows: int, device: torch.device) -> None:
        """Raise InputError if a GPU that holds the weights has too little free memory for the rest."""
        if device.type != "cuda":
            return
        free, more = torch.cuda.mem_get_info(device)[0], self.cache + self.logits
        if more > free:
            rule = f"must be smaller: {megabytes(more)} are needed, and {megabytes(free)} are free"
            raise InputError("batch_sizes", rows, rule)

    def __str__(self) -> str:
        parts = f"{megabytes(self.weights)} of weights, {megabytes(self.cache)} of keys and values"
        return f"{megabytes(self.total)} planned: {parts}, {megabytes(self.logits)} of logits"


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


@dataclass(frozen=True)
class StateMemory:
    """Memory of one mixer, in bytes.

    Attributes:
        mixer: its class.
        is_closed: whether a draft is computed in closed form, not token by token.
        row: committed states of a row.
        node: data kept for a node of a draft until the commit.
    """

    mixer: str
    is_closed: bool
    row: int
    node: int


@torch.inference_mode()
def measure_states(model: PreTrainedModel) -> list[StateMemory]:
    """Measure the states of every mixer of a model, which may be on the meta device.

    Each mixer runs alone on two tokens of a prompt, and on drafts of one and two nodes.
    """
    mixers = find_mixers(model)
    text = model.config.get_text_config(decoder=True)
    cache = RaggedCache(model.config, 1, 0, torch.device("cpu"))
    cache.begin_prefill(0, 2)
    found = []
    for layer, mixer in zip(cache.recurrent, mixers, strict=True):
        place = execution_device(mixer)
        hidden = torch.zeros(1, 2, text.hidden_size, device=place, dtype=model.dtype)
        passed = {cache_name(type(mixer).forward): cache}
        mixer(hidden, **passed)
        sizes = []
        for count in (1, 2):
            nodes = Tree.chain(torch.zeros(1, count, dtype=torch.long, device="cpu"), DraftKind.POINT).nodes
            on_tree = mixer_on_tree(mixer, layer, Paths.of(nodes, layer.taps).to(layer.place))
            with replaced_forwards([Replacement(mixer, on_tree)]):
                mixer(hidden[:, :count], **passed)
            sizes.append(layer.scored.nbytes())
        is_closed = closed_form(mixer) is not None
        found.append(StateMemory(type(mixer).__name__, is_closed, layer.nbytes(), sizes[1] - sizes[0]))
    return found


def check_draft(rows: int, nodes: int, node_bytes: int, device: torch.device) -> None:
    """Check that the data that recurrent layers keep for a draft fits in free memory.

    Raises:
        InputError: it does not fit; the message gives the largest number of draft tokens that does.
    """
    free = free_bytes(device)
    if rows * nodes * node_bytes > free:
        fitting = max(0, free // (rows * node_bytes) - 1)
        raise InputError(
            "num_draft_tokens",
            nodes - 1,
            f"must be at most {fitting}: recurrent layers keep {node_bytes / 1e6:,.1f} MB for each draft "
            f"token of each of {rows} rows, and {free / 1e6:,.1f} MB are free",
        )
