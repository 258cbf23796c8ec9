"""Replies of SmolLM2 to prompts that describe images in words, as training data of scenes-smol.

scenes-smol contains the same language model, and learns to give these replies to the images alone. Its output
therefore keeps the entropy of real text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from benchmarks.real_language import read_rows, write_replies
from mmspec.errors import InputError
from mmspec.families.smollm2.language_model import gguf_file
from mmspec.pipelines import MMSpecPipeline
from mmspec.scenes import (
    DESCRIPTION_PROMPTS,
    STORY_PROMPTS,
    Scene,
    SceneObject,
    sample_clip,
    sample_scene,
    training_seeds,
)
from mmspec.scenes.language import name
from reference.smol_data import (
    CHAT_TEMPLATE,
    CLOSING,
    FRAMES,
    IMAGE,
    RepliesBatch,
    Turn,
    encode,
    images_of,
    locate,
    other_seed,
    pixels_of,
)

__all__ = ["INSTRUCTIONS", "Replies", "reply_rows", "tell", "write_scene_replies"]

STAGE = 42  # key of the seeds: no training draws the same scenes
HELD_OUT_ROWS, HELD_OUT_TOGETHER = 32, 8
KINDS = {"single": 0.7, "pair": 0.15, "clip": 0.15}
CUT = 4  # encoded again, a reply of the maximum length can lose a few tokens; it still counts as cut off

INSTRUCTIONS = (
    *DESCRIPTION_PROMPTS,
    *STORY_PROMPTS,
    "Describe what is shown.",
    "Describe it in one sentence.",
    "Describe it in three sentences.",
    "Describe it to someone who cannot see it.",
    "Describe it as a poet would.",
    "Describe it as a scientist would.",
    "Describe the colours.",
    "Describe the shapes.",
    "List what is shown.",
    "List the colours that you see, one per line.",
    "Make a table of what is shown.",
    "Write a caption for a museum.",
    "Write a title and a short paragraph.",
    "Write an alt text for a web page.",
    "Write the first paragraph of a novel that begins here.",
    "Write a poem about it.",
    "Write a rhyme of four lines about it.",
    "Write a haiku about it.",
    "Write a song about it.",
    "Write a dialogue between the things that are shown.",
    "Write a riddle about it.",
    "Write a news report about it.",
    "Write an advertisement for it.",
    "Write instructions for drawing it, step by step.",
    "Write a Python dictionary that describes it.",
    "Compare the things that are shown.",
    "What is the same and what is different among the things that are shown?",
    "Which thing stands out, and why?",
    "What does it remind you of?",
    "What mood does it have?",
    "What could it be used for?",
    "What would you ask a pupil about it?",
    "Where could one find something like this?",
    "Explain it to an alien.",
    "Give it a name and explain the name.",
    "Say something funny about it.",
)


def tell(kind: str, seed: int) -> str:
    """Describe the images of a seed in words, with all attributes that the images show."""
    if kind == "clip":
        clip = sample_clip(seed, frames=FRAMES)
        parts = [
            f"{place(thing)}, which {'stays still' if way == 'still' else f'moves {way}'}"
            for thing, way in zip(clip.scene.objects, clip.directions, strict=True)
        ]
        return f"The video shows {listed(parts)}, on a background of {clip.scene.background}."
    scenes = scenes_of(kind, seed)
    which = ("The image",) if len(scenes) == 1 else ("The first image", "The second image")
    return " ".join(
        f"{label} shows {listed([place(thing) for thing in scene.objects])}, on a background of "
        f"{scene.background}."
        for label, scene in zip(which, scenes, strict=True)
    )


def scenes_of(kind: str, seed: int) -> list[Scene]:
    """Return the scenes of a single image or of a pair."""
    return [sample_scene(one) for one in ((seed, other_seed(seed)) if kind == "pair" else (seed,))]


def place(thing: SceneObject) -> str:
    """An object and where it is: `a small red striped circle at the top left`."""
    if (thing.row, thing.column) == ("middle", "centre"):
        return f"a {name(thing)} in the centre"
    row, column = thing.row.replace("middle", "centre"), thing.column
    return f"a {name(thing)} at the {row} {column}"


def listed(parts: list[str]) -> str:
    """Parts of a sentence with commas, and `and` before the last."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def reply_rows(count: int, max_new_tokens: int, seed: int = 0) -> list[dict[str, Any]]:
    """Make rows with a `prompt` and its parts; equal arguments give equal rows."""
    seeds = training_seeds(seed, STAGE, 0, 0, count)
    rng = np.random.default_rng([seed, STAGE])
    kinds = rng.choice(list(KINDS), size=count, p=list(KINDS.values()))
    rows = []
    for index, (own, kind) in enumerate(zip(seeds.tolist(), kinds.tolist(), strict=True)):
        instruction = INSTRUCTIONS[index % len(INSTRUCTIONS)]
        prompt = f"{tell(kind, own)} {instruction}"
        rows.append({"prompt": prompt, "instruction": instruction, "kind": kind, "seed": own})
    return [{**row, "max_new_tokens": max_new_tokens} for row in rows]


def write_scene_replies(
    out: Path,
    *,
    count: int,
    max_new_tokens: int,
    batch_size: int,
    dtype: torch.dtype | None,
    seed: int = 0,
    threads: int | None = None,
) -> int:
    """Write replies of SmolLM2 to `count` prompts, half of them greedy and half sampled.

    An incomplete file is continued.

    Returns:
        Number of tokens written.

    Raises:
        MissingDependencyError: the package of the language model is not installed.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    rows = reply_rows(count, max_new_tokens, seed)
    pipe = MMSpecPipeline.from_pretrained(gguf_file(), accelerator="none", dtype=dtype)
    pipe.tokenizer.chat_template = CHAT_TEMPLATE  # that of scenes-smol, which has no system prompt
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "batch_size": batch_size}
    return write_replies(pipe, rows, out, temperatures=(0.0, 1.0), **how)


@dataclass(frozen=True)
class Replies:
    """The replies of a file, split into training rows and held-out rows.

    Attributes:
        rows: rows to train on, sorted by kind and length.
        kept: held-out rows, the first ones of the file.
        tokenizer: tokenizer of the trained model.
        visual_tokens: visual tokens per image.
    """

    rows: list[dict[str, Any]]
    kept: list[dict[str, Any]]
    tokenizer: PreTrainedTokenizerBase
    visual_tokens: int

    @classmethod
    def read(cls, file: Path, tokenizer: PreTrainedTokenizerBase, visual_tokens: int) -> Replies:
        """Read a file of `write_scene_replies`.

        Raises:
            InputError: the file has too few rows, or rows of another format.
        """
        rows = sorted(read_rows(file), key=lambda row: row["index"])
        wanted = {"seed", "kind", "instruction", "response", "max_new_tokens"}
        if len(rows) < 2 * HELD_OUT_ROWS or not wanted <= rows[0].keys():
            rule = f"must hold at least {2 * HELD_OUT_ROWS} rows that `python -m reference replies` wrote"
            raise InputError("replies", f"{file}: {len(rows)} rows", rule)
        rest = sorted(rows[HELD_OUT_ROWS:], key=lambda row: (row["kind"], len(row["response"])))
        return cls(rest, rows[:HELD_OUT_ROWS], tokenizer, visual_tokens)

    def batch(self, seed: int, step: int, process: int, count: int) -> RepliesBatch:
        """Return a batch of rows of about the same length; equal arguments give equal rows."""
        first = np.random.default_rng([seed, STAGE, step, process]).integers(len(self.rows) - count + 1)
        return self.encode(self.rows[first : first + count])

    def held_out(self) -> Iterator[RepliesBatch]:
        """Yield the held-out rows in batches."""
        for start in range(0, len(self.kept), HELD_OUT_TOGETHER):
            yield self.encode(self.kept[start : start + HELD_OUT_TOGETHER])

    def encode(self, rows: list[dict[str, Any]]) -> RepliesBatch:
        """Encode rows twice: with their images, and with descriptions of the images in words."""
        turns = [
            Turn(images_of(row["kind"], row["seed"]), row["instruction"], row["response"]) for row in rows
        ]
        said = [self.ended(row) for row in rows]
        shown = [IMAGE * self.visual_tokens * len(turn.images) + turn.prompt for turn in turns]
        told = [f"{tell(row['kind'], row['seed'])} {row['instruction']}" for row in rows]
        tokens, learnt = encode(shown, said, self.tokenizer)
        named = locate(turns, shown, self.tokenizer)
        return RepliesBatch(pixels_of(turns), tokens, learnt, *named, *encode(told, said, self.tokenizer))

    def ended(self, row: dict[str, Any]) -> str:
        """Return a reply with its end token, or without it if the reply was cut off."""
        length = len(self.tokenizer(row["response"], add_special_tokens=False)["input_ids"])
        return str(row["response"]) + (CLOSING if length < row["max_new_tokens"] - CUT else "")
