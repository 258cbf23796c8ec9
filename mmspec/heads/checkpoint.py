"""Loading of drafting heads: from folders that `mmspec train drafter` or a method's authors wrote."""

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
from mmspec.models.official_files import find_file, read_config
from mmspec.plugins import HEADS

logger = logging.getLogger(__name__)

FILES = ["*.json", "*.safetensors", "*.bin", "*.pt"]
KEPT = "_keep_in_fp32_modules_strict"


def check_head(name: str, model: PreTrainedModel) -> PreTrainedModel:
    """Return the loaded model, or the head that runs it for a class of transformers.

    Raises:
        InputError: the drafter of that name cannot run the model.
    """
    kind: Any = HEADS[name].load("model")
    if hasattr(kind, "adopt") and not isinstance(model, kind):
        adopted: PreTrainedModel = kind.adopt(model)
        return adopted
    if not isinstance(model, kind):
        rule = what_writes(name) + what_takes(heads_of(model))
        raise InputError("drafter", type(model).__name__, rule)
    head: PreTrainedModel = model
    return head


def heads_of(model: PreTrainedModel) -> list[str]:
    """Return the names of the methods whose head a loaded model is."""
    return [name for name, head in HEADS.items() if isinstance(model, head.load("model"))]


def what_writes(name: str) -> str:
    """Return the rule that a drafter must be a head of that method, in words."""
    if HEADS[name].loss is None:
        return f"must be a model for {name!r}, as it is published"
    inside = " or a checkpoint of the target that holds one" if HEADS[name].in_checkpoint else ""
    return f"must be a head for {name!r}, as `mmspec train drafter --method {name}` writes it{inside}"


def what_takes(names: Collection[str]) -> str:
    """Return the end of a message that names the accelerators of a head; empty if there is none."""
    kinds = " or ".join(map(repr, names))
    return f"; use accelerator={kinds} for this head" if names else ""


def heads_in(folder: Path) -> list[str]:
    """Return the names of the heads that a folder may hold, written by mmspec or by a method's authors.

    There may be several: the exact kind comes first, then the kinds that it extends. Published DFlash and
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
    return [name for name, layout in layouts().items() if layout.holds(folder)]


def layouts() -> dict[str, Layout]:
    """Return the layouts of published heads, by the names of the heads."""
    published = {name: head.load("published") for name, head in HEADS.items() if head.published}
    return {name: layout for name, layout in published.items() if isinstance(layout, Layout)}


def check_no_other(name: str, source: str | Path | PreTrainedModel) -> None:
    """Raise an error for a head, loaded or in a local folder, for other accelerators than the named one.

    Raises:
        CheckpointError: it is such a head, or the folder is damaged.
    """
    if isinstance(source, PreTrainedModel):
        found, shown = heads_of(source), type(source).__name__
    else:
        found, shown = heads_in(Path(source)) if Path(source).is_dir() else [], str(source)
    if found and name not in found:
        rule = what_writes(name) if name in HEADS else f"must be a draft model for {name!r}, not a head"
        raise CheckpointError("drafter", shown, rule + what_takes(found))


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
        drafter: folder or hub id of a head that `mmspec train drafter` wrote or that the method's authors
            publish, or a loaded head.
        target: config of the model whose hidden states it reads.
        dtype, device: of the head; None for the number format of its files.

    Raises:
        CheckpointError: it cannot be loaded, or is a model of another kind.
        InputError: a loaded model is not such a head.
    """
    if isinstance(drafter, PreTrainedModel):
        return check_head(name, drafter)
    kind: Any = HEADS[name].load("model")  # registers its config with the auto classes
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
    made: Any = MODEL_MAPPING[type(config)]  # perhaps a kind that extends the drafter's own
    stored = {"config": config, "dtype": dtype, "device_map": {"": device}, "use_safetensors": None}
    head: PreTrainedModel = load_checked(made, source, "drafter", **stored)
    logger.info("drafter: %.1f MB of weights", bytes_of(head) / 1e6)
    return head


def place_head(head: PreTrainedModel, dtype: torch.dtype | None, device: torch.device | str) -> None:
    """Move a head, and cast its weights to a dtype as `from_pretrained` does; None keeps their dtypes.

    Computed tables keep their dtype, and so do weights that a family keeps precise: rounded rotary
    frequencies shift positions, and a rounded bias of a router chooses other experts.
    """
    torch.nn.Module.to(head, device=device)
    inside = [module for module in head.modules() if isinstance(module, PreTrainedModel)]
    precise = {name for module in inside for name in getattr(module, KEPT, None) or ()}
    for name, weight in head.state_dict(keep_vars=True).items():
        if dtype is not None and weight.is_floating_point() and not precise & {*name.split(".")}:
            weight.data = weight.data.to(dtype)


def downloaded(source: str) -> str:
    """Return a folder unchanged; for a hub id its downloaded folder, or the id if the download fails."""
    if Path(source).is_dir():
        return source
    try:
        return snapshot_download(source, allow_patterns=FILES)
    except (OSError, ValueError):  # `load_config`, which runs next, raises an error with the cause
        return source


def read_published(name: str, folder: Path, target: PreTrainedConfig) -> PreTrainedModel | None:
    """Return the head in a folder in the layout of the method's authors; None for other folders.

    Raises:
        CheckpointError: the folder has that layout, but is incomplete.
    """
    if HEADS[name].published is None or not folder.is_dir():
        return None
    head: PreTrainedModel | None = HEADS[name].load("published")(folder, target)
    return head


def recognisable(source: str) -> Path:
    """Return a folder, or for a hub id its folder in the cache, with the files that `heads_in` reads.

    Shards are not downloaded, as their index names the tensors.
    """
    folder = Path(source)
    if folder.is_dir():
        return folder
    try:
        folder = Path(snapshot_download(source, allow_patterns=["*.json"]))
        for files in dict.fromkeys(tuple(layout.files) for layout in layouts().values()):
            for name in files:
                if find_file(folder, files) is None:
                    snapshot_download(source, allow_patterns=[name])
    except (OSError, ValueError):  # `load_config`, which runs next, raises an error with the cause
        pass
    return folder


def head_of(source: str) -> str | None:
    """Return the name of the head that a folder or hub id holds, as in `heads_in`; None for others.

    Raises:
        CheckpointError: there is no usable config, or its config or its weights are damaged.
    """
    name = check_source(source, "drafter")
    if found := heads_in(recognisable(name)):
        return found[0]
    kinds = {name: head.load("model").config_class for name, head in HEADS.items()}
    config = load_config(name, argument="drafter")
    return next((name for name, kind in kinds.items() if isinstance(config, kind)), None)
