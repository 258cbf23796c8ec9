"""`mmspec-extras`: commands that train heads and filters, and merge heads and experts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from mmspec.cli import run
from mmspec.cli.console import note, print_result
from mmspec.cli.options import ModelOptions, unpack_options
from mmspec.cli.subject import Question, Subject
from mmspec.open_types import Keywords

app = typer.Typer(no_args_is_help=True)


def main() -> None:
    """Run the command line and exit."""
    run(app)


@app.callback()
def _group() -> None:
    """Train heads and filters, and merge heads and experts."""


@app.command()
@unpack_options
def train_judge(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    accelerator: Annotated[
        str, typer.Option(help="Accelerator that drafts the tokens to label: name[:option=value].")
    ] = "copy",
    answer: Annotated[
        str,
        typer.Option(
            help="Part of the reply that a harmless token does not change: its last number, or its words. "
            "auto compares the number if the prompt asks how many or how much and the reply is complete."
        ),
    ] = "auto",
    bar: Annotated[
        float, typer.Option(help="Least agreement (F1) of the words from a harmless token on.")
    ] = 0.5,
    tokens_per_prompt: Annotated[int, typer.Option(min=1, help="Largest number of labels.")] = 8,
    decay: Annotated[float, typer.Option(min=0.0, help="Penalty on the squared weights.")] = 1.0,
    *,
    asked: Question,
    how: ModelOptions,
) -> None:
    """Train a judge of draft tokens (Judge Decoding) on labels from the model's greedy replies.

    Each label takes the rest of a reply.

    Example:
        mmspec-extras train-judge my-model --prompt-file prompts.jsonl --samples 64 --out my-judge
    """
    from mmspec.cli.loading import parse_choice, with_drafter
    from mmspec.cli.subject import load_subject
    from mmspec_extras.methods.judge import training

    source = asked.announce()
    choice = with_drafter(parse_choice(accelerator), source, how.drafter)
    subject = load_subject(source, asked, how, {"task": "caption", "max_new_tokens": 128})
    subject.contender(choice)
    subject.pipe.enable_prefix_cache()
    calls = first_calls(subject, **{**subject.settings, "temperature": 0.0})
    folder = training.train_judge(
        subject.pipe,
        calls,
        out,
        answer=answer,
        bar=bar,
        tokens_per_prompt=tokens_per_prompt,
        decay=decay,
        record={"target": Path(asked.source).name, "accelerator": accelerator, **subject.described},
    )
    use = f"use it: --accelerator {accelerator}:acceptance=judge:judge={folder}"
    print_result({"folder": str(folder)}, use, how.as_json)


@app.command()
@unpack_options
def train_filter(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    block_length: Annotated[
        int | None, typer.Option(min=1, help="Places of a block.", show_default="the model's own")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Training steps, each on all examples.")] = 2000,
    threshold: Annotated[float, typer.Option(help="Threshold at which errors are measured.")] = 0.96,
    learn: Annotated[
        str, typer.Option(help="right (for learned:filter=...) or order (for spot:head=...).")
    ] = "right",
    *,
    asked: Question,
    how: ModelOptions,
) -> None:
    """Train a filter that finds final places, or the next ones, on a masked model's own outputs.

    Training takes minutes. Every prompt is decoded plainly once; with --learn right,
    an oracle that knows the output decodes it a second time.

    Example:
        mmspec-extras train-filter my-sdar --prompt-file prompts.txt --samples 64 --out my-filter
    """
    from mmspec.cli.subject import load_subject
    from mmspec_extras.methods.learned import training

    subject = load_subject(asked.announce(), asked, how, {"task": "caption", "max_new_tokens": 128})
    calls = first_calls(subject, **subject.settings)
    use = "spot:head" if learn == "order" else "learned:filter"
    folder = training.train_filter(
        subject.pipe,
        calls,
        out,
        block_length=block_length,
        epochs=epochs,
        threshold=threshold,
        learn=learn,
        record={"target": Path(asked.source).name, **subject.described},
    )
    print_result({"folder": str(folder)}, f"use it: --accelerator {use}={folder}", how.as_json)


@app.command()
def merge_heads(
    heads: Annotated[list[Path], typer.Argument(help="Folders of heads, named after their tasks.")],
    base: Annotated[Path, typer.Option(help="Folder of the head from which they were trained.")],
    out: Annotated[Path, typer.Option(help="File to write (.safetensors).")],
) -> None:
    """Merge heads of several tasks into one store (EMR-Merging).

    Example:
        mmspec-extras merge-heads captions questions --base my-head --out heads.safetensors
    """
    from safetensors.torch import load_file, save_file

    from mmspec_extras import head_store

    read, *others = (load_file(folder / "model.safetensors") for folder in (base, *heads))
    tasks = (folder.resolve().name for folder in heads)
    save_file(head_store.merge_heads(read, dict(zip(tasks, others, strict=True))), out)
    note(f"wrote {out}: {out.stat().st_size} bytes")


@app.command()
def take_head(
    store: Annotated[Path, typer.Argument(help="File of merge-heads.")],
    task: Annotated[str, typer.Argument(help="Name of the task.")],
    base: Annotated[Path, typer.Option(help="Folder of the base, for its config.")],
    out: Annotated[Path, typer.Option(help="Folder to write, for --drafter.")],
) -> None:
    """Restore the head of one task from a store.

    Example:
        mmspec-extras take-head heads.safetensors captions --base my-head --out my-captions
    """
    from safetensors.torch import load_file, save_file

    from mmspec_extras.head_store import restore_head

    restored = restore_head(load_file(store), task)
    out.mkdir(parents=True, exist_ok=True)
    save_file(restored, out / "model.safetensors", {"format": "pt"})
    shutil.copy(base / "config.json", out)
    note(f"wrote {out}")


@app.command()
@unpack_options
def merge_experts(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    experts: Annotated[int, typer.Option(help="Experts of each layer.")],
    *,
    asked: Question,
    how: ModelOptions,
) -> None:
    """Merge experts of a mixture of experts into a draft model (UNCURL), grouped on the prompts.

    Example:
        mmspec-extras merge-experts my-moe --prompt-file prompts.jsonl --experts 4 --out my-draft
    """
    from mmspec.cli.subject import load_subject
    from mmspec_extras import expert_merging

    subject = load_subject(asked.announce(), asked, how, {"task": "caption", "max_new_tokens": 128})
    calls = first_calls(subject, **subject.settings)
    expert_merging.merge_experts(subject.pipe, calls, experts).save_pretrained(out)
    subject.pipe.processor.save_pretrained(out)
    use = f"use it: --accelerator draft_model --drafter {out}"
    print_result({"folder": str(out)}, use, how.as_json)


def first_calls(subject: Subject, **settings: object) -> list[Keywords]:
    """Return the keywords of a call for the first turn of each example; note how many turns are left out."""
    from mmspec.evaluation.examples import later_turns

    if left_out := later_turns(subject.examples):
        note(f"{left_out} later turns of conversations are left out; only first turns are decoded")
    return [
        {"prompt": one.turns[0], "images": list(one.images) or None, **settings} for one in subject.examples
    ]
