"""Accelerators that a bench compares: lists of the user, defaults, and the best of several settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspec.cli.console import progress
from mmspec.cli.loading import (
    AcceleratorChoice,
    compared_choices,
    default_choices,
    drafted_choices,
    fits,
    own_drafters,
)
from mmspec.cli.options import ModelOptions
from mmspec.cli.subject import Subject
from mmspec.errors import InputError
from mmspec.registry import alternatives

if TYPE_CHECKING:
    from mmspec.evaluation.examples import Example
    from mmspec.targets import AnyTarget

__all__ = ["ALL", "Search", "default_groups", "find_best", "groups_of", "image_accelerators"]

ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Search:
    """Options of the search for the best of several settings."""

    best: Annotated[
        str, typer.Option(help="Measure that selects the best of several settings: seconds or forwards.")
    ] = "seconds"
    search: Annotated[int, typer.Option(min=1, help="Number of other prompts for the search.")] = 12
    search_file: Annotated[
        Path | None,
        typer.Option(
            help="File of those prompts, in a format of --prompt-file; by default scenes or captions."
        ),
    ] = None

    def others(self, subject: Subject) -> list[Example] | None:
        """The prompts of the search; None if the user's own prompts are measured without --search-file."""
        from mmspec.evaluation.contenders import load_images, load_recordings
        from mmspec.evaluation.prompt_files import read_prompt_file

        if self.search_file is not None:
            found = read_prompt_file(self.search_file, self.search, evenly=True, recordings=subject.hears)
            if subject.hears:
                return load_recordings(found, subject.pipe.processor.feature_extractor.sampling_rate)
            return found if subject.draws else load_images(found)
        return None if subject.others is None else subject.others(self.search)


def groups_of(accelerators: str, source: str, drafter: str | None) -> list[list[AcceleratorChoice]]:
    """Parse a list of accelerators into groups of settings; the best setting of each group is compared.

    "none" comes first.
    """
    written = [alternatives(part) for part in accelerators.split(",") if part.strip()]
    choices = compared_choices(",".join(label for labels in written for label in labels), source, drafter)
    by_label = {choice.label: choice for choice in choices}
    groups = [list(dict.fromkeys(label.strip() for label in labels)) for labels in written]
    groups = groups if ["none"] in groups else [["none"], *groups]
    return [[by_label[label] for label in labels] for labels in dict.fromkeys(map(tuple, groups))]


def default_groups(
    accelerators: str | None, subject: Subject, source: str, drafter: str | None
) -> list[list[AcceleratorChoice]]:
    """The accelerators to compare without --accelerator, or with `all`."""
    if not subject.draws:
        pipe = subject.pipe
        return [
            [choice] for choice in default_choices(source, drafter, pipe.target, pipe.default_accelerator)
        ]
    if accelerators == ALL:
        return groups_of(image_methods(subject.pipe.target, source, drafter), source, drafter)
    groups = groups_of(",".join(image_accelerators(subject.pipe.target)), source, None)
    known = {choice.label for group in groups for choice in group}
    drafted = drafted_choices(source, drafter)
    return [*groups, *([choice] for choice in drafted if choice.label not in known)]


def find_best(
    groups: Sequence[Sequence[AcceleratorChoice]],
    subject: Subject,
    searched: Search,
    batch_size: int,
    how: ModelOptions,
) -> tuple[list[AcceleratorChoice], dict[str, dict[str, dict[str, float]]]]:
    """Find the best setting of each accelerator on other prompts.

    Returns:
        The best choices, and for each of their labels the figures of all settings that were tried.
    """
    from mmspec.evaluation.speed.timing import batches_of
    from mmspec.evaluation.speed.tuning import MEASURES, best_of

    if searched.best not in MEASURES:
        raise InputError("--best", searched.best, f"must be {' or '.join(MEASURES)}")
    choices = {choice.label: choice for group in groups for choice in group}
    if len(choices) == len(groups):
        return list(choices.values()), {}
    others = searched.others(subject)
    if others is None:
        written = " or ".join(choice.label for group in groups if len(group) > 1 for choice in group)
        rule = (
            "must have one setting each without --search-file; the search needs prompts that are not measured"
        )
        raise InputError("--accelerator", written, rule)
    batches = batches_of(others, batch_size)
    settings = {**subject.settings, **subject.form}
    decoders = {
        label: subject.contender(choice).decoder(seed=how.seed, **settings)
        for label, choice in choices.items()
    }
    labels = [[choice.label for choice in group] for group in groups]
    with progress(quiet=how.as_json) as bar:
        tried = [label for group in labels if len(group) > 1 for label in group]
        work = bar.add_task("searching", total=(len(tried) + 1) * len(batches))
        found = best_of(
            labels,
            decoders,
            batches,
            subject.pipe.device,
            searched.best,
            lambda label: bar.update(work, advance=1, description=label),
        )
    return [choices[label] for label in found], found


def image_accelerators(target: Any) -> list[str]:
    """Accelerators of images that are compared by default; `mmspec check` uses the first."""
    return list(target.compared) or ["sjd", "gsd", "lantern", "zipar"]


def image_methods(target: AnyTarget, source: str, drafter: str | None) -> str:
    """All accelerators of images that fit this model, each with the settings of its search."""
    from mmspec.heads.checkpoint import head_of
    from mmspec.plugins import METHODS

    heads = {one.name for one in own_drafters(source).values()} if drafter is None else {head_of(drafter)}
    found = ["none"]
    for method in METHODS.values():
        if method.trials and (method.name in heads if method.head else fits(method, target)):
            found += method.trials
    return ",".join(found)
