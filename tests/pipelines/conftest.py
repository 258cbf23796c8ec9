"""Tiny pipelines and the checkpoints they are loaded from, one set for each test module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from mmspec.pipelines import MMSpecPipeline, VisionLanguagePipeline
from tests.pipelines.byte_level import byte_level_tokenizer
from tests.tiny_models import VISION_LANGUAGE_FAMILIES, save_family, tiny_llama, tiny_tokenizer


@pytest.fixture(autouse=True)
def one_core() -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints: llava, qwen2_5_vl, text, draft (a smaller text model of the same tokenizer), bytes."""
    base = tmp_path_factory.mktemp("checkpoints")
    for family in ("llava", "qwen2_5_vl"):
        save_family(family, base / family)
    tokenizer = tiny_tokenizer()
    for name, model in {"text": tiny_llama(vocab=128), "draft": tiny_llama(vocab=128, layers=1)}.items():
        model.save_pretrained(base / name)
        tokenizer.save_pretrained(base / name)
    tiny_llama(vocab=300).save_pretrained(base / "bytes")
    byte_level_tokenizer().save_pretrained(base / "bytes")
    return base


@pytest.fixture(scope="module")
def llava() -> VisionLanguagePipeline:
    return VisionLanguagePipeline(*VISION_LANGUAGE_FAMILIES["llava"]())


@pytest.fixture(scope="module")
def text(checkpoints: Path) -> MMSpecPipeline:
    return MMSpecPipeline.from_pretrained(checkpoints / "text")


@pytest.fixture(scope="module")
def bytes_pipeline(checkpoints: Path) -> MMSpecPipeline:
    return MMSpecPipeline.from_pretrained(checkpoints / "bytes")
