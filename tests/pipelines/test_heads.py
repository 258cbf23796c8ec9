"""`drafter=` with the folder of a trained head: what is loaded, and what is refused before any forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmspec.drafters.eagle import EagleDrafter
from mmspec.errors import CheckpointError, InputError
from mmspec.pipelines.heads import load_head
from tests.contracts.checks import llama
from tests.drafters.eagle_checks import head_for

WHERE = (torch.float32, torch.device("cpu"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    head_for(llama()).save_pretrained(tmp_path / "head")
    return tmp_path / "head"


def test_a_head_is_loaded_in_the_dtype_of_its_target(folder: Path) -> None:
    head = load_head("eagle", folder, torch.float64, WHERE[1])
    assert head.dtype == torch.float64 and not head.training
    assert load_head("eagle", head, *WHERE) is head
    EagleDrafter(load_head("eagle", str(folder), *WHERE)).fit(llama())  # type: ignore[arg-type]


def test_a_model_that_is_no_head_is_named(tmp_path: Path) -> None:
    llama().model.save_pretrained(tmp_path / "llama")
    with pytest.raises(CheckpointError, match="llama.*mmspec train drafter --method eagle"):
        load_head("eagle", tmp_path / "llama", *WHERE)
    with pytest.raises(InputError, match="LlamaForCausalLM"):
        load_head("eagle", llama().model, *WHERE)


def test_keys_that_are_missing_or_surplus_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    renamed = {name.replace("fc.bias", "fc.offset"): tensor for name, tensor in tensors.items()}
    save_file(renamed, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing keys: fc\.bias.*unknown keys: fc\.offset"):
        load_head("eagle", folder, *WHERE)


def test_weights_that_are_not_finite_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["fc.bias"][0] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"NaN or infinity: fc\.bias"):
        load_head("eagle", folder, *WHERE)
