"""Prompts for training drafters on images that the target generates, for all families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mmspec.core.interfaces import Request
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.families.llamagen.parts import load_reader
from mmspec.pipelines.image_prompts import image_requests
from mmspec.pipelines.image_settings import ImageSettings
from mmspec.plugins import family_of, load
from mmspec.targets import CausalTarget, ImageTokenTarget
from mmspec.text_file import json_lines, read_text
from mmspec.training.data.images import TRIAL_IMAGES, PromptedImages
from mmspec.training.data.rows import check_count, read_all
from mmspec.training.data.sequences import DrafterData, Trial

__all__ = ["ImagePrompts"]

FORMS = 'must be {"prompt": text} or {"class": number}'


class ImagePrompts:
    """Prompts of a file as `data` of `train_drafter`, for methods that train on images of the target.

    Args:
        file: JSONL file of `{"prompt": text}`, or of `{"class": number}` for a class-conditional LlamaGen.
            Other keys are ignored.
        height, width: size of the images in pixels; None is the size for which the model was trained.

    Raises:
        InputError: the file or one of its lines cannot be used.
    """

    def __init__(self, file: str | Path, height: int | None = None, width: int | None = None) -> None:
        self.file, self.size = Path(file), {"height": height, "width": width}
        text = read_text(self.file, "data", "must be a JSONL file of prompts")
        self.rows = read_all(json_lines(text, "data, line {}".format, FORMS), read_row)
        check_count(self.rows, TRIAL_IMAGES)

    def __call__(
        self, target: CausalTarget, words: Any, batch_size: int, seed: int, regenerate: int
    ) -> DrafterData:
        """Make the training data; see `MakeData`."""
        if regenerate:
            raise InputError("regenerate", regenerate, "must be 0; the target generates images")
        family = family_of(target.model.config)
        ask: Callable[[Sequence[str | int]], Trial]
        if family is not None and family.prompts is not None:
            ask = partial(trial_of, load(family.prompts), target, words, self.size)
        elif isinstance(target, ImageTokenTarget):
            read = load_reader(words, target) if isinstance(words, Path) else {"tokenizer": words}
            ask = partial(image_trial, target, {**read, **self.size})
        else:
            raise InputError("data", str(self.file), "must be conversations; the target generates no images")
        return PromptedImages(self.rows, ask, batch_size, seed)


def read_row(row: Any, where: str) -> str | int:
    """Read a prompt or a class."""
    asked = None
    if isinstance(row, dict):
        given = [row[key] for key in ("prompt", "class") if row.get(key) is not None]
        asked = given[0] if len(given) == 1 else None
    if not isinstance(asked, str | int) or isinstance(asked, bool):
        raise InputError(where, row, FORMS)
    return asked


def image_trial(target: ImageTokenTarget, what: dict[str, Any], asked: Sequence[str | int]) -> Trial:
    """Make image requests from prompts or classes, with the sampler of `ImagePipeline`."""
    sampler = ImageSettings.from_keywords(target, {}).sampler(target)
    named: dict[str, Any] = {"prompt" if target.classes is None else "class_labels": list(asked)}
    requests = image_requests(target, **named, **what, guided=sampler.is_guided)
    return Trial(requests, sampler, max(each.layout.length for each in requests if each.layout))


def trial_of(
    make: Callable[..., tuple[list[Request], Sampler, int]],
    target: CausalTarget,
    processor: Any,
    size: dict[str, int | None],
    asked: Sequence[str | int],
) -> Trial:
    """Make image requests with the function of the target's family."""
    return Trial(*make(target, processor, list(map(str, asked)), **size))
