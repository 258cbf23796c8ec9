"""`mmspec demo`: demos of captioning, image generation and transcription in a browser."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspec.cli import main
from mmspec.cli.console import note, print_result
from mmspec.cli.help_text import Command
from mmspec.cli.loading import (
    REFERENCE_IMAGE,
    announce,
    choose,
    load_accelerated,
    load_pipeline,
    parse_choice,
)
from mmspec.cli.options import Accelerator, AsJson, Host, LoadOptions, Model, Port, unpack_options
from mmspec.cli.serve import check_installed, listen
from mmspec.errors import InputError
from mmspec.open_types import Keywords

if TYPE_CHECKING:
    import gradio

__all__ = ["demo_app", "launch", "run_space"]

SCENE_PROMPTS = (
    "a red ring left of a small blue cross",
    "a large striped yellow star",
    "a small blue square",
)
PROMPTS = ("a red bus in the rain", "a corgi in space", "a lighthouse at dawn, oil on canvas")
WAITING = 32  # longest queue of visitors

demo_app = typer.Typer(help="Show a model in a browser.", no_args_is_help=True)


@dataclass(frozen=True, kw_only=True)
class Site:
    """Options of a page: its address, and how it is printed."""

    host: Host = "127.0.0.1"
    port: Port = 7860
    share: Annotated[
        bool, typer.Option("--share", help="Open a public address on Gradio's servers for 72 hours.")
    ] = False
    as_json: AsJson = False


@demo_app.command(cls=Command)
@unpack_options
def caption(model: Model = None, accelerator: Accelerator = None, *, site: Site, how: LoadOptions) -> None:
    """Ask a model about images and videos, beside plain decoding.

    Example:
        mmspec demo caption --port 7860
        mmspec demo caption path/to/model --accelerator copy
    """
    check_installed("mmspec demo", "demo", "gradio")
    source = announce(model)

    def make() -> Any:
        from mmspec.assets import find_assets
        from mmspec.demo.captioning import Captioning, picture_examples
        from mmspec.pipelines import VisionLanguagePipeline

        pipe = load_accelerated(VisionLanguagePipeline, source, accelerator, how)
        return Captioning(pipe, label(source, model), picture_examples(find_assets()))

    show(make, source, site)


@demo_app.command(cls=Command)
@unpack_options
def generate(
    model: Model = None,
    accelerator: Annotated[
        str | None,
        typer.Option(
            help="The method that is selected first; the page offers all that fit.", show_default="sjd"
        ),
    ] = None,
    *,
    site: Site,
    how: LoadOptions,
) -> None:
    """Generate images round by round, and compare methods on the same seed.

    Example:
        mmspec demo generate --port 7860
        mmspec demo generate path/to/model --accelerator lantern
    """
    check_installed("mmspec demo", "demo", "gradio")
    first = None if accelerator is None else parse_choice(accelerator)
    if first is not None and first.options:
        raise InputError("--accelerator", accelerator, "must be a name without options, which the page sets")
    source = announce(model, REFERENCE_IMAGE)
    # raises for a drafter that cannot be used, before the model is loaded
    named = None if how.drafter is None else choose(accelerator, source, how.drafter)
    drafters = {} if named is None else {named.name: named.options}

    def make() -> Any:
        from mmspec.demo.image_generation import ImageGeneration
        from mmspec.pipelines import ImageGenerationPipeline

        pipe = load_pipeline(ImageGenerationPipeline, source, how)
        prompts = SCENE_PROMPTS if model is None else PROMPTS
        chosen = None if first is None else first.name
        return ImageGeneration(pipe, label(source, model), prompts, chosen, drafters)

    show(make, source, site)


@demo_app.command(cls=Command)
@unpack_options
def transcribe(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder or hub id.")],
    accelerator: Accelerator = None,
    *,
    site: Site,
    how: LoadOptions,
) -> None:
    """Transcribe recordings, beside plain decoding.

    Example:
        mmspec demo transcribe openai/whisper-tiny.en
    """
    check_installed("mmspec demo", "demo", "gradio")
    source = announce(model)

    def make() -> Any:
        from mmspec.demo.transcription import Transcription
        from mmspec.pipelines import SpeechPipeline

        return Transcription(load_accelerated(SpeechPipeline, source, accelerator, how), label(source, model))

    show(make, source, site)


def run_space(page: str) -> None:
    """Run `mmspec demo PAGE` as a Hugging Face Space, configured by $MMSPEC_MODEL and $MMSPEC_ACCELERATOR.

    Args:
        page: "caption", "generate" or "transcribe".
    """
    host = os.environ.get("GRADIO_SERVER_NAME", "0.0.0.0")
    options = ["--host", host, "--port", os.environ.get("GRADIO_SERVER_PORT", "7860")]
    if model := os.environ.get("MMSPEC_MODEL"):
        options = [model, *options]
    if accelerator := os.environ.get("MMSPEC_ACCELERATOR"):
        options += ["--accelerator", accelerator]
    sys.argv = ["mmspec", "demo", page, *options]
    main()


def label(source: str, model: str | None) -> str:
    """Title of a model on its page; the reference model is marked as a toy model."""
    return Path(source).name + (", a toy model" if model is None else "")


def show(make: Callable[[], Any], source: str, site: Site) -> None:
    """Create a page and serve it until Ctrl-C, which exits with 130."""
    with listen(site.host, site.port) as listener:  # before the model is loaded, which is slow
        page = make()
        page.warm_up()
        address = listener.getsockname()[:2]
    blocks = page.blocks()
    url = launch(blocks, *address, share=site.share)
    print_result({"url": url, "model": source}, f"{url} shows {source}", site.as_json)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        note("stopped")
        raise typer.Exit(130) from None
    finally:
        blocks.close(verbose=False)


def launch(blocks: gradio.Blocks, host: str, port: int, *, share: bool = False) -> str:
    """Serve a page in a new thread; return its address."""
    from mmspec.demo.theme import STYLE, theme
    from mmspec.demo.uploads import UPLOAD_LIMITS

    settings: Keywords = {
        "theme": theme(),
        "css_paths": STYLE,
        "footer_links": [],
        "max_file_size": max(UPLOAD_LIMITS.max_bytes, UPLOAD_LIMITS.max_video_bytes),  # also of audio
        "ssr_mode": False,
        "enable_monitoring": False,
        "quiet": True,
        "prevent_thread_lock": True,
    }
    blocks.queue(max_size=WAITING, api_open=False)
    _, local, public = blocks.launch(server_name=host, server_port=port, share=share, **settings)
    return str(public or local).rstrip("/")
