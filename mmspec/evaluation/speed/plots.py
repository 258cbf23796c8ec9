"""Plots of a bench, by matplotlib, and the bench as one HTML file with nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image
from rich.console import Console, RenderableType

from mmspec.evaluation.speed.record import Record
from mmspec.evaluation.speed.timing import BASELINE
from mmspec.evaluation.tables import DRAFTED, OWN, check_plot
from mmspec.media.images import data_url

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Sample", "bench_figures", "draw_bench", "html_report"]

PROMISES = {"exact": DRAFTED, "tv": "#bf8700", "approximate": "#bf8700", "lossy": OWN}


def draw_bench(path: str | Path, records: Sequence[Record], by_category: Sequence[Record] = ()) -> Path:
    """Plot all records of a bench, or those of each category, to a file.

    Of images that were read, forwards saved and kernel distances; else speed-ups, a panel for each category.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    path = check_plot(path)
    main_figure(by_category or records).savefig(path, dpi=110)
    return path


def bench_figures(records: Sequence[Record]) -> dict[str, Figure]:
    """All plots of a bench by title: speed-ups or images, acceptance by depth, and parts of the time."""
    found = {"speed-up": main_figure(records)}
    drafting = [one for one in records if one.acceptance_by_position]
    if drafting:
        found["acceptance by depth"], (axes,) = panels((8, 3.5))
        for one in drafting:
            depths = range(1, len(one.acceptance_by_position) + 1)
            axes.plot(depths, one.acceptance_by_position, marker="o", ms=3, label=one.accelerator)
        axes.set(xlabel="draft tokens", ylabel="share of rounds that accepted them", ylim=(0, 1.02))
        axes.legend()
    found["where the time goes"], (axes,) = panels((8, 0.4 * len(records) + 1.2))
    left = [0.0] * len(records)
    for part in records[0].time:
        shares = [one.time[part] * one.seconds for one in records]
        axes.barh([one.accelerator for one in records], shares, left=left, label=part)
        left = [sum(pair) for pair in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds for all prompts")
    axes.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return found


def panels(size: tuple[float, float], count: int = 1) -> tuple[Figure, Any]:
    """A figure, and so many axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(size, layout="constrained")
    return figure, figure.subplots(1, count, sharey=True, squeeze=False)[0]


def main_figure(records: Sequence[Record]) -> Figure:
    """Images that were read; else speed-ups, a panel for each category."""
    return images_figure(records) if all(one.quality for one in records) else speedup_figure(records)


def speedup_figure(records: Sequence[Record]) -> Figure:
    """Bars of decoding's speed-up and dots of the one end to end, with words on acceptance and identity."""
    categories = list(dict.fromkeys(one.category for one in records))
    names = list(dict.fromkeys(one.accelerator for one in records))
    figure, axes = panels((2.6 * len(categories) + 2.4, 0.36 * len(names) + 1.3), len(categories))
    places, longest = range(len(names)), max(one.decode_speedup for one in records)
    for panel, category in zip(axes, categories, strict=True):
        shown = [one for one in records if one.category == category]
        decoding = [one.decode_speedup for one in shown]
        bars = panel.barh(places, decoding, color=[DRAFTED if one >= 1 else "#bf8700" for one in decoding])
        panel.plot([one.speedup for one in shown], places, "o", color="#0d1117", markersize=4)
        words = [
            f" {one.acceptance_length:.2f}"
            + (f", {one.identical:.0%} identical" if one.identical < 1 else "")
            for one in shown
        ]
        panel.bar_label(bars, words, fontsize=7)
        panel.axvline(1.0, color="#656d76", linewidth=0.8)
        panel.set_xlim(0, 1.5 * longest)
        panel.set_title(category.replace("_", " "), fontsize=10)
        panel.set_xlabel("times plain decoding", fontsize=8)
    axes[0].set_yticks(places, names, fontsize=8)
    axes[0].invert_yaxis()
    figure.suptitle("bars: decoding alone; dots: end to end; numbers: tokens a target forward", fontsize=8)
    return figure


def images_figure(records: Sequence[Record]) -> Figure:
    """Forwards saved, with the promise in the colour; and kernel distances with their 95 % intervals.

    The line at 0 is no difference, the band the interval of plain decoding itself.
    """
    colour = [PROMISES[one.exactness.split("<")[0]] for one in records]
    figure, (saved, distance) = panels((13, 0.36 * len(records) + 1.4), 2)
    rows, words = range(len(records)), []
    for row, record in enumerate(records):
        quality = record.quality or {}
        shown = f", {quality['attributes']['value']:.0%} of attributes" if "attributes" in quality else ""
        words.append(f" {record.nfe_mean:.0f} NFE{shown}")
        middle, low, high = (quality["kid"][name] for name in ("value", "low", "high"))
        ends = [[middle - low], [high - middle]]
        distance.errorbar(middle, row, xerr=ends, fmt="o", color=colour[row], capsize=3)
        if record.accelerator == BASELINE:
            distance.axvspan(low, high, color=colour[row], alpha=0.1)
    distance.axvline(0, color="0.6", linewidth=0.8)
    distance.set_xlabel("kernel distance to plain decoding (95 %)", fontsize=9)
    bars = saved.barh(rows, [one.step_compression for one in records], color=colour)
    saved.bar_label(bars, words, fontsize=8)
    saved.set_xlim(0, 1.9 * max(one.step_compression for one in records))
    saved.set_yticks(rows, [f"{one.accelerator}  ({one.exactness})" for one in records], fontsize=8)
    saved.invert_yaxis()
    saved.margins(y=0.01)
    saved.set_xlabel("times fewer forwards of the target", fontsize=9)
    return figure


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
