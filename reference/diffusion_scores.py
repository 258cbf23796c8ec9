"""Scores of the reference diffusion model: share of correct texts, and tokens per forward pass."""

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
        mode: mode of the model, "blocks" or "autoregressive".
        accelerator: label of the accelerator, with its options.
        exactness: guarantee of the accelerator.
        task: "caption" or "describe".
        right: share of texts without an error.
        identical: share of texts that equal plain decoding in the same mode, token for token.
        edits: edit distance to plain decoding, in tokens, divided by the tokens of plain decoding.
        tokens_a_forward: tokens per forward pass; prefill is not counted.
        interval: 95 % interval of `tokens_a_forward` over prompts.
        seconds: seconds for all prompts.
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
    """Score accelerators in each mode of a model, on held-out scenes.

    Args:
        folder: folder of the model.
        choices: accelerators of each mode, plain decoding first.
        scenes: number of scenes, with the seeds `seed`, `seed + 1`, ...
        seed: first seed, within `HELD_OUT_SEEDS`.
        batch_size: prompts per batch.
        temperature: 0 for greedy decoding; else each prompt is sampled with the seed of its scene.

    Returns:
        `records`, the fields of a `Row` each, and `settings`: the arguments and the machine.

    Raises:
        InputError: a scene is not held out.
    """
    if scenes < 1 or seed not in HELD_OUT_SEEDS or seed + scenes - 1 not in HELD_OUT_SEEDS:
        raise InputError(
            "seed", (seed, scenes), f"must keep all scenes within 0 to {HELD_OUT_SEEDS.stop - 1}"
        )
    drawn, rows = [sample_scene(seed + index) for index in range(scenes)], []
    for mode, asked in choices.items():
        other = None if mode == "blocks" else mode  # some models have only the default mode, blocks
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
    """Return the figures of the pipeline's accelerator on a task, and the tokens of all texts."""
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
    """Return the area under the curve of accuracy over tokens per forward pass (AUP of d3LLM).

    An accuracy y has the weight min(exp(-3 (1 - y / best)), 1).

    Args:
        points: tokens per forward pass and accuracy in percent, for each setting.
    """
    best = max((accuracy for _, accuracy in points), default=0.0) or 1.0
    curve = [(speed, y * min(math.exp(-DECAY * (1 - y / best)), 1.0)) for speed, y in sorted(points)]
    pairs = zip(curve, curve[1:], strict=False)
    return sum((right - left) * (one + other) / 2 for (left, one), (right, other) in pairs)
