"""Side effects of importing mmspec.media, and limits that are refused."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest

from mmspec.errors import MediaError
from mmspec.media import MediaLimits
from mmspec.media.limits import Described


def test_importing_media_imports_no_heavy_library_and_starts_no_thread() -> None:
    program = (
        "import sys, threading, mmspec.media\n"
        "heavy = {'torch', 'decord', 'av', 'httpx', 'transformers', 'torchvision'} & set(sys.modules)\n"
        "sys.exit(f'{heavy} {threading.enumerate()}' if heavy or threading.active_count() > 1 else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(MediaLimits)])
def test_limits_are_positive_numbers(field: str) -> None:
    for value in (0, -1, math.nan, math.inf, True, "10", None):
        with pytest.raises(MediaError, match=f"^{field}: "):
            MediaLimits(**{field: value})  # type: ignore[arg-type]
    assert getattr(MediaLimits(**{field: 7}), field) == 7


def test_a_refusal_names_the_limit_and_how_to_raise_it() -> None:
    assert MediaLimits().allows("max_frames", "frames") == (
        "at most 256 frames; MediaLimits(max_frames=...) raises this limit"
    )
    assert str(MediaError("images", Described("a thing"), "no")) == "images: got a thing; no"
