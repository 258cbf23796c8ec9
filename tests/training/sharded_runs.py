"""Trainings in two processes on CPUs, whose weights are sharded by FSDP 2: run by test_sharded_training."""

import contextlib
import sys
from pathlib import Path

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from mmspec.training.drafter import train_drafter
from reference.vlm import train_vlm

STEPS = 6


class Interrupted(Exception):
    pass


def shard() -> None:
    """Turn FSDP on, which accelerate does for GPUs alone."""
    for state in (AcceleratorState, PartialState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)


def train_head(folder: Path, name: str, *, resume: bool = False, stop: int = 0) -> None:
    """Train a FLASH head of the target in a folder on its rows, of which some have no image."""

    def interrupt(step: int, loss: float) -> None:
        if step == stop:
            raise Interrupted

    with contextlib.suppress(Interrupted):
        train_drafter(
            folder / "target",
            folder / name,
            method="flash",
            settings={"block": 2},
            data=folder / "rows.jsonl",
            steps=STEPS,
            batch_size=2,
            checkpoint_s=0.0 if stop else 1e9,
            check_s=0.0,
            resume=resume,
            on_step=interrupt,
        )


def train_model(folder: Path, name: str, *, resume: bool = False, stop: int = 0) -> None:
    """Train a vision-language model, three steps in each of its stages."""
    done = 3 if resume else 0

    def interrupt(step: int, loss: float) -> None:
        nonlocal done
        done += 1
        if done == stop:
            raise Interrupted

    with contextlib.suppress(Interrupted):
        train_vlm(
            folder / name,
            size="tiny",
            steps=STEPS,
            tower_share=0.5,
            batch_size=2,
            checkpoint_s=0.0 if stop else 1e9,
            resume=resume,
            on_step=interrupt,
        )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    train_head(folder, "parallel")
    shard()
    train_head(folder, "whole")
    train_head(folder, "stopped", stop=3)
    PartialState().wait_for_everyone()  # the main process has to have written its state
    train_head(folder, "stopped", resume=True)
    train_model(folder, "vlm-whole")
    train_model(folder, "vlm-stopped", stop=5)
    PartialState().wait_for_everyone()
    train_model(folder, "vlm-stopped", resume=True)
