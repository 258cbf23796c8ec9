"""Chameleon's image tokenizer: transformers' encoder, an independent decoder, and files in both layouts."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmspec.errors import CheckpointError
from mmspec.families.chameleon.vq import load_chameleon_vq
from mmspec.families.images import image_target
from tests.families.ldm_layout import ldm_shapes, naive_pixels
from tests.families.official_layout import fill
from tests.tiny_models import CODES, tiny_anole

WIDTHS, LATENTS = (32, 32, 32, 64), 16  # those of the tiny model


def decoder_shapes() -> dict[str, tuple[int, ...]]:
    """The decoder by names of taming-transformers, with two blocks a level."""
    shapes = ldm_shapes(WIDTHS, LATENTS, blocks=1)
    return {name: shape for name, shape in shapes.items() if name.startswith("decoder.")}


def naive_decode(state, tokens):
    codes = state["quantize.embedding.weight"][tokens].permute(0, 3, 1, 2)
    return naive_pixels(state, codes)


@pytest.fixture(scope="module")
def model():
    return tiny_anole()[0]


@pytest.fixture(scope="module")
def state(model):
    """Return all weights of the image tokenizer: those of transformers' encoder, and of a random decoder."""
    return {**model.model.vqmodel.state_dict(), **fill(decoder_shapes(), 3, embeddings=())}


def as_anole(model, state, folder):
    """A folder of transformers whose file holds the decoder too, as published."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.vqmodel.{name}": tensor for name, tensor in state.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_target_draws_with_it(model, state, tmp_path):
    target = image_target(model, load_chameleon_vq(as_anole(model, state, tmp_path)))
    assert torch.equal(target.codebook, state["quantize.embedding.weight"])
    codes = torch.randint(CODES, (2, 16), generator=torch.Generator().manual_seed(1))
    expected = naive_decode(state, codes.reshape(2, 4, 4)).clamp(-1, 1)
    torch.testing.assert_close(target.decode_tokens(codes), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(CheckpointError, match="load_chameleon_vq"):
        image_target(model).decode_tokens(codes)


def test_the_encoder_is_that_of_transformers(model, state, tmp_path):
    torch.save({"state_dict": {**state, "loss.logvar": torch.zeros(1)}}, tmp_path / "vqgan.ckpt")
    vq = load_chameleon_vq(tmp_path / "vqgan.ckpt")
    pixels = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        theirs = model.model.vqmodel.encode(pixels).image_tokens
        latents = vq.encode(pixels).latents
        own = vq.quantize(latents)[2][2]
    assert len(set(own.tolist())) > 3
    assert torch.equal(own, theirs.flatten())
