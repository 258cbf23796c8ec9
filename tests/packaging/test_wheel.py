"""Wheel and sdist contain each file of the repository once, no other files, and no links."""

import io
import subprocess
import sys
import tarfile
import zipfile

import pytest

from tests.packaging.source_tree import ROOT, committed_files, package_folders, pyproject

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="compares with what is committed")


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The wheel and the sdist of a clone without symbolic links, as on Windows."""
    folder = tmp_path_factory.mktemp("distributions")
    clone = folder / "clone"
    git = ["git", "-c", "core.symlinks=false"]
    subprocess.run([*git, "clone", "--quiet", str(ROOT), str(clone)], check=True)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(clone)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def expected_files() -> dict[str, str]:
    """Name in the wheel -> name in the repository."""
    expected = {}
    for package, folder in package_folders().items():
        for name in committed_files(folder):
            path = ROOT / name
            if path.parent == folder and (
                path.suffix in (".py", ".css", ".html", ".json") or path.name == "py.typed"
            ):
                expected[f"{package.replace('.', '/')}/{path.name}"] = name
    return expected


def test_the_wheel_holds_every_module_once_with_its_content(distributions):
    with zipfile.ZipFile(distributions[0]) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
        expected = expected_files()
        assert sorted(names) == sorted(expected)
        archive = ["git", "archive", "--format=tar", "HEAD", *expected.values()]
        committed = subprocess.run(archive, cwd=ROOT, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(committed)) as sources:
            for name, source in expected.items():
                content = sources.extractfile(source)
                assert content is not None and wheel.read(name) == content.read(), name
        (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
        assert "mmspec = mmspec.cli:main" in wheel.read(entry_points).decode()
        assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_the_sdist_holds_the_sources_and_no_links(distributions):
    with tarfile.open(distributions[1]) as sdist:
        members = {member.name.split("/", 1)[-1]: member for member in sdist.getmembers()}
    assert not [name for name, member in members.items() if member.issym() or member.islnk()]
    assert {*expected_files().values(), "pyproject.toml", "LICENSE", "README.md"} <= set(members)
    assert not set(members) & {
        package.replace(".", "/") for package in pyproject()["tool"]["setuptools"]["package-dir"]
    }
