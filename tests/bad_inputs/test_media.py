"""Bad images and videos raise short errors of mmspec, quickly and without using memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.bad_inputs.media_rows import ROWS, problems
from tests.media import files
from tests.media.network import only_local_connections

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", sorted({row.number for row in ROWS}))
def test_bad_media_are_refused(
    kind: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # restored afterwards; the rows themselves remove it
    found = []
    with only_local_connections() as tried:
        for row in ROWS:
            if row.number == kind:  # in a folder with a short name, because messages shorten long ones
                found += problems(row, tmp_path_factory.mktemp("row"))
    assert found == [] and tried == []


REFUSING_BOMBS = """
import resource, sys
from pathlib import Path
from mmspec.errors import MediaError
from mmspec.media import load_image

load_image(Path(sys.argv[1]) / "good")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sorted(Path(sys.argv[1]).glob("bomb*")):
    try:
        load_image(path)
    except MediaError:
        continue
    sys.exit(f"accepted {path}")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_refusing_bombs_takes_less_than_16_megabytes(tmp_path: Path) -> None:
    bombs = [
        files.encoded(Image.new("1", (13000, 13000)), "PNG"),
        files.png_header(30000, 30000),
        files.webp_canvas(16000, 16000),
        files.gif_screen(65535, 65535),
        files.bmp_header(60000, 60000),
    ]
    for index, bomb in enumerate(bombs):
        (tmp_path / f"bomb {index}").write_bytes(bomb)
    (tmp_path / "good").write_bytes(files.encoded(files.noise(), "PNG"))
    # In a separate process, because other tests have already set the memory peak of this one.
    done = subprocess.run(
        [sys.executable, "-c", REFUSING_BOMBS, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(done.stdout) * unit < 16 * 2**20
