"""Targets whose cache is compressed.

Rounding turns a difference in the last bits, which forward passes of one node and of many have, into a whole
step. Keys of a reply are therefore computed again when their block is complete, in one forward pass of that
block, so that what is packed is bitwise the same with every accelerator.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmspec.core.draft import Nodes
from mmspec.core.interfaces import TargetOutput
from mmspec.errors import InputError, UnsupportedModelError
from mmspec.open_types import Inputs
from mmspec.targets.causal import AnyState, CausalTarget
from mmspec_extras.gear.cache import GearCache
from mmspec_extras.gear.packing import Packing

logger = logging.getLogger(__name__)


class GearTarget(CausalTarget):
    """Base class of the targets that `compressed` derives."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._plain = False  # mmspec's attention kernels read unpacked buffers
        if self._changing:
            raise UnsupportedModelError("GEAR needs rotary frequencies that do not depend on the length")

    def compile(self) -> None:
        logger.warning("%s runs uncompiled: its cache is compressed", type(self.model).__name__)

    def _identify(self, prompt: Mapping[str, Tensor], inputs: Inputs, offset: int, model_state: int) -> None:
        """The prefix cache stores no packed keys, and prompts are read in one forward pass."""

    def score_nodes(self, state: AnyState, nodes: Nodes) -> TargetOutput:
        cache: GearCache = state.cache
        plan = cache.plan
        for row, start, tokens in cache.due():
            plan.prefill_row, plan.group, plan.start, plan.tokens = row, None, start, len(tokens)
            places = torch.arange(start, start + len(tokens), device=self.device) + state.offset[row]
            ids = torch.tensor([tokens], device=self.device)
            inputs = {"input_ids": ids, "position_ids": places[None]}
            self._read_chunk(inputs, cache, row, [len(tokens)], whole=True)
        cache.drafted = nodes.tokens
        return super().score_nodes(state, nodes)


def compressed(target: Any, packing: Packing) -> CausalTarget:
    """Return a target of the same model whose cache is compressed.

    Raises:
        InputError: the target draws images or decides places together.
        UnsupportedModelError: rotary frequencies depend on the length. `prefill` raises it for layers without
            full attention.
    """
    other = not isinstance(target, CausalTarget) or target.by_blocks or target.any_order
    if other or target.vector_size or target.grid is not None:
        raise InputError("model", type(target).__name__, "must generate text from left to right")
    cache = type("GearCache", (GearCache,), {"packing": packing})
    kind: Any = type(f"Gear{type(target).__name__}", (GearTarget, type(target)), {"cache_class": cache})
    made: CausalTarget = kind(target.model)
    return made
