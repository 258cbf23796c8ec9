"""`mmspec check`: is this accelerator really lossless on my model?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspec.cli.console import Interruptible, print_json, progress, show
from mmspec.cli.options import (
    AsJson,
    BatchSize,
    Device,
    Drafter,
    Dtype,
    GuidanceScale,
    Images,
    JsonLines,
    Model,
    Prompts,
    Seed,
    Task,
)

if TYPE_CHECKING:
    from mmspec.evaluation.identity.comparison import Comparison

__all__ = ["check"]

OF_WORDS = {"task": "mixed", "max_new_tokens": 128, "temperature": 1.0}
OF_IMAGES = "sjd"


def check(
    model: Model = None,
    accelerator: Annotated[
        str | None,
        typer.Option(
            help="copy, draft_model:num_draft_tokens=8, ...; by default what the model names, or copy.",
            show_default=False,
        ),
    ] = None,
    drafter: Drafter = None,
    prompts: Prompts = None,
    images: Images = None,
    jsonl: JsonLines = None,
    task: Task = None,
    samples: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 6,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens to compare of each.", show_default="128")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=1e-4, help="Of the sampled comparison.", show_default="1; for images the model's"),
    ] = None,
    guidance: GuidanceScale = None,
    seed: Seed = 0,
    batch_size: BatchSize = 1,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Compare an accelerator's tokens with plain decoding's; exit with 1 if they differ.

    Greedy tokens are compared with `model.generate` of transformers, sampled
    ones with plain decoding under the same noise. The first difference is shown
    with the gap between the reference's two best logits there: in half
    precision, a gap of at most 2 ulp is a tie that plain decoding itself cannot
    decide, and is called explained.

    Models that draw are compared with plain decoding alike; an exact accelerator
    that gives other tokens of the same distribution has that distribution tested instead, at every
    place of what it drew.

    Example:
        mmspec check --accelerator copy
        mmspec check path/to/model --drafter path/to/small --image a.jpg
        mmspec check --task generate --accelerator sjd --samples 32 --batch-size 8
    """
    from mmspec.cli.choice import parse_choice
    from mmspec.cli.loading import (
        REFERENCE,
        REFERENCE_IMAGE,
        default_choice,
        reference_model,
        with_drafter,
    )
    from mmspec.cli.subject import Question, load_subject
    from mmspec.errors import InputError
    from mmspec.evaluation.identity.images import ImageCheck
    from mmspec.evaluation.identity.text import IdentityCheck
    from mmspec.evaluation.speed.report import identity_report

    choice = parse_choice(accelerator) if accelerator is not None else None
    source = model or reference_model(REFERENCE_IMAGE if task == "generate" else REFERENCE)
    if choice is not None:
        choice = with_drafter(choice, source, drafter)  # what is missing should not cost a load
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "guidance_scale": guidance}
    asked = Question(task, prompts, images, jsonl, samples, seed, settings)
    subject = load_subject(source, asked, OF_WORDS, dtype=dtype, device=device)
    if choice is None:
        choice = parse_choice(OF_IMAGES) if subject.draws else default_choice(source, drafter)
    accelerated = subject.contender(choice)
    plain = subject.contender(parse_choice("none"))
    common: dict[str, Any] = {"seed": seed, "batch_size": batch_size}
    identity: IdentityCheck
    if subject.draws:
        temperature = subject.described["temperature"]
        identity = ImageCheck(
            accelerated,
            plain,
            subject.examples,
            temperature=temperature,
            settings=subject.settings,
            **common,
        )
    elif guidance is not None:
        raise InputError("--guidance", guidance, "nothing: words are compared without guidance")
    else:
        identity = IdentityCheck(accelerated, plain, subject.examples, **subject.settings, **common)
    comparisons: list[Comparison] = []
    with Interruptible() as block, progress(quiet=as_json) as bar:
        work = bar.add_task(f"checking {choice.label}", total=identity.outputs)
        identity = replace(identity, on_output=lambda: bar.advance(work))
        for comparison in identity.comparisons():
            comparisons.append(comparison)
    report = identity.report(comparisons)
    if as_json:
        print_json({"model": source, **report.as_dict(), "finished": not block.interrupted})
    elif comparisons:
        names = [example.identifier for example in subject.examples]
        decode = str if subject.draws else subject.pipe.tokenizer.decode
        show(identity_report(report, decode, names))
    block.finish(0 if report.passed else 1)
