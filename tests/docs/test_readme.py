"""The pages agree with the code and with the benchmark records."""

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import mmspec
from mmspec.accelerators import build_accelerator, options_of
from mmspec.cli.loading import parse_choice
from mmspec.plugins import FAMILIES, METHODS
from tests.packaging.source_tree import committed_files

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BENCHMARKS = (ROOT / "docs" / "notes" / "2026-11-29-benchmarks-images.md").read_text(encoding="utf-8")
ACCELERATORS = (ROOT / "docs" / "reference" / "accelerators.md").read_text(encoding="utf-8")
STRUCTURES = (ROOT / "docs" / "explanation" / "structures.md").read_text(encoding="utf-8")
PUBLISHED = r"^\*\*As published\.\*\*.*?(?=\n\n|\Z)"  # a paragraph


def test_built_parts_of_pages_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["docs/build.py", "--check"])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(ROOT / "docs" / "build.py"), run_name="__main__")
    assert not done.value.code


def test_every_method_has_a_page_with_its_idea_formula_and_use() -> None:
    for name in mmspec.list_accelerators():
        page = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
        parts = re.split(r"^## (.*)$", page, flags=re.MULTILINE)[1:]
        assert parts[::2] == ["Idea", "Formula", "When to use it"], name
        assert all(len(text.strip()) > 40 for text in parts[1::2]), name


def test_the_published_values_that_pages_name_are_options() -> None:
    named = []
    for page in (ROOT / "docs" / "methods").glob("*.md"):
        paragraphs = re.findall(PUBLISHED, page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        named += re.findall(r"`(\w+(?::\w+=\w+)+)`", "".join(paragraphs))
    assert len(named) >= 8
    for text in named:
        choice = parse_choice(text)
        if METHODS[choice.name].needs is None:
            build_accelerator(choice.name, **choice.options)
        assert choice.options.keys() - {"acceptance"} <= options_of(METHODS[choice.name]), text


def test_the_front_page_is_one_screen() -> None:
    assert len(README) < 5_000
    assert README.count("python3 -m venv") == 2, ".ci/run reads these"


def test_every_linked_file_exists() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8"))
    ]
    assert len(found) > 40
    assert [(page.name, link) for page, link in found if not (page.parent / link).exists()] == []


def test_every_file_that_the_structures_name_exists() -> None:
    names = re.findall(r"`((?:mmspec|pipelines|kernels|tests)/[\w/.]*)`", STRUCTURES)
    assert names
    missing = [name for name in names if not (ROOT / name).exists()]
    assert not missing


def test_the_public_names_of_the_readme_exist() -> None:
    for name in re.findall(r"mmspec\.(\w+)\(", README + ACCELERATORS):
        assert hasattr(mmspec, name), name


def recorded(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "assets" / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))


def test_the_figures_of_draft_models_are_the_recorded_ones() -> None:
    names = [path.stem for path in (ROOT / "assets" / "benchmarks").glob("bench-*-cpu.json")]
    assert names
    for found in map(recorded, names):
        settings = found["settings"]
        for record in found["records"]:
            row = (
                f"| {settings['task']} | {settings['batch_size']} | `{record['accelerator']}` "
                f"| {record['new_tokens']} | {record['target_forwards']} | {record['acceptance_length']:.2f} "
                f"| {record['speedup']:.2f}x | {record['identical']:.0%} |"
            )
            assert record["category"] or row in BENCHMARKS


def test_the_table_of_drafters_is_the_recorded_one() -> None:
    records = recorded("drafters-cpu")["records"]
    for name in dict.fromkeys(row["accelerator"] for row in records):
        rows = [row for row in records if row["accelerator"] == name]
        weights = f"{rows[0]['parameters'] / 1e6:.2f} M" if rows[0]["parameters"] else "-"
        cells = (
            f"{row['acceptance_length']:.2f}, {row['decode_speedup']:.2f}x ({row['speedup']:.2f}x)"
            for row in rows
        )
        label = name if name == "none" else f"{name}:length=fixed"  # as in the command of the page
        assert f"| `{label}` | {weights} | {' | '.join(cells)} |" in BENCHMARKS
    assert all(row["identical"] == 1.0 for row in records), "the page states that all outputs are identical"


def test_the_speed_up_of_blocks_and_compression_is_the_recorded_one() -> None:
    records = recorded("drafters-flash-cpu")["records"]
    found = {(row["accelerator"], row["category"]): row["decode_speedup"] for row in records}
    whole = "flash:drafter=flash-identity"
    for name in (f"{whole}:block=1", "flash:block=1", whole, "flash", "flash:depth=20"):
        assert f"{found[name, 'describe']:.2f}x / {found[name, 'clip']:.2f}x" in BENCHMARKS


def test_the_page_on_quality_names_every_figure_that_is_printed() -> None:
    from mmspec.evaluation.quality import image_scores, text_scores

    page = (ROOT / "docs" / "how-to" / "evaluation.md").read_text(encoding="utf-8")
    named = [part for metric in image_scores.METRICS for part in FIGURES.get(metric, [metric])]
    assert [name for name in named if f"`{name}`" not in page] == []
    assert [name for name in text_scores.METRICS if name.lower() not in page.lower()] == []


def test_the_page_of_the_assets_has_every_folder_with_the_size_of_its_weights() -> None:
    lines = (ROOT / "assets" / "README.md").read_text(encoding="utf-8").splitlines()
    rows = {name[1]: line for line in lines if (name := re.match(r"[|-] \[?`([\w-]+)`", line))}
    sizes: dict[str, int] = {}
    for name in committed_files(ROOT / "assets"):
        folder, is_weights = name.split("/")[1], name.endswith(".safetensors")
        if (ROOT / "assets" / folder).is_dir():
            own = is_weights and not (ROOT / name).is_symlink()
            sizes[folder] = sizes.get(folder, 0) + ((ROOT / name).stat().st_size if own else 0)
    for folder, size in sizes.items():
        shown = f"{size / 1e6:.2f} MB" if size > 50_000 else f"{size / 1e3:.0f} kB"
        assert folder in rows, folder
        assert not size or f"| {shown}" in rows[folder], (folder, shown)


def test_the_page_of_models_names_every_family() -> None:
    page = (ROOT / "docs" / "how-to" / "models.md").read_text(encoding="utf-8")
    letters = re.sub(r"[^a-z0-9]", "", page.lower())
    assert [name for name in FAMILIES if name.replace("_", "") not in letters] == []


FIGURES = {
    "precision_recall": ["precision", "recall"],
    "density_coverage": ["density", "coverage"],
    "entropy": ["entropy_tokens", "entropy_colours"],
}
