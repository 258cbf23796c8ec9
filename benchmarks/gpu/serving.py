"""Throughput of a running batch: requests that come at once, as `mmspec serve` decodes them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.gpu.ceilings import Row

__all__ = ["time_serving"]

PROMPT = "Explain in a few sentences why the sky is blue."


def time_serving(folder: Path, methods: dict[str, str], device: torch.device, tiny: bool) -> Iterator[Row]:
    """Time 1, 8 and 64 requests together.

    Args:
        folder: of a language model.
        methods: names of accelerators: their drafters, the empty string for none.
        device: of the model.
        tiny: 1 and 2 requests.

    Yields:
        A row for each: tokens a second of all requests, prompts included, and seconds.
    """
    length = 2 if tiny else 128
    for (method, drafter), requests in ((each, count) for each in methods.items() for count in COUNTS[tiny]):
        row = {"model": folder.name, "method": method, "requests": requests, "new_tokens": length}
        yield Row(row, partial(_serve, folder, method, drafter, device, requests, length), 15)


COUNTS = {True: (1, 2), False: (1, 8, 64)}


def _serve(
    folder: Path, method: str, drafter: str, device: torch.device, requests: int, length: int
) -> dict[str, Any]:
    from mmspec import MMSpecPipeline  # needs diffusers, which a bare machine may lack

    named = {"drafter": drafter} if drafter else {}
    pipe: Any = MMSpecPipeline.from_pretrained(str(folder), accelerator=method, **named).to(device)
    for _ in range(1 if device.type == "cpu" else 2):  # kernels are compiled and shapes captured in the first
        started = perf_counter()
        tokens = 0
        with pipe.running_batch(rows=requests) as batch:
            for seed in range(requests):
                batch.enter(PROMPT, max_new_tokens=length, seed=seed)
            while batch.handles:
                tokens += sum(len(row) for update in batch.step() for row in update.tokens)
        seconds = perf_counter() - started
    return {"tokens_per_second": tokens / seconds, "seconds": seconds}
