"""What all trainings have in common: defaults, lengths, and the state that one goes on from."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from torch import nn

from mmspec.errors import CheckpointError, InputError
from mmspec.training.checkpointing import save_state
from mmspec.training.plan import PlanOptions, TrainingPlan
from mmspec.training.schedule import Budget


def test_keywords_are_the_attributes() -> None:
    assert set(PlanOptions.__annotations__) == {field.name for field in fields(TrainingPlan)}


def test_what_is_asked_for_wins_over_a_trainers_defaults() -> None:
    plan = TrainingPlan.of({}, minutes=10.0, batch_size=8, check_s=120.0)
    assert (plan.budget, plan.batch_size, plan.check_s) == (Budget(seconds=600.0), 8, 120.0)
    assert plan.length == {"minutes": 10, "steps": None}
    asked = TrainingPlan.of({"steps": 3, "minutes": None, "batch_size": 2}, minutes=10.0, batch_size=8)
    assert (asked.budget, asked.batch_size, asked.length) == (
        Budget(steps=3),
        2,
        {"minutes": None, "steps": 3},
    )


def test_impossible_lengths_are_refused_before_any_work() -> None:
    for options in ({"steps": 1, "minutes": 1.0}, {"steps": 0}, {"minutes": -1.0}):
        with pytest.raises(InputError):
            TrainingPlan.of(options, minutes=10.0, batch_size=8)  # type: ignore[arg-type]


def test_the_state_lies_beside_the_folder(tmp_path: Path) -> None:
    plan = TrainingPlan(batch_size=1, steps=1)
    made = plan.run(tmp_path / "out", Accelerator(cpu=True), nn.Linear(1, 1))
    assert made.state_path == tmp_path / "out.training.pt"
    with pytest.raises(CheckpointError, match="start without resume"):
        TrainingPlan(batch_size=1, steps=1, resume=True).run(tmp_path / "out", made.accelerator, made.model)


@pytest.mark.parametrize("state", [{}, {"model": nn.Linear(2, 1).state_dict(), "stage": 0, "finished": []}])
def test_the_state_of_another_model_is_refused(state: dict[str, Any], tmp_path: Path) -> None:
    save_state(tmp_path / "out.training.pt", state)
    plan = TrainingPlan(batch_size=1, steps=1, resume=True)
    with pytest.raises(CheckpointError, match="of the same model"):
        plan.run(tmp_path / "out", Accelerator(cpu=True), nn.Linear(1, 1))
