"""Costs of the denoising heads of the reference models: the fast head against the published loop.

    python benchmarks/denoising_head.py                        # both models of assets/, on this machine

Prints, as JSON: multiply-adds of a token of every target and draft, transformer and head apart; and seconds
of whole images by plain decoding with the fast head and with the published loop, which computes every
modulation anew in every step, in turns.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mmspec.evaluation.machine import environment
from mmspec.families.nextstep import NextStepForImageGeneration, load_nextstep
from mmspec.kernels import denoising_update
from mmspec.pipelines import ContinuousImagePipeline, MMSpecPipeline
from mmspec.vectors.denoising import run_chain
from mmspec.vectors.denoising_head import DenoisingHead, FlowSchedule
from mmspec.vectors.denoising_head.head import DenoisingProcess

DEFAULT_FLOW = FlowSchedule()
ASSETS = Path(__file__).parents[1] / "assets"


class PublishedLoop:
    """Denoising head whose every step runs the whole network on states, times and conditions.

    As `stepfun-ai/NextStep-1, nextstep/models/modeling_fm_head.py` and MAR's `diffloss.py` do; the numbers
    are those of the fast head, up to rounding.
    """

    def __init__(self, head: DenoisingHead) -> None:
        self.head = head

    def process(
        self, condition: Tensor, unconditional: Tensor | None, scale: Any, temperature: Any, schedule: Any
    ) -> DenoisingProcess:
        """Set up chains; arguments as of `DenoisingHead.process`."""
        fast = self.head.process(condition, unconditional, scale, temperature, schedule)
        return SlowProcess(fast.net, fast.schedule, fast.branches, fast.scale, fast.temperature)


class SlowProcess(DenoisingProcess):
    """Chains whose every step computes what the fast head computes once."""

    def run(self, noise: Tensor, known: tuple[Tensor, Tensor] | None = None) -> Tensor:
        return run_chain(self.advance, noise, known)

    def advance(self, x: Tensor, step: int, noise: Tensor) -> Tensor:
        conditions = self.branches.flatten(0, 1)
        times = self.schedule.times[step].expand(len(conditions))
        output = self.net(x.repeat(len(self.branches), 1), times, conditions)
        output = output.unflatten(0, (len(self.branches), len(x)))
        coefficients = self.schedule.coefficients[step]
        return denoising_update(x, output, noise, coefficients, self.scale, self.temperature)


def multiply_adds(model: Any, steps: int) -> dict[str, float]:
    """Millions of multiply-adds of one token of a NextStep: transformer, chain of the head, and both."""
    head: DenoisingHead = model.image_head
    token = torch.zeros(1, 1, model.config.token_size)
    place = torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad(), FlopCounterMode(display=False) as transformer:
        condition = model(token, output_index=place)[:, 0]
    schedule = replace(DEFAULT_FLOW, steps=steps)
    with torch.no_grad(), FlopCounterMode(display=False) as chain:
        process = head.process(condition, None, 1.0, 1.0, schedule)
        process.sample(torch.zeros(1, steps + 1, process.size))
    parts = {"transformer": transformer.get_total_flops() / 2e6, "head": chain.get_total_flops() / 2e6}
    return {**parts, "together": sum(parts.values())}


def seconds_of(pipe: ContinuousImagePipeline, slow: bool, seed: int) -> float:
    """Seconds of one image by plain decoding."""
    asked = {"class_labels": seed % 48} if pipe.target.any_order else {}
    prompt = None if asked else "a small red plain ring left of a large blue dotted square on grass."
    call = pipe.prepare(prompt, {"seed": seed, "output_type": "latent"}, **asked)
    if slow:
        call.sampler = replace(call.sampler, source=PublishedLoop(call.sampler.source))
    started = perf_counter()
    for _ in call.rounds():
        pass
    return perf_counter() - started


def main(
    models: Annotated[
        list[Path] | None, typer.Argument(help="Folders; both reference models if none.")
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="Images of each way.")] = 7,
) -> None:
    """Print the costs."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    found: dict[str, Any] = {}
    for folder in models or [ASSETS / "scenes-nextstep", ASSETS / "scenes-mar"]:
        pipe: Any = MMSpecPipeline.from_pretrained(folder, dtype=torch.float32)
        times: dict[str, list[float]] = {"fast": [], "published": []}
        for seed in range(images + 1):
            for name in times:
                times[name].append(seconds_of(pipe, name == "published", seed))
        row: dict[str, Any] = {name: median(values[1:]) for name, values in times.items()}
        row["ratio"] = median(
            slow / fast for slow, fast in zip(times["published"][1:], times["fast"][1:], strict=True)
        )
        if isinstance(pipe.model, NextStepForImageGeneration):
            row["multiply_adds"] = {folder.name: multiply_adds(pipe.model, DEFAULT_FLOW.steps)}
            for draft in sorted(folder.parent.glob(f"{folder.name}-*")):
                loaded = load_nextstep(draft, dtype=torch.float32)
                row["multiply_adds"][draft.name] = multiply_adds(loaded, DEFAULT_FLOW.steps)
        found[folder.name] = row | environment(pipe.device, pipe.dtype)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    typer.run(main)
