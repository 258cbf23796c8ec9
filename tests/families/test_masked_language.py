"""Published folders of LLaDA, SDAR and Dream: their configs and keys, on small random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from mmspec.errors import CheckpointError
from mmspec.models.checkpoint import load_config, load_model
from tests.families.naive_masked import scores_of
from tests.tiny_models import MASKED_MODELS, tiny_llada

#: GSAI-ML/LLaDA-8B-Instruct's config.json, with the sizes of the tiny model.
LLADA: dict[str, Any] = {
    "activation_type": "silu",
    "alibi": False,
    "alibi_bias_max": 8.0,
    "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True,
    "auto_map": {
        "AutoConfig": "configuration_llada.LLaDAConfig",
        "AutoModel": "modeling_llada.LLaDAModelLM",
        "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
    },
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 32,
    "embedding_dropout": 0.0,
    "embedding_size": 32,
    "eos_token_id": 2,
    "flash_attention": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "init_cutoff_factor": None,
    "init_device": "meta",
    "init_fn": "mitchell",
    "init_std": 0.02,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": 31,
    "max_sequence_length": 1024,
    "mlp_hidden_size": 64,
    "mlp_ratio": 4,
    "model_type": "llada",
    "multi_query_attention": None,
    "n_heads": 4,
    "n_kv_heads": 2,
    "n_layers": 2,
    "pad_token_id": 0,
    "precision": "amp_bf16",
    "residual_dropout": 0.0,
    "rms_norm_eps": 1e-05,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 10000.0,
    "scale_logits": False,
    "torch_dtype": "float64",
    "transformers_version": "4.46.3",
    "use_cache": False,
    "vocab_size": 30,
    "weight_tying": False,
}
#: Llama's part of a layer -> LLaDA's.
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "post_attention_layernorm": "ff_norm",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}
IDS = [3, 1, 4, 31, 5, 31, 9, 2, 6]


def official_llada(model: PreTrainedModel) -> dict[str, Tensor]:
    """Its weights under the names of the published files."""
    own, root = model.state_dict(), "model.transformer."
    tensors = {
        root + "wte.weight": own["model.embed_tokens.weight"],
        root + "ln_f.weight": own["model.norm.weight"],
        root + "ff_out.weight": own["lm_head.weight"],
    }
    for layer in range(model.config.num_hidden_layers):
        for theirs, name in PARTS.items():
            weight = own[f"model.layers.{layer}.{theirs}.weight"]
            tensors[f"{root}blocks.{layer}.{name}.weight"] = weight
    return {name: tensor.clone() for name, tensor in tensors.items()}


def write(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> str:
    """A folder with LLaDA's config and these tensors; without them, the config alone and no weight of use."""
    (folder / "config.json").write_text(json.dumps({**LLADA, **changes}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def loaded(source: str) -> PreTrainedModel:
    return load_model(source, load_config(source))


def same_logits(own: PreTrainedModel, other: PreTrainedModel, block: int | None = None) -> None:
    ours, theirs = (torch.tensor(scores_of(model, IDS, block)) for model in (own, other))
    assert torch.equal(ours, theirs)


def test_a_published_llada_is_a_llama_without_the_causal_mask(tmp_path: Path) -> None:
    model = tiny_llada()
    source = write(tmp_path, official_llada(model))
    found = loaded(source)
    assert found.config.mask_token_id == 31 and found.config.vocab_size == 32
    assert found.config.block_length is None and found.config.predicts == "own"
    assert found.dtype == torch.float64 and found.config.eos_token_id == 2
    same_logits(model, found)
    ids = torch.tensor([IDS])
    seen = torch.tensor(scores_of(model, IDS), dtype=torch.float64)
    assert torch.allclose(found(ids).logits[0], seen)  # without a mask nothing is hidden
    changed = ids.clone()
    changed[0, -1] = 7
    assert not torch.allclose(found(changed).logits[0, 0], found(ids).logits[0, 0])


def test_a_saved_llada_has_the_published_keys(tmp_path: Path) -> None:
    model = tiny_llada()
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == official_llada(model).keys()
    same_logits(model, loaded(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alibi", True),
        ("rope", False),
        ("layer_norm_type", "default"),
        ("layer_norm_with_affine", False),
        ("activation_type", "swiglu"),
        ("block_type", "sequential"),
        ("attention_layer_norm", True),
        ("input_emb_norm", True),
        ("include_bias", True),
        ("include_qkv_bias", True),
        ("bias_for_layer_norm", True),
        ("multi_query_attention", True),
        ("scale_logits", True),
    ],
)
def test_what_no_llama_has_is_refused(name: str, value: object, tmp_path: Path) -> None:
    source = write(tmp_path, {"none": torch.zeros(1)}, **{name: value})
    with pytest.raises(CheckpointError, match=f"LLaDA with {name} {value!r} is not supported"):
        load_config(source)


@pytest.mark.parametrize("kind", ["sdar", "dream"])
def test_published_sdar_and_dream_have_the_keys_of_qwen(kind: str, tmp_path: Path) -> None:
    model = MASKED_MODELS[kind]()
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    names = {"sdar": ("sdar", "SDAR", "ForCausalLM"), "dream": ("dream", "Dream", "Model")}[kind]
    code, family, ending = names
    rope = config.pop("rope_parameters")
    published = {
        "architectures": [family + ending],
        "auto_map": {"AutoModelForCausalLM": f"modeling_{code}.{family}{ending}"},
        "rope_scaling": None,
        "rope_theta": rope["rope_theta"],
        "torch_dtype": config.pop("dtype"),
        "use_cache": False,
        **({"attn_implementation": "flex_attention", "fuse_cross_entropy": True} if kind == "sdar" else {}),
    }
    path.write_text(json.dumps({**config, **published}))
    assert all(name.startswith(("model.", "lm_head.")) for name in load_file(tmp_path / "model.safetensors"))
    found = loaded(str(tmp_path))
    assert found.config.block_length == {"sdar": 4, "dream": None}[kind]
    assert found.config.predicts == {"sdar": "own", "dream": "next"}[kind]
    assert found.config.mask_token_id == 31 and found.config._attn_implementation == "sdpa"
    same_logits(model, found, found.config.block_length)
