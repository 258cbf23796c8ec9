"""Tiny decoder-only text models, with the supported cache layouts, and with layouts that must be refused.

All have no end token (`eos_token_id=None`), so `generate` runs to `max_new_tokens`; a test that needs one
passes `eos_token_id` itself. None ties its head to the embedding. The default seeds are those of 24 whose
greedy outputs vary most and have no near-ties; other seeds give other models (a draft, say).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from .weights import let_states_last, randomise, scale_head_to_entropy

#: Settings of a Gated DeltaNet: two value heads for each key head.
DELTA_NET: dict[str, Any] = dict(
    head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)

#: Settings of two experts and a shared one.
EXPERTS: dict[str, Any] = dict(
    num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16
)


def _sizes(vocab: int, layers: int, hidden: int = 32) -> dict[str, Any]:
    """The settings that Llama and its relatives share."""
    return dict(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


def _model(config: PreTrainedConfig, seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return let_states_last(randomise(model, seed)).to(dtype)


def tiny_llama(
    dtype: torch.dtype = torch.float32, vocab: int = 64, layers: int = 2, seed: int = 21, hidden: int = 32
) -> PreTrainedModel:
    """A Llama with grouped queries (4 heads, 2 key-value heads) and full attention in every layer."""
    return _model(hf.LlamaConfig(**_sizes(vocab, layers, hidden)), seed, dtype)


def tiny_mistral_sliding(
    window: int = 8, dtype: torch.dtype = torch.float32, vocab: int = 64, layers: int = 2, seed: int = 10
) -> PreTrainedModel:
    """A Mistral whose layers all see a sliding window; its cache layers keep `window - 1` entries."""
    return _model(hf.MistralConfig(**_sizes(vocab, layers), sliding_window=window), seed, dtype)


def tiny_qwen2_mixed_sliding(
    window: int = 8, dtype: torch.dtype = torch.float32, vocab: int = 64, layers: int = 4, seed: int = 7
) -> PreTrainedModel:
    """A Qwen2 with full and sliding attention in turn: two kinds of cache layer in one cache."""
    config = hf.Qwen2Config(
        **_sizes(vocab, layers),
        use_sliding_window=True,
        sliding_window=window,
        layer_types=["full_attention" if i % 2 == 0 else "sliding_attention" for i in range(layers)],
    )
    return _model(config, seed, dtype)


def tiny_gemma2(
    window: int = 8, dtype: torch.dtype = torch.float32, vocab: int = 64, layers: int = 2, seed: int = 18
) -> PreTrainedModel:
    """A Gemma 2: sliding and full layers in turn, soft-capped attention and logits, an offset norm.

    The soft cap of attention exists in the eager and flex implementations alone (sdpa drops it with a
    warning), therefore eager, whose 4-D masks must be additive floats.
    """
    config = hf.Gemma2Config(
        **_sizes(vocab, layers),
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=window,
        attn_logit_softcapping=20.0,
        final_logit_softcapping=10.0,
        attn_implementation="eager",
    )
    return _model(config, seed, dtype)


def tiny_gemma3n(
    window: int = 8, dtype: torch.dtype = torch.float32, vocab: int = 64, layers: int = 4, seed: int = 12
) -> PreTrainedModel:
    """A Gemma 3n: like Gemma 4 below, with several streams of hidden states."""
    config = hf.Gemma3nTextConfig(
        **_sizes(vocab, layers),
        **_shared(vocab, layers, window),
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * layers,
    )
    return _model(config, seed, dtype)


def tiny_gemma4(
    window: int = 8, dtype: torch.dtype = torch.float32, vocab: int = 64, layers: int = 4, seed: int = 16
) -> PreTrainedModel:
    """A Gemma 4: sliding and full layers of different widths, the last two of which cache nothing."""
    config = hf.Gemma4TextConfig(
        **_sizes(vocab, layers), **_shared(vocab, layers, window), global_head_dim=16
    )
    return _model(config, seed, dtype)


def _shared(vocab: int, layers: int, window: int) -> dict[str, Any]:
    """The settings of Gemma 3n and 4: layers behind the first two read the keys and values of those."""
    return dict(
        head_dim=8,
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        num_kv_shared_layers=layers - 2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=vocab,
    )


def tiny_gpt2(
    dtype: torch.dtype = torch.float32, vocab: int = 64, layers: int = 2, seed: int = 9
) -> PreTrainedModel:
    """A GPT-2: learned absolute positions (256 of them), so a wrong or too large position shows at once."""
    config = hf.GPT2Config(
        vocab_size=vocab,
        n_positions=256,
        n_embd=32,
        n_layer=layers,
        n_head=4,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return _model(config, seed, dtype)


def tiny_lm_v8(
    layers: int = 1, dtype: torch.dtype = torch.float64, seed: int = 4, nats: float = 1.5
) -> PreTrainedModel:
    """A Llama over eight tokens for tests of distributions: mean next-token entropy `nats` (ln 8 = 2.08)."""
    return scale_head_to_entropy(tiny_llama(dtype, vocab=8, layers=layers, seed=seed, hidden=16), nats)


def tiny_lm(
    layers: int = 2, dtype: torch.dtype = torch.float64, seed: int = 21, vocab: int = 64, nats: float = 2.0
) -> PreTrainedModel:
    """A Llama over 64 tokens in float64, mean next-token entropy `nats`: sampling tests through the loop."""
    return scale_head_to_entropy(tiny_llama(dtype, vocab=vocab, layers=layers, seed=seed), nats)


def tiny_qwen3_5(
    dtype: torch.dtype = torch.float32, vocab: int = 64, layers: int = 4, seed: int = 15
) -> PreTrainedModel:
    """A Qwen3.5: gated delta rule in three layers of four, with two value heads for each key head."""
    config = hf.Qwen3_5TextConfig(**_sizes(vocab, layers), **DELTA_NET)
    return _model(config, seed, dtype)


def tiny_qwen3_next(vocab: int = 64, seed: int = 8) -> PreTrainedModel:
    """A Qwen3-Next: gated delta rule and full attention in turn, experts, projections in another order."""
    config = hf.Qwen3NextConfig(
        **_sizes(vocab, 4), **DELTA_NET, **EXPERTS, layer_types=_half("linear_attention")
    )
    return _model(config, seed)


def tiny_lfm2(dtype: torch.dtype = torch.float32, vocab: int = 64, seed: int = 11) -> PreTrainedModel:
    """An LFM2: short convolutions of three taps and full attention in turn."""
    config = hf.Lfm2Config(**_sizes(vocab, 4), layer_types=_half("conv"))
    return _model(config, seed, dtype)


def tiny_qwen3_5_moe(vocab: int = 64, seed: int = 3) -> PreTrainedModel:
    """A Qwen3.5 with experts."""
    config = hf.Qwen3_5MoeTextConfig(
        **_sizes(vocab, 4), **DELTA_NET, **EXPERTS, layer_types=_half("linear_attention")
    )
    return _model(config, seed)


def tiny_lfm3(window: int = 8, vocab: int = 64, seed: int = 3) -> PreTrainedModel:
    """An LFM3: short convolutions beside sliding and full attention; the oldest transformers lacks it."""
    kinds = ["conv", "sliding_attention", "conv", "full_attention"]
    config = hf.Lfm3Config(**_sizes(vocab, 4), head_dim=8, sliding_window=window, layer_types=kinds)
    return _model(config, seed)


def tiny_falcon_h1(seed: int = 3) -> PreTrainedModel:
    """A Falcon-H1: attention beside Mamba-2 in every layer, whose parts it scales."""
    config = hf.FalconH1Config(
        **_sizes(64, 2),
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=8,
        mamba_chunk_size=16,
        ssm_in_multiplier=1.5,
        ssm_multipliers=[0.5, 1.5, 0.8, 1.2, 0.7],
    )
    return _model(config, seed)


def tiny_minimax(seed: int = 0) -> PreTrainedModel:
    """A MiniMax: linear attention with a cache of its own. To be refused."""
    config = hf.MiniMaxConfig(**_sizes(64, 2), layer_types=["linear_attention", "full_attention"])
    return _model(config, seed)


def _half(kind: str) -> list[str]:
    """Four layers: this kind and full attention in turn."""
    return [kind, "full_attention"] * 2


#: Text models on which the whole core must work, by name.
TEXT_MODELS = {
    "llama": tiny_llama,
    "mistral_sliding": tiny_mistral_sliding,
    "qwen2_mixed_sliding": tiny_qwen2_mixed_sliding,
    "gemma2": tiny_gemma2,
    "gemma3n": tiny_gemma3n,
    "gemma4": tiny_gemma4,
    "gpt2": tiny_gpt2,
}


def _hybrid(config: type[PreTrainedConfig], **settings: Any) -> Callable[[], PreTrainedModel]:
    sizes = _sizes(64, 4)
    if "layers_block_type" in settings:  # says how many there are
        del sizes["num_hidden_layers"]
    return lambda: _model(config(**sizes | settings), 3)


def _recurrent(config: type[PreTrainedConfig], **settings: Any) -> Callable[[], PreTrainedModel]:
    """Models without attention, which take no positions."""
    ends = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0, tie_word_embeddings=False)
    sizes = dict(vocab_size=64, hidden_size=32, state_size=8, num_hidden_layers=3)
    return lambda: _model(config(**sizes | ends | settings), 3)


#: Text models with recurrent layers, on which the core must work too: computed over a draft in closed form,
CLOSED_FORM_MODELS = {
    "qwen3_5": tiny_qwen3_5,
    "qwen3_5_moe": tiny_qwen3_5_moe,
    "qwen3_next": tiny_qwen3_next,
    "lfm2": tiny_lfm2,
    "bamba": _hybrid(
        hf.BambaConfig,
        attn_layer_indices=[1, 3],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=8,
        mamba_chunk_size=16,
    ),
    "nemotron_h": _hybrid(
        hf.NemotronHConfig,
        layers_block_type=["mamba", "attention", "mlp", "mamba", "moe", "attention"],
        head_dim=8,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
    ),
    "mamba2": _recurrent(hf.Mamba2Config, num_heads=4, head_dim=16, n_groups=2, chunk_size=16),
    "zamba2": _hybrid(
        hf.Zamba2Config,
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "hybrid"] * 2,
        mamba_d_state=8,
        mamba_headdim=16,
        n_mamba_heads=4,
        num_mem_blocks=1,
        chunk_size=16,
    ),
    "falcon_h1": tiny_falcon_h1,
    **({"lfm3": tiny_lfm3} if hasattr(hf, "Lfm3Config") else {}),
}


#: or read token by token: Mamba, alone and with attention and experts; a gated delta rule of another make;
#: a delta rule that decays each channel by itself.
STEPPED_MODELS = {
    "mamba": _recurrent(hf.MambaConfig),
    "olmo_hybrid": _hybrid(
        hf.OlmoHybridConfig,
        **{name: value for name, value in DELTA_NET.items() if name != "head_dim"},
        layer_types=_half("linear_attention"),
    ),
    "jamba": _hybrid(
        hf.JambaConfig,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=4,
        mamba_dt_rank=4,
    ),
    "kimi_linear": _hybrid(
        hf.KimiLinearConfig,
        num_key_value_heads=4,
        layer_types=_half("linear_attention"),
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        kv_lora_rank=16,
        linear_head_dim=8,
        linear_num_heads=4,
        moe_intermediate_size=16,
        num_local_experts=2,
        num_experts_per_tok=1,
    ),
}

HYBRID_TEXT_MODELS = {**CLOSED_FORM_MODELS, **STEPPED_MODELS}

#: Text models that must be refused before any work, because their state cannot be restored to a tree's path.
REFUSED_TEXT_MODELS = {"minimax": tiny_minimax}
