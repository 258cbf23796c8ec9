"""The call of diffusers' `DiffusionGemmaPipeline`, whose own loop `mmspec.enable` replaces.

Prompts, options and outputs are those of the pipeline. Nothing of diffusers is imported here: who holds such
a pipeline has imported its module.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mmspec.accelerator import Accelerator, Call
from mmspec.core.canvas import Stopping
from mmspec.core.interfaces import Request
from mmspec.core.random_stream import RandomStream, draw_seed
from mmspec.core.sampling import Sampler
from mmspec.core.statistics import DecodingStats
from mmspec.errors import InputError, UnsupportedModelError
from mmspec.families.diffusion_gemma import MODEL_TYPE
from mmspec.families.diffusion_gemma.renoise import Renoise
from mmspec.families.diffusion_gemma.target import DiffusionGemmaTarget
from mmspec.pipelines.generate_inputs import check_mask, shares
from mmspec.validation import is_integer

__all__ = ["decode_canvases", "family_of_canvases", "target_of_canvases"]

MODULE = "diffusers.pipelines.diffusion_gemma.pipeline_diffusion_gemma"
SAMPLER = "EntropyBoundScheduler"
#: Arguments of a call that act in our loop, or in none with this scheduler; others have to be left alone.
SERVED = {
    *("prompt", "messages", "image", "add_generation_prompt"),
    *("gen_length", "num_inference_steps", "stability_threshold", "confidence_threshold", "generator"),
    *("eos_early_stop", "eos_token_id", "output_type", "return_dict"),
    *("temperature", "callback_on_step_end_tensor_inputs"),
}
IMAGES = ("pixel_values", "image_position_ids")
TYPES = "mm_token_type_ids"
logger = logging.getLogger(__name__)


def family_of_canvases(holder: object) -> type[Any] | None:
    """The class `DiffusionGemmaPipeline` if the object is one; None if it is not."""
    family: type[Any] | None = getattr(sys.modules.get(MODULE), "DiffusionGemmaPipeline", None)
    return family if family is not None and isinstance(holder, family) else None


def target_of_canvases(pipe: Any) -> DiffusionGemmaTarget:
    """The target of a pipeline's model.

    Raises:
        InputError: it is no DiffusionGemma.
    """
    kind = getattr(getattr(pipe.model, "config", None), "model_type", None)
    if kind != MODEL_TYPE:
        raise InputError("pipe.model", type(pipe.model).__name__, "a DiffusionGemma of transformers")
    return DiffusionGemmaTarget(pipe.model)


def decode_canvases(
    pipe: Any,
    call: Callable[..., Any],
    method: Accelerator,
    seed: int | None,
    count: Callable[[DecodingStats], None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Decode a call of a pipeline by our loop, or leave it to the pipeline; returns its output.

    Args:
        pipe: the pipeline, whose `model` is a DiffusionGemma.
        call: its own `__call__`.
        method: of decoding.
        seed: of the random numbers; a call's generator goes before it.
        count: gets the statistics.
        args, kwargs: of the call.

    Raises:
        ValueError: of the pipeline, for arguments that it refuses.
        NumericalError: a row's logits are no numbers.
    """
    signature = inspect.signature(call)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:  # for the pipeline to say
        return call(*args, **kwargs)
    try:
        for name, value in bound.arguments.items():
            if name not in SERVED and value is not signature.parameters[name].default:
                raise InputError(name, value, "its default: the steps of rows are not those of the pipeline")
        bound.apply_defaults()
        given = bound.arguments
        decoding = prepare(pipe, given, method, seed)
    except (InputError, UnsupportedModelError) as error:
        logger.info("passed on to diffusers: %s", error)
        return call(*args, **kwargs)
    for _ in pipe.progress_bar(decoding.rounds()):
        pass
    decoding.raise_errors()
    count(decoding.stats)
    return as_output(pipe, given, decoding)


def prepare(pipe: Any, given: Mapping[str, Any], method: Accelerator, seed: int | None) -> Call:
    """Set up the decoding of a call with those arguments, in their own words; nothing is read yet.

    Raises:
        InputError: something would not act in our loop, or not so.
        ValueError: of the pipeline.
    """
    settings = settings_of(pipe.scheduler, given)
    Renoise(**settings)  # checks them
    end = end_of(pipe, given)
    if end is not None and not is_integer(end):
        raise InputError("eos_token_id", end, "an integer, or None")
    target = target_of_canvases(pipe)
    if target.device.type != pipe._execution_device.type:
        raise InputError("pipe", f"weights on {target.device}", f"weights on {pipe._execution_device}")
    pipe.check_inputs(**{name: given[name] for name in inspect.signature(pipe.check_inputs).parameters})
    if settings["confidence_threshold"] is None:
        settings["confidence_threshold"] = -math.inf
    target.published = settings
    prompts = ("prompt", "messages", "image", "add_generation_prompt")
    requests = split(pipe.model, *pipe._prepare_inputs(**{name: given[name] for name in prompts}))
    canvases = -(-given["gen_length"] // target.canvas_length)
    ends = frozenset({end}) if given["eos_early_stop"] and end is not None else frozenset()
    stopping = Stopping(canvases * target.canvas_length, ends)
    generator = given["generator"]  # each call with one draws another seed of it
    key = draw_seed(generator) if seed is None or generator is not None else seed
    random = RandomStream.from_seed(key, len(requests), target.device)
    return method.fit(target).call(target, Sampler(1.0), requests, stopping, random)


def settings_of(scheduler: Any, given: Mapping[str, Any]) -> dict[str, Any]:
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


def end_of(pipe: Any, given: Mapping[str, Any]) -> Any:
    """The end token of a call, which is the tokenizer's where none is given."""
    return pipe.eos_token_id if given["eos_token_id"] is None else given["eos_token_id"]


def split(model: Any, ids: Tensor, mask: Tensor, media: Mapping[str, Tensor]) -> list[Request]:
    """One request a row, without its padding, with the images whose placeholders it has.

    Args:
        model: a DiffusionGemma.
        ids, mask: [B, L] tokens of the prompts, and which of them are read.
        media: [B, L] token types, and images [N, n, d] with the places [N, n, 2] of their patches.

    Raises:
        InputError: padding that is not in front of a prompt, placeholders that are no images', an input of
            another name.
    """
    if unknown := set(media) - {*IMAGES, TYPES}:
        raise InputError("inputs", sorted(unknown), f"images as {', '.join(IMAGES)}")
    seen = check_mask(model, ids, mask)
    chosen = [range(0)] * len(ids)
    if images := {name: media[name] for name in IMAGES if name in media}:
        patches = (media[IMAGES[1]] >= 0).all(-1).sum(-1)
        sizes = patches // model.config.vision_config.pooling_kernel_size**2
        chosen = shares(model.config, "image", ids, sizes.tolist())
    requests = []
    for row, (kept, own) in enumerate(zip(seen, chosen, strict=True)):
        inputs = {"input_ids": ids[row : row + 1, kept]}
        if TYPES in media:
            inputs[TYPES] = media[TYPES][row : row + 1, kept]
        if own:
            inputs |= {name: value[own.start : own.stop] for name, value in images.items()}
        requests.append(Request(inputs))
    return requests


def as_output(pipe: Any, given: Mapping[str, Any], decoding: Call) -> Any:
    """Put the output of a call into the pipeline's form: whole canvases, and texts up to an end token.

    Behind a row's end token there are end tokens; the pipeline leaves what it decoded there.
    """
    outputs, end = decoding.canvas.outputs(), end_of(pipe, given)
    width = max(map(len, outputs))
    width += -width % decoding.target.canvas_length
    filled = [row + [end] * (width - len(row)) for row in outputs]
    sequences = torch.tensor(filled, device=decoding.target.device)
    texts = None
    if given["output_type"] == "text":
        cut = [row[: row.index(end) + 1] if end in row else row for row in outputs]
        texts = pipe.processor.batch_decode(cut, skip_special_tokens=True)
    if not given["return_dict"]:
        return sequences, texts
    return sys.modules[MODULE].DiffusionGemmaPipelineOutput(sequences=sequences, texts=texts)
