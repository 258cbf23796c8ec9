"""One store for heads of many tasks (EMR-Merging, 2405.17461): elect a vector, mask it, rescale it.

All heads were trained from one base. With t_m the difference of head m from it, the store has one vector, of
the sign of the sum of all t_m and the largest magnitude among those that agree; for each head a bit for each
weight whose t_m agrees; and a factor for each tensor, which restores the mean of |t_m|. A store is a dict of
tensors, as in its file: "base/NAME", "elected/NAME", "mask/TASK/NAME" and "scale/TASK/NAME".
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from mmspec.errors import InputError

Weights = Mapping[str, Tensor]


def merge_heads(base: Weights, heads: Mapping[str, Weights]) -> dict[str, Tensor]:
    """Return the store of heads by task.

    Raises:
        InputError: a head has other tensors than the base.
    """
    shapes = {name: each.shape for name, each in base.items()}
    for task, head in heads.items():
        if {name: each.shape for name, each in head.items()} != shapes:
            raise InputError("heads", task, "must have the tensors of the base, in the same shapes")
    store = {f"base/{name}": each for name, each in base.items()}
    for name, start in base.items():
        moves = torch.stack([head[name].float() - start.float() for head in heads.values()])
        sign = moves.sum(0).sign()
        agrees = moves * sign > 0
        elected = sign * (moves.abs() * agrees).amax(0)
        store[f"elected/{name}"] = elected.to(next(iter(heads.values()))[name].dtype)
        for task, move, mask in zip(heads, moves, agrees, strict=True):
            store[f"mask/{task}/{name}"] = torch.from_numpy(np.packbits(mask.flatten().numpy()))
            kept = (elected.abs() * mask).sum().clamp_min(torch.finfo(torch.float32).tiny)
            store[f"scale/{task}/{name}"] = move.abs().sum() / kept
    return store


def restore_head(store: Weights, task: str) -> dict[str, Tensor]:
    """Return the weights of a task's head, in the dtype of the merged heads.

    Raises:
        InputError: the store has no such task.
    """
    tasks = {name.split("/")[1] for name in store if name.startswith("mask/")}
    if task not in tasks:
        raise InputError("task", task, f"must be one of {', '.join(sorted(tasks))}")
    restored = {}
    for name in [key.removeprefix("base/") for key in store if key.startswith("base/")]:
        elected = store[f"elected/{name}"]
        mask = np.unpackbits(store[f"mask/{task}/{name}"].numpy(), count=elected.numel())
        move = store[f"scale/{task}/{name}"] * torch.from_numpy(mask).view_as(elected) * elected.float()
        restored[name] = (store[f"base/{name}"].float() + move).to(elected.dtype)
    return restored
