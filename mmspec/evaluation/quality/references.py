"""Questions with their right answers: scenes, where there is one, or a file of the user's own.

Knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mmspec.errors import InputError
from mmspec.evaluation.examples import FIRST_SEED, Example, scene_examples
from mmspec.evaluation.prompt_files import read_prompt_file
from mmspec.scenes import caption, questions, sample_scene
from mmspec.text_file import json_lines, read_text

__all__ = ["OWN", "Referenced", "read_references", "scene_references"]

OWN = "own"


@dataclass(frozen=True)
class Referenced:
    """A question, and what it may be answered with.

    Attributes:
        example: one turn; its category is the task.
        references: at least one.
    """

    example: Example
    references: tuple[str, ...]


def scene_references(count: int, seed: int = 0) -> list[Referenced]:
    """Ask for the caption of each of some held-out scenes, and one question about it.

    Args:
        count: of scenes.
        seed: of the first.

    Raises:
        InputError: more scenes than there are.
    """
    captions, asked = (scene_examples(task, count, seed) for task in ("caption", "question"))
    found = []
    for index, (described, question) in enumerate(zip(captions, asked, strict=True)):
        scene = sample_scene(FIRST_SEED + seed + index)
        answers = questions(scene, np.random.default_rng([scene.seed, 0xBE]), 1)
        found += [
            Referenced(described, (caption(scene),)),
            Referenced(question, (answers[0].answer,)),
        ]
    return found


def read_references(path: str | Path, count: int | None = None) -> list[Referenced]:
    """Read questions and references from a JSON-lines file.

    A line is what `read_prompt_file` reads, with one turn, and `references`: a string or a list of them.

    Args:
        path: the file.
        count: the first so many; None takes all.

    Raises:
        InputError: no such file, or a line that cannot be used; the message has its number.
    """
    path = Path(path)
    examples = read_prompt_file(path, count)
    lines = json_lines(read_text(path, "prompt file"), partial("{}:{}".format, path.name))
    found = []
    for example, (where, entry) in zip(examples, lines, strict=False):
        if len(example.turns) != 1:
            raise InputError(f"{where}: turns", list(example.turns), "one turn, which the references answer")
        given = entry.get("references") if isinstance(entry, dict) else None
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not texts or not all(isinstance(one, str) for one in texts):
            raise InputError(f"{where}: references", given, "a string, or a list of at least one")
        if not all(one.strip() for one in texts):
            raise InputError(f"{where}: references", given, "texts that are not empty")
        found.append(Referenced(example, tuple(texts)))
    return found
