"""ImagePipeline on disk: what is saved draws the same images when it is loaded again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.vq_model import VQModel

from mmspec.errors import CheckpointError
from mmspec.models.autoencoders import decode_tokens, ldm_name, ldm_shape
from mmspec.pipelines import ImagePipeline, MMSpecPipeline
from tests.tiny_models.image_tokens import CODES, tiny_emu3_5
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
