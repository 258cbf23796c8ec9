"""`mmspec train`: drafters for any model, and draft models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mmspec.cli.console import note, print_result
from mmspec.cli.options import AsJson, unpack_options
from mmspec.open_types import Keywords

__all__ = ["Start", "TrainingOptions", "train_app"]

Start = Annotated[Path | None, typer.Option("--from", help="Trained folder to begin with.")]
Pixels = Annotated[
    int | None, typer.Option(help="Pixels of images that the target draws.", show_default="the model's own")
]

train_app = typer.Typer(help="Train models.", no_args_is_help=True)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of every training; None leaves the choice to the trainer."""

    minutes: Annotated[float | None, typer.Option(min=0.0, help="Length of the training.")] = None
    steps: Annotated[int | None, typer.Option(min=1, help="Length in steps instead; reproducible.")] = None
    batch_size: Annotated[int | None, typer.Option(min=1, help="Examples that a process reads at once.")] = (
        None
    )
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and examples.")] = 0
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's choice if not given.")] = (
        None
    )
    resume: Annotated[bool, typer.Option("--resume", help="Go on from an interrupted run.")] = False
    as_json: AsJson = False

    @property
    def plan(self) -> Keywords:
        """The keywords of a trainer that are given, see `RunOptions`."""
        return {name: value for name, value in vars(self).items() if value is not None and name != "as_json"}

    def report(self, folder: Path, hint: str | None = None, **record: str) -> None:
        """Print the folder and a hint, a command that takes it; or the folder and its record as JSON."""
        print_result({"folder": str(folder), **record, "seed": self.seed}, str(folder), self.as_json)
        if hint is not None and not self.as_json:
            note(f"{hint} {folder}")


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Options of every training that a target runs along with."""

    max_length: Annotated[int | None, typer.Option(min=1, help="Skip conversations of more tokens.")] = None
    dtype: Annotated[
        str, typer.Option(help="Of the target: float32, bfloat16, float16; auto is bfloat16 on a GPU.")
    ] = "auto"
    accumulate: Annotated[int, typer.Option(min=1, help="So many batches make a step.")] = 1
    log_dir: Annotated[Path | None, typer.Option(help="Folder for tensorboard.")] = None


@train_app.callback()
def _group() -> None:
    """Train models; several GPUs, also with FSDP 2, through `accelerate launch -m mmspec train ...`."""


@train_app.command()
@unpack_options
def drafter(
    target: Annotated[str, typer.Option(help="Folder or hub id of the model that it drafts for.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write.", show_default="named after target and method")
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="cjd, dflash, dspark, eagle, eagle3, flash, hydra, medusa, msd, mtp, ppd, specvlm or "
            "vispec; with settings: flash:block=10."
        ),
    ] = "eagle",
    data: Annotated[
        Path | None,
        typer.Option(
            help="Conversations, with images or not: JSONL, or LLaVA's JSON. For image models a JSONL file "
            "of images: image, and prompt or class; cjd needs none. Scenes if not given, which no "
            "model of text alone can read."
        ),
    ] = None,
    height: Pixels = None,
    width: Pixels = None,
    regenerate: Annotated[
        int, typer.Option(min=0, help="Longest reply that the target writes itself; 0 learns the data's.")
    ] = 0,
    learn_prompts: Annotated[
        bool, typer.Option("--learn-prompts", help="Learn all text of the conversations, not replies alone.")
    ] = False,
    states: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps the target's hidden states of every sequence: the next training on the "
            "same data does not run it again. Not for scenes and images, which are new in every step."
        ),
    ] = None,
    start: Start = None,
    *,
    along: TargetOptions,
    training: TrainingOptions,
) -> None:
    """Train a drafter for a model, which runs along and stays as it is.

    Resumable; writes a folder that `drafter=` and `--drafter` take. By default
    it takes 10 minutes, 8 examples at once.

    Example:
        mmspec train drafter --target llava-hf/llava-1.5-7b-hf --data my.jsonl --method flash
        mmspec train drafter --target assets/scenes-llava --out my-flash --method flash:block=10:bias_rank=64
        mmspec train drafter --target assets/scenes-llamagen --out my-eagle --minutes 8
        mmspec train drafter --target assets/scenes-llamagen --out my-eagle --minutes 8 --resume
        mmspec train drafter --target my-llamagen --out my-eagle --data images.jsonl --minutes 60
        mmspec train drafter --target deepseek-ai/Janus-Pro-7B --method cjd --data prompts.jsonl --minutes 600
    """
    from mmspec.errors import InputError
    from mmspec.pipelines.drafter_prompts import ImagePrompts
    from mmspec.registry import parse_options
    from mmspec.training.data.scenes import scene_data
    from mmspec.training.drafter import train_drafter
    from mmspec.training.recipes import RECIPES, check_method

    name, settings = parse_options("method", method)
    check_method(name, settings)
    source: Any = data or scene_data
    if data is not None and RECIPES[name].record.of_images:
        source = ImagePrompts(data, height, width)
    elif (height, width) != (None, None):
        raise InputError("height, width", (height, width), "nothing, unless the target draws the images")
    folder = train_drafter(
        target,
        out or Path(f"{Path(target).name}-{name}"),
        method=name,
        settings=settings,
        data=source,
        regenerate=regenerate,
        learn_prompts=learn_prompts,
        states=states,
        start=start,
        **vars(along),
        **training.plan,
    )
    training.report(folder, f"use it: --accelerator {RECIPES[name].accelerator} --drafter", method=method)


@train_app.command()
@unpack_options
def draft_model(
    target: Annotated[str, typer.Option(help="Folder or hub id of the model that it drafts for.")],
    data: Annotated[Path, typer.Option(help="Conversations: JSONL, or LLaVA's JSON.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write.", show_default="named after the target")
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            help="Folder or hub id of a small model of the same tokenizer; or layers:4, the target itself "
            "with its first two layers and its last two.",
        ),
    ] = "layers:2",
    divergence: Annotated[
        str,
        typer.Option(help="Of the two distributions: forward_kl, reverse_kl, jsd or tvd; or hard_labels."),
    ] = "forward_kl",
    beta: Annotated[float, typer.Option(help="Of jsd, weight of the target's part.")] = 0.5,
    own_share: Annotated[
        float,
        typer.Option(help="Share of the steps that learn from replies which the draft model samples itself."),
    ] = 0.5,
    new_tokens: Annotated[int, typer.Option(min=1, help="Longest reply that it samples.")] = 64,
    regenerate: Annotated[
        int,
        typer.Option(
            min=0, help="In other steps, longest reply that the target writes; 0 learns the data's."
        ),
    ] = 0,
    rate: Annotated[
        float | None,
        typer.Option(help="Factor of the learning rate.", show_default="1 for layers, 0.05 for a model"),
    ] = None,
    save_dtype: Annotated[
        str | None, typer.Option(help="Of the folder's weights.", show_default="the target's")
    ] = None,
    states: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps the target's hidden states; with --own-share 0."),
    ] = None,
    frequent_tokens: Annotated[
        int,
        typer.Option(min=0, help="Tokens that it drafts, the most frequent of the data; 0 for all."),
    ] = 0,
    *,
    along: TargetOptions,
    training: TrainingOptions,
) -> None:
    """Train a small model that drafts for a larger one, by distillation (DistillSpec).

    Resumable; writes a folder of transformers that `drafter=` and `--drafter`
    take. By default it takes 10 minutes, 8 examples at once.

    Example:
        mmspec train draft-model --target Qwen/Qwen3-8B --from Qwen/Qwen3-0.6B --data my.jsonl --minutes 120
        mmspec train draft-model --target my-model --from layers:3 --data my.jsonl --own-share 0
        mmspec train draft-model --target my-model --from my-draft --data my.jsonl --own-share 1
    """
    from mmspec.training.draft_model import train_draft_model

    folder = train_draft_model(
        target,
        out or Path(f"{Path(target).name}-draft"),
        data,
        start=start,
        divergence=divergence,
        beta=beta,
        own_share=own_share,
        new_tokens=new_tokens,
        rate=rate,
        regenerate=regenerate,
        save_dtype=save_dtype,
        states=states,
        frequent_tokens=frequent_tokens,
        **vars(along),
        **training.plan,
    )
    training.report(folder, "use it: --accelerator draft_model --drafter", divergence=divergence)
