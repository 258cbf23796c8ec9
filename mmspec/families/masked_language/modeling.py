"""Masked language models that transformers lacks: LLaDA, SDAR, Dream and LLaDA2.

Their layers are those of Llama (LLaDA), Qwen3 (SDAR), Qwen2 (Dream) and GLM-4 with experts (LLaDA2).

They do not predict the next token: undecided places hold a mask token, and the model predicts their tokens.
Importing this module registers the published folders with the auto classes of transformers, without their
remote code. Tested on small random checkpoints with their configs and keys, not on published weights. Dream's
tokenizer is remote code, which you must allow or convert.

The target reads these attributes of each config (a saved config may set all but the first two):
    mask_token_id: token of an undecided place.
    block_length: places p of one block, p // block_length, see each other and the blocks before them; None:
        all places see each other.
    predicts: "own" if the logits at a place are of that place, "next" if they are of the following place.
    masks_unconditional: True if the unconditional prompt of guidance is the prompt with all tokens masked.
    whole_blocks: for models with blocks: True, the default, if the last block of an output is decoded whole
        and then cut; False if it ends with the output.
    confidence: "own" if a token's confidence is its probability in the model's own distribution, as in the
        `generate.py` of LLaDA; "promised", the default, if it is that after temperature and truncation.
"""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    core_model_loading,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from mmspec.errors import UnsupportedModelError

__all__ = [
    "MASKED_MODELS",
    "DreamConfig",
    "DreamForMaskedLM",
    "LLaDAConfig",
    "LLaDA2Config",
    "LLaDA2ForMaskedLM",
    "LLaDAForMaskedLM",
    "LLaDAModel",
    "SDARConfig",
    "SDARForMaskedLM",
]

#: LLaDA's names of settings -> Llama's.
SETTINGS = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "mlp_hidden_size": "intermediate_size",
    "max_sequence_length": "max_position_embeddings",
    "weight_tying": "tie_word_embeddings",
    "init_std": "initializer_range",
    "embedding_size": "vocab_size",  # the rows of the table; some may be unused
}
#: Other settings of LLaDA's code, and the values for which the model is a Llama.
ALLOWED: dict[str, tuple[object, ...]] = {
    "block_type": ("llama",),
    "layer_norm_type": ("rms",),
    "layer_norm_with_affine": (True,),
    "bias_for_layer_norm": (False, None),
    "activation_type": ("silu",),
    "rope": (True,),
    "alibi": (False,),
    "attention_layer_norm": (False,),
    "multi_query_attention": (False, None),
    "input_emb_norm": (False,),
    "include_bias": (False,),
    "include_qkv_bias": (False,),
    "scale_logits": (False,),
}
SHAPE = ("d_model", "n_heads", "n_layers")  # fields that only the official config has
#: Keys of its weights -> Llama's; saved folders have the official keys.
BLOCK = r"^model\.transformer\.blocks\.(\d+)\."
KEYS = {
    r"^model\.transformer\.wte\.": "model.embed_tokens.",
    r"^model\.transformer\.ln_f\.": "model.norm.",
    r"^model\.transformer\.ff_out\.": "lm_head.",
    BLOCK + r"attn_norm\.": r"model.layers.\1.input_layernorm.",
    BLOCK + r"q_proj\.": r"model.layers.\1.self_attn.q_proj.",
    BLOCK + r"k_proj\.": r"model.layers.\1.self_attn.k_proj.",
    BLOCK + r"v_proj\.": r"model.layers.\1.self_attn.v_proj.",
    BLOCK + r"attn_out\.": r"model.layers.\1.self_attn.o_proj.",
    BLOCK + r"ff_norm\.": r"model.layers.\1.post_attention_layernorm.",
    BLOCK + r"ff_proj\.": r"model.layers.\1.mlp.gate_proj.",
    BLOCK + r"up_proj\.": r"model.layers.\1.mlp.up_proj.",
    BLOCK + r"ff_out\.": r"model.layers.\1.mlp.down_proj.",
}


#: LLaDA2's names of settings -> GLM-4's; the supported values of other settings; and keys of its weights.
LLADA2_SETTINGS = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "use_qkv_bias": "attention_bias",
}
LLADA2_ALLOWED: dict[str, object] = {"score_function": "sigmoid", "use_bias": False, "rope_scaling": None}
LAYER = r"^model\.layers\.(\d+)\."
LLADA2_KEYS = {
    r"^model\.word_embeddings\.": "model.embed_tokens.",
    LAYER + r"attention\.dense\.": r"model.layers.\1.self_attn.o_proj.",
    LAYER + r"attention\.query_layernorm\.": r"model.layers.\1.self_attn.q_norm.",
    LAYER + r"attention\.key_layernorm\.": r"model.layers.\1.self_attn.k_norm.",
    LAYER + r"mlp\.gate\.expert_bias": r"model.layers.\1.mlp.gate.e_score_correction_bias",
}


class LLaDAConfig(LlamaConfig):
    """Config of LLaDA (2502.09992): Llama's, which also accepts the official names of settings.

    Raises:
        ValueError: it has a feature that Llama lacks, such as ALiBi or another norm.
    """

    model_type = "llada"
    block_length = None
    predicts = "own"
    confidence = "own"
    masks_unconditional = True
    is_causal = False

    rms_norm_eps: float = 1e-5
    mask_token_id: int = 126336

    def __post_init__(self, **kwargs: Any) -> None:
        if any(name in kwargs for name in SHAPE):
            others = {name: kwargs.pop(name, allowed[0]) for name, allowed in ALLOWED.items()}
            wrong = [f"{name} {got!r}" for name, got in others.items() if got not in ALLOWED[name]]
            if wrong:
                raise ValueError(f"LLaDA with {', '.join(wrong)} is not supported, because Llama lacks it")
            if kwargs.get("mlp_hidden_size") is None:
                kwargs["mlp_hidden_size"] = kwargs.get("mlp_ratio", 4) * kwargs["d_model"]
            for theirs, own in SETTINGS.items():
                if (value := kwargs.pop(theirs, None)) is not None:
                    setattr(self, own, value)
        super().__post_init__(**kwargs)


class SDARConfig(Qwen3Config):
    """Config of SDAR (2510.06303): Qwen3's, with blocks of the official setting `block_size`."""

    model_type = "sdar"
    attribute_map = {"block_length": "block_size"}
    predicts = "own"

    mask_token_id: int = 151669
    block_size: int = 4

    def __post_init__(self, **kwargs: Any) -> None:
        if kwargs.get("attn_implementation") == "flex_attention":  # published configs have that of training
            del kwargs["attn_implementation"]
        super().__post_init__(**kwargs)


class DreamConfig(Qwen2Config):
    """Config of Dream (2508.15487) and DiffuCoder: Qwen2's; the logits at a place predict the next place.

    Raises:
        ValueError: it has blocks, as later models of that name, whose logits are of their own places.
    """

    model_type = "Dream"
    block_length = None
    predicts = "next"
    is_causal = False

    mask_token_id: int = 151666

    def __post_init__(self, **kwargs: Any) -> None:
        if kwargs.get("block_size") is not None:
            raise ValueError(f"Dream with block_size {kwargs['block_size']!r} is not supported")
        super().__post_init__(**kwargs)


class LLaDA2Config(Glm4MoeConfig):
    """Config of LLaDA2 (2512.15745): GLM-4 MoE's, which also accepts the official names of settings.

    Raises:
        ValueError: it has a feature that GLM-4 MoE lacks, such as another router.
    """

    model_type = "llada2_moe"
    predicts = "own"
    whole_blocks = False

    mask_token_id: int = 156895
    block_length: int = 32

    def __post_init__(self, **kwargs: Any) -> None:
        wrong = [
            f"{name} {kwargs[name]!r}"
            for name, allowed in LLADA2_ALLOWED.items()
            if kwargs.get(name, allowed) != allowed
        ]
        if wrong:
            raise ValueError(f"LLaDA2 with {', '.join(wrong)} is not supported, because GLM-4 MoE lacks it")
        for theirs, own in LLADA2_SETTINGS.items():
            if (value := kwargs.pop(theirs, None)) is not None:
                setattr(self, own, value)
        if "rope_theta" in kwargs and self.rope_parameters is None:
            factor = kwargs.pop("partial_rotary_factor", 0.5)
            rope = {"rope_type": "default", "rope_theta": kwargs.pop("rope_theta")}
            self.rope_parameters = {**rope, "partial_rotary_factor": factor}
        self.use_qk_norm, self.num_nextn_predict_layers = True, 0
        super().__post_init__(**kwargs)


class MaskedModel(PreTrainedModel):
    """Base of masked models: no causal mask by default, and no generation by the next token."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.is_causal = getattr(config, "is_causal", True)

    def generate(self, *args: Any, custom_generate: Any = None, **kwargs: Any) -> Any:
        """Generate by `custom_generate`, which is required.

        Raises:
            UnsupportedModelError: `custom_generate` is None.
        """
        if custom_generate is None:
            raise UnsupportedModelError(
                f"{type(self).__name__} predicts masked places and has no next token. Decode it with "
                "MMSpecPipeline, or pass custom_generate=mmspec.accelerate(...)"
            )
        return super().generate(*args, custom_generate=custom_generate, **kwargs)  # type: ignore[misc]


class LLaDAModel(LlamaModel):
    """LLaDA without its output matrix, as the language model of a vision-language model (LLaDA-V)."""

    config_class = LLaDAConfig

    def __init__(self, config: LLaDAConfig) -> None:
        super().__init__(config)
        for part in self.modules():
            if isinstance(part, LlamaAttention):
                part.is_causal = config.is_causal


class LLaDAForMaskedLM(MaskedModel, LlamaForCausalLM):
    """LLaDA: Llama without the causal mask."""

    config_class = LLaDAConfig


class SDARForMaskedLM(MaskedModel, Qwen3ForCausalLM):
    """SDAR: Qwen3 with attention that is causal over blocks; the caller must pass the mask."""

    config_class = SDARConfig


class DreamForMaskedLM(MaskedModel, Qwen2ForCausalLM):
    """Dream: Qwen2 without the causal mask, whose logits are of the next place."""

    config_class = DreamConfig


class LLaDA2ForMaskedLM(MaskedModel, Glm4MoeForCausalLM):
    """LLaDA2: GLM-4 with experts and attention that is causal over blocks; the caller must pass the mask."""

    config_class = LLaDA2Config


#: Config -> model of all masked language models.
MASKED_MODELS: dict[type[PreTrainedConfig], type[MaskedModel]] = {
    LLaDAConfig: LLaDAForMaskedLM,
    SDARConfig: SDARForMaskedLM,
    DreamConfig: DreamForMaskedLM,
    LLaDA2Config: LLaDA2ForMaskedLM,
}
for config, model in MASKED_MODELS.items():
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModelForCausalLM.register(config, model, exist_ok=True)
AutoModel.register(LLaDAConfig, LLaDAModel, exist_ok=True)
renamings: list[WeightConverter | WeightRenaming] = [
    WeightRenaming(theirs, own) for theirs, own in KEYS.items()
]
register_checkpoint_conversion_mapping(LLaDAConfig.model_type, renamings, overwrite=True)


def register_llada2() -> None:
    """Register LLaDA2's layout with transformers, if its version can split a matrix by the sizes of parts."""
    split = getattr(core_model_loading, "Split", None)
    if split is None:  # transformers before 5.22
        return
    attention = "self_attn.{}_proj.weight"
    own = [WeightRenaming(theirs, ours) for theirs, ours in LLADA2_KEYS.items()]
    experts = ["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"]
    converters = [
        WeightConverter(
            "attention.query_key_value.weight", [attention.format(part) for part in "qkv"], [split(dim=0)]
        ),
        WeightConverter(experts, "mlp.experts.gate_up_proj", [MergeModulelist(dim=0), Concatenate(dim=1)]),
        WeightConverter("mlp.experts.*.down_proj.weight", "mlp.experts.down_proj", [MergeModulelist(dim=0)]),
    ]
    register_checkpoint_conversion_mapping(LLaDA2Config.model_type, [*own, *converters], overwrite=True)


register_llada2()
