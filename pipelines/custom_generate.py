"""Acceleration of transformers' own generate: `custom_generate=mmspec.accelerate("copy")`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor as Guidance
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from mmspec.accelerator import Accelerator, Call
from mmspec.accelerators import build_accelerator, option_names
from mmspec.core.canvas import NOT_FINITE, Canvas, Stopping
from mmspec.core.interfaces import Request, Target
from mmspec.core.random_stream import RandomStream, draw_seed
from mmspec.core.sampling import LEAST_TEMPERATURE, Sampler
from mmspec.core.statistics import DecodingStats
from mmspec.errors import InputError, NumericalError, UnknownArgumentError, UnsupportedModelError
from mmspec.heads.checkpoint import check_head, load_head
from mmspec.models.checkpoint import check_source
from mmspec.pipelines.drafter import Drafter, find_drafter, read_written
from mmspec.pipelines.generate_inputs import check_inputs, split_rows
from mmspec.pipelines.generation_fields import arguments_of_generate, check_arguments
from mmspec.pipelines.token_processors import (
    WARPERS,
    knows_its_row,
    row_processors,
    say_why_plain,
    split_warpers,
)
from mmspec.plugins import HEADS, METHODS
from mmspec.registry import did_you_mean
from mmspec.targets import adapt
from mmspec.targets.admission import check_reach

__all__ = ["accelerate", "build", "is_head", "load_for", "make_loop"]

logger = logging.getLogger(__name__)


def accelerate(
    accelerator: str | Accelerator = "copy",
    *,
    drafter: Drafter | None = None,
    seed: int | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """Make a function for `custom_generate=` of any decoder-only transformers model.

    Everything else of `generate` works as it is: its keywords, generation config, logits processors,
    stopping criteria and streamer. What would not act in this loop is refused by name before the first
    forward. `stats` of the last call are on the function. Stop strings go in as
    `stopping_criteria=[StopStringCriteria(tokenizer, strings)]`: transformers loses `tokenizer=` on the way
    to any custom function, and refuses. Processors that may keep a state or know the batch, and criteria of
    several rows, are called as `generate` calls them: such calls are decoded plainly (`docs/in-place.md`).

    Args:
        accelerator: a name from `mmspec.list_accelerators()`, alone or with options as on the command line
            ("copy:num_draft_tokens=8"), or what a function of `mmspec.accelerators` returns.
        drafter: a loaded draft model with the same tokenizer, or a loaded head, for accelerators that need
            one; for heads a folder or hub id too, which the first call loads. A model whose checkpoint holds
            an MTP layer needs none for "mtp".
        seed: of the random stream when sampling; None draws one from torch's global generator, as
            `generate` does, so that `torch.manual_seed` works.
        options: options of the accelerator.

    Raises:
        InputError: unknown accelerator or option, or a missing draft model.
        CheckpointError: the head cannot be loaded; in the first call, unless there can be none of that name.
    """
    accelerator, drafter, options = read_written(accelerator, drafter, options)
    method: Accelerator | HeadToLoad
    if isinstance(accelerator, Accelerator):
        method = accelerator
    elif is_head(accelerator) and not isinstance(drafter, PreTrainedModel):
        method = HeadToLoad(accelerator, drafter, options)
    else:
        method = build(accelerator, drafter, options)

    def keep(stats: DecodingStats) -> None:
        decode.stats = stats  # type: ignore[attr-defined]

    decode = make_loop(method, seed, keep)
    decode.accelerator = method  # type: ignore[attr-defined]
    return decode


class HeadToLoad:
    """An accelerator whose head is loaded when a model is decoded, once for each checkpoint and device.

    Args:
        name: a key of `HEADS`.
        drafter: folder or hub id; None for the model's own checkpoint, where that may hold the head.
        options: of the accelerator.

    Raises:
        InputError: an unknown option, or no drafter.
        CheckpointError: there can be no such folder or hub id.
    """

    def __init__(self, name: str, drafter: str | Path | None, options: dict[str, Any]) -> None:
        known = option_names(name, options.get("acceptance"))
        for option in options.keys() - known:
            raise UnknownArgumentError(f"option of accelerator {name!r}", option, did_you_mean(option, known))
        source = find_drafter(name, drafter, checkpoint="the model's own")
        if drafter is not None:
            check_source(source, "drafter")
        self.name, self.drafter, self.options = name, drafter, options
        self._loaded: dict[tuple[Any, ...], Accelerator] = {}

    def fit(self, target: Any) -> Accelerator:
        """Return the accelerator fitted to a target; errors as of `load_for`."""
        key = target.model.name_or_path, target.dtype, target.device
        if key not in self._loaded:
            self._loaded[key] = build(self.name, load_for(self.name, self.drafter, target), self.options)
        return self._loaded[key].fit(target)


def is_head(accelerator: object) -> bool:
    """Whether it is the name of a head that drafts."""
    return isinstance(accelerator, str) and accelerator in HEADS


def load_for(name: str, drafter: Drafter | None, target: Any) -> PreTrainedModel:
    """Load the head of an accelerator for a target: of a folder or hub id, or of the target's checkpoint.

    Raises:
        InputError: there is none, or a loaded model that is no such head.
        CheckpointError: it cannot be loaded.
    """
    found: Any = find_drafter(name, drafter, checkpoint=target.model.name_or_path or None)
    return load_head(name, found, target.config, target.dtype, target.device)


def make_loop(
    method: Accelerator | HeadToLoad,
    seed: int | None,
    keep: Callable[[DecodingStats], None],
    *,
    passes_on: bool = False,
) -> Callable[..., Any]:
    """Make a loop that `generate` calls when all is prepared; `keep` gets the statistics of each call.

    What would not act in it is an error, or (`passes_on`) decoded by transformers' own loop.
    """

    def loop(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Any:
        given = arguments_of_generate()
        if not passes_on:
            check_arguments(model, generation_config, given)
        streamer = streamer or given.get("streamer")
        how = logits_processor, stopping_criteria, generation_config, streamer
        asked = Asked(model, input_ids, *how, model_kwargs)
        if plain := decode_plainly(asked, seed):
            output, stats = plain
        else:
            try:
                call = prepare(method, seed, asked, given)
            except (InputError, UnsupportedModelError) as error:
                if not passes_on or has_no_next_token(model):
                    raise
                logger.info("passed on to transformers: %s", error)
                return asked.by_transformers()
            output, stats = carry_out(call, asked), call.stats
        keep(stats)
        return output

    return loop


@dataclass(frozen=True)
class Asked:
    """Arguments that `generate` hands to a loop."""

    model: Any
    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    streamer: BaseStreamer | None
    model_kwargs: dict[str, Any]

    def by_transformers(self, *guards: LogitsProcessor) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode by the loop of the class, which `generate` takes for greedy decoding and for draws."""
        output: Tensor | GenerateDecoderOnlyOutput = type(self.model)._sample(
            self.model,
            self.input_ids,
            logits_processor=LogitsProcessorList([*self.processors, *guards]),
            stopping_criteria=self.criteria,
            generation_config=self.config,
            streamer=self.streamer,
            **self.model_kwargs,
        )
        return output


def prepare(
    method: Accelerator | HeadToLoad, seed: int | None, asked: Asked, given: Mapping[str, Any]
) -> Call:
    """Set up the decoding of a batch, whose caller gave those arguments; nothing is read yet.

    Raises:
        InputError: something that the caller gave would not act; its name is in the message.
        UnsupportedModelError: the model cannot be decoded so.
    """
    model, input_ids = asked.model, asked.input_ids
    target = adapt(model)
    fitted = method.fit(target)
    check_inputs(model, input_ids, asked.model_kwargs, given)
    requests = split_rows(model.config, input_ids, asked.model_kwargs)
    guides = [item for item in asked.processors if type(item) is Guidance]
    others = LogitsProcessorList([item for item in asked.processors if item not in guides])
    sampler = read_sampler(asked.config, others, len(requests))
    for guide in guides:
        sampler = replace(sampler, guidance_scale=guide.guidance_scale)
        requests = [guided(request, target, guide, row) for row, request in enumerate(requests)]
    stopping = read_stopping(asked.config, asked.criteria, input_ids.shape[1])
    fitted.drafter.admit(requests, sampler, stopping)
    check_reach(model, [len(request.prompt_tokens) for request in requests], stopping.max_new_tokens)
    key = draw_seed() if seed is None else seed
    random = RandomStream.from_seed(key, len(requests), input_ids.device)
    padded = input_ids.tolist()  # processors and criteria of generate count the padding as well
    return fitted.call(target, sampler, requests, stopping, random, padded)


def carry_out(call: Call, asked: Asked) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode a call to its end; return what `generate` returns, or raise the NumericalError of a row."""
    done, config = 0, asked.config
    for _ in call.rounds():
        if asked.streamer is not None:
            done = put_steps(asked.streamer, call.canvas, filler_of(config), done)
    if asked.streamer is not None:
        asked.streamer.end()
    call.raise_errors()
    result = pad_outputs(asked.input_ids, call.canvas.outputs(), config)
    if not config.return_dict_in_generate:
        return result
    return GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, result))


def build(name: str, drafter: Drafter | None, options: dict[str, Any]) -> Accelerator:
    """Build the accelerator of a name, with a loaded draft model or head where it needs one."""
    if METHODS[name].needs is not None and not isinstance(drafter, PreTrainedModel):
        raise InputError("drafter", drafter, f"a loaded draft model, which {name!r} needs")
    found: Any = find_drafter(name, drafter)
    if found is None:
        return build_accelerator(name, **options)
    model = check_head(name, found) if name in HEADS else found
    return build_accelerator(name, model=model, **options)


def read_sampler(config: GenerationConfig, processors: LogitsProcessorList, rows: int) -> Sampler:
    """Convert generate's prepared processors into a Sampler, which warps all nodes at once."""
    drawn = [item.temperature for item in processors if type(item) is TemperatureLogitsWarper]
    greedy = not config.do_sample or min(drawn, default=1.0) < LEAST_TEMPERATURE
    if greedy:  # no logit is divided by next to nothing, and truncation keeps the likeliest token
        processors = LogitsProcessorList(item for item in processors if type(item) not in WARPERS)
    others, warpers = split_warpers(processors)
    per_row = [row_processors(others, row) for row in range(rows)] if others else []
    if greedy:
        return Sampler(processors=per_row)
    told = {WARPERS[type(item)]: getattr(item, WARPERS[type(item)]) for item in warpers or ()}
    return Sampler(**{"temperature": 1.0, **told}, processors=per_row)


def guided(request: Request, target: Target[Any], guide: Guidance, row: int) -> Request:
    """The request of a masked model with its unconditional prompt: the caller's, or the model's own.

    Raises:
        InputError: there is neither.
    """
    context: dict[str, Any] = guide.unconditional_context
    ids, mask = context["input_ids"], context["attention_mask"]
    if ids is None:
        negative = target.unconditional(request.inputs)
        if negative is None:
            raise InputError("guidance_scale", guide.guidance_scale, "1, or `negative_prompt_ids` beside it")
        return replace(request, negative_inputs=negative)
    own = ids[row % len(ids)]
    own = own if mask is None else own[mask[row % len(mask)].bool()]
    return replace(request, negative_inputs={"input_ids": own[None]})


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
    longest, filler = max(map(len, outputs)), filler_of(config)
    padded = [row + [filler] * (longest - len(row)) for row in outputs]
    return torch.cat([input_ids, torch.tensor(padded, dtype=torch.long, device=input_ids.device)], dim=1)


def filler_of(config: GenerationConfig) -> int:
    """The token that rows which have ended are filled with."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    return int(config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id or 0)


class Usable(LogitsProcessor):
    """Raises NumericalError where no token can be chosen, which `generate` does not look at."""

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        failed = scores.isnan().any(-1)
        if len(scores) == 1:  # of several rows, some may have ended, and exclude what they like
            failed |= ~scores.isfinite().any(-1)
        if bool(failed.any()):
            row = int(failed.int().argmax())
            raise NumericalError(row, input_ids.shape[1] - self._prompt_length, NOT_FINITE)
        return scores


def decode_plainly(
    asked: Asked, seed: int | None
) -> tuple[Tensor | GenerateDecoderOnlyOutput, DecodingStats] | None:
    """Decode a batch by the loop of transformers itself, where a processor or a criterion counts on it.

    Returns:
        What `generate` returns, and statistics; None, and nothing is done, where all of them know their row.

    Raises:
        NumericalError: a row's logits are no numbers.
        InputError: the model has no next token.
    """
    # a criterion of one row is asked after each token of it, as by `generate`
    input_ids = asked.input_ids
    callbacks = (*asked.processors, *(asked.criteria if len(input_ids) > 1 else ()))
    strangers = [item for item in callbacks if not knows_its_row(item)]
    by_blocks = bool(strangers) and has_no_next_token(asked.model)
    if by_blocks:  # guided by the sampler
        strangers = [item for item in strangers if type(item) is not Guidance]
    if not strangers:
        return None
    if by_blocks:
        is_processor = strangers[0] in asked.processors
        allowed = "none that may keep a state, or look at other tokens: this model has no next token"
        name = "logits_processor" if is_processor else "stopping_criteria"
        raise InputError(name, type(strangers[0]).__name__, allowed)
    for item in strangers:
        say_why_plain(item)
    prompt = input_ids.shape[1]
    started = perf_counter()
    with ExitStack() as stack:
        if seed is not None:
            devices = [input_ids.device] if input_ids.is_cuda else []
            stack.enter_context(torch.random.fork_rng(devices))
            torch.manual_seed(int(seed) % 2**63)
        output = asked.by_transformers(Usable(prompt))
    tokens = (output if isinstance(output, Tensor) else output.sequences)[:, prompt:]
    counts = lengths_of(tokens, asked.criteria)
    rounds = [max(count - 1, 0) for count in counts]
    stats = DecodingStats(
        new_tokens=counts,
        rounds=rounds,
        target_forwards=tokens.shape[1],
        drafted=[0] * len(counts),
        accepted=[0] * len(counts),
        accepted_histograms=[Counter({0: count} if count else {}) for count in rounds],
        seconds=perf_counter() - started,
    )
    return output, stats


def has_no_next_token(model: Any) -> bool:
    """True for models that decide places of a block, which the loop of transformers would decode wrongly."""
    with suppress(InputError, UnsupportedModelError):
        return adapt(model).by_blocks
    return False


def lengths_of(tokens: Tensor, criteria: StoppingCriteriaList) -> list[int]:
    """Tokens of each row up to its end token, where it has one."""
    known = [item for item in criteria if isinstance(item, EosTokenCriteria)]
    ends = {end for item in known for end in item.eos_token_id.tolist()}
    found = []
    for row in tokens.tolist():
        first = next((index for index, token in enumerate(row) if token in ends), len(row) - 1)
        found.append(first + 1)
    return found


def put_steps(streamer: BaseStreamer, canvas: Canvas, filler: int, done: int) -> int:
    """Put out, as tensors [B] on the CPU, steps that all rows have reached by now; returns their number."""
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
