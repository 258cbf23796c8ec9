"""Medusa's heads as they are published, against the weights written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from mmspec.errors import CheckpointError
from mmspec.methods.medusa.head import MedusaConfig, MedusaHead
from mmspec.methods.medusa.published import read_medusa
from tests.families.official_layout import Changes, changed

WIDTH, WORDS, HEADS, LAYERS = 8, 13, 3, 2
TARGET = LlamaConfig(hidden_size=8, vocab_size=13, num_attention_heads=2, head_dim=4, rms_norm_eps=1e-6)


def head(**settings: Any) -> MedusaHead:
    """Heads of random weights."""
    shape = {"hidden_size": WIDTH, "vocabulary": WORDS, "num_heads": HEADS, "num_layers": LAYERS}
    model = MedusaHead(MedusaConfig(**shape | settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.eval().requires_grad_(False)


def states(count: int = 5) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(2))


def output(hidden: Tensor) -> Tensor:
    """Stands for the target's output matrix."""
    return hidden @ torch.randn(WIDTH, WORDS, generator=torch.Generator().manual_seed(3))


def published(prefix: str = "") -> dict[str, Tensor]:
    """Random weights by the names of Medusa's release: heads are sequences of blocks and an output."""
    made = {}
    for index in range(HEADS):
        for layer in range(LAYERS):
            made[f"{prefix}{index}.{layer}.linear.weight"] = torch.randn(WIDTH, WIDTH)
            made[f"{prefix}{index}.{layer}.linear.bias"] = torch.randn(WIDTH)
        made[f"{prefix}{index}.{LAYERS}.weight"] = torch.randn(WORDS, WIDTH)
    return made


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_published_heads_are_read(tmp_path: Path, prefix: str) -> None:
    weights = published(prefix)
    torch.save(weights, tmp_path / "medusa_lm_head.pt")
    read = read_medusa(tmp_path, TARGET)
    assert read is not None and read.config.num_heads == HEADS
    logits = read.logits(read(states(), HEADS), output)
    for index in range(HEADS):
        state = states()
        for layer in range(LAYERS):
            name = f"{prefix}{index}.{layer}.linear"
            state = state + torch.nn.functional.silu(
                state @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
            )
        torch.testing.assert_close(logits[:, index], state @ weights[f"{prefix}{index}.{LAYERS}.weight"].T)


def test_published_heads_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    cases: list[tuple[Changes, str]] = [
        ({"1.0.linear.bias": None}, r"missing keys: blocks\.1\.0\.bias"),
        ({"other": torch.ones(2)}, "unknown keys: other"),
        ({"2.2.weight": torch.ones(WORDS + 1, WIDTH)}, r"lm_heads\.2"),
        ({"0.1.linear.weight": torch.ones(WIDTH, 4)}, r"blocks\.0\.1"),
        (dict.fromkeys(published()), "must hold tensors"),
    ]
    for changes, named in cases:
        torch.save(changed(published(), changes), tmp_path / "medusa_lm_head.pt")
        with pytest.raises(CheckpointError, match=named):
            read_medusa(tmp_path, TARGET)
