"""MAR: the forward against loops over one image, the decoding order, official files and their conversion."""

from __future__ import annotations

import argparse
import json
import logging
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModel

from mmspec.errors import CheckpointError, InputError
from mmspec.families.image_parts import ModelSource
from mmspec.families.mar.conversion import _infer_config, convert_mar, is_mar, load_parts, mar_from_official
from mmspec.families.mar.modeling import SIZES, MARConfig, MARForImageGeneration
from tests.cli.test_convert import run
from tests.families.ldm_layout import ldm_shapes, naive_latents, naive_pixels, random_numbers
from tests.families.mar_layout import (
    CELLS,
    CLASSES,
    GRID,
    HEADS,
    TOKEN,
    mar_shapes,
    mar_state,
    naive_conditions,
)
from tests.families.official_layout import fill

VAE_WIDTHS = (32, 32, 64, 64, 64)
PUBLISHED = {"mar_base": (364, 207.9), "mar_large": (476, 478.3), "mar_huge": (604, 942.4)}  # keys, millions


@pytest.fixture(scope="module")
def model() -> MARForImageGeneration:
    return mar_from_official(Path("tiny.pth"), mar_state(), HEADS)


def places(known: list[list[int]]) -> Tensor:
    mask = torch.zeros(len(known), CELLS, dtype=torch.bool)
    for row, cells in enumerate(known):
        mask[row, cells] = True
    return mask


@pytest.mark.parametrize(
    "known",
    [[[3, 7], [0, 15], [4, 5]], [[3], [], [15, 0, 7, 8]], [list(range(CELLS)), [9], []]],
    ids=["as many", "others", "all and none"],
)
def test_conditions_are_those_of_each_image_alone(model, known):
    tokens, labels = random_numbers(3, CELLS, TOKEN), [2, CLASSES, 0]
    with torch.no_grad():
        own = model.conditions(tokens, places(known), torch.tensor(labels))
    for row, cells in enumerate(known):
        expected = naive_conditions(mar_state(), tokens[row], sorted(cells), labels[row])
        torch.testing.assert_close(own[row].double(), expected, rtol=1e-5, atol=1e-5)


def test_published_sizes_are_known_by_their_shapes():
    for name, (keys, millions) in PUBLISHED.items():
        size = SIZES[name]
        head = {"head_width": size.head_width, "head_depth": size.head_depth}
        shapes = mar_shapes(size.width, size.layers, 16, 256, 64, 1000, **head)
        assert len(shapes) == keys
        assert round(sum(math.prod(shape) for shape in shapes.values()) / 1e6, 1) == millions
        tensors = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
        config = _infer_config(Path(name) / "checkpoint-last.pth", tensors, None)
        expected = MARConfig.from_size(name)
        for field in ("num_attention_heads", "encoder_layers", "decoder_layers", "head_depth", "buffer_size"):
            assert getattr(config, field) == getattr(expected, field)


def official(folder: Path, seed: int = 0) -> Path:
    """Make a file as published: weights, their averages, and the training state."""
    content = {
        "model": mar_state(seed + 1),
        "model_ema": mar_state(seed),
        "optimizer": {"state": {}},
        "epoch": 400,
        "args": argparse.Namespace(model="mar_base"),
    }
    torch.save(content, folder / "checkpoint-last.pth")
    return folder / "checkpoint-last.pth"


def kl16(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    state = fill(ldm_shapes(VAE_WIDTHS, 4, attends=(4,), quant=True), 0, embeddings=())
    torch.save({"model": state}, folder / "kl16.ckpt")
    return folder / "kl16.ckpt", state


def test_official_files_become_one_folder_that_is_read_again(tmp_path, caplog):
    file, (vae_file, state) = official(tmp_path), kl16(tmp_path)
    with caplog.at_level(logging.WARNING):
        summary = convert_mar(tmp_path, tmp_path / "out", vae=vae_file, num_heads=HEADS)
    assert not caplog.records
    assert (summary["kind"], summary["grid_size"], summary["dtype"]) == ("mar", GRID, "float32")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == mar_shapes()
    assert all(torch.equal(tensor, mar_state()[name]) for name, tensor in stored.items())
    config = AutoConfig.from_pretrained(tmp_path / "out")
    model, vae = load_parts(ModelSource(str(tmp_path / "out"), config)).values()
    inputs = random_numbers(1, CELLS, TOKEN), places([[3, 4]]), torch.tensor([1])
    again = mar_from_official(file, mar_state(), HEADS)
    assert torch.equal(model(*inputs), again(*inputs))
    assert isinstance(AutoModel.from_pretrained(tmp_path / "out"), MARForImageGeneration)
    latents = random_numbers(1, 4, 2, 3)
    pixels = vae.decode(latents).sample
    assert pixels.shape == (1, 3, 32, 48)
    tokens = random_numbers(2, CELLS, TOKEN)
    assert torch.equal(model.unpatchify(tokens)[1, :, 2, 3], tokens[1, 2 * GRID + 3])
    torch.testing.assert_close(pixels, naive_pixels(state, latents), rtol=1e-4, atol=1e-4)
    means = vae.encode(pixels).latent_dist.mean
    torch.testing.assert_close(means, naive_latents(state, pixels).chunk(2, 1)[0], rtol=1e-4, atol=1e-4)
    assert vae.config.scaling_factor == 0.2325


def test_the_command_knows_official_files(tmp_path):
    file, (vae_file, _) = official(tmp_path), kl16(tmp_path)
    assert is_mar(file) and is_mar(tmp_path) and not is_mar(vae_file) and not is_mar(tmp_path / "none.pth")
    written = run(
        "convert", tmp_path, "--out", tmp_path / "out", "--vae", vae_file, "--heads", HEADS, "--json"
    )
    assert json.loads(written.stdout)["kind"] == "mar" and (tmp_path / "out/vae/config.json").is_file()
    with pytest.raises(InputError, match="applies to MAR alone"):
        run("convert", vae_file, "--out", tmp_path / "other", "--vae", vae_file)


def test_missing_keys_and_wrong_shapes_are_named(tmp_path):
    state = fill(mar_shapes(depth=1, head_depth=1), 0, embeddings=())
    for name in ("fake_latent", "z_proj.weight", "decoder_norm.bias", "encoder_blocks.0.attn.qkv.weight"):
        others = {other: value for other, value in state.items() if other != name}
        with pytest.raises(CheckpointError, match="missing keys"):
            mar_from_official(tmp_path / "a.pth", others, HEADS)
        doubled = {**state, name: torch.cat([state[name], state[name]], -1)}
        with pytest.raises(CheckpointError, match=r"wrong shapes: .*instead of|square"):
            mar_from_official(tmp_path / "a.pth", doubled, HEADS)
    with pytest.raises(CheckpointError, match="unknown keys: pos_embed"):
        mar_from_official(tmp_path / "a.pth", {**state, "pos_embed": torch.ones(1)}, HEADS)
