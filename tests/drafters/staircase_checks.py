"""Checks of the staircase, as functions."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmspec.accelerators import build_accelerator
from mmspec.accelerators.accelerator import Accelerator, Call
from mmspec.decoding import cache as cache_module
from mmspec.decoding.cache import RaggedLayer
from mmspec.decoding.canvas import Canvas, Stopping
from mmspec.decoding.image_grid import Grammar, ImageGrid
from mmspec.decoding.interfaces import PromptOutput, Request, Round
from mmspec.decoding.random_stream import Purpose, RandomStream
from mmspec.decoding.sampling import Sampler
from mmspec.decoding.stats import DecodingStats
from mmspec.models.llamagen import LlamaGenConfig, LlamaGenForCausalLM
from mmspec.targets import ImageTokenTarget
from mmspec.targets.image_tokens import ImageState, PromptPair
from mmspec.targets.llamagen import LlamaGenTarget
from tests.contracts import distributions
from tests.contracts.checks import joint_of
from tests.contracts.running import fan_out
from tests.drafters.naive_staircase import naive_image
from tests.tiny_models import randomise, tiny_lm

CODES, GRID, CLASSES = 24, 4, 3
SAMPLES = 4_000  # each is an image with a host's side of its own; the planted bugs show at p < 1e-20
SAMPLED = Sampler(0.9, top_k=12, top_p=0.95)
GUIDED = Sampler(0.9, top_k=12, guidance_scale=2.5)


def tiny_llamagen(
    codes: int = CODES, grid: int = GRID, dtype: torch.dtype = torch.float64
) -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaGenConfig(vocab_size=codes, grid_size=grid, num_classes=CLASSES, **sizes)
    return randomise(LlamaGenForCausalLM(config), seed=3, logit_scale=1.5).to(dtype)


@functools.cache
def rasters() -> ImageTokenTarget:
    """LlamaGen: no syntax, so that a row begins before the token that it should follow is known."""
    return LlamaGenTarget(tiny_llamagen())


class LinedTarget(ImageTokenTarget):
    """A language model as a model of images of 3 x 5 cells, with a token at the end of each row."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, ImageGrid(3, 5, 62, row_end=62, ending=(63,)), syntax=2)

    def grid_for(self, height: int, width: int) -> ImageGrid:
        raise NotImplementedError

    def encode_prompt(self, *_: object) -> PromptPair:
        raise NotImplementedError

    def decode(self, cells: Tensor) -> Tensor:
        raise NotImplementedError


@functools.cache
def lines() -> ImageTokenTarget:
    return LinedTarget(tiny_lm())


def requests_of(target: ImageTokenTarget, rows: int, grid: ImageGrid | None = None) -> list[Request]:
    """Rows with prompts of different lengths (LlamaGen's has always one), and the null prompt."""
    grid = grid or target.grid
    if isinstance(target, LinedTarget):
        prompts, null = [[5, 6, 7, 8], [9], [10, 11]], [1]
    else:
        first = target.grid.codebook_size
        prompts, null = [[first], [first + 1], [first + 2]], [first + CLASSES]
    negative = {"input_ids": torch.tensor([null])}
    return [
        Request({"input_ids": torch.tensor([prompts[row % 3]])}, negative_inputs=negative, grid=grid)
        for row in range(rows)
    ]


def begin(target: ImageTokenTarget, requests: Sequence[Request], tokens: int | None = None) -> Canvas:
    """Empty outputs of a batch."""
    grid = requests[0].grid
    assert grid is not None
    stopping = Stopping(grid.length if tokens is None else tokens)
    prompts = [request.prompt_tokens for request in requests]
    return Canvas(prompts, stopping, DecodingStats(), target.device)


def run(
    target: ImageTokenTarget,
    accelerator: Accelerator,
    requests: Sequence[Request],
    canvas: Canvas,
    sampler: Sampler = SAMPLED,
    seed: int = 5,
) -> Iterator[Round]:
    """Decode a batch round by round."""
    stream = RandomStream.from_seed(seed, len(requests))
    return Call(accelerator.fit(target), target, sampler, requests, canvas, stream).rounds()


def draw(
    target: ImageTokenTarget,
    accelerator: Accelerator,
    requests: Sequence[Request],
    sampler: Sampler = SAMPLED,
    tokens: int | None = None,
    seed: int = 5,
) -> tuple[list[list[int]], DecodingStats]:
    """Decode a batch to its end: its images, and what happened."""
    canvas = begin(target, requests, tokens)
    emissions = [step.emission for step in run(target, accelerator, requests, canvas, sampler, seed)]
    assert canvas.errors == [None] * len(requests)
    assert [sum((e.tokens[row] for e in emissions), []) for row in range(len(requests))] == canvas.outputs()
    return canvas.outputs(), canvas.stats


def zipar(lag: int, /, **options: object) -> Accelerator:
    return build_accelerator("zipar", zipar_window=lag, **options)


def equals_naive(
    target: ImageTokenTarget, window: int, sampler: Sampler, rows: int = 2, sliding: int | None = None
) -> None:
    """The loop's images are those of the rule, recomputed without a cache under an explicit mask."""
    requests = requests_of(target, rows)
    outputs, stats = draw(target, zipar(window), requests, sampler)
    stream = RandomStream.from_seed(5, rows)

    def forward(ids: Sequence[int], places: Sequence[int], mask: Tensor) -> Tensor:
        if sliding is not None:
            place = torch.tensor(places)
            mask = mask & (place[:, None] - place < sliding)
        additive = torch.zeros(mask.shape, dtype=target.dtype).masked_fill(~mask, float("-inf"))[None, None]
        inputs = torch.tensor([list(ids)]), torch.tensor([list(places)]), additive
        names = ("input_ids", "position_ids", "attention_mask")
        return target.model(**dict(zip(names, inputs, strict=True))).logits[0]

    for row, request in enumerate(requests):

        def choose(logits: list[Tensor], index: int, row: int = row) -> int:
            codes = torch.stack(logits)[:, None, : target.grid.codebook_size]
            p = distributions.reference_distribution(codes, sampler)[0]
            noise = stream.gumbel(
                torch.full((rows, 1), index), Purpose.TARGET, target.vocabulary, torch.float64
            )
            return int((p.log() + noise[row, 0, : len(p)]).argmax())

        prompts = [request.prompt_tokens]
        if sampler.guidance_scale != 1:
            assert request.negative_inputs is not None
            prompts.append(request.negative_inputs["input_ids"][0].tolist())
        expected, forwards = naive_image([forward] * len(prompts), prompts, target.grid, window, choose)
        assert outputs[row] == expected, f"window {window}, row {row}"
        assert stats.target_forwards == forwards


def rasters_equal_naive() -> None:
    for window in (1, 2, 3):
        equals_naive(rasters(), window, SAMPLED)
    equals_naive(rasters(), 2, GUIDED)


def lines_equal_naive() -> None:
    for window in (1, 3, 4):
        equals_naive(lines(), window, SAMPLED)
    equals_naive(lines(), 2, GUIDED)


def drafts_give_the_staircase() -> None:
    """Rows that draft give the tokens of rows that do not, in fewer forwards."""
    saved = 0
    for target, lag in ((rasters(), 2), (rasters(), 3), (lines(), 2), (lines(), 3), (lines(), 5)):
        for sampler, window, seed in (
            (Sampler(0.5), 4, 5),
            (Sampler(0.9), 4, 6),
            (Sampler(0.9), 2, 7),
            (GUIDED, 3, 8),
        ):
            requests = requests_of(target, 3)
            plain, slow = draw(target, zipar(lag), requests, sampler, seed=seed)
            tokens, fast = draw(target, zipar(lag, window=window), requests, sampler, seed=seed)
            assert tokens == plain, f"lag {lag}, window {window}"
            assert all(few <= many for few, many in zip(fast.nfe, slow.nfe, strict=True))
            saved += sum(slow.nfe) - sum(fast.nfe)
    assert saved > 10


@contextmanager
def poisoned(value: float, *, seen_only: bool = False) -> Iterator[None]:
    """While this runs, buffers of keys and values are filled with a number instead of zeros.

    Args:
        value: the number.
        seen_only: attention reads what is visible and nothing else, so that NaN shows what was; kernels
            multiply what is masked by zero, and NaN survives that.
    """

    def allocate(layer: RaggedLayer, states: Tensor) -> Tensor:
        shape = layer.plan.rows, layer.plan.capacity, states.shape[1], states.shape[3]
        return states.new_full(shape, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RaggedLayer, "_allocate", allocate)
        if seen_only:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend_to_the_visible)
        yield


def attend_to_the_visible(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **settings: Any
) -> Tensor:
    """Attention [B, heads, n, d] that never touches a masked column."""
    if attn_mask is None:
        attn_mask = torch.ones(query.shape[2], key.shape[2]).tril().bool().expand(len(query), 1, -1, -1)
    if attn_mask.is_floating_point():
        attn_mask = attn_mask == 0
    attn_mask = attn_mask.expand(-1, -1, query.shape[2], -1)  # transformers packs query groups into n
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    output = torch.empty_like(query)
    for row, seen in enumerate(attn_mask[:, 0]):
        for node, columns in enumerate(seen):
            keys, values = key[row][:, columns], value[row][:, columns]
            weights = (keys @ query[row, :, node, :, None])[..., 0] * settings["scale"]
            output[row, :, node] = (weights.softmax(-1)[..., None] * values).sum(1)
    return output


def unwritten_places_do_not_matter() -> None:
    for target in (rasters(), lines()):
        for accelerator in (zipar(2), zipar(2, adaptive=True)):
            requests = requests_of(target, 3)
            clean = draw(target, accelerator, requests)[0]
            for poison in (poisoned(1e4), poisoned(math.nan, seen_only=True)):
                with poison:
                    assert draw(target, accelerator, requests)[0] == clean


class FanOut(LlamaGenTarget):
    """Reads equal prompts once, so that thousands of rows start in a moment."""

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[ImageState, PromptOutput]:
        rows = len(prompts)
        one, output = super().prefill(prompts[:1], capacity, taps)
        many = fan_out(one.cache, self, rows, capacity)
        state = replace(
            one,
            cache=many,
            offset=one.offset.repeat(rows),
            prompt_lengths=one.prompt_lengths * rows,
            grammar=Grammar([self.grid] * rows, self.device),
        )
        return state, PromptOutput(output.logits.expand(rows, -1, -1))


def first_tokens_follow_the_wider_window(**options: object) -> None:
    """With s = C - 1 the second prediction sees the whole row above, as in raster order."""
    codes, columns = 4, 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "CAPACITY_BLOCK", 16)
        target = FanOut(tiny_llamagen(codes, columns, torch.float32))
        requests = requests_of(target, 1) * SAMPLES
        accelerator = zipar(columns - 1, adaptive=True, **options)
        outputs, _ = draw(target, accelerator, requests, Sampler(1.0), tokens=columns + 1)
    joint = joint_of(target, requests[0].prompt_tokens, columns + 1, Sampler(1.0))
    cells = (torch.tensor(outputs) * codes ** torch.arange(columns, -1, -1)).sum(-1)
    fit = distributions.chi_square(torch.bincount(cells, minlength=joint.numel()), joint.flatten())
    assert fit.p_value > distributions.ALARM, fit
