"""Drafters for text-only language models, and their use in a pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmspec import MMSpecPipeline
from mmspec.training.drafter import train_drafter
from tests.pipelines.byte_level import byte_level_tokenizer
from tests.tiny_models import tiny_llama
from tests.training.test_draft_models import save

ROWS = [{"prompt": f"tell {row} é", "response": f"the <image> of the <video> {row}"} for row in range(7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_llama(vocab=len(byte_level_tokenizer()), layers=4)
    return save(model, tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def _short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmspec.training.data.conversations.TRIAL_TOKENS", 8)
    monkeypatch.setattr("mmspec.training.drafter.MEASURED_BATCHES", 1)


@pytest.mark.parametrize(
    "method",
    [
        *("eagle3:draft_vocabulary=64", "medusa", "hydra", "dflash", "mtp", "eagle"),
        "medusa:frequent_tokens=40",
    ],
)
@pytest.mark.every(4)
def test_heads_of_language_models_are_trained_and_draft(method: str, folder: Path, tmp_path: Path) -> None:
    name, *reduced = method.split(":")
    settings = {key: int(value) for key, value in (each.split("=") for each in reduced)}
    losses: list[float] = []
    how: dict[str, Any] = {"steps": 2, "batch_size": 2, "on_step": lambda step, loss: losses.append(loss)}
    if name == "eagle":
        how["regenerate"] = 6
    how["learn_prompts"] = name == "mtp"
    out = train_drafter(folder, tmp_path / "out", ROWS, method=name, settings=settings, **how)
    assert len(losses) == 2 and all(0 < loss < 100 for loss in losses)
    command = json.loads((out / "training.json").read_text())["command"]
    assert command.endswith("--learn-prompts") is (name == "mtp"), command
    asked = ["tell 1 é", "the the the"]
    plain = MMSpecPipeline.from_pretrained(folder, accelerator="none")(asked, max_new_tokens=20)
    drafting = MMSpecPipeline.from_pretrained(folder, accelerator=name, drafter=out)
    assert drafting(asked, max_new_tokens=20).tokens == plain.tokens
