"""Fields of requests that do not act: some are ignored, others refused unless their value asks for nothing.

The words are those of OpenAI's API, of vLLM and of SGLang. Null asks for nothing, in every field.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CHAT_IGNORED",
    "CHAT_REFUSED",
    "IMAGE_IGNORED",
    "IMAGE_REFUSED",
    "MESSAGE_REFUSED",
    "PART_IGNORED",
]

#: Of clients and their bookkeeping: no answer depends on them.
BOOKKEEPING = {"metadata", "request_id", "rid", "safety_identifier", "session_id", "store", "user"}

CHAT_IGNORED = frozenset(
    BOOKKEEPING
    | {"cache_salt", "extra_key", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
    | {"parallel_tool_calls", "separate_reasoning", "service_tier", "stream_reasoning"}
)
IMAGE_IGNORED = frozenset(BOOKKEEPING | {"moderation"})
PART_IGNORED = frozenset({"cache_control", "prompt_cache_breakpoint"})

#: Fields of chats that would change an answer and are not served, with the values that ask for nothing.
CHAT_REFUSED: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "structural_tag": (),
    "structured_outputs": (),
    "thinking_budget": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    # SGLang's
    "custom_logit_processor": (),
    "custom_params": ({},),
    "ebnf": (),
    "input_ids": (),
    "json_schema": (),
    "lora_path": (),
    "no_stop_trim": (False,),
    "regex": (),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "session_params": (),
    "stop_regex": (),
    # others'
    "enable_thinking": (),
    "reasoning": (),
    "thinking": (),
}

#: The same, of a message.
MESSAGE_REFUSED: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "partial": (False,),
    "prefix": (False,),
    "reasoning": ("",),
    "reasoning_content": ("",),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}

#: The same, of images: OpenAI's fields and diffusers' words.
IMAGE_REFUSED: dict[str, tuple[Any, ...]] = {
    "background": ("auto", "opaque"),
    "complexity": (),
    "frame_count": (1,),
    "frame_duration_ms": (),
    "height": (),
    "image": (),
    "input_fidelity": (),
    "mask": (),
    "min_p": (0,),
    "num_images_per_prompt": (1,),
    "num_inference_steps": (),
    "output_compression": (100,),
    "partial_images": (0,),
    "quality": ("auto", "standard"),
    "repetition_penalty": (1,),
    "stream": (False,),
    "style": (),
    "svg": (),
    "top_k": (),
    "top_p": (1,),
    "width": (),
}
