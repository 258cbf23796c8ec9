"""Training of the reference vision-language models: the vision tower on dense labels, then the whole model.

The second stage trains on conversations. Dense labels contain each object's rank in reading order, and teach
the binding of attributes to objects in minutes; captions alone take far longer. Every batch has new scenes,
so the model cannot memorise any.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForImageTextToText, ProcessorMixin

from mmspec.errors import InputError
from mmspec.registry import require_known
from mmspec.scenes import training_seeds
from mmspec.scenes.world import CANVAS
from mmspec.training.record import save_trained
from mmspec.training.run import RunOptions, Stage, Training, flush_subnormals
from reference.processors import build_hybrid_processor, build_processor
from reference.trainer import finish, held_out_figures
from reference.vlm_data import WEIGHTS, ConversationBatch, PatchBatch, conversation_batch, patch_batch
from reference.vlm_model import (
    SHAPES_BY_SIZE,
    ConversationLoss,
    PatchLoss,
    ReferenceVLM,
    build_model,
    exact_answers,
    tower_of,
)

__all__ = ["train_vlm"]

TOWER, CONVERSATIONS = 0, 1
TOWER_FACTOR = 0.3  # of the learning rate: the tower is trained before the decoder starts
CHECK_SCENES = 64
DEFAULT_MINUTES = 56.0


@flush_subnormals()
def train_vlm(
    out: str | Path,
    *,
    size: str = "base",
    tower_share: float | None = None,
    tower_from: str | Path | None = None,
    **how: Unpack[RunOptions],
) -> Path:
    """Train a reference vision-language model and save it as a standard transformers folder.

    Runs on a CPU, or on one or several GPUs through `accelerate launch`.

    Args:
        out: the folder to write.
        size: a key of `SHAPES_BY_SIZE`, such as "base", "small" (the draft model) or "hybrid" (a Qwen3.5).
        tower_share: share of the training that goes to the vision tower alone; None for the default of the
            size.
        tower_from: a trained folder whose tower is copied and frozen; the tower is then not trained.
        how: see `RunOptions`; by default 56 minutes, with 32 scenes per step and process. Steps of the tower
            have twice as many scenes, steps with descriptions half as many.

    Returns:
        The folder. Its `training.json` records the training.

    Raises:
        InputError: the size is unknown, or the tower of `tower_from` has another shape.
    """
    require_known("size", size, SHAPES_BY_SIZE)
    shape = SHAPES_BY_SIZE[size]
    if tower_share is None:
        # the tower of a hybrid is frozen in the second stage, so it needs more steps in the first
        tower_share = 0.33 if shape.hybrid else 0.2
    out = Path(out)
    training = Training(out, how, minutes=DEFAULT_MINUTES, batch_size=32)
    processor = build_hybrid_processor() if shape.hybrid else build_processor()
    model = build_model(shape, processor)
    if tower_from is not None:
        _take_tower(model, Path(tower_from))
        tower_share, training.stage = 0.0, CONVERSATIONS
    if training.stage == TOWER:
        training.train(_tower_stage(training, model), tower_share)
        training.stage = CONVERSATIONS
    # the merger of a hybrid is trained with the decoder, so its tower can be frozen
    frozen = tower_from is not None or shape.hybrid
    stage = _conversation_stage(training, model, processor, frozen_tower=frozen)
    training.train(stage, 1 - tower_share)

    def save(record: dict[str, Any]) -> None:
        save_trained(model, out, record, parts=("vision_config", "text_config"))
        processor.save_pretrained(out)

    options = {"size": size, **training.length, "tower-from": tower_from}
    return finish(training, out, save, command="vlm", options=options, model=model, size=size)


def _tower_stage(training: Training, model: ReferenceVLM) -> Stage:
    tower = tower_of(model, CANVAS)

    def make(step: int) -> PatchBatch:
        process, count = training.accelerator.process_index, training.batch_size
        halves = (2 * step, 2 * step + 1)
        seeds = [training_seeds(training.seed, TOWER, half, process, count) for half in halves]
        return patch_batch(np.concatenate(seeds), tower.patch)

    check = held_out_figures(patch_batch(np.arange(CHECK_SCENES), tower.patch), training.accelerator.device)
    return Stage("tower", PatchLoss(tower.module, tower.width), make, check)


def _conversation_stage(
    training: Training,
    model: ReferenceVLM,
    processor: ProcessorMixin,
    *,
    frozen_tower: bool,
) -> Stage:
    tokenizer, tower = processor.tokenizer, tower_of(model, CANVAS)
    visual = tower.visual_tokens
    held_out = conversation_batch(np.arange(CHECK_SCENES), tokenizer, visual, with_description=True)

    def make(step: int) -> ConversationBatch:
        describes = step % 4 == 3
        # Conversations with descriptions are twice as long; half as many keep the step time constant.
        process, count = training.accelerator.process_index, training.batch_size
        seeds = training_seeds(training.seed, CONVERSATIONS, step, process, count)
        seeds = seeds[: max(1, count // 2)] if describes else seeds
        return conversation_batch(seeds, tokenizer, visual, with_description=describes)

    def check(module: nn.Module) -> dict[str, float]:
        batch = held_out.to(training.accelerator.device)
        exact = exact_answers(batch, module(batch)[1])
        return {
            kind: round(float(exact[batch.kinds == index].float().mean()), 3)
            for index, kind in enumerate(WEIGHTS)
        }

    learner = ConversationLoss(model, frozen_tower=frozen_tower)
    return Stage("conversations", learner, make, check, slow=tower.name, slow_factor=TOWER_FACTOR)


def _take_tower(model: ReferenceVLM, folder: Path) -> None:
    donor: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    try:
        tower_of(model, CANVAS).module.load_state_dict(tower_of(donor, CANVAS).module.state_dict())
    except (AttributeError, RuntimeError) as error:
        raise InputError(
            "tower_from", str(folder), "must be a model whose tower has the shape of the new one"
        ) from error
