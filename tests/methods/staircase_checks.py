"""Targets and calls of the tests of staircases."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from mmspec.accelerator import Accelerator, Call
from mmspec.accelerators import build_accelerator
from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.image_grid import ImageGrid
from mmspec.core.interfaces import Request, Round
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.core.statistics import DecodingStats
from mmspec.families.llamagen.configuration import LlamaGenConfig
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.families.llamagen.target import LlamaGenTarget
from mmspec.targets import ImageTokenTarget
from tests.tiny_models import randomise, tiny_lm
from tests.trees.jacobi_checks import ToyImages

CODES, GRID, CLASSES = 24, 4, 3
LINES = ImageGrid(3, 5, 62, row_end=62, ending=(63,))
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


@functools.cache
def lines() -> ImageTokenTarget:
    """A language model as a model of images, with a token at the end of each row."""
    return ToyImages(tiny_lm(), LINES)


def requests_of(target: ImageTokenTarget, rows: int, grid: ImageGrid | None = None) -> list[Request]:
    """Rows with prompts of different lengths (LlamaGen's has always one), and the null prompt."""
    grid = grid or target.grid
    if isinstance(target, ToyImages):
        prompts, null = [[5, 6, 7, 8], [9], [10, 11]], [1]
    else:
        first = target.grid.codebook_size
        prompts, null = [[first], [first + 1], [first + 2]], [first + CLASSES]
    negative = {"input_ids": torch.tensor([null])}
    return [
        Request({"input_ids": torch.tensor([prompts[row % 3]])}, negative_inputs=negative, layout=grid)
        for row in range(rows)
    ]


def begin(target: ImageTokenTarget, requests: Sequence[Request], tokens: int | None = None) -> Canvas:
    """Empty outputs of a batch."""
    layout = requests[0].layout
    assert layout is not None
    stopping = Stopping(layout.length if tokens is None else tokens)
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
