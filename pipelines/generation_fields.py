"""Fields of transformers' GenerationConfig: which are supported, which change no token, which are refused.

`resolve` reads the fields of a pipeline call from the call, `generation_config=` and the model's own config,
in the order of `generate`. `check_arguments` checks the arguments of a call of `generate`; a field outside
the tables below is supported, as a logits processor, a stopping criterion, a length or an input.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import TypeAlias

import torch.distributed
from transformers import GenerationConfig, PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from mmspec.errors import InputError, UnknownArgumentError
from mmspec.open_types import Keywords
from mmspec.registry import did_you_mean
from mmspec.validation import given_of, plain_numbers

__all__ = ["arguments_of_generate", "check_arguments", "distance", "resolve"]

#: Fields for memory, speed and output format, and options of search methods that are refused themselves.
CHANGE_NO_TOKEN = {
    "assistant_confidence_threshold", "assistant_ensemble_weight", "assistant_lookbehind", "bos_token_id",
    "cache_config", "compile_config", "continuous_batching_config", "decoder_start_token_id",
    "disable_compile", "early_stopping", "is_assistant", "length_penalty", "low_memory", "max_cache_len",
    "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "prefill_chunk_size", "renormalize_logits", "return_dict_in_generate", "speculation_type",
    "target_lookbehind", "transformers_version", "use_cache",
}  # fmt: skip
BEAMS = "beam search cannot be combined with speculative decoding"
MOVED = "transformers has moved this method out of its package"
CACHES = "dynamic", "static", "hybrid", "hybrid_chunked", "sliding_window"
#: For each field: values without effect, besides None and False, and the reason why others are refused.
Refusals: TypeAlias = dict[str, tuple[tuple[object, ...], str]]
#: Refused in the call, in `generation_config=` and in the model's own config.
REFUSED: Refusals = {
    "cache_implementation": (CACHES, "keys and values are neither quantised nor offloaded"),
    "constraints": ((), f"{BEAMS}; use a logits processor"),
    "diversity_penalty": ((0.0,), BEAMS),
    "dola_layers": ((), MOVED),
    "force_words_ids": ((), f"{BEAMS}; use a logits processor"),
    "num_beam_groups": ((1,), BEAMS),
    "num_beams": ((1,), BEAMS),
    "num_return_sequences": ((1,), "repeat the prompt in a list, with a seed for each"),
    "penalty_alpha": ((0.0,), MOVED),
    "token_healing": ((), "the tokens of the prompt are not changed"),
}
DRAFTS = "the accelerator makes the drafts; choose one with set_accelerator, such as 'copy' or 'mtp'"
RETURNED = "only tokens, text and stats are returned"
#: Refused in a call; in the config of a checkpoint these fields are ignored, since they change no token.
REFUSED_OF_CALLERS: Refusals = {
    "assistant_early_exit": ((), DRAFTS),
    "prompt_lookup_num_tokens": ((), DRAFTS),
    "use_mtp": ((), DRAFTS),
    "output_attentions": ((), RETURNED),
    "output_hidden_states": ((), RETURNED),
    "output_logits": ((), RETURNED),
    "output_scores": ((), RETURNED),
}
OF_CALL, OF_CONFIG = "", "generation_config."
OTHER_LOOP = "it selects another decoding loop of transformers"
OWN_CACHE = "an accelerated call uses its own cache"
#: Refused in calls of `generate`, in addition to the tables above.
REFUSED_OF_GENERATE: Refusals = {
    "is_assistant": ((), OTHER_LOOP),
    "cache_config": ((), OWN_CACHE),
    "prefill_chunk_size": ((), "the prefill is not split"),
}
#: Refused arguments of `generate` that are not fields of a GenerationConfig.
ARGUMENTS: Refusals = {
    "assistant_model": ((), OTHER_LOOP),
    "synced_gpus": ((), "synchronised processes need the same number of forward passes"),
    "generation_mode": (("text",), OTHER_LOOP),  # Janus generates images in another loop
}
NAMED = (
    "streamer",
    "synced_gpus",
    "assistant_model",
)  # parameters that `generate` does not pass to custom loops


def resolve(
    served: Collection[str],
    keywords: Mapping[str, object],
    given: GenerationConfig | None,
    own: GenerationConfig | None,
    others: Collection[str] = (),
) -> Keywords:
    """Return the supported fields that a call, its `generation_config=` or the model's own config sets.

    Raises:
        UnknownArgumentError: a keyword does not exist; the message names the nearest one.
        InputError: an unsupported field has a value with an effect.
    """
    called = given_of(**plain_numbers(dict(keywords)))
    asked = [(OF_CALL, called), *([] if given is None else [(OF_CONFIG, vars(given))])]
    places = [*asked, *([] if own is None else [(OF_CONFIG, vars(own))])]
    for keyword in keywords:
        if keyword not in served and keyword not in installed_fields():
            names = {*served, *others}
            near = difflib.get_close_matches(keyword, sorted(names), n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            listed = ", ".join(sorted(names - installed_fields()))
            rule = f"must be a field of transformers' GenerationConfig or one of {listed}{hint}"
            raise UnknownArgumentError("keyword", keyword, rule)
    tables = (REFUSED, places), (unserved(frozenset(served)), places), (REFUSED_OF_CALLERS, asked)
    for table, where in tables:
        for name, (harmless, reason) in table.items():
            prefix, value = nearest(name, where)
            check(prefix + name, value, harmless, reason)
    if given is not None:
        check_custom_entries(given, own)
    found = {name: plain_numbers(nearest(name, places)[1]) for name in served}
    return given_of(**found)


def nearest(name: str, places: Sequence[tuple[str, Mapping[str, object]]]) -> tuple[str, object]:
    """Return the first value of a field that is not None, with the prefix of its place."""
    found = ((prefix, values[name]) for prefix, values in places if values.get(name) is not None)
    return next(found, (OF_CALL, None))


def distance(
    name: str, keywords: Mapping[str, object], given: GenerationConfig | None, own: GenerationConfig | None
) -> int:
    """Return where a field is set: 0 the call, 1 `generation_config=`, 2 the model's own config or nowhere.

    A value of a given config that equals the model's own was copied, and counts as the model's.
    """
    if keywords.get(name) is not None:
        return 0
    value = getattr(given, name, None)
    return 2 if value is None or value == getattr(own, name, None) else 1


def check(name: str, value: object, harmless: Sequence[object], reason: str) -> None:
    """Raise InputError for a value with an effect: one that is not None, False or harmless."""
    value = plain_numbers(value)
    if value is not None and value is not False and value not in harmless:
        nothing = " or ".join(map(repr, (*harmless[:1], None)))
        held = type(value).__name__ if isinstance(value, PreTrainedModel) else value
        raise InputError(name, held, f"must be {nothing}: {reason}")


@cache
def unserved(served: frozenset[str]) -> Refusals:
    """Return the fields of the installed transformers that mmspec does not know, which are refused."""
    known = {*served, *CHANGE_NO_TOKEN, *REFUSED, *REFUSED_OF_CALLERS, "pad_token_id"}
    reason = "mmspec does not support this field of the installed transformers"
    return {name: ((), reason) for name in installed_fields() - known}


def check_custom_entries(given: GenerationConfig, own: GenerationConfig | None) -> None:
    """Raise UnknownArgumentError for an attribute that neither GenerationConfig nor the model has."""
    ours = {} if own is None else vars(own)
    for name, value in vars(given).items():
        is_own = name in installed_fields() or name.startswith("_") or value is None
        if not is_own and ours.get(name) != value:
            nearest = did_you_mean(name, installed_fields())
            raise UnknownArgumentError("field of generation_config", name, nearest)


@cache
def installed_fields() -> frozenset[str]:
    """Return the names of the GenerationConfig fields of the installed transformers."""
    return frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_"))


def check_arguments(model: PreTrainedModel, config: GenerationConfig, arguments: Keywords) -> None:
    """Raise InputError for the first field or argument of a call that mmspec's loop does not support."""
    given = {**arguments, "synced_gpus": is_synced(model, arguments.get("synced_gpus"))}
    refused = REFUSED | REFUSED_OF_CALLERS | REFUSED_OF_GENERATE
    del refused["num_return_sequences"]
    for values, table in ((vars(config), refused), (given, ARGUMENTS)):
        for name, (harmless, reason) in table.items():
            check(name, values.get(name), harmless, reason)
    # in a config it is ignored: many are saved with use_cache=False after training
    if given.get("use_cache") not in (None, True):
        raise InputError("use_cache", given["use_cache"], f"must be True or None: {OWN_CACHE}")


def is_synced(model: PreTrainedModel, given: bool | None) -> bool:
    """Whether a call continues until the calls of other processes have ended, as `generate` decides it."""
    if given is not None:
        return given
    managed = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    shared = torch.distributed.is_available() and torch.distributed.is_initialized()
    return managed and shared and torch.distributed.get_world_size() > 1


def arguments_of_generate() -> Keywords:
    """Return the arguments of the `generate` that called a custom loop, from its stack frame; {} if none did.

    transformers (5.17 to 5.24) puts the prompt into the streamer but does not pass the streamer to a custom
    loop, so that readers of the stream would wait forever.
    """
    frame = sys._getframe(1)
    for _ in range(4):
        found = frame.f_locals
        if frame.f_code.co_name == "generate" and set(NAMED) <= set(found):
            return {**found["kwargs"], **{name: found[name] for name in NAMED}}
        if frame.f_back is None:
            break
        frame = frame.f_back
    return {}
