"""Logits processors and stopping criteria: built by transformers' own code, and asked as their kind allows.

What is known to depend on a token's path alone is called for every node of a draft, a row at a time. Anything
else may keep a state, or know the batch: it is called as `generate` calls it, in lock step.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
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
    StopStringCriteria,
)
from transformers.generation import logits_process

from mmspec.errors import InputError

__all__ = ["DECLARED", "build_processors", "knows_its_row", "row_processors", "say_why_plain"]

logger = logging.getLogger("mmspec")

#: Attribute by which the author of a processor, a criterion or a `prefix_allowed_tokens_fn` declares it pure.
DECLARED = "depends_on_path_alone"
#: Processors of transformers whose result is a function of the ids they are given, and of plain numbers.
OF_PATH = frozenset(
    {
        logits_process.EncoderRepetitionPenaltyLogitsProcessor,
        logits_process.EpsilonLogitsWarper,
        logits_process.EtaLogitsWarper,
        logits_process.ExponentialDecayLengthPenalty,
        logits_process.ForcedBOSTokenLogitsProcessor,
        logits_process.ForcedEOSTokenLogitsProcessor,
        logits_process.InfNanRemoveLogitsProcessor,
        logits_process.LogitNormalization,
        logits_process.MinLengthLogitsProcessor,
        logits_process.MinNewTokensLengthLogitsProcessor,
        logits_process.MinPLogitsWarper,
        logits_process.NoBadWordsLogitsProcessor,
        logits_process.NoRepeatNGramLogitsProcessor,
        logits_process.RepetitionPenaltyLogitsProcessor,
        logits_process.SequenceBiasLogitsProcessor,
        logits_process.SuppressTokensAtBeginLogitsProcessor,
        logits_process.SuppressTokensLogitsProcessor,
        logits_process.TemperatureLogitsWarper,
        logits_process.TopHLogitsWarper,
        logits_process.TopKLogitsWarper,
        logits_process.TopPLogitsWarper,
        logits_process.TypicalLogitsWarper,
        logits_process.WatermarkLogitsProcessor,
    }
)
OF_ROWS = frozenset({EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria})
#: Tensors of theirs that hold a row for each prompt.
ROWS_HELD = ("prompt_ignore_length", "encoder_input_ids")


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
            allowed = partial(told_its_row, item._prefix_allowed_tokens_fn, row)
            item = logits_process.PrefixConstrainedLogitsProcessor(allowed, 1)
        elif type(item) in OF_PATH:
            for name in ROWS_HELD:
                if isinstance(held := getattr(item, name, None), Tensor) and len(held) > 1:
                    item = copy.copy(item)
                    setattr(item, name, held[row : row + 1])
        chosen.append(item)
    return chosen


def told_its_row(function: Any, row: int, _: int, ids: Tensor) -> Any:
    """Ask a `prefix_allowed_tokens_fn` about a row that is processed by itself."""
    return function(row, ids)


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
    """Build the processors of a batch by transformers' own code, in its order.

    Args:
        model: whose config is looked at.
        settings: fields of a generation config that are set away from their defaults.
        ids: [B, L] the prompts.
        ends: ids that end a row.
        max_length: of prompt and output.
        user: the caller's own.
        allowed_tokens: `prefix_allowed_tokens_fn`.
        mask: [B, L] False at padding, if there is any.

    Raises:
        InputError: transformers refuses a setting.
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
    """Log it for a name."""
    logger.warning(
        "%s may keep a state or know the batch, so calls with it are decoded plainly, a token at a time, as "
        "generate would; if it depends on the ids of a row alone, set its attribute %s = True",
        name,
        DECLARED,
    )
