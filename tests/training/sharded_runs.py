"""Trainings in two processes on CPUs, whose weights are sharded by FSDP 2: run by test_sharded_training."""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from mmspec.training.drafter import train_drafter
from reference.vlm import train_vlm

STEPS = 6


class Interrupted(Exception):
    pass


def shard() -> None:
    """Turn FSDP on for CPUs; accelerate does so for GPUs only."""
    for state in (AcceleratorState, PartialState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)


def train(trainer: Callable[..., Path], *given: Path, stop: int = 0, **how: Any) -> None:
    """Train, and stop after so many steps, unless they are none."""
    done = 0

    def interrupt(step: int, loss: float) -> None:
        nonlocal done
        done += 1
        if done == stop:
            raise Interrupted

    with contextlib.suppress(Interrupted):
        how |= {"steps": STEPS, "batch_size": 2, "checkpoint_s": 0.0 if stop else 1e9, "on_step": interrupt}
        trainer(*given, **how)


def train_head(folder: Path, name: str, **how: Any) -> None:
    """Train a FLASH head of the target in a folder on its rows, of which some have no image."""
    how |= {"method": "flash", "settings": {"block": 2}, "data": folder / "rows.jsonl", "check_s": 0.0}
    train(train_drafter, folder / "target", folder / name, **how)


def train_model(folder: Path, name: str, **how: Any) -> None:
    """Train a vision-language model, three steps in each of its stages."""
    train(train_vlm, folder / name, size="tiny", tower_share=0.5, **how)


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
