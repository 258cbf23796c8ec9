"""Fields of transformers' GenerationConfig: which act, which change no token, and which are refused.

`resolve` reads those of a pipeline's call: a field is looked for where `generate` looks, in the call, in
`generation_config=` and in the model's own, in that order. `check_arguments` checks those of a call of
`generate`: what is not in its tables acts, as a logits processor, a stopping criterion, a length or an input.
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

#: Memory, speed, the form of what is returned, and settings of searches that are refused themselves.
CHANGE_NO_TOKEN = {
    "assistant_confidence_threshold", "assistant_ensemble_weight", "assistant_lookbehind", "bos_token_id",
    "cache_config", "compile_config", "continuous_batching_config", "decoder_start_token_id",
    "disable_compile", "early_stopping", "is_assistant", "length_penalty", "low_memory", "max_cache_len",
    "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "prefill_chunk_size", "renormalize_logits", "return_dict_in_generate", "speculation_type",
    "target_lookbehind", "transformers_version", "use_cache",
}  # fmt: skip
BEAMS = "beam search has no draft to verify"
MOVED = "transformers has moved it out of its package"
CACHES = "dynamic", "static", "hybrid", "hybrid_chunked", "sliding_window"
#: Of fields: values that do nothing, and why others are refused.
Refusals: TypeAlias = dict[str, tuple[tuple[object, ...], str]]
#: Values that do nothing, besides None and False; and why others are refused, wherever they stand.
REFUSED: Refusals = {
    "cache_implementation": (CACHES, "keys and values are kept as they are, where the model is"),
    "constraints": ((), f"{BEAMS}; a logits processor can constrain"),
    "diversity_penalty": ((0.0,), BEAMS),
    "dola_layers": ((), MOVED),
    "force_words_ids": ((), f"{BEAMS}; a logits processor can constrain"),
    "num_beam_groups": ((1,), BEAMS),
    "num_beams": ((1,), BEAMS),
    "num_return_sequences": ((1,), "pass the prompt as often, with a seed for each"),
    "penalty_alpha": ((0.0,), MOVED),
    "token_healing": ((), "tokens of a prompt are not changed"),
}
DRAFTS = "drafts are the accelerator's: set_accelerator('copy'), or 'mtp', or another"
RETURNED = "tokens, text and stats are returned"
#: The same for what is asked of a call; in a checkpoint it changes no token of ours, and is passed over.
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
OTHER_LOOP = "it asks for another loop of transformers"
OWN_CACHE = "an accelerated call keeps a cache of its own"
#: The same for calls of `generate`, which makes rows of one prompt itself, beside the tables above.
REFUSED_OF_GENERATE: Refusals = {
    "is_assistant": ((), OTHER_LOOP),
    "cache_config": ((), OWN_CACHE),
    "prefill_chunk_size": ((), "prompts are read whole"),
}
#: The same for its arguments that are no fields.
ARGUMENTS: Refusals = {
    "assistant_model": ((), OTHER_LOOP),
    "synced_gpus": ((), "processes that wait for one another make the same number of forwards"),
    "generation_mode": (("text",), OTHER_LOOP),  # of Janus, which draws by a loop of its own
}
NAMED = ("streamer", "synced_gpus", "assistant_model")  # of its signature; custom loops are not given them


def resolve(
    served: Collection[str],
    keywords: Mapping[str, object],
    given: GenerationConfig | None,
    own: GenerationConfig | None,
    others: Collection[str] = (),
) -> Keywords:
    """Find the value of every served field that a call, its `generation_config=` or the model's own sets.

    Raises:
        UnknownArgumentError: a keyword that does not exist; the message holds the nearest one.
        InputError: a field that is not served is set away from its default.
    """
    called = given_of(**plain_numbers(dict(keywords)))
    asked = [(OF_CALL, called), *([] if given is None else [(OF_CONFIG, vars(given))])]
    places = [*asked, *([] if own is None else [(OF_CONFIG, vars(own))])]
    for keyword in keywords:
        if keyword not in served and keyword not in installed_fields():
            names = {*served, *others}
            near = difflib.get_close_matches(keyword, sorted(names), n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            listed = ", ".join(sorted(names - installed_fields()))
            allowed = f"{hint}allowed: {listed}, and the fields of transformers' GenerationConfig"
            raise UnknownArgumentError("keyword", keyword, allowed)
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
    """The first value of a field that is not None, behind the prefix of its place; None if there is none."""
    found = ((prefix, values[name]) for prefix, values in places if values.get(name) is not None)
    return next(found, (OF_CALL, None))


def distance(
    name: str, keywords: Mapping[str, object], given: GenerationConfig | None, own: GenerationConfig | None
) -> int:
    """Rank of the place where a field is set: 0 the call, 1 `generation_config=`, 2 the model's own or none.

    What a given config repeats of the model's own was copied, and counts as the model's.
    """
    if keywords.get(name) is not None:
        return 0
    value = getattr(given, name, None)
    return 2 if value is None or value == getattr(own, name, None) else 1


def check(name: str, value: object, harmless: Sequence[object], reason: str) -> None:
    """Raise InputError for a value that does something: that is not None, False or harmless."""
    value = plain_numbers(value)
    if value is not None and value is not False and value not in harmless:
        nothing = " or ".join(map(repr, (*harmless[:1], None)))
        held = type(value).__name__ if isinstance(value, PreTrainedModel) else value
        raise InputError(name, held, f"{nothing}: {reason}")


@cache
def unserved(served: frozenset[str]) -> Refusals:
    """Fields of the installed transformers that this version knows nothing of: refused where they are set."""
    known = {*served, *CHANGE_NO_TOKEN, *REFUSED, *REFUSED_OF_CALLERS, "pad_token_id"}
    reason = "a field of this version of transformers that mmspec does not know"
    return {name: ((), reason) for name in installed_fields() - known}


def check_custom_entries(given: GenerationConfig, own: GenerationConfig | None) -> None:
    """Raise UnknownArgumentError for an attribute that no GenerationConfig has, nor the model's."""
    ours = {} if own is None else vars(own)
    for name, value in vars(given).items():
        is_own = name in installed_fields() or name.startswith("_") or value is None
        if not is_own and ours.get(name) != value:
            nearest = did_you_mean(name, installed_fields())
            raise UnknownArgumentError("field of generation_config", name, nearest)


@cache
def installed_fields() -> frozenset[str]:
    """Names of the fields that a GenerationConfig of the installed transformers has."""
    return frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_"))


def check_arguments(model: PreTrainedModel, config: GenerationConfig, arguments: Keywords) -> None:
    """Raise InputError for the first field or other argument of a call that would not act in our loop."""
    given = {**arguments, "synced_gpus": is_synced(model, arguments.get("synced_gpus"))}
    refused = REFUSED | REFUSED_OF_CALLERS | REFUSED_OF_GENERATE
    del refused["num_return_sequences"]
    for values, table in ((vars(config), refused), (given, ARGUMENTS)):
        for name, (harmless, reason) in table.items():
            check(name, values.get(name), harmless, reason)
    if given.get("use_cache") not in (
        None,
        True,
    ):  # of a config it changes no token: many are left so by training
        raise InputError("use_cache", given["use_cache"], f"True or None: {OWN_CACHE}")


def is_synced(model: PreTrainedModel, given: bool | None) -> bool:
    """True if a call goes on until the calls of other processes have ended, as `generate` decides it."""
    if given is not None:
        return given
    managed = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    shared = torch.distributed.is_available() and torch.distributed.is_initialized()
    return managed and shared and torch.distributed.get_world_size() > 1


def arguments_of_generate() -> Keywords:
    """Find the arguments of the `generate` that calls a custom loop; none where nobody by that name does.

    transformers (5.17 to 5.24) gives the streamer its prompt and then hands it to its own loops alone, never
    to a custom one, so that readers of the stream would wait for ever.
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
