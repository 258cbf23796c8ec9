"""Acceleration that is switched on and off inside a loaded model or pipeline: `mmspec.enable(pipe)`.

It is the `generate` of transformers models that is accelerated, by an attribute of the instance that stands
before the method of its class. Everything else of a model or pipeline is untouched, and `disable` takes the
attribute away again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from transformers import PreTrainedModel

from mmspec.acceleration import Accelerator
from mmspec.decoding.stats import DecodingStats
from mmspec.errors import InputError, MMSpecError
from mmspec.heads import HEADS
from mmspec.models.head_checkpoint import load_head
from mmspec.pipelines.custom_generate import accelerate
from mmspec.targets import adapt

__all__ = ["Summary", "disable", "enable", "summary"]

Accelerated = TypeVar("Accelerated")
METHOD = "generate"
ALREADY = "custom_generate"  # the caller's own loop goes before ours


@dataclass(frozen=True)
class Summary:
    """Account of what an accelerated model has done since it was enabled.

    Attributes:
        name: of the pipeline's component; the model's class where it stands alone.
        accelerator: its name.
        exactness: its promise.
        calls: accelerated calls of `generate`.
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
    """A model that is accelerated in place: what it has done, and what stood in the way before."""

    summary: Summary
    before: Any


#: Of models that are accelerated now; a model that is gone takes its entry along.
ENABLED: weakref.WeakKeyDictionary[PreTrainedModel, Enabled] = weakref.WeakKeyDictionary()


def enable(
    model_or_pipe: Accelerated,
    accelerator: str | Accelerator = "copy",
    *,
    drafter: Any = None,
    seed: int | None = None,
    **options: Any,
) -> Accelerated:
    """Accelerate a transformers model, or the language models inside a diffusers pipeline, where they stand.

    `generate` is called as before, by you or by the pipeline, and works as before: batches with images,
    samplers, processors, criteria, streamers. Where the accelerator is exact, greedy outputs are the same
    tokens and sampled ones come from the same distribution, by other random numbers than `torch.multinomial`
    draws. A model that is accelerated already gets the new accelerator.

    Args:
        model_or_pipe: a transformers model with `generate`, or a pipeline of diffusers, all of whose
            components that can be accelerated are.
        accelerator: a name from `mmspec.list_accelerators()`, or what a function of `mmspec.accelerators`
            returns.
        drafter: a loaded draft model or head; for heads a folder or hub id too. A model whose checkpoint
            holds an MTP layer needs none for "mtp".
        seed: of the random numbers of every call; None draws one from torch's global generator each time.
        options: options of the accelerator.

    Returns:
        The same object.

    Raises:
        InputError: there is nothing to accelerate, and why; or an option that cannot be. Nothing is changed
            then.
    """
    found = components(model_or_pipe)
    refused: dict[str, str] = {}
    prepared: dict[str, tuple[PreTrainedModel, Accelerator, Callable[..., Any]]] = {}
    for name, model in found.items():
        try:
            target = adapt(model)
        except MMSpecError as error:
            refused[name] = str(error)
            continue
        head = loaded(accelerator, drafter, model, target)
        decode = accelerate(accelerator, drafter=head, seed=seed, **options)
        prepared[name] = model, decode.accelerator.fit(target), decode  # type: ignore[attr-defined]
    if not prepared:
        given = type(model_or_pipe).__name__
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        allowed = "a transformers model with `generate`, or a pipeline that holds one"
        raise InputError("model_or_pipe", given, f"{allowed} ({reasons})" if reasons else allowed)
    for name, (model, fitted, decode) in prepared.items():
        if model in ENABLED:
            restore(model)
        before = vars(model).get(METHOD)
        account = Summary(name, fitted.name, fitted.exactness)
        vars(model)[METHOD] = accelerated(model, decode)
        ENABLED[model] = Enabled(account, before)
    return model_or_pipe


def disable(model_or_pipe: Accelerated) -> Accelerated:
    """Undo `enable`: the object is as it was before.

    Raises:
        InputError: nothing in it is accelerated.
    """
    for _, model in enabled_of(model_or_pipe):
        restore(model)
        del ENABLED[model]
    return model_or_pipe


def summary(model_or_pipe: object) -> list[Summary]:
    """Account of every accelerated model, since it was enabled.

    Raises:
        InputError: nothing in it is accelerated.
    """
    return [ENABLED[model].summary for _, model in enabled_of(model_or_pipe)]


def components(model_or_pipe: object) -> dict[str, PreTrainedModel]:
    """The transformers models with `generate` in a pipeline, by name; a model by its class."""
    if isinstance(model_or_pipe, PreTrainedModel):
        return {type(model_or_pipe).__name__: model_or_pipe}
    held = getattr(model_or_pipe, "components", None)
    parts = held if isinstance(held, Mapping) else {}
    return {
        name: part
        for name, part in parts.items()
        if isinstance(part, PreTrainedModel) and hasattr(part, METHOD) and part.can_generate()
    }


def enabled_of(model_or_pipe: object) -> list[tuple[str, PreTrainedModel]]:
    """The models in an object that are accelerated.

    Raises:
        InputError: none is.
    """
    found = [(name, model) for name, model in components(model_or_pipe).items() if model in ENABLED]
    if not found:
        given = type(model_or_pipe).__name__
        raise InputError("model_or_pipe", given, "one that was enabled: mmspec.enable(...)")
    return found


def loaded(accelerator: str | Accelerator, drafter: Any, model: PreTrainedModel, target: Any) -> Any:
    """The draft model or head, loaded where a folder or hub id is given or the checkpoint holds it."""
    if not isinstance(accelerator, str) or accelerator not in HEADS:
        return drafter
    if drafter is None and HEADS[accelerator].in_checkpoint:
        drafter = model.name_or_path or None
    if drafter is None or isinstance(drafter, PreTrainedModel):
        return drafter
    return load_head(accelerator, drafter, target.config, target.dtype, target.device)


def accelerated(model: PreTrainedModel, decode: Callable[..., Any]) -> Callable[..., Any]:
    """The `generate` of a model by another loop; calls with a loop of their own are left alone."""
    # not bound: a model that holds a reference to itself outlives everybody who uses it
    held, plain = weakref.ref(model), vars(model).get(METHOD) or getattr(type(model), METHOD)
    is_bound = METHOD in vars(model)

    @functools.wraps(plain)
    def generate(*args: Any, **kwargs: Any) -> Any:
        own = held()
        if own is None:
            raise InputError("model", None, "one that still exists")
        call = plain if is_bound else functools.partial(plain, own)
        if kwargs.get(ALREADY) is not None:
            return call(*args, **kwargs)
        output = call(*args, **kwargs, **({} if ALREADY in kwargs else {ALREADY: decode}))
        stats = decode.stats  # type: ignore[attr-defined]
        done = ENABLED[own].summary
        ENABLED[own].summary = replace(
            done,
            calls=done.calls + 1,
            tokens=done.tokens + sum(stats.new_tokens),
            forwards=done.forwards + stats.target_forwards,
            last=stats,
        )
        return output

    return generate


def restore(model: PreTrainedModel) -> None:
    """Put back what stood in the place of `generate`."""
    before = ENABLED[model].before
    if before is None:
        del vars(model)[METHOD]
    else:
        vars(model)[METHOD] = before
