"""Networks that `mmspec-extras` trains: loading, and copies for a target."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from mmspec.errors import CheckpointError, InputError
from mmspec.models.checkpoint import load_checked

Network = TypeVar("Network", bound=PreTrainedModel)


def read_trained(kind: type[Network], source: Any, argument: str, what: str) -> Network:
    """Return a loaded network, or load one from a folder that `mmspec-extras train-{what}` wrote.

    Raises:
        CheckpointError: the folder has none, or its weights are missing, unused or not finite; the error
            names `argument`.
    """
    if isinstance(source, kind):
        source.eval()
        return source
    if not isinstance(source, str | Path) or not Path(source, "config.json").is_file():
        raise CheckpointError(argument, source, f"must be a folder that `mmspec-extras train-{what}` wrote")
    network: Network = load_checked(kind, str(source), argument, what)
    return network


def copied_to(device: torch.device, network: Network | None, argument: str, what: str) -> Network:
    """Return a copy of a network on a device; the user's own stays where it is.

    Raises:
        InputError: there is no network; the error names `argument`.
    """
    if network is None:
        raise InputError(argument, None, f"must be a folder that `mmspec-extras train-{what}` wrote")
    copied: Network = nn.Module.to(copy.deepcopy(network), device)
    return copied
