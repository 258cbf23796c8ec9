"""Requests decoded by the loop, and by `generate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from mmspec.accelerator import Accelerator
from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.interfaces import Request
from mmspec.core.loop import speculate
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.core.statistics import DecodingStats
from mmspec.targets import CausalTarget
from mmspec.trees.matching import SampleAndMatch
from tests.oracles import OracleDrafter

__all__ = ["GreedyRun", "decode", "generate", "interleave", "oracle"]


class GreedyRun:
    """One greedy call of the loop: iterate it to decode, then read `outputs` and `stats`."""

    def __init__(
        self,
        target: CausalTarget,
        accelerator: Accelerator,
        inputs: Sequence[Mapping[str, Any]],
        stopping: Stopping,
    ) -> None:
        self.stats = DecodingStats()
        requests = [Request(row) for row in inputs]
        prompts = [request.prompt_tokens for request in requests]
        self.canvas = Canvas(prompts, stopping, self.stats, target.device)
        stream = RandomStream.from_seed(0, len(requests))
        self._steps = speculate(target, accelerator.decoder, Sampler(), requests, self.canvas, stream)

    def __iter__(self) -> Iterator[Any]:
        return self._steps

    @property
    def outputs(self) -> list[list[int]]:
        """The new tokens of each row."""
        return self.canvas.outputs()


def decode(
    target: CausalTarget, accelerator: Accelerator, inputs: Sequence[Mapping[str, Any]], stopping: Stopping
) -> GreedyRun:
    """Run a batch to its end."""
    run = GreedyRun(target, accelerator, inputs, stopping)
    for _ in run:
        pass
    return run


def interleave(*runs: GreedyRun) -> None:
    """Run several calls in turns, one round each, until all are done."""
    waiting = [iter(run) for run in runs]
    done = object()
    while waiting:
        waiting = [steps for steps in waiting if next(steps, done) is not done]


@torch.inference_mode()
def generate(model: PreTrainedModel, inputs: Mapping[str, Any], new_tokens: int) -> list[int]:
    """The greedy output of transformers itself, without the prompt."""
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=new_tokens)
    return tokens[0, inputs["input_ids"].shape[1] :].tolist()


def oracle(
    inputs: Sequence[Mapping[str, Any]],
    answers: Sequence[list[int]],
    depth: int,
    vocabulary: int,
    corruption: float = 0.0,
) -> Accelerator:
    """Draft the answers with a wrong sibling before each token, so that accepted nodes are not contiguous."""
    prompts = [tuple(row["input_ids"][0].tolist()) for row in inputs]
    drafter = OracleDrafter(
        dict(zip(prompts, answers, strict=True)), depth, vocabulary, corruption, siblings=1
    )
    return Accelerator("oracle", drafter, SampleAndMatch())
