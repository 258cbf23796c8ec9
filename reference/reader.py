"""Training of the attribute reader, which scores generated images.

The reader learns dense labels on real scenes only. If it had seen reconstructions or generated images, it
would accept errors that a person sees.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Unpack

import numpy as np

from mmspec.registry import require_known
from mmspec.scenes import (
    BACKGROUNDS,
    COLOURS,
    IMAGE_TOKENS,
    MAX_OBJECTS,
    PATTERNS,
    SHAPES,
    SIZES,
)
from mmspec.scenes.reader import AttributeReader, AttributeReaderConfig, load_reader
from mmspec.training.record import save_trained, taken_over
from mmspec.training.run import RunOptions, Training, flush_subnormals
from reference.image_data import IMAGE_SIZE, READER_PATCH
from reference.trainer import finish, train_on_scenes
from reference.vlm_data import PatchBatch, patch_batch
from reference.vlm_model import PatchLoss

__all__ = ["build_reader", "train_reader"]

WIDTHS_AND_LAYERS = {"base": (128, 4), "tiny": (32, 1)}
CHECK_SCENES = 128
DEFAULT_MINUTES = 10.0
STAGE = 7


def build_reader(size: str = "base") -> AttributeReader:
    """Build a reader of images of 64 x 64 pixels, with random weights."""
    require_known("size", size, WIDTHS_AND_LAYERS)
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
        start: a trained reader to start from, instead of random weights.
        size: "base", or "tiny" (for tests).
        how: see `RunOptions`; by default 10 minutes, with 64 scenes per step and process.

    Returns:
        The folder. Its `training.json` records the training.
    """
    training = Training(Path(out), how, minutes=DEFAULT_MINUTES, batch_size=64)
    reader = build_reader(size)
    before = taken_over(
        start,
        "a reader of the same size, written by `python -m reference train reader`",
        lambda folder: reader.load_state_dict(load_reader(folder).state_dict()),
    )

    def batch(seeds: np.ndarray) -> PatchBatch:
        return patch_batch(seeds, READER_PATCH, size=IMAGE_SIZE, profile=IMAGE_TOKENS)

    learner = PatchLoss(reader.tower, int(reader.tower.config.hidden_size), reader.heads)
    train_on_scenes(training, learner, batch, batch(np.arange(CHECK_SCENES)), title="reader", stage=STAGE)
    options = {"size": size, **training.length, "from": start}
    save = partial(save_trained, reader, Path(out))
    return finish(training, Path(out), save, command="reader", options=options, model=reader, before=before)
