"""Drafters for text-only language models: training data, and use in a pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec import MMSpecPipeline
from mmspec.targets import CausalTarget
from mmspec.training.data.conversation_file import read_conversations
from mmspec.training.data.conversations import ConversationReader
from mmspec.training.drafter import train_drafter
from tests.pipelines.byte_level import byte_level_tokenizer
from tests.tiny_models import tiny_llama

TEMPLATE = """
    {%- for message in messages %}{{ message['role'] + ':' + message['content'] + '<|end|>' }}{% endfor %}
    {%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""
ROWS = [{"prompt": f"tell {row} é", "response": f"the <image> of the <video> {row}"} for row in range(7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model with its tokenizer and a chat template for strings alone."""
    made, tokenizer = tmp_path_factory.mktemp("llama"), byte_level_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = tiny_llama(vocab=len(tokenizer), layers=4)
    model.config.max_position_embeddings = 256
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


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


def test_a_target_reads_text_as_in_a_pipeline(folder: Path) -> None:
    """The same tokens, and replies are learnt up to their ends; `<image>` is text as any other."""
    pipe = MMSpecPipeline.from_pretrained(folder, accelerator="none")
    reader = ConversationReader(CausalTarget(pipe.model), pipe.processor)
    (said,) = read_conversations(ROWS[:1], with_images=False)
    made = reader.example(said)
    (request,) = pipe._prepare(ROWS[0]["prompt"], {"max_new_tokens": 1}).requests
    start = request.inputs["input_ids"].shape[1]
    assert torch.equal(made.inputs["input_ids"][:, :start], request.inputs["input_ids"])
    assert set(made.inputs) == set(request.inputs) - {"attention_mask"} and made.answer == start
    learnt = made.inputs["input_ids"][0][made.learnt]
    assert reader.tokenizer.decode(learnt) == ROWS[0]["response"] + "<|end|>"
