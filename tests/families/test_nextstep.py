"""NextStep-1: published folders, the forward in pieces and whole, prompts, image tokens and their decoder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerFast

from mmspec.errors import CheckpointError, InputError
from mmspec.families.nextstep.loading import load_nextstep, load_nextstep_tokenizer, load_nextstep_vae
from mmspec.families.nextstep.modeling import (
    SPECIAL_TOKENS,
    NextStepConfig,
    NextStepForImageGeneration,
    prompt_ids,
)
from tests.families.ldm_layout import ldm_shapes, naive_latents, naive_pixels, random_numbers
from tests.families.official_layout import fill
from tests.vectors.denoising_layout import net_shapes

WIDTH, HEADS, LAYERS, VOCABULARY, INNER = 32, 4, 2, 40, 48
CHANNELS, PATCH, TOKEN = 3, 2, 12
SIDE = 32  # of the published table of places
CONFIG = {
    "model_type": "nextstep",
    "architectures": ["NextStep"],
    "auto_map": {"AutoConfig": "configuration_nextstep.NextStepConfig"},
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000.0,
    "max_position_embeddings": 512,
    "attention_bias": True,
    "o_attention_bias": False,
    "latent_size": 8,
    "latent_patch_size": PATCH,
    "latent_channels": CHANNELS,
    "boi": 33,
    "eoi": 34,
    "image_placeholder_id": 35,
    "fm_head_dim": 16,
    "fm_head_layers": 2,
    "bos_token_id": None,
    "eos_token_id": 1,
}
VAE_WIDTHS = (32, 64, 64, 64)


def shapes() -> dict[str, tuple[int, ...]]:
    """Names of `nextstep/models/modeling_nextstep.py`; keys and values have half as many heads."""
    found: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCABULARY, WIDTH),
        "norm.weight": (WIDTH,),
        "lm_head.weight": (VOCABULARY, WIDTH),
        "gen_pos_embed": (1, SIDE * SIDE, WIDTH),
    }
    layers = {"image_in_projector": (WIDTH, TOKEN), "image_out_projector": (WIDTH, WIDTH)}
    for layer in (f"layers.{index}." for index in range(LAYERS)):
        layers |= {f"{layer}self_attn.{part}_proj": (WIDTH // 2, WIDTH) for part in "kv"}
        layers[f"{layer}self_attn.q_proj"] = (WIDTH, WIDTH)
        found |= {
            layer + "input_layernorm.weight": (WIDTH,),
            layer + "post_attention_layernorm.weight": (WIDTH,),
            layer + "self_attn.o_proj.weight": (WIDTH, WIDTH),
            layer + "mlp.gate_proj.weight": (INNER, WIDTH),
            layer + "mlp.up_proj.weight": (INNER, WIDTH),
            layer + "mlp.down_proj.weight": (WIDTH, INNER),
        }
    found |= {f"{name}.weight": shape for name, shape in layers.items()}
    found |= {f"{name}.bias": shape[:1] for name, shape in layers.items()}
    return found | net_shapes(TOKEN, WIDTH, 16, 2, TOKEN, prefix="image_head.net.")


def weights(seed: int = 0) -> dict[str, Tensor]:
    return fill(shapes(), seed, embeddings=("embed_tokens", "gen_pos_embed"))


def publish(folder: Path, tensors: Mapping[str, Tensor] | None = None, **changes: Any) -> Path:
    """A folder of two shards as the authors publish it; a change of None takes an entry out of the config."""
    folder.mkdir(exist_ok=True)
    config = {name: value for name, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    tensors, table = dict(weights() if tensors is None else tensors), {}
    for part in range(2):
        file = f"model-0000{1 + part}-of-00002.safetensors"
        names = sorted(tensors)[part::2]
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        table |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> NextStepForImageGeneration:
    return load_nextstep(publish(tmp_path_factory.mktemp("nextstep")))


def test_a_published_folder_gives_its_weights(tmp_path):
    loaded = load_nextstep(publish(tmp_path))
    own = loaded.state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in own.items()} == shapes()
    assert all(torch.equal(own[name], tensor) for name, tensor in weights().items())
    assert not loaded.training
    assert loaded.config.rope_parameters["rope_theta"] == 5000.0
    assert loaded.config.token_size == TOKEN


def test_a_saved_folder_is_read_again_by_both_ways(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(shapes())
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
    prompt = torch.tensor([[1, 2, 3]])
    expected = model(prompt)
    assert torch.equal(load_nextstep(tmp_path)(prompt), expected)
    assert torch.equal(NextStepForImageGeneration.from_pretrained(tmp_path)(prompt), expected)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), NextStepConfig)


def test_what_a_config_lacks_is_read_from_the_weights(tmp_path):
    unsaid = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "attention_bias")
    unsaid += ("o_attention_bias", "latent_channels", "latent_patch_size", "fm_head_dim", "fm_head_layers")
    config = load_nextstep(publish(tmp_path, **dict.fromkeys(unsaid))).config
    assert {name: getattr(config, name) for name in unsaid} == {name: CONFIG[name] for name in unsaid}
    with pytest.raises(CheckpointError, match="num_attention_heads"):
        load_nextstep(publish(tmp_path, num_attention_heads=None))


def test_image_tokens_are_patches_by_rows_with_their_channels_first(model):
    rows, columns = 2, 3
    tokens = random_numbers(2, rows * columns, TOKEN)
    latents = model.unpatchify(tokens, rows, columns)
    assert latents.shape == (2, CHANNELS, rows * PATCH, columns * PATCH)
    for row in range(rows):
        for column in range(columns):
            patch = latents[1, :, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH]
            assert torch.equal(tokens[1, row * columns + column], patch.reshape(-1))
    assert model.unpatchify(random_numbers(1, 9, TOKEN)).shape[2:] == (3 * PATCH, 3 * PATCH)
    with pytest.raises(InputError, match="an image of 6 tokens"):
        model.unpatchify(tokens)


def tokenizer(special: tuple[str, ...] = SPECIAL_TOKENS) -> PreTrainedTokenizerFast:
    """A vocabulary of letters, digits and the tokens around images."""
    letters = ["<unk>", *"abcdefghij0123456789* "]
    made = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(letters)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": list(special)})
    return fast


def test_a_prompt_is_caption_size_and_begin_of_image(tmp_path):
    tokenizer().save_pretrained(tmp_path)
    words = load_nextstep_tokenizer(tmp_path)
    config = NextStepConfig(boi=99)
    area = words.convert_tokens_to_ids("<|image_area|>")
    size = words.convert_tokens_to_ids(["1", "6", "*", "3", "2"])
    caption = words.convert_tokens_to_ids(["b", "a", "d"])
    assert prompt_ids(words, config, "bad", 16, 32).tolist() == [[*caption, area, *size, 99]]
    assert prompt_ids(words, config, "", 16, 32).tolist() == [[area, *size, 99]]
    unsaid = prompt_ids(words, NextStepConfig(), "", 16, 32)
    assert unsaid[0, -1] == words.convert_tokens_to_ids("<|begin_of_image|>")
    with pytest.raises(InputError, match="rows, columns"):
        prompt_ids(words, config, "a", 0, 3)
    with pytest.raises(CheckpointError, match="image_area"):
        prompt_ids(tokenizer(SPECIAL_TOKENS[1:]), config, "a", 1, 1)
    tokenizer(("<|eot|>",)).save_pretrained(tmp_path / "others")
    for folder, named in ((tmp_path / "none", "tokenizer"), (tmp_path / "others", "image_area")):
        with pytest.raises(CheckpointError, match=named):
            load_nextstep_tokenizer(folder)


def test_the_image_tokenizer_is_read_from_its_published_file(tmp_path):
    state = fill(ldm_shapes(VAE_WIDTHS, 4), 0, embeddings=())
    folder = tmp_path / "vae"
    folder.mkdir()
    torch.save(state, folder / "checkpoint.pt")
    published = {"ch": 32, "ch_mult": [1, 2, 2, 2], "z_channels": 4, "scaling_factor": 0.5, "psz": 2}
    (folder / "config.json").write_text(json.dumps(published))
    vae = load_nextstep_vae(tmp_path)
    assert (vae.config.scaling_factor, vae.config.shift_factor) == (0.5, 0.1159)
    latents = random_numbers(2, 4, 3, 5)
    pixels = vae.decode(latents).sample
    assert pixels.shape == (2, 3, 24, 40)
    torch.testing.assert_close(pixels, naive_pixels(state, latents), rtol=1e-4, atol=1e-4)
    means = vae.encode(pixels).latent_dist.mean
    torch.testing.assert_close(means, naive_latents(state, pixels).chunk(2, 1)[0], rtol=1e-4, atol=1e-4)
    vae.save_pretrained(tmp_path / "saved")
    again = load_nextstep_vae(tmp_path / "saved")
    assert torch.equal(again.decode(latents).sample, pixels)
    assert again.config.shift_factor == 0.1159
    state["decoder.strange"] = state.pop("decoder.norm_out.weight")
    torch.save(state, folder / "checkpoint.pt")
    with pytest.raises(CheckpointError, match=r"missing keys: decoder.norm_out.weight.*decoder.strange"):
        load_nextstep_vae(folder)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="no usable autoencoder"):
        load_nextstep_vae(tmp_path)
