"""In-place acceleration of a loaded model or pipeline: `mmspec.enable(pipe)` and `mmspec.disable(pipe)`.

`enable` accelerates the `generate` of transformers models, and the call of diffusers pipelines that have
their own loop (`mmspec.pipelines.in_place_diffusers`). It sets an attribute on the instance, the mark; the
method of the class is wrapped once and checks for the mark. `disable` removes the mark. Copies of an enabled
model are enabled independently, and a saved model is a plain model.

Existing programs keep working: calls that the accelerated loop does not support are decoded by transformers
or by the pipeline as before, and the log has the reason.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

from torch import nn
from transformers import (
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)

from mmspec.accelerator import Accelerator
from mmspec.core.statistics import DecodingStats
from mmspec.errors import InputError, MMSpecError
from mmspec.families.diffusion_gemma.target import DiffusionGemmaTarget
from mmspec.models.linear_layers import SHARE, forget, packing_of
from mmspec.open_types import AnyFunction, Keywords
from mmspec.pipelines.custom_generate import make_loop
from mmspec.pipelines.drafter import DrafterSource, FoundMethod, find_method
from mmspec.pipelines.generation_fields import check_arguments
from mmspec.pipelines.in_place_diffusers import CanvasCall, family_of_canvases, target_of_canvases
from mmspec.targets import CausalTarget, adapt

__all__ = ["Summary", "disable", "enable", "summary"]

Accelerated = TypeVar("Accelerated")
MARK = "_mmspec_enabled"  # attribute of accelerated models
#: Attributes that hold the wrapped model in torch.compile, DDP and FSDP, pipelines, and TRL.
WRAPPED = ("_orig_mod", "module", "model", "pretrained_model")
METHOD = "generate"
LOOP = "custom_generate"
#: Keywords that `generate` keeps out of the generation config.
NOT_OF_CONFIG = ("tokenizer", "assistant_tokenizer", "trust_remote_code")
logger = logging.getLogger(__name__)
#: Ids of the models whose `generate` is running; nested calls of the same model are not accelerated.
RUNNING: ContextVar[tuple[int, ...]] = ContextVar("running", default=())

#: A model with `generate`, or a diffusers pipeline with its own loop.
Called: TypeAlias = Any


@dataclass(frozen=True)
class Summary:
    """Statistics of an accelerated model since it was enabled; `mmspec.summary` returns them.

    Attributes:
        name: name of the pipeline component, or the class of a single model.
        accelerator: name of the accelerator.
        exactness: exactness of the accelerator, such as "exact".
        calls: number of accelerated calls.
        tokens, forwards: number of new tokens of all rows, and of the model's forward passes for them.
        last: statistics of the last call; None before the first.
    """

    name: str
    accelerator: str
    exactness: str
    calls: int = 0
    tokens: int = 0
    forwards: int = 0
    last: DecodingStats | None = None

    @property
    def tokens_per_forward(self) -> float:
        """New tokens of all rows per forward pass of the model; 0 before the first call."""
        return self.tokens / self.forwards if self.forwards else 0.0

    def __str__(self) -> str:
        counts = f"{self.calls} calls, {self.tokens} tokens in {self.forwards} forward passes"
        each = f"{self.tokens_per_forward:.2f} tokens per forward pass"
        return f"{self.name}: {self.accelerator} ({self.exactness}), {counts}, {each}"


@dataclass
class Enabled:
    """Mark of an accelerated model or pipeline; a deep copy of the model has its own statistics."""

    summary: Summary
    method: FoundMethod
    seed: int | None
    before: AnyFunction | None  # instance attribute that replaced the class's `generate`
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, stats: DecodingStats) -> None:
        """Add the statistics of a call; safe in threads."""
        with self.lock:
            done = self.summary
            self.summary = replace(
                done,
                calls=done.calls + 1,
                tokens=done.tokens + sum(stats.new_tokens),
                forwards=done.forwards + stats.target_forwards,
                last=stats,
            )

    def __deepcopy__(self, memo: dict[int, object]) -> Enabled:
        fresh = Summary(self.summary.name, self.summary.accelerator, self.summary.exactness)
        return Enabled(fresh, self.method, self.seed, copy.deepcopy(self.before, memo))

    def __reduce__(self) -> tuple[object, ...]:
        return type(None), ()  # a saved model is a plain model


def enable(
    model_or_pipe: Accelerated,
    accelerator: str | Accelerator = "copy",
    *,
    drafter: DrafterSource | None = None,
    seed: int | None = None,
    pack: bool = True,
    **options: object,
) -> Accelerated:
    """Enable speculative decoding in place, in a transformers model or inside a diffusers pipeline.

    Call `generate` or the pipeline as before: batches with images, sampling, logits processors, stopping
    criteria and streamers keep working. With an exact accelerator, greedy outputs are the same tokens, and
    sampled outputs have the same distribution (with other random numbers than `torch.multinomial` draws). If
    the model is already enabled, the new accelerator replaces the old one. A `DiffusionGemmaPipeline` has its
    own loop; its call is accelerated.

    Args:
        model_or_pipe: a transformers model with `generate`, or a diffusers pipeline. In a pipeline, all
            components that can be accelerated are.
        accelerator: a name from `mmspec.list_accelerators()`, alone or with options as on the command line
            ("copy:num_draft_tokens=8"), or an accelerator built by a function of `mmspec.accelerators`.
        drafter: a loaded draft model or head. A head may also be a folder or hub id. "mtp" needs none if the
            checkpoint of the model contains an MTP layer.
        seed: seed for sampling in every call. None draws a seed from torch's global generator in each call.
        pack: on a CPU, allow packed copies of the linear layers in up to half of the free memory. With them,
            a forward pass over several tokens takes little longer than one over a single token.
        options: options of the accelerator.

    Returns:
        The same object.

    Raises:
        InputError: nothing can be accelerated (the message has the reasons), or an option is invalid. The
            object is unchanged then.

    Example:
        >>> mmspec.enable(model, "copy")  # doctest: +SKIP
        >>> model.generate(**inputs)  # doctest: +SKIP
        >>> print(*mmspec.summary(model))  # doctest: +SKIP
    """
    method = find_method(accelerator, drafter, options)
    refused: list[str] = []
    prepared: list[tuple[Called, nn.Module, Enabled]] = []
    for name, model in components(model_or_pipe).items():
        try:
            target = target_of(model)
        except MMSpecError as error:
            refused.append(f"{name}: {error}")
            continue
        fitted = method.fit(target)
        account = Summary(name, fitted.name, fitted.exactness)
        enabled = Enabled(account, method, seed, vars(model).get(METHOD))
        prepared.append((model, target.model, enabled))
    if not prepared:
        given, reasons = type(model_or_pipe).__name__, "; ".join(refused)
        rule = "must be a transformers model with `generate`, or hold one in `.components` or `.model`"
        raise InputError("model_or_pipe", given, f"{rule} ({reasons})" if reasons else rule)
    for model, decoded, enabled in prepared:
        packing_of(decoded).share = SHARE if pack else 0.0
        if mark_of(model) is not None:
            restore(model)
            enabled.before = vars(model).get(METHOD)
        vars(model).pop(METHOD, None)
        vars(model)[MARK] = enabled
        look_for_marks(model)
    return model_or_pipe


def disable(model_or_pipe: Accelerated) -> Accelerated:
    """Disable in-place acceleration: undo `enable` and restore the original `generate`.

    Args:
        model_or_pipe: the object that was passed to `enable`.

    Returns:
        The same object.

    Raises:
        InputError: nothing in the object is accelerated.
    """
    for model, _ in enabled_of(model_or_pipe):
        restore(model)
        target = target_of(model)
        forget(target.model)
    return model_or_pipe


def summary(model_or_pipe: object) -> list[Summary]:
    """Return statistics of every accelerated model since it was enabled: calls, tokens, forward passes.

    Args:
        model_or_pipe: the object that was passed to `enable`.

    Returns:
        A `Summary` for each accelerated model; `print(*mmspec.summary(pipe))` shows them.

    Raises:
        InputError: nothing in the object is accelerated.
    """
    return [enabled.summary for _, enabled in enabled_of(model_or_pipe)]


def components(model_or_pipe: object) -> dict[str, Any]:
    """Return the transformers models with `generate` in a pipeline by name; a single model by its class.

    A pipeline with its own loop is returned in place of its model.
    """
    if family_of_canvases(model_or_pipe) is not None:
        return {"model": model_or_pipe}
    held = getattr(model_or_pipe, "components", None)
    if not isinstance(model_or_pipe, nn.Module) and isinstance(held, Mapping):
        parts = {name: unwrapped(part) for name, part in held.items()}
        return {name: part for name, part in parts.items() if part is not None and part.can_generate()}
    model = unwrapped(model_or_pipe)
    return {} if model is None else {type(model).__name__: model}


def unwrapped(holder: object) -> PreTrainedModel | None:
    """Return the transformers model inside a wrapper (PEFT, torch.compile, DDP, a pipeline), or None."""
    for _ in range(4):
        if isinstance(holder, PreTrainedModel):
            return holder if hasattr(holder, METHOD) else None
        if hasattr(holder, "get_base_model"):
            holder = holder.get_base_model()
            continue
        inner = (getattr(holder, name, None) for name in WRAPPED)
        holder = next((each for each in inner if isinstance(each, nn.Module)), None)
    return None


def target_of(called: Called) -> CausalTarget | DiffusionGemmaTarget:
    """Return the target of a model or pipeline.

    Raises:
        MMSpecError: mmspec's loop cannot replace the loop of the model.
    """
    if family_of_canvases(called) is not None:
        return target_of_canvases(called)
    takes_loops = isinstance(called, GenerationMixin)
    if not takes_loops:
        rule = "must be a model whose `generate` accepts a custom loop; try mmspec.MMSpecPipeline instead"
        raise InputError("model_or_pipe", type(called).__name__, rule)
    return adapt(called)


def mark_of(model: object) -> Enabled | None:
    """Return the mark of an accelerated model, or None."""
    mark = vars(model).get(MARK)
    return mark if isinstance(mark, Enabled) else None


def enabled_of(model_or_pipe: object) -> list[tuple[object, Enabled]]:
    """Return the accelerated models in an object with their marks; raise InputError if there are none."""
    marks = [(model, mark_of(model)) for model in components(model_or_pipe).values()]
    found = [(model, mark) for model, mark in marks if mark is not None]
    if not found:
        given = type(model_or_pipe).__name__
        raise InputError("model_or_pipe", given, "must be accelerated first, with mmspec.enable(...)")
    return found


def look_for_marks(called: object) -> None:
    """Wrap the class's method once, so that it checks for marks; without a mark it does nothing else."""
    of_canvases = family_of_canvases(called)
    family, name = (type(called), METHOD) if of_canvases is None else (of_canvases, "__call__")
    plain = getattr(family, name)
    if hasattr(plain, MARK):
        return

    @functools.wraps(plain)
    def marked(self: Called, *args: object, **kwargs: object) -> Any:
        mark = mark_of(self)
        if mark is None or id(self) in RUNNING.get():
            return plain(self, *args, **kwargs)
        call = functools.partial(plain, self) if mark.before is None else mark.before
        token = RUNNING.set((*RUNNING.get(), id(self)))
        try:
            if of_canvases is not None:
                return CanvasCall(self, call, args, kwargs).decode(mark.method, mark.seed, mark.count, True)
            args, kwargs = with_loop(self, call, mark, args, kwargs)
            return call(*args, **kwargs)
        finally:
            RUNNING.reset(token)

    setattr(marked, MARK, True)
    setattr(family, name, marked)


def restore(model: object) -> None:
    """Remove the mark, and restore an instance attribute that replaced `generate`."""
    enabled = vars(model).pop(MARK)
    if enabled.before is not None:
        vars(model).setdefault(METHOD, enabled.before)


def with_loop(
    model: PreTrainedModel,
    call: AnyFunction,
    mark: Enabled,
    args: tuple[object, ...],
    kwargs: Keywords,
) -> tuple[tuple[object, ...], Keywords]:
    """Add the accelerated loop to the arguments of a call, unless transformers has to decode it."""
    given = bound(call, args, kwargs)
    if given is None or given.get(LOOP) is not None:
        return args, kwargs  # a loop of the caller takes precedence
    try:
        config = config_of(model, given)
        check_arguments(model, config, given)
        own = (args, kwargs) if config.stop_strings is None else ((), with_stop_strings(model, given, config))
    except InputError as error:
        logger.info("passed on to transformers: %s", error)
        return args, kwargs
    except ValueError:  # transformers raises it again, with its own message
        return args, kwargs
    return own[0], own[1] | {LOOP: make_loop(mark.method, mark.seed, mark.count, passes_on=True)}


def bound(call: AnyFunction, args: tuple[object, ...], kwargs: Keywords) -> Keywords | None:
    """Return the arguments of a call by name; None if it accepts no loop, or the arguments are invalid."""
    signature = inspect.signature(call)
    kinds = {each.kind for each in signature.parameters.values()}
    if LOOP not in signature.parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
        return None
    if inspect.Parameter.VAR_POSITIONAL in kinds:  # a wrapper of `generate`
        signature, args = inspect.signature(GenerationMixin.generate), (None, *args)
    try:
        arguments: Keywords = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return None
    arguments = arguments.pop("kwargs", {}) | arguments
    arguments.pop("self", None)
    return arguments


def config_of(model: Called, given: Keywords) -> GenerationConfig:
    """Merge the keywords of a call, its generation config and the model's, as `generate` does."""
    signature = inspect.signature(GenerationMixin.generate).parameters
    keywords = {
        name: value for name, value in given.items() if name not in signature and name not in NOT_OF_CONFIG
    }
    config: GenerationConfig = model._prepare_generation_config(given.get("generation_config"), **keywords)[0]
    return config


def with_stop_strings(model: Called, given: Keywords, config: GenerationConfig) -> Keywords:
    """Replace the stop strings of a call by a criterion: transformers passes no tokenizer to custom loops.

    Raises:
        InputError: the strings belong to the model's config, or the call has no tokenizer.
    """
    if model.generation_config.stop_strings is not None or given.get("tokenizer") is None:
        rule = "must be passed to the call together with `tokenizer`"
        raise InputError("stop_strings", config.stop_strings, rule)
    criteria = StoppingCriteriaList(given.get("stopping_criteria") or [])
    if not any(
        type(each) is StopStringCriteria for each in criteria
    ):  # a criterion of the caller takes precedence
        criteria.append(StopStringCriteria(given["tokenizer"], config.stop_strings))
    dropped = ("tokenizer", "stop_strings")
    arguments = {name: value for name, value in given.items() if name not in dropped}
    if (own := given.get("generation_config")) is not None:
        arguments["generation_config"] = copy.deepcopy(own)
        arguments["generation_config"].stop_strings = None
    return {**arguments, "stopping_criteria": criteria}
