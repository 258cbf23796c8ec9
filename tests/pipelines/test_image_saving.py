"""ImagePipeline on disk: what is saved draws the same images when it is loaded again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.vq_model import VQModel
from transformers.utils import logging

from mmspec.errors import CheckpointError
from mmspec.families.llamagen.conversion import convert_checkpoint
from mmspec.models.autoencoders import decode_tokens, ldm_name, ldm_shape
from mmspec.pipelines import ImagePipeline, MMSpecPipeline
from tests.families.ldm_layout import vq_state
from tests.families.official_layout import CLASSES, HEADS, fill, transformer_state
from tests.families.test_chameleon_vq import as_anole, decoder_shapes
from tests.tiny_models.image_tokens import CODES, tiny_anole, tiny_emu3, tiny_emu3_5, tiny_janus
from tests.tiny_models.llamagen import save_llamagen

QUIET: dict[str, Any] = {"disable": True}


def draw(pipe: Any, **asked: Any) -> Any:
    pipe.set_progress_bar_config(**QUIET)
    what = {"prompt": "a red circle"} if pipe.processor is not None else {"class_labels": 2}
    return pipe(**what, seed=3, output_type="pt", **asked)


def test_a_saved_llamagen_draws_the_same(tmp_path: Path) -> None:
    pipe = MMSpecPipeline.from_pretrained(save_llamagen(tmp_path / "first", "caption"), accelerator="none")
    wanted = draw(pipe)
    pipe.save_pretrained(tmp_path / "second")
    again = MMSpecPipeline.from_pretrained(tmp_path / "second", accelerator="none")
    found = draw(again)
    assert found.tokens == wanted.tokens
    assert torch.equal(found.images, wanted.images)
    first, second = (
        {p.relative_to(tmp_path / n) for p in (tmp_path / n).rglob("*")} for n in ("first", "second")
    )
    assert first == second
    assert torch.equal(again.target.codebook, pipe.target.codebook)  # type: ignore[attr-defined]
    shutil.move(tmp_path / "second" / "text_encoder", tmp_path / "t5")
    shutil.copytree(tmp_path / "second" / "tokenizer", tmp_path / "t5", dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "second" / "tokenizer")
    apart = MMSpecPipeline.from_pretrained(
        tmp_path / "second", text_encoder=tmp_path / "t5", accelerator="none"
    )
    assert draw(apart).tokens == wanted.tokens


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


@pytest.mark.parametrize("made", [tiny_janus, tiny_emu3])
def test_models_that_also_answer_draw_when_asked_to(made: Any, tmp_path: Path) -> None:
    logging.set_verbosity_error()
    model, tokenizer = made()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pipe = ImagePipeline.from_pretrained(tmp_path, accelerator="sjd", window=4)
    assert isinstance(pipe, ImagePipeline)
    side = 4 * pipe.target.stride
    how: dict[str, Any] = {"height": side, "width": side, "temperature": 0}
    output = draw(pipe, **how)
    assert output.images.shape == (1, 3, side, side)
    assert output.tokens == draw(ImagePipeline(model, tokenizer, "none"), **how).tokens


def test_emu3_5_draws_without_its_remote_code(tmp_path: Path) -> None:
    """Its image tokenizer is a file in the layout of taming-transformers, whose last level attends."""
    folder = tmp_path / "Emu3.5-Image"
    for part in tiny_emu3_5():
        part.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Emu3ForCausalLM"], "auto_map": {"AutoConfig": "configuration_emu3.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    vq = VQModel(
        block_out_channels=(32,) * 5,
        down_block_types=("DownEncoderBlock2D",) * 4 + ("AttnDownEncoderBlock2D",),
        up_block_types=("AttnUpDecoderBlock2D",) + ("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        num_vq_embeddings=CODES,
        vq_embed_dim=4,
    )
    named = {ldm_name(name, 5): (name, weight) for name, weight in vq.state_dict().items()}
    assert "decoder.up.4.attn.0.q.weight" in named and "encoder.down.4.attn.0.norm.bias" in named
    shaped = {name: weight.reshape(ldm_shape(name, weight.shape)) for name, (_, weight) in named.items()}
    torch.save(shaped, tmp_path / "model.ckpt")
    size = {"height": 64, "width": 48}

    pipe = ImagePipeline.from_pretrained(folder, vq=tmp_path / "model.ckpt", accelerator="none")
    assert pipe.sampling({}) | {"guidance_scale": 5.0, "top_k": 5120} == pipe.sampling({})
    output = draw(pipe, temperature=0, **size)
    codes = torch.tensor(pipe.target.grid_for(64, 48).codes(output.tokens[0])).reshape(1, 4, 3)
    assert torch.equal(output.images, ((decode_tokens(vq.eval(), codes).clamp(-1, 1) + 1) / 2))
    faster = ImagePipeline.from_pretrained(folder, vq=tmp_path / "model.ckpt", accelerator="sjd", window=4)
    assert draw(faster, temperature=0, **size).tokens == output.tokens
    with pytest.raises(CheckpointError, match="vq"):
        ImagePipeline.from_pretrained(folder)


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
