"""Logits processors and stopping criteria: built by transformers' own code, and asked as their kind allows.

What is known to depend on a token's path alone is called for every node of a draft, a row at a time. Anything
else may keep a state, or know the batch: it is called as `generate` calls it, in lock step.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
    WatermarkingConfig,
)
from transformers.generation import logits_process

from mmspec.core.canvas import Stopping
from mmspec.core.lockstep import Lockstep
from mmspec.core.sampling import Sampler, values_of
from mmspec.errors import InputError
from mmspec.pipelines.callbacks import CheckedProcessor, checked
from mmspec.pipelines.settings import GenerationSettings, are_token_ids
from mmspec.validation import is_integer, require_number

__all__ = [
    "knows_its_row",
    "row_processors",
    "say_why_plain",
    "shaping_of",
    "truncation_of",
    "with_processors",
]

logger = logging.getLogger("mmspec")
#: Attribute by which the author of a processor, a criterion or a `prefix_allowed_tokens_fn` declares it pure.
DECLARED = "depends_on_path_alone"
#: Processors of transformers whose result is a function of the ids they are given, and of plain numbers.
OF_PATH = {
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
}  # fmt: skip
OF_ROWS = {EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria}
#: Processors that do what a `Sampler` does, in the order of transformers.
WARPERS = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
)
#: Tensors of theirs that hold a row for each prompt.
ROWS_HELD = ("prompt_ignore_length", "encoder_input_ids")
#: Settings of processors, with the values that make none, besides None.
SHAPING: dict[str, Any] = {
    "bad_words_ids": None, "begin_suppress_tokens": None, "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0, "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "min_length": 0, "min_new_tokens": 0,
    "no_repeat_ngram_size": 0, "remove_invalid_values": False, "repetition_penalty": 1.0,
    "sequence_bias": None, "suppress_tokens": None, "watermarking_config": None,
}  # fmt: skip
#: The same for what comes after temperature, top_k, top_p and min_p, of draws alone.
TRUNCATING: dict[str, Any] = {"top_h": None, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}


def knows_its_row(callback: Any) -> bool:
    """True if a processor or criterion may be asked about one row and one path at a time, in any order."""
    if type(callback) is logits_process.PrefixConstrainedLogitsProcessor:
        return declares(callback._prefix_allowed_tokens_fn) and callback._num_beams in (None, 1)
    if type(callback) is logits_process.EncoderNoRepeatNGramLogitsProcessor:
        return bool(callback.batch_size == 1)
    return type(callback) in OF_PATH | OF_ROWS or declares(callback)


def declares(callback: Any) -> bool:
    """True if its author declares that it depends on the path alone."""
    return getattr(callback, DECLARED, False) is True


def row_processors(processors: Iterable[Any], row: int) -> LogitsProcessorList:
    """Processors of a batch for one row of it: those that hold something for every row get their own."""
    chosen = LogitsProcessorList()
    for item in processors:
        if type(item) is logits_process.PrefixConstrainedLogitsProcessor:

            def own(_: int, ids: Tensor, allowed: Any = item._prefix_allowed_tokens_fn) -> Any:
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
    settings: Mapping[str, Any],
    ids: Tensor,
    ends: Sequence[int],
    max_length: int,
    user: LogitsProcessorList,
    allowed_tokens: Any = None,
    mask: Tensor | None = None,
) -> LogitsProcessorList:
    """Build the processors of prompts [B, L] by transformers' own code, in its order.

    Raises:
        InputError: transformers refuses a setting; which one is found by building each alone.
    """

    def build(some: Mapping[str, Any], mine: LogitsProcessorList, allowed: Any) -> LogitsProcessorList:
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
                raise InputError(name, value, f"what transformers takes: {own}") from own
        raise error


@cache
def empty_config() -> GenerationConfig:
    """A generation config with no processor in it."""
    return GenerationConfig(num_beams=1, num_return_sequences=1)


def say_why_plain(callback: Any) -> None:
    """Log, once for each kind of callback, why calls with it are decoded a token at a time."""
    warn_of(getattr(callback, "__qualname__", type(callback).__qualname__))


@cache
def warn_of(name: str) -> None:
    logger.warning(
        "%s may keep a state or know the batch, so calls with it are decoded plainly, a token at a time, as "
        "generate would; if it depends on the ids of a row alone, set its attribute %s = True",
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
    """Add what a call's settings do to logits, token by token, to the sampler and stopping of its rows.

    Raises:
        InputError: a value that transformers does not take, or settings that cannot go together.
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
    mine = {id(item.callback): item for item in user}
    own = LogitsProcessorList([item.callback for item in user])

    def build(ids: list[list[int]], row: int, mask: list[list[int]] | None = None) -> LogitsProcessorList:
        tokens = torch.tensor(ids, device=device)
        seen = None if mask is None else torch.tensor(mask, device=device)
        values = {**shaping, **({**kept[row], **truncating} if kept[row] else {})}
        ends, most = settings.end_token_ids(), tokens.shape[1] + stopping.max_new_tokens
        return build_processors(model, values, tokens, ends, most, own, asked, seen)

    def wrapped(processors: Sequence[Any]) -> LogitsProcessorList:
        return LogitsProcessorList([mine.get(id(item), item) for item in processors])

    rows = [build([ids], row) for row, ids in enumerate(prompts)]
    split = [split_warpers(each) for each in rows]
    # the sampler truncates, where that comes last and is not the caller's own; else processors do all
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
        allowed = "one value for all prompts, beside truncation by processors in lock step"
        raise InputError("temperature, top_k, top_p, min_p", "values that differ by prompt", allowed)
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


def split_warpers(processors: Iterable[Any]) -> tuple[LogitsProcessorList, list[Any] | None]:
    """Split off temperature and truncation, which a `Sampler` does for all nodes of a draft at once.

    Returns:
        The processors before them, and them; all processors and None, where they are doubled, or others stand
        between or behind them, so that all have to be called in their order.
    """
    items = list(processors)
    warpers = [item for item in items if type(item) in WARPERS]
    others = items[: len(items) - len(warpers)]
    order = [WARPERS.index(type(item)) for item in warpers]
    if order != sorted(set(order)) or items[len(others) :] != warpers:
        return LogitsProcessorList(items), None
    return LogitsProcessorList(others), warpers


def truncations(sampler: Sampler, rows: int) -> list[dict[str, Any]]:
    """Temperature and truncation of each row, as fields of a generation config; nothing for greedy rows."""
    settings: list[dict[str, Any]] = []
    for row in range(rows):
        values: dict[str, Any] = {
            name: (given := values_of(getattr(sampler, name)))[row % len(given)]
            for name in ("temperature", "top_k", "top_p", "min_p")
        }
        drawn = {"do_sample": True, **values, "temperature": float(values["temperature"])}
        settings.append(drawn if values["temperature"] else {})
    return settings


def shaping_of(settings: GenerationSettings) -> dict[str, Any]:
    """Settings of processors, for draws or not, that do something."""
    found = {name: value for name in SHAPING if (value := getattr(settings, name)) is not None}
    if settings.min_new_tokens is not None:
        found.pop("min_length", None)
    return {name: value for name, value in found.items() if value != SHAPING[name]}


def truncation_of(settings: GenerationSettings) -> dict[str, Any]:
    """Truncation that our own sampler does not do, where it does something to a draw.

    Raises:
        InputError: a value outside its range.
    """
    found = {name: value for name in TRUNCATING if (value := getattr(settings, name)) is not None}
    for name, value in found.items():
        require_number(name, value, 0.0, 1.0, "0 to 1")
    drawn = {name: float(value) for name, value in found.items() if value != TRUNCATING[name]}
    return drawn if settings.do_sample else {}


def check_shaping(found: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """Check settings of processors; return them as transformers takes them.

    Raises:
        InputError: a value outside its range, or token ids that are not below the vocabulary's size.
    """
    for name, value in found.items():
        check_value(name, value, vocabulary)
    checked = {
        name: float(value) if name.endswith("repetition_penalty") else value for name, value in found.items()
    }
    if isinstance(marks := found.get("watermarking_config"), dict):
        checked["watermarking_config"] = WatermarkingConfig.from_dict(marks)
    return checked


def check_value(name: str, value: Any, vocabulary: int) -> None:
    """Raise InputError for a setting of processors that transformers takes, or ignores, as it should not."""
    ids = value if isinstance(value, list | tuple) else [value]
    if name.endswith("repetition_penalty"):
        require_number(name, value, 0.0, 1e4, "above 0", open_below=True)
    elif name.endswith("no_repeat_ngram_size") and value != 0:
        if not is_integer(value) or value < 1:
            raise InputError(name, value, "a positive integer")
    elif name in ("min_length", "min_new_tokens"):
        if not is_integer(value) or value < 0:
            raise InputError(name, value, "an integer of at least 0")
    elif name == "bad_words_ids":
        if not isinstance(value, list | tuple) or not value or not all(map(are_token_ids, value)):
            raise InputError(name, value, "lists of token ids, one for each word")
        if not all(value) or max(map(max, value)) >= vocabulary:
            raise InputError(name, value, f"lists of token ids below {vocabulary}, with at least one id each")
    elif name == "remove_invalid_values":
        if not isinstance(value, bool):
            raise InputError(name, value, "True or False")
    elif name.startswith("forced_"):
        if not are_token_ids(ids) or not ids or max(ids) >= vocabulary:
            raise InputError(name, value, f"a token id below {vocabulary}, or a list of them")
    elif name.endswith("suppress_tokens") and (ids is not value or not all(map(is_integer, ids))):
        raise InputError(name, value, "a list of token ids")
