"""Labels of draft tokens equal the model's replies with the token inserted; a judge trains on the labels."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec.cli.subject import Subject
from mmspec.errors import InputError
from mmspec.evaluation.examples import Example
from mmspec.pipelines import MMSpecPipeline
from mmspec_extras.cli import first_calls
from mmspec_extras.methods.judge.training import agreement, auc, fit_judge, label_prompt, train_judge
from tests.contracts.running import generate
from tests.tiny_models import tiny_llama, tiny_tokenizer

PROMPTS = ["what colour is the circle ?", "how many", "is the red star left ?", "where is it ?", "a red star"]


def call_of(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "apply_chat_template": False, "temperature": 0.0, "max_new_tokens": 16}


@pytest.fixture
def pipe(tmp_path: Path) -> Any:
    tiny_llama(vocab=128).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return MMSpecPipeline.from_pretrained(tmp_path / "model", accelerator="copy")


def test_a_label_is_of_the_reply_that_goes_on_behind_the_token(pipe: Any) -> None:
    call = call_of(PROMPTS[0])
    prompt = pipe.tokenizer(PROMPTS[0])["input_ids"]
    drafts = pipe.accelerator
    labels = label_prompt(pipe, call, drafts, random.Random(0), 3, "words")
    plain = generate(pipe.model, prompt, 16)
    assert len(labels) == 3
    for label in labels:
        place, before = label.place, [*prompt, *plain[: label.place]]
        assert label.token != plain[place]
        behind = generate(pipe.model, [*before, label.token], 16 - place - 1) if place < 15 else []
        texts = [
            pipe.tokenizer.decode(ids, skip_special_tokens=True)
            for ids in (plain[place:], [label.token, *behind])
        ]
        assert label.agreement == agreement(*texts, "words")
        ids = torch.tensor([[*before, label.token]])
        with torch.no_grad():
            state = pipe.model(ids, output_hidden_states=True).hidden_states[-1][0, -1]
        torch.testing.assert_close(label.state, state, rtol=1e-3, atol=1e-4)


def test_a_judge_is_trained_on_labels_and_decodes(pipe: Any, tmp_path: Path) -> None:
    calls, out = [call_of(prompt) for prompt in PROMPTS], tmp_path / "judge"
    how: dict[str, Any] = {"answer": "words", "bar": 0.12, "tokens_per_prompt": 6}
    drafts = pipe.accelerator
    train_judge(pipe, calls, out, **how)
    assert pipe.accelerator is drafts
    record = json.loads((out / "training.json").read_text())
    assert record["labels"] > 5 and 0 <= record["auc"] <= 1 and 0 < record["harmless"] < 1
    with pytest.raises(InputError, match="answer"):
        train_judge(pipe, calls, out, answer="sense")
    with pytest.raises(InputError, match="must be larger"):
        train_judge(pipe, calls, out, **{**how, "bar": 1.1})
    pipe.set_accelerator("copy", acceptance="judge", judge=str(out), threshold=0.1)
    output = pipe(**calls[0])
    assert output.stats.exactness == "lossy" and len(output.tokens[0]) == 16


def test_a_judge_learns_what_can_be_told_apart() -> None:
    """One kind is rare, and the states have numbers of every size."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(600, 12, generator=generator) * torch.logspace(-2, 2, 12) + 5
    harmless = (states - 5) @ (1 / torch.logspace(-2, 2, 12)) > 3.0
    head = fit_judge(states[:400], harmless[:400], 0.01)
    odds = head(states[400:]).detach()
    assert auc(odds, harmless[400:]) > 0.95
    pairs = [(a, b) for a in odds[harmless[400:]].tolist() for b in odds[~harmless[400:]].tolist()]
    won = sum((a > b) + (a == b) / 2 for a, b in pairs)
    assert auc(odds, harmless[400:]) == pytest.approx(won / len(pairs))
    found = odds > 0
    assert (found & harmless[400:]).sum() > 0.8 * harmless[400:].sum(), "both kinds have the same weight"
    assert (~found & ~harmless[400:]).sum() > 0.8 * (~harmless[400:]).sum()


@pytest.mark.parametrize(
    ("plain", "other", "answer", "expected"),
    [
        ("It is 5 and 1,200.", "So 1200", "number", 1.0),
        ("It is 5.", "It is 5.5.", "number", 0.0),
        ("nothing", "no number", "number", 1.0),
        ("A red star!", "a RED circle", "words", 2 / 3),
        ("a a b", "a c", "words", 0.4),
        ("", "", "words", 1.0),
    ],
)
def test_answers_agree(plain: str, other: str, answer: str, expected: float) -> None:
    assert agreement(plain, other, answer) == pytest.approx(expected)


def test_first_turns_are_learnt_from_and_later_ones_counted(capsys) -> None:
    examples = [Example(("describe", "and then?")), Example(("red",))]
    calls = first_calls(Subject(None, False, examples, {}, {}), temperature=0.0)
    assert [(call["prompt"], call["temperature"]) for call in calls] == [("describe", 0.0), ("red", 0.0)]
    assert "1 later turns of conversations are left out" in capsys.readouterr().err
