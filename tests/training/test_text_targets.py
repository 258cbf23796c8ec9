"""Drafters for language models that see no images: what they learn from, and the way to a pipeline."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.real_language import DRAFTS, as_text, model, train_drafts, train_heads
from mmspec import MMSpecPipeline
from mmspec.assets import own_drafters, reference_models
from mmspec.errors import CheckpointError, InputError
from mmspec.targets import CausalTarget
from mmspec.training.data.conversation_file import read_conversations
from mmspec.training.data.conversations import ConversationReader, ConversationRows
from mmspec.training.data.scenes import scene_data
from mmspec.training.drafter import train_drafter
from mmspec.training.losses.base import choose_vocabulary
from mmspec.training.recipes import RECIPES
from tests.pipelines.byte_level import byte_level_tokenizer
from tests.tiny_models import tiny_image, tiny_llama

TEMPLATE = """
    {%- for message in messages %}{{ message['role'] + ':' + message['content'] + '<|end|>' }}{% endfor %}
    {%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""
ROWS = [{"prompt": f"tell {row} é", "response": f"the <image> of the <video> {row}"} for row in range(7)]


class Interrupted(Exception):
    pass


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


def test_a_reduced_vocabulary_is_that_of_all_replies_of_a_file(folder: Path) -> None:
    """Each counted once, and learnt so; where the target replies itself, it is asked."""
    pipe = MMSpecPipeline.from_pretrained(folder, accelerator="none")
    reader = ConversationReader(CausalTarget(pipe.model), pipe.processor)
    data = ConversationRows(reader, read_conversations(ROWS, with_images=False), 2, 0)
    read = [reader.example(row) for row in data.rows]
    learnt = [made.inputs["input_ids"][0][made.learnt] for made in read]
    assert [each.tolist() for each in data.learnt_texts()] == [each.tolist() for each in learnt]
    settings = {"draft_vocabulary": 20}
    head = RECIPES["eagle3"].build(reader.target, **settings)
    choose_vocabulary(head, data, batches=0)
    often = torch.bincount(torch.cat(learnt)).sort(descending=True, stable=True).indices[:20]
    assert head.draft_tokens.tolist() == sorted(often.tolist())
    data.regenerate = 3
    choose_vocabulary(head, data, batches=1)
    assert data.told and head.draft_tokens.tolist() != sorted(often.tolist())


@pytest.mark.slow
def test_an_interrupted_training_of_text_goes_on(folder: Path, tmp_path: Path) -> None:
    def run(name: str, stop: int, resume: bool = False) -> list[float]:
        losses: list[float] = []

        def record(step: int, loss: float) -> None:
            losses.append(loss)
            if step == stop:
                raise Interrupted

        how: dict[str, Any] = {"steps": 3, "batch_size": 2, "max_length": 80, "checkpoint_s": 0.0}
        with contextlib.suppress(Interrupted):
            train_drafter(
                folder, tmp_path / name, ROWS, method="medusa", on_step=record, resume=resume, **how
            )
        return losses

    whole = run("whole", stop=0)
    assert run("cut", stop=2) == whole[:2] and run("cut", stop=0, resume=True) == whole[2:]


def test_what_a_language_model_cannot_learn_from_is_refused_first(folder: Path, tmp_path: Path) -> None:
    """By row, and before weights are read."""
    kept, image = tmp_path / "target", tmp_path / "a.png"
    kept.mkdir()
    tiny_image(0).save(image)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (kept / name).write_bytes((folder / name).read_bytes())
    (kept / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")  # no weights are there

    def refused(data: Any, message: str, **how: Any) -> None:
        with pytest.raises((InputError, CheckpointError), match=message):
            train_drafter(kept, tmp_path / "out", data, steps=1, **how)

    refused(scene_data, "data: got 'none'.*'llama' sees no images")
    parts = [{"type": "image"}, {"type": "text", "text": "what?"}]
    of_parts = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "no"}]}
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, [*ROWS, {**ROWS[0], "image": "a.png"}, of_parts])))
    refused(file, r"data, line 8: .*sees no images.*data, line 9: .*sees no images")
    refused(ROWS, "learns from images", method="cjd")
    refused(scene_data, "learn_prompts: got True", learn_prompts=True)
    refused(ROWS, "missing keys")
    (kept / "chat_template.jinja").unlink()
    refused(ROWS, "a tokenizer with a chat template")


def test_heads_to_compare_draft_the_same_tokens_and_are_not_trained_twice(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "replies.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)))
    train_heads(str(folder), data, tmp_path / "heads", ["eagle3", "medusa"], 40, steps=2, batch_size=2)
    found = [tmp_path / "heads" / name / "model.safetensors" for name in ("eagle3", "medusa")]
    tables = [load_file(file)["d2t"] for file in found]
    assert len(tables[0]) == 40 and torch.equal(*tables)
    before = [file.read_bytes() for file in found]
    train_heads(str(folder), data, tmp_path / "heads", ["eagle3", "medusa"], 40, steps=9, batch_size=2)
    assert [file.read_bytes() for file in found] == before
    assert "medusa is there" in capsys.readouterr().err


def test_draft_models_to_compare_share_their_start_and_learn_what_they_say(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"tell {row}", "response": f"what the model says {row}"} for row in range(6)]
    data, out = tmp_path / "replies.jsonl", tmp_path / "drafts"
    data.write_text("\n".join(map(json.dumps, rows)))
    train_drafts(str(folder), data, out, 1, 6, ["kl"], batch_size=2)
    assert not (out / "own").exists()
    train_drafts(str(folder), data, out, 1, 6, batch_size=2)
    weights = {name: load_file(out / name / "model.safetensors") for name in DRAFTS}
    assert len({tuple(each["lm_head.weight"].flatten()[:99].tolist()) for each in weights.values()}) == 3
    made = {
        name: json.loads((out / name / "training.json").read_text())["command"]
        for name in (*DRAFTS, "kl-half")
    }
    assert f"--from {out / 'kl-half'} " in made["kl"] and f"--from {out / 'kl-half'} " in made["own"]
    assert "--from layers:1" in made["kl-half"] and not (out / "own-half").exists()
    assert "--own-share 0.5" in made["own"] and "--divergence hard_labels" in made["labels"]
    assert all(f"--data {data}" in each for each in made.values())
    train_drafts(str(folder), data, out, 1, 9, batch_size=2)
    assert "own is there" in capsys.readouterr().err
    assert load_file(out / "own" / "model.safetensors").keys() == weights["own"].keys()


def test_text_that_is_not_distilled_is_every_long_prompt_once_and_whole() -> None:
    long = " ".join(f"word{index}" for index in range(60))
    rows = as_text([long, "too short to learn from", long])
    assert [" ".join((row["prompt"], row["response"])) for row in rows] == [long]
    assert len(rows[0]["prompt"].split()) == 20


def test_the_folder_of_the_real_model_names_the_shipped_drafters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.real_language.write_folder", lambda file, out: out.mkdir())
    model(tmp_path / "smollm2", tmp_path / "any.gguf")
    found = own_drafters(tmp_path / "smollm2")
    for name in ("mtp", "ppd"):
        assert found.source_for(name) == str(reference_models()[f"smollm2-{name}"])
