"""Weights and optimizer states that each process holds a part of (FSDP 2), made whole and cut up again."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, TypeVar

import torch
from accelerate.utils import recursively_apply
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = ["load_whole", "twin", "whole"]

M = TypeVar("M", bound=nn.Module)


def twin(module: M) -> M:
    """Copy a module with its weights; plain attributes, such as a frozen target, are shared."""
    shared = {id(value): value for value in vars(module).values() if not isinstance(value, dict)}
    return deepcopy(module, shared)


def whole(state: Any) -> Any:
    """Gather the sharded tensors of a state dict, in host memory; the others stay as they are.

    It is a collective operation: every process has to call it, on the same keys in the same order.
    """
    return recursively_apply(
        lambda shard: shard.full_tensor().cpu(), state, test_type=lambda value: isinstance(value, DTensor)
    )


def load_whole(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's state that `whole` made; every process keeps its part of what is sharded."""
    optimizer.load_state_dict(state)
    for parameter, kept in optimizer.state.items():
        if isinstance(parameter, DTensor):
            for name, value in kept.items():
                if value.shape == parameter.shape:  # numbers of steps are not sharded
                    mesh, placements = parameter.device_mesh, parameter.placements
                    kept[name] = distribute_tensor(value, mesh, placements, src_data_rank=None)
