"""Trains the reference vision-language models: the tower on dense labels, then the whole on conversations.

Dense labels that hold each object's rank in reading order teach the binding of attributes to objects in
minutes, which captions alone take far longer to teach. Every batch is made of new scenes, so nothing can be memorised.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoModelForImageTextToText, LlavaForConditionalGeneration, LlavaProcessor

from mmspec.errors import InputError
from mmspec.registry import did_you_mean
from mmspec.training.checkpointing import load_state, save_state
from mmspec.training.schedule import Budget, learning_rate, muon_and_adamw
from mmspec.training.vlm_data import WEIGHTS, conversation_batch, patch_batch, training_seeds
from mmspec.training.vlm_folder import save_vlm
from mmspec.training.vlm_model import SHAPES_BY_SIZE, ConversationLoss, PatchLoss, build_model, exact_answers
from mmspec.training.vlm_processor import build_processor

__all__ = ["train_vlm"]

MUON_RATE, ADAMW_RATE = 2e-3, 1e-3
TOWER_FACTOR = 0.3  # the tower has learnt what it needs before the decoder starts
CHECK_SCENES = 64
OnStep = Callable[[int, float], None]


@dataclass
class _Run:
    """What all stages share; `stage`, `step` and `seconds` say how far the run is."""

    accelerator: Accelerator
    processor: LlavaProcessor
    seed: int
    batch_size: int
    state_path: Path
    checkpoint_s: float
    check_s: float
    on_step: OnStep | None
    stage: int = 0
    step: int = 0
    seconds: float = 0.0
    restored: dict[str, Any] | None = field(default=None, repr=False)

    def seeds(self, step: int) -> np.ndarray:
        return training_seeds(self.seed, self.stage, step, self.accelerator.process_index, self.batch_size)


def train_vlm(
    out: str | Path,
    *,
    size: str = "base",
    minutes: float | None = None,
    steps: int | None = None,
    tower_share: float = 0.25,
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
        minutes: length of the training, the schedule included; 40 where neither this nor `steps` is given.
        steps: length in optimizer steps instead of minutes; the result is then reproducible.
        tower_share: part of the training that goes to the vision tower alone.
        tower_from: a trained folder whose tower is taken over and frozen; the tower is then not trained.
        batch_size: scenes per step and process; the tower alone takes twice as many.
        seed: of the weights and of all training scenes.
        resume: go on from the state file of an interrupted run.
        threads: CPU threads; None leaves the number as it is.
        state: file of the training state; by default `<out>.training.pt` beside the folder.
        checkpoint_s: seconds between two states on disk.
        check_s: seconds between two looks at held-out scenes.
        on_step: called with (step, loss) after every step.

    Returns:
        The folder.
    """
    if size not in SHAPES_BY_SIZE:
        raise InputError("size", size, did_you_mean(size, SHAPES_BY_SIZE))
    if minutes is None and steps is None:
        minutes = 40.0
    budget = Budget(steps, None if minutes is None else minutes * 60)
    if threads is not None:
        torch.set_num_threads(threads)
    # Without it, activations that fade to denormal numbers slow a CPU run down several times half-way.
    torch.set_flush_denormal(True)
    torch.manual_seed(seed)
    out = Path(out)
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    state_path = Path(state) if state is not None else out.with_name(f"{out.name}.training.pt")
    processor = build_processor()
    run = _Run(accelerator, processor, seed, batch_size, state_path, checkpoint_s, check_s, on_step)
    model = build_model(SHAPES_BY_SIZE[size], processor)
    if tower_from is not None:
        _take_tower(model, Path(tower_from))
    first_stage = 0 if tower_from is None else 1
    run.stage = first_stage
    if resume:
        run.restored = load_state(state_path)
        run.stage = run.restored["stage"]
        model.load_state_dict(run.restored["vlm"])
    if run.stage == 0:
        _train_tower(run, model, budget.share(tower_share))
        run.stage, run.restored = 1, None
    _train_conversations(
        run, model, budget.share(1.0 if first_stage else 1 - tower_share), tower_from is not None
    )
    if accelerator.is_main_process:
        save_vlm(model, processor, out)
    accelerator.wait_for_everyone()
    return out


def _take_tower(model: LlavaForConditionalGeneration, folder: Path) -> None:
    donor = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    if donor.config.vision_config.to_dict() != _vision(model).to_dict():
        raise InputError("tower_from", str(folder), "a model whose tower has the shape of the new one's")
    model.model.vision_tower.load_state_dict(donor.model.vision_tower.state_dict())


def _vision(model: LlavaForConditionalGeneration) -> Any:
    return model.config.vision_config


def _train_tower(run: _Run, model: LlavaForConditionalGeneration, budget: Budget) -> None:
    patch = int(_vision(model).patch_size)
    learner = PatchLoss(model.model.vision_tower, int(_vision(model).hidden_size))
    held_out = patch_batch(np.arange(CHECK_SCENES), patch)

    def make(step: int) -> Any:
        seeds = np.concatenate([run.seeds(2 * step), run.seeds(2 * step + 1)])
        return patch_batch(seeds, patch)

    def check(module: nn.Module) -> dict[str, float]:
        _, accuracies = module(held_out.to(run.accelerator.device))
        return {name: round(float(value), 3) for name, value in accuracies.items()}

    _train(run, "tower", model, learner, 1.0, budget, make, check)


def _train_conversations(
    run: _Run, model: LlavaForConditionalGeneration, budget: Budget, frozen_tower: bool
) -> None:
    learner = ConversationLoss(model, frozen_tower=frozen_tower)
    tokenizer, visual = run.processor.tokenizer, model.config.image_seq_length
    held_out = conversation_batch(np.arange(CHECK_SCENES), tokenizer, visual, with_description=True)

    def make(step: int) -> Any:
        describes = step % 2 == 1
        # Descriptions make a conversation more than twice as long: half as many keep the steps equally long.
        seeds = run.seeds(step)[: max(1, run.batch_size // (2 if describes else 1))]
        return conversation_batch(seeds, tokenizer, visual, with_description=describes)

    def check(module: nn.Module) -> dict[str, float]:
        batch = held_out.to(run.accelerator.device)
        exact = exact_answers(batch, module(batch)[1])  # type: ignore[arg-type]
        return {
            kind: round(float(exact[batch.kinds == index].float().mean()), 3)  # type: ignore[attr-defined]
            for index, kind in enumerate(WEIGHTS)
        }

    _train(run, "conversations", model, learner, TOWER_FACTOR, budget, make, check)


def _train(
    run: _Run,
    title: str,
    model: LlavaForConditionalGeneration,
    learner: nn.Module,
    tower_factor: float,
    budget: Budget,
    make: Callable[[int], Any],
    check: Callable[[nn.Module], dict[str, float]],
) -> None:
    """One stage, from its first step or from where the restored state left it, to the end of its budget."""
    optimizers = muon_and_adamw(
        learner.named_parameters(),
        slow="tower",
        slow_factor=tower_factor,
        muon_lr=MUON_RATE,
        adamw_lr=ADAMW_RATE,
    )
    run.step, run.seconds = 0, 0.0
    if run.restored is not None:
        learner.load_state_dict(run.restored["learner"])
        for optimizer, saved in zip(optimizers, run.restored["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        run.step, run.seconds = run.restored["step"], run.restored["seconds"]
    module, *prepared = run.accelerator.prepare(learner, *optimizers)
    trained = [parameter for parameter in learner.parameters() if parameter.requires_grad]
    bar = tqdm(total=100.0, desc=title, unit="%", mininterval=5, disable=not run.accelerator.is_main_process)
    saved_at = checked_at = time.monotonic()
    shown: dict[str, float] = {}
    while (progress := budget.progress(run.step, run.seconds)) < 1:
        started = time.monotonic()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(group["peak"], run.step, progress)
        loss, _ = module(make(run.step).to(run.accelerator.device))
        run.accelerator.backward(loss)
        nn.utils.clip_grad_norm_(trained, 1.0)
        for optimizer in prepared:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        run.step += 1
        value = float(loss.detach())
        now = time.monotonic()
        run.seconds += now - started
        if now - checked_at >= run.check_s:
            with torch.no_grad():
                shown, checked_at = check(module), now
        if now - saved_at >= run.checkpoint_s:
            _save(run, model, learner, optimizers)
            saved_at = now
        bar.set_postfix(step=run.step, loss=f"{value:.4f}", **shown, refresh=False)
        bar.update(min(100.0, 100 * budget.progress(run.step, run.seconds)) - bar.n)
        if run.on_step is not None:
            run.on_step(run.step, value)
    with torch.no_grad():
        bar.set_postfix(step=run.step, **check(module))
    bar.close()
    _save(run, model, learner, optimizers)
    run.accelerator.free_memory()


def _save(
    run: _Run,
    model: LlavaForConditionalGeneration,
    learner: nn.Module,
    optimizers: list[torch.optim.Optimizer],
) -> None:
    if run.accelerator.is_main_process:
        state = {
            "stage": run.stage,
            "step": run.step,
            "seconds": run.seconds,
            "vlm": model.state_dict(),
            "learner": learner.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        }
        save_state(run.state_path, state)
