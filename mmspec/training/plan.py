"""Plan of a training, common to all trainers: length, seed, batch size, states on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypedDict

from accelerate import Accelerator
from torch import nn

from mmspec.training.checkpointing import load_state
from mmspec.training.schedule import Budget
from mmspec.training.stage import OnStep, TrainingRun

__all__ = ["PlanOptions", "TrainingPlan"]


class PlanOptions(TypedDict, total=False):
    """Keywords of every trainer: the attributes of `TrainingPlan`, where they are documented."""

    minutes: float | None
    steps: int | None
    batch_size: int
    seed: int
    resume: bool
    threads: int | None
    state: str | Path | None
    checkpoint_s: float
    check_s: float
    on_step: OnStep | None


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Length, seed, batch size and states of a training.

    Args:
        batch_size: examples that a process reads at once.
        minutes: length of the training.
        steps: length in optimizer steps instead; the result is then reproducible.
        seed: of the weights and of all examples.
        resume: go on from the state file of an interrupted run.
        threads: CPU threads; None leaves the number as it is.
        state: file of the training state; by default `<out>.training.pt` beside the folder.
        checkpoint_s: seconds of training between two states on disk.
        check_s: seconds of training between two looks at held-out data.
        on_step: called with (step, loss) after every step.

    Raises:
        InputError: not exactly one of `minutes` and `steps`, or no length at all.
    """

    batch_size: int
    minutes: float | None = None
    steps: int | None = None
    seed: int = 0
    resume: bool = False
    threads: int | None = None
    state: str | Path | None = None
    checkpoint_s: float = 60.0
    check_s: float = 60.0
    on_step: OnStep | None = None

    def __post_init__(self) -> None:
        _ = self.budget  # refuses what is none, before any work

    @classmethod
    def of(cls, options: PlanOptions, *, minutes: float, **defaults: Any) -> Self:
        """Make a plan of a caller's options and a trainer's defaults; `minutes` if no length is given."""
        made: dict[str, Any] = {**defaults, **options}
        if made.get("minutes") is None and made.get("steps") is None:
            made["minutes"] = minutes
        return cls(**made)

    @property
    def budget(self) -> Budget:
        return Budget(self.steps, None if self.minutes is None else self.minutes * 60)

    @property
    def length(self) -> dict[str, float | int | None]:
        """The length as options of the command line."""
        return {"minutes": self.minutes, "steps": self.steps}

    def run(self, out: Path, accelerator: Accelerator, model: nn.Module) -> TrainingRun:
        """Begin or resume the run that writes a folder.

        Raises:
            CheckpointError: it is to be resumed and there is no state, a damaged one, or another model's.
        """
        path = Path(self.state) if self.state is not None else out.with_name(f"{out.name}.training.pt")
        run = TrainingRun(accelerator, model, path, self.checkpoint_s, self.check_s, self.on_step)
        if self.resume:
            run.restore(load_state(path))
        return run
