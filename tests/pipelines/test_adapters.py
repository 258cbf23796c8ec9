"""Adapters (LoRA) are loaded over their base by peft, or refused with what to do."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers.integrations.peft import MIN_PEFT_VERSION

from mmspec.errors import CheckpointError, InputError, MissingDependencyError, UnsupportedModelError
from mmspec.models import adapters
from mmspec.pipelines import MMSpecPipeline
from tests.tiny_models import tiny_image

RAW: dict[str, Any] = {"apply_chat_template": False, "max_new_tokens": 12}
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write(folder: Path, **config: Any) -> Path:
    """A folder that looks like an adapter, with no weights of use."""
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", **config}))
    save_file({"x": torch.zeros(1)}, folder / WEIGHTS)
    return folder


def lora(folder: Path, base: Path, name: str | None = None, **settings: Any) -> Any:
    """Write an adapter that changes much, as peft does; gives the model with it merged."""
    peft = pytest.importorskip("peft", reason="needs peft: pip install peft")
    torch.manual_seed(0)
    model = MMSpecPipeline.from_pretrained(base).model
    options = {"r": 2, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"], **settings}
    adapted = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **options))
    adapted.save_pretrained(folder)
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": name or str(base)}))
    return adapted.merge_and_unload()


def test_an_adapter_acts_as_merged_weights_do(checkpoints: Path, tmp_path: Path) -> None:
    lora(tmp_path / "adapter", checkpoints / "text").save_pretrained(tmp_path / "merged")
    for file in (checkpoints / "text").glob("token*"):
        shutil.copy(file, tmp_path / "merged")
    base, merged, adapted = (
        MMSpecPipeline.from_pretrained(folder)
        for folder in (checkpoints / "text", tmp_path / "merged", tmp_path / "adapter")
    )
    pipe: Any
    said = [pipe("red blue green", **RAW).tokens for pipe in (base, merged, adapted)]  # type: ignore[operator]
    assert said[0] != said[1] == said[2]
    pipe = adapted.set_accelerator("draft_model", drafter=checkpoints / "draft")
    assert pipe("red blue green", **RAW).tokens == said[1]
    if Version(importlib.metadata.version("peft")) < Version(MIN_PEFT_VERSION):
        with pytest.raises(MissingDependencyError, match="PEFT.*: pip install -U peft"):
            adapted.save_pretrained(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()
        return
    adapted.save_pretrained(tmp_path / "saved")
    pipe = MMSpecPipeline.from_pretrained(tmp_path / "saved")
    assert pipe("red blue green", **RAW).tokens == said[1]


def test_an_adapter_of_a_model_that_sees_finds_its_base(checkpoints: Path, tmp_path: Path) -> None:
    merged = lora(tmp_path / "adapter", checkpoints / "llava", "../base")
    os.symlink(checkpoints / "llava", tmp_path / "base")
    pipe: Any = MMSpecPipeline.from_pretrained(tmp_path / "adapter")
    call: dict[str, Any] = {"images": tiny_image(), "max_new_tokens": 8}
    said = pipe("describe the picture", **call).tokens
    pipe = type(pipe)(merged, pipe.processor)
    assert pipe("describe the picture", **call).tokens == said


def odd_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("layers.1", "layers.9"): weight for name, weight in weights.items()}


def infinite(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight * torch.inf for name, weight in weights.items()}


def larger(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.ones(3 + len(weight), 5) for name, weight in weights.items()}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (odd_names, r"missing keys: .*layers\.1"),
        (infinite, "NaN or infinity in: "),
        (larger, "an adapter for "),
    ],
)
def test_an_adapter_that_would_not_act_is_refused(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    match: str,
    checkpoints: Path,
    tmp_path: Path,
) -> None:
    lora(tmp_path / "adapter", checkpoints / "text")
    path = tmp_path / "adapter" / WEIGHTS
    save_file(change(load_file(path)), path)
    with pytest.raises(CheckpointError, match=match):
        MMSpecPipeline.from_pretrained(tmp_path / "adapter")


def test_an_adapter_over_offloaded_parts_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    lora(tmp_path / "adapter", checkpoints / "text")
    with pytest.raises(InputError, match="device_map: .*merge the adapter"):
        MMSpecPipeline.from_pretrained(tmp_path / "adapter", device_map={"": "disk"})


def test_an_adapter_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write(tmp_path / "whole", base_model_name_or_path="no/such-model")
    monkeypatch.setattr(adapters, "is_peft_available", lambda: False)
    with pytest.raises(MissingDependencyError, match=r"no/such-model: pip install peft, or merge it"):
        MMSpecPipeline.from_pretrained(whole)
    monkeypatch.setattr(adapters, "is_peft_available", lambda: True)
    prompts = write(tmp_path / "prompts", base_model_name_or_path="x/y", num_virtual_tokens=4)
    with pytest.raises(UnsupportedModelError, match="learnt prompt"):
        MMSpecPipeline.from_pretrained(prompts)
    bare = write(tmp_path / "bare", base_model_name_or_path="x/y")
    (bare / WEIGHTS).rename(bare / "adapter_model.bin")
    for folder, match in (
        (write(tmp_path / "none"), "base_model_name_or_path: got None; the folder or hub id"),
        (write(tmp_path / "gone", base_model_name_or_path="../gone-too"), "got '../gone-too'; a folder"),
        (whole, "base_model_name_or_path: got 'no/such-model'; the model that"),
        (bare, "an adapter with adapter_model.safetensors"),
    ):
        with pytest.raises(CheckpointError, match=match):
            MMSpecPipeline.from_pretrained(folder)
