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
    from mmspec.plugins import converter_of, load

    chosen, converter = read_dtype(dtype), converter_of(checkpoint)
    asked = {"control_resize": control_resize, "vae": vae, "image_size": image_size, "num_heads": heads}
    given = {name: value for name, value in asked.items() if value is not None}
    for name, value in given.items():
        if name in converter.refuses:
            option = "--heads" if name == "num_heads" else f"--{name.replace('_', '-')}"
            shown = str(value) if isinstance(value, Path) else value
            raise InputError(option, shown, f"nothing: {converter.refuses[name]}")
    written = load(converter.convert)(checkpoint, out, **given, dtype=chosen)
    print_result(written, written["path"], as_json)
