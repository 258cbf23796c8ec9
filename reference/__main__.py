"""`python -m reference`: train and score the reference models in assets/."""

from pathlib import Path
from typing import Annotated

import typer

from mmspec.cli import run
from mmspec.cli.console import note
from mmspec.cli.loading import read_dtype
from reference.evaluate import evaluate_app
from reference.train import train_app

app = typer.Typer(
    help="Train and score the reference models in assets/.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(train_app, name="train")
app.add_typer(evaluate_app, name="evaluate")


@app.command()
def replies(
    out: Annotated[Path, typer.Option(help="JSONL file to write or to continue.")],
    rows: Annotated[int, typer.Option(min=1, help="Number of prompts, one per scene.")] = 4000,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Most tokens of a reply.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per batch.")] = 64,
    dtype: Annotated[
        str, typer.Option(help="float32, or bfloat16 on processors that support it in hardware.")
    ] = "float32",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the scenes.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default=False)] = None,
) -> None:
    """Write replies of SmolLM2 to prompts that describe scenes in words; `train smol` learns from them.

    Example:
        python -m reference replies --out runs/scene-replies.jsonl --rows 4000 --dtype bfloat16
    """
    from reference.smol_replies import write_scene_replies

    written = write_scene_replies(
        out,
        count=rows,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        dtype=read_dtype(dtype),
        seed=seed,
        threads=threads,
    )
    note(f"written: {out}, {written} new tokens")


if __name__ == "__main__":
    run(app)
