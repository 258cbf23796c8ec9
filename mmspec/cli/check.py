"""`mmspec check`: compares the tokens of an accelerator with those of plain decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from mmspec.cli.compared import image_accelerators
from mmspec.cli.console import Interruptible, print_result, progress
from mmspec.cli.loading import choose, parse_choice
from mmspec.cli.options import ModelOptions, unpack_options
from mmspec.cli.subject import Question, load_subject
from mmspec.errors import InputError
from mmspec.open_types import Keywords

if TYPE_CHECKING:
    from mmspec.evaluation.identity.comparison import Comparison

__all__ = ["check"]

TEXT_DEFAULTS = {"task": "mixed", "max_new_tokens": 128, "temperature": 1.0}


@dataclass(frozen=True, kw_only=True)
class CheckQuestion(Question):
    """Options of `mmspec check` for the model and its prompts."""

    samples: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 6
    temperature: Annotated[
        float | None,
        typer.Option(
            min=1e-4,
            help="Temperature of the sampled comparison.",
            show_default="1; for images that of the model",
        ),
    ] = None


@unpack_options
def check(
    accelerator: Annotated[
        str | None,
        typer.Option(
            help="none, copy, sjd:window=16, ...; by default for text that of drafters.json in the model's "
            "folder, or copy; for images the first of mmspec bench."
        ),
    ] = None,
    *,
    asked: CheckQuestion,
    how: ModelOptions,
) -> None:
    """Check that an accelerator keeps the output, tokens or their distribution; exit with 1 if it does not.

    Greedy tokens are compared with `model.generate` of transformers, sampled tokens
    with plain decoding under the same noise. The report shows the first difference
    and the gap between the two best logits of the reference there. A difference
    counts as explained by rounding if this gap is small: at most 2 ulp (units in the
    last place) in half precision and 0 in float32; with recurrent layers, 8 and 128.

    Image generators are compared with plain decoding. If an exact accelerator
    generates other tokens of the same distribution, the distribution is tested at
    every place. Drafts for MAR are compared with decoding of one cell per forward
    pass, masked language models with decoding of one place per forward pass.

    Example:
        mmspec check --accelerator copy
        mmspec check --drafter assets/scenes-llava-small --image assets/images/scene.png
        mmspec check --task generate --accelerator sjd --samples 32 --batch-size 8
    """
    source = asked.announce()
    from mmspec.evaluation.identity.checks import (
        ContinuousCheck,
        IdentityCheck,
        ImageCheck,
        MaskedCheck,
    )
    from mmspec.evaluation.identity.comparison import identity_report

    choose(accelerator, source, how.drafter)  # raises for a missing drafter, before the model is loaded
    subject = load_subject(source, asked, how, TEXT_DEFAULTS)
    choice = choose(accelerator, source, how.drafter, subject.pipe.default_accelerator)
    if accelerator is None and how.drafter is None and subject.draws:
        choice = parse_choice(image_accelerators(subject.pipe.target)[0])
    accelerated, target = subject.contender(choice), subject.pipe.target
    common: Keywords = {
        "accelerated": accelerated,
        "plain": subject.contender(parse_choice(accelerated.accelerator.drafter.reference)),
        "examples": subject.examples,
        "seed": how.seed,
        "batch_size": asked.batch_size,
    }
    identity: IdentityCheck
    if subject.draws and target.vector_size:
        identity = ContinuousCheck(**common, settings=subject.settings)
    elif subject.draws:
        temperature = subject.described["temperature"]
        identity = ImageCheck(**common, temperature=temperature, settings=subject.settings)
    elif asked.guidance_scale is not None:
        raise InputError(
            "--guidance-scale",
            asked.guidance_scale,
            "cannot be used with text, which is compared without guidance",
        )
    else:
        kind = MaskedCheck if target.fills_masks else IdentityCheck
        identity = kind(**common, **subject.settings)
    comparisons: list[Comparison] = []
    with Interruptible() as block, progress(quiet=how.as_json) as bar:
        work = bar.add_task(f"checking {choice.label}", total=identity.outputs)
        identity = replace(identity, on_output=lambda: bar.advance(work))
        for comparison in identity.comparisons():
            comparisons.append(comparison)
    report = identity.report(comparisons)
    if how.as_json or comparisons:
        value = {"model": source, **report.as_dict(), "finished": not block.interrupted}
        names = [example.identifier for example in subject.examples]
        decode = str if subject.draws else subject.pipe.tokenizer.decode
        print_result(value, identity_report(report, decode, names), how.as_json)
    block.finish(0 if report.passed else 1)
