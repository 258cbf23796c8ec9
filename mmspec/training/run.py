"""Training loop of all trainers: length, stages, checkpoints and resuming.

Handles accelerate, optimizers, learning rates, checkpoints and progress, and is independent of the loss.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypedDict, TypeVar

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DistributedType, broadcast
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from tqdm.auto import tqdm

from mmspec.atomic_file import atomic_file
from mmspec.errors import CheckpointError, InputError, MissingDependencyError, how_to_install
from mmspec.open_types import Json
from mmspec.training.optimizers import learning_rate, muon_and_adamw

__all__ = [
    "Stage",
    "Training",
    "RunOptions",
    "flush_subnormals",
    "open_accelerator",
]

MAX_GRADIENT_NORM = 1.0
SUBNORMAL = 2.0**-149  # the smallest positive float32
STATE = {"stage", "step", "seconds", "finished", "weights", "optimizers"}
OnStep = Callable[[int, float], None]
M = TypeVar("M", bound=nn.Module)


class Batch(Protocol):
    """Anything that can be moved to a device."""

    def to(self, device: torch.device) -> Batch:
        """Move all tensors."""


class RunOptions(TypedDict, total=False):
    """Keywords of every trainer.

    Attributes:
        minutes: length of the training.
        steps: length in optimizer steps instead, which makes the result reproducible.
        batch_size: examples per batch and process.
        seed: seed of the weights and of all examples.
        resume: continue from the state file of an interrupted run.
        threads: number of CPU threads; None leaves it unchanged.
        state: file of the training state; the default is `<out>.training.pt` beside the folder.
        checkpoint_s: seconds of training between two checkpoints.
        check_s: seconds of training between two evaluations on held-out data.
        on_step: called with (step, loss) after every step.
    """

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


@dataclass
class Stage:
    """A stage of training: the learner, its data, and the evaluation on held-out data.

    Args:
        title: title of the progress bar.
        learner: module whose `learner(batch)` returns the loss and a table of figures.
        make: function from a step to its batch; equal steps give equal batches.
        check: evaluates the learner at intervals, without gradients, and returns held-out figures to show.
        slow: parameters whose names contain this text learn at `slow_factor` times the rate.
        slow_factor: see `slow`.
        outer: parts of the names of input and output matrices, which AdamW trains; see `muon_and_adamw`.
        halved: whether to use bfloat16 autocast even if the accelerator does not.
    """

    title: str
    learner: nn.Module
    make: Callable[[int], Batch]
    check: Callable[[nn.Module], dict[str, float]]
    slow: str = ""
    slow_factor: float = 1.0
    outer: tuple[str, ...] = ()
    halved: bool = False


class Training:
    """A running training: its seed, length and accelerator, and its progress in stages, steps and seconds.

    Creating it sets torch's seed, and the number of threads if it is given.

    Args:
        out: the folder to write.
        options: the caller's options.
        minutes: default length.
        batch_size, check_s: defaults of the options; see `RunOptions`.
        accumulate, log_dir: see `open_accelerator`; the run is logged under the folder's name.

    Attributes:
        finished: results of the finished stages: title, steps, seconds, held-out figures.

    Raises:
        InputError: both `minutes` and `steps` are given, or one is not positive; see also `open_accelerator`.
        CheckpointError: `resume` is set and the state file cannot be read.
    """

    def __init__(
        self,
        out: Path,
        options: RunOptions,
        *,
        minutes: float,
        batch_size: int,
        check_s: float = 60.0,
        accumulate: int = 1,
        log_dir: Path | None = None,
    ) -> None:
        self.steps, self.minutes = options.get("steps"), options.get("minutes")
        if self.steps is None and self.minutes is None:
            self.minutes = minutes
        elif self.steps is not None and self.minutes is not None:
            raise InputError("steps", self.steps, "cannot be combined with minutes; pass one of the two")
        if self.steps is not None and self.steps < 1:
            raise InputError("steps", self.steps, "must be at least 1")
        if self.minutes is not None and self.minutes <= 0:
            raise InputError("minutes", self.minutes, "must be more than 0")
        self.seed, self.batch_size = options.get("seed", 0), options.get("batch_size", batch_size)
        self.checkpoint_s = options.get("checkpoint_s", 60.0)
        self.check_s, self.on_step = options.get("check_s", check_s), options.get("on_step")
        if (threads := options.get("threads")) is not None:
            torch.set_num_threads(threads)
        torch.manual_seed(self.seed)
        self.accelerator = open_accelerator(accumulate, None if log_dir is None else (log_dir, out.name))
        self.path = Path(options.get("state") or out.with_name(f"{out.name}.training.pt"))
        self.stage, self.step, self.seconds = 0, 0, 0.0
        self.finished: list[Json] = []
        self.restored: Json | None = None
        if options.get("resume"):
            self.restored = read_state(self.path)
            self.stage, self.finished = self.restored["stage"], self.restored["finished"]

    @property
    def length(self) -> dict[str, float | int | None]:
        """The length of the training as command line options."""
        return {"minutes": self.minutes, "steps": self.steps}

    def progress(self, share: float = 1.0) -> float:
        """Progress of the stage through its share of the length: 0 at the start, at least 1 at the end."""
        if self.steps is not None:
            return self.step / max(1, round(self.steps * share))
        return self.seconds / max(1e-9, 60 * share * (self.minutes or 0.0))

    def train(self, stage: Stage, share: float = 1.0) -> None:
        """Train a stage for a share of the length, save the state, and leave whole weights in the learner.

        Under FSDP a copy of the learner is sharded and trained. The learner itself stays an ordinary module.
        It receives the copy's weights before each evaluation, in all processes after the same steps.

        Raises:
            CheckpointError: the state to resume from belongs to another model.
        """
        accelerator = self.accelerator
        learner = stage.learner.to(accelerator.device)
        if self.restored is not None:
            try:
                learner.load_state_dict(self.restored["weights"])
            except RuntimeError as error:
                rule = "must load the state of a training of the same model"
                raise CheckpointError("resume", str(self.path), rule) from error
        trained = twin(learner) if accelerator.is_fsdp2 else learner
        optimizers = muon_and_adamw(
            trained.named_parameters(), slow=stage.slow, slow_factor=stage.slow_factor, outer=stage.outer
        )
        module, *prepared = accelerator.prepare(trained, *optimizers)
        if isinstance(module, FSDPModule):
            # a batch without images gives a compressor no gradients, possibly in one process only
            module.set_reduce_scatter_unused_params(True)
        self._restore(trained, optimizers)

        def gather() -> None:
            if trained is not learner:
                learner.load_state_dict(
                    get_model_state_dict(trained, options=StateDictOptions(full_state_dict=True))
                )

        whole = {"bar_format": "{l_bar}{bar}| {n:.0f}/{total:.0f} [{elapsed}<{remaining}{postfix}]"}
        quiet = not accelerator.is_main_process
        bar = tqdm(total=100.0, desc=stage.title, mininterval=5, disable=quiet, **whole)
        saved_at = checked_at = self.seconds
        shown: dict[str, float] = {}
        while (progress := self.progress(share)) < 1:
            started = time.monotonic()
            loss, figures = self._step(stage, module, prepared, progress)
            self.step, self.seconds = self.step + 1, self._agree(self.seconds + time.monotonic() - started)
            if self.seconds - checked_at >= self.check_s:
                gather()
                shown, checked_at = self._check(stage), self.seconds
            rate = max(float(group["lr"]) for optimizer in prepared for group in optimizer.param_groups)
            accelerator.log({"loss": loss, "learning_rate": rate, **figures}, step=self.step)
            if self.seconds - saved_at >= self.checkpoint_s:
                self._save(trained, optimizers)
                saved_at = self.seconds
            bar.set_postfix(step=self.step, loss=f"{loss:.4f}", **shown, refresh=False)
            bar.update(min(100.0, 100 * self.progress(share)) - bar.n)
            if self.on_step is not None:
                self.on_step(self.step, loss)
        gather()
        shown = self._check(stage)
        bar.set_postfix(step=self.step, **shown)
        bar.close()
        self._save(trained, optimizers)
        made = {"stage": stage.title, "steps": self.step, "seconds": round(self.seconds), **shown}
        self.finished.append(made)
        accelerator.free_memory()

    def _step(
        self, stage: Stage, module: nn.Module, optimizers: list[torch.optim.Optimizer], progress: float
    ) -> tuple[float, dict[str, float]]:
        """Run a step, and return the mean loss of its batches and the figures of the last one."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(group["peak"], self.step, progress)
        accelerator, total = self.accelerator, 0.0
        halved = {"device_type": accelerator.device.type, "dtype": torch.bfloat16}
        count: int = accelerator.gradient_accumulation_steps
        torch.manual_seed(self.seed + self.step)  # of dropout: a resumed training draws as one in one go
        for index in range(self.step * count, (self.step + 1) * count):
            batch = stage.make(index).to(accelerator.device)
            with accelerator.accumulate(module):
                with torch.autocast(**halved) if stage.halved else nullcontext():
                    loss, figures = module(batch)
                accelerator.backward(loss)
            total += float(loss.detach()) / count
        accelerator.clip_grad_norm_(module.parameters(), MAX_GRADIENT_NORM)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return total, scalars(figures) if accelerator.trackers else {}

    def _check(self, stage: Stage) -> dict[str, float]:
        """Evaluate on held-out data in the main process; log and return the figures."""
        if not self.accelerator.is_main_process:
            return {}
        with torch.no_grad():
            shown = stage.check(stage.learner)
        self.accelerator.log(shown, step=self.step)
        return shown

    def _agree(self, seconds: float) -> float:
        """Broadcast the main process's seconds, so that all processes stop after the same step."""
        if self.accelerator.num_processes == 1:
            return seconds
        clock = torch.tensor(seconds, dtype=torch.float64, device=self.accelerator.device)
        return float(broadcast(clock))

    def _save(self, trained: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Write the whole state atomically: an interruption keeps the previous file.

        All processes contribute their shards, and the main process writes. `Accelerator.save_state` does not
        fit: with FSDP it supports no more optimizers than models, its states cannot be loaded with another
        number of processes, and loading them may execute code.
        """
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, moments = get_state_dict(trained, optimizers, options=options)
        if self.accelerator.is_main_process:
            state: Json = {name: getattr(self, name) for name in STATE & vars(self).keys()}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(self.path) as temporary:
                torch.save(state | {"weights": weights, "optimizers": moments}, temporary)

    def _restore(self, trained: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Reset the progress, or restore the progress and the optimizers from the state to resume from."""
        self.step, self.seconds = 0, 0.0
        if self.restored is None:
            return
        state, self.restored = self.restored, None
        moments, some = state["optimizers"], StateDictOptions(full_state_dict=True, strict=False)
        set_optimizer_state_dict(trained, optimizers, moments, options=some)
        for name, parameter in trained.named_parameters():
            if name not in moments["state"]:  # no gradient so far; torch creates states for all
                for optimizer in optimizers:
                    optimizer.state.pop(parameter, None)
        self.step, self.seconds = state["step"], state["seconds"]


def read_state(path: Path) -> Json:
    """Read a state of tensors and plain values, without executing code of the file.

    Raises:
        CheckpointError: the file does not exist, is damaged, or was written by another version of mmspec.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        rule = "needs a training state, and the file does not exist; start without resume"
        raise CheckpointError("resume", str(path), rule) from error
    except Exception as error:
        raise CheckpointError(
            "resume", str(path), f"needs a training state that can be read ({error})"
        ) from error
    if not isinstance(state, dict) or set(state) != STATE:
        rule = "needs a training state that this version of mmspec wrote; start without resume"
        raise CheckpointError("resume", str(path), rule)
    return state


def twin(module: M) -> M:
    """Copy a module with its weights, but share the frozen target, which is a plain attribute."""
    target = vars(module).get("target")
    return deepcopy(module, {id(target): target})


def scalars(figures: object) -> dict[str, float]:
    """Convert figures to numbers to log, by name; a vector becomes one entry per index."""
    if not isinstance(figures, dict):
        return {}
    named = {name: value.detach().flatten().tolist() for name, value in figures.items()}
    return {
        name if len(values) == 1 else f"{name}/{index}": value
        for name, values in named.items()
        for index, value in enumerate(values)
    }


def open_accelerator(accumulate: int = 1, log: tuple[Path, str] | None = None) -> Accelerator:
    """Create the `Accelerator` that `accelerate launch` configures, with bfloat16 autocast on a GPU.

    Args:
        accumulate: number of batches per optimizer step.
        log: folder for TensorBoard logs, and the name of the run in it.

    Raises:
        InputError: `accumulate` is below 1, or the kind of sharding does not support Muon.
        MissingDependencyError: TensorBoard is not installed, or torch is too old for FSDP.
    """
    if accumulate < 1:
        raise InputError("accumulate", accumulate, "must be at least 1")
    if log is not None and importlib.util.find_spec("tensorboard") is None:
        raise MissingDependencyError(f"writing logs needs tensorboard: {how_to_install('train')}")
    accelerator = Accelerator(
        mixed_precision="bf16" if torch.cuda.is_available() else "no",
        gradient_accumulation_steps=accumulate,
        log_with=None if log is None else "tensorboard",
        project_dir=None if log is None else log[0],
        # a batch without images gives a compressor no gradients
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    kind = accelerator.distributed_type
    flat = kind == DistributedType.FSDP and not accelerator.is_fsdp2
    if flat or kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        rule = (
            "must use DDP, or version 2 of FSDP (`--use_fsdp --fsdp_version 2`): Muon needs whole matrices, "
            "which the others flatten and split"
        )
        raise InputError("accelerate launch", f"{kind.value}{', version 1' if flat else ''}", rule)
    if accelerator.is_fsdp2 and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise MissingDependencyError("Training with FSDP needs torch 2.13: pip install 'torch>=2.13'")
    if log is not None:
        accelerator.init_trackers(log[1])
    return accelerator


@contextmanager
def flush_subnormals() -> Iterator[None]:
    """Flush subnormal numbers to zero inside the context, and restore the setting afterwards.

    Without it, activations that decay to subnormal numbers slow down a training on a CPU several times.
    """
    was_flushing = bool(torch.tensor(SUBNORMAL) * 1 == 0)  # torch has no getter
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_flushing)
