"""Calls of `generate` that its own loop decodes, because processors or criteria count on it."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from mmspec.decoding.canvas import NOT_FINITE
from mmspec.decoding.stats import DecodingStats
from mmspec.errors import NumericalError
from mmspec.pipelines.token_processors import knows_its_row, say_why_plain

__all__ = ["decode_plainly"]


def strangers_of(processors: LogitsProcessorList, criteria: StoppingCriteriaList, rows: int) -> list[Any]:
    """Processors that may keep a state or know the batch; of several rows, criteria too.

    A criterion of one row is asked after each token of it, as by `generate`.
    """
    return [item for item in (*processors, *(criteria if rows > 1 else ())) if not knows_its_row(item)]


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
    model: PreTrainedModel,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: BaseStreamer | None,
    seed: int | None,
    model_kwargs: dict[str, Any],
) -> tuple[Tensor | GenerateDecoderOnlyOutput, DecodingStats] | None:
    """Decode a batch by the loop of transformers itself, where a processor or a criterion counts on it.

    Arguments are as `generate` hands them to a loop.

    Args:
        seed: of torch's generators during the call; None leaves them as they are.

    Returns:
        What `generate` returns, and statistics; None, and nothing is done, where all of them know their row.

    Raises:
        NumericalError: a row's logits are no numbers.
    """
    strangers = strangers_of(processors, criteria, len(input_ids))
    if not strangers:
        return None
    for item in strangers:
        say_why_plain(item)
    prompt = input_ids.shape[1]
    guarded = LogitsProcessorList([*processors, Usable(prompt)])
    started = perf_counter()
    with ExitStack() as stack:
        if seed is not None:
            devices = [input_ids.device] if input_ids.is_cuda else []
            stack.enter_context(torch.random.fork_rng(devices))
            torch.manual_seed(int(seed) % 2**63)
        kind: Any = type(model)  # `generate` takes the loop of the class, for greedy decoding and for draws
        output: Tensor | GenerateDecoderOnlyOutput = kind._sample(
            model,
            input_ids,
            logits_processor=guarded,
            stopping_criteria=criteria,
            generation_config=config,
            streamer=streamer,
            **model_kwargs,
        )
    tokens = (output if isinstance(output, Tensor) else output.sequences)[:, prompt:]
    counts = lengths_of(tokens, criteria)
    steps = tokens.shape[1]
    rounds = [max(count - 1, 0) for count in counts]
    stats = DecodingStats(
        new_tokens=counts,
        rounds=rounds,
        target_forwards=steps,
        drafted=[0] * len(counts),
        accepted=[0] * len(counts),
        accepted_histograms=[Counter({0: count} if count else {}) for count in rounds],
        seconds=perf_counter() - started,
    )
    return output, stats


def lengths_of(tokens: Tensor, criteria: StoppingCriteriaList) -> list[int]:
    """Tokens of each row up to its end token, where it has one."""
    known = [item for item in criteria if isinstance(item, EosTokenCriteria)]
    ends = {end for item in known for end in item.eos_token_id.tolist()}
    found = []
    for row in tokens.tolist():
        first = next((index for index, token in enumerate(row) if token in ends), len(row) - 1)
        found.append(first + 1)
    return found
