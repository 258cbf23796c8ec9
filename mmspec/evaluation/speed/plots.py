"""Figures of a bench by matplotlib, and its report as one HTML page without external resources."""

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
from mmspec.evaluation.speed.report import COLUMNS, IMAGE_COLUMNS
from mmspec.evaluation.speed.timing import BASELINE, PEER
from mmspec.evaluation.tables import check_plot
from mmspec.media.images import data_url

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PROMISE_COLOURS", "Sample", "bench_figures", "draw_bench", "html_report", "promise_of"]

#: Colours of the promises, from the palette of Okabe and Ito, which colour-blind people can distinguish.
PROMISE_COLOURS = {"exact": "#0072B2", "bounded": "#E69F00", "approximate": "#D55E00", "lossy": "#D55E00"}
#: The rest of the palette, for series that are not promises.
SERIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#F0E442")
LONGEST = 40  # characters of a label


def promise_of(exactness: str) -> str:
    """Key of `PROMISE_COLOURS` for a record's `exactness`."""
    return "bounded" if exactness.startswith("tv<=") else exactness


def shortened(label: str) -> str:
    """A label that fits next to an axis."""
    return label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…"


def draw_bench(path: str | Path, records: Sequence[Record], by_category: Sequence[Record] = ()) -> Path:
    """Plot the records of a bench, or those of each category, to a file.

    The plot of scored images shows saved forward passes and kernel distances; any other plot shows speed-ups,
    with a panel for each category.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    path = check_plot(path)
    main_figure(by_category or records).savefig(path, dpi=110)
    return path


def bench_figures(records: Sequence[Record]) -> dict[str, Figure]:
    """All figures of a bench by title: speed-ups or images, acceptance by depth, and parts of the time."""
    found = {"speed-up": main_figure(records)}
    drafting = [one for one in records if one.acceptance_by_position]
    if drafting:
        found["acceptance by depth"], (axes,) = panels((8, 3.5))
        axes.set_prop_cycle(color=SERIES)
        for place, one in enumerate(drafting):
            depths, line = range(1, len(one.acceptance_by_position) + 1), ("-", "--", ":")[place // 8 % 3]
            axes.plot(
                depths, one.acceptance_by_position, line, marker="o", ms=3, label=shortened(one.accelerator)
            )
        axes.set(xlabel="draft tokens", ylabel="share of rounds that accepted them", ylim=(0, 1.02))
        axes.legend(fontsize=8, frameon=False)
    found["parts of the time"], (axes,) = panels((8, 0.4 * len(records) + 1.2))
    left = [0.0] * len(records)
    for part, colour in zip(records[0].time, SERIES, strict=False):
        shares = [one.time[part] * one.seconds for one in records]
        axes.barh(range(len(records)), shares, left=left, label=part, color=colour)
        left = [sum(pair) for pair in zip(left, shares, strict=True)]
    axes.set_yticks(range(len(records)), [shortened(one.accelerator) for one in records], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds for all prompts")
    axes.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return found


def panels(size: tuple[float, float], count: int = 1) -> tuple[Figure, Any]:
    """A figure with `count` axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(size, layout="constrained")
    return figure, figure.subplots(1, count, sharey=True, squeeze=False)[0]


def add_legend(figure: Figure, records: Sequence[Record]) -> None:
    """Add a legend of the promises."""
    from matplotlib.patches import Patch

    present = [one for one in PROMISE_COLOURS if any(promise_of(row.exactness) == one for row in records)]
    key = [Patch(color=PROMISE_COLOURS[one], label=one) for one in present]
    figure.legend(handles=key, loc="outside upper right", ncols=len(key), frameon=False, fontsize=8)


def main_figure(records: Sequence[Record]) -> Figure:
    """The figure of scored images; otherwise speed-ups, with a panel for each category."""
    return images_figure(records) if all(one.quality for one in records) else speedup_figure(records)


def speedup_figure(records: Sequence[Record]) -> Figure:
    """Bars of the speed-up of decoding, and dots of the end-to-end speed-up with its 95 % interval."""
    categories = list(dict.fromkeys(one.category for one in records))
    names = list(dict.fromkeys(one.accelerator for one in records))
    figure, axes = panels((2.6 * len(categories) + 3.0, 0.36 * len(names) + 1.6), len(categories))
    places = range(len(names))
    longest = max(max(one.decode_speedup, (one.speedup_interval or (0, 0))[1]) for one in records)
    for panel, category in zip(axes, categories, strict=True):
        shown = [one for one in records if one.category == category]
        colours = [PROMISE_COLOURS[promise_of(one.exactness)] for one in shown]
        panel.barh(places, [one.decode_speedup for one in shown], color=colours)
        for place, one in zip(places, shown, strict=True):
            low, high = one.speedup_interval or (one.speedup, one.speedup)
            ends = [[one.speedup - low], [high - one.speedup]]
            panel.errorbar(one.speedup, place, xerr=ends, fmt="o", color="black", ms=3, lw=1, capsize=2)
            words = f"{one.acceptance_length:.2f}"
            words += f", {one.identical:.0%} identical" if one.identical < 1 else ""
            start = max(one.decode_speedup, high) + 0.03 * longest
            panel.text(start, place, words, fontsize=7, va="center")
        panel.axvline(1.0, color="0.4", linewidth=0.8)
        panel.set_xlim(0, 1.6 * longest)
        panel.set_title(category.replace("_", " "), fontsize=10)
        panel.set_xlabel("speed-up over plain decoding", fontsize=8)
    axes[0].set_yticks(places, list(map(shortened, names)), fontsize=8)
    axes[0].invert_yaxis()
    add_legend(figure, records)
    note = "bars: decoding alone; dots: end to end, with 95 % intervals;\nnumbers: tokens per forward pass"
    figure.supxlabel(note, fontsize=8)
    return figure


def images_figure(records: Sequence[Record]) -> Figure:
    """Saved forward passes, coloured by promise, and kernel distances with their 95 % intervals.

    The line at 0 is no difference, and the band is the interval of plain decoding.
    """
    colour = [PROMISE_COLOURS[promise_of(one.exactness)] for one in records]
    figure, (saved, distance) = panels((13, 0.36 * len(records) + 1.6), 2)
    rows, words = range(len(records)), []
    for row, record in enumerate(records):
        quality = record.quality or {}
        shown = f", {quality['attributes']['value']:.0%} of attributes" if "attributes" in quality else ""
        words.append(f" {record.nfe_mean:.0f} forward passes{shown}")
        middle, low, high = (quality["kid"][name] for name in ("value", "low", "high"))
        ends = [[middle - low], [high - middle]]
        distance.errorbar(middle, row, xerr=ends, fmt="o", color=colour[row], capsize=3)
        if record.accelerator == BASELINE:
            distance.axvspan(low, high, color=colour[row], alpha=0.1)
    distance.axvline(0, color="0.6", linewidth=0.8)
    distance.set_xlabel("kernel distance to plain decoding (95 %)", fontsize=9)
    bars = saved.barh(rows, [one.step_compression for one in records], color=colour)
    saved.bar_label(bars, words, fontsize=8)
    saved.set_xlim(0, 2.1 * max(one.step_compression for one in records))
    labels = [f"{shortened(one.accelerator)}  ({one.exactness})" for one in records]
    saved.set_yticks(rows, labels, fontsize=8)
    saved.invert_yaxis()
    saved.margins(y=0.01)
    saved.set_xlabel("times fewer forward passes of the target", fontsize=9)
    add_legend(figure, records)
    return figure


WIDTH = 200  # characters of a line of the text tables
STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; --line: #8884; --accent: #0072B2; }
body { max-width: 70rem; margin: 0 auto; padding: 1rem; } h1 { font-size: 1.2rem; margin: 0; }
.headline { font-size: 1.7rem; line-height: 1.25; margin: .5rem 0 1.5rem; }
.headline b { color: var(--accent); }
dl.settings { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); gap: .5rem 1rem; }
dt { font-size: .8rem; opacity: .75; } dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; } pre { overflow-x: auto; line-height: 1.25; font-size: .8rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th { vertical-align: bottom; white-space: normal; } th:first-child, td:first-child { text-align: left; }
th button { all: unset; cursor: pointer; font-weight: 600; } th button:focus-visible { outline: 2px solid; }
[aria-sort=ascending] button::after { content: " ▲"; } [aria-sort=descending] button::after { content: " ▼"; }
td i { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .4em; }
figure { margin: 1rem 0; } img { max-width: 100%; } .plot { background: #fff; border-radius: .4rem; }
figure:has(> .plot) { overflow-x: auto; } .plot { min-width: 36rem; }  /* readable labels on a phone */
.samples { display: flex; flex-wrap: wrap; gap: 1rem; } .samples figure { max-width: 20rem; margin: 0; }
.texts dt { font-weight: 600; margin-top: .5rem; } summary { cursor: pointer; }
@media (prefers-color-scheme: dark) { :root { --accent: #56B4E9; } }
"""
SORT = """
for (const button of document.querySelectorAll("th button")) button.onclick = () => {
  const head = button.parentElement, body = head.closest("table").tBodies[0], place = head.cellIndex;
  const down = head.getAttribute("aria-sort") !== "descending" && place > 0
    || head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = row => row.cells[place].textContent, number = row => parseFloat(key(row)) || 0;
  const order = (a, b) => place ? number(a) - number(b) : key(a).localeCompare(key(b));
  body.append(...[...body.rows].sort((a, b) => down ? order(b, a) : order(a, b)));
};
"""


@dataclass(frozen=True)
class Sample:
    """A prompt with its input images, and the text or image that each accelerator generated."""

    prompt: str
    images: Sequence[Image.Image]
    outputs: Mapping[str, str | Image.Image]


def html_report(records: Sequence[Record], tables: RenderableType, samples: Sequence[Sample]) -> str:
    """The report of a bench as an HTML page in one file.

    Args:
        records: one for each accelerator, the first of plain decoding.
        tables: the text tables of the records, as the console shows them.
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
        f"<style>{STYLE}</style><body><h1>{title}</h1><p class='headline'>{headline(records)}</p>"
        f"{settings_list(records[0].settings)}<h2>Results</h2>{results_table(records)}{''.join(plots)}"
        f"{'<h2>Samples</h2>' if samples else ''}{''.join(map(sample_html, samples))}"
        f"<details><summary>Tables as text, with explanations</summary>{written}</details>"
        f"<script>{SORT}</script></body></html>\n"
    )


def headline(records: Sequence[Record]) -> str:
    """The best exact accelerator and its speed-up, as HTML."""
    others = (one for one in records if one.accelerator != BASELINE and not one.accelerator.startswith(PEER))
    exact = [one for one in others if one.exactness == "exact"]
    if not exact:
        return "This bench has no exact accelerator besides plain decoding."
    best = max(exact, key=lambda one: one.speedup)
    ends = best.speedup_interval
    interval = "" if ends is None else f" (95 % interval {ends[0]:.2f} to {ends[1]:.2f})"
    name, times = escape(best.accelerator), f"{best.speedup:.2f}x"
    if best.speedup <= 1:
        return f"No exact accelerator is faster than plain decoding; {name} has {times}{interval}."
    return f"<b>{name}</b> is exact and <b>{times}</b> as fast as plain decoding{interval}."


def settings_list(settings: Mapping[str, object]) -> str:
    """The settings of a run as an HTML definition list."""
    pairs = "".join(
        f"<div><dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in settings.items()
        if value is not None and value != ""
    )
    return f"<dl class='settings'>{pairs}</dl>"


def results_table(records: Sequence[Record]) -> str:
    """All columns of the text tables as an HTML table that a click on a header sorts."""
    columns = IMAGE_COLUMNS if any(one.pixel_seconds for one in records) else COLUMNS
    texts = {header.replace("/\n", "/"): [show(one) for one in records] for header, show, _ in columns[1:]}
    texts = {header: cells for header, cells in texts.items() if {*cells} != {"-"}}
    heads = "".join(
        f'<th scope="col"><button>{one}</button></th>' for one in ("accelerator (promise)", *texts)
    )
    rows = []
    for record, cells in zip(records, zip(*texts.values(), strict=True), strict=True):
        colour, name = PROMISE_COLOURS[promise_of(record.exactness)], escape(record.accelerator)
        first = f'<td><i style="background: {colour}"></i>{name} ({escape(record.exactness)})'
        rows.append(f"<tr>{first}{''.join(f'<td>{cell}' for cell in cells)}</tr>")
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def sample_html(sample: Sample) -> str:
    """A prompt with the outputs of all accelerators as HTML."""
    given = "".join(f'<img alt="input" src="{data_url(image)}">' for image in sample.images)
    texts, drawn = "", ""
    for name, output in sample.outputs.items():
        if isinstance(output, str):
            texts += f"<dt>{escape(name)}</dt><dd>{escape(output)}</dd>"
        else:
            image = f'<img alt="{escape(name)}" src="{data_url(output)}">'
            drawn += f"<figure>{image}<figcaption>{escape(name)}</figcaption></figure>"
    outputs = f"<dl class='texts'>{texts}</dl><div class='samples'>{drawn}</div>"
    return f"<section><h3>{escape(sample.prompt)}</h3>{given}{outputs}</section>"
