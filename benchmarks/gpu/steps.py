"""Times of decode steps of targets with the shapes of published models, and of transformers' `generate`.

The weights are random. Rounds of corrected Jacobi decoding show the cost of its head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any

import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration, Qwen2_5_VLConfig
from transformers import Qwen2_5_VLForConditionalGeneration as QwenVL

from benchmarks.gpu.ceilings import Ceilings, attempt
from benchmarks.gpu.rounds import RoundShape, cost_of_round, measure_round, random_requests
from mmspec.core.sampling import Sampler
from mmspec.families.llamagen.configuration import LlamaGenConfig
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.families.llamagen.target import LlamaGenTarget
from mmspec.methods.cjd.drafter import CorrectedDrafter
from mmspec.methods.cjd.head import CorrectorConfig, CorrectorHead
from mmspec.targets import adapt
from mmspec.trees.jacobi import JacobiDrafter

__all__ = ["SHAPES", "StepShape", "generate_steps", "time_correctors", "time_steps"]

COMPILED = "mmspec compiled"
WAYS = ("mmspec", COMPILED)
WINDOW, PASSES = 32, (1, 2, 4)  # of corrected Jacobi decoding
#: Options of transformers' `generate`, by the name of the comparison.
PEERS: dict[str, dict[str, Any]] = {"eager": {}, "compiled static": {"cache_implementation": "static"}}


@dataclass(frozen=True)
class StepShape:
    """A target with random weights, and the rounds to time.

    Attributes:
        build: builds the model, or with True a tiny one of the same kind for a trial run.
        adapt: makes a target of the model.
        context: tokens before a step.
        sampler: a typical sampler for the model.
    """

    build: Callable[[bool], Any]
    adapt: Callable[[Any], Any]
    context: int
    sampler: Sampler


def llamagen_xl(tiny: bool) -> Any:
    """Build LlamaGen-XL of classes, for images of 384 x 384 pixels."""
    if tiny:
        small: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        return LlamaGenForCausalLM(LlamaGenConfig(grid_size=8, vocab_size=64, **small))
    return LlamaGenForCausalLM(LlamaGenConfig.from_size("XL", grid_size=24))


def llava_7b(tiny: bool) -> Any:
    """Build LLaVA-1.5-7B with a small vision tower, which steps do not run."""
    text: dict[str, Any] = {"model_type": "llama", "vocab_size": 1000 if tiny else 32_064}
    sizes = (64, 128, 2, 4, 4) if tiny else (4096, 11_008, 32, 32, 32)
    text |= _decoder(*sizes)
    vision = {"model_type": "clip_vision_model", "num_hidden_layers": 1, "hidden_size": 64}
    vision |= {"intermediate_size": 64, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    return LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision))


def qwen2_5_vl_7b(tiny: bool) -> Any:
    """Build Qwen2.5-VL-7B, where 7 heads share keys, with a small vision tower, which steps do not run."""
    sizes = (112, 128, 2, 7, 1) if tiny else (3584, 18_944, 28, 28, 4)
    text: dict[str, Any] = {"vocab_size": 1000 if tiny else 152_064, **_decoder(*sizes)}
    width = sizes[0] // sizes[3]
    first = width // 8
    rest = (width // 2 - first) // 2
    sections = [width // 2 - 2 * rest, rest, rest]
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64}
    vision["out_hidden_size"] = sizes[0]
    return QwenVL(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def _decoder(width: int, wide: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


SAMPLED = Sampler(temperature=1.0)
SHAPES = {
    "llamagen-xl": StepShape(llamagen_xl, LlamaGenTarget, 300, Sampler(temperature=1.0, guidance_scale=4.0)),
    "llava-1.5-7b": StepShape(llava_7b, adapt, 1000, SAMPLED),
    "qwen2.5-vl-7b": StepShape(qwen2_5_vl_7b, adapt, 1000, SAMPLED),
}


def time_steps(
    name: str, device: torch.device, dtype: torch.dtype, ceilings: Ceilings, *, tiny: bool = False
) -> Iterator[dict[str, Any]]:
    """Time steps of a target, with 1 to 64 nodes and batches of 1 and 8, then transformers' `generate`.

    On a GPU, the steps are timed again after compiling, as by `pipe.compile()`.

    Yields:
        A row for each, with the figures of `figures_of`. A row that fails has `error` instead, or `missing`
        if transformers does not support it.
    """
    shape = SHAPES[name]
    target = _target(shape, device, dtype, tiny)
    context, guided = 12 if tiny else shape.context, shape.sampler.is_guided
    batches, nodes_of_rounds = ((1, 2), (1, 3)) if tiny else ((1, 8), (1, 4, 16, 64))

    def step(size: RoundShape) -> dict[str, float]:
        # a compiled target captures graphs in the first rounds of a shape
        time = measure_round(target, size, rounds=3 if tiny else 20, sampler=shape.sampler)
        parts = {"target": time.target, "verify": time.verify, "rest": time.rest + time.draft}
        milliseconds = {part: 1000 * seconds for part, seconds in parts.items()}
        return milliseconds | figures_of(target, size, time.seconds, ceilings, guided)

    def peer(size: RoundShape, **options: Any) -> dict[str, float]:
        seconds = generate_steps(target, size, guided, tokens=3 if tiny else 40, **options)
        return figures_of(target, size, seconds, ceilings, guided)

    for way in WAYS if device.type == "cuda" else WAYS[:1]:
        if way == COMPILED:
            target.compile()
        for batch, nodes in product(batches, nodes_of_rounds):
            row: dict[str, Any] = {"shape": name, "way": way, "batch": batch, "nodes": nodes}
            yield attempt(row, partial(step, RoundShape(batch, nodes, context)))
    for batch, (way, options) in product(batches, PEERS.items()):
        row = {"shape": name, "way": f"generate {way}", "batch": batch, "nodes": 1}
        yield attempt(row, partial(peer, RoundShape(batch, 1, context), **options), "missing")


def time_correctors(
    device: torch.device, dtype: torch.dtype, *, tiny: bool = False
) -> Iterator[dict[str, Any]]:
    """Time rounds of `sjd`, and of `cjd` with several numbers of passes, in batches of 1 and 8.

    The target has the shape of LlamaGen-XL and random weights, because the time of a round does not depend on
    the number of accepted tokens.

    Yields:
        A row for each: milliseconds of the `target`, of the `draft` and of the round (`ms`), and the ratio
        `draft_over_target`; or `error`.
    """
    shape, window = SHAPES["llamagen-xl"], 6 if tiny else WINDOW
    target = _target(shape, device, dtype, tiny)
    with device:
        config = CorrectorConfig.for_target(target.config, target.vocabulary, num_heads=2 if tiny else 4)
        head: Any = CorrectorHead(config)
    head = head.to(dtype).eval()
    drafters: dict[str, Any] = {"sjd": JacobiDrafter(window)}
    for passes in PASSES:
        drafters[f"cjd, passes={passes}"] = CorrectedDrafter(head, window, window - 1, passes=passes)
    if not tiny:  # compiling takes longer than the rest of a trial run
        drafters["cjd, passes=2, compiled"] = CorrectedDrafter(head, window, window - 1, passes=2)
        drafters["cjd, passes=2, compiled"].compile()

    def rounds(size: RoundShape, drafter: Any) -> dict[str, float]:
        how: dict[str, Any] = {"rounds": 3 if tiny else 16, "sampler": shape.sampler}
        time = measure_round(target, size, drafter=drafter, **how)
        parts = {"target": time.target, "draft": time.draft, "ms": time.seconds}
        milliseconds = {part: 1000 * seconds for part, seconds in parts.items()}
        return milliseconds | {"draft_over_target": time.draft / time.target}

    for batch, (name, drafter) in product((1, 2) if tiny else (1, 8), drafters.items()):
        row: dict[str, Any] = {"shape": "llamagen-xl", "method": name, "batch": batch, "nodes": window}
        size = RoundShape(batch, window, 12 if tiny else shape.context)
        yield attempt(row, partial(rounds, size, drafter))


def _target(shape: StepShape, device: torch.device, dtype: torch.dtype, tiny: bool) -> Any:
    with device:
        return shape.adapt(shape.build(tiny).to(dtype).eval())


def figures_of(
    target: Any, size: RoundShape, seconds: float, ceilings: Ceilings, guided: bool
) -> dict[str, float]:
    """Return the figures of a step.

    `tokens_per_second` assumes one token per row and step. `bandwidth_share` is the least bytes moved per
    second, divided by the measured bandwidth.
    """
    costs = cost_of_round(target, size, guided)
    moved = sum(cost.bytes for cost in costs.values())
    return {
        "ms": 1000 * seconds,
        "tokens_per_second": size.batch / seconds,
        "floor_ms": 1000 * sum(cost.floor(ceilings) for cost in costs.values()),
        "bandwidth_share": moved / seconds / ceilings.bytes_per_second,
    }


def generate_steps(target: Any, size: RoundShape, guided: bool, *, tokens: int, **options: Any) -> float:
    """Return the seconds per step of transformers' greedy `generate`, without the time of the first token.

    With guidance, both prompts of a pair are rows of one batch, so that a step is one forward pass as in
    mmspec.
    """
    prompts = [request.inputs for request in random_requests(target, size)] * (2 if guided else 1)
    inputs = torch.cat([prompt["input_ids"] for prompt in prompts]).to(target.device)

    def seconds(count: int) -> float:
        started = perf_counter()
        target.model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            **options,
        )[0, -1].item()
        return perf_counter() - started

    for _ in range(3):  # compile and capture; with the most tokens, so that the cache is not allocated again
        seconds(1 + tokens)
    seconds(1)
    pairs = [seconds(1 + tokens) - seconds(1) for _ in range(3)]
    return sorted(pairs)[1] / tokens
