"""Fill the built parts of the pages in docs/: tables of accelerators, commands, and measured figures.

Everything between `<!-- built ... -->` and `<!-- /built -->` comes from the code and from assets/benchmarks.

Usage:
    python docs/build.py          # write
    python docs/build.py --figures  # draw the figures of the methods too (matplotlib)
    python docs/build.py --check  # exit with 1 if a page is not what would be written
    python docs/build.py --extras  # the pages of mmspec-extras, which has to be installed
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS, RECORDS = ROOT / "docs", ROOT / "assets" / "benchmarks"
BUILT = re.compile(r"(<!-- built: [^>]*-->\n).*?(<!-- /built -->)", re.DOTALL)
FAMILIES = {
    "image-methods-cpu": "scenes-llamagen, 48 captions",
    "image-forwards-cpu": "the same, set for the fewest forwards",
    "image-eagle-cpu": "scenes-llamagen, 48 captions",
    "nextstep-methods-cpu": "scenes-nextstep, 24 captions",
    "mar-methods-cpu": "scenes-mar, 48 scenes",
}
#: Records of `mmspec bench --task all`, and the reference model of each.
DRAFTERS = {"drafters-cpu": "scenes-llava", "hybrid-drafters-cpu": "scenes-hybrid"}


def pages() -> Iterator[tuple[Path, str]]:
    """Every page with a built part, and what belongs there."""
    from mmspec.cli.accelerators import markdown_table
    from mmspec.plugins import METHODS

    yield ROOT / "README.md", front()
    yield DOCS / "reference" / "accelerators.md", linked(markdown_table())
    yield DOCS / "reference" / "commands.md", commands()
    yield DOCS / "reference" / "request-fields.md", request_fields()
    yield DOCS / "explanation" / "benchmarks.md", image_tables()
    yield DOCS / "explanation" / "spec-bench.md", real_tables()
    yield DOCS / "explanation" / "masked-models.md", diffusion_tables()
    for name in METHODS:
        yield DOCS / "methods" / f"{name}.md", method(name)


def pages_of_extras() -> Iterator[tuple[Path, str]]:
    """Every page of mmspec-extras with a built part, and what belongs there."""
    from mmspec.plugins import METHODS

    for name in METHODS:
        page = ROOT / "extras" / "docs" / f"{name}.md"
        if page.exists():
            yield page, method(name).replace("(../", "(../../docs/")


#: Rows of the front page: task in words, record, its row, and the task there.
FRONT = (
    ("describe an image", "drafters-cpu", "flash", "describe"),
    ("caption an image", "drafters-cpu", "flash", "caption"),
    ("draw an image (256 tokens)", "image-clock-cpu", "sjd:window=16", None),
    ("draw an image (256 tokens)", "image-clock-cpu", "cjd:window=24:corrected=19:passes=2", None),
    ("draw an image of continuous tokens", "nextstep-methods-cpu", "shared_noise:tolerance=0.1", None),
)


def front() -> str:
    """The tables of the front page: real words first, then the toy world of the reference models."""
    return f"{front_words()}\n\n{front_scenes()}"


def front_words() -> str:
    """Accelerators of text on a real language model: all that is drafted, and what pays on two cores."""
    free = {
        shortened(row["accelerator"]).replace(":length=fixed", ""): f"{row['acceptance_length']:.2f}"
        for row in recorded("real-words-60-cpu")
        if row["category"] == ""
    }
    shown = [
        (
            f"`{shortened(row['accelerator'])}`",
            free.get(shortened(row["accelerator"]), ""),
            f"{row['over_plain']['median']:.2f}x",
        )
        for row in recorded("real-words-cpu")
        if row["category"] == ""
        and shortened(row["accelerator"]) not in ("none", "draft_model")  # other weights
    ]
    names = ("SmolLM2-135M on Spec-Bench, exact", "tokens a pass", "speed-up on two cores")
    told = (
        "Greedy: tokens of full drafts, 60 questions; time where only what pays is "
        "drafted, median of the same. Heads learnt for 14 and 42 minutes of a core."
    )
    return f"{table(names, shown)}\n\n{told} [By task](docs/explanation/spec-bench.md)."


def shortened(label: str) -> str:
    """The label of an accelerator without the folder of its drafter, and the file of its corpus.

    A folder that is named after a method of training names the accelerator: MSD's heads run as `eagle`.
    """
    from mmspec.training.recipes import RECIPES

    name, _, options = label.partition(":")
    folder = re.search(r":drafter=(?:[^:]*/)?([^:/]+)", label)
    if folder and folder[1] in RECIPES and RECIPES[folder[1]].accelerator == name:
        label = f"{folder[1]}:{options}"
    return re.sub(r":drafter=[^:]*", "", re.sub(r"(:corpus)=[^:]*", r"\1", label))


def front_scenes() -> str:
    """Accelerators of images and of text about them, in the toy world."""
    lines = ["| | accelerator | tokens a pass | speed-up | output |", "|---|---|---|---|---|"]
    for task, record, name, kind in FRONT:
        row = next(
            one
            for one in recorded(record)
            if one["accelerator"] == name and kind in (None, one.get("category"))
        )
        tokens = row["acceptance_length"] if kind else row["step_compression"]
        lines.append(f"| {task} | `{name}` | {tokens:.1f} | {row['speedup']:.2f}x | {row['exactness']} |")
    told = "Small reference models of a toy world, kinder than real data; one CPU core, batch 1, end to end."
    return "\n".join([*lines, "", f"{told} [All figures](docs/explanation/benchmarks.md)."])


#: Records of `mmspec bench --quality` under other sampling, and on images of two sizes.
SAMPLINGS = {
    "guidance 1": "image-guidance1-cpu",
    "guidance 2.5": "image-guidance2.5-cpu",
    "guidance 4, top-k 100": "image-top-k-cpu",
}
SIZES = {"256 tokens": "image-sizes-256-cpu", "1,024 tokens": "image-sizes-1024-cpu"}


def image_tables() -> str:
    """Tables of image methods: by two searches, other sampling, batches, and sizes of images."""
    parts = {
        "Wall clock, one image at a time": batch_table("image-clock-cpu", calls=16),
        "Each at a setting that was fast on a CPU": methods_table("image-methods-cpu", timed=False),
        "Each at its setting of the fewest forwards": methods_table("image-forwards-cpu", timed=False),
        "`eagle`, and the rules over its tree, in an earlier run on an AMD EPYC": methods_table(
            "image-eagle-cpu", timed=False
        ),
        "Other sampling: times fewer passes, measured TV": side_by_side(SAMPLINGS, outcome),
        "Batches of 8, whose passes are those of the slowest row": batch_table("image-batch8-cpu"),
        "Images of two sizes: times fewer passes": side_by_side(SIZES, fewer),
        "Parts of the corrector": parts_table("image-corrector-cpu"),
    }
    return "\n\n".join(f"### {title}\n\n{content}" for title, content in parts.items())


#: Records of `mmspec bench` with a real language model, on Spec-Bench and about images, by what their tables
#: are called.
REAL = {
    "Greedy, two cores, all 60 questions, 64 tokens": "real-words-cpu",
    "The same on one core": "real-words-one-core-cpu",
    "Compiled, two cores, two questions of each task": "real-words-compiled-cpu",
}
#: The same without times: decoded in batches beside other work, or before layers were packed.
UNTIMED = {
    "All 60 questions, greedy, 24 tokens": "real-words-60-cpu",
    "30 questions at temperature 1, 16 tokens": "real-words-sampled-cpu",
    "About images (scenes-smol), greedy, five prompts of each task": "scenes-smol-cpu",
    "About images at temperature 1, five prompts of each task, 48 tokens": "scenes-smol-sampled-cpu",
}


def real_tables() -> str:
    """Tables of text drafters on a real language model: all tasks together, then each."""
    tables = {title: real_table(name) for title, name in REAL.items()}
    tables |= {title: real_table(name, timed=False) for title, name in UNTIMED.items()}
    return "\n\n".join(f"### {title}\n\n{made}" for title, made in tables.items())


def real_table(name: str, timed: bool = True) -> str:
    """A record by task: tokens a forward, and where `timed` the median prompt's ratio to plain decoding.

    A record that says where the time went has the share of drafting too.
    """

    def cell(row: dict[str, Any]) -> str:
        ratio = f", {row['over_plain']['median']:.2f}x" if timed else ""
        return f"{row['acceptance_length']:.2f}{ratio}"

    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in recorded(name):
        found.setdefault(row["accelerator"], {})[row["category"]] = row
    labels = {method: f"`{shortened(method)}`" for method in found}
    for method in [one for one in found if ":drafter=assets/" in one]:
        if list(labels.values()).count(labels[method]) > 1:
            labels[method] += " (shipped)"
    named = [task for task in found["none"] if task]
    tells_parts = "time" in found["none"][""]
    rows = [
        (
            labels[method],
            f"{tasks['']['identical']:.0%}",
            with_interval(tasks[""]),
            *([f"{tasks['']['over_plain']['median']:.2f}x"] if timed else []),
            *([f"{tasks['']['time']['draft']:.1%}" if "time" in tasks[""] else "-"] if tells_parts else []),
            *(cell(tasks[task]) for task in named),
        )
        for method, tasks in found.items()
    ]
    measured = ["all tasks (95 %)", *["wall clock"] * timed, *["drafting"] * tells_parts]
    return table(("", "identical", *measured, *named), rows)


#: Records of `python -m reference evaluate diffusion`, by what their tables are called.
DIFFUSION = {
    "Greedy": "diffusion-cpu",
    "Greedy, 96 other scenes": "diffusion-others-cpu",
    "Temperature 1": "diffusion-sampled-cpu",
    "Keys of the image kept, by a model whose places all see each other": "diffusion-image-keys-cpu",
}


def diffusion_tables() -> str:
    """Tables of the reference diffusion model: descriptions in both of its modes."""
    return "\n\n".join(f"### {title}\n\n{diffusion_table(name)}" for title, name in DIFFUSION.items())


def diffusion_table(name: str) -> str:
    """A record of descriptions, with the captions' share of right ones beside."""
    rows, captions = [], {}
    for row in recorded(name):
        label = f"{row['mode']}: `{row['accelerator']}`"
        if row["task"] == "caption":
            captions[label] = f"{row['right']:.1%}"
            continue
        low, high = row["interval"]
        shares = (
            captions.get(label, "-"),
            f"{row['right']:.1%}",
            f"{row['identical']:.1%}",
            f"{row['edits']:.3f}",
        )
        passes = f"{row['tokens_a_forward']:.2f} ({low:.2f}-{high:.2f})"
        rows.append((label, row["exactness"], *shares, passes))
    columns = ("", "promise", "captions right", "right", "identical", "edits a token")
    return table((*columns, "tokens a forward (95 %)"), rows)


def methods_table(name: str, timed: bool = True) -> str:
    """A record of `mmspec bench --quality`; a star marks settings that were not searched for."""
    columns = ("method", "promise", "passes", "times fewer", *["wall clock"] * timed)
    rows = [
        (
            f"`{row['accelerator']}`" + ("" if "searched" in row or row["accelerator"] == "none" else " *"),
            row["exactness"],
            f"{row['nfe_mean']:.1f}",
            fewer(row),
            *([f"{row['speedup']:.2f}x"] if timed else []),
            "-" if row["tv"] is None else f"{row['tv']['mean']:.3f}",
            f"{row['quality']['attributes']['value']:.1%}",
            distance(row["quality"]["kid"]),
        )
        for row in recorded(name)
    ]
    return table((*columns, "measured TV", "attributes", "distance (95 %)"), rows)


def with_interval(row: dict[str, Any]) -> str:
    """Tokens a forward with their interval over prompts."""
    low, high = row["acceptance_interval"]
    return f"{row['acceptance_length']:.2f} ({low:.2f}-{high:.2f})"


def distance(kid: dict[str, float]) -> str:
    """A kernel distance with half the width of its interval."""
    return f"{kid['value']:.1f} ± {(kid['high'] - kid['low']) / 2:.1f}"


def side_by_side(names: Mapping[str, str], shown: Callable[[dict[str, Any]], str]) -> str:
    """Records of the same methods as columns of one table."""
    found = [{row["accelerator"]: row for row in recorded(name)} for name in names.values()]
    rows = [
        (f"`{method}`", row["exactness"], *(shown(rows[method]) for rows in found))
        for method, row in found[0].items()
        if method != "none"
    ]
    return table(("method", "promise", *names), rows)


def fewer(row: dict[str, Any]) -> str:
    """Passes saved by a method, as a ratio."""
    return f"{row['step_compression']:.2f}x"


def outcome(row: dict[str, Any]) -> str:
    """Passes saved and total variation of a method."""
    variation = "" if row["tv"] is None else f", {row['tv']['mean']:.3f}"
    return f"{fewer(row)}{variation}"


def batch_table(name: str, calls: int = 1) -> str:
    """A record of `mmspec bench` on images, with passes per call."""
    rows = [
        (
            f"`{row['accelerator']}`",
            row["exactness"],
            f"{row['identical']:.0%}",
            f"{row['target_forwards'] / calls:.0f}",
            f"{row['speedup']:.2f}x",
        )
        for row in recorded(name)
    ]
    return table(("method", "promise", "images of plain decoding", "passes", "wall clock"), rows)


def parts_table(name: str) -> str:
    """A record of `mmspec bench --quality` with settings of one method: passes and time alone."""
    rows = [
        (f"`{row['accelerator']}`", f"{row['nfe_mean']:.1f}", f"{row['speedup']:.2f}x")
        for row in recorded(name)
    ]
    return table(("setting", "passes of the model", "wall clock"), rows)


def recorded(name: str) -> list[dict[str, Any]]:
    """The records of a file of assets/benchmarks, as `mmspec bench --json` writes them."""
    found: list[dict[str, Any]] = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))[
        "records"
    ]
    return found


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw_figures() -> None:
    """Draw, for the page of each method, its tokens a forward among all others."""
    from matplotlib.figure import Figure

    from mmspec.plugins import METHODS

    folder = DOCS / "methods" / "figures"
    folder.mkdir(exist_ok=True)
    for name in METHODS:
        if (found := compared(name)) is None:
            continue
        subject, values = found
        figure = Figure((7, 0.28 * len(values) + 1), layout="constrained")
        axes = figure.subplots()
        own = [label.split(":")[0] == name for label in values]
        axes.barh(
            list(values), list(values.values()), color=["#2f6fbd" if mine else "#c9ced6" for mine in own]
        )
        axes.invert_yaxis()
        axes.set_xlabel(f"tokens a forward, {subject}")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(folder / f"{name}.png", dpi=80)


def compared(name: str) -> tuple[str, dict[str, float]] | None:
    """Tokens a forward of all methods in the first record that has this one, and its subject."""
    for record, model in DRAFTERS.items():
        rows = recorded(record)
        found = {
            row["accelerator"]: row["acceptance_length"] for row in rows if row["category"] == "describe"
        }
        if any(label.split(":")[0] == name for label in found):
            return f"{model}, descriptions", found
    for record, subject in FAMILIES.items():
        found = {row["accelerator"]: row["step_compression"] for row in recorded(record)}
        if any(label.split(":")[0] == name for label in found):
            return subject, found
    return None


def linked(table: str) -> str:
    """The table of accelerators with a link to the page of each."""
    return re.sub(
        r"^\| `(\w+)` \|(?=.*arxiv|.*\| - \|)", r"| [`\1`](../methods/\1.md) |", table, flags=re.MULTILINE
    )


def method(name: str) -> str:
    """The built part of an accelerator's page: its properties and measured figures."""
    from mmspec.accelerators import promise_of
    from mmspec.cli.accelerators import stated
    from mmspec.plugins import METHODS

    preset = METHODS[name]
    source = "-" if preset.source == "-" else f"[{preset.source}](https://arxiv.org/abs/{preset.source})"
    lines = [
        "| | |",
        "|---|---|",
        f"| what drafts | {preset.summary} |",
        f"| promise | {stated(*promise_of(preset))} |",
        f"| needs | {preset.needs or 'nothing'} |",
        f"| options | {options(preset)} |",
        f"| source | {source} |",
    ]
    rows = list(figures(name))
    if rows:
        lines += [
            "",
            "Measured on our small reference models (a toy world, kinder than real data); all others are in",
            "[the benchmarks](../explanation/benchmarks.md).",
            "",
            "| setting | on | tokens a forward | speed-up | promise |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"![Tokens a forward, beside other methods](figures/{name}.png)",
        ]
    return "\n".join(lines)


def options(preset: Any) -> str:
    """Names and defaults of an accelerator's own options."""
    from mmspec.accelerators import makers_of, options_of

    own = options_of(preset)
    arguments = [one for make in makers_of(preset) for one in inspect.signature(make).parameters.items()]
    found = []
    for name, one in arguments:
        if name in own:
            found.append(f"`{name}`" if one.default is inspect.Parameter.empty else f"`{name}={one.default}`")
    shown = {text.strip("`").split("=")[0] for text in found}
    found += [f"`{name}`" for name in sorted(own - shown)]
    return ", ".join(found) or "none"


def figures(name: str) -> Iterator[str]:
    """Rows of an accelerator in the records."""
    for record, model in DRAFTERS.items():
        for row in recorded(record):
            if row["accelerator"].split(":")[0] == name and row["category"] in ("caption", "describe"):
                ratio = f"{row['decode_speedup']:.2f}x decoding, {row['speedup']:.2f}x end to end"
                told = f"{row['acceptance_length']:.2f} | {ratio} | {row['exactness']}"
                yield f"| `{row['accelerator']}` | {model}, {row['category']} | {told} |"
    for record, subject in FAMILIES.items():
        for row in recorded(record):
            if row["accelerator"].split(":")[0] == name:
                variation = "" if row["tv"] is None else f" (measured TV {row['tv']['mean']:.3f})"
                ratio = f"{row['speedup']:.2f}x" if "speedup" in row else "-"
                told = f"{row['step_compression']:.2f} | {ratio} | {row['exactness']}{variation}"
                yield f"| `{row['accelerator']}` | {subject} | {told} |"


def commands() -> str:
    """Every command with the first line of its help and its first example."""
    from typer.main import get_command

    from mmspec.cli.application import app

    lines = ["| command | what it does | for example |", "|---|---|---|"]

    def add(command: Any, words: list[str]) -> None:
        children = getattr(command, "commands", None)
        if children:
            for name, child in sorted(children.items()):
                add(child, words if (words, name) == (["mmspec", "bench"], "run") else [*words, name])
            return
        text = inspect.cleandoc(command.help or "")
        example = next((line.strip() for line in text.split("Example:")[-1].splitlines() if line.strip()), "")
        first = text.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        lines.append(f"| `{' '.join(words)}` | {first} | `{example}` |")

    add(get_command(app), ["mmspec"])
    return "\n".join(lines)


def request_fields() -> str:
    """Fields of requests: those that act, those that are ignored, and the others with what they may be."""
    from mmspec.serving.schemas import BODIES

    rows = []
    for name, body in BODIES.items():
        refused = (
            f"`{field}`" + "".join(f" ({json.dumps(value)})" for value in values)
            for field, values in sorted(body.refused.items())
        )
        acts, ignored = (
            ", ".join(f"`{one}`" for one in names) for names in (body.model_fields, sorted(body.ignored))
        )
        rows.append((name, acts, ignored, ", ".join(refused)))
    return table(("of", "act", "ignored", "refused, but for null and the value in brackets"), rows)


def main() -> int:
    """Write or check all pages."""
    check, stale = "--check" in sys.argv[1:], []
    if "--figures" in sys.argv[1:]:
        draw_figures()
    for path, content in pages_of_extras() if "--extras" in sys.argv[1:] else pages():
        old = path.read_text(encoding="utf-8")
        if not BUILT.search(old):
            print(f"{path.relative_to(ROOT)}: no built part", file=sys.stderr)
            return 1
        new = BUILT.sub(lambda found, content=content: f"{found[1]}{content}\n{found[2]}", old)
        if new != old:
            stale.append(path)
            if not check:
                path.write_text(new, encoding="utf-8")
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'stale; run python docs/build.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
