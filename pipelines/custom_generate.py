"""Accelerated decoding loops for transformers' `generate`: `custom_generate=mmspec.accelerate("copy")`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor as Guidance
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from mmspec.accelerator import Accelerator, Call
from mmspec.core.canvas import NOT_FINITE, Canvas, Stopping
from mmspec.core.interfaces import Request
from mmspec.core.random_stream import RandomStream, draw_seed
from mmspec.core.sampling import LEAST_TEMPERATURE, Sampler
from mmspec.core.statistics import DecodingStats
from mmspec.errors import InputError, NumericalError, UnsupportedModelError
from mmspec.open_types import AnyFunction, Keywords
from mmspec.pipelines.drafter import DrafterSource, FoundMethod, find_method
from mmspec.pipelines.generate_inputs import check_inputs, for_decoder, split_rows
from mmspec.pipelines.generation_fields import arguments_of_generate, check_arguments
from mmspec.pipelines.outer_call import OuterCall, filled
from mmspec.pipelines.token_processors import (
    WARPERS,
    knows_its_row,
    row_processors,
    say_why_plain,
    split_warpers,
)
from mmspec.targets import CausalTarget, adapt
from mmspec.targets.admission import check_reach

__all__ = ["accelerate", "make_loop"]

Generated = Tensor | GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput


def accelerate(
    accelerator: str | Accelerator = "copy",
    *,
    drafter: DrafterSource | None = None,
    seed: int | None = None,
    **options: object,
) -> AnyFunction:
    """Return a `custom_generate=` function that decodes a transformers model speculatively.

    `generate` keeps its keywords, generation config, logits processors, stopping criteria and streamer. An
    argument that the accelerated loop does not support is refused by name before the first forward pass. The
    statistics of the last call are in the attribute `stats` of the function.

    Two cases differ from plain `generate`:

    - Pass stop strings as `stopping_criteria=[StopStringCriteria(tokenizer, strings)]`. transformers does not
      pass `tokenizer=` on to a custom function, and refuses `stop_strings=`.
    - Logits processors that may keep state or depend on the batch, and such stopping criteria with several
      rows, disable drafting: the call is decoded plainly (`docs/how-to/in-place.md`).

    Args:
        accelerator: a name from `mmspec.list_accelerators()`, alone or with options as on the command line
            ("copy:num_draft_tokens=8"), or an accelerator built by a function of `mmspec.accelerators`.
        drafter: a loaded draft model with the same tokenizer, or a head, for accelerators that need one. A
            head may also be a folder or hub id, which is loaded in the first call. "mtp" needs none if the
            checkpoint of the model contains an MTP layer.
        seed: seed for sampling. None draws a seed from torch's global generator, as `generate` does, so that
            `torch.manual_seed` makes calls reproducible.
        options: options of the accelerator.

    Returns:
        A function for `model.generate(..., custom_generate=function)`.

    Raises:
        InputError: an accelerator or an option is unknown, or the draft model is missing.
        CheckpointError: the head cannot be loaded. An invalid name is an error at once, others in the first
            call.

    Example:
        >>> output = model.generate(**inputs, custom_generate=mmspec.accelerate("copy"))  # doctest: +SKIP
    """
    method = find_method(accelerator, drafter, options)

    def keep(stats: DecodingStats) -> None:
        decode.stats = stats  # type: ignore[attr-defined]

    decode = make_loop(method, seed, keep)
    decode.accelerator = method  # type: ignore[attr-defined]
    return decode


def make_loop(
    method: FoundMethod, seed: int | None, keep: Callable[[DecodingStats], None], *, passes_on: bool = False
) -> AnyFunction:
    """Make a decoding loop for `generate`; `keep` receives the statistics of each call.

    An unsupported argument is an error; with `passes_on`, transformers' own loop decodes the call instead.
    """

    def loop(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
        **model_kwargs: object,
    ) -> Generated:
        given = arguments_of_generate()
        how = logits_processor, stopping_criteria, generation_config, streamer or given.get("streamer")
        called = GenerateCall(model, input_ids, *how, model_kwargs, given)
        try:  # the `generate` of Whisper asks for more than its caller did
            check_arguments(model, generation_config, given)
        except InputError as error:
            if not passes_on or called.by_blocks:
                raise
            return called.passed_on(error)
        if plain := decode_plainly(called, seed):
            keep(plain[1])
            return plain[0]
        return called.decode(method, seed, keep, passes_on and not called.by_blocks)

    return loop


@dataclass(frozen=True)
class GenerateCall(OuterCall[Generated]):
    """Arguments that `generate` passes to a loop, and the arguments of the caller (`given`)."""

    owner = "transformers"
    model: Any
    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    streamer: BaseStreamer | None
    model_kwargs: Keywords
    given: Mapping[str, object]

    @cached_property
    def target(self) -> CausalTarget:
        """The model behind the Target interface."""
        return adapt(self.model)

    @property
    def by_blocks(self) -> bool:
        """Whether the model fills masked blocks, which transformers' loop would decode wrongly."""
        with suppress(InputError, UnsupportedModelError):
            return self.target.by_blocks
        return False

    def prepare(self, method: FoundMethod, seed: int | None) -> Call:
        model, target, input_ids = self.model, self.target, self.input_ids
        fitted = method.fit(target)
        model_kwargs = for_decoder(model.config, self.model_kwargs)
        check_inputs(model, input_ids, model_kwargs, self.given)
        requests = split_rows(model.config, input_ids, model_kwargs)
        guides = [item for item in self.processors if type(item) is Guidance]
        others = LogitsProcessorList([item for item in self.processors if item not in guides])
        sampler = read_sampler(self.config, others, len(requests))
        for guide in guides:
            sampler = replace(sampler, guidance_scale=guide.guidance_scale)
            requests = [guided(request, target, guide, row) for row, request in enumerate(requests)]
        stopping = read_stopping(self.config, self.criteria, input_ids.shape[1])
        fitted.drafter.admit(requests, sampler, stopping)
        check_reach(model, [len(request.prompt_tokens) for request in requests], stopping.max_new_tokens)
        key = draw_seed() if seed is None else seed
        random = RandomStream.from_seed(key, len(requests), input_ids.device)
        padded = input_ids.tolist()  # the processors and criteria of `generate` count padding
        return fitted.call(target, sampler, requests, stopping, random, padded)

    def carry_out(self, call: Call) -> Generated:
        done, filler = 0, filler_of(self.config)
        for _ in call.rounds():
            if self.streamer is not None:
                done = put_steps(self.streamer, call.canvas, filler, done)
        if self.streamer is not None:
            self.streamer.end()
        call.raise_errors()
        tokens = filled(call.canvas.outputs(), filler, self.input_ids.device)
        result: Tensor = torch.cat([self.input_ids, tokens], dim=1)
        if not self.config.return_dict_in_generate:
            return result
        is_encoded = self.model.config.is_encoder_decoder
        kind: Any = GenerateEncoderDecoderOutput if is_encoded else GenerateDecoderOnlyOutput
        output: Generated = kind(sequences=result)
        return output

    def by_owner(self, *guards: LogitsProcessor) -> Generated:
        """Decode by the model class's `_sample`, the loop of `generate` for greedy decoding and sampling."""
        output: Generated = type(self.model)._sample(
            self.model,
            self.input_ids,
            logits_processor=LogitsProcessorList([*self.processors, *guards]),
            stopping_criteria=self.criteria,
            generation_config=self.config,
            streamer=self.streamer,
            **self.model_kwargs,
        )
        return output


def read_sampler(config: GenerationConfig, processors: LogitsProcessorList, rows: int) -> Sampler:
    """Convert the prepared processors of `generate` into a Sampler, which warps all nodes at once."""
    drawn = [item.temperature for item in processors if type(item) is TemperatureLogitsWarper]
    greedy = not config.do_sample or min(drawn, default=1.0) < LEAST_TEMPERATURE
    if greedy:  # avoids a division by a tiny temperature; truncation never removes the most likely token
        processors = LogitsProcessorList(item for item in processors if type(item) not in WARPERS)
    others, warpers = split_warpers(processors)
    per_row = [row_processors(others, row) for row in range(rows)] if others else []
    if greedy:
        return Sampler(processors=per_row)
    warped = {WARPERS[type(item)]: getattr(item, WARPERS[type(item)]) for item in warpers or ()}
    return Sampler(**{"temperature": 1.0, **warped}, processors=per_row)


def guided(request: Request, target: CausalTarget, guide: Guidance, row: int) -> Request:
    """Add the unconditional prompt to a request: the caller's, or the model's own.

    Raises:
        InputError: there is no unconditional prompt.
    """
    context: Keywords = guide.unconditional_context
    ids, mask = context["input_ids"], context["attention_mask"]
    if ids is None:
        negative = target.unconditional(request.inputs)
        if negative is None:
            rule = "must be 1 unless `negative_prompt_ids` is passed too"
            raise InputError("guidance_scale", guide.guidance_scale, rule)
        return replace(request, negative_inputs=negative)
    own = ids[row % len(ids)]
    own = own if mask is None else own[mask[row % len(mask)].bool()]
    return replace(request, negative_inputs={"input_ids": own[None]})


def read_stopping(config: GenerationConfig, criteria: StoppingCriteriaList, prompt_length: int) -> Stopping:
    """Convert stopping criteria: mmspec handles lengths and end tokens, and calls the others per token."""
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


def filler_of(config: GenerationConfig) -> int:
    """Return the token that pads finished rows."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    return int(config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id or 0)


class Usable(LogitsProcessor):
    """Raises NumericalError if no token can be chosen, which `generate` does not check."""

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        failed = scores.isnan().any(-1)
        if len(scores) == 1:  # with several rows, a finished row may exclude all tokens
            failed |= ~scores.isfinite().any(-1)
        if bool(failed.any()):
            row = int(failed.int().argmax())
            raise NumericalError(row, input_ids.shape[1] - self._prompt_length, NOT_FINITE)
        return scores


def decode_plainly(asked: GenerateCall, seed: int | None) -> tuple[Generated, DecodingStats] | None:
    """Decode a batch by transformers' own loop if a processor or criterion keeps state or sees the batch.

    Returns:
        The output of `generate` and the statistics; None if every callback depends on its row alone.

    Raises:
        NumericalError: the logits of a row are not finite.
        InputError: the model does not predict a next token.
    """
    # with one row, criteria are called after each token, as by `generate`
    input_ids = asked.input_ids
    callbacks = (*asked.processors, *(asked.criteria if len(input_ids) > 1 else ()))
    strangers = [item for item in callbacks if not knows_its_row(item)]
    by_blocks = bool(strangers) and asked.by_blocks
    if by_blocks:  # the sampler applies guidance
        strangers = [item for item in strangers if type(item) is not Guidance]
    if not strangers:
        return None
    if by_blocks:
        is_processor = strangers[0] in asked.processors
        rule = "must not keep state or depend on other tokens; this model fills blocks, not a next token"
        name = "logits_processor" if is_processor else "stopping_criteria"
        raise InputError(name, type(strangers[0]).__name__, rule)
    for item in strangers:
        say_why_plain(item)
    prompt = input_ids.shape[1]
    started = perf_counter()
    with ExitStack() as stack:
        if seed is not None:
            devices = [input_ids.device] if input_ids.is_cuda else []
            stack.enter_context(torch.random.fork_rng(devices))
            torch.manual_seed(int(seed) % 2**63)
        output = asked.by_owner(Usable(prompt))
    tokens = (output if isinstance(output, Tensor) else output.sequences)[:, prompt:]
    counts = lengths_of(tokens, asked.criteria)
    rounds = [max(count - 1, 0) for count in counts]
    stats = DecodingStats(
        new_tokens=counts,
        rounds=rounds,
        target_forwards=tokens.shape[1],
        drafted_rounds=[0] * len(counts),
        drafted=[0] * len(counts),
        accepted=[0] * len(counts),
        accepted_histograms=[Counter({0: count} if count else {}) for count in rounds],
        seconds=perf_counter() - started,
    )
    return output, stats


def lengths_of(tokens: Tensor, criteria: StoppingCriteriaList) -> list[int]:
    """Return the number of tokens of each row, up to and including its end token."""
    known = [item for item in criteria if isinstance(item, EosTokenCriteria)]
    ends = {end for item in known for end in item.eos_token_id.tolist()}
    found = []
    for row in tokens.tolist():
        first = next((index for index, token in enumerate(row) if token in ends), len(row) - 1)
        found.append(first + 1)
    return found


def put_steps(streamer: BaseStreamer, canvas: Canvas, filler: int, done: int) -> int:
    """Stream the steps that all rows have reached, as tensors [B] on the CPU; return their number."""
    rows = list(zip(canvas.output_lengths, canvas.finish_reasons, strict=True))
    going = [length for length, reason in rows if reason is None]
    reached = min(going) if going else max(length for length, _ in rows)
    for step in range(done, reached):
        tokens = [
            ids[start + step] if start + step < len(ids) else filler
            for ids, start in zip(canvas.ids, canvas.prompt_lengths, strict=True)
        ]
        streamer.put(torch.tensor(tokens, device="cpu"))
    return max(done, reached)
