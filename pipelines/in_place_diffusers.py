"""Calls of diffusers' `DiffusionGemmaPipeline`, whose decoding loop `mmspec.enable` replaces.

Prompts, options and outputs are those of the pipeline. This module does not import diffusers: the module of
the pipeline is already imported if a pipeline exists.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from torch import Tensor

from mmspec.accelerator import Call
from mmspec.core.canvas import Stopping
from mmspec.core.interfaces import Request
from mmspec.core.random_stream import RandomStream, draw_seed
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.families.diffusion_gemma import MODEL_TYPE
from mmspec.families.diffusion_gemma.renoise import Renoise
from mmspec.families.diffusion_gemma.target import DiffusionGemmaTarget
from mmspec.open_types import AnyFunction, Keywords
from mmspec.pipelines.drafter import FoundMethod
from mmspec.pipelines.generate_inputs import PATCHES, check_mask, split_rows
from mmspec.pipelines.outer_call import OuterCall, filled
from mmspec.validation import is_integer

__all__ = ["CanvasCall", "family_of_canvases", "target_of_canvases"]

MODULE = "diffusers.pipelines.diffusion_gemma.pipeline_diffusion_gemma"
SAMPLER = "EntropyBoundScheduler"
PROMPTS = ("prompt", "messages", "image", "add_generation_prompt")
#: Arguments that mmspec's loop supports, or that this scheduler ignores; others must keep their default.
SERVED = {
    *PROMPTS,
    *("gen_length", "num_inference_steps", "stability_threshold", "confidence_threshold", "generator"),
    *("eos_early_stop", "eos_token_id", "output_type", "return_dict"),
    *("temperature", "callback_on_step_end_tensor_inputs"),
}
TYPES = "mm_token_type_ids"

#: A pipeline, its scheduler or its output; not every version of diffusers has these classes.
OfDiffusers: TypeAlias = Any


def family_of_canvases(holder: object) -> type | None:
    """Return the class `DiffusionGemmaPipeline` if the object is an instance of it, else None."""
    family: type | None = getattr(sys.modules.get(MODULE), "DiffusionGemmaPipeline", None)
    return family if family is not None and isinstance(holder, family) else None


def target_of_canvases(pipe: OfDiffusers) -> DiffusionGemmaTarget:
    """Return the target of a pipeline's model.

    Raises:
        InputError: the model is not a DiffusionGemma.
    """
    kind = getattr(getattr(pipe.model, "config", None), "model_type", None)
    if kind != MODEL_TYPE:
        raise InputError("pipe.model", type(pipe.model).__name__, "must be transformers' DiffusionGemma")
    return DiffusionGemmaTarget(pipe.model)


@dataclass(frozen=True)
class CanvasCall(OuterCall[OfDiffusers]):
    """A call of a DiffusionGemma pipeline; `own` is the pipeline's own `__call__`.

    A generator of the call takes precedence over the seed; each call draws a new seed from it.
    """

    owner = "diffusers"
    pipe: OfDiffusers
    own: AnyFunction
    args: tuple[object, ...]
    kwargs: Keywords

    @cached_property
    def given(self) -> Keywords:
        """All arguments by name; raises InputError for one that mmspec's loop does not support."""
        signature = inspect.signature(self.own)
        try:
            bound = signature.bind(*self.args, **self.kwargs)
        except TypeError as error:  # the pipeline raises it again, with its own message
            raise InputError("arguments", list(self.kwargs), f"cannot be bound: {error}") from error
        for name, value in bound.arguments.items():
            if name not in SERVED and value is not signature.parameters[name].default:
                rule = "must keep its default; the accelerated loop has other steps than the pipeline"
                raise InputError(name, value, rule)
        bound.apply_defaults()
        return bound.arguments

    @property
    def end(self) -> Any:
        """The end token of the call, or else of the tokenizer."""
        given = self.given["eos_token_id"]
        return self.pipe.eos_token_id if given is None else given

    def prepare(self, method: FoundMethod, seed: int | None) -> Call:
        pipe, given, end = self.pipe, self.given, self.end
        settings = settings_of(pipe.scheduler, given)
        Renoise(**settings)  # checks them
        if end is not None and not is_integer(end):
            raise InputError("eos_token_id", end, "must be an integer or None")
        target = target_of_canvases(pipe)
        if target.device.type != pipe._execution_device.type:
            rule = f"must have its weights on {pipe._execution_device}"
            raise InputError("pipe", f"weights on {target.device}", rule)
        pipe.check_inputs(**{name: given[name] for name in inspect.signature(pipe.check_inputs).parameters})
        if settings["confidence_threshold"] is None:
            settings["confidence_threshold"] = -math.inf
        target.published = settings
        requests = self._requests(*pipe._prepare_inputs(**{name: given[name] for name in PROMPTS}))
        canvases = -(-given["gen_length"] // target.canvas_length)
        ends = frozenset({end}) if given["eos_early_stop"] and end is not None else frozenset()
        stopping = Stopping(canvases * target.canvas_length, ends)
        generator = given["generator"]
        key = draw_seed(generator) if seed is None or generator is not None else seed
        random = RandomStream.from_seed(key, len(requests), target.device)
        return method.fit(target).call(target, Sampler(1.0), requests, stopping, random)

    def _requests(self, ids: Tensor, mask: Tensor, media: Mapping[str, Tensor]) -> list[Request]:
        """Make one request for each row of prompts [B, L], with the images of its placeholders."""
        if unknown := set(media) - {*PATCHES, TYPES}:
            raise InputError("inputs", sorted(unknown), f"must be images as {', '.join(PATCHES)}")
        check_mask(self.pipe.model, ids, mask)
        config, sizes = self.pipe.model.config, None
        if PATCHES[1] in media:
            patches = (media[PATCHES[1]] >= 0).all(-1).sum(-1)
            sizes = (patches // config.vision_config.pooling_kernel_size**2).tolist()
        return split_rows(config, ids, {"attention_mask": mask, **media}, sizes)

    def carry_out(self, call: Call) -> OfDiffusers:
        """Return whole canvases, and texts up to the end token.

        The rest of a row is filled with end tokens; the pipeline keeps the tokens it decoded there.
        """
        for _ in self.pipe.progress_bar(call.rounds()):
            pass
        call.raise_errors()
        rows, end = call.canvas.outputs(), self.end
        target: Any = call.target
        sequences, texts = filled(rows, end or 0, target.device, target.canvas_length), None
        if self.given["output_type"] == "text":
            cut = [row[: row.index(end) + 1] if end in row else row for row in rows]
            texts = self.pipe.processor.batch_decode(cut, skip_special_tokens=True)
        if not self.given["return_dict"]:
            return sequences, texts
        return sys.modules[MODULE].DiffusionGemmaPipelineOutput(sequences=sequences, texts=texts)

    def by_owner(self) -> OfDiffusers:
        return self.own(*self.args, **self.kwargs)


def settings_of(scheduler: OfDiffusers, given: Keywords) -> Keywords:
    """Return the settings of `Renoise` from the scheduler and the arguments of a call.

    Raises:
        InputError: the scheduler is not an `EntropyBoundScheduler`.
    """
    if type(scheduler) is not getattr(sys.modules[MODULE], SAMPLER):
        raise InputError(
            "scheduler", type(scheduler).__name__, f"must be {SAMPLER}; other schedulers sample differently"
        )
    config = scheduler.config
    return {
        **{name: config[name] for name in ("entropy_bound", "t_min", "t_max")},
        "denoising_steps": given["num_inference_steps"],
        "stability_threshold": max(given["stability_threshold"], 1),  # the pipeline reads 0 as 1
        "confidence_threshold": given["confidence_threshold"],
    }
