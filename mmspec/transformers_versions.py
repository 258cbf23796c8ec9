"""Supported versions of transformers, and the two names of the cache argument.

transformers 5.24 renamed `past_key_values` to `cache` in `forward` methods and outputs. All handling of the
two names is in this module.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import transformers
from packaging.version import Version
from transformers import GenerationMixin
from transformers.masking_utils import create_causal_mask

__all__ = ["CACHE", "CACHE_NAMES", "ENCODE", "cache_name", "describe", "takes_cache", "warn_of_untested"]

OLDEST = "5.17"
NEWEST = "5.24"  # newest tested version
#: Names of the cache argument: newest first, then that of Mamba's mixers.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
#: The name in transformers' own functions and outputs.
CACHE = next(name for name in CACHE_NAMES if name in inspect.signature(create_causal_mask).parameters)
#: Names of the method of `generate` that runs an encoder, newest first, and the installed one.
ENCODERS = (
    "_maybe_prepare_encoder_kwargs_for_generation",
    "_prepare_encoder_decoder_kwargs_for_generation",
)
ENCODE = next(name for name in ENCODERS if hasattr(GenerationMixin, name))

Forward = TypeVar("Forward", bound=Callable[..., Any])


def cache_name(*forwards: Callable[..., Any]) -> str:
    """Name of the cache argument of the first function that has one; transformers' own name if none has.

    Code in a checkpoint may be older than the installed transformers.
    """
    named = (name for each in forwards for name in CACHE_NAMES if name in inspect.signature(each).parameters)
    return next(named, CACHE)


def takes_cache(forward: Forward) -> Forward:
    """Decorate a `forward` with an argument `cache`, so that it accepts the older names too."""

    @functools.wraps(forward)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        for name in CACHE_NAMES[1:]:
            if name in kwargs:
                kwargs["cache"] = kwargs.pop(name)
        return forward(*args, **kwargs)

    return renamed  # type: ignore[return-value]


def describe(version: str) -> str:
    """Describe a version of transformers: too old, tested, or newer."""
    release = Version(version).release[:2]
    if release < Version(OLDEST).release:
        return f"older than {OLDEST}, the oldest supported version; run pip install -U transformers"
    if release > Version(NEWEST).release:
        return f"newer than {NEWEST}, the newest tested version; run `mmspec check MODEL` to test it"
    return f"tested ({OLDEST} to {NEWEST})"


@functools.cache
def warn_of_untested() -> None:
    """Warn once if transformers is newer than the tested versions."""
    if Version(transformers.__version__).release[:2] > Version(NEWEST).release:
        known = describe(transformers.__version__)
        warnings.warn(f"transformers {transformers.__version__} is {known}", stacklevel=3)
