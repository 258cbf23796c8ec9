"""A batch with its logits processors and criteria: each row's own along drafts, or all rows in lock step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from mmspec.decoding.canvas import Stopping
from mmspec.decoding.lockstep import Lockstep
from mmspec.decoding.row_settings import values_of
from mmspec.decoding.sampling import Sampler
from mmspec.errors import InputError
from mmspec.pipelines.callbacks import CheckedProcessor, checked
from mmspec.pipelines.settings import GenerationSettings
from mmspec.pipelines.shaping import check_shaping, shaping_of, truncation_of
from mmspec.pipelines.token_processors import (
    build_processors,
    knows_its_row,
    row_processors,
    say_why_plain,
)

__all__ = ["with_processors"]


def with_processors(
    settings: GenerationSettings,
    sampler: Sampler,
    stopping: Stopping,
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    filler: int,
    device: torch.device,
) -> tuple[Sampler, Stopping]:
    """Add what a call's settings do to logits, token by token.

    Args:
        settings: of the call.
        sampler, stopping: of the batch so far.
        model: whose config transformers looks at.
        prompts: token ids of the B rows.
        filler: token that pads, where callbacks see rows of several lengths.
        device: of the logits.

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
    # draws are truncated by what our sampler lacks, or marked at the end: processors do all, in order
    last = bool(truncating) or (not sampler.greedy and "watermarking_config" in shaping)
    kept = truncations(sampler, len(prompts)) if last else [{}] * len(prompts)
    bare = without_truncation(sampler, len(prompts)) if last else sampler
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
    strangers = [item for item in rows[0] if not knows_its_row(item)] + strangers
    if not strangers:
        processors = [wrapped(row_processors(each, row)) for row, each in enumerate(rows)]
        return replace(bare, processors=processors if any(processors) else ()), stopping

    if any(values != kept[0] for values in kept):
        allowed = "one value for all prompts, beside truncation by processors in lock step"
        raise InputError("temperature, top_k, top_p, min_p", "values that differ by prompt", allowed)
    for item in strangers:
        say_why_plain(item)
    longest = max(map(len, prompts))
    padded = [[filler] * (longest - len(ids)) + ids for ids in prompts]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
    together = build(padded, 0, mask if any(len(ids) < longest for ids in prompts) else None)
    lengths = tuple(map(len, prompts))
    lockstep = Lockstep(wrapped(together), stopping.criteria, lengths, filler)
    stopping = replace(stopping, criteria=StoppingCriteriaList(), lockstep=lockstep)
    return replace(bare, processors=[lockstep] * len(prompts)), stopping


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


def without_truncation(sampler: Sampler, rows: int) -> Sampler:
    """The sampler, where processors have done what temperature and truncation do."""
    temperatures = values_of(sampler.temperature)
    drawn = [float(temperatures[row % len(temperatures)] > 0) for row in range(rows)]
    return replace(sampler, temperature=drawn, top_k=None, top_p=None, min_p=None)
