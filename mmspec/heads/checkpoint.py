"""Loading of heads that draft: folders of `mmspec train drafter`, and those that authors publish."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mmspec.errors import CheckpointError, InputError
from mmspec.heads.published import Layout
from mmspec.models.checkpoint import bytes_of, check_source, check_weights, load_checked, load_config
from mmspec.models.official_files import read_config
from mmspec.plugins import HEADS

logger = logging.getLogger(__name__)

FILES = ["*.json", "*.safetensors", "*.bin", "*.pt"]
KEPT = "_keep_in_fp32_modules_strict"


def check_head(name: str, model: PreTrainedModel) -> PreTrainedModel:
    """The loaded model itself, or the head that a class of transformers is run as.

    Raises:
        InputError: it is no head that the drafter of that name runs.
    """
    kind: Any = HEADS[name].load("model")
    if hasattr(kind, "adopt") and not isinstance(model, kind):
        adopted: PreTrainedModel = kind.adopt(model)
        return adopted
    if not isinstance(model, kind):
        others = [other for other, head in HEADS.items() if isinstance(model, head.load("model"))]
        raise InputError("drafter", type(model).__name__, what_writes(name) + what_takes(others))
    head: PreTrainedModel = model
    return head


def what_writes(name: str) -> str:
    """The heads that are allowed, in words."""
    if HEADS[name].loss is None:
        return f"a model for {name!r}, as it is published"
    inside = " or a checkpoint of the target that holds one" if HEADS[name].in_checkpoint else ""
    return f"a head for {name!r}, as `mmspec train drafter --method {name}` writes it{inside}"


def what_takes(names: Collection[str]) -> str:
    """The accelerators that take a head, in words that go on with a message; empty where there is none."""
    kinds = " or ".join(map(repr, names))
    return f"; this is a head for {kinds}: use accelerator={kinds}" if names else ""


def heads_in(folder: Path) -> list[str]:
    """The heads that a folder may hold, by name: as `mmspec train drafter` writes them, or as published.

    There may be several: the kind itself comes first, then those that it builds on. Published DFlash and
    DSpark heads differ in their configs alone.

    Raises:
        CheckpointError: its config or its weights are damaged.
    """
    kinds = {name: head.load("model").config_class for name, head in HEADS.items()}
    stored = read_config(folder).get("model_type") if (folder / "config.json").is_file() else None
    if isinstance(stored, str) and stored in CONFIG_MAPPING:
        made = CONFIG_MAPPING[stored]
        if own := [name for name, kind in kinds.items() if issubclass(made, kind)]:
            return sorted(own, key=lambda name: kinds[name] is not made)
    layouts = {name: head.load("published") for name, head in HEADS.items() if head.published}
    return [name for name, each in layouts.items() if isinstance(each, Layout) and each.holds(folder)]


def check_no_other(name: str, source: str | Path) -> None:
    """Refuse a local folder that holds a head for other accelerators than the named one.

    Raises:
        CheckpointError: it does, or is damaged.
    """
    found = heads_in(Path(source)) if Path(source).is_dir() else []
    if found and name not in found:
        allowed = what_writes(name) if name in HEADS else f"a model for {name!r}"
        raise CheckpointError("drafter", str(source), allowed + what_takes(found))


def load_head(
    name: str,
    drafter: str | Path | PreTrainedModel,
    target: PreTrainedConfig,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """Load the head that a drafter runs.

    Args:
        name: a key of `HEADS`.
        drafter: folder or hub id of what `mmspec train drafter` wrote or of what the method's authors
            publish, or a loaded head.
        target: config of the model whose hidden states it reads.
        dtype, device: of those; None for the format that it is stored in.

    Raises:
        CheckpointError: it cannot be loaded, or is a model of another kind.
        InputError: a loaded model that is no such head.
    """
    if isinstance(drafter, PreTrainedModel):
        return check_head(name, drafter)
    kind: Any = HEADS[name].load("model")  # its folders become known to the auto classes
    source = check_source(drafter, "drafter")
    folder = source if HEADS[name].published is None else downloaded(source)
    if (published := read_published(name, Path(folder), target)) is not None:
        check_weights(published, {}, source, "drafter")
        logger.info("drafter: %.1f MB of weights, as published", bytes_of(published) / 1e6)
        place_head(published, dtype, device)
        published.eval()
        return published
    check_no_other(name, folder)
    config = load_config(source, argument="drafter")
    if not isinstance(config, kind.config_class):
        raise CheckpointError("drafter", f"{source}: {config.model_type}", what_writes(name))
    made: Any = MODEL_MAPPING[type(config)]  # a kind that builds on the drafter's own among them
    stored = {"config": config, "dtype": dtype, "device_map": {"": device}, "use_safetensors": None}
    head: PreTrainedModel = load_checked(made, source, "drafter", **stored)
    logger.info("drafter: %.1f MB of weights", bytes_of(head) / 1e6)
    return head


def place_head(head: PreTrainedModel, dtype: torch.dtype | None, device: torch.device | str) -> None:
    """Move a head, and give its weights this dtype as `from_pretrained` does; None leaves them theirs.

    Tables that are computed keep theirs, and so does what a family keeps precise: rounded rotary frequencies
    place tokens elsewhere, a rounded bias of a router chooses other experts.
    """
    torch.nn.Module.to(head, device=device)
    inside = [module for module in head.modules() if isinstance(module, PreTrainedModel)]
    precise = {name for module in inside for name in getattr(module, KEPT, None) or ()}
    for name, weight in head.state_dict(keep_vars=True).items():
        if dtype is not None and weight.is_floating_point() and not precise & {*name.split(".")}:
            weight.data = weight.data.to(dtype)


def downloaded(source: str) -> str:
    """A folder as it is; for a hub id the folder of its files, or the id where the hub does not give them."""
    if Path(source).is_dir():
        return source
    try:
        return snapshot_download(source, allow_patterns=FILES)
    except (OSError, ValueError):  # `load_config`, which comes next, says what is wrong
        return source


def read_published(name: str, folder: Path, target: PreTrainedConfig) -> PreTrainedModel | None:
    """The head in a folder that the method's authors wrote; None if this is none of theirs.

    Raises:
        CheckpointError: it is one of theirs, but not whole.
    """
    if HEADS[name].published is None or not folder.is_dir():
        return None
    head: PreTrainedModel | None = HEADS[name].load("published")(folder, target)
    return head


def head_of(source: str) -> str | None:
    """The head that a folder or hub id holds, by name, as of `heads_in`; None for others.

    Raises:
        CheckpointError: the folder has no usable config.
    """
    name = check_source(source, "drafter")
    if found := heads_in(Path(name)) if Path(name).is_dir() else []:
        return found[0]
    kinds = {name: head.load("model").config_class for name, head in HEADS.items()}
    config = load_config(name, argument="drafter")
    return next((name for name, kind in kinds.items() if isinstance(config, kind)), None)
