"""Acceleration of transformers' own generate: `custom_generate=mmspec.accelerate("copy")`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    PreTrainedModel,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from mmspec.acceleration import Accelerator
from mmspec.accelerators import build_accelerator, find_preset
from mmspec.decoding.canvas import Stopping
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.sampling import Sampler
from mmspec.errors import InputError
from mmspec.heads import HEADS
from mmspec.models.head_checkpoint import check_head
from mmspec.pipelines.generate_rows import split_rows
from mmspec.pipelines.plain_generate import decode_plainly, strangers_of
from mmspec.pipelines.token_processors import row_processors, say_why_plain
from mmspec.targets import adapt

WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


def accelerate(
    accelerator: str | Accelerator = "copy",
    *,
    drafter: PreTrainedModel | None = None,
    seed: int | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """Make a function for `custom_generate=` of any decoder-only transformers model.

    Everything else of `generate` works as it is: its keywords, generation config, logits processors,
    stopping criteria and streamer. `stats` of the last call are on the function. Stop strings go in as
    `stopping_criteria=[StopStringCriteria(tokenizer, strings)]`: transformers loses `tokenizer=` on the way
    to any custom function, and refuses. Processors that may keep a state or know the batch, and criteria of
    several rows, are called as `generate` calls them: such calls are decoded plainly (`docs/in-place.md`).

    Args:
        accelerator: a name from `mmspec.list_accelerators()`, or what a function of `mmspec.accelerators`
            returns.
        drafter: a loaded draft model with the same tokenizer, or a loaded head, for accelerators that need
            one.
        seed: of the random stream when sampling; None draws one from torch's global generator, as
            `generate` does, so that `torch.manual_seed` works.
        options: options of the accelerator.

    Raises:
        InputError: unknown accelerator or option, or a missing draft model.
    """
    method = accelerator if isinstance(accelerator, Accelerator) else build(accelerator, drafter, options)

    def decode(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        check_config(generation_config)
        streamer = streamer or streamer_of_generate()
        asked = logits_processor, stopping_criteria, generation_config
        if strangers := strangers_of(logits_processor, stopping_criteria, len(input_ids)):
            for item in strangers:
                say_why_plain(item)
            plain, stats = decode_plainly(model, input_ids, *asked, streamer, seed, model_kwargs)
            decode.stats = stats  # type: ignore[attr-defined]
            return plain
        target = adapt(model)
        fitted = method.fit(target)
        requests = split_rows(model.config, input_ids, model_kwargs)
        sampler = read_sampler(generation_config, logits_processor, len(requests))
        stopping = read_stopping(generation_config, stopping_criteria, input_ids.shape[1])
        key = int(torch.randint(2**62, ())) if seed is None else seed
        random = RandomStream.from_seed(key, len(requests), input_ids.device)
        padded = input_ids.tolist()  # processors and criteria of generate count the padding as well
        call = fitted.call(target, sampler, requests, stopping, random, padded)
        for step in call.rounds():
            if streamer is not None:
                for token in step.emission.tokens[0]:
                    streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()
        for error in call.canvas.errors:
            if error is not None:
                raise error
        decode.stats = call.stats  # type: ignore[attr-defined]
        result = pad_outputs(input_ids, call.canvas.outputs(), generation_config)
        return (
            GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, result))
            if generation_config.return_dict_in_generate
            else result
        )

    decode.accelerator = method  # type: ignore[attr-defined]
    return decode


def build(name: str, drafter: PreTrainedModel | None, options: dict[str, Any]) -> Accelerator:
    """Build the accelerator of a name, with a loaded draft model or head where it needs one."""
    if find_preset(name).needs is None:
        if drafter is not None:
            raise InputError("drafter", type(drafter), f"nothing: {name!r} has no draft model")
        return build_accelerator(name, **options)
    if not isinstance(drafter, PreTrainedModel):
        raise InputError("drafter", drafter, f"a loaded draft model, which {name!r} needs")
    model = check_head(name, drafter) if name in HEADS else drafter
    return build_accelerator(name, model=model, **options)


def read_sampler(config: GenerationConfig, processors: LogitsProcessorList, rows: int) -> Sampler:
    """Convert generate's prepared processors into a Sampler, which warps all nodes at once."""
    warpers = [item for item in processors if type(item) in WARPERS]
    others = LogitsProcessorList(item for item in processors if item not in warpers)
    per_row = [row_processors(others, row) for row in range(rows)] if others else []
    if not config.do_sample:
        return Sampler(processors=per_row)
    order = [WARPERS.index(type(item)) for item in warpers]
    if order != sorted(set(order)) or list(processors[len(others) :]) != warpers:
        # doubled, or with truncations of another kind between them: keep the order, processor by processor
        return Sampler(temperature=1.0, processors=[row_processors(processors, row) for row in range(rows)])
    found: dict[type, Any] = {type(item): item for item in warpers}
    return Sampler(
        temperature=float(getattr(found.get(TemperatureLogitsWarper), "temperature", 1.0)),
        top_k=getattr(found.get(TopKLogitsWarper), "top_k", None),
        top_p=getattr(found.get(TopPLogitsWarper), "top_p", None),
        min_p=getattr(found.get(MinPLogitsWarper), "min_p", None),
        processors=per_row,
    )


def check_config(config: GenerationConfig) -> None:
    """Raise InputError for what this loop would ignore: beams, and numbers it does not keep."""
    for name in ("num_beams", "num_beam_groups"):
        if (getattr(config, name, None) or 1) != 1:
            raise InputError(name, getattr(config, name), "1: beam search has no draft to verify")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise InputError(name, True, "False: an accelerated call keeps the tokens alone")


def streamer_of_generate() -> BaseStreamer | None:
    """Find the streamer of the calling `generate`.

    transformers (5.17 to 5.23) gives the streamer its prompt and then hands it to its own loops alone,
    never to a custom one, so that readers of the stream would wait for ever.
    """
    frame = sys._getframe(2)
    return frame.f_locals.get("streamer") if frame.f_code.co_name == "generate" else None


def read_stopping(config: GenerationConfig, criteria: StoppingCriteriaList, prompt_length: int) -> Stopping:
    """Convert stopping criteria: length and end tokens are ours, all others are asked token by token."""
    end: set[int] = set()
    limit = config.max_length
    others = StoppingCriteriaList()
    for item in criteria:
        if isinstance(item, EosTokenCriteria):
            end |= set(item.eos_token_id.tolist())
        elif isinstance(item, MaxLengthCriteria):
            limit = item.max_length
        else:
            others.append(item)
    return Stopping(limit - prompt_length, frozenset(end), others)


def pad_outputs(input_ids: Tensor, outputs: list[list[int]], config: GenerationConfig) -> Tensor:
    """Join prompts and outputs to [B, L + longest output], padded on the right as generate does."""
    longest = max(map(len, outputs))
    filler = config.pad_token_id
    if filler is None:
        filler = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id or 0
    padded = [row + [filler] * (longest - len(row)) for row in outputs]
    return torch.cat([input_ids, torch.tensor(padded, dtype=torch.long, device=input_ids.device)], dim=1)
