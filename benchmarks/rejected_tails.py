"""Most forwards that a corrector of rejected draft tails could save, on the vision-language reference model.

A target that rejects a draft has predicted the tokens behind it as well, given a wrong one. `cjd` reads such
stale predictions of image tokens. Would that pay for text? It saves a forward, and no more than one, where a
draft is rejected at a place that a stale prediction had right.

python benchmarks/rejected_tails.py --samples 24
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import rich
import torch
import typer

from mmspec import MMSpecPipeline
from mmspec.cli.choice import parse_choice
from mmspec.evaluation.examples import Example, scene_examples
from mmspec.evaluation.tables import figures

MODEL = "assets/scenes-llava"
TASKS = "describe,caption,two_images,clip"
METHODS = "flash,flash:block=1,eagle:num_draft_tokens=10:depth=10:top_k=1"


@dataclass
class Tails:
    """Rejected drafts of chains, and what stale predictions said of their places.

    Attributes:
        forwards: of the target, the prompt's not counted.
        rejected: forwards that rejected a draft.
        predicted: those at a place of which the forward before had a stale prediction.
        right: those whose stale prediction was the target's own token.
    """

    forwards: int = 0
    rejected: int = 0
    predicted: int = 0
    right: int = 0

    def add(self, pipe: Any, example: Example) -> None:
        """Decode an example greedily."""
        settings = {"images": list(example.images), "max_new_tokens": 256, "do_sample": False}
        call, _ = pipe._prepare_request(example.turns[0], settings)
        stale: dict[int, int] = {}
        for step in call.rounds():
            accepted, first = int(step.verdict.accepted[0]), int(step.first[0])
            predictions, nodes = step.scores.p[0].argmax(-1).tolist(), int(step.draft.valid[0].sum())
            place = first + accepted  # which the target decides itself
            self.forwards += 1
            if accepted + 1 < nodes and not call.canvas.finished:
                self.rejected += 1
                self.predicted += place in stale
                self.right += stale.get(place) == predictions[accepted]
            stale = {first + node: predictions[node] for node in range(accepted + 1, nodes)}


def main(
    accelerators: Annotated[str, typer.Option(help="Methods that draft chains.")] = METHODS,
    tasks: Annotated[str, typer.Option(help="As of `mmspec bench`.")] = TASKS,
    samples: Annotated[int, typer.Option(min=1, help="Examples of each task.")] = 24,
) -> None:
    """Count rejected drafts that a stale prediction had right."""
    torch.set_num_threads(1)
    pipe = MMSpecPipeline.from_pretrained(MODEL)
    rows = []
    for choice in map(parse_choice, accelerators.split(",")):
        pipe.set_accelerator(choice.name, **choice.options)
        for task in tasks.split(","):
            tails = Tails()
            for example in scene_examples(task, samples):
                tails.add(pipe, example)
            counts = (tails.forwards, tails.rejected, tails.predicted, tails.right)
            rows.append((choice.label, task, *map(str, counts), f"{tails.right / tails.forwards:.1%}"))
    heads = ("reject\na draft", "stale\nthere", "stale\nright", "saved\nat most")
    rich.print(figures(("accelerator", "task", "forwards", *heads), rows, words=2))


if __name__ == "__main__":
    typer.run(main)
