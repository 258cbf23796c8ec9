"""Official files of LlamaGen and LANTERN: all formats are read, and errors name what does not fit."""

import argparse
import math
import os
from pathlib import Path

import pytest
import torch

from mmspec.errors import CheckpointError, InputError
from mmspec.families.llamagen.configuration import LlamaGenConfig
from mmspec.families.llamagen.conversion import convert_checkpoint, infer_config, llamagen_from_official
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from tests.families.converted import convert_and_load
from tests.families.official_layout import (
    CAPTIONS,
    CLASSES,
    GRID,
    HEADS,
    IMAGE_SIZE,
    store,
    transformer_shapes,
    transformer_state,
)

SETTINGS = {"image_size": IMAGE_SIZE, "num_heads": HEADS}
CONDITIONS = {"c2i": CLASSES, "t2i": CAPTIONS}
# name, hidden width, parameters in millions: as the authors publish them (2406.06525, table 1)
PUBLISHED = [
    ("B", 2048, 110.9),
    ("L", 2816, 342.9),
    ("XL", 3584, 774.7),
    ("XXL", 4096, 1411.0),
    ("3B", 8704, 3096.7),
    ("1B", 5632, 1199.6),
]


def same_weights(model, state):
    """Whether the weights are those of an official state dict, whose forward is tested by itself."""
    own, due = model.state_dict(), llamagen_from_official(Path("c2i_256.pt"), state, None, HEADS).state_dict()
    return own.keys() == due.keys() and all(torch.equal(own[name], due[name]) for name in due)


@pytest.mark.parametrize(
    ("condition", "container", "prefix"),
    [
        ("c2i", None, "module._orig_mod."),
        ("t2i", "model", "module."),
        ("c2i", "module", ""),
        ("t2i", "state_dict", "_orig_mod."),
    ],
)
def test_every_container_and_wrapper_gives_the_same_weights(tmp_path, condition, container, prefix):
    state = transformer_state(**CONDITIONS[condition])
    stored = {**state, "freqs_cis": torch.zeros(3), "layers.0.attention.kv_cache.k_cache": torch.zeros(2)}
    content = {prefix + name: tensor for name, tensor in stored.items()}
    if container is not None:
        others = {"optimizer": {"state": {}}, "steps": 7, "args": argparse.Namespace(gpt_model="GPT-B")}
        others["random_state"] = torch.get_rng_state()
        content = {**others, container: content}
    assert same_weights(convert_and_load(tmp_path, content), state)


def test_published_sizes_are_known_by_their_shapes():
    for size, hidden, millions in PUBLISHED:
        preset = LlamaGenConfig.from_size(size)
        assert preset.intermediate_size == hidden
        heads, depth = preset.num_attention_heads, preset.num_hidden_layers
        settings = {"width": preset.hidden_size, "heads": heads, "vocabulary": 16384, "classes": 1000}
        shapes = transformer_shapes(layers=depth, hidden=hidden, **settings)
        assert len(shapes) == 4 + 7 * depth
        assert round(sum(math.prod(shape) for shape in shapes.values()) / 1e6, 1) == millions
        tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        config = infer_config(Path("c2i_384.pt"), tensors, 24, None)
        assert (config.num_attention_heads, config.num_key_value_heads) == (heads, heads)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_keys_that_do_not_fit_are_named(condition):
    state = transformer_state(**CONDITIONS[condition])
    refused = [
        ({**state, "layers.0.attention.q_norm.weight": torch.ones(16)}, r"unknown keys: layers\.0\.att")
    ]
    for name, tensor in state.items():
        others = {other: tensor for other, tensor in state.items() if other != name}
        named = "attention" if "wqkv" in name else name.removesuffix(".weight").rsplit(".", 1)[-1]
        refused.append((others, named))
        if "embedding_table" not in name and "uncond" not in name:  # whose sizes are read from them
            refused.append(({**state, name: torch.cat([tensor, tensor])}, "wrong shapes: .*instead of"))
    if condition == "c2i":
        gap = {
            n: tensor for n, tensor in transformer_state(layers=3, **CLASSES).items() if "layers.1" not in n
        }
        refused.append((gap, r"missing keys: layers\.1\.attention"))
    for tensors, named in refused:
        with pytest.raises(CheckpointError, match=named):
            llamagen_from_official(Path("tiny.pt"), tensors, IMAGE_SIZE, HEADS)


class RunsCode:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_a_pickle_with_code_is_refused_and_the_code_is_named(tmp_path):
    torch.save({"model": transformer_state(**CLASSES), "args": RunsCode(tmp_path / "ran")}, tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match=r"would run \w+\.mkdir"):
        convert_checkpoint(tmp_path / "c.pt", tmp_path / "out", image_size=IMAGE_SIZE)
    assert os.listdir(tmp_path) == ["c.pt"]


def damaged(path: Path, how: str) -> None:
    torch.save(transformer_state(**CLASSES), path)
    content = path.read_bytes()
    {
        "cut": lambda: path.write_bytes(content[: len(content) // 2]),
        "empty": lambda: path.write_bytes(b""),
        "text": lambda: path.write_text("<!DOCTYPE html>"),
        "list": lambda: torch.save([1, 2], path),
        "no tensors": lambda: torch.save({"epoch": 3}, path),
        "another model": lambda: torch.save({"conv1.weight": torch.ones(2, 2)}, path),
        "gone": path.unlink,
    }[how]()


def test_other_files_are_refused(tmp_path):
    for how in ("cut", "empty", "text", "list", "no tensors", "another model", "gone"):
        path = tmp_path / ("checkpoint.safetensors" if how in ("text", "gone") else "checkpoint.pt")
        damaged(path, how)
        with pytest.raises(CheckpointError, match=r"^checkpoint (must|is|has) "):
            convert_checkpoint(path, tmp_path / "out", image_size=IMAGE_SIZE)
        assert not (tmp_path / "out").exists(), how


def test_settings_that_contradict_the_file_are_refused(tmp_path):
    for name, settings, named in (
        ("tiny.pt", {}, "image-size"),
        ("tiny.pt", {"image_size": 100}, "multiple of 16"),
        ("tiny.pt", {"image_size": 0}, "multiple of 16"),
        ("c2i_B_256.pt", {"image_size": 384}, "256, which this checkpoint was trained for"),
        ("c2i_B_256.pt", {"num_heads": None}, "--heads"),
        ("c2i_B_256.pt", {"num_heads": 5}, "num_heads"),
        ("c2i_B_256.pt", {"num_heads": 0}, "num_heads"),
    ):
        torch.save(transformer_state(**CLASSES), tmp_path / name)
        with pytest.raises(InputError, match=named):
            convert_checkpoint(tmp_path / name, tmp_path / "out", **{"num_heads": HEADS, **settings})


def test_a_conversion_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    torch.save(transformer_state(**CLASSES), tmp_path / "tiny.pt")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="new or an empty"):
        convert_checkpoint(tmp_path / "tiny.pt", tmp_path / "out", **SETTINGS)
    assert os.listdir(tmp_path / "out") == ["mine.txt"]

    def fail(self, folder):
        (Path(folder) / "config.json").write_text("{}")
        raise OSError("no space left on device")

    monkeypatch.setattr(LlamaGenForCausalLM, "save_pretrained", fail)
    with pytest.raises(OSError, match="no space"):
        convert_checkpoint(tmp_path / "tiny.pt", tmp_path / "new", **SETTINGS)
    assert sorted(os.listdir(tmp_path)) == ["out", "tiny.pt"]


LANTERN = {"c2i": (CLASSES, 1), "t2i": (CAPTIONS, 6)}
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
    settings, slots = LANTERN[condition]
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
    store(folder, tensors or lantern_tensors(state), config, "model.safetensors")
    return state


@pytest.mark.parametrize("condition", LANTERN)
def test_the_weights_and_settings_of_lantern_are_kept(tmp_path, condition):
    state = lantern_folder(tmp_path / "in", condition)
    written = convert_checkpoint(tmp_path / "in", tmp_path / "out")
    model = LlamaGenForCausalLM.from_pretrained(tmp_path / "out")
    assert same_weights(model, state)
    assert written["grid_size"] == model.config.grid_size == GRID
    assert model.config.prefix_length == LANTERN[condition][1]
    assert model.config.rms_norm_eps == 1e-6
