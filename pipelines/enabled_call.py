"""One call of an enabled model's `generate`: accelerated where all that it asks for acts so, else passed on.

A program whose model was enabled goes on to work: what the accelerated loop would refuse is done by
transformers, as it was before. The log says why.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)

from mmspec.accelerators.accelerator import Accelerator
from mmspec.decoding.stats import DecodingStats
from mmspec.errors import InputError, UnsupportedModelError
from mmspec.pipelines.custom_generate import carry_out, prepare
from mmspec.pipelines.generate_arguments import arguments_of_generate, check_arguments
from mmspec.pipelines.plain_generate import decode_plainly

__all__ = ["METHOD", "decode_or_pass"]

METHOD = "generate"
LOOP = "custom_generate"
#: Kept out of generation configs by `generate`.
NOT_OF_CONFIG = ("tokenizer", "assistant_tokenizer", "trust_remote_code")

logger = logging.getLogger(__name__)
#: Models whose `generate` runs: the calls that it makes of itself are its own, and stay as they are.
RUNNING: ContextVar[tuple[int, ...]] = ContextVar("running", default=())


class Mark(Protocol):
    """An enabled model's accelerator, and the account of its calls."""

    @property
    def method(self) -> Accelerator: ...

    @property
    def seed(self) -> int | None: ...

    @property
    def before(self) -> Callable[..., Any] | None: ...

    def count(self, stats: DecodingStats) -> None:
        """Add a call to the account."""


def decode_or_pass(
    model: PreTrainedModel,
    plain: Callable[..., Any],
    mark: Mark,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Answer a call of `generate` by the accelerated loop, or by transformers' own.

    Args:
        model: that is called.
        plain: `generate` of its class.
        mark: of the model.
        args, kwargs: of the call.
    """
    if id(model) in RUNNING.get():
        return plain(*args, **kwargs)
    call = plain if mark.before is None else mark.before
    token = RUNNING.set((*RUNNING.get(), id(model)))
    try:
        args, kwargs = with_loop(model, call, mark, args, kwargs)
        return call(*args, **kwargs)
    finally:
        RUNNING.reset(token)


def with_loop(
    model: PreTrainedModel,
    call: Callable[..., Any],
    mark: Mark,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with the accelerated loop among them unless it is left to transformers."""
    given = bound(call, args, kwargs)
    if given is None or given.get(LOOP) is not None:
        return args, kwargs  # the caller's own loop goes before ours
    try:
        config = config_of(model, given)
        check_arguments(model, config, given)
        own = (args, kwargs) if config.stop_strings is None else ((), with_stop_strings(model, given, config))
    except InputError as error:
        logger.info("passed on to transformers: %s", error)
        return args, kwargs
    except ValueError:  # for transformers to say
        return args, kwargs
    return own[0], own[1] | {LOOP: loop_of(mark)}


def bound(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call by name; None where it takes no loop, or transformers has something to say."""
    signature = inspect.signature(call)
    kinds = {each.kind for each in signature.parameters.values()}
    if LOOP not in signature.parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
        return None
    if inspect.Parameter.VAR_POSITIONAL in kinds:  # stands before the method, and takes what it takes
        signature, args = inspect.signature(GenerationMixin.generate), (None, *args)
    try:
        arguments: dict[str, Any] = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return None
    arguments = arguments.pop("kwargs", {}) | arguments
    arguments.pop("self", None)
    return arguments


def loop_of(mark: Mark) -> Callable[..., Any]:
    """The loop for one call, which `generate` calls when all is prepared."""

    def loop(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        given = arguments_of_generate()
        asked = logits_processor, stopping_criteria, generation_config
        streamer = model_kwargs.pop("streamer", None) or given.get("streamer")
        if plain := decode_plainly(model, input_ids, *asked, streamer, mark.seed, model_kwargs):
            mark.count(plain[1])
            return plain[0]
        try:
            call = prepare(mark.method, mark.seed, model, input_ids, *asked, model_kwargs, given)
        except (InputError, UnsupportedModelError) as error:
            logger.info("passed on to transformers: %s", error)
            return type(model)._sample(model, input_ids, *asked, streamer=streamer, **model_kwargs)
        output = carry_out(call, input_ids, generation_config, streamer)
        mark.count(call.stats)
        return output

    return loop


def config_of(model: Any, given: Mapping[str, Any]) -> GenerationConfig:
    """All fields of a call: of its keywords, its config and the model's, as `generate` joins them."""
    signature = inspect.signature(GenerationMixin.generate).parameters
    keywords = {
        name: value for name, value in given.items() if name not in signature and name not in NOT_OF_CONFIG
    }
    config: GenerationConfig = model._prepare_generation_config(given.get("generation_config"), **keywords)[0]
    return config


def with_stop_strings(model: Any, given: Mapping[str, Any], config: GenerationConfig) -> dict[str, Any]:
    """The arguments of a call with its stop strings as a criterion.

    transformers loses a tokenizer on the way to any custom loop.

    Raises:
        InputError: the strings are the model's own, which no argument takes away, or there is no tokenizer.
    """
    if model.generation_config.stop_strings is not None or given.get("tokenizer") is None:
        raise InputError("stop_strings", config.stop_strings, "those of the call, with its `tokenizer`")
    criteria = StoppingCriteriaList(given.get("stopping_criteria") or [])
    if not any(type(each) is StopStringCriteria for each in criteria):  # the caller's own takes its place
        criteria.append(StopStringCriteria(given["tokenizer"], config.stop_strings))
    dropped = ("tokenizer", "stop_strings")
    arguments = {name: value for name, value in given.items() if name not in dropped}
    if (own := given.get("generation_config")) is not None:
        arguments["generation_config"] = copy.deepcopy(own)
        arguments["generation_config"].stop_strings = None
    return {**arguments, "stopping_criteria": criteria}
