"""One stage of training, from its first step or from a saved state to the end of its budget.

Knows optimizers, learning rates, states and progress; does not know what is learnt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import nn
from torch.distributed.fsdp import FSDPModule
from tqdm.auto import tqdm

from mmspec.errors import CheckpointError
from mmspec.training.checkpointing import save_state
from mmspec.training.schedule import Budget, learning_rate, muon_and_adamw
from mmspec.training.sharding import load_whole, twin, whole

__all__ = ["OnStep", "TrainingRun", "Stage", "held_out_figures", "train_stage"]

MUON_RATE, ADAMW_RATE = 2e-3, 1e-3
MAX_GRADIENT_NORM = 1.0
OnStep = Callable[[int, float], None]


class Batch(Protocol):
    """Anything that can be moved to a device."""

    def to(self, device: torch.device) -> Batch:
        """Move all tensors."""


@dataclass
class Stage:
    """A stage of training: learner, data, checks on held-out data.

    Args:
        title: shown on the progress bar.
        learner: `learner(batch)` returns the loss first.
        make: the batch of a step; equal steps give equal batches.
        check: called with the learner now and then, without gradients; returns held-out figures to show.
        slow: parameters whose names hold this text learn at `slow_factor` times the rate.
        slow_factor: see `slow`.
        outer: parts of names of matrices that are not hidden; see `muon_and_adamw`.
        halved: whether it runs under bfloat16 autocast even where the accelerator has none.
    """

    title: str
    learner: nn.Module
    make: Callable[[int], Batch]
    check: Callable[[nn.Module], dict[str, float]]
    slow: str = ""
    slow_factor: float = 1.0
    outer: tuple[str, ...] = ()
    halved: bool = False


def held_out_figures(
    batch: Batch, device: torch.device, digits: int = 3
) -> Callable[[nn.Module], dict[str, float]]:
    """Make the check of a learner that returns its figures beside the loss: those of held-out data."""

    def check(module: nn.Module) -> dict[str, float]:
        _, figures = module(batch.to(device))
        return {name: round(float(value), digits) for name, value in figures.items()}

    return check


@dataclass
class TrainingRun:
    """A training at work: what its stages share, and its progress in stages, steps and seconds.

    Args:
        accelerator: places the learner and averages gradients over processes.
        model: saved whole in every state, besides the learner that wraps it.
        state_path: the file that an interrupted run goes on from.
        checkpoint_s: seconds of training between two states on disk.
        check_s: seconds of training between two looks at held-out data.
        on_step: called with (step, loss) after every step.
    """

    accelerator: Accelerator
    model: nn.Module
    state_path: Path
    checkpoint_s: float
    check_s: float
    on_step: OnStep | None = None
    stage: int = 0
    step: int = 0
    seconds: float = 0.0
    finished: list[dict[str, Any]] = field(default_factory=list)
    restored: dict[str, Any] | None = field(default=None, repr=False)

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the weights and the place of a saved state.

        Raises:
            CheckpointError: it is none of this model's.
        """
        try:
            self.model.load_state_dict(state["model"])
            self.stage, self.finished, self.restored = state["stage"], state["finished"], state
        except (KeyError, RuntimeError) as error:
            allowed = "the state of a training of the same model"
            raise CheckpointError("resume", str(self.state_path), allowed) from error

    def agree(self, seconds: float) -> float:
        """Broadcast the main process's clock, so that all processes end after the same step."""
        if self.accelerator.num_processes == 1:
            return seconds
        clock = torch.tensor(seconds, dtype=torch.float64, device=self.accelerator.device)
        return float(broadcast(clock))

    def save(self, learner: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Write the state, from the main process; all take part, for each may hold a part of the optimizers'.

        Args:
            learner: with whole weights.
            optimizers: as they are, sharded or not.
        """
        states = [whole(optimizer.state_dict()) for optimizer in optimizers]
        if self.accelerator.is_main_process:
            state = {
                "stage": self.stage,
                "step": self.step,
                "seconds": self.seconds,
                "finished": self.finished,
                "model": self.model.state_dict(),
                "learner": learner.state_dict(),
                "optimizers": states,
            }
            save_state(self.state_path, state)


def train_stage(run: TrainingRun, stage: Stage, budget: Budget) -> None:
    """Train until the budget is used up; a state is on disk at the end, and the learner's weights are whole.

    Under FSDP a twin of the learner is sharded and trained. The learner itself stays an ordinary module, and
    takes over the twin's weights whenever they are looked at; all processes do so after the same steps.
    """
    accelerator, learner = run.accelerator, stage.learner.to(run.accelerator.device)
    run.step, run.seconds = 0, 0.0
    if run.restored is not None:
        learner.load_state_dict(run.restored["learner"])
    trained = twin(learner) if accelerator.is_fsdp2 else learner
    optimizers = muon_and_adamw(
        trained.named_parameters(),
        slow=stage.slow,
        slow_factor=stage.slow_factor,
        muon_lr=MUON_RATE,
        adamw_lr=ADAMW_RATE,
        outer=stage.outer,
    )
    module, *prepared = accelerator.prepare(trained, *optimizers)
    if isinstance(module, FSDPModule):
        # a batch without images leaves a compressor without gradients, maybe in one process alone
        module.set_reduce_scatter_unused_params(True)
    if run.restored is not None:
        for optimizer, saved in zip(optimizers, run.restored["optimizers"], strict=True):
            load_whole(optimizer, saved)
        run.step, run.seconds, run.restored = run.restored["step"], run.restored["seconds"], None

    def gather() -> None:
        if trained is not learner:
            learner.load_state_dict(whole(trained.state_dict()))

    bar = tqdm(
        total=100.0, desc=stage.title, unit="%", mininterval=5, disable=not accelerator.is_main_process
    )
    saved_at = checked_at = run.seconds
    shown: dict[str, float] = {}
    while (progress := budget.progress(run.step, run.seconds)) < 1:
        started = time.monotonic()
        loss, figures = _step(run, stage, module, prepared, progress)
        run.step, run.seconds = run.step + 1, run.agree(run.seconds + time.monotonic() - started)
        if run.seconds - checked_at >= run.check_s:
            gather()
            shown, checked_at = _check(run, stage), run.seconds
        accelerator.log({"loss": loss, "learning_rate": _rate(prepared), **figures}, step=run.step)
        if run.seconds - saved_at >= run.checkpoint_s:
            gather()
            run.save(learner, optimizers)
            saved_at = run.seconds
        bar.set_postfix(step=run.step, loss=f"{loss:.4f}", **shown, refresh=False)
        bar.update(min(100.0, 100 * budget.progress(run.step, run.seconds)) - bar.n)
        if run.on_step is not None:
            run.on_step(run.step, loss)
    gather()
    shown = _check(run, stage)
    bar.set_postfix(step=run.step, **shown)
    bar.close()
    run.save(learner, optimizers)
    run.finished.append({"stage": stage.title, "steps": run.step, "seconds": round(run.seconds), **shown})
    accelerator.free_memory()


def _check(run: TrainingRun, stage: Stage) -> dict[str, float]:
    """Log the main process's look at held-out data, and return it; nothing in the others."""
    if not run.accelerator.is_main_process:
        return {}
    with torch.no_grad():
        shown = stage.check(stage.learner)
    run.accelerator.log(shown, step=run.step)
    return shown


def _step(
    run: TrainingRun,
    stage: Stage,
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    progress: float,
) -> tuple[float, dict[str, float]]:
    """Run a step; returns the mean loss of its batches, and the last one's figures."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(group["peak"], run.step, progress)
    accelerator, total = run.accelerator, 0.0
    count: int = accelerator.gradient_accumulation_steps
    for index in range(run.step * count, (run.step + 1) * count):
        batch = stage.make(index).to(accelerator.device)
        with accelerator.accumulate(module):
            with torch.autocast(accelerator.device.type, torch.bfloat16) if stage.halved else nullcontext():
                loss, figures = module(batch)
            accelerator.backward(loss)
        total += float(loss.detach()) / count
    accelerator.clip_grad_norm_(module.parameters(), MAX_GRADIENT_NORM)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return total, _scalars(figures) if accelerator.trackers else {}


def _scalars(figures: Any) -> dict[str, float]:
    """Figures as numbers to log, by name; entries of a vector are named by their index."""
    if not isinstance(figures, dict):
        return {}
    named = {name: value.detach().flatten().tolist() for name, value in figures.items()}
    return {
        name if len(values) == 1 else f"{name}/{index}": value
        for name, values in named.items()
        for index, value in enumerate(values)
    }


def _rate(optimizers: list[torch.optim.Optimizer]) -> float:
    return max(float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups)
