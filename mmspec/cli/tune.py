"""`mmspec tune`: finds the fastest accelerator for a model on this device."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspec.cli.console import Interruptible, note, print_result, progress
from mmspec.cli.loading import (
    AcceleratorChoice,
    absolute_options,
    default_choices,
    drafted_choices,
    parse_choice,
    with_drafter,
)
from mmspec.cli.options import ModelOptions, unpack_options
from mmspec.cli.subject import Question, Subject, load_subject
from mmspec.errors import InputError
from mmspec.open_types import Json, Keywords

if TYPE_CHECKING:
    from rich.table import Table

    from mmspec.accelerators.tuned import Tuned
    from mmspec.evaluation.examples import Example
    from mmspec.evaluation.speed.tuning import Trial
    from mmspec.targets import AnyTarget

__all__ = ["tune"]

TEXT_DEFAULTS = {"task": "mixed", "max_new_tokens": 128, "temperature": 0.0}


@unpack_options
def tune(
    tv: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Allowed total variation distance per token; 0 keeps the output exact."
        ),
    ] = 0.0,
    repeats: Annotated[int, typer.Option(min=1, help="Number of repeats of the last stage.")] = 3,
    *,
    asked: Question,
    how: ModelOptions,
) -> None:
    """Find the fastest accelerator for a model, this device and an allowed loss, and store it.

    All candidates run on a few prompts, and the faster ones on more. Afterwards
    accelerator="auto" uses the winner. Plain decoding wins unless another
    candidate is significantly faster. With --drafter, the faster result of an earlier
    run with another drafter is kept if prompts and settings are the same.

    Example:
        mmspec tune assets/scenes-llava
        mmspec tune assets/scenes-llamagen --task generate --tv 0.1 --batch-size 4
        mmspec caption assets/images/scene.png --accelerator auto
    """
    source = asked.announce()
    from mmspec.accelerators.tuned import Tuned, save_tuned, tuned_file
    from mmspec.evaluation.speed.timing import batches_of
    from mmspec.evaluation.speed.tuning import STAGES, allowed_by, fastest, search

    subject = load_subject(source, asked, how, TEXT_DEFAULTS, speech=True)
    batches = batches_of(subject.examples, asked.batch_size)
    random.Random(how.seed).shuffle(batches)  # so that early stages contain all categories
    form = {"output_type": "pt"} if subject.draws else {}
    choices, decoders = {}, {}
    for choice in candidates(subject, source, how.drafter, tv):
        try:
            contender = subject.contender(choice)
        except InputError as error:  # an option value that the drafter does not support
            note(f"left out: {choice.label} ({error})")
            continue
        if allowed_by(contender.accelerator.exactness, tv):
            choices[choice.label] = choice
            decoders[choice.label] = contender.decoder(seed=how.seed, **subject.settings, **form)
    note(f"{len(decoders)} candidates on up to {len(batches)} batches, in {len(STAGES) + 1} stages")
    with Interruptible() as block, progress(quiet=how.as_json) as bar:
        work = bar.add_task("measuring", total=None)
        trials = search(
            decoders, batches, repeats, subject.pipe.device, lambda label: bar.update(work, description=label)
        )
    if block.interrupted:
        note("interrupted: no result was stored")
        block.finish()
    best = fastest(trials)
    choice, record = choices[best.label], best.record
    described = subject.conditions(source, asked.batch_size, how.seed)
    described["prompts"] = digest_of(subject.examples)
    found = Tuned(
        choice.name,
        absolute_options(choice),
        asked.batch_size,
        tv,
        record.speedup,
        record.speedup_interval,
        [trial.as_dict() for trial in trials],
        described,
    )
    model = subject.pipe.model
    earlier, path = stored(model, found), tuned_file(model, found.batch_size, tv)
    measured = [(one.name, absolute_options(one)) for one in choices.values()]
    is_stored = how.drafter is None or earlier is None or not is_kept(earlier, found, measured, subject)
    if is_stored:
        save_tuned(model, found)
    value = {"best": best.label, **vars(found), "saved": str(path) if is_stored else None}
    print_result(value, shown(trials, best.label, described), how.as_json)
    before = "" if earlier is None else written(earlier)
    if is_stored:
        instead = before and f", instead of {before}"
        note(f'best: {best.label}, stored for accelerator="auto" in {path}{instead}')
    else:
        note(f'best: {best.label}, not stored: accelerator="auto" keeps {before} in {path}')


def stored(model: Any, found: Tuned) -> Tuned | None:
    """The stored result for the model and the conditions of a new one; None if there is none to read."""
    from mmspec.accelerators.tuned import find_tuned

    try:
        return find_tuned(model, found.batch_size, found.tv)
    except InputError:
        return None


def is_kept(earlier: Tuned, found: Tuned, measured: Sequence[tuple[str, Keywords]], subject: Subject) -> bool:
    """Whether an earlier result is faster under the same conditions, and was not measured again."""
    conditions = subject.described.keys() - {"task"} | {"prompts"}  # two files of prompts may have one name
    drafter = Path(str(earlier.options.get("drafter", "")))
    return (
        earlier.speedup > found.speedup
        and all(earlier.found_on.get(name) == found.found_on[name] for name in conditions)
        and (earlier.accelerator, earlier.options) not in measured
        and (drafter.is_dir() or not drafter.is_absolute())
    )


def digest_of(examples: Sequence[Example]) -> str:
    """Hash of what is decoded: the turns, images, classes and recordings of all examples."""
    digest = hashlib.sha256()
    for one in examples:
        digest.update(repr((one.turns, one.label, len(one.images))).encode())
        for image in one.images:
            digest.update(f"{image.mode} {image.size}".encode() + image.tobytes())
        if one.audio is not None:
            digest.update(one.audio["array"].tobytes())
    return digest.hexdigest()[:32]


def written(found: Tuned) -> str:
    """A result as on the command line, with its speed-up."""
    parts = [found.accelerator, *(f"{name}={value}" for name, value in found.options.items())]
    return f"{':'.join(parts)} ({found.speedup:.2f}x)"


def candidates(subject: Subject, source: str, drafter: str | None, tv: float) -> list[AcceleratorChoice]:
    """The candidates for a model: accelerators without a drafter, and the drafters of its folder."""
    from mmspec.evaluation.speed.tuning import variants

    target = subject.pipe.target
    if not subject.draws:
        found = default_choices(source, drafter, target, subject.pipe.default_accelerator)
        named = [(one.name, one.options) for one in found]
    else:
        named = [("none", {})]
        if not target.vector_size:  # continuous tokens need a draft model
            named += [(name, {}) for name in windows(target, tv)]
        named += [(one.name, one.options) for one in drafted_choices(source, drafter)]
    found = []
    for name, options in named:
        for label in variants(name, target, tv):
            choice = parse_choice(label)
            choice = AcceleratorChoice(choice.label, choice.name, {**options, **choice.options})
            found.append(with_drafter(choice, source, drafter))
    return found


def windows(target: AnyTarget, tv: float) -> list[str]:
    """Names of the methods without a head that draft windows of image tokens within the allowed TV."""
    from mmspec.accelerators import promise_of
    from mmspec.cli.loading import fits
    from mmspec.plugins import METHODS

    promises = ("exact", "bounded") if tv else ("exact",)
    return [
        method.name
        for method in METHODS.values()
        if any("window=" in label for label in method.tuned)
        and method.head is None
        and promise_of(method)[0] in promises
        and fits(method, target)
    ]


def shown(trials: Sequence[Trial], best: str, described: Json) -> Table:
    """The trials as a table."""
    from mmspec.evaluation.tables import figures, with_interval

    columns = ("accelerator", "promise", "stage", "prompts", "tokens/\npass", "identical", "speed-up")
    rows = []
    for trial in trials:
        one = trial.record
        counted = str(trial.stage), str(one.samples), f"{one.acceptance_length:.2f}", f"{one.identical:.0%}"
        speedup = with_interval(one.speedup, one.speedup_interval, "x")
        label = f"{trial.label} (best)" if trial.label == best else trial.label
        rows.append((label, one.exactness, *counted, speedup))
    title = ", ".join(f"{name} {described[name]}" for name in ("model", "task", "dtype") if name in described)
    return figures(columns, rows, title=f"{title}; speed-ups over plain decoding in the same stage")
