"""Published heads of EAGLE-1 and 2, MSD and ViSpec, as random weights in their layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig, Qwen2_5_VLConfig

from mmspec.core.sampling import Sampler
from mmspec.errors import CheckpointError, InputError
from mmspec.heads.feature_session import GrownTreeDrafter
from mmspec.heads.model import Prompts
from mmspec.methods.eagle.head import EagleHead
from mmspec.methods.eagle.published import read_eagle
from mmspec.models.official_files import replace_prefix
from mmspec.visual_tokens.spans import ImageSpan
from mmspec.visual_tokens.tokens import raster
from tests.families.naive_llama import attention, feed_forward, layer_weights, rms_norm
from tests.families.official_layout import Changes, changed, store
from tests.heads.visual_checks import NaiveVisual
from tests.methods.eagle_checks import Examined, Gullible, head_for
from tests.methods.flash_checks import answer, inputs_of, target_of

WIDTH, WORDS, HEADS, GROUPS, INNER = 8, 13, 2, 1, 12
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "vocab_size": WORDS,
    "torch_dtype": "float16",
}
TARGET = LlamaConfig(**CONFIG | {"num_hidden_layers": 5})


def published(bias: bool = True) -> dict[str, Tensor]:
    """Random weights by the names of EAGLE's release."""
    torch.manual_seed(0)
    made = {f"layers.0.{name}": w for name, w in layer_weights(WIDTH, HEADS, GROUPS, INNER, WIDTH).items()}
    made |= {"fc.weight": torch.randn(WIDTH, 2 * WIDTH), "embed_tokens.weight": torch.randn(WORDS, WIDTH)}
    return made | ({"fc.bias": torch.randn(WIDTH)} if bias else {})


def with_adaptor(queries: int = 2) -> dict[str, Tensor]:
    """Add the weights of ViSpec."""
    made = published() | {"img_fc.weight": torch.randn(WIDTH, 2 * WIDTH), "img_fc.bias": torch.randn(WIDTH)}
    made["imadpt.q"] = torch.randn(queries, HEADS, WIDTH // HEADS)
    return made | {f"imadpt.{name}_proj.weight": torch.randn(WIDTH, WIDTH) for name in "kvo"}


def read(folder: Path, target: PreTrainedConfig = TARGET) -> EagleHead:
    head = read_eagle(folder, target)
    assert head is not None
    return head.eval().requires_grad_(False)


def forward(weights: dict[str, Tensor], rows: Tensor) -> Tensor:
    """States [L, d] of the release at rows that have passed `fc`."""
    layer = {name.removeprefix("layers.0."): weight for name, weight in weights.items()}
    norm = layer.get("input_layernorm.weight")
    rows = rows + attention(layer, rows if norm is None else rms_norm(rows, norm))
    return rows + feed_forward(layer, rms_norm(rows, layer["post_attention_layernorm.weight"]))


def fused(weights: dict[str, Tensor], embeddings: Tensor, features: Tensor) -> Tensor:
    return torch.cat([embeddings, features], -1) @ weights["fc.weight"].T + weights.get("fc.bias", 0.0)


@pytest.mark.parametrize(("bias", "norm"), [(True, False), (False, True)])
def test_eagle_is_read(tmp_path: Path, bias: bool, norm: bool) -> None:
    weights = published(bias)
    if norm:
        weights["layers.0.input_layernorm.weight"] = torch.rand(WIDTH) + 0.5
    old = weights | {"layers.0.self_attn.rotary_emb.inv_freq": torch.randn(2)}
    head = read(store(tmp_path, {f"module.{name}": weight for name, weight in old.items()}, CONFIG))
    assert (head.config.bias, head.config.input_norm, head.config.vocabulary) == (bias, norm, WORDS)
    embeddings, features = torch.randn(2, 1, 6, WIDTH)
    state = head(head.fuse(embeddings, features), torch.arange(6)[None])[0]
    expected = forward(weights, fused(weights, embeddings[0], features[0]))
    torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("folder", "config", "visual"),
    [
        ("EAGLE-Vicuna-7B", {}, "fused"),
        ("MSD-LLaVA1.5-7B", {}, "embedded"),
        ("head", {"visual": "embedded"}, "embedded"),
    ],
)
def test_msd_is_known_by_its_name_or_its_config(
    tmp_path: Path, folder: str, config: dict[str, Any], visual: str
) -> None:
    """Its visual rows are unchanged embeddings."""
    weights = published()
    head = read(store(tmp_path / folder, weights, CONFIG | config))
    assert head.config.visual == visual
    embeddings, features = torch.randn(2, 1, 6, WIDTH)
    spans = [[ImageSpan(2, raster(1, 2))]]
    made = head.read_prompts(Prompts(embeddings, features, [6], spans, torch.tensor([5])))
    expected = fused(weights, embeddings[0, 1:], features[0, :-1])
    if visual == "embedded":
        expected[1:3] = embeddings[0, 2:4]
    torch.testing.assert_close(made.rows[0], expected, rtol=1e-4, atol=1e-4)


def test_vispec_is_read(tmp_path: Path) -> None:
    weights = with_adaptor(3)
    head = read(store(tmp_path, weights, CONFIG))
    embeddings, features = torch.randn(2, 1, 8, WIDTH)
    spans = [[ImageSpan(2, raster(2, 2))]]
    made = head.read_prompts(Prompts(embeddings, features, [8], spans, torch.tensor([7])))
    k, v = (
        (embeddings[0, 2:6] @ weights[f"imadpt.{name}_proj.weight"].T).unflatten(-1, (HEADS, -1))
        for name in "kv"
    )
    scores = torch.einsum("qhw,nhw->hqn", weights["imadpt.q"], k) * (WIDTH // HEADS) ** -0.5
    mixed = torch.einsum("hqn,nhw->qhw", scores.softmax(-1), v).flatten(1) @ weights["imadpt.o_proj.weight"].T
    *tokens, summary = mixed

    def told(features: Tensor, summary: Tensor) -> Tensor:
        both = torch.cat([features, summary.expand_as(features)], -1)
        return both @ weights["img_fc.weight"].T + weights["img_fc.bias"]

    before = fused(weights, embeddings[0, 1:2], told(features[0, :1], torch.zeros(WIDTH)))
    after = fused(weights, embeddings[0, 6:], told(features[0, 5:7], summary))
    expected = torch.cat([before, torch.stack(tokens), after])
    torch.testing.assert_close(made.rows[0], expected, rtol=1e-4, atol=1e-4)
    assert made.slot[0].tolist() == [1, *range(6 - len(tokens), 6), 6, 7]
    assert made.summary is not None
    torch.testing.assert_close(made.summary[0], summary, rtol=1e-4, atol=1e-4)


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    cases: list[tuple[Changes, dict[str, Any], str]] = [
        ({"layers.0.mlp.up_proj.weight": None}, {}, r"missing keys: decoder\.layers\.0\.mlp"),
        ({"other": torch.ones(2)}, {}, "unknown keys: other"),
        ({"fc.weight": torch.ones(WIDTH, WIDTH)}, {}, r"fc\.weight is \(8, 8\)"),
        ({}, {"num_key_value_heads": 2}, r"k_proj\.weight is \(4, 8\)"),
        ({}, {"model_type": "none"}, r"the config of a target"),
        ({}, {"visual": "blind"}, "visual"),
        ({"imadpt.q": torch.ones(2, 3, 5)}, {}, "^heads must divide the width 8; got 3"),
        ({"midlayer.hidden_norm.weight": torch.ones(2)}, {}, "eagle3"),
        ({"layers.ar_proj.0.weight": torch.ones(2)}, {}, "FLASH"),
    ]
    for changes, config, named in cases:
        with pytest.raises((CheckpointError, InputError), match=named):
            read_eagle(store(tmp_path, changed(published(), changes), CONFIG | config), TARGET)
    target = Qwen2_5_VLConfig(
        text_config=CONFIG | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0]}}
    )
    with pytest.raises(CheckpointError, match=r"M-RoPE sections are \[1, 1, 0\]"):
        read_eagle(store(tmp_path, published(), CONFIG), target)


def publish(folder: Path, head: EagleHead, config: dict[str, Any]) -> Path:
    """A ViSpec head by the names of its release."""
    theirs = {"decoder.layers.": "layers.", "compressor.attention.queries": "imadpt.q"}
    theirs |= {"compressor.attention.": "imadpt."}
    weights = {replace_prefix(name, theirs): each.float() for name, each in head.state_dict().items()}
    weights["imadpt.q"] = weights["imadpt.q"].transpose(0, 1).contiguous()
    return store(folder, weights, config)


def test_vispec_for_qwen2_5_vl_counts_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As published: a flat config without M-RoPE sections, all key heads, biases; in float64."""
    target = target_of("qwen2_5_vl", torch.float64)
    text = target.config.get_text_config()
    heads, options = text.num_attention_heads, {"tokens": 1, "heads": text.num_attention_heads, "bias": True}
    shape: dict[str, Any] = {"visual": "embedded", "compressor": "vispec", "compressor_options": options}
    config = head_for(target, **shape, one_axis=True, input_norm=False).config
    layer = {"num_key_value_heads": heads, "rms_norm_eps": 1e-3}
    config.layer |= layer
    made = EagleHead(config).eval()
    for parameter in made.parameters():
        parameter.data += 0.1
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "hidden_act", "vocab_size")
    flat = {name: getattr(text, name) for name in names} | layer
    flat |= {"model_type": "qwen2_5_vl", "num_hidden_layers": 1, "qkv_bias": True, "rope_theta": 700.0}
    with caplog.at_level("WARNING"):
        head = read(publish(tmp_path / "head", made, flat), target.config)
    assert not [record for record in caplog.records if record.name.startswith("mmspec")]
    described = head.config.layer_config()
    assert head.config.one_axis and described.rms_norm_eps == 1e-3
    assert described.rope_parameters["rope_theta"] == 700.0
    found = head.state_dict()
    assert all(torch.equal(found[name], own) for name, own in made.state_dict().items())
    assert "compressor.attention.k_proj.bias" in found
    drafter = GrownTreeDrafter(head.double(), 6, depth=3, top_k=2).fit(target)
    examined = Examined(drafter, 8, NaiveVisual)
    inputs = inputs_of("qwen2_5_vl", torch.float64)
    answer(target, examined, [inputs["two images"], inputs["no image"]], Sampler(0.9), 8, Gullible())
    assert examined.drafts >= 4


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llava_next", {}),
        ("qwen2_vl", {"rope_theta": 5e5, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]}}),
    ],
)
def test_a_flat_config_of_a_model_with_images_is_that_of_its_words(
    tmp_path: Path, kind: str, more: dict[str, Any]
) -> None:
    """As MSD publishes it. transformers would expect nested sizes, and use its defaults without them."""
    config = {**CONFIG, "model_type": kind, "rms_norm_eps": 0.02, "vision_config": {"hidden_size": 9}, **more}
    rope = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [1, 1, 0]}
    words = CONFIG | {"num_hidden_layers": 5}
    if more:
        words = words | {"model_type": f"{kind}_text", "rope_parameters": rope}
    target = AutoConfig.for_model(kind, text_config=words)
    weights = published()
    if more:
        weights |= {f"layers.0.self_attn.{n}_proj.bias": torch.randn(8 if n == "q" else 4) for n in "qkv"}
    head = read(store(tmp_path / "MSD", weights, config), target)
    assert (head.config.visual, head.config.vocabulary) == ("embedded", WORDS)
    layer = head.config.layer_config()
    assert (layer.hidden_size, layer.rms_norm_eps, layer.num_attention_heads) == (WIDTH, 0.02, HEADS)
    assert layer.model_type == target.get_text_config().model_type
    assert layer.rope_parameters["rope_theta"] == more.get("rope_theta", 1e4)
