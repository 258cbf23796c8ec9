"""Trains the reference vision-language models: the tower on dense labels, then the whole on conversations.

Dense labels that hold each object's rank in reading order teach the binding of attributes to objects in
minutes, which captions alone take far longer to teach. Every batch is made of new scenes, so nothing can be
memorised.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoModelForImageTextToText, LlavaForConditionalGeneration, LlavaProcessor

from mmspec.errors import InputError
from mmspec.registry import did_you_mean
from mmspec.training.checkpointing import load_state
from mmspec.training.environment import environment, prepare_training
from mmspec.training.schedule import Budget
from mmspec.training.stage import OnStep, Run, Stage, train_stage
from mmspec.training.vlm_data import (
    WEIGHTS,
    ConversationBatch,
    PatchBatch,
    conversation_batch,
    patch_batch,
    training_seeds,
)
from mmspec.training.vlm_folder import save_vlm
from mmspec.training.vlm_model import (
    SHAPES_BY_SIZE,
    ConversationLoss,
    PatchLoss,
    build_model,
    exact_answers,
)
from mmspec.training.vlm_processor import build_processor

__all__ = ["train_vlm"]

TOWER, CONVERSATIONS = 0, 1
TOWER_FACTOR = 0.3  # the tower has learnt what it needs before the decoder starts
CHECK_SCENES = 64
DEFAULT_MINUTES = 56.0


def train_vlm(
    out: str | Path,
    *,
    size: str = "base",
    minutes: float | None = None,
    steps: int | None = None,
    tower_share: float = 0.2,
    tower_from: str | Path | None = None,
    batch_size: int = 32,
    seed: int = 0,
    resume: bool = False,
    threads: int | None = None,
    state: str | Path | None = None,
    checkpoint_s: float = 60.0,
    check_s: float = 60.0,
    on_step: OnStep | None = None,
) -> Path:
    """Train a reference vision-language model and save it as a standard transformers folder.

    Runs on whatever `accelerate launch` gives it: a CPU, one GPU or several.

    Args:
        out: the folder to write.
        size: "base", "small" (the draft) or "tiny" (for tests).
        minutes: length of the training, the schedule included; 56 where neither this nor `steps` is given.
        steps: length in optimizer steps instead of minutes; the result is then reproducible.
        tower_share: part of the training that goes to the vision tower alone.
        tower_from: a trained folder whose tower is taken over and frozen; the tower is then not trained.
        batch_size: scenes per step and process; twice as many for the tower, half as many with descriptions.
        seed: of the weights and of all training scenes.
        resume: go on from the state file of an interrupted run.
        threads: CPU threads; None leaves the number as it is.
        state: file of the training state; by default `<out>.training.pt` beside the folder.
        checkpoint_s: seconds between two states on disk.
        check_s: seconds between two looks at held-out scenes.
        on_step: called with (step, loss) after every step.

    Returns:
        The folder. Its `training.json` records how it was made.
    """
    if size not in SHAPES_BY_SIZE:
        raise InputError("size", size, did_you_mean(size, SHAPES_BY_SIZE))
    if minutes is None and steps is None:
        minutes = DEFAULT_MINUTES
    budget = Budget(steps, None if minutes is None else minutes * 60)
    prepare_training(seed, threads)
    out = Path(out)
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    processor = build_processor()
    model = build_model(SHAPES_BY_SIZE[size], processor)
    state_path = Path(state) if state is not None else out.with_name(f"{out.name}.training.pt")
    run = Run(accelerator, model, state_path, checkpoint_s, check_s, on_step)
    if tower_from is not None:
        _take_tower(model, Path(tower_from))
        tower_share, run.stage = 0.0, CONVERSATIONS
    if resume:
        run.restore(load_state(state_path))
    if run.stage == TOWER:
        train_stage(run, _tower_stage(run, model, seed, batch_size), budget.share(tower_share))
        run.stage = CONVERSATIONS
    stage = _conversation_stage(run, model, processor, seed, batch_size, frozen_tower=tower_from is not None)
    train_stage(run, stage, budget.share(1 - tower_share))
    if accelerator.is_main_process:
        options = f"--minutes {minutes:g}" if minutes is not None else f"--steps {steps}"
        if tower_from is not None:
            options += f" --tower-from {Path(tower_from).as_posix()}"
        made = {
            "command": f"mmspec train vlm --out {out.as_posix()} --size {size} {options}",
            "size": size,
            "seed": seed,
            "batch_size": batch_size,
            "stages": run.finished,
        }
        save_vlm(model, processor, out, made | environment(accelerator, model))
    accelerator.wait_for_everyone()
    return out


def _tower_stage(run: Run, model: LlavaForConditionalGeneration, seed: int, batch_size: int) -> Stage:
    patch = int(_vision(model).patch_size)
    held_out = patch_batch(np.arange(CHECK_SCENES), patch)

    def make(step: int) -> PatchBatch:
        process = run.accelerator.process_index
        seeds = [training_seeds(seed, TOWER, 2 * step + half, process, batch_size) for half in range(2)]
        return patch_batch(np.concatenate(seeds), patch)

    def check(module: nn.Module) -> dict[str, float]:
        _, accuracies = module(held_out.to(run.accelerator.device))
        return {name: round(float(value), 3) for name, value in accuracies.items()}

    return Stage("tower", PatchLoss(model.model.vision_tower, int(_vision(model).hidden_size)), make, check)


def _conversation_stage(
    run: Run,
    model: LlavaForConditionalGeneration,
    processor: LlavaProcessor,
    seed: int,
    batch_size: int,
    *,
    frozen_tower: bool,
) -> Stage:
    tokenizer, visual = processor.tokenizer, int(model.config.image_seq_length)
    held_out = conversation_batch(np.arange(CHECK_SCENES), tokenizer, visual, with_description=True)

    def make(step: int) -> ConversationBatch:
        describes = step % 4 == 3
        # Descriptions make a conversation twice as long: half as many keep the steps equally long.
        scenes = max(1, batch_size // 2) if describes else batch_size
        seeds = training_seeds(seed, CONVERSATIONS, step, run.accelerator.process_index, batch_size)[:scenes]
        return conversation_batch(seeds, tokenizer, visual, with_description=describes)

    def check(module: nn.Module) -> dict[str, float]:
        batch = held_out.to(run.accelerator.device)
        exact = exact_answers(batch, module(batch)[1])
        return {
            kind: round(float(exact[batch.kinds == index].float().mean()), 3)
            for index, kind in enumerate(WEIGHTS)
        }

    learner = ConversationLoss(model, frozen_tower=frozen_tower)
    return Stage("conversations", learner, make, check, slow="tower", slow_factor=TOWER_FACTOR)


def _take_tower(model: LlavaForConditionalGeneration, folder: Path) -> None:
    donor = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    try:
        model.model.vision_tower.load_state_dict(donor.model.vision_tower.state_dict())
    except RuntimeError as error:
        raise InputError("tower_from", str(folder), "a model whose tower has the new one's shape") from error


def _vision(model: LlavaForConditionalGeneration) -> Any:
    return model.config.vision_config
