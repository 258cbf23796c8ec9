"""`mmspec train`: trains heads and draft models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mmspec.cli.console import note, print_result
from mmspec.cli.help_text import Command
from mmspec.cli.loading import announce
from mmspec.cli.options import AsJson, unpack_options
from mmspec.open_types import Keywords

__all__ = ["Start", "TrainingOptions", "train_app"]

Start = Annotated[Path | None, typer.Option("--from", help="Trained folder to start from.")]
Pixels = Annotated[
    int | None,
    typer.Option(help="Pixels of images that the target generates.", show_default="that of the model"),
]

train_app = typer.Typer(help="Train drafters.", no_args_is_help=True)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of every training; None means the default of the trainer."""

    minutes: Annotated[float | None, typer.Option(min=0.0, help="Duration of the training in minutes.")] = (
        None
    )
    steps: Annotated[
        int | None, typer.Option(min=1, help="Number of steps, instead of --minutes; reproducible.")
    ] = None
    batch_size: Annotated[int | None, typer.Option(min=1, help="Examples per process and batch.")] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and examples.")] = 0
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; by default that of torch.")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False
    as_json: AsJson = False

    @property
    def plan(self) -> Keywords:
        """The keywords of a trainer that are not None; see `RunOptions`."""
        return {name: value for name, value in vars(self).items() if value is not None and name != "as_json"}

    def report(self, folder: Path, hint: str | None = None, **record: str) -> None:
        """Print the folder and a hint with the options that use it; or the folder and its record as JSON."""
        print_result({"folder": str(folder), **record, "seed": self.seed}, str(folder), self.as_json)
        if hint is not None and not self.as_json:
            note(f"{hint} {folder}")


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Options of every training that runs the target."""

    max_length: Annotated[int | None, typer.Option(min=1, help="Skip conversations of more tokens.")] = None
    dtype: Annotated[
        str, typer.Option(help="Dtype of the target: float32, bfloat16, float16; auto is bfloat16 on a GPU.")
    ] = "auto"
    accumulate: Annotated[int, typer.Option(min=1, help="Number of batches per step.")] = 1
    log_dir: Annotated[Path | None, typer.Option(help="Folder for TensorBoard logs.")] = None


@train_app.callback()
def _group() -> None:
    """Train drafters; on several GPUs, also with FSDP 2, by `accelerate launch -m mmspec train ...`."""


@train_app.command(cls=Command)
@unpack_options
def drafter(
    target: Annotated[str, typer.Option(help="Folder or hub id of the target.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write.", show_default="named after target and method")
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="cjd, dflash, dflash2, dspark, eagle, eagle3, flash, hydra, lilicorr, medusa, msd, mtp, "
            "ppd, specvlm or vispec, with settings as in flash:block=10."
        ),
    ] = "eagle",
    data: Annotated[
        Path | None,
        typer.Option(
            help="Conversations, with or without images: JSONL, or LLaVA's JSON. For image generators "
            "JSONL with image, and prompt or class; cjd needs no image. For speech models JSONL with audio "
            "and text. By default scenes, which text and speech models cannot use."
        ),
    ] = None,
    height: Pixels = None,
    width: Pixels = None,
    regenerate: Annotated[
        int,
        typer.Option(
            min=0,
            help="Longest reply that the target generates for training; 0 uses the replies of the data.",
        ),
    ] = 0,
    learn_prompts: Annotated[
        bool,
        typer.Option("--learn-prompts", help="Train on all text of the conversations, not only on replies."),
    ] = False,
    states: Annotated[
        Path | None,
        typer.Option(
            help="Folder that stores the target's hidden states, so that the next training on the same data "
            "does not run the target. Not for scenes and images, which are new in every step."
        ),
    ] = None,
    start: Start = None,
    *,
    along: TargetOptions,
    training: TrainingOptions,
) -> None:
    """Train a drafter for a target, whose weights are not changed.

    Writes a folder for `drafter=` and `--drafter`. By default it trains for 10 minutes
    on batches of 8 examples. An interrupted training continues with --resume.

    Example:
        mmspec train drafter --target assets/scenes-llava --out my-flash --method flash:block=10:bias_rank=64
        mmspec train drafter --target assets/scenes-llamagen --out my-eagle --minutes 8
        mmspec train drafter --target assets/scenes-llamagen --out my-eagle --minutes 8 --resume
        mmspec train drafter --target llava-hf/llava-1.5-7b-hf --data path/to/conversations.jsonl
        mmspec train drafter --target path/to/llamagen --data path/to/images.jsonl --minutes 60
        mmspec train drafter --target deepseek-ai/Janus-Pro-7B --method cjd --data path/to/prompts.jsonl
    """
    announce(target)
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
        raise InputError(
            "--height and --width",
            (height, width),
            "need an image generator as the target, and --data with images",
        )
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


@train_app.command(cls=Command)
@unpack_options
def draft_model(
    target: Annotated[str, typer.Option(help="Folder or hub id of the target.")],
    data: Annotated[
        Path,
        typer.Option(
            help="Conversations: JSONL, or LLaVA's JSON. For speech models JSONL with audio and text."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write.", show_default="named after the target")
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            help="Folder or hub id of a small model with the same tokenizer; or layers:4, the first two and "
            "the last two layers of the target.",
        ),
    ] = "layers:2",
    divergence: Annotated[
        str,
        typer.Option(help="Loss: forward_kl, reverse_kl, jsd, tvd or hard_labels."),
    ] = "forward_kl",
    beta: Annotated[float, typer.Option(help="Weight of the target in jsd.")] = 0.5,
    own_share: Annotated[
        float,
        typer.Option(help="Share of the steps that use replies sampled from the draft model."),
    ] = 0.5,
    new_tokens: Annotated[int, typer.Option(min=1, help="Longest reply that the draft model samples.")] = 64,
    regenerate: Annotated[
        int,
        typer.Option(
            min=0, help="Longest reply of the target in other steps; 0 uses the replies of the data."
        ),
    ] = 0,
    parallel: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of tokens that one forward pass drafts, over masks (PARD); needs --own-share 0.",
        ),
    ] = 1,
    rate: Annotated[
        float | None,
        typer.Option(help="Factor of the learning rate.", show_default="1 for layers, 0.05 for a model"),
    ] = None,
    save_dtype: Annotated[
        str | None, typer.Option(help="Dtype of the saved weights.", show_default="that of the target")
    ] = None,
    states: Annotated[
        Path | None,
        typer.Option(help="Folder that stores the target's hidden states; needs --own-share 0."),
    ] = None,
    frequent_tokens: Annotated[
        int,
        typer.Option(
            min=0, help="Number of tokens in the draft vocabulary, the most frequent of the data; 0 for all."
        ),
    ] = 0,
    *,
    along: TargetOptions,
    training: TrainingOptions,
) -> None:
    """Train a small draft model for a target by distillation (DistillSpec).

    Writes a folder of transformers for `drafter=` and `--drafter`. By default it trains
    for 10 minutes on batches of 8 examples. An interrupted training continues with
    --resume.

    Example:
        mmspec train draft-model --target Qwen/Qwen3-8B --from Qwen/Qwen3-0.6B --data path/to/chats.jsonl
        mmspec train draft-model --target path/to/model --from layers:3 --data path/to/chats.jsonl
        mmspec train draft-model --target path/to/model --from path/to/draft --data path/to/chats.jsonl
    """
    announce(target)
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
        parallel=parallel,
        rate=rate,
        regenerate=regenerate,
        save_dtype=save_dtype,
        states=states,
        frequent_tokens=frequent_tokens,
        **vars(along),
        **training.plan,
    )
    training.report(folder, "use it: --accelerator draft_model --drafter", divergence=divergence)
