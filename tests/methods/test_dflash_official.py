"""Published DFlash heads: windows, causal blocks, sinks, noise, and errors that name unsupported fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from mmspec.errors import CheckpointError
from mmspec.methods.dflash.head import DFlashConfig, DFlashHead
from mmspec.methods.dflash.published import read_dflash
from tests.methods.naive_dflash import naive_block

WIDTH, WORDS, LAYERS, BLOCK, NOISE = 16, 24, 3, 4, 7
TARGET = LlamaConfig(
    hidden_size=WIDTH,
    intermediate_size=20,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_hidden_layers=8,
    vocab_size=WORDS,
)
SHAPE: dict[str, Any] = {
    **{name: getattr(TARGET, name) for name in ("hidden_size", "intermediate_size", "num_attention_heads")},
    **{"num_key_value_heads": 1, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6},
    **{"vocab_size": WORDS, "num_hidden_layers": LAYERS, "model_type": "qwen3", "rope_theta": 1e4},
}
FULL, SLIDING = "full_attention", "sliding_attention"
MIXED = [SLIDING, FULL, SLIDING]
SLIDES = {"layer_types": MIXED, "sliding_window": 5, "use_sliding_window": True}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}


def head_of(**settings: Any) -> DFlashHead:
    """A head of random weights, in double precision."""
    torch.manual_seed(0)
    made = {"num_layers": LAYERS, "block": BLOCK, "mask_token": NOISE, "num_key_value_heads": 1}
    head = DFlashHead(DFlashConfig.for_target(TARGET, WORDS, **{**made, **settings})).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return head.eval()


def publish(
    folder: Path,
    head: DFlashHead,
    layer: dict[str, Any] | None = None,
    own: dict[str, Any] | None = None,
    layout: str = "z-lab",
) -> Path:
    """Write a head in a layout, with more fields of its layers and of its own."""
    taps = list(head.taps)
    config: dict[str, Any] = {"block_size": BLOCK, "num_target_layers": 8}
    if layout == "z-lab":
        settings = {"mask_token_id": NOISE, "target_layer_ids": [tap - 1 for tap in taps]}
        config |= {**SHAPE, **(layer or {}), "dflash_config": settings | (own or {})}
    else:
        config |= {"speculators_model_type": "dflash", "mask_token_id": NOISE, **(own or {})}
        config |= {"aux_hidden_state_layer_ids": taps, "transformer_layer_config": SHAPE | (layer or {})}
    (folder / "config.json").write_text(json.dumps(config))
    named = {
        name.replace("self_attn.sinks", "self_attn.attention_sink_bias"): tensor.contiguous()
        for name, tensor in head.state_dict().items()
    }
    save_file(named, folder / "model.safetensors")
    return folder


@torch.no_grad()
def states(head: DFlashHead, length: int = 11) -> Tensor:
    """States [n, d] of a block behind a context, by the head itself."""
    block, context = rows(length)
    return head(block[None], context[None], torch.arange(length + BLOCK)[None])[0]


def rows(length: int = 11) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    made = torch.randn(length + BLOCK, WIDTH, generator=generator, dtype=torch.float64)
    return made[length:], made[:length]


ALL_SLIDE = SLIDES | {"layer_types": [SLIDING] * 3}
HEADS: dict[str, tuple[dict[str, Any], dict[str, Any], str, dict[str, Any]]] = {
    # fields of the layers, fields of the head, layout -> settings of the head
    "sliding layers see no later slot": (
        SLIDES,
        {},
        "z-lab",
        {"layer_types": MIXED, "sliding_window": 5, "causal": [True, False, True]},
    ),
    "a window everywhere, and sinks": (
        {"layer_types": [FULL] * 3},
        {"use_swa": True, "swa_window_size": 5, "attention_sink_bias": True},
        "z-lab",
        {"sliding_window": 5, "sinks": True},
    ),
    "a causal one": (
        {"sliding_window": 3},
        {"use_swa": True, "causal": True},
        "z-lab",
        {"sliding_window": 3, "causal": [True] * 3},
    ),
    "and with later slots": (
        ALL_SLIDE,
        {"sliding_window_non_causal": True},
        "speculators",
        {"sliding_window": 5},
    ),
    "a number that is not used": ({"sliding_window": 5, "use_sliding_window": False}, {}, "z-lab", {}),
    "scaled positions": ({"rope_parameters": YARN | {"rope_theta": 1e4}}, {}, "z-lab", {"rotary": YARN}),
    "a part of each head, and biases": (
        {"partial_rotary_factor": 0.5, "attention_bias": True},
        {},
        "speculators",
        {"rotary": {"partial_rotary_factor": 0.5}, "attention_bias": True},
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_attend_as_they_were_trained(tmp_path: Path, name: str) -> None:
    layer, own, layout, settings = HEADS[name]
    head = head_of(**settings)
    read = read_dflash(publish(tmp_path, head, layer, own, layout), TARGET)
    assert read is not None
    due = naive_block(head, *reversed(rows()))
    # stored and normed in single precision
    torch.testing.assert_close(states(read.double()), due, rtol=1e-5, atol=1e-5)
    if settings:
        plain = head_of(**{name: True for name in ("attention_bias", "sinks") if name in settings})
        assert (states(plain) - due).abs().max() > 1e-3
    read.save_pretrained(tmp_path / "ours")
    again = DFlashHead.from_pretrained(tmp_path / "ours", dtype=torch.float64)
    torch.testing.assert_close(states(again), states(read), rtol=1e-9, atol=1e-9)


EMBEDDING = torch.linspace(-1, 1, WIDTH)


def test_noise_beside_the_weights_or_among_them_is_the_noise(tmp_path: Path) -> None:
    folder = publish(tmp_path, head_of())
    named = {"mask_token_id": NOISE, "embedding": EMBEDDING}
    for held in (EMBEDDING, EMBEDDING[None], named, {"weight": EMBEDDING[None]}):
        torch.save(held, folder / "mask_embedding.pt")
        read = read_dflash(folder, TARGET)
        assert read is not None and read.config.mask_token is None
        made = read.slots(torch.tensor([3]), lambda tokens: torch.zeros(*tokens.shape, WIDTH))
        assert torch.equal(made[0, 0], torch.zeros(WIDTH))
        assert torch.equal(made[0, 1:], EMBEDDING.expand(3, -1))
    (folder / "mask_embedding.pt").unlink()
    read = read_dflash(publish(tmp_path, head := head_of(mask_token=None)), TARGET)
    assert read is not None and read.mask_embedding is not None and head.mask_embedding is not None
    assert torch.equal(read.mask_embedding, head.mask_embedding.float())


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "hc_mult": ({"hc_mult": 4}, {}),
    "swa_window ": ({}, {"swa_window": 4}),
    "shift_label": ({}, {"shift_label": True}),
    "num_sink_tokens": ({}, {"num_sink_tokens": 4}),
    "final_logit_softcap_": ({"final_logit_softcap_": 30.0}, {}),
    "mlp_bias": ({"mlp_bias": True}, {}),
    "sliding_window must be a number of tokens, .*; got None": ({}, {"use_swa": True}),
    "use_sliding_window must be true, as layer_types .*; got False": (
        SLIDES | {"use_sliding_window": False},
        {},
    ),
    "layer_types": ({"layer_types": [SLIDING, FULL, "chunked_attention"], "sliding_window": 5}, {}),
    "num_hidden_layers must be 3, as in its weights; got 4": ({"num_hidden_layers": 4}, {}),
    "sinks": ({}, {"attention_sink_bias": True}),
    "rope_type must be one of default, .* depend on the length .*; got 'dynamic'": (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {},
    ),
    "for a target of 8 layers .mask_token must be a token from 0 to 23; got 24": (
        {},
        {"mask_token_id": WORDS},
    ),
    "q_proj.bias": ({"attention_bias": True}, {}),
}


def test_what_cannot_be_obeyed_is_refused_by_name(tmp_path: Path) -> None:
    for named, (layer, own) in REFUSED.items():
        with pytest.raises(CheckpointError, match=named):
            read_dflash(publish(tmp_path, head_of(), layer, own), TARGET)
