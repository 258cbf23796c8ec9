"""LANTERN's folders: the weights of LlamaGen under the names of Llama."""

import json

import pytest
import torch
from safetensors.torch import save_file

from mmspec.errors import CheckpointError, InputError
from mmspec.models.llamagen import LlamaGenForCausalLM
from mmspec.models.llamagen.conversion import convert_checkpoint
from tests.models.converted import same_weights
from tests.models.official_layout import CAPTIONS, CLASSES, GRID, transformer_state

CONDITIONS = {"c2i": (CLASSES, 1), "t2i": (CAPTIONS, 6)}
PARTS = {
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def lantern_tensors(state):
    tensors = {"lm_head.weight": state["output.weight"]}
    for name, tensor in state.items():
        if "wqkv" in name:
            layer = f"model.{name.removesuffix('attention.wqkv.weight')}self_attn."
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                tensors[f"{layer}{part}_proj.weight"] = rows.clone()
        elif name != "output.weight":
            for official, theirs in PARTS.items():
                name = name.replace(f".{official}.", f".{theirs}.")
            tensors[f"model.{name.replace('tok_embeddings', 'embed_tokens')}"] = tensor
    return tensors


def lantern_folder(folder, condition, tensors=None, **changes):
    settings, slots = CONDITIONS[condition]
    state = transformer_state(**settings)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "block_size": GRID**2,
        "cls_token_num": slots,
        "input_type": condition,
        "num_classes": 5,
        "caption_dim": 12,
        **changes,
    }
    folder.mkdir()
    save_file(tensors or lantern_tensors(state), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return state


@pytest.mark.parametrize("condition", CONDITIONS)
def test_the_weights_and_settings_are_kept(tmp_path, condition):
    state = lantern_folder(tmp_path / "in", condition)
    written = convert_checkpoint(tmp_path / "in", tmp_path / "out")
    model = LlamaGenForCausalLM.from_pretrained(tmp_path / "out")
    assert same_weights(model, state)
    assert written["grid_size"] == model.config.grid_size == GRID
    assert model.config.prefix_length == CONDITIONS[condition][1]
    assert model.config.rms_norm_eps == 1e-6


def test_keys_that_do_not_fit_are_named_as_in_the_file(tmp_path):
    tensors = lantern_tensors(transformer_state(**CLASSES))
    tensors["model.layers.0.self_attn.z_proj.weight"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
    tensors["lm_head.weight"] = torch.zeros(47, 32)
    lantern_folder(tmp_path / "in", "c2i", tensors)
    with pytest.raises(CheckpointError) as caught:
        convert_checkpoint(tmp_path / "in", tmp_path / "out")
    for named in ("missing keys: model.layers.0.self_attn.q_proj", "unknown keys: model", "shapes: lm_head"):
        assert named in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [{"input_type": "x2i"}, {"block_size": "many"}, {"hidden_size": 33}, {"num_attention_heads": 0}],
)
def test_configs_that_describe_no_llamagen_are_refused(tmp_path, changes):
    lantern_folder(tmp_path / "in", "c2i", **changes)
    with pytest.raises(CheckpointError, match="LlamaGen config"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out")


def test_a_config_of_more_layers_than_there_are_tensors_is_refused(tmp_path):
    lantern_folder(tmp_path / "in", "c2i", num_hidden_layers=10**9)
    with pytest.raises(CheckpointError, match="1000000000 layers"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out")


def test_weights_without_their_config_and_other_image_sizes_are_refused(tmp_path):
    lantern_folder(tmp_path / "in", "c2i")
    with pytest.raises(InputError, match="64, which this checkpoint"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", image_size=256)
    (tmp_path / "in" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="config of the weights"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out")
