"""The call of diffusers' `DiffusionGemmaPipeline`, whose own loop `mmspec.enable` replaces.

Prompts, options and outputs are those of the pipeline. Nothing of diffusers is imported here: who holds such
a pipeline has imported its module.
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
#: Arguments of a call that act in our loop, or in none with this scheduler; others have to be left alone.
SERVED = {
    *PROMPTS,
    *("gen_length", "num_inference_steps", "stability_threshold", "confidence_threshold", "generator"),
    *("eos_early_stop", "eos_token_id", "output_type", "return_dict"),
    *("temperature", "callback_on_step_end_tensor_inputs"),
}
TYPES = "mm_token_type_ids"

#: A pipeline, its scheduler or its output: not every version of diffusers has their classes.
OfDiffusers: TypeAlias = Any


def family_of_canvases(holder: object) -> type | None:
    """The class `DiffusionGemmaPipeline` if the object is one; None if it is not."""
    family: type | None = getattr(sys.modules.get(MODULE), "DiffusionGemmaPipeline", None)
    return family if family is not None and isinstance(holder, family) else None


def target_of_canvases(pipe: OfDiffusers) -> DiffusionGemmaTarget:
    """The target of a pipeline's model.

    Raises:
        InputError: it is no DiffusionGemma.
    """
    kind = getattr(getattr(pipe.model, "config", None), "model_type", None)
    if kind != MODEL_TYPE:
        raise InputError("pipe.model", type(pipe.model).__name__, "a DiffusionGemma of transformers")
    return DiffusionGemmaTarget(pipe.model)


@dataclass(frozen=True)
class CanvasCall(OuterCall[OfDiffusers]):
    """A call of a pipeline, whose `model` is a DiffusionGemma, and its own `__call__`.

    A call's generator goes before the seed; each call with one draws another seed of it.
    """

    owner = "diffusers"
    pipe: OfDiffusers
    own: AnyFunction
    args: tuple[object, ...]
    kwargs: Keywords

    @cached_property
    def given(self) -> Keywords:
        """All arguments by name; InputError for one that would not act in our loop."""
        signature = inspect.signature(self.own)
        try:
            bound = signature.bind(*self.args, **self.kwargs)
        except TypeError as error:  # for the pipeline to say
            raise InputError("arguments", list(self.kwargs), str(error)) from error
        for name, value in bound.arguments.items():
            if name not in SERVED and value is not signature.parameters[name].default:
                raise InputError(name, value, "its default: the steps of rows are not those of the pipeline")
        bound.apply_defaults()
        return bound.arguments

    @property
    def end(self) -> Any:
        """The end token, which is the tokenizer's where none is given."""
        given = self.given["eos_token_id"]
        return self.pipe.eos_token_id if given is None else given

    def prepare(self, method: FoundMethod, seed: int | None) -> Call:
        pipe, given, end = self.pipe, self.given, self.end
        settings = settings_of(pipe.scheduler, given)
        Renoise(**settings)  # checks them
        if end is not None and not is_integer(end):
            raise InputError("eos_token_id", end, "an integer, or None")
        target = target_of_canvases(pipe)
        if target.device.type != pipe._execution_device.type:
            raise InputError("pipe", f"weights on {target.device}", f"weights on {pipe._execution_device}")
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
        """One request for each row of prompts [B, L], with the images whose placeholders it has."""
        if unknown := set(media) - {*PATCHES, TYPES}:
            raise InputError("inputs", sorted(unknown), f"images as {', '.join(PATCHES)}")
        check_mask(self.pipe.model, ids, mask)
        config, sizes = self.pipe.model.config, None
        if PATCHES[1] in media:
            patches = (media[PATCHES[1]] >= 0).all(-1).sum(-1)
            sizes = (patches // config.vision_config.pooling_kernel_size**2).tolist()
        return split_rows(config, ids, {"attention_mask": mask, **media}, sizes)

    def carry_out(self, call: Call) -> OfDiffusers:
        """Return whole canvases, and texts up to an end token.

        Behind a row's end token there are end tokens; the pipeline leaves what it decoded there.
        """
        for _ in self.pipe.progress_bar(call.rounds()):
            pass
        call.raise_errors()
        rows, end = call.canvas.outputs(), self.end
        target: Any = call.target  # of canvases
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
    """Settings of `Renoise`, as the scheduler and a call of the pipeline say them.

    Raises:
        InputError: the scheduler samples in another way.
    """
    if type(scheduler) is not getattr(sys.modules[MODULE], SAMPLER):
        raise InputError("scheduler", type(scheduler).__name__, f"{SAMPLER}: others sample in another way")
    config = scheduler.config
    return {
        **{name: config[name] for name in ("entropy_bound", "t_min", "t_max")},
        "denoising_steps": given["num_inference_steps"],
        "stability_threshold": max(given["stability_threshold"], 1),  # the pipeline reads 0 as 1
        "confidence_threshold": given["confidence_threshold"],
    }
