"""The package as files: which folder is which package, and the syntax tree of every module."""

import ast
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Module:
    name: str  # dotted
    path: Path
    is_package: bool

    @property
    def tree(self) -> ast.Module:
        return parse(self.path)

    def location(self, node: ast.AST) -> str:
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def package_folders() -> dict[str, Path]:
    """Dotted name of every listed package -> its real folder."""
    mapped = pyproject()["tool"]["setuptools"]["package-dir"]
    return {
        name: ROOT / mapped.get(name, name.replace(".", "/"))
        for name in pyproject()["tool"]["setuptools"]["packages"]
    }


def committed_files(folder: Path) -> list[str]:
    """Names in the repository of what git tracks there."""
    listing = subprocess.run(
        ["git", "ls-files", str(folder)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return listing.stdout.splitlines()


def modules() -> Iterator[Module]:
    for package, folder in package_folders().items():
        for path in sorted(folder.glob("*.py")):
            is_package = path.name == "__init__.py"
            yield Module(package if is_package else f"{package}.{path.stem}", path, is_package)


def imported_names(module: Module, node: ast.AST) -> list[str]:
    """The dotted names an import statement may load, relative ones made absolute; [] for other nodes.

    `from a import b` gives `a.b`: whether b is a module or a member of one need not be known.
    """
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        parents = module.name.split(".")
        parents = parents[: len(parents) - node.level + module.is_package]
        base = ".".join([*parents, base] if base else parents)
    return [f"{base}.{alias.name}" for alias in node.names]
