"""`mmspec check`: is this accelerator really lossless on my model?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from mmspec.cli.console import Interruptible, print_json, progress, show
from mmspec.cli.options import (
    AsJson,
    BatchSize,
    Device,
    Drafter,
    Dtype,
    Images,
    JsonLines,
    Model,
    Prompts,
    Seed,
    Task,
)

if TYPE_CHECKING:
    from mmspec.evaluation.comparison import Comparison

__all__ = ["check"]


def check(
    model: Model = None,
    accelerator: Annotated[
        str | None,
        typer.Option(
            help="copy, draft_model:num_draft_tokens=8, ...; by default the fastest that is here.",
            show_default=False,
        ),
    ] = None,
    drafter: Drafter = None,
    prompts: Prompts = None,
    images: Images = None,
    jsonl: JsonLines = None,
    task: Task = "mixed",
    samples: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 6,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to compare of each.")] = 128,
    temperature: Annotated[float, typer.Option(min=1e-4, help="Of the sampled comparison.")] = 1.0,
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

    Example:
        mmspec check --accelerator copy
        mmspec check path/to/model --drafter path/to/small --image a.jpg
    """
    from mmspec.cli.choice import parse_choice
    from mmspec.cli.loading import (
        choose_drafter,
        choose_examples,
        default_choice,
        load_pipeline,
        reference_model,
        setup_options,
        takes_pictures,
    )
    from mmspec.evaluation.conversations import contender, load_pictures
    from mmspec.evaluation.identity import IdentityCheck
    from mmspec.evaluation.report import identity_report

    choice = parse_choice(accelerator) if accelerator is not None else None
    source = model or reference_model()
    drafter = choose_drafter(source, drafter)
    if choice is None:
        choice = default_choice(drafter)
    options = setup_options(choice, drafter)
    pipe = load_pipeline(source, dtype=dtype, device=device)
    asked = choose_examples(
        prompts,
        images,
        jsonl,
        task=task,
        samples=samples,
        seed=seed,
        takes_pictures=takes_pictures(pipe),
    )
    examples = load_pictures(asked)
    identity = IdentityCheck(
        contender(pipe, choice.name, **options),
        contender(pipe, "none"),
        examples,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        batch_size=batch_size,
    )
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
        names = [example.identifier for example in examples]
        show(identity_report(report, pipe.tokenizer.decode, names))
    block.finish(0 if report.passed else 1)
