"""Projections of one input, merged: their weights stand one behind the other, and one product computes them.

Weights are moved once, into one tensor of which the parameters become views. Nothing is held twice, and
loading, saving, training and adapters see the parameters that they know. Where the weights have come apart
since (a model moved to another device), or a module has a hook or an adapter, the modules are called.

A product with more columns may sum in another order, so that results can differ in the last bits from those
of the parts. See docs/explanation/exactness.md.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.modules import module as of_all

from mmspec.models.free_memory import free_bytes
from mmspec.models.replaced import Confined, forward_name

__all__ = ["is_bare", "is_own", "merge_projections", "project"]

#: Names of projections that read the same input.
QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
#: Modules whose hooks only watch: those that collect hidden states, and those that name modules in a capture.
WATCHING = "mmspec.targets.steps"
#: Modules whose weights are merged, or never will be: CUDA graphs hold their addresses.
DECIDED: WeakSet[nn.Module] = WeakSet()
LOCK = threading.Lock()


def project(module: nn.Module, names: Sequence[str], x: Tensor) -> Sequence[Tensor]:
    """Apply the named projections of a module to x [..., D], in one product if their weights are adjacent.

    Returns:
        [..., d] of each projection; slices of one tensor if they are merged.
    """
    parts = [getattr(module, name) for name in names]
    if all(map(is_plain, parts)):
        weight, biases = adjacent([part.weight for part in parts]), [part.bias for part in parts]
        bias = None if biases[0] is None else adjacent(biases)
        if weight is not None and (bias is not None or not any(each is not None for each in biases)):
            found: Sequence[Tensor] = linear(x, weight, bias).split([part.out_features for part in parts], -1)
            return found
    return [part(x) for part in parts]


def merge_projections(modules: Iterable[nn.Module]) -> None:
    """Merge the projections of modules, where they are plain and memory for a copy of one group is free.

    Each module is considered once in its lifetime, before its first draft is scored: later, CUDA graphs may
    read its weights.
    """
    with LOCK:  # other threads must not read weights while they move
        moved = set()
        for module in modules:
            if module in DECIDED:
                continue
            DECIDED.add(module)
            for names in (QUERY_KEY_VALUE, GATE_UP):
                parts: list[Any] = [getattr(module, name, None) for name in names]
                if all(map(is_plain, parts)) and merge(parts):
                    moved.add(parts[0].weight.device)
        for device in moved:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                torch.cuda.empty_cache()  # the parts' memory has other sizes than what is allocated next


def merge(parts: Sequence[nn.Linear]) -> bool:
    """Move the weights of linear layers into one tensor, and the biases into another.

    Returns:
        False, and nothing is moved, if they differ in kind, share memory, or memory is short.
    """
    weights, biases = [part.weight for part in parts], [part.bias for part in parts]
    groups: list[list[Any]] = [weights] if biases[0] is None else [weights, biases]
    for group in groups:
        # a parameter that is a view, or that several modules share, would be held twice
        alone = all(each is not None and each.untyped_storage().nbytes() == each.nbytes for each in group)
        # one made in inference mode cannot get other data
        if (
            not alone
            or any(each.is_inference() for each in group)
            or len({(each.dtype, each.device, each.shape[1:]) for each in group}) > 1
        ):
            return False
        if len({each.data_ptr() for each in group}) < len(group):
            return False
    if biases[0] is None and any(each is not None for each in biases):
        return False
    if 2 * sum(each.nbytes for each in weights) > free_bytes(weights[0].device):
        return False
    with torch.inference_mode(False), torch.no_grad():  # they stay parameters that can be trained
        for group in groups:
            together = torch.cat([each.detach() for each in group])
            for parameter, part in zip(group, together.split([len(each) for each in group]), strict=True):
                parameter.data = part
    return True


def adjacent(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """View tensors [n_i, ...] as one [sum of n_i, ...] if they stand one behind the other; else None."""
    first, rows, end = tensors[0], 0, None
    for each in tensors:
        if each is None or first is None or not each.is_contiguous():
            return None
        place = each.untyped_storage().data_ptr(), each.data_ptr(), each.dtype, each.shape[1:]
        if end is not None and place != end:
            return None
        end = place[0], place[1] + each.nbytes, place[2], place[3]
        rows += len(each)
    if first is None:
        return None
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def is_plain(module: object) -> bool:
    """Whether a module is a linear layer and nothing else: no hook, no adapter, no quantised weight."""
    if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter or not is_bare(module):
        return False
    return module.weight.is_floating_point() and not module.weight.is_meta


def is_own(module: nn.Module) -> bool:
    """Whether a module's `forward` is that of its class, for every thread."""
    stands = vars(module).get(forward_name(module))
    if isinstance(stands, Confined):  # another thread is scoring
        stands = stands.stood
    return stands is None or getattr(stands, "__func__", None) is type(module).forward


def is_bare(module: nn.Module) -> bool:
    """Whether calling a module only calls its class's `forward`."""
    hooks = chain(
        module._forward_hooks.values(),
        module._forward_pre_hooks.values(),
        of_all._global_forward_hooks.values(),
        of_all._global_forward_pre_hooks.values(),
    )
    others = (hook for hook in hooks if getattr(hook, "func", hook).__module__ != WATCHING)
    return is_own(module) and "_hf_hook" not in vars(module) and next(others, None) is None
