"""`mmspec convert`: official checkpoints to folders that `from_pretrained` loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmspec.cli.console import print_result
from mmspec.cli.loading import read_dtype
from mmspec.cli.options import AsJson
from mmspec.errors import InputError

__all__ = ["convert"]


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
