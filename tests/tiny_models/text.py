"""Tiny decoder-only text models: the cache layouts that the decoding core meets, and those it must refuse.

All have no end token (`eos_token_id=None`), so `generate` runs to `max_new_tokens`; a test that needs one
passes `eos_token_id` itself. None ties its head to the embedding. The default seeds are those of 24 whose
greedy outputs vary most and have no near-ties; other seeds give other models (a draft, say).
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    JambaConfig,
    JambaForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from .weights import let_states_last, randomise, scale_head_to_entropy

__all__ = [
    "DELTA_NET",
    "HYBRID_TEXT_MODELS",
    "REFUSED_TEXT_MODELS",
    "STEPPED_MODELS",
    "TEXT_MODELS",
    "tiny_falcon_h1",
    "tiny_gemma2",
    "tiny_gemma3n",
    "tiny_gemma4",
    "tiny_gpt2",
    "tiny_lfm2",
    "tiny_llama",
    "tiny_lm",
    "tiny_lm_v8",
    "tiny_mamba",
    "tiny_mistral_sliding",
    "tiny_olmo_hybrid",
    "tiny_qwen2_mixed_sliding",
    "tiny_qwen3_5",
    "tiny_qwen3_next",
]

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
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
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


def tiny_llama(
    dtype: torch.dtype = torch.float32, vocab: int = 64, layers: int = 2, seed: int = 21, hidden: int = 32
) -> PreTrainedModel:
    """A Llama with grouped queries (4 heads, 2 key-value heads) and full attention in every layer."""
    model = LlamaForCausalLM(LlamaConfig(**_sizes(vocab, layers, hidden)))
    return randomise(model, seed).to(dtype)


def tiny_mistral_sliding(
    window: int = 8, dtype: torch.dtype = torch.float32, vocab: int = 64, layers: int = 2, seed: int = 10
) -> PreTrainedModel:
    """A Mistral whose layers all see a sliding window; its cache layers keep `window - 1` entries."""
    model = MistralForCausalLM(MistralConfig(**_sizes(vocab, layers), sliding_window=window))
    return randomise(model, seed).to(dtype)


def tiny_qwen2_mixed_sliding(
    window: int = 8, dtype: torch.dtype = torch.float32, vocab: int = 64, layers: int = 4, seed: int = 7
) -> PreTrainedModel:
    """A Qwen2 with full and sliding attention in turn: two kinds of cache layer in one cache."""
    config = Qwen2Config(
        **_sizes(vocab, layers),
        use_sliding_window=True,
        sliding_window=window,
        layer_types=["full_attention" if i % 2 == 0 else "sliding_attention" for i in range(layers)],
    )
    return randomise(Qwen2ForCausalLM(config), seed).to(dtype)


def tiny_gemma2(
    window: int = 8, dtype: torch.dtype = torch.float32, vocab: int = 64, layers: int = 2, seed: int = 18
) -> PreTrainedModel:
    """A Gemma 2: sliding and full layers in turn, soft-capped attention and logits, an offset norm.

    The soft cap of attention exists in the eager and flex implementations alone (sdpa drops it with a
    warning), therefore eager, whose 4-D masks must be additive floats.
    """
    config = Gemma2Config(
        **_sizes(vocab, layers),
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=window,
        attn_logit_softcapping=20.0,
        final_logit_softcapping=10.0,
        attn_implementation="eager",
    )
    return randomise(Gemma2ForCausalLM(config), seed).to(dtype)


def tiny_gemma3n(
    window: int = 8, dtype: torch.dtype = torch.float32, vocab: int = 64, layers: int = 4, seed: int = 12
) -> PreTrainedModel:
    """A Gemma 3n: like Gemma 4 below, with several streams of hidden states."""
    config = Gemma3nTextConfig(
        **_sizes(vocab, layers),
        **_shared(vocab, layers, window),
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * layers,
    )
    return randomise(Gemma3nForCausalLM(config), seed).to(dtype)


def tiny_gemma4(
    window: int = 8, dtype: torch.dtype = torch.float32, vocab: int = 64, layers: int = 4, seed: int = 16
) -> PreTrainedModel:
    """A Gemma 4: sliding and full layers of different widths, the last two of which cache nothing."""
    config = Gemma4TextConfig(**_sizes(vocab, layers), **_shared(vocab, layers, window), global_head_dim=16)
    return randomise(Gemma4ForCausalLM(config), seed).to(dtype)


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
    config = GPT2Config(
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
    return randomise(GPT2LMHeadModel(config), seed).to(dtype)


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


def tiny_mamba(seed: int = 0) -> PreTrainedModel:
    """A Mamba: recurrent state, no key-value cache. To be refused."""
    torch.manual_seed(seed)
    config = MambaConfig(
        vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2, bos_token_id=None, eos_token_id=None
    )
    return MambaForCausalLM(config).eval().requires_grad_(False)


def tiny_qwen3_5(
    dtype: torch.dtype = torch.float32, vocab: int = 64, layers: int = 4, seed: int = 15
) -> PreTrainedModel:
    """A Qwen3.5: gated delta rule in three layers of four, with two value heads for each key head."""
    config = Qwen3_5TextConfig(**_sizes(vocab, layers), **DELTA_NET)
    return let_states_last(randomise(Qwen3_5ForCausalLM(config), seed)).to(dtype)


def tiny_qwen3_next(vocab: int = 64, seed: int = 8) -> PreTrainedModel:
    """A Qwen3-Next: gated delta rule and full attention in turn, experts, projections in another order."""
    config = Qwen3NextConfig(
        **_sizes(vocab, 4),
        **DELTA_NET,
        **EXPERTS,
        layer_types=_half("linear_attention"),
    )
    return let_states_last(randomise(Qwen3NextForCausalLM(config), seed))


def tiny_lfm2(dtype: torch.dtype = torch.float32, vocab: int = 64, seed: int = 11) -> PreTrainedModel:
    """An LFM2: short convolutions of three taps and full attention in turn."""
    config = Lfm2Config(**_sizes(vocab, 4), layer_types=_half("conv"))
    return randomise(Lfm2ForCausalLM(config), seed).to(dtype)


def tiny_qwen3_5_moe(vocab: int = 64, seed: int = 3) -> PreTrainedModel:
    """A Qwen3.5 with experts."""
    config = Qwen3_5MoeTextConfig(
        **_sizes(vocab, 4), **DELTA_NET, **EXPERTS, layer_types=_half("linear_attention")
    )
    return let_states_last(randomise(Qwen3_5MoeForCausalLM(config), seed))


def tiny_lfm3(window: int = 8, vocab: int = 64, seed: int = 3) -> PreTrainedModel:
    """An LFM3: short convolutions beside sliding and full attention; the oldest transformers lacks it."""
    kinds = ["conv", "sliding_attention", "conv", "full_attention"]
    config = transformers.Lfm3Config(**_sizes(vocab, 4), head_dim=8, sliding_window=window, layer_types=kinds)
    return randomise(transformers.Lfm3ForCausalLM(config), seed)


def tiny_olmo_hybrid(vocab: int = 64, seed: int = 3) -> PreTrainedModel:
    """An OLMo hybrid: the gated delta rule in a mixer of another make, read token by token."""
    delta_net = {name: value for name, value in DELTA_NET.items() if name != "head_dim"}
    config = OlmoHybridConfig(**_sizes(vocab, 4), **delta_net, layer_types=_half("linear_attention"))
    return let_states_last(randomise(OlmoHybridForCausalLM(config), seed))


def tiny_bamba(vocab: int = 64, seed: int = 3) -> PreTrainedModel:
    """A Bamba: Mamba-2 and full attention in turn."""
    config = BambaConfig(
        **_sizes(vocab, 4),
        attn_layer_indices=[1, 3],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=8,
        mamba_chunk_size=16,
    )
    return let_states_last(randomise(BambaForCausalLM(config), seed))


def tiny_jamba(vocab: int = 64, seed: int = 3) -> PreTrainedModel:
    """A Jamba: Mamba and full attention in turn, experts in every second layer."""
    config = JambaConfig(
        **_sizes(vocab, 4),
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=4,
        mamba_dt_rank=4,
    )
    return let_states_last(randomise(JambaForCausalLM(config), seed))


def tiny_nemotron_h(vocab: int = 64, seed: int = 3) -> PreTrainedModel:
    """A Nemotron-H: layers of Mamba-2, of attention, of an MLP and of experts alone."""
    config = NemotronHConfig(
        **{name: value for name, value in _sizes(vocab, 6).items() if name != "num_hidden_layers"},
        layers_block_type=["mamba", "attention", "mlp", "mamba", "moe", "attention"],
        head_dim=8,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
        n_group=1,
        topk_group=1,
    )
    return let_states_last(randomise(NemotronHForCausalLM(config), seed))


def tiny_kimi_linear(vocab: int = 64, seed: int = 3) -> PreTrainedModel:
    """A Kimi Linear: a delta rule that decays each channel by itself, and latent attention."""
    config = KimiLinearConfig(
        **{**_sizes(vocab, 4), "num_key_value_heads": 4},
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
    )
    return let_states_last(randomise(KimiLinearForCausalLM(config), seed))


def tiny_falcon_h1(seed: int = 0) -> PreTrainedModel:
    """A Falcon-H1: attention and Mamba-2 in every layer. To be refused."""
    torch.manual_seed(seed)
    config = FalconH1Config(
        **_sizes(64, 2),
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=8,
        mamba_chunk_size=16,
    )
    return FalconH1ForCausalLM(config).eval().requires_grad_(False)


def tiny_minimax(seed: int = 0) -> PreTrainedModel:
    """A MiniMax: linear attention with a cache of its own. To be refused."""
    torch.manual_seed(seed)
    config = MiniMaxConfig(**_sizes(64, 2), layer_types=["linear_attention", "full_attention"])
    return MiniMaxForCausalLM(config).eval().requires_grad_(False)


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

#: Text models with recurrent layers, on which the core must work too: computed over a draft in closed form,
CLOSED_FORM_MODELS = {
    "qwen3_5": tiny_qwen3_5,
    "qwen3_5_moe": tiny_qwen3_5_moe,
    "qwen3_next": tiny_qwen3_next,
    "lfm2": tiny_lfm2,
    **({"lfm3": tiny_lfm3} if hasattr(transformers, "Lfm3Config") else {}),
}

#: or read token by token.
STEPPED_MODELS = {
    "olmo_hybrid": tiny_olmo_hybrid,
    "bamba": tiny_bamba,
    "jamba": tiny_jamba,
    "nemotron_h": tiny_nemotron_h,
    "kimi_linear": tiny_kimi_linear,
}

HYBRID_TEXT_MODELS = {**CLOSED_FORM_MODELS, **STEPPED_MODELS}

#: Text models that must be refused before any work: their state cannot be rolled back to a path of a tree.
REFUSED_TEXT_MODELS = {"mamba": tiny_mamba, "falcon_h1": tiny_falcon_h1, "minimax": tiny_minimax}
