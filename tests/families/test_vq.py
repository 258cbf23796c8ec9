"""The image tokenizers in diffusers' class: the tokens and images of an independent forward."""

import pytest
import torch
from diffusers import VQModel
from safetensors.torch import load_file

from mmspec.errors import CheckpointError
from mmspec.families.llamagen.conversion import RAW_CODEBOOK_FILE, convert_checkpoint
from mmspec.families.llamagen.vq import vq_from_official
from mmspec.models.autoencoders import decode_tokens, encode_image
from tests.families.ldm_layout import naive_decode, naive_encode, vq_shapes, vq_state

STRIDES = {16: (1, 1, 2, 2, 4), 8: (1, 2, 2, 4)}
KEYS = {16: 344, 8: 300}
BOOK = "quantize.embedding.weight"


@pytest.fixture(scope="module", params=STRIDES)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vq")
    state = vq_state(STRIDES[request.param])
    torch.save({"model": state, "steps": 3}, folder / f"vq_ds{request.param}_c2i.pt")
    written = convert_checkpoint(folder / f"vq_ds{request.param}_c2i.pt", folder / "out")
    assert written["kind"] == "vq" and written["stride"] == request.param
    return request.param, state, folder / "out"


def test_tokens_and_images_are_those_of_an_independent_forward(case):
    stride, state, folder = case
    assert len(vq_shapes(STRIDES[stride])) == KEYS[stride], "as in the published file"
    vq = VQModel.from_pretrained(folder)
    stored = vq.quantize.embedding.weight
    torch.testing.assert_close(stored.norm(dim=-1), torch.ones(64))
    assert torch.equal(load_file(folder / RAW_CODEBOOK_FILE)["codebook"], state[BOOK])
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(2, 3, 3 * stride, 2 * stride, generator=generator) * 2 - 1
    tokens = encode_image(vq, pixels)
    assert tokens.shape == (2, 3, 2)
    assert torch.equal(tokens, naive_encode(state, pixels))
    tokens = torch.randint(64, (2, 3, 2), generator=generator)
    images = decode_tokens(vq, tokens)
    assert images.shape == pixels.shape
    torch.testing.assert_close(images, naive_decode(state, tokens), rtol=1e-4, atol=1e-4)


def test_keys_that_do_not_fit_are_named(tmp_path):
    state = vq_state(STRIDES[8])
    for name in (
        BOOK,
        "quant_conv.weight",
        "encoder.conv_blocks.1.res.0.nin_shortcut.weight",
        "decoder.mid.1.proj_out.bias",
    ):
        others = {other: tensor for other, tensor in state.items() if other != name}
        with pytest.raises(CheckpointError, match="missing keys") as caught:
            vq_from_official(tmp_path, others)
        assert name in str(caught.value).replace("\\", "")
        if name != BOOK:
            with pytest.raises(CheckpointError, match="wrong shapes"):
                vq_from_official(tmp_path, {**state, name: state[name][:-1]})
    with pytest.raises(CheckpointError, match=r"unknown keys: decoder\.conv_blocks\.1\.attn\.0\.q\.weight"):
        vq_from_official(tmp_path, {**state, "decoder.conv_blocks.1.attn.0.q.weight": torch.zeros(1)})
