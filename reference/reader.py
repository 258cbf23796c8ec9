"""Training of the attribute reader, which judges generated images: dense labels on real scenes alone.

A judge that had seen reconstructions or drawn images would forgive what a person would not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

import numpy as np

from mmspec.errors import InputError
from mmspec.registry import did_you_mean
from mmspec.scenes import (
    BACKGROUNDS,
    COLOURS,
    IMAGE_TOKENS,
    MAX_OBJECTS,
    PATTERNS,
    SHAPES,
    SIZES,
    training_seeds,
)
from mmspec.scenes.reader import AttributeReader, AttributeReaderConfig, load_reader
from mmspec.training.record import donor, save_trained, training_record
from mmspec.training.run import RunOptions, Stage, Training, flush_subnormals, held_out_figures
from reference import TRAIN
from reference.image_data import IMAGE_SIZE, READER_PATCH
from reference.vlm_data import PatchBatch, patch_batch
from reference.vlm_model import PatchLoss

__all__ = ["build_reader", "train_reader"]

WIDTHS_AND_LAYERS = {"base": (128, 4), "tiny": (32, 1)}
CHECK_SCENES = 128
DEFAULT_MINUTES = 10.0
STAGE = 7  # apart from the other trainings' stages, so that no two draw the same scenes


def build_reader(size: str = "base") -> AttributeReader:
    """Build a reader of 64-pixel scenes with random weights."""
    if size not in WIDTHS_AND_LAYERS:
        raise InputError("size", size, did_you_mean(size, WIDTHS_AND_LAYERS))
    width, layers = WIDTHS_AND_LAYERS[size]
    config = AttributeReaderConfig(
        attribute_names=["size", "colour", "pattern", "shape"],
        attribute_values=[list(SIZES), list(COLOURS), list(PATTERNS), list(SHAPES)],
        backgrounds=list(BACKGROUNDS),
        max_objects=MAX_OBJECTS,
        vision={
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": width // 32,
            "image_size": IMAGE_SIZE,
            "patch_size": READER_PATCH,
            "projection_dim": width,
        },
    )
    return AttributeReader(config)


@flush_subnormals()
def train_reader(
    out: str | Path, *, start: str | Path | None = None, size: str = "base", **how: Unpack[RunOptions]
) -> Path:
    """Train a reader of scenes and save it as a folder that `AttributeReader.from_pretrained` loads.

    Args:
        out: the folder to write.
        start: a trained reader to begin with, instead of random weights.
        size: "base", or "tiny" (for tests).
        how: see `RunOptions`; by default 10 minutes, of 64 scenes a step and process.

    Returns:
        The folder. Its `training.json` records how it was made.
    """
    out = Path(out)
    training = Training(out, how, minutes=DEFAULT_MINUTES, batch_size=64)
    accelerator = training.accelerator
    reader, before = build_reader(size), []
    if start is not None:
        before = _take_weights(reader, Path(start))
    training.train(_stage(training, reader))
    if accelerator.is_main_process:
        options = {"out": out, "size": size, **training.length, "from": start}
        save_trained(reader, out, training_record(f"{TRAIN} reader", options, training, reader, before))
    accelerator.wait_for_everyone()
    return out


def _take_weights(reader: AttributeReader, folder: Path) -> list[dict[str, Any]]:
    """Take over a trained reader; returns the stages of its training."""
    with donor(folder, "a reader that `python -m reference train reader` wrote, of the same size") as stages:
        reader.load_state_dict(load_reader(folder).state_dict())
    return stages


def _stage(training: Training, reader: AttributeReader) -> Stage:
    def make(step: int) -> PatchBatch:
        process, count = training.accelerator.process_index, training.batch_size
        return _batch(training_seeds(training.seed, STAGE, step, process, count))

    check = held_out_figures(_batch(np.arange(CHECK_SCENES)), training.accelerator.device)
    width = int(reader.tower.config.hidden_size)
    return Stage("reader", PatchLoss(reader.tower, width, reader.heads), make, check)


def _batch(seeds: np.ndarray) -> PatchBatch:
    return patch_batch(seeds, READER_PATCH, size=IMAGE_SIZE, profile=IMAGE_TOKENS)
