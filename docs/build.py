"""Generate the built parts of the pages: tables of accelerators, commands and benchmark results.

Everything between `<!-- built ... -->` and `<!-- /built -->` is generated from the code and the records in
assets/benchmarks.

Usage:
    python docs/build.py            # write the pages
    python docs/build.py --figures  # also draw the figure of each method (needs matplotlib)
    python docs/build.py --check    # write nothing; exit with 1 if a page is out of date
    python docs/build.py --extras   # the pages of mmspec-extras, which must be installed
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS, EXTRAS, RECORDS = ROOT / "docs", ROOT / "extras" / "docs", ROOT / "assets" / "benchmarks"
BUILT = re.compile(r"(<!-- built: ([^>]*?) -->\n).*?(<!-- /built -->)", re.DOTALL)
#: Records of image generators, with the reference model and the settings of each.
FAMILIES = {
    "image-methods-cpu": "scenes-llamagen, 48 captions",
    "image-forwards-cpu": "scenes-llamagen, fewest forward passes",
    "image-eagle-cpu": "scenes-llamagen, 48 captions",
    "nextstep-methods-cpu": "scenes-nextstep, 24 captions",
    "mar-methods-cpu": "scenes-mar, 48 scenes",
}
#: Records of `mmspec bench --task all`, with the reference model of each.
DRAFTERS = {"drafters-cpu": "scenes-llava", "hybrid-drafters-cpu": "scenes-hybrid"}
#: An option of earlier records that the package lacks.
REMOVED = ":partition="
#: Rows of `DRAFTERS` that were run without `length=fixed`.
UNSIZED = {"hybrid-drafters-cpu": ("copy",)}


def pages() -> Iterator[tuple[Path, str | Callable[[str], str]]]:
    """Yield each page that has a built part, with the content of that part, or a function of its label."""
    from mmspec.plugins import METHODS

    yield ROOT / "README.md", front()
    yield DOCS / "reference" / "accelerators.md", accelerators()
    yield DOCS / "reference" / "api.md", api
    yield DOCS / "reference" / "call-keywords.md", parts().call_keywords()
    yield DOCS / "reference" / "commands.md", commands()
    yield DOCS / "reference" / "request-fields.md", request_fields()
    yield from measurements()
    for name in METHODS:
        yield DOCS / "methods" / f"{name}.md", method(name)


def measurements() -> Iterator[tuple[Path, str]]:
    """Yield the pages of measurements, with a few tables each, and their notes, with all tables."""
    explanation, notes = DOCS / "explanation", DOCS / "notes"
    yield explanation / "benchmarks.md", benchmarks_summary()
    yield explanation / "spec-bench.md", real_summary()
    yield explanation / "speech.md", speech_tables()
    yield explanation / "masked-models.md", diffusion_summary()
    yield notes / "2026-11-29-benchmarks-images.md", f"{drafter_tables()}\n\n{image_tables()}"
    yield notes / "2026-11-29-spec-bench.md", real_tables()
    yield notes / "2026-11-29-masked-models.md", diffusion_tables()


def pages_of_extras() -> Iterator[tuple[Path, str]]:
    """Yield each page of mmspec-extras that has a built part, with the content of that part."""
    from mmspec.plugins import METHODS

    for name in METHODS:
        page = EXTRAS / f"{name}.md"
        if page.exists():
            yield page, method(name).replace("(../", "(../../docs/")


#: Rows of the front page: the task in words, the record, the accelerator, and the task's name in the record.
FRONT = (
    ("describe an image", "drafters-cpu", "flash:length=fixed", "describe"),
    ("caption an image", "drafters-cpu", "flash:length=fixed", "caption"),
    ("draw 16 images (256 tokens)", "image-clock-cpu", "sjd:window=16", None),
    ("draw 16 images (256 tokens)", "image-clock-cpu", "cjd:window=24:corrected=19:passes=2", None),
    ("draw an image of continuous tokens", "nextstep-methods-cpu", "shared_noise:tolerance=0.1", None),
)


#: Accelerator and category of the second run of a row of `FRONT`.
AGAIN = ("flash", "describe")


#: Rows of the front page that are not accelerators' names.
PLAIN_WORDS = {
    "none": "`none` (plain decoding)",
    "generate": "`generate` of transformers",
    "generate look-up": "its prompt look-up",
}


def front() -> str:
    """Return the tables of the front page: a real language model, then the toy world."""
    return f"{front_words()}\n\n{front_scenes()}"


def front_words() -> str:
    """Return the accelerators of text on a real language model; all columns are from one timed run."""
    run = settings("real-words-cpu")
    every = [row for row in recorded("real-words-cpu") if row["category"] == ""]
    rows = [
        (
            PLAIN_WORDS.get(row["accelerator"], f"`{shortened(row['accelerator'])}`"),
            f"{row['acceptance_length']:.2f}",
            ratio(row),
            f"{row['over_generate']['median']:.2f}x",
        )
        for row in every
    ]
    columns = ("SmolLM2-135M on Spec-Bench", "tokens per forward pass", "speed-up", "over `generate`")
    caption = (
        f"{run['threads']} CPU cores with AVX-512, {every[0]['samples']} questions, greedy, "
        f"{run['max_new_tokens']} tokens, batch {run['batch_size']}; median (95 % interval). "
        f"{other_processor()}"
    )
    return f"{table(columns, rows)}\n\n{caption} [By task](docs/explanation/spec-bench.md)."


def other_processor() -> str:
    """Return a sentence with the speed-ups of the same run on a processor without AVX-512."""
    medians = {shortened(row["accelerator"]): row["over_plain"]["median"] for row in overall(REAL_AVX2)}
    best = medians["mtp:copy=true"]
    return f"With AVX2, `mtp:copy=true` has {best:.2f}x and {best / medians['generate']:.2f}x."


def ratio(row: dict[str, Any]) -> str:
    """Return the median speed-up with its interval, if the record has one and it is not plain decoding."""
    over = row["over_plain"]
    spread = f" ({over['low']:.2f}-{over['high']:.2f})" if over.get("low", 1) != over.get("high", 1) else ""
    return f"{over['median']:.2f}x{spread}"


def shortened(label: str) -> str:
    """Return the label of an accelerator without the folder of its drafter and the file of its corpus.

    A folder with the name of a training method names the row: an MSD head runs as `eagle`, its row is `msd`.
    """
    from mmspec.training.recipes import RECIPES

    name, _, options = label.partition(":")
    folder = re.search(r":drafter=(?:[^:]*/)?([^:/]+)", label)
    if folder and folder[1] in RECIPES and RECIPES[folder[1]].accelerator == name:
        label = f"{folder[1]}:{options}"
    return re.sub(r":drafter=[^:]*", "", re.sub(r"(:corpus)=[^:]*", r"\1", label))


def front_scenes() -> str:
    """Return the accelerators of images, and of text about images, in the toy world."""
    rows = []
    for task, record, name, kind in FRONT:
        row = next(
            one
            for one in recorded(record)
            if one["accelerator"] == name and kind in (None, one.get("category"))
        )
        measured = f"{row['acceptance_length']:.1f}", spread(row)
        rows.append((task, f"`{name}`", *measured, row["exactness"]))
    columns = ("task (toy world)", "accelerator", "tokens per forward pass", "speed-up", "promise")
    again = next(
        row for row in recorded("drafters-flash-cpu") if (row["accelerator"], row["category"]) == AGAIN
    )
    caption = (
        "Reference models, one CPU core, batch 1, with prefill (95 % interval if recorded). A second run of "
        f"`flash` gave {again['speedup']:.2f}x. Real data is harder to predict."
    )
    return f"{table(columns, rows)}\n\n{caption} [All benchmarks](docs/explanation/benchmarks.md)."


#: Records of `mmspec bench --quality` with other sampling settings, and with two image sizes.
SAMPLINGS = {
    "guidance 1": "image-guidance1-cpu",
    "guidance 2.5": "image-guidance2.5-cpu",
    "guidance 4, top-k 100": "image-top-k-cpu",
}
SIZES = {"256 tokens": "image-sizes-256-cpu", "1,024 tokens": "image-sizes-1024-cpu"}


def benchmarks_summary() -> str:
    """Return the tables of the page of benchmarks: text about images, images, and continuous tokens."""
    tables = {
        "Text about images": text_summary(),
        "Images, one at a time": batch_table("image-clock-cpu", calls=16),
        "Images of continuous tokens": vectors_summary(),
    }
    return titled(tables)


def titled(tables: Mapping[str, str]) -> str:
    """Return tables below their titles."""
    return "\n\n".join(f"### {title}\n\n{made}" for title, made in tables.items())


def text_summary() -> str:
    """Return tokens per forward pass and the speed-up of each drafter, in the tasks that all records have."""
    tasks = ("caption", "describe", "question")
    rows = []
    for record, model in DRAFTERS.items():
        found = {(row["accelerator"], row["category"]): row for row in recorded(record)}
        for name in dict.fromkeys(name for name, _ in found):
            cells = (found[name, task] for task in tasks)
            measured = (f"{row['acceptance_length']:.2f}, {row['speedup']:.2f}x" for row in cells)
            rows.append((model, f"`{name}`", *measured))
    return table(("model", "accelerator", *tasks), rows)


def vectors_summary() -> str:
    """Return the methods of continuous tokens, with the share of correct attributes."""
    rows = [
        (
            FAMILIES[name].split(",")[0],
            f"`{row['accelerator']}`",
            row["exactness"],
            f"{row['nfe_mean']:.0f}",
            f"{row['speedup']:.2f}x",
            f"{row['quality']['attributes']['value']:.1%}",
        )
        for name in ("nextstep-methods-cpu", "mar-methods-cpu")
        for row in recorded(name)
    ]
    return table(("model", "method", "promise", "forward passes", "speed-up", "attributes"), rows)


def drafter_tables() -> str:
    """Return the tables of drafters of text about images, and of exact speculation on continuous tokens."""
    models = (f"bench-describe{batch}-cpu" for batch in ("", "-batch16"))
    tables = {
        "Draft models": "\n".join((drafts_table(next(models)), *drafts_table(next(models)).splitlines()[2:])),
        "Drafters of a vision-language model": cells_table("drafters-cpu"),
        "Drafters of a hybrid model": cells_table("hybrid-drafters-cpu"),
        "FLASH: blocks and compression": flash_table(),
    }
    return titled(tables)


def drafts_table(name: str) -> str:
    """Return a record of draft models with all its counts."""
    run = settings(name)
    rows = [
        (
            run["task"],
            str(run["batch_size"]),
            f"`{row['accelerator']}`",
            *(str(row[one]) for one in ("new_tokens", "target_forwards")),
            f"{row['acceptance_length']:.2f}",
            f"{row['speedup']:.2f}x",
            f"{row['identical']:.0%}",
        )
        for row in recorded(name)
        if not row["category"]
    ]
    counts = ("tokens", "forward passes", "tokens per forward pass", "speed-up", "identical")
    return table(("task", "batch", "accelerator", *counts), rows)


def cells_table(name: str) -> str:
    """Return a record by task: tokens per forward pass, the speed-up of decoding, and that with prefill."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in recorded(name):
        found.setdefault(row["accelerator"], {})[row["category"]] = row
    rows = []
    for drafter, tasks in found.items():
        weights = next(iter(tasks.values()))["parameters"]
        cells = (
            f"{row['acceptance_length']:.2f}, {row['decode_speedup']:.2f}x ({row['speedup']:.2f}x)"
            for row in tasks.values()
        )
        rows.append((f"`{drafter}`", f"{weights / 1e6:.2f} M" if weights else "-", *cells))
    return table(("drafter", "weights", *found["none"]), rows)


#: Heads of the record of FLASH's two ideas, by their names in the record.
FLASH = {
    "flash:drafter=flash-identity:block=1": "token by token, whole images",
    "flash:block=1": "token by token, compressed images",
    "flash:drafter=flash-identity": "blocks of ten, whole images",
    "flash": "blocks of ten, compressed images",
    "flash:depth=20": "two blocks per round (`flash:depth=20`)",
}


def flash_table() -> str:
    """Return the speed-up of decoding with blocks, and with compressed images."""
    records = recorded("drafters-flash-cpu")
    found = {(row["accelerator"], row["category"]): f"{row['decode_speedup']:.2f}x" for row in records}
    rows = [(title, f"{found[one, 'describe']} / {found[one, 'clip']}") for one, title in FLASH.items()]
    return table(("FLASH head", "speed-up of decoding, descriptions / clips"), rows)


def image_tables() -> str:
    """Return the tables of image methods: two searches, other sampling settings, batches and image sizes."""
    parts = {
        "Speed-up, one image at a time": batch_table("image-clock-cpu", calls=16),
        "Settings that were fast on a CPU": methods_table("image-methods-cpu", timed=False),
        "Settings with the fewest forward passes": methods_table("image-forwards-cpu", timed=False),
        "`eagle` with three acceptance rules": methods_table("image-eagle-cpu", timed=False),
        "Other sampling settings: fewer forward passes, measured TV": side_by_side(SAMPLINGS, outcome),
        "Batches of 8 images": batch_table("image-batch8-cpu"),
        "Two image sizes: fewer forward passes": side_by_side(SIZES, fewer),
        "Settings of the corrector": parts_table("image-corrector-cpu"),
    }
    return titled(parts)


REAL_AVX2 = "real-words-avx2-cpu"
#: Timed records of `mmspec bench` with a real language model on Spec-Bench, by the titles of their tables.
REAL = {
    "Greedy, two cores with AVX-512, 60 questions, 64 tokens": "real-words-cpu",
    "Greedy, two cores without AVX-512, 60 questions, 64 tokens": REAL_AVX2,
    "Greedy, one core without AVX-512, 60 questions, 64 tokens": "real-words-one-core-cpu",
    "Compiled, two cores, two questions of each task": "real-words-compiled-cpu",
}
#: Records without times: decoded in batches while the machine did other work, or before weights were packed.
UNTIMED = {
    "Greedy, 60 questions, 24 tokens": "real-words-60-cpu",
    "Temperature 1, 30 questions, 16 tokens": "real-words-sampled-cpu",
    "About images (scenes-smol), greedy, five prompts of each task": "scenes-smol-cpu",
    "About images, temperature 1, five prompts of each task, 48 tokens": "scenes-smol-sampled-cpu",
}


def real_summary() -> str:
    """Return the tables of the page of Spec-Bench: speed-ups, full drafts, and questions about images."""
    greedy, sampled = "real-words-60-cpu", "real-words-sampled-cpu"
    tables = {
        "Speed-up": summary_table(),
        "Full drafts: tokens per forward pass (95 %)": both_temperatures(greedy, sampled),
        "About images (scenes-smol): greedy, trees of a search": counts_table("scenes-smol-cpu"),
    }
    return titled(tables)


def speech_tables() -> str:
    """Return the tables of drafters for a real speech recogniser."""
    return titled({"One sentence": speech_table("speech-cpu"), "25 seconds": speech_table("speech-long-cpu")})


def speech_table(name: str) -> str:
    """Return the table of a record of `benchmarks.real_speech`."""
    columns = ("accelerator", "clips", "identical", "tokens per forward pass (95 %)", "speed-up (95 %)")
    rows = []
    for row in loaded(name)["records"]:
        (low, high), length = row.get("speedup_interval", (0, 0)), row.get("acceptance_length")
        rows.append(
            (
                f"`{shortened(row['accelerator'])}`",
                f"{row['samples']}",
                f"{row['identical']:.0%}",
                "1.00" if length is None else with_interval(row),
                f"{row['speedup']:.2f}x ({low:.2f}-{high:.2f})" if high else "-",
            )
        )
    return table(columns, rows)


def both_temperatures(greedy: str, sampled: str) -> str:
    """Return the tokens per forward pass of a greedy record and of a sampled one, over all tasks."""
    found = [{row["accelerator"]: row for row in overall(name)} for name in (greedy, sampled)]
    labels = labelled(list(found[0]))
    rows = [
        (labels[one], *(with_interval(run[one]) if one in run else "-" for run in found)) for one in found[0]
    ]
    return table(("accelerator", "greedy", "temperature 1"), rows)


def counts_table(name: str) -> str:
    """Return the identical replies and the tokens per forward pass of a record, over all tasks."""
    found = overall(name)
    labels = labelled([row["accelerator"] for row in found])
    rows = [(labels[row["accelerator"]], f"{row['identical']:.0%}", with_interval(row)) for row in found]
    return table(("accelerator", "identical", "tokens per forward pass (95 %)"), rows)


def overall(name: str) -> list[dict[str, Any]]:
    """Return the rows of a record that cover all tasks."""
    return [row for row in recorded(name) if not row["category"]]


def labelled(methods: Sequence[str]) -> dict[str, str]:
    """Return a label for each accelerator of a record, marking a shipped head beside another of its kind."""
    labels = {method: f"`{shortened(method)}`" for method in methods}
    for method in [one for one in methods if ":drafter=assets/" in one]:
        if list(labels.values()).count(labels[method]) > 1:
            labels[method] += " (shipped)"
    return labels


def real_tables() -> str:
    """Return the tables of text drafters on a real language model."""
    tables = {title: real_table(name) for title, name in REAL.items()}
    tables |= {title: real_table(name, timed=False) for title, name in UNTIMED.items()}
    return titled(tables)


def summary_table() -> str:
    """Return the first three timed records: tokens per forward pass of the first, and median speed-ups."""
    runs = [{row["accelerator"]: row for row in overall(name)} for name in list(REAL.values())[:3]]
    rows = [
        (
            f"`{shortened(one)}`",
            f"{row['acceptance_length']:.2f}",
            *(ratio(run[one]) for run in runs),
            f"{row['over_generate']['median']:.2f}x",
        )
        for one, row in runs[0].items()
    ]
    machines = ("two cores, AVX-512", "two cores, AVX2", "one core, AVX2")
    return table(("accelerator", "tokens per forward pass", *machines, "over `generate`, AVX-512"), rows)


def real_table(name: str, timed: bool = True) -> str:
    """Return a record by task: tokens per forward pass and, if `timed`, the median speed-up.

    Records with the parts of the time have a column for the share of drafting too.
    """

    def cell(row: dict[str, Any]) -> str:
        faster = f", {row['over_plain']['median']:.2f}x" if timed else ""
        return f"{row['acceptance_length']:.2f}{faster}"

    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in recorded(name):
        found.setdefault(row["accelerator"], {})[row["category"]] = row
    labels = labelled(list(found))
    named = [task for task in found["none"] if task]
    has_parts = "time" in found["none"][""]
    rows = [
        (
            labels[method],
            f"{tasks['']['identical']:.0%}",
            with_interval(tasks[""]),
            *([ratio(tasks[""])] if timed else []),
            *([f"{tasks['']['time']['draft']:.1%}" if "time" in tasks[""] else "-"] if has_parts else []),
            *(cell(tasks[task]) for task in named),
        )
        for method, tasks in found.items()
    ]
    measured = [
        "tokens per forward pass (95 %)",
        *["speed-up (95 %)"] * timed,
        *["time drafting"] * has_parts,
    ]
    return table(("accelerator", "identical", *measured, *named), rows)


#: Records of `python -m reference evaluate diffusion`, by the titles of their tables.
DIFFUSION = {
    "Greedy": "diffusion-cpu",
    "Greedy, 96 other scenes": "diffusion-others-cpu",
    "Temperature 1": "diffusion-sampled-cpu",
    "Cached keys of the image, in a model with full attention": "diffusion-image-keys-cpu",
}


#: Rows of the table on the page of masked models.
MASKED = (
    "none",
    "freedave:states=17",
    "threshold:threshold=0.99:fallback=leftmost",
    "threshold:threshold=0.9",
    "entropy_bound",
    "self_speculation:num_draft_tokens=15",
)


def diffusion_summary() -> str:
    """Return the table of the page of masked models: a few methods, with the shares of correct outputs."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in recorded("diffusion-cpu"):
        if row["accelerator"] in MASKED:
            found.setdefault((row["mode"], row["accelerator"]), {})[row["task"]] = row
    rows = [
        (
            mode,
            f"`{name}`",
            tasks["describe"]["exactness"],
            *(f"{tasks[task]['right']:.1%}" for task in ("caption", "describe")),
            f"{tasks['describe']['tokens_a_forward']:.2f}",
        )
        for (mode, name), tasks in found.items()
    ]
    shares = ("captions right", "descriptions right", "tokens per forward pass")
    return table(("mode", "accelerator", "promise", *shares), rows)


def diffusion_tables() -> str:
    """Return the tables of the reference diffusion model: descriptions in both of its modes."""
    return titled({title: diffusion_table(name) for title, name in DIFFUSION.items()})


def diffusion_table(name: str) -> str:
    """Return a record of descriptions, with a column for the share of correct captions."""
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
        tokens = f"{row['tokens_a_forward']:.2f} ({low:.2f}-{high:.2f})"
        rows.append((label, row["exactness"], *shares, tokens))
    columns = ("mode: accelerator", "promise", "captions right", "right", "identical", "edits per token")
    return table((*columns, "tokens per forward pass (95 %)"), rows)


def methods_table(name: str, timed: bool = True) -> str:
    """Return a record of `mmspec bench --quality`; a star marks settings that were not searched for."""
    columns = ("method", "promise", "forward passes", "fewer forward passes", *["speed-up"] * timed)
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
    """Return the tokens per forward pass with their interval over prompts."""
    low, high = row["acceptance_interval"]
    return f"{row['acceptance_length']:.2f} ({low:.2f}-{high:.2f})"


def distance(kid: dict[str, float]) -> str:
    """Return a kernel distance with half the width of its interval."""
    return f"{kid['value']:.1f} ± {(kid['high'] - kid['low']) / 2:.1f}"


def side_by_side(names: Mapping[str, str], shown: Callable[[dict[str, Any]], str]) -> str:
    """Return records of the same methods as columns of one table."""
    found = [{row["accelerator"]: row for row in recorded(name)} for name in names.values()]
    rows = [
        (f"`{method}`", row["exactness"], *(shown(rows[method]) for rows in found))
        for method, row in found[0].items()
        if method != "none"
    ]
    return table(("method", "promise", *names), rows)


def fewer(row: dict[str, Any]) -> str:
    """Return the forward passes of plain decoding divided by those of a method."""
    return f"{row['step_compression']:.2f}x"


def outcome(row: dict[str, Any]) -> str:
    """Return the ratio of forward passes and the total variation of a method."""
    variation = "" if row["tv"] is None else f", {row['tv']['mean']:.3f}"
    return f"{fewer(row)}{variation}"


def batch_table(name: str, calls: int = 1) -> str:
    """Return a record of `mmspec bench` on images, with the forward passes of one call."""
    rows = [
        (
            f"`{row['accelerator']}`",
            row["exactness"],
            f"{row['identical']:.0%}",
            f"{row['target_forwards'] / calls:.0f}",
            spread(row),
        )
        for row in recorded(name)
    ]
    return table(("method", "promise", "identical images", "forward passes", "speed-up (95 %)"), rows)


def spread(row: dict[str, Any]) -> str:
    """Return the speed-up, with its interval over prompts if the record has one."""
    low, high = row.get("speedup_interval") or (1.0, 1.0)
    return f"{row['speedup']:.2f}x" + (f" ({low:.2f}-{high:.2f})" if low != high else "")


def parts_table(name: str) -> str:
    """Return a record of `mmspec bench --quality` on settings of one method: forward passes and speed-up."""
    rows = [
        (f"`{row['accelerator']}`", f"{row['nfe_mean']:.1f}", f"{row['speedup']:.2f}x")
        for row in recorded(name)
    ]
    return table(("setting", "forward passes", "speed-up"), rows)


def recorded(name: str) -> list[dict[str, Any]]:
    """Return the records of a file in assets/benchmarks, as `mmspec bench --json` writes them."""
    rows = loaded(name)["records"]
    return [row | {"accelerator": at_length(name, row["accelerator"])} for row in rows]


def at_length(record: str, label: str) -> str:
    """Return the label with the draft length of the run, which the labels of two records leave out."""
    if record not in DRAFTERS or label in ("none", *UNSIZED.get(record, ())):
        return label
    return f"{label}:length=fixed"


def settings(name: str) -> dict[str, Any]:
    """Return the settings of the run that a file in assets/benchmarks records."""
    return dict(loaded(name)["settings"])


def loaded(name: str) -> dict[str, Any]:
    """Return a file of assets/benchmarks."""
    return dict(json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8")))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


#: Hatching of each promise in the figures; colours are those of `mmspec bench`.
STYLES = {"exact": "", "bounded": "", "approximate or lossy": "////"}
LONGEST = 48  # characters of a label in a figure
COLOURS = 256  # of a figure, for a small file


def draw_figures() -> None:
    """Draw the figure of each method's page: its tokens per forward pass beside those of other methods."""
    from matplotlib.colors import to_rgba
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from PIL import Image

    from mmspec.evaluation.speed.plots import PROMISE_COLOURS
    from mmspec.plugins import METHODS

    colours = {one: PROMISE_COLOURS[one.split()[0]] for one in STYLES}
    for name in METHODS:
        if (found := compared(name)) is None:
            continue
        subject, rows = found
        figure = Figure((8, 0.24 * len(rows) + 1.1), layout="constrained")
        axes = figure.subplots()
        for place, row in enumerate(rows):
            colour, hatch = colours[promise(row)], STYLES[promise(row)]
            own = method_of(row) == name
            length, style = row["acceptance_length"], {"hatch": hatch, "edgecolor": "white", "linewidth": 0}
            axes.barh(place, length, color=to_rgba(colour, 1 if own else 0.35), **style)
            if row.get("acceptance_interval"):
                axes.hlines(place, *row["acceptance_interval"], colors="black", linewidth=1)
        labels = [shortened(row["accelerator"]) for row in rows]
        cut = [label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…" for label in labels]
        axes.set_yticks(range(len(rows)), cut, fontsize=8)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlabel(f"tokens per forward pass ({subject})", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        present = [one for one in STYLES if any(promise(row) == one for row in rows)]
        key = [Patch(fc=colours[one], hatch=STYLES[one], ec="white", label=one) for one in present]
        figure.legend(handles=key, loc="outside upper right", ncols=len(key), frameon=False, fontsize=8)
        folder = (EXTRAS if (EXTRAS / f"{name}.md").exists() else DOCS / "methods") / "figures"
        folder.mkdir(exist_ok=True)
        figure.savefig(drawn := io.BytesIO(), dpi=96)
        Image.open(drawn).convert("RGB").quantize(COLOURS).save(folder / f"{name}.png", optimize=True)


def promise(row: dict[str, Any]) -> str:
    """Return the promise of a row as a key of `STYLES`."""
    if row["exactness"].startswith("tv<="):
        return "bounded"
    return "exact" if row["exactness"] == "exact" else "approximate or lossy"


def compared(name: str) -> tuple[str, list[dict[str, Any]]] | None:
    """Return the subject and the rows of the first record that has this method, or None."""
    for record, subject in {**DRAFTERS, **FAMILIES}.items():
        rows = recorded(record)
        if record in DRAFTERS:
            subject, rows = f"{subject}, descriptions", [row for row in rows if row["category"] == "describe"]
        if any(method_of(row) == name for row in rows):
            return subject, rows
    if not (DOCS / "methods" / f"{name}.md").exists():
        return None  # the pages of mmspec-extras have no further figures
    rows = [row for row in recorded("real-words-60-cpu") if row["category"] == ""]
    if any(method_of(row) == name for row in rows):
        return "SmolLM2-135M on Spec-Bench, greedy", rows
    rows = [row for row in recorded("diffusion-cpu") if row["task"] == "describe"]
    modes = {row["mode"] for row in rows if method_of(row) == name}
    rows = [
        row | {"acceptance_length": row["tokens_a_forward"], "acceptance_interval": row["interval"]}
        for row in rows
        if row["mode"] in modes and (row["accelerator"] in MASKED or method_of(row) == name)
    ]
    return ("scenes-diffusion, descriptions", rows) if rows else None


def method_of(row: dict[str, Any]) -> str:
    """Return the name of a row's method."""
    return str(row["accelerator"].split(":")[0])


def accelerators() -> str:
    """Return the tables of accelerators and acceptance rules, and of the options that are not of a method."""
    made = {
        "Options of every accelerator": parts().shared_options(),
        "Options of acceptance rules": parts().rule_options(),
    }
    return "\n\n".join(
        [linked(parts().accelerators()), *(f"### {name}\n\n{one}" for name, one in made.items())]
    )


def linked(table: str) -> str:
    """Return the table of accelerators with a link to the page of each."""
    return re.sub(
        r"^\| `(\w+)` \|(?=.*arxiv|.*\| - \|)", r"| [`\1`](../methods/\1.md) |", table, flags=re.MULTILINE
    )


def method(name: str) -> str:
    """Return the built part of an accelerator's page: its properties and its measured figures."""
    from mmspec.accelerators import promise_of
    from mmspec.cli.accelerators import stated
    from mmspec.plugins import METHODS

    preset = METHODS[name]
    source = "-" if preset.source == "-" else f"[{preset.source}](https://arxiv.org/abs/{preset.source})"
    lines = [
        "| | |",
        "|---|---|",
        f"| summary | {preset.summary} |",
        f"| promise | {stated(*promise_of(preset))} |",
        f"| needs | {preset.needs or 'nothing'} |",
        f"| source | {source} |",
    ]
    if own := parts().method_options(preset):
        lines += ["", own]
    rows = list(figures(name))
    if rows:
        lines += [
            "",
            "Measured on small reference models of a toy world, on a CPU. Real data is harder to predict.",
            "[The benchmarks](../explanation/benchmarks.md) list all methods.",
            "",
            "| setting | measured on | tokens per forward pass | speed-up | promise |",
            "|---|---|---|---|---|",
            *rows,
        ]
    if compared(name) is not None:
        lines += ["", f"![Tokens per forward pass of this method and of others](figures/{name}.png)"]
    return "\n".join(lines)


def figures(name: str) -> Iterator[str]:
    """Yield the rows of an accelerator in the records."""
    for record, model in DRAFTERS.items():
        for row in recorded(record):
            if row["accelerator"].split(":")[0] == name and row["category"] in ("caption", "describe"):
                faster = f"{row['decode_speedup']:.2f}x decoding, {row['speedup']:.2f}x end to end"
                measured = f"{row['acceptance_length']:.2f} | {faster} | {row['exactness']}"
                yield f"| `{row['accelerator']}` | {model}, {row['category']} | {measured} |"
    for record, subject in FAMILIES.items():
        for row in recorded(record):
            if row["accelerator"].split(":")[0] == name and REMOVED not in row["accelerator"]:
                variation = "" if row["tv"] is None else f" (measured TV {row['tv']['mean']:.3f})"
                faster = f"{row['speedup']:.2f}x" if "speedup" in row else "-"
                measured = f"{row['acceptance_length']:.2f} | {faster} | {row['exactness']}{variation}"
                yield f"| `{row['accelerator']}` | {subject} | {measured} |"


def commands() -> str:
    """Return a table of the commands, with the first line of each help text and its first example."""
    from typer.main import get_command

    from mmspec.cli.application import app

    lines = ["| command | purpose | example |", "|---|---|---|"]

    def add(command: Any, words: list[str]) -> None:
        children = getattr(command, "commands", None)
        if children:
            for name, child in sorted(children.items()):
                add(child, words if (words, name) == (["mmspec", "bench"], "run") else [*words, name])
            return
        text = inspect.cleandoc(command.help or "")
        shown = [line.strip() for line in text.split("Example:")[-1].splitlines() if line.strip()]
        example = next((line for line in shown if line.startswith(" ".join(words))), *shown[:1])
        first = text.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        lines.append(f"| `{' '.join(words)}` | {first} | `{example}` |")

    add(get_command(app), ["mmspec"])
    return "\n".join(lines)


def request_fields() -> str:
    """Return the tables of request fields."""
    return str(parts().request_fields())


def api(label: str) -> str:
    """Return a part of the API reference: the table of exceptions, or an entry ("api mmspec.enable")."""
    if label.startswith("api "):
        return str(parts("api_entries").entry(label.removeprefix("api ")))
    return str(parts().exceptions())


def parts(name: str = "reference_tables") -> Any:
    """Import a module of this folder: the tables of options and fields, or the entries of the API."""
    if str(DOCS) not in sys.path:
        sys.path.insert(0, str(DOCS))
    return importlib.import_module(name)


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
        new = BUILT.sub(
            lambda found, content=content: (
                f"{found[1]}{content if isinstance(content, str) else content(found[2])}\n{found[3]}"
            ),
            old,
        )
        if new != old:
            stale.append(path)
            if not check:
                path.write_text(new, encoding="utf-8")
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'out of date; run python docs/build.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
