"""Files that are either complete or absent."""

from pathlib import Path

import pytest

from mmspec.atomic_file import atomic_file


def test_a_file_takes_its_place_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with atomic_file(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old" and temporary.parent == tmp_path
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_file(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError), atomic_file(path):
        pass  # nothing was written
    assert path.read_text() == "old"
    with pytest.raises(OSError), atomic_file(path / "b.json") as temporary:  # not a folder
        temporary.write_text("new")
