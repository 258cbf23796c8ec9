"""How long a training runs, from which seed, and what it leaves on disk: what all trainers have in common."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypedDict

from accelerate import Accelerator
from torch import nn

from mmspec.training.checkpointing import load_state
from mmspec.training.schedule import Budget
from mmspec.training.stage import OnStep, Run

__all__ = ["PlanOptions", "TrainingPlan"]


class PlanOptions(TypedDict, total=False):
    """Keywords of every trainer: the attributes of `TrainingPlan`, which tells of them."""

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
    """What is asked of any training.

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
        """The plan of a trainer whose defaults these are; `minutes` where no length is asked for."""
        made: dict[str, Any] = {**defaults, **options}
        if made.get("minutes") is None and made.get("steps") is None:
            made["minutes"] = minutes
        return cls(**made)

    @property
    def budget(self) -> Budget:
        return Budget(self.steps, None if self.minutes is None else self.minutes * 60)

    @property
    def length(self) -> str:
        """The length as the command line takes it."""
        return f"--minutes {self.minutes:g}" if self.minutes is not None else f"--steps {self.steps}"

    def run(self, out: Path, accelerator: Accelerator, model: nn.Module) -> Run:
        """The run that writes a folder, begun or resumed.

        Raises:
            CheckpointError: it is to be resumed and there is no state, a damaged one, or another model's.
        """
        path = Path(self.state) if self.state is not None else out.with_name(f"{out.name}.training.pt")
        run = Run(accelerator, model, path, self.checkpoint_s, self.check_s, self.on_step)
        if self.resume:
            run.restore(load_state(path))
        return run
