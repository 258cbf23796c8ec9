"""Refusals of models that a pipeline is not for; the other refusals are rows of tests/bad_inputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmspec.errors import InputError, UnsupportedModelError
from mmspec.pipelines import ImagePipeline, MMSpecPipeline, VisionLanguagePipeline
from tests.tiny_models import tiny_llama, tiny_tokenizer
from tests.tiny_models.llamagen import save_llamagen


def test_a_model_that_only_draws_does_not_answer(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="ImagePipeline"):
        VisionLanguagePipeline.from_pretrained(save_llamagen(tmp_path / "class", "class"))


def test_a_model_that_only_answers_does_not_draw(tmp_path: Path) -> None:
    tiny_llama(vocab=128).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="model type 'llama' draws no images"):
        ImagePipeline.from_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM draws no images"):
        ImagePipeline(tiny_llama(vocab=128), tiny_tokenizer())
    with pytest.raises(InputError, match="vq: got .*no such part"):
        MMSpecPipeline.from_pretrained(tmp_path, vq=tmp_path)


def test_a_model_of_classes_takes_no_text_encoder(tmp_path: Path) -> None:
    folder = save_llamagen(tmp_path / "class", "class")
    with pytest.raises(InputError, match="text_encoder: got .*no such part"):
        MMSpecPipeline.from_pretrained(folder, text_encoder=folder)
