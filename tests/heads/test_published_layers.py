"""Layers of published heads: windows, rotary positions, biases, and errors that name unsupported fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from mmspec.errors import CheckpointError
from mmspec.heads.layers import MultimodalRotary
from mmspec.methods.eagle3.export import export_head
from mmspec.methods.eagle3.head import Eagle3Config, Eagle3Head
from mmspec.methods.eagle3.published import read_eagle3
from tests.families.naive_llama import feed_forward, rms_norm
from tests.methods.naive_dflash import frequencies, rotated

WIDTH, WORDS, HEADS, SIZE, ROWS = 16, 24, 4, 8, 11
TARGET = LlamaConfig(
    hidden_size=WIDTH,
    intermediate_size=20,
    num_attention_heads=HEADS,
    num_key_value_heads=2,
    head_dim=SIZE,
    num_hidden_layers=8,
    vocab_size=WORDS,
)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DEEPSEEK = YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.5}
PART = {"partial_rotary_factor": 0.5}
SLIDES = {"layer_types": ["sliding_attention"], "sliding_window": 4, "use_sliding_window": True}


def head_of(qk_norm: bool = False, **settings: Any) -> Eagle3Head:
    """A head of random weights, in double precision."""
    torch.manual_seed(0)
    head = Eagle3Head(Eagle3Config.for_target(TARGET, WORDS, qk_norm=qk_norm, **settings)).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return head.eval()


def publish(folder: Path, head: Eagle3Head, layer: dict[str, Any], layout: str = "speculators") -> Path:
    """Write a head in a layout, with these fields of its layer instead of its own."""
    config, weights = export_head(head, layout, "a/target", TARGET)
    table = config.get("transformer_layer_config", config)
    for name in ("rope_parameters", "rope_theta", "rope_scaling"):
        table.pop(name, None)
    table |= layer
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


@torch.no_grad()
def said(head: Eagle3Head) -> Tensor:
    """Logits [rows, V] over a sequence."""
    generator = torch.Generator().manual_seed(5)
    embeddings, *states = torch.randn(4, 1, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    state = head(head.fuse(embeddings, head.join(states)), torch.arange(ROWS)[None])
    return head.logits(state, lambda hidden: hidden)[0]


@torch.no_grad()
def naive(head: Eagle3Head, rotary: dict[str, Any], window: int | None = None, theta: float = 1e4) -> Tensor:
    """Like `said`, computed from the weights alone, without the config."""
    generator = torch.Generator().manual_seed(5)
    embeddings, *states = torch.randn(4, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    weights, turns = head.state_dict(), frequencies(SIZE, theta, rotary)
    own = {name.removeprefix("decoder.layers.0."): weight for name, weight in weights.items()}

    def through(rows: Tensor, name: str) -> Tensor:
        return rows @ own[f"{name}.weight"].T + own.get(f"{name}.bias", torch.zeros(1))

    features = torch.cat(states, -1) @ weights["fc.weight"].T
    rows = torch.cat(
        [rms_norm(embeddings, own["input_layernorm.weight"]), rms_norm(features, own["hidden_norm.weight"])],
        -1,
    )
    query, key, value = (through(rows, f"self_attn.{name}_proj").unflatten(-1, (-1, SIZE)) for name in "qkv")
    if "self_attn.q_norm.weight" in own:
        query, key = (
            rms_norm(each, own[f"self_attn.{name}_norm.weight"]) for each, name in ((query, "q"), (key, "k"))
        )
    query, key = (rotated(each, torch.arange(ROWS)[:, None], *turns, pairs=False) for each in (query, key))
    key, value = (each.repeat_interleave(HEADS // value.shape[1], 1) for each in (key, value))
    mixed = torch.zeros(ROWS, HEADS * SIZE, dtype=torch.float64)
    for row in range(ROWS):
        near = slice(0 if window is None else max(0, row - window + 1), row + 1)
        shares = ((key[near] * query[row]).sum(-1) / SIZE**0.5).softmax(0)
        mixed[row] = (shares[..., None] * value[near]).sum(0).flatten()
    hidden = features + through(mixed, "self_attn.o_proj")
    inner = rms_norm(hidden, own["post_attention_layernorm.weight"])
    if "mlp.gate_proj.bias" in own:
        gate, up = through(inner, "mlp.gate_proj"), through(inner, "mlp.up_proj")
        hidden = hidden + through(gate * gate.sigmoid() * up, "mlp.down_proj")
    else:
        hidden = hidden + feed_forward(own, inner)
    return rms_norm(hidden, weights["norm.weight"]) @ weights["lm_head.weight"].T


NEW, OLD = "rope_parameters", "rope_scaling"
QWEN3 = {"model_type": "qwen3", "rope_theta": 5e5, OLD: YARN, **PART, **SLIDES}
BIASES = {"attention_bias": True, "mlp_bias": True}
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # fields of the layer; what they say of positions; settings of the head: of its window too
    "a window, as speculators trains": (SLIDES, {}, {"sliding_window": 4}),
    "a window without layer_types": (
        {"sliding_window": 4, "use_sliding_window": True},
        {},
        {"sliding_window": 4},
    ),
    "a window that is not used": ({"sliding_window": 4, "use_sliding_window": False}, {}, {}),
    "a number alone": ({"sliding_window": 4}, {}, {}),
    "llama3, as it was spelled": ({OLD: LLAMA3, "rope_theta": 5e5}, LLAMA3, {}),
    "yarn with a factor of attention": (
        {OLD: YARN | {"attention_factor": 1.5}},
        YARN | {"attention_factor": 1.5},
        {},
    ),
    "yarn of DeepSeek": ({OLD: {"type": "yarn", **DEEPSEEK}}, DEEPSEEK, {}),
    "linear": ({OLD: {"type": "linear", "factor": 4.0}}, {"rope_type": "linear", "factor": 4.0}, {}),
    "a part, scaled": ({NEW: YARN | {"rope_theta": 5e5, **PART}}, YARN | PART, {}),
    "one for each type of layers": (
        {
            NEW: {
                "full_attention": {"rope_type": "default"},
                "sliding_attention": LLAMA3 | {"rope_theta": 5e5},
            }
        },
        LLAMA3,
        {},
    ),
    "all, in the layout of specforge": (QWEN3, YARN | PART, {"sliding_window": 4, "qk_norm": True}),
    "biases, and a part at the top": (BIASES | PART, PART, BIASES),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_config_says_of_its_layer_is_obeyed(tmp_path: Path, name: str) -> None:
    layer, rotary, settings = PUBLISHED[name]
    theta, window = 1e4 if "theta" not in str(layer) else 5e5, settings.get("sliding_window")
    head = head_of(**{name: value for name, value in settings.items() if name != "sliding_window"})
    layout = "specforge" if "specforge" in name else "speculators"
    read = read_eagle3(publish(tmp_path, head, layer, layout), TARGET)
    assert read is not None
    made, due = said(read.double()), naive(head, rotary, window, theta)
    torch.testing.assert_close(made, due, rtol=1e-5, atol=1e-5)  # norms compute in single precision
    if rotary or window:  # checks that the field has an effect here
        assert (due - naive(head, {}, None, theta)).abs().max() > 1e-3


def test_positions_of_several_axes_turn_a_part_of_each_head() -> None:
    head = head_of(mrope_section=[1, 1, 0], rotary=PART)
    torch.testing.assert_close(said(head), naive(head, PART), rtol=1e-5, atol=1e-5)
    with pytest.raises(StrictDataclassClassValidationError, match="must not scale positions of several axes"):
        head_of(mrope_section=[2, 1, 1], rotary=YARN)


REFUSED: dict[str, dict[str, Any]] = {
    "rope_type must be one of default, .* depend on the length .*; got 'dynamic'": {
        NEW: {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    },
    "rope_type must be one of default, .* depend on the length .*; got 'longrope'": {
        OLD: {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    },
    "no alpha with yarn": {OLD: {"type": "yarn", "alpha": 1000.0, **YARN}},
    "partial_rotary_factor": PART | {"partial_rotary_factor": 0.2},
    "layer_types": {"layer_types": ["chunked_attention"]},
    "sliding_window must be a number of tokens, .*; got None": {"layer_types": ["sliding_attention"]},
    "sliding_window must be a number of tokens, .*; got 0": SLIDES | {"sliding_window": 0},
    "use_sliding_window must be true, as layer_types .*; got False": SLIDES | {"use_sliding_window": False},
    "q_proj.bias": {"attention_bias": True},
    "gate_proj.bias": {"mlp_bias": True},
    "is_neox_style": {"is_neox_style": False},
    "attention_value_scale": {"attention_value_scale": 0.7},
    "num_sink_tokens": {"num_sink_tokens": 4},
    "attention_sink_bias": {"attention_sink_bias": True},
    "quantization_config": {"quantization_config": {"quant_method": "fp8"}},
    "model_type must be one of llama, .*; got 'gemma'": {"model_type": "gemma"},
}


def test_what_cannot_be_obeyed_is_refused_by_name(tmp_path: Path) -> None:
    for named, layer in REFUSED.items():
        with pytest.raises(CheckpointError, match=named):
            read_eagle3(publish(tmp_path, head_of(), layer), TARGET)


def test_what_changes_nothing_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """Unused fields in published configs: of targets, of training and of transformers."""
    left = {"attention_dropout": 0.1, "decoder_sparse_step": 1, "image_token_id": 7, "norm_type": "rms"}
    left |= {"hc_mult": None, "use_mrope": False, "temperature": 0.6, "ttt_length": 7}
    folder = publish(tmp_path, head_of(), left)
    read = read_eagle3(folder, TARGET)
    assert read is not None
    torch.testing.assert_close(said(read.double()), said(head_of()), rtol=1e-5, atol=1e-5)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"embed_requires_grad": True}))
    with pytest.raises(CheckpointError, match="embed_requires_grad"):
        read_eagle3(folder, TARGET)


PLACES = torch.stack([torch.full((2, 7), 5), torch.arange(14).view(2, 7), 20 - torch.arange(14).view(2, 7)])


def test_interleaved_axes_are_those_of_qwen3_vl() -> None:
    section = [24, 20, 20]
    width = 2 * sum(section)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section, "mrope_interleaved": True}
    theirs = Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(head_dim=width, rope_parameters=rope))
    ours, x = MultimodalRotary(width, 1e4, section, interleaved=True), torch.zeros(1)
    for places in (PLACES, PLACES[0]):
        expected = theirs(x, places if places.dim() == 3 else places.expand(3, -1, -1))
        for one, other in zip(ours(x, places), expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_axes_that_follow_one_another_are_those_of_the_sections() -> None:
    section = [16, 24, 24]
    width = 2 * sum(section)
    cosines, sines = MultimodalRotary(width, 1e4, section, interleaved=False)(torch.zeros(1), PLACES)
    frequency = 1e4 ** (-torch.arange(0, width, 2) / width)
    axes = [axis for axis, count in enumerate(section) for _ in range(count)]
    angles = torch.stack([PLACES[axis] * f for axis, f in zip(axes, frequency, strict=True)], -1)
    torch.testing.assert_close(cosines, torch.cat([angles, angles], -1).cos(), atol=1e-5, rtol=0)
    torch.testing.assert_close(sines, torch.cat([angles, angles], -1).sin(), atol=1e-5, rtol=0)
