"""A bench as one HTML file: tables, plots and samples, with nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO, StringIO

from PIL import Image
from rich.console import Console, RenderableType

from mmspec.evaluation.speed.plots import bench_figures
from mmspec.evaluation.speed.record import Record
from mmspec.media.images import data_url

__all__ = ["Sample", "html_report"]

WIDTH = 200  # characters of a line of the tables
STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 80rem; margin: 2rem auto; padding: 0 1rem; } pre { overflow-x: auto; line-height: 1.25; }
figure { margin: 1rem 0; } img { max-width: 100%; } .plot { background: #fff; border-radius: .4rem; }
.samples { display: flex; flex-wrap: wrap; gap: 1rem; } .samples figure { max-width: 20rem; margin: 0; }
dt { font-weight: 600; }
"""


@dataclass(frozen=True)
class Sample:
    """One prompt with the images that came with it, and by accelerator its text or its image."""

    prompt: str
    images: Sequence[Image.Image]
    outputs: Mapping[str, str | Image.Image]


def html_report(records: Sequence[Record], tables: RenderableType, samples: Sequence[Sample]) -> str:
    """Make the report of a bench.

    Args:
        records: one for each accelerator, the first of plain decoding.
        tables: of the records, as the console shows them.
        samples: a few prompts with their outputs.
    """
    title = escape(f"mmspec bench: {records[0].settings.get('model', '')}")
    console = Console(file=StringIO(), width=WIDTH, record=True)
    console.print(tables)
    written = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    plots = []
    for name, figure in bench_figures(records).items():
        file = BytesIO()
        figure.savefig(file, dpi=110)
        image = data_url(Image.open(file))
        plots.append(f'<figure><img class="plot" alt="{name}" src="{image}"></figure>')
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<style>{STYLE}</style><body><h1>{title}</h1>{written}{''.join(plots)}"
        f"{'<h2>Samples</h2>' if samples else ''}{''.join(map(sample_html, samples))}</body></html>\n"
    )


def sample_html(sample: Sample) -> str:
    """One prompt with the outputs of all accelerators."""
    given = "".join(f'<img alt="input" src="{data_url(image)}">' for image in sample.images)
    texts, drawn = "", ""
    for name, output in sample.outputs.items():
        if isinstance(output, str):
            texts += f"<dt>{escape(name)}</dt><dd>{escape(output)}</dd>"
        else:
            image = f'<img alt="{escape(name)}" src="{data_url(output)}">'
            drawn += f"<figure>{image}<figcaption>{escape(name)}</figcaption></figure>"
    outputs = f"<dl>{texts}</dl><div class='samples'>{drawn}</div>"
    return f"<section><h3>{escape(sample.prompt)}</h3>{given}{outputs}</section>"
