"""Memory that recurrent states take, for each row and for each node of a draft, measured on the mixers."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch
from transformers import PreTrainedModel

from mmspec.decoding.cache import RaggedCache
from mmspec.decoding.draft import Draft, DraftKind
from mmspec.decoding.recurrent import Paths
from mmspec.errors import InputError
from mmspec.targets.mixers import closed_form, find_mixers, mixer_on_tree
from mmspec.targets.placement import execution_device
from mmspec.transformers_versions import cache_name

__all__ = ["StateMemory", "check_draft", "free_bytes", "measure_states"]


@dataclass(frozen=True)
class StateMemory:
    """Memory of one mixer, in bytes.

    Attributes:
        mixer: its class.
        is_closed: computed over a draft in closed form, not token by token.
        row: committed states of a row.
        node: what is kept for a node of a draft until the commit.
    """

    mixer: str
    is_closed: bool
    row: int
    node: int


@torch.inference_mode()
def measure_states(model: PreTrainedModel) -> list[StateMemory]:
    """Measure the states of every mixer of a model, which may be on the meta device.

    Each mixer reads two tokens of a prompt and drafts of one and two nodes, alone.
    """
    mixers = find_mixers(model)
    text = model.config.get_text_config(decoder=True)
    cache = RaggedCache(model.config, 1, 0, torch.device("cpu"))
    cache.begin_prefill(0, 2)
    found = []
    for layer, mixer in zip(cache.recurrent, mixers, strict=True):
        place = execution_device(mixer)
        hidden = torch.zeros(1, 2, text.hidden_size, device=place, dtype=model.dtype)
        told = {cache_name(type(mixer).forward): cache}
        mixer(hidden, **told)
        sizes = []
        for count in (1, 2):
            nodes = Draft.chain(torch.zeros(1, count, dtype=torch.long), DraftKind.POINT).nodes
            with mixer_on_tree(mixer, layer, Paths.of(nodes, layer.taps).to(layer.place)):
                mixer(hidden[:, :count], **told)
            sizes.append(layer.scored.nbytes())
        is_closed = closed_form(mixer) is not None
        found.append(StateMemory(type(mixer).__name__, is_closed, layer.nbytes(), sizes[1] - sizes[0]))
    return found


def check_draft(rows: int, nodes: int, node_bytes: int, device: torch.device) -> None:
    """Check that what recurrent layers keep of a draft fits in the memory that is free.

    Raises:
        InputError: it does not; the message says how many tokens would.
    """
    free = free_bytes(device)
    if rows * nodes * node_bytes > free:
        fitting = max(0, free // (rows * node_bytes) - 1)
        raise InputError(
            "num_draft_tokens",
            nodes - 1,
            f"at most {fitting}: recurrent layers keep {node_bytes / 1e6:,.1f} MB for each drafted token of "
            f"each of {rows} rows, and {free / 1e6:,.1f} MB are free",
        )


def free_bytes(device: torch.device) -> int:
    """Bytes of memory that are free on a device."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return int(psutil.virtual_memory().available)
