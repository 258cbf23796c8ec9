"""MTP heads with random weights, and checkpoints that contain one in the published layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from mmspec.methods.mtp.head import MtpConfig, MtpHead
from mmspec.methods.mtp.published import BEHIND, PUBLISHED
from mmspec.targets import CausalTarget


def head_for(target: CausalTarget, seed: int = 3, **settings: Any) -> MtpHead:
    """A head of random weights for a target."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        head = MtpHead(MtpConfig.for_target(target.config, target.vocabulary, **settings)).to(target.dtype)
        for parameter in head.parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter += 0.1 * noise
    return head.eval().requires_grad_(False)


def published(head: MtpHead, layout: str, layers: int = 0) -> dict[str, Tensor]:
    """The weights of a head by the names of Qwen's or DeepSeek's checkpoints."""
    names = PUBLISHED if layout == "qwen" else {theirs: own for theirs, own in BEHIND.items()}
    found = {}
    for name, tensor in head.state_dict().items():
        theirs = [each + name.removeprefix(own) for each, own in names.items() if name.startswith(own)]
        (own_name,) = theirs or [name.removeprefix("decoder.layers.0.")]
        found[own_name if layout == "qwen" else f"model.layers.{layers}.{own_name}"] = tensor.contiguous()
    return found


def one_by_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split the matrices of all experts into one matrix per expert."""
    apart = {}
    for name, tensor in tensors.items():
        place, _, matrix = name.rpartition(".experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(matrix, ())
        for expert in range(len(tensor) if parts else 0):
            for part, rows in zip(parts, tensor[expert].chunk(len(parts)), strict=True):
                apart[f"{place}.experts.{expert}.{part}.weight"] = rows.contiguous()
        if not parts:
            apart[name] = tensor
    return apart


def save_with_head(model: PreTrainedModel, head: MtpHead, folder: Path, layout: str = "qwen") -> None:
    """Save a model whose checkpoint holds an MTP layer too."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    save_file(load_file(file) | published(head, layout, layers), file, metadata={"format": "pt"})
