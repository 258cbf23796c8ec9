"""Arguments of transformers' `generate` that its accelerated loop does not act on: one table of them all.

What is not in the table acts: as a logits processor, a stopping criterion or a length, which `generate` makes
of it, or as an input of the prompt (`generate_inputs`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch.distributed
from transformers import GenerationConfig, PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from mmspec.errors import InputError
from mmspec.pipelines.generation_fields import REFUSED, REFUSED_OF_CALLERS

__all__ = ["arguments_of_generate", "check_arguments"]

OTHER_LOOP = "it asks for another loop of transformers"
OWN_CACHE = "an accelerated call keeps a cache of its own"

#: Fields of a generation config -> the values that ask for nothing, and why no other acts: those that
#: pipelines refuse, but for the rows that `generate` makes of one prompt, and its cache.
FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    **{
        name: ((*harmless, None, False), reason)
        for name, (harmless, reason) in (REFUSED | REFUSED_OF_CALLERS).items()
        if name != "num_return_sequences"
    },
    "is_assistant": ((None, False), OTHER_LOOP),
    "cache_config": ((None,), OWN_CACHE),
    "prefill_chunk_size": ((None,), "prompts are read whole"),
}
#: Arguments that are no fields, in the same way.
ARGUMENTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "assistant_model": ((None,), OTHER_LOOP),
    "use_cache": ((None, True), OWN_CACHE),  # of a config it changes no token: many are left so by training
    "synced_gpus": ((None, False), "processes that wait for one another make the same number of forwards"),
    "generation_mode": ((None, "text"), OTHER_LOOP),  # of Janus, which draws by a loop of its own
}

NAMED = ("streamer", "synced_gpus", "assistant_model")  # of its signature; custom loops are not given them


def check_arguments(model: PreTrainedModel, config: GenerationConfig, arguments: Mapping[str, Any]) -> None:
    """Raise InputError for the first argument of a call that the accelerated loop would not act on.

    Args:
        model: that is called.
        config: all fields of the call, as `generate` puts them together.
        arguments: those of the call that are no fields.
    """
    given = {**arguments, "synced_gpus": is_synced(model, arguments.get("synced_gpus"))}
    for values, table in ((vars(config), FIELDS), (given, ARGUMENTS)):
        for name, (neutral, reason) in table.items():
            value = values.get(name)
            if not any(value is each or value == each for each in neutral):
                allowed = " or ".join(map(repr, neutral[:2]))
                held = type(value).__name__ if isinstance(value, PreTrainedModel) else value
                raise InputError(name, held, f"{allowed}: {reason}")


def is_synced(model: PreTrainedModel, given: bool | None) -> bool:
    """True if a call goes on until the calls of other processes have ended, as `generate` decides it."""
    if given is not None:
        return given
    managed = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    shared = torch.distributed.is_available() and torch.distributed.is_initialized()
    return managed and shared and torch.distributed.get_world_size() > 1


def arguments_of_generate() -> dict[str, Any]:
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
