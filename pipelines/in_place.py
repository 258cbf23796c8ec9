"""Acceleration that is switched on and off inside a loaded model or pipeline: `mmspec.enable(pipe)`.

It is the `generate` of transformers models that is accelerated, and the call of a pipeline whose loop is its
own (`mmspec.pipelines.in_place_diffusers`). The method of the class looks for a mark on the object that it is
called on, an attribute of the instance, which `disable` takes away again. No reference to a model is kept: a
copy of an enabled model is one of its own. What is saved of one is a plain model.

A program whose model was enabled goes on to work: what the accelerated loop would refuse is done by
transformers, or by the pipeline, as it was before. The log says why.
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
MARK = "_mmspec_enabled"  # the attribute of models that are accelerated
#: By torch.compile, DDP and FSDP, pipelines, TRL.
WRAPPED = ("_orig_mod", "module", "model", "pretrained_model")
METHOD = "generate"
LOOP = "custom_generate"
#: Kept out of generation configs by `generate`.
NOT_OF_CONFIG = ("tokenizer", "assistant_tokenizer", "trust_remote_code")
logger = logging.getLogger(__name__)
#: Models whose `generate` runs: the calls that it makes of itself are its own, and stay as they are.
RUNNING: ContextVar[tuple[int, ...]] = ContextVar("running", default=())

#: What is called: a model with `generate`, or a pipeline of diffusers with a loop of its own.
Called: TypeAlias = Any


@dataclass(frozen=True)
class Summary:
    """Account of what an accelerated model has done since it was enabled.

    Attributes:
        name: of the pipeline's component; the model's class where it stands alone.
        accelerator: its name.
        exactness: its promise.
        calls: accelerated calls of `generate`, or of the pipeline.
        tokens, forwards: new tokens of all rows, and forwards of the model for them.
        last: the statistics of the last call; None before the first.
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
        """Tokens of all rows that a forward of the model gave; 0 before the first call."""
        return self.tokens / self.forwards if self.forwards else 0.0

    def __str__(self) -> str:
        counts = f"{self.calls} calls, {self.tokens} tokens in {self.forwards} forwards"
        each = f"{self.tokens_per_forward:.2f} each"
        return f"{self.name}: {self.accelerator} ({self.exactness}), {counts}, {each}"


@dataclass
class Enabled:
    """Mark of what is accelerated in place; a deep copy of the model has an account of its own."""

    summary: Summary
    method: FoundMethod
    seed: int | None
    before: AnyFunction | None  # what stood in the place of the class's `generate`
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, stats: DecodingStats) -> None:
        """Add a call to the account, of whichever thread."""
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
        return type(None), ()  # what is saved is a plain model


def enable(
    model_or_pipe: Accelerated,
    accelerator: str | Accelerator = "copy",
    *,
    drafter: DrafterSource | None = None,
    seed: int | None = None,
    pack: bool = True,
    **options: object,
) -> Accelerated:
    """Accelerate a transformers model, or the language models inside a diffusers pipeline, where they stand.

    `generate` is called as before, by you or by the pipeline, and works as before: batches with images,
    samplers, processors, criteria, streamers. Where the accelerator is exact, greedy outputs are the same
    tokens and sampled ones come from the same distribution, by other random numbers than `torch.multinomial`
    draws. A model that is accelerated already gets the new accelerator. Of a `DiffusionGemmaPipeline`, which
    has a loop of its own, it is the call that is accelerated.

    Args:
        model_or_pipe: a transformers model with `generate`, or a pipeline of diffusers, all of whose
            components that can be accelerated are.
        accelerator: a name from `mmspec.list_accelerators()`, alone or with options as on the command line
            ("copy:num_draft_tokens=8"), or what a function of `mmspec.accelerators` returns.
        drafter: a loaded draft model or head; for heads a folder or hub id too. A model whose checkpoint
            holds an MTP layer needs none for "mtp".
        seed: of the random numbers of every call; None draws one from torch's global generator each time.
        pack: on a CPU, whether a second, packed copy of the linear layers may take half of the free memory.
            Forward passes of several tokens then take little longer than those of one.
        options: options of the accelerator.

    Returns:
        The same object.

    Raises:
        InputError: there is nothing to accelerate, and why; or an option that cannot be. Nothing is changed
            then.
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
        allowed = (
            "a transformers model with `generate`, or a pipeline that holds one (`.components`, `.model`)"
        )
        raise InputError("model_or_pipe", given, f"{allowed} ({reasons})" if reasons else allowed)
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
    """Undo `enable`: the object is as it was before.

    Raises:
        InputError: nothing in it is accelerated.
    """
    for model, _ in enabled_of(model_or_pipe):
        restore(model)
        target = target_of(model)
        forget(target.model)
    return model_or_pipe


def summary(model_or_pipe: object) -> list[Summary]:
    """Account of every accelerated model, since it was enabled.

    Raises:
        InputError: nothing in it is accelerated.
    """
    return [enabled.summary for _, enabled in enabled_of(model_or_pipe)]


def components(model_or_pipe: object) -> dict[str, Any]:
    """Find the transformers models with `generate` in a pipeline, by name; a model by its class.

    A pipeline whose loop is its own stands for its model.
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
    """The transformers model in what PEFT, torch.compile, DDP or a pipeline made of it; None without one."""
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
    """The target that is decoded where this model or pipeline is called.

    Raises:
        MMSpecError: it cannot be decoded in the place of its own loop.
    """
    if family_of_canvases(called) is not None:
        return target_of_canvases(called)
    takes_loops = isinstance(called, GenerationMixin)
    if not takes_loops:
        allowed = "a model whose `generate` takes another loop; mmspec.MMSpecPipeline may decode it"
        raise InputError("model_or_pipe", type(called).__name__, allowed)
    return adapt(called)


def mark_of(model: object) -> Enabled | None:
    """The mark of a model that is accelerated; None if it is not."""
    mark = vars(model).get(MARK)
    return mark if isinstance(mark, Enabled) else None


def enabled_of(model_or_pipe: object) -> list[tuple[object, Enabled]]:
    """The models in an object that are accelerated, with their marks; InputError if none is."""
    marks = [(model, mark_of(model)) for model in components(model_or_pipe).values()]
    found = [(model, mark) for model, mark in marks if mark is not None]
    if not found:
        given = type(model_or_pipe).__name__
        raise InputError("model_or_pipe", given, "one that was enabled: mmspec.enable(...)")
    return found


def look_for_marks(called: object) -> None:
    """Have the method that is called look for marks; its class stays so, and does nothing without them."""
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
    """Take the mark away, and put back what stood in the place of `generate`."""
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
    return own[0], own[1] | {LOOP: make_loop(mark.method, mark.seed, mark.count, passes_on=True)}


def bound(call: AnyFunction, args: tuple[object, ...], kwargs: Keywords) -> Keywords | None:
    """The arguments of a call by name; None where it takes no loop, or transformers has something to say."""
    signature = inspect.signature(call)
    kinds = {each.kind for each in signature.parameters.values()}
    if LOOP not in signature.parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
        return None
    if inspect.Parameter.VAR_POSITIONAL in kinds:  # stands before the method, and takes what it takes
        signature, args = inspect.signature(GenerationMixin.generate), (None, *args)
    try:
        arguments: Keywords = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return None
    arguments = arguments.pop("kwargs", {}) | arguments
    arguments.pop("self", None)
    return arguments


def config_of(model: Called, given: Keywords) -> GenerationConfig:
    """All fields of a call: of its keywords, its config and the model's, as `generate` joins them."""
    signature = inspect.signature(GenerationMixin.generate).parameters
    keywords = {
        name: value for name, value in given.items() if name not in signature and name not in NOT_OF_CONFIG
    }
    config: GenerationConfig = model._prepare_generation_config(given.get("generation_config"), **keywords)[0]
    return config


def with_stop_strings(model: Called, given: Keywords, config: GenerationConfig) -> Keywords:
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
