"""Installers, type checkers and a plain clone find the two folders at the top; reference models are small."""

import os

import pytest

from tests.packaging.source_tree import ROOT, committed_files, package_folders, pyproject

MAPPED = pyproject()["tool"]["setuptools"]["package-dir"]
LIMIT = 52.0  # MB of reference models in every clone; GPU machines take 64 MB with all other files


@pytest.mark.parametrize("package", MAPPED)
def test_link_and_mapping_name_the_same_folder(package):
    link = ROOT / package.replace(".", "/")
    if not link.is_symlink():
        pytest.skip("git wrote the links as plain files: core.symlinks is false here")
    assert not os.path.isabs(os.readlink(link))
    assert link.resolve() == ROOT / MAPPED[package]


def test_every_folder_with_python_files_is_a_listed_package():
    found = set()
    for name, folder in [("mmspec", "mmspec"), *MAPPED.items()]:
        for parent in {path.parent for path in (ROOT / folder).rglob("*.py")}:
            if parent.resolve() == parent:  # others are behind a link, which some Python versions follow
                found.add(".".join([name, *parent.relative_to(ROOT / folder).parts]))
    listed = pyproject()["tool"]["setuptools"]["packages"]
    missing = sorted(found - set(listed))
    assert not missing, f"pyproject.toml, [tool.setuptools] packages: add {', '.join(map(repr, missing))}"
    stale = sorted(set(listed) - found)
    assert not stale, f"pyproject.toml, [tool.setuptools] packages: remove {', '.join(map(repr, stale))}"
    assert listed == sorted(listed)


def test_every_package_says_what_it_is():
    missing = [name for name, folder in package_folders().items() if not (folder / "__init__.py").is_file()]
    assert not missing, f"these folders need an __init__.py with a docstring: {missing}"


def test_the_kernels_folder_does_not_hide_the_kernels_package():
    # It would be what `import kernels` finds inside transformers and diffusers when Python runs in the root.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "kernels" / "torch-ext" / "__init__.py").exists()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="counts what is committed")
def test_the_assets_stay_below_their_limit():
    sizes = {name: (ROOT / name).lstat().st_size / 1e6 for name in committed_files(ROOT / "assets")}
    total, largest = sum(sizes.values()), sorted(sizes, key=sizes.__getitem__)[-5:]
    assert 0 < total < LIMIT, f"{total:.1f} MB, {LIMIT} are allowed; the largest: {', '.join(largest)}"
