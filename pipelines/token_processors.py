"""Logits processors and stopping criteria, built by transformers' own code.

A processor that depends on the tokens of its row alone acts on every node of a draft: on all at once, if
`mmspec.core.processors` knows it, else on one at a time. Any other processor may keep state or depend on the
batch; it is called as in `generate`, in lock step, and the call is decoded without drafts.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
    WatermarkingConfig,
)
from transformers.generation import logits_process

from mmspec.call_fields import CUTOFFS, SHAPING, TOKEN_IDS, WORDS, CallField, check_fields
from mmspec.core.canvas import Stopping
from mmspec.core.grammar import GrammarProcessor
from mmspec.core.lockstep import Lockstep
from mmspec.core.processors import CountPenaltyLogitsProcessor, is_known
from mmspec.core.sampling import Sampler, values_of
from mmspec.errors import InputError
from mmspec.open_types import Keywords
from mmspec.pipelines.callbacks import CheckedProcessor, checked
from mmspec.pipelines.settings import GenerationSettings
from mmspec.validation import is_list

__all__ = [
    "knows_its_row",
    "row_processors",
    "say_why_plain",
    "shaping_of",
    "truncation_of",
    "with_processors",
]

logger = logging.getLogger("mmspec")
#: Attribute by which a processor, criterion or `prefix_allowed_tokens_fn` declares that it is pure.
DECLARED = "depends_on_path_alone"
#: Processors whose result depends on the given ids and on constants alone.
OF_PATH = {
    CountPenaltyLogitsProcessor,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor, logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper, logits_process.ExponentialDecayLengthPenalty,
    logits_process.ForcedBOSTokenLogitsProcessor, logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor, logits_process.LogitNormalization,
    logits_process.MinLengthLogitsProcessor, logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.MinPLogitsWarper, logits_process.NoBadWordsLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor, logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor, logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor, logits_process.TemperatureLogitsWarper,
    logits_process.TopHLogitsWarper, logits_process.TopKLogitsWarper, logits_process.TopPLogitsWarper,
    logits_process.TypicalLogitsWarper, logits_process.WatermarkLogitsProcessor,
    logits_process.WhisperTimeStampLogitsProcessor,
}  # fmt: skip
OF_ROWS = {EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria}
#: Processors that a `Sampler` replaces, in the order of transformers, and the setting of each.
WARPERS: dict[type, str] = {
    logits_process.TemperatureLogitsWarper: "temperature",
    logits_process.TopKLogitsWarper: "top_k",
    logits_process.TopPLogitsWarper: "top_p",
    logits_process.MinPLogitsWarper: "min_p",
}
COUNTED = ("presence_penalty", "frequency_penalty")
#: Attributes of processors that hold a tensor with one row for each prompt.
ROWS_HELD = ("prompt_ignore_length", "encoder_input_ids")

#: `prefix_allowed_tokens_fn` of transformers: a function of a row index and its ids.
AllowedTokens: TypeAlias = Callable[[int, Tensor], list[int]]


def knows_its_row(callback: Any) -> bool:
    """Whether a processor or criterion may be called for one row and one path at a time, in any order."""
    if type(callback) is logits_process.PrefixConstrainedLogitsProcessor:
        return declares(callback._prefix_allowed_tokens_fn) and callback._num_beams in (None, 1)
    if type(callback) is logits_process.EncoderNoRepeatNGramLogitsProcessor:
        return bool(callback.batch_size == 1)
    return type(callback) in OF_PATH | OF_ROWS or declares(callback)


def declares(callback: object) -> bool:
    """Whether a callback has `depends_on_path_alone = True`."""
    return getattr(callback, DECLARED, False) is True


def row_processors(processors: Iterable[LogitsProcessor], row: int) -> LogitsProcessorList:
    """Return the processors of a batch for one of its rows; processors with per-row tensors are copied."""
    chosen = LogitsProcessorList()
    for item in processors:
        if isinstance(item, GrammarProcessor):
            if (own_grammar := item.of_row(row)) is None:
                continue
            item = own_grammar
        elif type(item) is logits_process.PrefixConstrainedLogitsProcessor:

            def own(
                _: int, ids: Tensor, allowed: AllowedTokens = item._prefix_allowed_tokens_fn
            ) -> list[int]:
                return allowed(row, ids)

            item = logits_process.PrefixConstrainedLogitsProcessor(own, 1)
        elif type(item) in OF_PATH:
            for name in ROWS_HELD:
                if isinstance(held := getattr(item, name, None), Tensor) and len(held) > 1:
                    item = copy.copy(item)
                    setattr(item, name, held[row : row + 1])
        chosen.append(item)
    return chosen


def build_processors(
    model: PreTrainedModel,
    settings: Mapping[str, object],
    ids: Tensor,
    ends: Sequence[int],
    max_length: int,
    user: LogitsProcessorList,
    allowed_tokens: AllowedTokens | None = None,
    mask: Tensor | None = None,
) -> LogitsProcessorList:
    """Build the processors of prompts [B, L] with transformers' own code, in its order.

    Raises:
        InputError: transformers refuses a setting, which is found by building each processor alone.
    """

    def build(
        some: Mapping[str, object], mine: LogitsProcessorList, allowed: AllowedTokens | None
    ) -> LogitsProcessorList:
        config = copy.copy(empty_config())
        for name, value in some.items():
            setattr(config, name, value)
        config.max_length = max_length
        config._eos_token_tensor = torch.tensor(ends, device=ids.device) if ends else None
        built: LogitsProcessorList = GenerationMixin._get_logits_processor(
            model,  # type: ignore[arg-type]
            config,
            input_ids_seq_length=ids.shape[1],
            encoder_input_ids=ids,  # type: ignore[arg-type]
            prefix_allowed_tokens_fn=allowed,
            logits_processor=mine,
            device=str(ids.device),
            model_kwargs={} if mask is None else {"attention_mask": mask},
        )
        return built

    try:
        return build(settings, user, allowed_tokens)
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError) as error:
        for name, value in settings.items():
            try:
                build({name: value}, LogitsProcessorList(), None)
            except (TypeError, ValueError, RuntimeError, IndexError, KeyError) as own:
                raise InputError(name, value, f"is refused by transformers: {own}") from own
        raise error


@cache
def empty_config() -> GenerationConfig:
    """Return a generation config without processors."""
    return GenerationConfig(num_beams=1, num_return_sequences=1)


def say_why_plain(callback: object) -> None:
    """Log, once for each class of callback, why calls with it are decoded plainly."""
    warn_of(getattr(callback, "__qualname__", type(callback).__qualname__))


@cache
def warn_of(name: str) -> None:
    logger.warning(
        "%s may keep state or depend on the batch, so calls with it are decoded plainly, without drafts. "
        "If it depends on the token ids of a row alone, set its attribute %s = True",
        name,
        DECLARED,
    )


def with_processors(
    settings: GenerationSettings,
    sampler: Sampler,
    stopping: Stopping,
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    filler: int,
    device: torch.device,
) -> tuple[Sampler, Stopping]:
    """Add the logits processors of a call's settings to the sampler and stopping conditions of its rows.

    Raises:
        InputError: transformers refuses a value, or settings cannot be combined.
    """
    user = checked(CheckedProcessor, "logits_processor", settings.logits_processor)
    criteria = [] if len(prompts) == 1 else list(settings.stopping_criteria or [])
    strangers = [item for item in criteria if not knows_its_row(item)]
    shaping, truncating = shaping_of(settings), truncation_of(settings)
    asked = settings.prefix_allowed_tokens_fn
    if not (shaping or truncating or user or strangers or asked is not None) or not prompts:
        return sampler, stopping

    shaping = check_shaping(shaping, model.config.get_text_config(decoder=True).vocab_size)
    bare, kept = sampler, truncations(sampler, len(prompts))
    # those of transformers that act on all nodes at once need no check
    mine = {id(item.callback): item for item in user if not is_known(item.callback)}
    own = [item.callback for item in user]

    def build(ids: list[list[int]], row: int, mask: list[list[int]] | None = None) -> LogitsProcessorList:
        tokens = torch.tensor(ids, device=device)
        seen = None if mask is None else torch.tensor(mask, device=device)
        values = {**shaping, **({**kept[row], **truncating} if kept[row] else {})}
        presence, frequency = (values.pop(name, 0.0) for name in COUNTED)
        before = [CountPenaltyLogitsProcessor(presence, frequency, tokens.shape[1])]
        before = before if presence or frequency else []
        ends, most = settings.end_token_ids(), tokens.shape[1] + stopping.max_new_tokens
        return build_processors(
            model, values, tokens, ends, most, LogitsProcessorList([*before, *own]), asked, seen
        )

    def wrapped(processors: Sequence[LogitsProcessor]) -> LogitsProcessorList:
        return LogitsProcessorList([mine.get(id(item), item) for item in processors])

    rows = [build([ids], row) for row, ids in enumerate(prompts)]
    split = [split_warpers(each) for each in rows]
    # the sampler truncates if truncation comes last and is not the caller's own; else the processors do
    ours = all(each is not None and not any(id(item) in mine for item in each) for _, each in split)
    if not ours:
        drawn = [float(bool(values)) for values in kept]
        bare = replace(sampler, temperature=drawn, top_k=None, top_p=None, min_p=None)
    strangers = [item for item in rows[0] if not knows_its_row(item)] + strangers
    if not strangers:
        chosen = [others for others, _ in split] if ours else rows
        processors = [wrapped(row_processors(each, row)) for row, each in enumerate(chosen)]
        return replace(bare, processors=processors if any(processors) else ()), stopping

    if not ours and any(values != kept[0] for values in kept):
        rule = "must have one value for all prompts, with a processor that may keep state"
        raise InputError(", ".join(WARPERS.values()), "values that differ by prompt", rule)
    for item in strangers:
        say_why_plain(item)
    longest = max(map(len, prompts))
    padded = [[filler] * (longest - len(ids)) + ids for ids in prompts]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
    together = build(padded, 0, mask if any(len(ids) < longest for ids in prompts) else None)
    together = split_warpers(together)[0] if ours else together
    lengths = tuple(map(len, prompts))
    lockstep = Lockstep(wrapped(together), stopping.criteria, lengths, filler)
    stopping = replace(stopping, criteria=StoppingCriteriaList(), lockstep=lockstep)
    return replace(bare, processors=[lockstep] * len(prompts)), stopping


def split_warpers(
    processors: Iterable[LogitsProcessor],
) -> tuple[LogitsProcessorList, list[LogitsProcessor] | None]:
    """Split off temperature and truncation, which a `Sampler` applies to all nodes of a draft at once.

    Returns:
        The other processors, and the warpers. All processors and None if a warper occurs twice or is not at
        the end in the usual order: then all have to be called one after another.
    """
    items = list(processors)
    warpers = [item for item in items if type(item) in WARPERS]
    others = items[: len(items) - len(warpers)]
    order = [list(WARPERS).index(type(item)) for item in warpers]
    if order != sorted(set(order)) or items[len(others) :] != warpers:
        return LogitsProcessorList(items), None
    return LogitsProcessorList(others), warpers


def truncations(sampler: Sampler, rows: int) -> list[Keywords]:
    """Return temperature and truncation of each row as generation config fields; {} for greedy rows."""
    settings: list[Keywords] = []
    for row in range(rows):
        values: Keywords = {
            name: (given := values_of(getattr(sampler, name)))[row % len(given)] for name in WARPERS.values()
        }
        drawn = {"do_sample": True, **values, "temperature": float(values["temperature"])}
        settings.append(drawn if values["temperature"] else {})
    return settings


def shaping_of(settings: GenerationSettings) -> Keywords:
    """Return the processor settings with an effect, for greedy decoding and sampling."""
    found = that_act(settings, SHAPING)
    if settings.min_new_tokens is not None:
        found.pop("min_length", None)
    return found


def truncation_of(settings: GenerationSettings) -> Keywords:
    """Return the truncation settings with an effect that mmspec's sampler does not apply itself.

    Raises:
        InputError: a value is out of range.
    """
    check_fields(settings, CUTOFFS)
    found = that_act(settings, CUTOFFS) if settings.do_sample else {}
    return {name: float(value) for name, value in found.items()}


def that_act(settings: GenerationSettings, known: Mapping[str, CallField]) -> Keywords:
    """Return the fields of a group whose value has an effect."""
    found = {name: getattr(settings, name) for name in known}
    return {name: value for name, value in found.items() if value not in (None, known[name].neutral)}


def check_shaping(found: Keywords, vocabulary: int) -> Keywords:
    """Check processor settings; return them in the types that transformers accepts.

    Raises:
        InputError: a value is out of range, or a token id is not below the vocabulary size.
    """
    for name, value in found.items():
        known = SHAPING[name]
        if known.check is not None:
            known.check(name, value)
        if known.check in (TOKEN_IDS, WORDS) and max(ids_in(value), default=vocabulary) >= vocabulary:
            raise InputError(name, value, f"must have token ids below {vocabulary}")
    checked = {
        name: float(value) if name.endswith("repetition_penalty") else value for name, value in found.items()
    }
    if isinstance(marks := found.get("watermarking_config"), dict):
        checked["watermarking_config"] = WatermarkingConfig.from_dict(marks)
    return checked


def ids_in(value: Any) -> list[int]:
    """Return the token ids of a setting that is an id, a list of ids, or a list of lists."""
    return [one for item in value for one in ids_in(item)] if is_list(value) else [value]
