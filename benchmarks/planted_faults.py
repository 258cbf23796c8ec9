"""Plant faults in the package, one after the other, and report which of them the tests find.

    python benchmarks/planted_faults.py                # about an hour on two cores
    python benchmarks/planted_faults.py --only media   # faults whose name, function or tests contain the word
    python benchmarks/planted_faults.py --check        # only check that all can be planted: seconds

`planted_faults.toml` lists the faults. Each fault changes a few characters of one function: a mistake of
published code, an earlier bug of this code, or a slip of a rename or a merge. It is planted in a clone of the
last commit, where its tests run until one fails. The exit code is 1 if a fault is not found or can no longer
be planted.
"""

from __future__ import annotations

import ast
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_suffix(".toml")
FOLDERS = ("mmspec", "pipelines", "kernels", "extras")
LIMIT_S = 1200.0
NO_TESTS = 5  # exit code of pytest
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Fault(NamedTuple):
    """A fault, and the tests that should find it.

    Attributes:
        name: description of the fault.
        inside: "function", "Class" or "Class.method" that contains the text, in any file.
        old: text that occurs there once.
        new: the text that replaces it.
        tests: files or folders of tests, in the order in which they run.
    """

    name: str
    inside: str
    old: str
    new: str
    tests: tuple[str, ...]


def read_faults(file: Path = FAULTS) -> list[Fault]:
    """Read the faults of a file. Paths of tests are relative to tests/, or start with extras/."""
    rows = tomllib.loads(file.read_text(encoding="utf-8"))["faults"]
    return [
        Fault(
            name,
            inside,
            old,
            new,
            tuple(test if test.startswith("extras/") else f"tests/{test}" for test in tests.split()),
        )
        for name, tests, inside, old, new in rows
    ]


def find(root: Path, fault: Fault) -> tuple[Path, str]:
    """Return the file whose function contains a fault's text, and its source with the fault.

    Raises:
        LookupError: not exactly one function contains the text, or a test file does not exist.
    """
    for test in fault.tests:
        if not (root / test).exists():
            raise LookupError(f"{test} does not exist; name the tests that find the fault")
    found = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            if any(parent.is_symlink() for parent in path.parents):
                continue  # the two links of the package lead to the same files
            source = path.read_text(encoding="utf-8")
            if fault.old in source:
                found += [(path, planted) for planted in _planted(source, fault)]
    if len(found) != 1:
        raise LookupError(f"{fault.inside} contains {fault.old!r} in {len(found)} places; update the fault")
    return found[0]


def _planted(source: str, fault: Fault) -> Iterator[str]:
    """Yield the source with the fault, for each function of that name that contains the text once."""
    lines = source.splitlines(keepends=True)
    for name, node in _definitions(ast.parse(source), ""):
        if name != fault.inside:
            continue
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        body = "".join(lines[first:last])
        if body.count(fault.old) == 1:
            yield "".join(lines[:first]) + body.replace(fault.old, fault.new) + "".join(lines[last:])


def _definitions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            yield prefix + node.name, node
            yield from _definitions(node, f"{prefix}{node.name}.")
        else:
            yield from _definitions(node, prefix)


def installed_extras(root: Path) -> Path:
    """Install mmspec-extras in a folder of a checkout, because its tests need its entry points."""
    folder = root / ".extras"
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, str(root / "extras")], check=True)
        shutil.rmtree(
            root / "extras" / "build"
        )  # a second copy of the source, in which faults would be found too
    return folder


def first_failure(root: Path, tests: tuple[str, ...], workers: str) -> str | None:
    """Run tests until one fails, slow ones last; return its name, or None if all pass."""
    # Tests that plant a bug themselves fail if its text has changed, which does not find the fault.
    without_planting = "not a_planted_bug and not planted_bugs_are and not bug_planted"
    options = ["-q", "-x", "-p", "no:cacheprovider", "-n", workers, "-k", without_planting]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    if any(place.startswith("extras/") for place in tests):
        paths = (root, root / "extras", installed_extras(root))  # the second has the planted source
        environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    for marks, place in itertools.product(("not slow and not gpu", "slow and not gpu"), tests):
        try:
            run = subprocess.run(
                [sys.executable, "-m", "pytest", place, "-m", marks, *options],
                cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"{place}: timeout after {LIMIT_S:g} s"
        if run.returncode in (1, 2):  # a test failed, or a module could not be imported
            named = [line for line in run.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
            return named[0].split(" ", 1)[1].split(" - ")[0] if named else f"{place}: {run.stdout[-300:]}"
        if run.returncode not in (0, NO_TESTS):
            raise RuntimeError(f"pytest {place} ended with {run.returncode}:\n{run.stdout}{run.stderr}")
    return None


def main(
    only: Annotated[str, typer.Option(help="Plant faults whose name or place contains this text.")] = "",
    workers: Annotated[str, typer.Option(help="Processes of pytest-xdist.")] = "2",
    skip: Annotated[int, typer.Option(help="Number of faults to leave out, to continue a run.")] = 0,
    check: Annotated[bool, typer.Option("--check", help="Only check that all can be planted.")] = False,
    root: Annotated[Path, typer.Option(help="Checkout whose last commit is tested.")] = ROOT,
) -> None:
    """Plant faults one after the other, and print the test that finds each."""
    console = Console(width=160, soft_wrap=True, markup=False, highlight=False)
    chosen = [fault for fault in read_faults() if only in f"{fault.name} {fault.inside} {fault.tests}"][skip:]
    lost: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(root), str(copy)], check=True)
        for fault in track(chosen, "faults", console=console):
            began = time.monotonic()
            try:
                path, source = find(copy, fault)
            except LookupError as error:
                lost.append(fault.name)
                console.print(f"NOT PLANTED {fault.name}: {error}")
                continue
            if check:
                continue
            real = path.read_text(encoding="utf-8")
            path.write_text(source, encoding="utf-8")
            found = first_failure(copy, fault.tests, workers)
            path.write_text(real, encoding="utf-8")
            if found is None:
                lost.append(fault.name)
            place = path.relative_to(copy)
            verdict = "MISSED" if found is None else f"found by {found}"
            console.print(f"{fault.name} ({place}): {verdict}, {time.monotonic() - began:.0f} s")
    console.print(
        f"{len(chosen) - len(lost)} of {len(chosen)} faults {'can be planted' if check else 'found'}"
    )
    raise typer.Exit(bool(lost))


if __name__ == "__main__":
    typer.run(main)
