"""Generation configs as published: the files, kept in public repositories, or the code that writes them.

Each was read where its source says. Files of fine-tuned models stand for their family. Token ids are as
published, and beyond the vocabularies of the tiny models that tests run them on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    """A generation config.

    Args:
        family: of models.
        model: the class of transformers that runs it; None for classes of other packages.
        source: where it was read; a repository of GitHub, and a path or a number in it.
        values: the fields of the file, but for the version of transformers.
    """

    family: str
    model: str | None
    source: str
    values: dict[str, Any]


FILE = "generation_config.json"
CONVERSION = "huggingface/transformers: src/transformers/models/"
QWEN = {"bos_token_id": 151643, "pad_token_id": 151643, "eos_token_id": [151645, 151643]}
GEMMA = {"bos_token_id": 2, "pad_token_id": 0, "eos_token_id": [1, 106]}
GEMMA_DRAWS = {"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95}
OF_CONFIG = {"_from_model_config": True}

VISION_LANGUAGE = [
    Published(
        "Qwen2.5-VL 3B", "Qwen2_5_VLForConditionalGeneration",
        f"zhanggaojian/Qwen2.5-VL-3B-LLMQ_Samples: models/Qwen2.5-VL-3B-Instruct/{FILE}",
        {**QWEN, "do_sample": True, "repetition_penalty": 1.05, "temperature": 0.000001},
    ),
    Published(
        "Qwen2.5-VL 7B", "Qwen2_5_VLForConditionalGeneration", "vllm-project/vllm#15281",
        {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.1, "top_k": 1, "top_p": 0.001},
    ),
    Published(
        "olmOCR, a Qwen2-VL", "Qwen2VLForConditionalGeneration", f"BrianYAU-NTEC/olmOCR: {FILE}",
        {**QWEN, "do_sample": True, "temperature": 0.01, "top_k": 1, "top_p": 0.001},
    ),
    Published(
        "Gemma 3", "Gemma3ForConditionalGeneration", f"{CONVERSION}gemma3/convert_gemma3_weights.py",
        {**GEMMA, **GEMMA_DRAWS, "cache_implementation": "hybrid"},
    ),
    Published(
        "Gemma 3n", "Gemma3nForConditionalGeneration", f"{CONVERSION}gemma3n/convert_gemma3n_weights.py",
        {**GEMMA, **GEMMA_DRAWS, "cache_implementation": "hybrid"},
    ),
    Published(
        "Gemma 4", "Gemma4ForConditionalGeneration", f"{CONVERSION}gemma4/convert_gemma4_weights.py",
        GEMMA_DRAWS,
    ),
    Published(
        "Llama 4", "Llama4ForConditionalGeneration", f"{CONVERSION}llama4/convert_llama4_weights_to_hf.py",
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
    ),
    Published(
        "InternVL 2.5", "InternVLForConditionalGeneration",
        f"{CONVERSION}internvl/convert_internvl_weights_to_hf.py", {"eos_token_id": 92542},
    ),
    Published(
        "Perception LM", "PerceptionLMForConditionalGeneration",
        f"{CONVERSION}perception_lm/convert_perception_lm_weights_to_hf.py", {"do_sample": False},
    ),
    Published(
        "InfiMM", None, f"InfiMM/infimm-zephyr: {FILE}",
        {"do_sample": True, "max_new_tokens": 512, "top_k": 0, "top_p": 0.5},
    ),
    Published(
        "AndesVL", None, f"JielongHe/Andes_VL: {FILE}",
        {**QWEN, "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
    ),
]  # fmt: skip
TEXT = [
    Published(
        "Llama 3 Instruct", "LlamaForCausalLM", f"{CONVERSION}llama/convert_llama_weights_to_hf.py",
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
    ),
    Published(
        "Llama 2", "LlamaForCausalLM", f"HamZil/Llama-2-7b-hf: {FILE}",
        {
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "temperature": 0.9, "max_length": 4096,
            "top_p": 0.6,
        },
    ),
    Published(
        "Reflection, a Llama 3.1", "LlamaForCausalLM", f"MiMiGame-1/Reflection-Llama-3.1-70B: {FILE}",
        {
            "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "do_sample": True,
            "temperature": 0.7, "top_p": 0.95,
        },
    ),
    Published(
        "Orpheus, a Llama 3.2", "LlamaForCausalLM", f"DocWobble/Orpheus_3B_Quantized: {FILE}",
        {
            **OF_CONFIG, "bos_token_id": 128000, "eos_token_id": 128009, "pad_token_id": 128004,
            "do_sample": True, "max_length": 131072, "temperature": 0.6, "top_p": 0.9,
        },
    ),
    Published(
        "Atom, a Llama 2", "LlamaForCausalLM", f"HuengchI/Atom-7B: {FILE}",
        {
            **OF_CONFIG, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "temperature": 0.3,
            "top_p": 0.95,
        },
    ),
    Published(
        "Sakura, a Qwen2.5", "Qwen2ForCausalLM", f"1235357/Backup_hf_sakura-14b-qwen2.5-v1.0-q6k: {FILE}",
        {
            **QWEN, "do_sample": True, "repetition_penalty": 1.05, "temperature": 0.1, "top_k": 30,
            "top_p": 0.3, "length_penalty": 1.2, "encoder_repetition_penalty": 0.9,
            "max_new_tokens": 131072,
        },
    ),
    Published(
        "NuExtract, a Qwen", "Qwen2ForCausalLM", f"Luan-da-Silva/nu_extract: {FILE}",
        {"bos_token_id": 151643, "eos_token_id": 151646, "max_new_tokens": 2048},
    ),
    Published(
        "Qwen1.5 MoE", "Qwen2MoeForCausalLM", f"DracoUnion/Qwen1.5-moe-8x0.5B-Chat: {FILE}",
        {**QWEN, "do_sample": True, "repetition_penalty": 1.1, "top_p": 0.8, "max_new_tokens": 1024},
    ),
    Published(
        "GLM-4", "GlmForCausalLM", "zai-org/GLM-4#656",
        {
            "eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329, "do_sample": True,
            "temperature": 0.8, "max_length": 128000, "top_p": 0.8,
        },
    ),
    Published(
        "Gemma 2", "Gemma2ForCausalLM", f"Ayush2006128/mithoon-2b: {FILE}",
        {
            **OF_CONFIG, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
            "max_length": 8192, "pad_token_id": 0,
        },
    ),
    Published(
        "Gemma 2 Instruct", "Gemma2ForCausalLM", f"HakunaMatata888/gemma2-poem: {FILE}",
        {
            **OF_CONFIG, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 107],
            "pad_token_id": 0,
        },
    ),
    Published(
        "Phi-3 mini", "Phi3ForCausalLM", f"ChuDinhKlopp/phi-3-mini-keyformer: {FILE}",
        {**OF_CONFIG, "bos_token_id": 1, "eos_token_id": [32000, 32001, 32007], "pad_token_id": 32000},
    ),
    Published(
        "Phi-1.5", "PhiForCausalLM", f"GowthamNats/MicrosoftPhi1_5_finetuned-: {FILE}", OF_CONFIG
    ),
    Published(
        "Falcon 180B chat", "FalconForCausalLM", f"Alikhan13r/falcon-180B-chat: {FILE}",
        {**OF_CONFIG, "bos_token_id": 11, "eos_token_id": 11},
    ),
    Published(
        "Mistral", "MistralForCausalLM", f"MonilSompura/MistralAI: {FILE}",
        {**OF_CONFIG, "bos_token_id": 1, "eos_token_id": 2},
    ),
    Published(
        "Dolphin, a Mixtral", "MixtralForCausalLM", f"JakobJohannesson/mixtral_dolphin_v2.5: {FILE}",
        {**OF_CONFIG, "bos_token_id": 1, "eos_token_id": 32000},
    ),
    Published(
        "Pythia, a GPT-NeoX", "GPTNeoXForCausalLM", f"Avent-IQ/pythia-410m-chatbot: {FILE}",
        {**OF_CONFIG, "bos_token_id": 0, "eos_token_id": 0},
    ),
    Published(
        "WizardCoder, a StarCoder", "GPTBigCodeForCausalLM",
        f"Decentralised-AI/WizardCoder-15B-1.0-GPTQ: {FILE}",
        {**OF_CONFIG, "bos_token_id": 0, "eos_token_id": 0},
    ),
    Published(
        "ruGPT-3 XL", None, f"EvilFreelancer/rugpt3xl-convert: {FILE}",
        {
            **OF_CONFIG, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "do_sample": True,
            "temperature": 0.7, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.2, "max_new_tokens": 256,
        },
    ),
]  # fmt: skip
#: Draws images and answers questions; the guidance is that of its images.
JANUS = Published(
    "Janus", "JanusForConditionalGeneration", f"{CONVERSION}janus/convert_janus_weights_to_hf.py",
    {"temperature": 1, "guidance_scale": 5},
)  # fmt: skip
EVERY = [*VISION_LANGUAGE, *TEXT, JANUS]
