"""The EAGLE head by itself: its layer, with a norm in front as ours and without one as published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModel

from mmspec.drafters.eagle import EagleDrafter
from mmspec.errors import UnsupportedModelError
from mmspec.models.eagle import EagleConfig, EagleHead
from tests.contracts.checks import PROMPTS, llama
from tests.contracts.running import decode, generate
from tests.drafters.eagle_checks import head_for

NORM = "decoder.layers.0.input_layernorm.weight"


def test_a_published_layer_has_no_norm_in_front(tmp_path: Path) -> None:
    ours, theirs = head_for(llama()), head_for(llama(), input_norm=False)
    assert set(ours.state_dict()) - set(theirs.state_dict()) == {NORM}
    theirs.load_state_dict({name: each for name, each in ours.state_dict().items() if name != NORM})
    rows, places = torch.randn(1, 5, 32), torch.arange(5)[None]
    assert not torch.allclose(ours(rows, places), theirs(rows, places))
    ours.decoder.layers[0].input_layernorm = nn.Identity()
    assert torch.equal(ours(rows, places), theirs(rows, places))
    theirs.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(again(rows, places), theirs(rows, places))


def test_it_drafts_too() -> None:
    drafter = EagleDrafter(head_for(llama(), input_norm=False)).fit(llama())
    expected = [generate(llama().model, prompt, 12) for prompt in PROMPTS]
    assert decode(llama(), PROMPTS, drafter, max_new_tokens=12).outputs == expected


def test_layers_without_a_norm_in_front_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EagleConfig.for_target(llama().config, 64, input_norm=False)
    decoder = AutoModel.from_config(config.layer_config())
    del decoder.layers[0].input_layernorm
    monkeypatch.setattr(AutoModel, "from_config", lambda _: decoder)
    with pytest.raises(UnsupportedModelError, match="LlamaModel have no norm"):
        EagleHead(config)
