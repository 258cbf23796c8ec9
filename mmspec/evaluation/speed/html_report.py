"""A bench as one HTML file: settings, table, plots and samples, with nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmspec.evaluation.speed.record import Record
from mmspec.media.images import data_url

__all__ = ["Sample", "html_report", "write_html"]

STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
td, th { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #8885; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
figure { margin: 1rem 0; } img { max-width: 100%; }
.plot { background: #fff; border-radius: .4rem; }
.samples { display: flex; flex-wrap: wrap; gap: 1rem; } .samples figure { max-width: 20rem; margin: 0; }
dt { font-weight: 600; } .settings { opacity: .75; }
"""
COLUMNS = (
    ("accelerator", lambda one: one.accelerator),
    ("promise", lambda one: str(one.own.get("promise", one.exactness))),
    ("identical", lambda one: f"{one.identical:.0%}"),
    ("target forwards", lambda one: str(one.target_forwards)),
    ("tokens/forward", lambda one: with_interval(one.acceptance_length, one.acceptance_interval)),
    ("speed-up", lambda one: with_interval(one.speedup, one.speedup_interval, "x")),
    ("decoding alone", lambda one: f"{one.decode_speedup:.2f}x"),
    ("tokens/s", lambda one: f"{one.tokens_per_second:.0f}"),
    ("peak memory", lambda one: f"{one.peak_memory_bytes / 1e6:.0f} MB"),
    ("J/token", lambda one: "-" if one.joules_per_token is None else f"{one.joules_per_token:.3g}"),
    ("TV", lambda one: "-" if one.tv is None else f"{one.tv['mean']:.3f} (max {one.tv['max']:.2f})"),
)


@dataclass(frozen=True)
class Sample:
    """One prompt, and what every accelerator made of it.

    Attributes:
        prompt: its words.
        images: that came with it.
        outputs: by accelerator: text, or an image.
    """

    prompt: str
    images: Sequence[Image.Image]
    outputs: Mapping[str, Any]


def with_interval(value: float, ends: tuple[float, float] | None, unit: str = "") -> str:
    """A figure with its interval, if it has one."""
    return f"{value:.2f}{unit}" + ("" if ends is None else f" [{ends[0]:.2f}, {ends[1]:.2f}]")


def write_html(path: Path, records: Sequence[Record], samples: Sequence[Sample]) -> None:
    """Write the report of a bench to a file."""
    path.write_text(html_report(records, samples), encoding="utf-8")


def html_report(records: Sequence[Record], samples: Sequence[Sample]) -> str:
    """Make the report of a bench.

    Args:
        records: one for each accelerator, the first of plain decoding.
        samples: a few prompts with their outputs.
    """
    settings = records[0].settings
    title = f"mmspec bench: {settings.get('model', '')}"
    listed = ", ".join(f"{name} {value}" for name, value in settings.items())
    head = "".join(f"<th>{escape(name)}</th>" for name, _ in COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(show(one))}</td>" for _, show in COLUMNS) + "</tr>" for one in records
    )
    plots = "".join(
        f'<figure><img class="plot" alt="{escape(name)}" src="{image}"></figure>'
        for name, image in draw_plots(records).items()
    )
    shown = "".join(map(sample_html, samples))
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{escape(title)}</title>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<style>{STYLE}</style><body><h1>{escape(title)}</h1><p class='settings'>{escape(listed)}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        f"<p>Ratios are to plain decoding ({escape(records[0].accelerator)}) in the same run, of medians "
        f"over {records[0].repeats} interleaved repeats; in brackets 95 % bootstrap intervals.</p>"
        f"{plots}{'<h2>Samples</h2>' if samples else ''}{shown}</body></html>\n"
    )


def sample_html(sample: Sample) -> str:
    """One prompt with the outputs of all accelerators."""
    given = "".join(f'<img alt="input" src="{data_url(image)}">' for image in sample.images)
    parts = []
    for name, output in sample.outputs.items():
        if isinstance(output, str):
            parts.append(f"<dt>{escape(name)}</dt><dd>{escape(output)}</dd>")
        else:
            caption = f"<figcaption>{escape(name)}</figcaption>"
            parts.append(f'<figure><img alt="{escape(name)}" src="{data_url(output)}">{caption}</figure>')
    are_texts = all(isinstance(output, str) for output in sample.outputs.values())
    outputs = f"<dl>{''.join(parts)}</dl>" if are_texts else f"<div class='samples'>{''.join(parts)}</div>"
    return f"<section><h3>{escape(sample.prompt)}</h3>{given}{outputs}</section>"


def draw_plots(records: Sequence[Record]) -> dict[str, str]:
    """Draw speed-ups with intervals, acceptance by depth, and parts of the time, as data URLs by title."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [one.accelerator for one in records]
    height = 0.4 * len(records) + 1.2
    plots = {}

    def close(figure: Figure, title: str) -> None:
        canvas = FigureCanvasAgg(figure)
        figure.set_dpi(110)
        canvas.draw()
        plots[title] = data_url(Image.fromarray(np.asarray(canvas.buffer_rgba())))

    figure = Figure((8, height), layout="constrained")
    axes = figure.subplots()
    values = [one.speedup for one in records]
    ends = [one.speedup_interval or (one.speedup_min, one.speedup_max) for one in records]
    bars = [
        [max(0.0, value - low) for value, (low, _) in zip(values, ends, strict=True)],
        [max(0.0, high - value) for value, (_, high) in zip(values, ends, strict=True)],
    ]
    axes.barh(names, values, xerr=bars, color="#3b6fb6", ecolor="#222")
    axes.axvline(1.0, color="#888", lw=1)
    axes.invert_yaxis()
    axes.set_xlabel("speed-up over plain decoding")
    close(figure, "speed-up")

    drafting = [one for one in records if one.acceptance_by_position]
    if drafting:
        figure = Figure((8, 3.5), layout="constrained")
        axes = figure.subplots()
        for one in drafting:
            depths = range(1, len(one.acceptance_by_position) + 1)
            axes.plot(depths, one.acceptance_by_position, marker="o", ms=3, label=one.accelerator)
        axes.set(xlabel="draft tokens", ylabel="share of rounds that accepted them", ylim=(0, 1.02))
        axes.legend()
        close(figure, "acceptance by depth")

    figure = Figure((8, height), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(records)
    for part in records[0].time:
        shares = [one.time[part] * one.seconds for one in records]
        axes.barh(names, shares, left=left, label=part)
        left = [sum(pair) for pair in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds for all prompts")
    axes.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    close(figure, "where the time goes")
    return plots
