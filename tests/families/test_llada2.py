"""LLaDA2's published layout: its config and keys on small random weights, against its layers written out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu
from transformers import core_model_loading

from mmspec.errors import CheckpointError
from mmspec.families.masked_language.target import MaskedTarget
from mmspec.models.checkpoint import load_config, load_model
from mmspec.targets import adapt

pytestmark = pytest.mark.skipif(
    not hasattr(core_model_loading, "Split"), reason="this transformers cannot split a fused matrix"
)

WIDTH, HEADS, KEYS, SIZE, EXPERTS, CHOSEN, GROUPS, BLOCK = 32, 4, 2, 8, 8, 2, 4, 4
#: inclusionAI/LLaDA2.0-mini's config.json, with small sizes.
CONFIG: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM"},
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "head_dim": SIZE,
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "model_type": "llada2_moe",
    "moe_intermediate_size": 16,
    "n_group": GROUPS,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "num_hidden_layers": 2,
    "num_key_value_heads": KEYS,
    "num_shared_experts": 1,
    "pad_token_id": 0,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 600000,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 2,
    "torch_dtype": "float32",
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "vocab_size": 40,
    "mask_token_id": 39,
    "block_length": BLOCK,
}
IDS = [3, 1, 4, 39, 5, 39, 9, 2, 6]


def published() -> dict[str, Tensor]:
    """Random weights under the names of the published files."""
    made, noise = {}, torch.Generator().manual_seed(0)

    def add(name: str, *shape: int) -> None:
        scale = 1.0 if len(shape) == 1 or "embeddings" in name else shape[-1] ** -0.5
        made[name] = torch.randn(shape, generator=noise) * scale
        if len(shape) == 1 and "bias" not in name:
            made[name] = 1 + 0.1 * made[name]

    add("model.word_embeddings.weight", 40, WIDTH)
    add("model.norm.weight", WIDTH)
    add("lm_head.weight", 40, WIDTH)
    for layer in range(2):
        root = f"model.layers.{layer}."
        add(root + "attention.query_key_value.weight", (HEADS + 2 * KEYS) * SIZE, WIDTH)
        add(root + "attention.dense.weight", WIDTH, HEADS * SIZE)
        for norm in ("query_layernorm", "key_layernorm"):
            add(f"{root}attention.{norm}.weight", SIZE)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            add(f"{root}{norm}.weight", WIDTH)
        parts = {"mlp.": 48} if layer == 0 else {f"mlp.experts.{index}.": 16 for index in range(EXPERTS)}
        if layer:
            add(root + "mlp.gate.weight", EXPERTS, WIDTH)
            add(root + "mlp.gate.expert_bias", EXPERTS)
            parts["mlp.shared_experts."] = 16
        for part, inner in parts.items():
            add(f"{root}{part}gate_proj.weight", inner, WIDTH)
            add(f"{root}{part}up_proj.weight", inner, WIDTH)
            add(f"{root}{part}down_proj.weight", WIDTH, inner)
    return made


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def rotate(x: Tensor) -> Tensor:
    """Turn the first half of each head [L, heads, SIZE] by its place."""
    half = SIZE // 2
    frequency = 600000.0 ** (-torch.arange(0, half, 2) / half)
    angle = torch.arange(len(x))[:, None] * frequency
    cos, sin = (each.repeat(1, 2)[:, None] for each in (angle.cos(), angle.sin()))
    first, second = x[..., : half // 2], x[..., half // 2 : half]
    turned = x[..., :half] * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([turned, x[..., half:]], -1)


def feed(x: Tensor, weights: dict[str, Tensor], root: str) -> Tensor:
    gate, up, down = (weights[f"{root}{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def experts(x: Tensor, weights: dict[str, Tensor], root: str) -> Tensor:
    """Experts of one token [WIDTH]: the best groups by their two best, then the best in those."""
    scores = (weights[root + "gate.weight"] @ x).sigmoid()
    biased = (scores + weights[root + "gate.expert_bias"]).view(GROUPS, -1)
    groups = biased.topk(2, -1).values.sum(-1).topk(2).indices
    allowed = torch.full_like(biased, float("-inf"))
    allowed[groups] = biased[groups]
    chosen = allowed.flatten().topk(CHOSEN).indices
    share = scores[chosen] / scores[chosen].sum() * 2.5
    routed = sum(
        each * feed(x, weights, f"{root}experts.{int(index)}.")
        for each, index in zip(share, chosen, strict=True)
    )
    return routed + feed(x, weights, root + "shared_experts.")  # type: ignore[no-any-return]


def forward(weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Logits [L, 40], causal over blocks."""
    x = weights["model.word_embeddings.weight"][ids]
    place = torch.arange(len(ids)) // BLOCK
    for layer in range(2):
        root = f"model.layers.{layer}."
        read = norm(x, weights[root + "input_layernorm.weight"])
        heads = (read @ weights[root + "attention.query_key_value.weight"].T).view(len(ids), -1, SIZE)
        q, k, v = heads.split([HEADS, KEYS, KEYS], 1)
        q = rotate(norm(q, weights[root + "attention.query_layernorm.weight"]))
        k = rotate(norm(k, weights[root + "attention.key_layernorm.weight"]))
        k, v = (each.repeat_interleave(HEADS // KEYS, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / SIZE**0.5
        scores = scores.masked_fill(place[:, None] < place, float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + mixed @ weights[root + "attention.dense.weight"].T
        read = norm(x, weights[root + "post_attention_layernorm.weight"])
        mlp = root + "mlp."
        x = x + (
            torch.stack([experts(each, weights, mlp) for each in read]) if layer else feed(read, weights, mlp)
        )
    return norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def write(folder: Path, **changes: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(published(), folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_a_published_llada2_is_its_layers_written_out(tmp_path: Path) -> None:
    source = write(tmp_path)
    model = load_model(source, load_config(source))
    target = adapt(model)
    assert isinstance(target, MaskedTarget)
    assert (target.block_length, target.predicts, target.mask_token_id) == (BLOCK, "own", 39)
    place = torch.arange(len(IDS)) // BLOCK
    with torch.inference_mode():
        found = model(torch.tensor([IDS]), attention_mask=(place[:, None] >= place)[None, None]).logits[0]
    torch.testing.assert_close(found, forward(published(), IDS), atol=2e-4, rtol=1e-4)


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    source = write(tmp_path / "one")
    model = load_model(source, load_config(source))
    model.save_pretrained(tmp_path / "two")
    again = load_model(str(tmp_path / "two"), load_config(str(tmp_path / "two")))
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


@pytest.mark.parametrize(("name", "value"), [("score_function", "softmax"), ("use_bias", True)])
def test_another_router_is_refused(name: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"LLaDA2 with {name} {value!r} is not supported"):
        load_config(write(tmp_path, **{name: value}))
