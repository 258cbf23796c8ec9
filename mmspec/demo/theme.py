"""Theme, page, heading and figures of the demos; the style sheet is style.css in this folder."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from mmspec.assets import reference_models
from mmspec.scenes import COLOURS, SHAPES

__all__ = ["STYLE", "figures", "heading", "page", "tags", "theme", "title", "toy_note"]

HOURS_KEPT = 3600, 3600  # seconds between deletions of files, and the age at which they are deleted

#: Style sheet of all pages.
STYLE = Path(__file__).with_name("style.css")


def theme() -> gr.themes.Base:
    """Theme of all demos; it uses system fonts, so that pages load nothing from other servers."""
    fonts = ("ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
    mono = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")
    return gr.themes.Soft(
        primary_hue="indigo", secondary_hue="teal", neutral_hue="slate", font=fonts, font_mono=mono
    )


def page(name: str) -> gr.Blocks:
    """An empty page for use in a `with` block."""
    return gr.Blocks(title=name, analytics_enabled=False, delete_cache=HOURS_KEPT)


def heading(name: str, said: str, model: str, note: str = "") -> str:
    """Heading of a page as HTML: its name, a sentence, the name of the model, and a note on the model."""
    below = f'<p class="mm-toy">{escape(note)}</p>' if note else ""
    return (
        f'<div class="mm-heading"><h1>{escape(name)}</h1><p>{escape(said)}</p>'
        f"<code>{escape(model)}</code>{below}</div>"
    )


def toy_note(model: Any, scope: str) -> str:
    """Description of a reference model's training data, ending with `scope`; "" for any other model."""
    folder = Path(str(getattr(model.config, "_name_or_path", ""))).absolute()
    if folder not in (path.absolute() for path in reference_models().values()):
        return ""
    things = f"{len(SHAPES)} shapes ({', '.join(SHAPES)}) in {len(COLOURS)} colours ({', '.join(COLOURS)})"
    return f"This is a toy model of {things}. {scope}"


def title(accelerator: str) -> str:
    """Display name of an accelerator."""
    return "plain decoding" if accelerator == "none" else accelerator


def tags(words: Iterable[str]) -> str:
    """Tags of a card as HTML."""
    return "".join(f'<span class="mm-tag">{escape(word)}</span>' for word in words)


def figures(values: dict[str, str]) -> str:
    """Named figures as HTML."""
    pairs = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in values.items()
    )
    return f'<dl class="mm-figures">{pairs}</dl>'
