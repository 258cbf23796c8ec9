"""Training of the image tokenizer: on pixels first, then also on the attribute reader's features.

Squared error of pixels alone blurs just what tells a star from a cross, and dots from stripes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from diffusers.models.autoencoders.vq_model import VQModel
from safetensors.torch import save_file

from mmspec.errors import InputError
from mmspec.registry import did_you_mean
from mmspec.scenes import training_seeds
from mmspec.scenes.reader import load_reader
from mmspec.training.record import donor, half_precision, training_record, write_record
from mmspec.training.run import RunOptions, Stage, Training, flush_subnormals, held_out_figures
from reference import TRAIN
from reference.image_data import PixelBatch, pixel_batch
from reference.vq_model import VQ_SHAPES, Reconstruction, build_vq

__all__ = ["save_vq", "train_vq"]

CHECK_SCENES = 64
DEFAULT_MINUTES = 25.0
STAGE = 8
OBJECT_WEIGHT = 3.0  # objects cover a fifth of an image and are all that a caption is about


@flush_subnormals()
def train_vq(
    out: str | Path,
    *,
    reader: str | Path | None = None,
    start: str | Path | None = None,
    size: str = "base",
    **how: Unpack[RunOptions],
) -> Path:
    """Train an image tokenizer (4 x 4 pixels a token) and save it as a folder of diffusers' `VQModel`.

    Args:
        out: the folder to write.
        reader: a folder that `train_reader` wrote; its features are compared too. None: pixels alone.
        start: a trained tokenizer to begin with, instead of random weights.
        size: "base", or "tiny" (for tests).
        how: see `RunOptions`; by default 25 minutes, of 16 images a step and process.

    Returns:
        The folder. Its `training.json` records how it was made.

    Raises:
        InputError: an argument that is not allowed, or weights are to be sharded.
    """
    if size not in VQ_SHAPES:
        raise InputError("size", size, did_you_mean(size, VQ_SHAPES))
    training = Training(Path(out), how, minutes=DEFAULT_MINUTES, batch_size=16)
    out = Path(out)
    judge = None if reader is None else load_reader(reader)
    accelerator = training.accelerator
    if accelerator.is_fsdp2:
        allowed = (
            "processes with whole weights: codes are set, not learnt by gradients, and FSDP would lose them"
        )
        raise InputError("accelerate launch", accelerator.distributed_type.value, allowed)
    vq, before = build_vq(size), []
    if start is not None:
        before = _take_weights(vq, Path(start))
    if judge is not None:
        judge.to(accelerator.device)
    title = "pixels" if judge is None else "pixels and features"
    training.train(_stage(training, Reconstruction(vq, judge), title))
    if accelerator.is_main_process:
        options = {"out": out, "size": size, **training.length, "reader": reader, "from": start}
        save_vq(vq, out, training_record(f"{TRAIN} vq", options, training, vq, before))
    accelerator.wait_for_everyone()
    return out


def save_vq(vq: VQModel, folder: Path, training: dict[str, Any]) -> None:
    """Save in half precision, with the codebook on its own, as `mmspec convert` does, and the record."""
    folder.mkdir(parents=True, exist_ok=True)
    vq.save_config(folder)
    save_file(half_precision(vq), folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    codebook = vq.quantize.embedding.weight.detach().to("cpu", torch.float16).contiguous()
    save_file({"codebook": codebook.clone()}, folder / "raw_codebook.safetensors")
    write_record(folder, training)


def _stage(training: Training, learner: Reconstruction, title: str) -> Stage:
    def make(step: int) -> PixelBatch:
        process, count = training.accelerator.process_index, training.batch_size
        seeds = training_seeds(training.seed, STAGE, step, process, count)
        return pixel_batch(seeds, OBJECT_WEIGHT)

    check = held_out_figures(pixel_batch(np.arange(CHECK_SCENES)), training.accelerator.device, digits=4)
    return Stage(title, learner, make, check)


def _take_weights(vq: VQModel, folder: Path) -> list[dict[str, Any]]:
    """Take over a trained tokenizer; returns the stages of its training."""
    with donor(folder, "a tokenizer that `python -m reference train vq` wrote, of the same size") as stages:
        vq.load_state_dict(VQModel.from_pretrained(folder, torch_dtype=torch.float32).state_dict())
    return stages
