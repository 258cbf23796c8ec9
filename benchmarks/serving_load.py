"""Throughput of a running batch against plain decoding, by the number of rows: does drafting ever slow it?

    python -m benchmarks.serving_load runs/smollm2
    python -m benchmarks.serving_load assets/scenes-llava --accelerator eagle --rows 8 --rows 64

Two running batches, one of them plain, serve the same requests and take turns, one round each, so that both
meet the same load of the machine. Their CPU seconds are compared. Every answer is compared with plain
decoding, token for token. Costs that were measured before, at another number of rows too, stay known, as in
a server.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import cycle, islice
from time import perf_counter, process_time
from typing import Annotated, Any

import typer

from benchmarks.structured_output import read_schemas
from mmspec import MMSpecPipeline
from mmspec.scenes import render, sample_scene

QUESTIONS = ("Describe the image in detail.", "What is in the image?", "How many objects are there?")
Request = dict[str, Any]


@dataclass
class Served:
    """A running batch with the requests that wait for it, and the time that it took.

    Attributes:
        batch: the running batch.
        waiting: requests that have not entered, the next one last.
        tokens: of the finished requests, by handle.
    """

    batch: Any
    waiting: list[Request]
    tokens: dict[int, list[int]] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def is_done(self) -> bool:
        return not self.waiting and not self.batch.handles

    def step(self) -> None:
        """Let requests enter, and decode a round."""
        cpu, clock = process_time(), perf_counter()
        while self.waiting and self.batch.free:
            self.batch.enter(**self.waiting.pop())
        updates = self.batch.step()
        self.cpu_seconds += process_time() - cpu
        self.seconds += perf_counter() - clock
        self.tokens |= {each.handle: each.output.tokens[0] for each in updates if each.output is not None}


def make_requests(pipe: Any, count: int, max_new_tokens: int) -> list[Request]:
    """Return so many requests: questions about images, or instructions for a language model."""
    if hasattr(pipe.model.config, "vision_config"):
        images = [render(sample_scene(index)) for index in range(count)]
        asked: list[Request] = [
            {"prompt": question, "images": image}
            for question, image in zip(cycle(QUESTIONS), images, strict=False)
        ]
    else:
        asked = [{"prompt": case["prompt"]} for case in islice(cycle(read_schemas()), count)]
    return [{**each, "max_new_tokens": max_new_tokens} for each in asked]


def serve(pipes: dict[str, Any], requests: list[Request], rows: int) -> dict[str, Served]:
    """Serve the requests by each pipeline, in turns."""
    served = {
        name: Served(pipe.running_batch(rows=rows), requests[::-1].copy()) for name, pipe in pipes.items()
    }
    while not all(each.is_done for each in served.values()):
        for each in served.values():
            if not each.is_done:
                each.step()
    for each in served.values():
        each.batch.close()
    return served


def main(
    model: Annotated[str, typer.Argument(help="Folder of the model.")],
    accelerator: Annotated[str, typer.Option(help="Accelerator to compare with plain decoding.")] = "copy",
    drafter: Annotated[str | None, typer.Option(help="Its drafter; the model's own by default.")] = None,
    length: Annotated[str, typer.Option(help="Draft length.")] = "auto",
    rows: Annotated[list[int], typer.Option(help="Rows decoded together.")] = [1, 2, 4, 8, 16, 32, 64],  # noqa: B006
    requests: Annotated[int, typer.Option(help="Requests that come at once.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 64,
    passes: Annotated[int, typer.Option(help="Repetitions; the first meets costs that are not known.")] = 1,
) -> None:
    """Print throughput as multiples of plain decoding, tokens per forward pass, and equal answers."""
    options = {"length": length} if drafter is None else {"length": length, "drafter": drafter}
    pipes: dict[str, Any] = {
        "none": MMSpecPipeline.from_pretrained(model, accelerator="none"),
        accelerator: MMSpecPipeline.from_pretrained(model, accelerator=accelerator, **options),
    }
    asked = make_requests(pipes["none"], requests, max_new_tokens)
    print("| rows | pass | CPU seconds, plain | x plain by CPU | x plain by clock | tokens/forward | equal |")
    print("|---|---|---|---|---|---|---|")
    for number in range(1, passes + 1):
        for count in rows:
            short = [{**each, "max_new_tokens": 4} for each in asked[:count]]
            serve({"none": pipes["none"]}, short, count)  # the kernels of each shape are chosen in the first
            served = serve(pipes, asked, count)
            plain, drafted = served["none"], served[accelerator]
            equal = sum(drafted.tokens[handle] == tokens for handle, tokens in plain.tokens.items())
            ratios = plain.cpu_seconds / drafted.cpu_seconds, plain.seconds / drafted.seconds
            gained = drafted.batch.stats.acceptance_length
            print(
                f"| {count} | {number} | {plain.cpu_seconds:.1f} | {ratios[0]:.3f} | {ratios[1]:.3f} "
                f"| {gained:.2f} | {equal} of {len(asked)} |",
                flush=True,
            )


if __name__ == "__main__":
    typer.run(main)
