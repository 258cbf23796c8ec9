"""Calls of the loop by the contract tests, and targets that record them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from mmspec.core.cache import RaggedCache
from mmspec.core.canvas import Canvas, Emission, Stopping
from mmspec.core.decoder import Decoder
from mmspec.core.draft import Nodes
from mmspec.core.image_grid import ImageGrid
from mmspec.core.interfaces import AcceptanceRule, Drafter, PromptOutput, Request, Target, TargetOutput
from mmspec.core.loop import speculate
from mmspec.core.plain import NoDrafter
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.core.statistics import DecodingStats
from mmspec.targets.causal import CausalState, CausalTarget
from mmspec.trees.matching import SampleAndMatch

Prompt = Sequence[int]


@dataclass(frozen=True)
class Run:
    """Result of one call of the loop."""

    outputs: list[list[int]]
    stats: DecodingStats
    canvas: Canvas
    emissions: list[Emission]

    def from_draft(self, step: int) -> list[int]:
        """Return the number of tokens per row that a round took from its draft."""
        taken = []
        for row, flags in enumerate(self.canvas.drafted):
            start, end = (sum(len(each.tokens[row]) for each in self.emissions[:k]) for k in (step, step + 1))
            taken.append(sum(flags[start:end]))
        return taken


def as_request(prompt: Prompt, negative: Prompt | None = None, grid: ImageGrid | None = None) -> Request:
    def inputs(ids: Prompt) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([list(ids)], device="cpu")}

    return Request(inputs(prompt), None, None if negative is None else inputs(negative), grid)


def decode(
    target: Target,
    prompts: Sequence[Prompt],
    drafter: Drafter | None = None,
    rule: AcceptanceRule | None = None,
    sampler: Sampler | None = None,
    *,
    max_new_tokens: int = 64,
    seed: int | Sequence[int] = 0,
    end: Iterable[int] = (),
    criteria: Sequence[StoppingCriteria] = (),
    negatives: Sequence[Prompt] | None = None,
    grid: ImageGrid | None = None,
    watch: Callable[[Canvas], None] = lambda canvas: None,
) -> Run:
    """Run the loop to its end, calling `watch` after every round. The defaults are plain greedy decoding."""
    pairs = [
        (tuple(prompt), tuple(negative))
        for prompt, negative in zip(prompts, negatives or prompts, strict=True)
    ]
    # equal rows share one request, because a sample has thousands of them
    known = {pair: as_request(pair[0], pair[1] if negatives else None, grid) for pair in set(pairs)}
    requests = [known[pair] for pair in pairs]
    stopping = Stopping(max_new_tokens, frozenset(end), StoppingCriteriaList(criteria))
    stats = DecodingStats()
    canvas = Canvas(prompts, stopping, stats, target.device)  # type: ignore[arg-type]
    random = RandomStream.from_seed(seed, len(prompts))
    drafter, rule = drafter or NoDrafter(), rule or SampleAndMatch()
    if drafter.is_plain and (plain := target.plain_decoding()) is not None:
        drafter, rule = plain[0], plain[1] or rule
    roles = target, Decoder(drafter, rule), sampler or Sampler()
    emissions = []
    for step in speculate(*roles, requests, canvas, random):
        emissions.append(step.emission)
        watch(canvas)
    return Run(canvas.outputs(), stats, canvas, emissions)


def canvas_of(ids: Sequence[Sequence[int]], emitted: int) -> Canvas:
    """A canvas whose rows end in `emitted` output tokens."""
    prompts = [list(row[: len(row) - emitted]) for row in ids]
    canvas = Canvas(prompts, Stopping(emitted + 64), DecodingStats(), torch.device("cpu"))
    canvas.reserve(emitted + 64)
    output = torch.tensor([list(row[len(row) - emitted :]) for row in ids])
    canvas.decide(torch.arange(emitted).expand_as(output), output, torch.ones_like(output, dtype=torch.bool))
    canvas.ids, canvas.emitted = [list(row) for row in ids], torch.full((len(ids),), emitted)
    canvas.output_lengths = [emitted] * len(ids)
    return canvas


def random_prompts(
    count: int, vocabulary: int = 64, shortest: int = 2, longest: int = 12, seed: int = 0
) -> list[Prompt]:
    """Prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


def generate(
    model: PreTrainedModel, prompt: Prompt, max_new_tokens: int = 64, **settings: object
) -> list[int]:
    """New tokens of transformers' own greedy `generate`."""
    ids = torch.tensor([list(prompt)])
    settings = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False} | settings
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, **settings)
    return out[0, ids.shape[1] :].tolist()


def futures(
    target: Target, prompts: Sequence[Prompt], sampler: Sampler | None = None, **settings: object
) -> dict[tuple[int, ...], list[int]]:
    """Continuations of prompts by plain decoding, for an oracle."""
    outputs = decode(target, prompts, sampler=sampler, **settings).outputs  # type: ignore[arg-type]
    return {tuple(prompt): output for prompt, output in zip(prompts, outputs, strict=True)}


class Recorder(CausalTarget):
    """A causal target that exposes its state and counts the nodes of its forward passes."""

    state: CausalState

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.nodes: list[int] = []

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[CausalState, PromptOutput]:
        self.state, output = super().prefill(prompts, capacity, taps)
        return self.state, output

    def score_nodes(self, state: CausalState, nodes: Nodes) -> TargetOutput:
        self.nodes.append(nodes.tokens.shape[1])
        return super().score_nodes(state, nodes)


def fan_out(one: RaggedCache, target: CausalTarget, rows: int, capacity: int) -> RaggedCache:
    """Copy the cache of one prompt into each of many rows."""
    many = RaggedCache(target.config, rows, capacity, target.device)
    for source, layer in zip(one.ragged, many.ragged, strict=True):
        layer.hold(*(buffer.repeat(rows, 1, 1, 1) for buffer in source.buffers))
        layer.is_initialized = True
    many.lengths += one.lengths
    many.longest = one.longest
    return many


class FanOutTarget(CausalTarget):
    """A causal target that runs equal prompts once, so that thousands of rows start quickly."""

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[CausalState, PromptOutput]:
        ids = torch.cat([prompt["input_ids"] for prompt in prompts])
        rows = len(ids)
        assert (ids == ids[0]).all()
        one, output = super().prefill(prompts[:1], capacity, taps)
        many = fan_out(one.cache, self, rows, capacity)
        offset, lengths = one.offset.repeat(rows), one.prompt_lengths * rows
        state = replace(one, cache=many, offset=offset, prompt_lengths=lengths)
        shared = {tap: known * rows for tap, known in output.taps.items()}
        return state, PromptOutput(output.logits.expand(rows, -1, -1), shared)
