"""Writes a reference model as a standard transformers folder: half precision on disk, single in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlavaForConditionalGeneration, LlavaProcessor

__all__ = ["half_precision", "save_vlm"]


def half_precision(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights in fp16, on the CPU; what is no weight as it is."""
    return {
        name: tensor.detach().to("cpu", torch.float16 if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in model.state_dict().items()
    }


def save_vlm(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, folder: Path, training: dict[str, Any]
) -> None:
    """Save weights (fp16 safetensors), configuration, generation settings, processor and training record."""
    model.save_pretrained(folder, state_dict=half_precision(model))
    processor.save_pretrained(folder)
    # transformers loads in the dtype that config.json names; half precision is many times slower on a CPU.
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for part in (config, config["vision_config"], config["text_config"]):
        part["dtype"] = "float32"
    path.write_text(json.dumps(config, indent=2) + "\n")
    (folder / "training.json").write_text(json.dumps(training, indent=2) + "\n")
