"""`mmspec chat`: a conversation with a text or vision-language model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from mmspec.cli.loading import announce, load_accelerated
from mmspec.cli.options import Accelerator, LoadOptions, Model, Seed, Temperature, unpack_options

__all__ = ["chat"]


@unpack_options
def chat(
    model: Model = None,
    prompt: Annotated[
        str | None, typer.Argument(help="The message; without it, one turn per line of standard input.")
    ] = None,
    images: Annotated[
        list[str] | None, typer.Option("--image", help="Image (path or URL) of the first turn; repeatable.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    accelerator: Accelerator = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens per answer.")] = 512,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    *,
    how: LoadOptions,
) -> None:
    """Chat with a text or vision-language model; answers are streamed.

    With a prompt, the command prints one answer. Without a prompt, it reads a turn per line
    and remembers the conversation, until the end of input (Ctrl-D).

    Example:
        mmspec chat assets/scenes-llava "What is in the image?" --image assets/images/scene.png
        mmspec chat path/to/model "Summarise speculative decoding in one sentence."
        mmspec chat path/to/model
    """
    source = announce(model)
    from mmspec.pipelines import VisionLanguagePipeline

    pipe = load_accelerated(VisionLanguagePipeline, source, accelerator, how)
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images or ()]
    interactive = prompt is None and sys.stdin.isatty()
    turns = iter([prompt]) if prompt is not None else _lines(interactive)
    for turn in turns:
        content: Any = [*parts, {"type": "text", "text": turn}] if parts else turn
        messages.append({"role": "user", "content": content})
        parts, answer = [], ""
        settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
        for delta in pipe.stream(messages, **settings):
            typer.echo(delta, nl=False)
            answer += delta
        typer.echo()
        messages.append({"role": "assistant", "content": answer})


def _lines(interactive: bool) -> Iterator[str]:
    """Turns read from standard input, without empty lines."""
    while True:
        if interactive:
            typer.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
