"""MTP layers with experts, as checkpoints store them: one by one or together, and in float8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3NextConfig,
)

from mmspec.errors import CheckpointError
from mmspec.heads.checkpoint import load_head
from mmspec.heads.feature_session import GrownTreeDrafter
from mmspec.methods.mtp.head import MtpHead
from mmspec.methods.mtp.published import read_mtp
from mmspec.targets import CausalTarget
from tests.contracts.running import decode, generate
from tests.families.official_layout import Changes, changed
from tests.methods.mtp_checks import head_for, one_by_one, published

EXPERTS, HIDDEN, WORDS = 5, 32, 61
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LINEAR = {
    "num_experts": EXPERTS,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
ROUTED = {"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
FAMILIES: dict[str, PreTrainedConfig] = {
    "qwen3_next": Qwen3NextConfig(**SIZES, **LINEAR, mlp_only_layers=[0]),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**SIZES, **LINEAR),
    "glm4_moe": Glm4MoeConfig(**SIZES, **ROUTED, num_key_value_heads=2, head_dim=16),
    "deepseek_v3": DeepseekV3Config(**SIZES, **ROUTED, **LATENT, num_key_value_heads=4),
}


def target_of(family: str) -> CausalTarget:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(FAMILIES[family]).eval()
    return CausalTarget(model)


def stored(family: str, head: MtpHead) -> dict[str, Tensor]:
    """The weights of a head as that family publishes them, each expert by itself."""
    layout = "qwen" if family.startswith("qwen") else "deepseek"
    return one_by_one(published(head, layout, SIZES["num_hidden_layers"]))


def save(tensors: dict[str, Tensor], folder: Path) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def read(folder: Path, config: PreTrainedConfig) -> MtpHead:
    head = read_mtp(folder, config)
    assert head is not None
    return head


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_read_one_by_one_and_together(family: str, tmp_path: Path) -> None:
    target = target_of(family)
    head = head_for(target)
    apart = stored(family, head)
    assert sum(".experts.4." in name for name in apart) == 3
    layout = "qwen" if family.startswith("qwen") else "deepseek"
    for tensors in (apart, published(head, layout, SIZES["num_hidden_layers"])):
        found = read(save(tensors, tmp_path), target.config).state_dict()
        assert all(torch.equal(found[name], own) for name, own in head.state_dict().items())
    drafter = GrownTreeDrafter(read(tmp_path, target.config).eval(), 6, depth=3, top_k=2).fit(target)
    assert decode(target, [[3, 5, 7]], drafter, max_new_tokens=8).outputs == [
        generate(target.model, [3, 5, 7], 8)
    ]


@pytest.mark.parametrize("scale", ["block", "channel", "whole"])
def test_float8_is_read_with_its_scales(scale: str, tmp_path: Path) -> None:
    """No size is a multiple of 12, so that blocks at the edges are cut."""
    target, block = target_of("deepseek_v3"), 12
    target.config.quantization_config = {"quant_method": "fp8", "weight_block_size": [block, block]}
    head = head_for(target)
    tensors, expected = {}, {}
    for name, tensor in stored("deepseek_v3", head).items():
        tensors[name] = expected[name] = tensor
        if tensor.dim() < 2:
            continue
        rows, columns = tensor.shape
        sizes = {"block": (block, block), "channel": (1, columns), "whole": (rows, columns)}[scale]
        counts = [-(-size // each) for size, each in zip(tensor.shape, sizes, strict=True)]
        scales = torch.rand(counts) + 0.5
        each = torch.stack(
            [scales[i // sizes[0], j // sizes[1]] for i in range(rows) for j in range(columns)]
        )
        small = (tensor / each.view_as(tensor)).to(torch.float8_e4m3fn)
        tensors[name], expected[name] = small, small.float() * each.view_as(tensor)
        ending = "_scale_inv" if scale == "block" else "_scale"
        tensors[name + ending] = scales.squeeze() if scale == "whole" else scales
    found = read(save(tensors, tmp_path), target.config).state_dict()
    (tmp_path / "wide").mkdir()
    wide = read(save(expected, tmp_path / "wide"), target.config).state_dict()
    assert all(torch.equal(found[name], own) for name, own in wide.items())


PLACE = "mtp.layers.0.mlp.experts"


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    target = target_of("qwen3_5_moe")
    whole = stored("qwen3_5_moe", head_for(target))
    small = whole["mtp.fc.weight"].to(torch.float8_e4m3fn)
    fc, scales = "mtp.fc.weight", "mtp.fc.weight_scale_inv"
    without: Changes = dict.fromkeys(f"{PLACE}.4.{part}_proj.weight" for part in ("gate", "up", "down"))
    cases: list[tuple[Changes, str]] = [
        (without, "5 experts"),
        ({f"{PLACE}.2.up_proj.weight": None}, r"5 experts.* 4 tensors like .*up_proj.*number 2 differs"),
        ({f"{PLACE}.5.up_proj.weight": torch.ones(24, HIDDEN)}, "6 tensors like .*number 5 differs"),
        (
            {f"{PLACE}.1.down_proj.weight": torch.ones(8, 24)},
            r"1.down_proj.weight of shape .*, not \(8, 24\)",
        ),
        ({f"{PLACE}.1.bias": torch.ones(8)}, r"unknown keys: .*experts\.1\.bias"),
        ({fc: torch.ones(HIDDEN, 2 * HIDDEN, dtype=torch.int8)}, "int8"),
        ({fc: small}, "fc.weight is in float8_e4m3fn, its scales in None"),
        ({fc: small, scales: torch.ones(1, 2, dtype=torch.uint8)}, "its scales in uint8"),
        ({fc: small, scales: torch.ones(5, 5)}, r"scales for blocks .* have shape \(5, 5\)"),
    ]
    for changes, named in cases:
        with pytest.raises(CheckpointError, match=named):
            read_mtp(save(changed(whole, changes), tmp_path), target.config)


def test_buffers_keep_their_precision_in_a_target_of_half(tmp_path: Path) -> None:
    """Rounding would change positions through rotary frequencies, and experts through the router's bias."""
    target = target_of("deepseek_v3")
    tensors = stored("deepseek_v3", head_for(target))
    (bias,) = (name for name in tensors if name.endswith("e_score_correction_bias"))
    tensors[bias] = 8 + torch.rand(EXPERTS) / 100
    moved = tensors | {bias.replace(".gate.", "."): tensors[bias]}  # beside the router, in some files
    del moved[bias]
    head = load_head("mtp", save(moved, tmp_path), target.config, torch.bfloat16, target.device)
    buffers = dict(head.named_buffers())
    assert head.dtype == torch.bfloat16
    assert torch.equal(buffers["decoder.layers.0.mlp.gate.e_score_correction_bias"], tensors[bias])
    assert torch.equal(buffers["decoder.rotary_emb.inv_freq"], target.model.model.rotary_emb.inv_freq)
    assert target.model.model.rotary_emb.inv_freq.dtype == torch.float32
