"""Look of the demos: theme, page, heading and figures; the style sheet is style.css beside."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

import gradio as gr

__all__ = ["STYLE", "figures", "heading", "page", "tags", "theme", "title"]

HOURS_KEPT = 3600, 3600  # seconds between clearances of files, and their age at which they go

#: Style sheet of all pages.
STYLE = Path(__file__).with_name("style.css")


def theme() -> gr.themes.Base:
    """Theme of all demos; its fonts are the visitor's own, so that no other server is asked for any."""
    fonts = ("ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
    mono = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")
    return gr.themes.Soft(
        primary_hue="indigo", secondary_hue="teal", neutral_hue="slate", font=fonts, font_mono=mono
    )


def page(name: str) -> gr.Blocks:
    """An empty page, for use in a `with` block."""
    return gr.Blocks(title=name, analytics_enabled=False, delete_cache=HOURS_KEPT)


def heading(name: str, said: str, model: str) -> str:
    """Heading of a page, as HTML: its name, a sentence, and the name of the model."""
    return (
        f'<div class="mm-heading"><h1>{escape(name)}</h1><p>{escape(said)}</p>'
        f"<code>{escape(model)}</code></div>"
    )


def title(accelerator: str) -> str:
    """Name of an accelerator for people."""
    return "plain decoding" if accelerator == "none" else accelerator


def tags(words: Iterable[str]) -> str:
    """Tags of a card, as HTML."""
    return "".join(f'<span class="mm-tag">{escape(word)}</span>' for word in words)


def figures(values: dict[str, str]) -> str:
    """Figures by their names, as HTML."""
    pairs = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in values.items()
    )
    return f'<dl class="mm-figures">{pairs}</dl>'
