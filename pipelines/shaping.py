"""Settings that transformers makes logits processors of: which do something, and checks of their values."""

from __future__ import annotations

from typing import Any

from transformers import WatermarkingConfig

from mmspec.errors import InputError
from mmspec.pipelines.settings import GenerationSettings, are_token_ids
from mmspec.validation import is_integer, require_number

__all__ = ["check_shaping", "shaping_of", "truncation_of"]

#: Settings of processors, with the values that make none, besides None.
SHAPING: dict[str, Any] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "remove_invalid_values": False,
    "repetition_penalty": 1.0,
    "sequence_bias": None,
    "suppress_tokens": None,
    "watermarking_config": None,
}
#: The same for what comes after temperature, top_k, top_p and min_p, of draws alone.
TRUNCATING: dict[str, Any] = {"top_h": None, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}


def shaping_of(settings: GenerationSettings) -> dict[str, Any]:
    """Settings of processors, for draws or not, that do something."""
    found = {name: value for name in SHAPING if (value := getattr(settings, name)) is not None}
    if settings.min_new_tokens is not None:
        found.pop("min_length", None)
    return {name: value for name, value in found.items() if value != SHAPING[name]}


def truncation_of(settings: GenerationSettings) -> dict[str, Any]:
    """Truncation that our own sampler does not do, where it does something to a draw.

    Raises:
        InputError: a value outside its range.
    """
    found = {name: value for name in TRUNCATING if (value := getattr(settings, name)) is not None}
    for name, value in found.items():
        require_number(name, value, 0.0, 1.0, "0 to 1")
    drawn = {name: float(value) for name, value in found.items() if value != TRUNCATING[name]}
    return drawn if settings.do_sample else {}


def check_shaping(found: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """Check settings of processors; return them as transformers takes them.

    Args:
        found: from `shaping_of`.
        vocabulary: V, which the ids in them are below.

    Raises:
        InputError: a value outside its range.
    """
    for name, value in found.items():
        check_value(name, value, vocabulary)
    checked = {
        name: float(value) if name.endswith("repetition_penalty") else value for name, value in found.items()
    }
    if isinstance(marks := found.get("watermarking_config"), dict):
        checked["watermarking_config"] = WatermarkingConfig.from_dict(marks)
    return checked


def check_value(name: str, value: Any, vocabulary: int) -> None:
    """Raise InputError for a setting of processors that transformers takes, or ignores, as it should not."""
    ids = value if isinstance(value, list | tuple) else [value]
    if name.endswith("repetition_penalty"):
        require_number(name, value, 0.0, 1e4, "above 0", open_below=True)
    elif name.endswith("no_repeat_ngram_size") and value != 0:
        if not is_integer(value) or value < 1:
            raise InputError(name, value, "a positive integer")
    elif name in ("min_length", "min_new_tokens"):
        if not is_integer(value) or value < 0:
            raise InputError(name, value, "an integer of at least 0")
    elif name == "bad_words_ids":
        if not isinstance(value, list | tuple) or not value or not all(map(are_token_ids, value)):
            raise InputError(name, value, "lists of token ids, one for each word")
        if not all(value) or max(map(max, value)) >= vocabulary:
            raise InputError(name, value, f"lists of token ids below {vocabulary}, with at least one id each")
    elif name == "remove_invalid_values":
        if not isinstance(value, bool):
            raise InputError(name, value, "True or False")
    elif name.startswith("forced_"):
        if not are_token_ids(ids) or not ids or max(ids) >= vocabulary:
            raise InputError(name, value, f"a token id below {vocabulary}, or a list of them")
    elif name.endswith("suppress_tokens") and (ids is not value or not all(map(is_integer, ids))):
        raise InputError(name, value, "a list of token ids")
