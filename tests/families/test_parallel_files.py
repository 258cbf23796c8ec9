"""LPD, NAR and PAR: conversion of official files by keys and shapes, and errors for other files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mmspec.errors import CheckpointError
from mmspec.families.llamagen.conversion import convert_checkpoint
from mmspec.families.lpd.modeling import LPDConfig, LPDForCausalLM
from mmspec.families.mar.conversion import is_mar
from mmspec.families.nar.modeling import NARConfig, NARForCausalLM
from mmspec.families.par.modeling import PARConfig, PARForCausalLM
from tests.families.official_layout import GRID, HEADS, IMAGE_SIZE, VOCABULARY, WIDTH, Changes, changed
from tests.families.parallel_layout import CELLS, LABELS, State, lpd_state, nar_state, par_state

FILES = {
    "lpd": (lpd_state, LPDConfig, LPDForCausalLM, {}),
    "nar": (nar_state, NARConfig, NARForCausalLM, {"image_size": IMAGE_SIZE}),
    "par": (par_state, PARConfig, PARForCausalLM, {"image_size": IMAGE_SIZE}),
}


def official(folder: Path, state: State, name: str = "tiny.pth") -> Path:
    """As LlamaGen's trainers write it, and LPD's."""
    torch.save({"model": state, "optimizer": {"state": {}}, "steps": 5}, folder / name)
    return folder / name


@pytest.mark.parametrize("kind", FILES)
def test_an_official_file_becomes_a_folder_of_its_kind(tmp_path: Path, kind: str) -> None:
    state, config_class, model_class, size = FILES[kind]
    file = official(tmp_path, state())
    assert not is_mar(file)
    written = convert_checkpoint(file, tmp_path / "out", num_heads=HEADS, **size)
    assert written["grid_size"] == GRID and written["kind"] == "class"
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert type(config) is config_class
    assert (config.vocab_size, config.hidden_size, config.num_classes) == (VOCABULARY, WIDTH, LABELS)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model) is model_class
    own = sum(weight.numel() for weight in model.state_dict().values())
    assert own == sum(weight.numel() for weight in state().values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pos_embed": torch.zeros(1, CELLS + 3, WIDTH)}, "pos_embed"),
        ({"mask_token": None}, "mask_token"),
        ({"fake_latent": torch.zeros(2, WIDTH)}, "class_emb"),
        ({"blocks.1.attn.qkv.bias": torch.zeros(WIDTH)}, "blocks.1.attn.qkv.bias"),
        ({"blocks.2.attn.qkv.bias": torch.zeros(3 * WIDTH)}, "blocks.2"),
        ({"surplus": torch.zeros(1)}, "surplus"),
    ],
)
def test_what_is_wrong_in_an_lpd_is_named(tmp_path: Path, changes: Changes, message: str) -> None:
    file = official(tmp_path, changed(lpd_state(), changes))
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(file, tmp_path / "out", num_heads=HEADS)
    assert not (tmp_path / "out").exists()
