"""Scores of the reference diffusion model: how much of what it says is right, and tokens per forward pass."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nltk.metrics.distance import edit_distance
from tqdm.auto import tqdm

from mmspec.cli.loading import AcceleratorChoice
from mmspec.errors import InputError
from mmspec.evaluation.machine import environment
from mmspec.evaluation.speed.record import ratio_interval
from mmspec.pipelines import MMSpecPipeline
from mmspec.scenes import HELD_OUT_SEEDS, Scene, caption, describe, render, sample_scene
from reference.vlm_scores import CAPTION_PROMPT, DESCRIPTION_PROMPT

__all__ = ["Row", "aup", "score_modes"]

TASKS = {"caption": (CAPTION_PROMPT, caption, 48), "describe": (DESCRIPTION_PROMPT, describe, 256)}
DECAY = 3.0


@dataclass(frozen=True)
class Row:
    """Figures of an accelerator on one task.

    Attributes:
        mode: of the model: blocks, or autoregressive.
        accelerator, exactness: as it was asked for, and what it promises.
        task: caption or describe.
        right: share of texts that are right to the word.
        identical: share that equals plain decoding of the same mode, token for token.
        edits: tokens to insert, delete or replace for that, a token of plain decoding.
        tokens_a_forward: and its 95 % interval over prompts; prefill counts as none.
        seconds: of all prompts.
    """

    mode: str
    accelerator: str
    exactness: str
    task: str
    right: float
    identical: float
    edits: float
    tokens_a_forward: float
    interval: tuple[float, float] | None
    seconds: float


def score_modes(
    folder: str,
    choices: Mapping[str, Sequence[AcceleratorChoice]],
    scenes: int,
    seed: int,
    *,
    batch_size: int = 8,
    temperature: float = 0.0,
) -> dict[str, Any]:
    """Score accelerators of both modes of a model on held-out scenes.

    Args:
        folder: of the model.
        choices: mode -> accelerators, plain decoding first.
        scenes, seed: how many, from which seed on.
        batch_size: prompts decoded together.
        temperature: 0 takes the likeliest tokens; else prompts have seeds of their own.

    Returns:
        `records` as of `Row`, and `settings`: the arguments and the machine.

    Raises:
        InputError: seeds that training may have seen.
    """
    if scenes < 1 or seed not in HELD_OUT_SEEDS or seed + scenes - 1 not in HELD_OUT_SEEDS:
        raise InputError(
            "seed", (seed, scenes), f"must keep all scenes within 0 to {HELD_OUT_SEEDS.stop - 1}"
        )
    drawn, rows = [sample_scene(seed + index) for index in range(scenes)], []
    for mode, asked in choices.items():
        other = None if mode == "blocks" else mode  # the first is the only one of some models
        pipe: Any = MMSpecPipeline.from_pretrained(folder, accelerator="none", mode=other)
        plain: dict[str, list[list[int]]] = {}
        for choice in tqdm(asked, desc=mode, unit="accelerator"):
            pipe.set_accelerator(choice.name, **choice.options)
            for task in TASKS:
                row, tokens = score(pipe, task, drawn, batch_size, temperature)
                same = plain.setdefault(task, tokens)
                pairs = list(zip(tokens, same, strict=True))
                compared = {
                    "identical": sum(one == other for one, other in pairs) / scenes,
                    "edits": sum(edit_distance(*pair) for pair in pairs) / sum(map(len, same)),
                }
                rows.append(Row(mode, choice.label, pipe.accelerator.exactness, **compared, **row))
    asked_for = {"scenes": scenes, "seed": seed, "batch_size": batch_size, "temperature": temperature}
    settings = {"model": folder, **asked_for, **environment(pipe.target.device, pipe.target.dtype)}
    return {"settings": settings, "records": [asdict(row) for row in rows]}


def score(
    pipe: Any, task: str, scenes: Sequence[Scene], batch_size: int, temperature: float
) -> tuple[dict[str, Any], list[list[int]]]:
    """Figures of the pipeline's accelerator on a task, and the tokens of all texts."""
    prompt, truth, most = TASKS[task]
    texts, tokens, forwards, started = list[str](), list[list[int]](), list[int](), time.monotonic()
    for start in range(0, len(scenes), batch_size):
        batch = scenes[start : start + batch_size]
        said = pipe(
            [prompt] * len(batch),
            images=[render(scene) for scene in batch],
            max_new_tokens=most,
            temperature=temperature,
            seed=[scene.seed for scene in batch],
        )
        texts, tokens = texts + said.text, tokens + said.tokens
        forwards += [count - said.stats.prompt_forwards for count in said.stats.nfe]
    seconds = time.monotonic() - started
    counts = [len(each) for each in tokens]
    right = [text.strip() == truth(scene) for text, scene in zip(texts, scenes, strict=True)]
    figures = {
        "task": task,
        "right": sum(right) / len(right),
        "tokens_a_forward": sum(counts) / sum(forwards),
        "interval": ratio_interval(counts, forwards),
        "seconds": seconds,
    }
    return figures, tokens


def aup(points: Sequence[tuple[float, float]]) -> float:
    """Area under a curve of accuracy (percent) over tokens per forward pass (d3LLM's AUP).

    An accuracy y counts with the weight min(exp(-3 (1 - y / best)), 1).

    Args:
        points: tokens per forward pass and accuracy of each setting.
    """
    best = max((accuracy for _, accuracy in points), default=0.0) or 1.0
    curve = [(speed, y * min(math.exp(-DECAY * (1 - y / best)), 1.0)) for speed, y in sorted(points)]
    pairs = zip(curve, curve[1:], strict=False)
    return sum((right - left) * (one + other) / 2 for (left, one), (right, other) in pairs)
