"""Training on audio: sequences are transcripts of `generate`, with the states of transformers' forward."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationMixin, WhisperFeatureExtractor

from mmspec.errors import InputError, MediaError
from mmspec.heads.model import HIDDEN
from mmspec.methods.draft_model.distillation import Distillation, DraftModelLoss
from mmspec.targets import adapt
from mmspec.targets.encoder_decoder import shares_encoder
from mmspec.training.data.audio import AudioRows, read_clips
from mmspec.training.data.sources import open_speech
from mmspec.training.draft_model import shortened
from mmspec.training.losses.base import read
from mmspec.training.recipes import RECIPES
from tests.tiny_models.any_class import tiny_of_class
from tests.tiny_models.encoder_decoder import START, tiny_trocr, tiny_whisper

END, LONGEST = 5, 12
EXTRACTOR = WhisperFeatureExtractor(feature_size=8, chunk_length=1, hop_length=400)  # 40 frames


def tokenize(text: str, **_: object) -> dict[str, list[int]]:
    return {"input_ids": [int(word) for word in text.split()]}


def data_of(regenerate: int = LONGEST, count: int = 7) -> AudioRows:
    model = tiny_whisper(layers=3)
    model.generation_config.eos_token_id = END
    noise = np.random.default_rng(0).normal(0, 0.1, (count, 9000)).astype("float32")
    rows = [{"audio": {"array": each, "sampling_rate": 16_000}, "text": "7 8 9"} for each in noise]
    processor: Any = SimpleNamespace(feature_extractor=EXTRACTOR, tokenizer=tokenize)
    return AudioRows(adapt(model), processor, read_clips(rows, with_text=True), 4, 0, regenerate)


def features(data: AudioRows, row: int) -> torch.Tensor:
    samples = data.rows[row].audio["array"]  # type: ignore[index]
    return EXTRACTOR(samples, sampling_rate=16_000, return_tensors="pt")["input_features"]


def test_a_sequence_is_the_models_own_transcript() -> None:
    data = data_of()
    for row in range(len(data.rows)):
        found = data.example(row)
        assert found is not None and found.answer == 1
        due = GenerationMixin.generate(
            data.target.model, features(data, row), max_new_tokens=LONGEST, do_sample=False
        )
        assert found.inputs["input_ids"].tolist() == due.tolist() and due.shape[1] > 2


def test_a_text_is_learnt_up_to_the_end_token() -> None:
    found = data_of(regenerate=0).example(0)
    assert found is not None and found.inputs["input_ids"].tolist() == [[START, 7, 8, 9, END]]
    assert found.learnt.tolist() == [False, True, True, True, True]


@torch.no_grad()
def test_states_are_those_of_the_clip() -> None:
    data = data_of()
    examples = [data.example(row) for row in range(len(data.rows))]
    states = read(data.target, [one for one in examples if one is not None], (HIDDEN,)).taps[HIDDEN]
    for row, example in enumerate(examples):
        assert example is not None
        ids = example.inputs["input_ids"]
        due = data.target.model(features(data, row), decoder_input_ids=ids).logits[0]
        torch.testing.assert_close(data.target.head(states[row, : ids.shape[1]]), due, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["medusa", "hydra", "eagle3", "dflash"])
def test_heads_learn_from_audio(name: str) -> None:
    data = data_of(regenerate=0)
    model = RECIPES[name].build(data.target).train()
    RECIPES[name].learn(model, data.target)(data.batch(0, 0))[0].backward()
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)


def test_a_draft_model_keeps_the_encoder_and_learns_from_the_target() -> None:
    data = data_of()
    model: Any = shortened(data.target.model, 2)
    assert shares_encoder(adapt(model), data.target)
    own, layers = model.get_decoder().layers, data.target.model.get_decoder().layers
    assert len(own) == 2 and model.config.decoder_layers == 2
    for layer, kept in zip(own, (layers[0], layers[2]), strict=True):
        assert torch.equal(layer.fc1.weight, kept.fc1.weight)
    learner = DraftModelLoss(model, data.target, Distillation(own_share=0.0))
    optimizer = torch.optim.Adam(own.parameters(), 3e-3)
    losses = []
    for _ in range(25):
        loss, _ = learner(learner.make(data, 0, 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def decoder_layers(model: Any) -> set[str]:
    return {*re.findall(r"layers\.(\d+)", " ".join(model.get_decoder().state_dict()))}


@pytest.mark.parametrize("name", ["CohereAsr", "MoonshineStreaming", "TrOCR"])
def test_a_shortened_decoder_has_the_encoder_of_its_model(name: str) -> None:
    """Their configs state the number of decoder layers in different places."""
    model = tiny_trocr() if name == "TrOCR" else tiny_of_class(f"{name}ForConditionalGeneration")
    made = shortened(model, 1)
    assert shares_encoder(adapt(made), adapt(model))
    assert len(decoder_layers(made)) == 1 < len(decoder_layers(model))


def test_unusable_clips_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "clips.jsonl"
    for row, rule in (
        ({"text": "a"}, "must be"),
        ({"audio": "none.wav", "text": "a"}, "audio file that exists"),
        ({"audio": "clips.jsonl"}, "must have a text"),
    ):
        file.write_text(json.dumps(row) + "\n", encoding="utf-8")
        with pytest.raises(InputError, match=f"line 1 {rule}" if rule == "must be" else rule):
            read_clips(file, with_text=True)
    data = data_of()
    samples = {"array": np.zeros(16_001, "float32"), "sampling_rate": 16_000}
    with pytest.raises(MediaError, match="must last at most 1 seconds"):
        data.read(read_clips([{"audio": samples}], with_text=False)[0])
    how: Any = dict(max_length=7, regenerate=0, learn_prompts=False)
    with pytest.raises(InputError, match="max_length cannot be used"):
        open_speech("-", None, None, None, 1, 0, [], **how)  # type: ignore[arg-type]
