"""Tiny pipelines for bad requests. Their models must not run."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from PIL import Image
from transformers import PreTrainedModel

from mmspec.errors import InputError, MMSpecError
from mmspec.pipelines import VisionLanguagePipeline
from tests.tiny_models import tiny_image, tiny_llama, tiny_llava, tiny_tokenizer

MAX_MESSAGE = 500


class ForwardError(Exception):
    """A model ran although its input should have been refused."""


@dataclass
class Bench:
    """Pipelines, media and checkpoints for trying rows.

    Attributes:
        base: a permanent folder for the valid checkpoints.
        folder: an empty folder for the current row.
    """

    base: Path
    folder: Path

    def __post_init__(self) -> None:
        _ = self.sound  # making models draws random numbers
        self.answers = self.ask()

    def ask(self) -> list[object]:
        """Return the answers of the pipelines to a valid request, which must be the same after a bad one."""
        return [
            pipeline("red", max_new_tokens=2, apply_chat_template=False).tokens
            for pipeline in (self.vlm, self.text)
        ]

    @cached_property
    def vlm(self) -> VisionLanguagePipeline:
        return VisionLanguagePipeline(*tiny_llava(), "copy")

    @cached_property
    def text(self) -> VisionLanguagePipeline:
        return VisionLanguagePipeline(tiny_llama(vocab=128), tiny_tokenizer(), "copy")

    @cached_property
    def image(self) -> Image.Image:
        return tiny_image()

    @cached_property
    def sound(self) -> Path:
        self.text.model.save_pretrained(self.base / "sound")
        self.text.processor.save_pretrained(self.base / "sound")
        return self.base / "sound"

    def copy(self) -> Path:
        """Copy the valid checkpoint, for a row that damages it."""
        return Path(shutil.copytree(self.sound, self.folder / "checkpoint"))

    def fingerprint(self) -> tuple[object, ...]:
        """Return the global state that a call must not change."""
        return (
            torch.random.get_rng_state().numpy().tobytes(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.backends.cuda.matmul.allow_tf32,
            torch.get_num_threads(),
            logging.getLogger().level,
        )


@dataclass(frozen=True)
class Row:
    """One bad input.

    Attributes:
        number: the kind of fault; rows of one kind share it.
        name: what is bad.
        call: tries it with a bench, or with a folder where it is about media.
        argument: the argument that the error names.
        expected: fragments of the message.
        error: the class of the error.
        runs: True if the model has to run before the fault can show.
    """

    number: int
    name: str
    call: Callable[[Any], object]
    argument: str
    expected: tuple[str, ...] = ()
    error: type[MMSpecError] = InputError
    runs: bool = False

    def __str__(self) -> str:
        return f"{self.number} {self.name}"


@contextlib.contextmanager
def no_forward() -> Iterator[None]:
    """Raise an error if any transformers model runs in the `with` block."""

    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise ForwardError

    with mock.patch.object(PreTrainedModel, "__call__", refuse):
        yield


def problems(row: Row, bench: Bench) -> list[str]:
    """Try one row, and return the problems of its refusal."""
    before = bench.fingerprint()
    try:
        with contextlib.nullcontext() if row.runs else no_forward():
            row.call(bench)
    except MMSpecError as error:
        message = str(error)
        found = [f"lacks {fragment!r}" for fragment in row.expected if fragment not in message]
        if not isinstance(error, row.error):
            found.append(f"is a {type(error).__name__}, not a {row.error.__name__}")
        if isinstance(error, InputError) and not error.argument.endswith(row.argument):
            found.append(f"names {error.argument!r}, not {row.argument!r}")
        if len(message) >= MAX_MESSAGE or "\n" in message:
            found.append(f"has {len(message)} characters, {message.count(chr(10))} line ends")
        if bench.fingerprint() != before:
            found.append("changed global state")
        if bench.ask() != bench.answers:
            found.append("changed the pipeline's answers")
        return [f"{row}: {problem}: {message[:600]}" for problem in found]
    except Exception as error:  # noqa: BLE001  any other class is exactly what this looks for
        return [f"{row}: {type(error).__name__}: {str(error)[:300]}"]
    return [f"{row}: accepted"]
