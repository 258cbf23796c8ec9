"""`mmspec convert` and `mmspec export`: official checkpoints to folders, and drafters for other engines."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspec.cli.console import print_result
from mmspec.cli.loading import announce, read_dtype
from mmspec.cli.options import AsJson
from mmspec.errors import CheckpointError, InputError
from mmspec.open_types import Json

__all__ = ["convert", "export"]


def convert(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="File such as c2i_B_256.pt, vq_ds16_c2i.pt or var_d16.pth; LANTERN's folder; Lumina-mGPT's; "
            "or MAR's checkpoint-last.pth or its folder.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; must be new or empty.")],
    image_size: Annotated[
        int | None,
        typer.Option(help="Pixels per side of the training images, if the file name does not contain them."),
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help="Number of attention heads, for sizes that were not published.")
    ] = None,
    control_resize: Annotated[
        str | None,
        typer.Option(
            help="For ControlAR: nearest or bicubic, if the file name does not contain the kind of control."
        ),
    ] = None,
    vae: Annotated[Path | None, typer.Option(help="For MAR: its kl16.ckpt, or a diffusers folder.")] = None,
    dtype: Annotated[str, typer.Option(help="auto (as in the file), float32, bfloat16 or float16.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Convert an official LlamaGen, ControlAR, LPD, NAR, PAR, VAR, MAR, Lumina-mGPT or image tokenizer.

    Keys and shapes are checked first, code in the file is never run, and the folder is
    written completely or not at all.

    Example:
        mmspec convert path/to/c2i_B_256.pt --out llamagen-b-256
        mmspec convert path/to/lpd_l_256.pth --out lpd-l-256
        mmspec convert path/to/hed.safetensors --image-size 512 --out controlar-hed
        mmspec convert path/to/PAR-XL-4x.pt --image-size 384 --out par-xl-4x
        mmspec convert path/to/var_d16.pth --out var-d16
        mmspec convert path/to/vae_ch160v4096z32.pth --out var-d16/vq
        mmspec convert path/to/Lumina-mGPT-7B-768 --out lumina-768
        mmspec convert path/to/mar_large --vae path/to/kl16.ckpt --out mar-large
    """
    from mmspec.plugins import converter_of, load

    chosen, converter = read_dtype(dtype), converter_of(checkpoint)
    asked = {"control_resize": control_resize, "vae": vae, "image_size": image_size, "num_heads": heads}
    given = {name: value for name, value in asked.items() if value is not None}
    for name, value in given.items():
        if name in converter.refuses:
            option = "--heads" if name == "num_heads" else f"--{name.replace('_', '-')}"
            shown = str(value) if isinstance(value, Path) else value
            raise InputError(
                option, shown, f"cannot be used with {checkpoint.name}: {converter.refuses[name]}"
            )
    written = load(converter.convert)(checkpoint, out, **given, dtype=chosen)
    print_result(written, written["path"], as_json)


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig


class LayoutName(StrEnum):
    """Layouts of `mmspec export`."""

    speculators = "speculators"
    specforge = "specforge"
    transformers = "transformers"
    checkpoint = "checkpoint"


def export(
    drafter: Annotated[str, typer.Argument(metavar="DRAFTER", help="Folder or hub id of a drafter.")],
    out: Annotated[Path, typer.Option(help="Folder to write; must be new or empty.")],
    to: Annotated[
        LayoutName,
        typer.Option(
            help="speculators (vLLM) or specforge (SGLang) for EAGLE-3 heads; specforge (vLLM, SGLang) for "
            "DFlash and DSpark heads; checkpoint for MTP heads, in a copy of the target's checkpoint; "
            "transformers for draft models."
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(help="Folder or hub id of the target of a head, as it will be served."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="auto (as in the drafter), float32, bfloat16 or float16.")
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Write a trained drafter for vLLM, SGLang or assisted generation in transformers.

    The folder is written completely or not at all.

    Example:
        mmspec export assets/scenes-llava-small --out assistant --to transformers
        mmspec export path/to/eagle3 --out head --to specforge --target path/to/model
        mmspec export path/to/mtp --out model-with-mtp --to checkpoint --target path/to/model
    """
    announce(drafter)
    chosen = read_dtype(dtype)
    if to is LayoutName.transformers:
        if target is not None:
            rule = "cannot be used for a draft model, which fits any target with its vocabulary"
            raise InputError("--target", target, rule)
        written = write_assistant(drafter, out, chosen)
    elif target is None:
        raise InputError("--target", None, "must be the folder or hub id of the head's target")
    else:
        written = write_head(drafter, to, target, out, chosen)
    print_result({"layout": to.value, **written}, f"{out}: {to.value}", as_json)


def write_head(drafter: str, layout: LayoutName, target: str, out: Path, dtype: torch.dtype | None) -> Json:
    """Write a head (MTP heads in a copy of the target's checkpoint); returns its record."""
    import torch

    from mmspec.atomic_file import new_folder
    from mmspec.heads.checkpoint import head_of, load_head
    from mmspec.models.checkpoint import check_source, load_config
    from mmspec.plugins import HEADS, load

    source, in_copy = check_source(target, "target"), layout is LayoutName.checkpoint
    if in_copy and not Path(source).is_dir():
        raise InputError("--target", target, "must be a folder, because it is copied")
    config = load_config(source, argument="target")
    able = {name: head.exports[layout] for name, head in HEADS.items() if layout in head.exports}
    if (kind := head_of(drafter) or next(iter(able))) not in able:
        rule = f"must be a head for {' or '.join(map(repr, able))} with --to {layout.value}"
        raise CheckpointError("drafter", f"{drafter}: a head for {kind!r}", rule)
    writer = able[kind]
    head: Any = load_head(kind, drafter, config, dtype or torch.float32, torch.device("cpu"))
    if dtype is None and (stored := getattr(head.config, "dtype", None)) is not None:
        head.to(stored)
    check_target(head, config, target)
    with new_folder(out) as folder:
        written = load(writer)(head, layout.value, source if in_copy else target, config, folder)
    weights = sum(weight.numel() for weight in head.parameters())
    return {"path": str(out), "target": target, **written, "parameters": weights}


def check_target(head: Any, config: PreTrainedConfig, name: str) -> None:
    """Raise InputError unless a head fits a target of that config."""
    text = config.get_text_config(decoder=True)
    wanted = {"hidden_size": head.config.hidden_size, "num_hidden_layers": head.config.target_layers}
    for key, value in wanted.items():
        given = int(getattr(text, key))
        if value and given != value:
            raise InputError(
                "--target", f"{name}: {key} {given}", f"must be the head's target, whose {key} is {value}"
            )
    if head.config.vocabulary > int(text.vocab_size):
        rule = f"must be the head's target, which has {head.config.vocabulary} tokens"
        raise InputError("--target", f"{name}: vocab_size {text.vocab_size}", rule)


def write_assistant(drafter: str, out: Path, dtype: torch.dtype | None) -> Json:
    """Write a draft model as a folder of transformers; returns `path`, `class` and `parameters`."""
    from mmspec.atomic_file import new_folder
    from mmspec.heads.checkpoint import head_of
    from mmspec.models.checkpoint import check_source, load_config, load_model, load_processor

    source = check_source(drafter, "drafter")
    if (kind := head_of(source)) is not None:
        rule = "must be a draft model; export heads with --to speculators, specforge or checkpoint"
        raise CheckpointError("drafter", f"{source}: a head for {kind}", rule)
    config = load_config(source, argument="drafter")
    model = load_model(source, config, argument="drafter", dtype=dtype or "auto")
    processor = load_processor(source, config, argument="drafter")
    with new_folder(out) as folder:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
    return {"path": str(out), "class": type(model).__name__, "parameters": model.num_parameters()}
