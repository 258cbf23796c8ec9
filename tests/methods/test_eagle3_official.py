"""Published EAGLE-3 heads, as random weights in the layouts of EAGLE, SpecForge and speculators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from mmspec.errors import CheckpointError
from mmspec.methods.eagle3.published import read_eagle3
from tests.families.naive_llama import attention, feed_forward, layer_weights, rms_norm
from tests.families.official_layout import Changes, changed, store

WIDTH, WORDS, KNOWN, HEADS, GROUPS, INNER, LAYERS = 8, 13, 5, 2, 1, 12, 9
THETA = 500.0
LAYER: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": 4,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": THETA,
    "vocab_size": WORDS,
}
EAGLE = LAYER | {"draft_vocab_size": KNOWN, "architectures": ["LlamaForCausalLM"]}
SPECULATORS = {
    "model_type": "speculator_model",
    "speculators_model_type": "eagle3",
    "transformer_layer_config": LAYER,
    "draft_vocab_size": KNOWN,
    "norm_before_residual": True,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 8],
}
TARGET = LlamaConfig(**LAYER | {"num_hidden_layers": LAYERS})
CHOSEN = torch.tensor([0, 3, 4, 9, 12])


def published(layer: str = "midlayer.") -> dict[str, Tensor]:
    """Random weights by the names of EAGLE's release."""
    torch.manual_seed(0)
    made = {
        f"{layer}{name}": weight
        for name, weight in layer_weights(WIDTH, HEADS, GROUPS, INNER, 2 * WIDTH).items()
    }
    made |= {f"{layer}{name}.weight": torch.rand(WIDTH) + 0.5 for name in ("input_layernorm", "hidden_norm")}
    return made | {
        "fc.weight": torch.randn(WIDTH, 3 * WIDTH),
        "norm.weight": torch.rand(WIDTH) + 0.5,
        "lm_head.weight": torch.randn(KNOWN, WIDTH),
        "d2t": CHOSEN - torch.arange(KNOWN),
        "t2d": torch.isin(torch.arange(WORDS), CHOSEN),
    }


ONE, EACH = {"input_norm.weight": 3 * WIDTH}, {f"fc_norm.{place}.weight": WIDTH for place in range(3)}
NORMED: list[tuple[dict[str, Any], dict[str, int]]] = [
    (EAGLE, {}),
    (SPECULATORS, {}),
    (SPECULATORS | {"norm_before_fc": True, "norm_output": True}, ONE),
    (SPECULATORS | {"fc_norm": True, "norm_output": True}, EACH),
    (EAGLE | {"norm_output": False}, {}),
]


@pytest.mark.parametrize(("config", "norms"), NORMED)
def test_heads_and_their_norms_say_what_the_release_says(
    tmp_path: Path, config: dict[str, Any], norms: dict[str, int]
) -> None:
    """`norm_output` has different meanings in speculators and in SpecForge."""
    torch.manual_seed(1)
    layer = "layers.0." if "speculators_model_type" in config else "midlayer."
    weights = published(layer) | {name: torch.rand(size) + 0.5 for name, size in norms.items()}
    head = read_eagle3(store(tmp_path, weights, config), TARGET)
    assert head is not None
    assert head.config.taps == config.get("eagle_aux_hidden_state_layer_ids", [2, 4, 6])
    embeddings, *states = torch.randn(4, 1, 6, WIDTH)
    features = head.join(states)
    state = head(head.fuse(embeddings, features), torch.arange(6)[None])
    logits = head.logits(state, lambda hidden: hidden)[0]
    own = {name.removeprefix(layer): weight for name, weight in weights.items()}
    read = [each[0] for each in states]
    if "fc_norm.0.weight" in weights:
        read = [rms_norm(each, weights[f"fc_norm.{place}.weight"]) for place, each in enumerate(read)]
    together = torch.cat(read, -1)
    if "input_norm.weight" in weights:
        together = rms_norm(together, weights["input_norm.weight"])
    given = together @ weights["fc.weight"].T
    normed = rms_norm(given, own["hidden_norm.weight"])
    both = torch.cat([rms_norm(embeddings[0], own["input_layernorm.weight"]), normed], -1)
    rows = (normed if config.get("norm_before_residual") else given) + attention(own, both, THETA)
    rows = rows + feed_forward(own, rms_norm(rows, own["post_attention_layernorm.weight"]))
    last = rms_norm(rows, weights["norm.weight"])
    speculators, says = "speculators_model_type" in config, config.get("norm_output")
    torch.testing.assert_close(state[0], last if speculators and says else rows, rtol=1e-4, atol=1e-4)
    unnormed = not speculators and says is False
    expected = (rows if unnormed else last) @ weights["lm_head.weight"].T
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert head.draft_tokens is not None and torch.equal(head.draft_tokens, CHOSEN)


def nested(*ids: int, name: str = "eagle_aux_hidden_state_layer_ids") -> dict[str, Any]:
    return {"eagle_config": {"use_aux_hidden_state": True, name: list(ids)}}


def test_nested_ids_are_outputs_of_layers_and_top_level_ids_are_inputs(tmp_path: Path) -> None:
    for config in (
        nested(-1, 3, 5),
        nested(-1, 3, 5, name="aux_hidden_state_layer_ids"),
        {"aux_hidden_state_layer_ids": [0, 4, 6]},
        # the top level has priority if both are given, under any name
        nested(2, 4, 6) | {"aux_hidden_state_layer_ids": [0, 4, 6]},
        nested(-1, 3, 5) | {"eagle_aux_hidden_state_layer_ids": []},
    ):
        head = read_eagle3(store(tmp_path, published(), EAGLE | config), TARGET)
        assert head is not None and head.config.taps == [0, 4, 6], config


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    mrope = {"type": "mrope", "mrope_section": [1, 1, 0]}
    cases: list[tuple[Changes, dict[str, Any], str]] = [
        ({"norm.weight": None}, {}, r"missing keys: norm\.weight"),
        ({"d2t": None}, {}, "missing keys: d2t"),
        ({"fc.weight": torch.ones(WIDTH, 12)}, {}, r"fc\.weight is \(8, 12\)"),
        ({"fc_norm.0.weight": torch.ones(WIDTH)}, {}, r"missing keys: fc_norm\.1\.weight"),
        ({"d2t": torch.zeros(KNOWN).long() - 1}, {}, "d2t .* different tokens"),
        ({"t2d": torch.ones(WORDS).bool()}, {}, "t2d .* the tokens that d2t leads to"),
        ({}, {"vocab_size": WORDS + 1}, "t2d"),
        ({}, {"num_key_value_heads": 2}, r"k_proj\.weight is \(4, 16\)"),
        ({}, {"norm_before_fc": True}, r"missing keys: input_norm\.weight"),
        ({}, {"fc_norm": True}, r"missing keys: fc_norm\.0\.weight"),
        ({}, {"fc_norm": True, "norm_before_fc": True}, "norms the same states"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [2, 4, LAYERS]}, "taps"),
        ({}, nested(1, 3, LAYERS - 1), rf"eagle_config must .*from -1 to {LAYERS - 2}"),
        ({}, nested(-2, 3, 5), r"eagle_config must have ids from -1 .*got \[-2"),
        ({}, {"rope_scaling": mrope}, "mrope_section"),
    ]
    for changes, config, named in cases:
        with pytest.raises(CheckpointError, match=named):
            read_eagle3(store(tmp_path, changed(published(), changes), EAGLE | config), TARGET)
