"""ImagePipeline on disk: what is saved draws the same images when it is loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging

from mmspec.errors import CheckpointError
from mmspec.models.llamagen.conversion import convert_checkpoint
from mmspec.pipelines import ImagePipeline, MMSpecPipeline
from tests.models.official_layout import CLASSES, HEADS, fill, transformer_state, vq_state
from tests.models.test_chameleon_vq import as_anole, decoder_shapes
from tests.tiny_models.image_tokens import tiny_anole, tiny_emu3, tiny_janus
from tests.tiny_models.llamagen import save_llamagen, tiny_text_encoder

QUIET: dict[str, Any] = {"disable": True}


def draw(pipe: Any, **asked: Any) -> Any:
    pipe.set_progress_bar_config(**QUIET)
    what = {"prompt": "a red circle"} if pipe.processor is not None else {"class_labels": 2}
    return pipe(**what, seed=3, output_type="pt", **asked)


@pytest.mark.parametrize("condition", ["class", "caption"])
def test_a_saved_llamagen_draws_the_same(condition: str, tmp_path: Path) -> None:
    pipe = MMSpecPipeline.from_pretrained(save_llamagen(tmp_path / "first", condition), accelerator="none")
    wanted = draw(pipe)
    pipe.save_pretrained(tmp_path / "second")
    again = MMSpecPipeline.from_pretrained(tmp_path / "second", accelerator="none")
    found = draw(again)
    assert found.tokens == wanted.tokens
    assert torch.equal(found.images, wanted.images)
    files = [
        sorted(
            str(path.relative_to(tmp_path / name)) for path in (tmp_path / name).rglob("*") if path.is_file()
        )
        for name in ("first", "second")
    ]
    assert files[0] == files[1]
    assert torch.equal(again.target.codebook, pipe.target.codebook)  # type: ignore[attr-defined]


def test_converted_files_are_put_together_by_name(tmp_path: Path) -> None:
    torch.save(transformer_state(seed=9, vocabulary=64, **CLASSES), tmp_path / "tiny.pt")
    torch.save({"model": vq_state((1, 2))}, tmp_path / "vq.pt")
    convert_checkpoint(tmp_path / "tiny.pt", tmp_path / "transformer", num_heads=HEADS, image_size=64)
    convert_checkpoint(tmp_path / "vq.pt", tmp_path / "tokenizer")
    pipe = MMSpecPipeline.from_pretrained(
        tmp_path / "transformer", vq=tmp_path / "tokenizer", accelerator="sjd", window=8
    )
    assert isinstance(pipe, ImagePipeline)
    wanted = draw(pipe)
    assert wanted.images.shape == (1, 3, 8, 8)
    pipe.save_pretrained(tmp_path / "whole")
    found = draw(MMSpecPipeline.from_pretrained(tmp_path / "whole", accelerator="sjd", window=8))
    assert torch.equal(found.images, wanted.images)


def test_a_text_encoder_may_lie_elsewhere(tmp_path: Path) -> None:
    import shutil

    folder = save_llamagen(tmp_path / "model", "caption")
    wanted = draw(MMSpecPipeline.from_pretrained(folder, accelerator="none"))
    shutil.rmtree(folder / "text_encoder")
    elsewhere = tmp_path / "t5"
    shutil.move(folder / "tokenizer", elsewhere)
    tiny_text_encoder().save_pretrained(elsewhere)
    found = draw(MMSpecPipeline.from_pretrained(folder, text_encoder=elsewhere, accelerator="none"))
    assert found.tokens == wanted.tokens


@pytest.mark.parametrize("made", [tiny_janus, tiny_emu3])
def test_models_that_also_answer_draw_when_asked_to(made: Any, tmp_path: Path) -> None:
    logging.set_verbosity_error()
    model, tokenizer = made()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pipe = ImagePipeline.from_pretrained(tmp_path, accelerator="sjd", window=4)
    assert isinstance(pipe, ImagePipeline)
    rows, columns = (4, 4)
    size = (rows * pipe.target.stride, columns * pipe.target.stride)
    output = draw(pipe, height=size[0], width=size[1])
    assert output.images.shape == (1, 3, *size)
    assert output.stats.nfe_max <= pipe.target.grid_for(*size).length
    output = draw(ImagePipeline(model, tokenizer, "none"), height=size[0], width=size[1], temperature=0)
    assert output.tokens == draw(pipe, height=size[0], width=size[1], temperature=0).tokens


def test_anole_finds_its_image_tokenizer_among_its_weights_or_in_a_file(tmp_path: Path) -> None:
    model, tokenizer = tiny_anole()
    whole = {**model.model.vqmodel.state_dict(), **fill(decoder_shapes(), 3, embeddings=())}
    folder = as_anole(model, whole, tmp_path / "anole")
    tokenizer.save_pretrained(folder)
    torch.save({"state_dict": whole}, tmp_path / "vqgan.ckpt")
    pipe = ImagePipeline.from_pretrained(folder, accelerator="none")
    wanted = draw(pipe, temperature=0)
    assert wanted.images.shape == (1, 3, 32, 32)
    pipe.save_pretrained(tmp_path / "saved")  # the decoder goes to a subfolder
    for place, parts in ((folder, {"vq": tmp_path / "vqgan.ckpt"}), (tmp_path / "saved", {})):
        found = draw(ImagePipeline.from_pretrained(place, accelerator="none", **parts), temperature=0)
        assert torch.equal(found.images, wanted.images)
    (tmp_path / "saved" / "vq" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="missing keys: decoder"):
        ImagePipeline.from_pretrained(tmp_path / "saved")
