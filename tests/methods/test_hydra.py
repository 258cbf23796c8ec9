"""Hydra's heads as they are published, against the weights written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from mmspec.errors import CheckpointError
from mmspec.methods.hydra.head import HydraConfig, HydraHead
from mmspec.methods.hydra.published import read_hydra
from tests.families.official_layout import Changes, changed, store

WIDTH, WORDS, HEADS, LAYERS = 8, 13, 3, 3
TARGET = LlamaConfig(hidden_size=8, vocab_size=13, num_attention_heads=2, head_dim=4, rms_norm_eps=1e-6)


def head(**settings: Any) -> HydraHead:
    """Heads of random weights."""
    shape = {"hidden_size": WIDTH, "vocabulary": WORDS, "num_heads": HEADS, "num_layers": LAYERS}
    shape |= {"intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    model = HydraHead(HydraConfig(**shape | settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.eval().requires_grad_(False)


def vectors(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed))


def output(hidden: Tensor) -> Tensor:
    """Stands for the target's output matrix."""
    return hidden @ torch.randn(WIDTH, WORDS, generator=torch.Generator().manual_seed(3))


CONFIG = {"hydra_num_heads": HEADS, "hydra_num_layers": LAYERS, "grounded_heads": True}
PLUS = CONFIG | {"hydra_head_arch": "prefix-mlp"}
PREFIX = "prefix_embeding_layer."


def published(prefix: bool) -> dict[str, Tensor]:
    """Random weights by the names of Hydra's release; with dropout between layers for Hydra++."""
    made: dict[str, Tensor] = {"input_embed_fn.weight": torch.randn(WORDS, WIDTH)}
    for index in range(HEADS):
        for layer in range(LAYERS):
            step = f"hydra_mlp.{index}.{2 * layer + 1 if prefix else layer}"
            wide = WIDTH if layer else (index + 2) * WIDTH
            for part in ("linear",) if layer else ("linear", "res_connection"):
                made |= {
                    f"{step}.{part}.weight": torch.randn(WIDTH, wide),
                    f"{step}.{part}.bias": torch.randn(WIDTH),
                }
        name = f"hydra_lm_head.{index}{'.1' if prefix else ''}"
        made |= {f"{name}.weight": torch.randn(WORDS, WIDTH), f"{name}.bias": torch.randn(WORDS)}
    if prefix:
        layer = head().decoder.state_dict()
        made |= {f"{PREFIX}{name}": torch.randn_like(value) for name, value in layer.items()}
        made[f"{PREFIX}embed_tokens.weight"] = torch.randn(WORDS, WIDTH)
        made[f"{PREFIX}layers.0.self_attn.rotary_emb.inv_freq"] = torch.randn(2)
    return made


@pytest.mark.parametrize("prefix", [False, True])
def test_published_heads_are_read(tmp_path: Path, prefix: bool) -> None:
    weights = published(prefix)
    store(tmp_path, weights, PLUS if prefix else CONFIG, "hydra_lm_head.pt")
    read = read_hydra(tmp_path, TARGET)
    assert read is not None and read.config.prefix_attention is prefix
    hidden = read(vectors(1, 5), torch.arange(5)[None])[0, -1]
    if prefix:
        model = head()
        layer = {
            name.removeprefix(PREFIX): value for name, value in weights.items() if name.startswith(PREFIX)
        }
        model.decoder.load_state_dict(layer, strict=False)
        expected = model.decoder(inputs_embeds=vectors(1, 5)).last_hidden_state[0, -1]
        torch.testing.assert_close(hidden, expected)
    else:
        assert torch.equal(hidden, vectors(1, 5)[0, -1])
    path = vectors(HEADS, seed=5)
    for index in range(HEADS):
        state = torch.cat([hidden, path[: index + 1].flatten()])
        for layer_index in range(LAYERS):
            step = f"hydra_mlp.{index}.{2 * layer_index + 1 if prefix else layer_index}"
            inner = weights[f"{step}.linear.weight"] @ state + weights[f"{step}.linear.bias"]
            if not layer_index:
                state = (
                    weights[f"{step}.res_connection.weight"] @ state + weights[f"{step}.res_connection.bias"]
                )
            state = state + torch.nn.functional.silu(inner)
        name = f"hydra_lm_head.{index}{'.1' if prefix else ''}"
        logits = weights[f"{name}.weight"] @ state + weights[f"{name}.bias"]
        torch.testing.assert_close(
            read.predict(hidden, path[: index + 1], output), logits, rtol=1e-4, atol=1e-4
        )


def test_published_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    cases: list[tuple[Changes, dict[str, Any], str]] = [
        ({f"{PREFIX}norm.weight": None}, {}, r"missing keys: decoder\.norm\.weight"),
        ({"hydra_mlp.1.1.res_connection.bias": None}, {}, r"mlps\.1\.shortcut\.bias"),
        ({"other": torch.ones(2)}, {}, "unknown keys: other"),
        ({"hydra_lm_head.2.1.bias": torch.ones(3)}, {}, r"lm_heads\.2\.bias"),
        ({}, {"grounded_heads": False}, "grounded_heads"),
        ({}, {"hydra_head_arch": "eagle-attn"}, "hydra_head_arch"),
        ({}, {"hidden_state_offset": 1}, "hidden_state_offset"),
    ]
    for changes, config, named in cases:
        store(tmp_path, changed(published(prefix=True), changes), PLUS | config, "hydra_lm_head.pt")
        with pytest.raises(CheckpointError, match=named):
            read_hydra(tmp_path, TARGET)
