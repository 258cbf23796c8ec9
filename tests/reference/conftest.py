"""Reference models that several files of tests begin with."""

from pathlib import Path

import pytest
import torch

from reference.image import save_image_model
from reference.image_model import (
    SHAPES_BY_SIZE,
    ImageLoss,
    build_caption_tokenizer,
    build_text_encoder,
    build_transformer,
)
from reference.vq import build_vq


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LlamaGen of captions with random weights, as `train image` writes it."""
    folder = tmp_path_factory.mktemp("start") / "llamagen"
    shape = SHAPES_BY_SIZE["tiny"]
    torch.manual_seed(0)
    tokenizer = build_caption_tokenizer()
    transformer, encoder = build_transformer(shape, "caption"), build_text_encoder(shape, tokenizer)
    ImageLoss(transformer, encoder).write_null_embedding()
    build_vq("tiny").save_pretrained(folder / "own-vq")
    save_image_model(transformer, encoder, tokenizer, folder, {"stages": []}, vq=folder / "own-vq")
    return folder
