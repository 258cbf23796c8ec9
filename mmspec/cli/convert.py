"""`mmspec convert` and `mmspec export`: folders of official checkpoints, and our heads for other engines."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspec.cli.console import print_result
from mmspec.cli.loading import read_dtype
from mmspec.cli.options import AsJson
from mmspec.errors import CheckpointError, InputError
from mmspec.open_types import Json

__all__ = ["convert", "export"]


def convert(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="File such as c2i_B_256.pt, vq_ds16_c2i.pt or var_d16.pth; LANTERN's folder; Lumina-mGPT's; "
            "or MAR's checkpoint-last.pth or its folder."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; must be new or empty.")],
    image_size: Annotated[
        int | None, typer.Option(help="Pixels per side it was trained for, where the name does not say.")
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help="Attention heads, where the size is none of the published.")
    ] = None,
    control_resize: Annotated[
        str | None,
        typer.Option(
            help="Of a ControlAR: nearest or bicubic, where the name does not say what controls it."
        ),
    ] = None,
    vae: Annotated[Path | None, typer.Option(help="Of a MAR: its kl16.ckpt, or a diffusers folder.")] = None,
    dtype: Annotated[str, typer.Option(help="auto (the file's own), float32, bfloat16 or float16.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Convert an official LlamaGen, ControlAR, LPD, NAR, PAR, VAR, MAR, Lumina-mGPT or image tokenizer.

    Keys and shapes are checked first, no code in the file is run, and the folder
    appears complete or not at all.

    Example:
        mmspec convert c2i_B_256.pt --out llamagen-b-256
        mmspec convert lpd_l_256.pth --out lpd-l-256
        mmspec convert hed.safetensors --image-size 512 --out controlar-hed
        mmspec convert PAR-XL-4x.pt --image-size 384 --out par-xl-4x
        mmspec convert var_d16.pth --out var-d16
        mmspec convert vae_ch160v4096z32.pth --out var-d16/vq
        mmspec convert path/to/Lumina-mGPT-7B-768 --out lumina-768
        mmspec convert pretrained_models/mar/mar_large --vae kl16.ckpt --out mar-large
    """
    from mmspec.families.chameleon.norms import convert_chameleon, is_chameleon
    from mmspec.families.llamagen.conversion import convert_checkpoint
    from mmspec.families.mar import convert_mar, is_mar

    chosen = read_dtype(dtype)
    if control_resize is not None and (is_mar(checkpoint) or is_chameleon(checkpoint)):
        raise InputError("--control-resize", control_resize, "nothing: it goes with a ControlAR")
    if is_mar(checkpoint):
        if image_size is not None:
            raise InputError("--image-size", image_size, "nothing: the weights of a MAR say it")
        written = convert_mar(checkpoint, out, vae=vae, num_heads=heads, dtype=chosen)
    elif vae is not None:
        raise InputError("--vae", str(vae), "nothing: it goes with a MAR")
    elif is_chameleon(checkpoint):
        for option, value in (("--image-size", image_size), ("--heads", heads)):
            if value is not None:
                raise InputError(option, value, "nothing: the config of a Chameleon says it")
        written = convert_chameleon(checkpoint, out, chosen)
    else:
        sizes = {"image_size": image_size, "num_heads": heads}
        written = convert_checkpoint(checkpoint, out, **sizes, control_resize=control_resize, dtype=chosen)
    print_result(written, written["path"], as_json)


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig


class LayoutName(StrEnum):
    """Layouts that can be written."""

    speculators = "speculators"
    specforge = "specforge"
    transformers = "transformers"
    checkpoint = "checkpoint"


def export(
    drafter: Annotated[str, typer.Argument(help="Folder or hub id of a drafter.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must be new or empty.")],
    to: Annotated[
        LayoutName,
        typer.Option(
            help="speculators (vLLM) or specforge (SGLang) for EAGLE-3 heads; checkpoint for MTP heads, in a "
            "copy of their target's; transformers for draft models."
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(help="Folder or hub id of the model that a head drafts for, as it will be served."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="auto (the drafter's own), float32, bfloat16 or float16.")
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Write a trained drafter for vLLM, SGLang or transformers' own assisted generation.

    The folder appears complete or not at all.

    Example:
        mmspec export my-eagle3 head --to speculators --target my-model
        mmspec export my-mtp my-model-with-mtp --to checkpoint --target my-model
        mmspec export assets/scenes-llava-small assistant --to transformers
    """
    chosen = read_dtype(dtype)
    if to is LayoutName.transformers:
        if target is not None:
            allowed = "nothing: a draft model is served with any target of its words"
            raise InputError("--target", target, allowed)
        written = write_assistant(drafter, out, chosen)
    elif target is None:
        raise InputError("--target", None, "folder or hub id of the model that the head drafts for")
    else:
        written = write_head(drafter, to, target, out, chosen)
    print_result({"layout": to.value, **written}, f"{out}: {to.value}", as_json)


def write_head(drafter: str, layout: LayoutName, target: str, out: Path, dtype: torch.dtype | None) -> Json:
    """Write a head, of MTP inside a copy of its target's checkpoint; returns what there is to say of it."""
    import torch
    from safetensors.torch import save_file

    from mmspec.atomic_file import new_folder
    from mmspec.heads.checkpoint import load_head
    from mmspec.models.checkpoint import check_source, load_config
    from mmspec.training.export import export_head, write_checkpoint

    source, in_copy = check_source(target, "target"), layout is LayoutName.checkpoint
    if in_copy and not Path(source).is_dir():
        raise InputError("--target", target, "a folder: it is copied")
    config = load_config(source, argument="target")
    kind = "mtp" if in_copy else "eagle3"
    head: Any = load_head(kind, drafter, config, dtype or torch.float32, torch.device("cpu"))
    if dtype is None and (stored := getattr(head.config, "dtype", None)) is not None:
        head.to(stored)
    check_target(head, config, target)
    about: Json = {"path": str(out), "target": target}
    if in_copy:
        with new_folder(out) as folder:
            write_checkpoint(head, Path(source), folder)
    else:
        described, tensors = export_head(head, layout, target, config)
        with new_folder(out) as folder:
            (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        about["taps"] = list(head.taps)
    return about | {"parameters": sum(weight.numel() for weight in head.parameters())}


def check_target(head: Any, config: PreTrainedConfig, name: str) -> None:
    """Raise InputError unless a head was made for a target of that config."""
    text = config.get_text_config(decoder=True)
    wanted = {"hidden_size": head.config.hidden_size, "num_hidden_layers": head.config.target_layers}
    for key, value in wanted.items():
        given = int(getattr(text, key))
        if value and given != value:
            raise InputError("--target", f"{name}: {key} {given}", f"the head's own target, of {value}")
    if head.config.vocabulary > int(text.vocab_size):
        allowed = f"the head's own target, which knows {head.config.vocabulary} tokens"
        raise InputError("--target", f"{name}: vocab_size {text.vocab_size}", allowed)


def write_assistant(drafter: str, out: Path, dtype: torch.dtype | None) -> Json:
    """Write a draft model as one folder that transformers loads; returns `path`, `class` and `parameters`."""
    from mmspec.atomic_file import new_folder
    from mmspec.heads.checkpoint import head_of
    from mmspec.models.checkpoint import check_source, load_config, load_model, load_processor

    source = check_source(drafter, "drafter")
    if (kind := head_of(source)) is not None:
        allowed = "a whole model: a head works on its target's hidden states, for speculators or specforge"
        raise CheckpointError("drafter", f"{source}: a head for {kind}", allowed)
    config = load_config(source, argument="drafter")
    model = load_model(source, config, argument="drafter", dtype=dtype or "auto")
    processor = load_processor(source, config, argument="drafter")
    with new_folder(out) as folder:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
    return {"path": str(out), "class": type(model).__name__, "parameters": model.num_parameters()}
