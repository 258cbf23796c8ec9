"""Decode steps of random targets with the shapes of published models, beside transformers' `generate`.

And rounds of EAGLE-3, of a tree and of speculative Jacobi decoding there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from time import perf_counter
from typing import Any

import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration

from benchmarks.gpu.ceilings import Ceilings, Row
from benchmarks.gpu.rounds import FixedDrafter, RoundShape, cost_of_round, measure_round, random_requests
from mmspec.core.interfaces import Drafter
from mmspec.core.sampling import Sampler
from mmspec.families.llamagen.configuration import LlamaGenConfig
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.families.llamagen.target import LlamaGenTarget
from mmspec.methods.eagle3.drafter import Eagle3Drafter
from mmspec.methods.eagle3.head import Eagle3Config, Eagle3Head
from mmspec.targets import adapt
from mmspec.targets.memory import MemoryPlan
from mmspec.trees.jacobi import JacobiDrafter

__all__ = ["SHAPES", "StepShape", "generate_steps", "plan_memory", "time_rounds", "time_steps"]

COMPILED = "mmspec compiled"
WAYS = ("mmspec", COMPILED)
TREE, WINDOW = 59, 32  # candidates of a tree, and of speculative Jacobi decoding
#: Ways of transformers' `generate`, by name: its options.
PEERS: dict[str, dict[str, Any]] = {"eager": {}, "compiled static": {"cache_implementation": "static"}}


@dataclass(frozen=True)
class StepShape:
    """A target of random weights, and the rounds that are timed on it.

    Attributes:
        build: the model; with True a tiny one of the same kind, for a rehearsal.
        adapt: model -> target.
        context: tokens before a step.
        sampler: of its users.
    """

    build: Callable[[bool], Any]
    adapt: Callable[[Any], Any]
    context: int
    sampler: Sampler


def llamagen(size: str, tiny: bool) -> Any:
    """A LlamaGen of classes, images of 384 pixels."""
    if tiny:
        small: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        return LlamaGenForCausalLM(LlamaGenConfig(grid_size=8, vocab_size=64, **small))
    return LlamaGenForCausalLM(LlamaGenConfig.from_size(size, grid_size=24))


def llava_7b(tiny: bool) -> Any:
    """LLaVA-1.5-7B, its vision tower cut to a layer: steps never run it."""
    text: dict[str, Any] = {"model_type": "llama", "vocab_size": 1000 if tiny else 32_064}
    width, wide, layers, heads = (64, 128, 2, 4) if tiny else (4096, 11_008, 32, 32)
    text |= {"hidden_size": width, "intermediate_size": wide}
    text |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    vision = {"model_type": "clip_vision_model", "num_hidden_layers": 1, "hidden_size": 64}
    vision |= {"intermediate_size": 64, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    return LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision))


SAMPLED = Sampler(temperature=1.0)
GUIDED = Sampler(temperature=1.0, guidance_scale=4.0)
SHAPES = {
    "llava-1.5-7b": StepShape(llava_7b, adapt, 1000, SAMPLED),
    "llamagen-3b": StepShape(partial(llamagen, "3B"), LlamaGenTarget, 300, GUIDED),
    "llamagen-xl": StepShape(partial(llamagen, "XL"), LlamaGenTarget, 300, GUIDED),
}


def time_steps(
    name: str, device: torch.device, dtype: torch.dtype, ceilings: Ceilings, *, tiny: bool = False
) -> Iterator[Row]:
    """Time the steps of a target of one shape: 1 to 64 nodes, batch 1 and 8; and transformers' `generate`.

    Ours as `compile()` leaves them, on a GPU, and as they are.

    Yields:
        A row for each: ms of a step, tokens a second of plain decoding, the share of the measured bandwidth
        that the least bytes come to; or `error`, or `missing` where transformers cannot.
    """
    context, guided = 12 if tiny else SHAPES[name].context, SHAPES[name].sampler.is_guided

    def step(size: RoundShape, way: str) -> dict[str, Any]:
        return round_figures(_target(name, device, dtype, tiny, way == COMPILED), name, size, ceilings, tiny)

    def peer(size: RoundShape, **options: Any) -> dict[str, Any]:
        target = _target(name, device, dtype, tiny, False)
        seconds = generate_steps(target, size, guided, tokens=3 if tiny else 40, **options)
        return figures_of(target, size, seconds, ceilings, guided)

    batches, nodes_of_rounds = ((1, 2), (1, 3)) if tiny else ((1, 8), (1, 4, 16, 64))
    for batch in batches:
        for way, nodes in product(reversed(WAYS) if device.type == "cuda" else WAYS[:1], nodes_of_rounds):
            row: dict[str, Any] = {"shape": name, "way": way, "batch": batch, "nodes": nodes}
            yield Row(row, partial(step, RoundShape(batch, nodes, context), way), 8)
        for way, options in PEERS.items() if batch == 1 else ():  # compiling takes a minute for each batch
            row = {"shape": name, "way": f"generate {way}", "batch": batch, "nodes": 1}
            work = partial(peer, RoundShape(batch, 1, context), **options)
            yield Row(row, work, 90 if options else 15, "missing")


def eagle3(target: Any) -> Drafter:
    """A random EAGLE-3 head, with its usual tree."""
    with target.device:
        head: Any = Eagle3Head(Eagle3Config.for_target(target.config, target.vocabulary))
    drafter = Eagle3Drafter(head.to(target.dtype).eval(), num_draft_tokens=TREE, depth=6, top_k=10)
    if target.device.type == "cuda":
        drafter.compile()
    return drafter


#: Shape of a target, name of a drafter, and its nodes: what makes the drafter; None drafts nothing.
DRAFTERS: dict[tuple[str, str, int], Callable[[Any], Drafter | None]] = {
    ("llava-1.5-7b", "eagle3", TREE + 1): eagle3,
    ("llava-1.5-7b", "binary tree", TREE + 1): lambda target: FixedDrafter(TREE + 1, target.vocabulary, 2),
    ("llamagen-3b", "none", 1): lambda target: None,
    ("llamagen-3b", "sjd", WINDOW): lambda target: JacobiDrafter(WINDOW),
}


def time_rounds(
    device: torch.device, dtype: torch.dtype, ceilings: Ceilings, *, tiny: bool = False
) -> Iterator[Row]:
    """Time compiled rounds of drafters on random weights: a round costs the same whatever it accepts.

    Yields:
        A row for each: the figures of `time_steps`; the floor is that of the target alone.
    """
    for (name, method, nodes), make in DRAFTERS.items():

        def rounds(name: str = name, nodes: int = nodes, make: Any = make) -> dict[str, Any]:
            target = _target(name, device, dtype, tiny, device.type == "cuda")
            size = RoundShape(1, nodes, 12 if tiny else SHAPES[name].context)
            return round_figures(target, name, size, ceilings, tiny, make(target))

        yield Row({"shape": name, "method": method, "batch": 1, "nodes": nodes}, rounds, 25)


def round_figures(
    target: Any, name: str, size: RoundShape, ceilings: Ceilings, tiny: bool, drafter: Drafter | None = None
) -> dict[str, Any]:
    """Ms of a round and of its parts, its launches, and `figures_of`."""
    sampler, on_gpu = SHAPES[name].sampler, target.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(target.device)
    # captured in the first rounds of a shape
    time = measure_round(target, size, rounds=3 if tiny else 20, sampler=sampler, drafter=drafter)
    parts = {"target": time.target, "draft": time.draft, "verify": time.verify, "rest": time.rest}
    milliseconds = {part: 1000 * seconds for part, seconds in parts.items()}
    found = figures_of(target, size, time.seconds, ceilings, sampler.is_guided)
    peak = torch.cuda.max_memory_allocated(target.device) / 1e9 if on_gpu else None
    return milliseconds | {"launches": time.launches, "peak_gb": peak} | found


@torch.inference_mode()
def plan_memory(name: str = "llava-1.5-7b", nodes: int = TREE + 1) -> Iterator[Row]:
    """Compute the memory of a round of EAGLE-3 at full size, from shapes alone; `time_rounds` measures it.

    Yields:
        A row: gigabytes of weights (target and head, bfloat16), keys and values, and tables of logits. Peaks
        have the activations of a layer on top.
    """

    def planned() -> dict[str, Any]:
        shape, place = SHAPES[name], torch.device("meta")
        with place:
            target = shape.adapt(shape.build(False).to(torch.bfloat16).eval())
            head = Eagle3Head(Eagle3Config.for_target(target.config, target.vocabulary)).to(torch.bfloat16)
        plan = MemoryPlan.of(target, 1, shape.context + nodes, nodes, head)
        parts = {"weights_gb": plan.weights, "cache_gb": plan.cache, "logits_gb": plan.logits}
        return {part: count / 1e9 for part, count in {**parts, "planned_gb": plan.total}.items()}

    yield Row({"shape": name, "method": "eagle3", "batch": 1, "nodes": nodes}, planned, 10)


@lru_cache(maxsize=1)  # a target on the GPU at a time
def _model(name: str, device: torch.device, dtype: torch.dtype, tiny: bool) -> Any:
    with device:
        return SHAPES[name].build(tiny).to(dtype).eval()


def _target(name: str, device: torch.device, dtype: torch.dtype, tiny: bool, compiled: bool) -> Any:
    target = SHAPES[name].adapt(_model(name, device, dtype, tiny))
    if compiled:
        target.compile()
    return target


def figures_of(
    target: Any, size: RoundShape, seconds: float, ceilings: Ceilings, guided: bool
) -> dict[str, float]:
    """Figures of a step: ms, tokens a second if one token a row comes of it, floor, share of bandwidth."""
    costs = cost_of_round(target, size, guided)
    moved = sum(cost.bytes for cost in costs.values())
    return {
        "ms": 1000 * seconds,
        "tokens_per_second": size.batch / seconds,
        "floor_ms": 1000 * sum(cost.floor(ceilings) for cost in costs.values()),
        "bandwidth_share": moved / seconds / ceilings.bytes_per_second,
    }


def generate_steps(target: Any, size: RoundShape, guided: bool, *, tokens: int, **options: Any) -> float:
    """Seconds of a step of transformers' greedy `generate`: what later tokens add to the time of the first.

    Guided pairs are rows of one batch, so that a step is one forward pass, as ours is.
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

    for _ in range(3):  # the first are for compiling and capturing; the longest, so that its cache serves all
        seconds(1 + tokens)
    seconds(1)
    pairs = [seconds(1 + tokens) - seconds(1) for _ in range(3)]
    return sorted(pairs)[1] / tokens
