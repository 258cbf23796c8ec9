"""`import mmspec` and `mmspec --help` must be fast: neither may import a deep-learning library."""

import subprocess
import sys

import pytest

from tests.packaging.source_tree import ROOT

HEAVY = ("torch", "transformers", "diffusers", "timm", "accelerate", "triton", "numpy", "PIL", "av")
REPORT = f"import sys; print(*[name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
HELP = f"""
import atexit, sys
sys.argv = ["mmspec", "--help"]
atexit.register(lambda: exec({REPORT!r}))
from mmspec.cli import main
main()
"""


@pytest.mark.parametrize("source", [f"import mmspec; dir(mmspec); mmspec.InputError; {REPORT}", HELP])
def test_no_heavy_library_is_imported(source):
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.split() == []


def test_an_unknown_name_is_an_attribute_error():
    import mmspec

    with pytest.raises(AttributeError, match="has no attribute 'pipelien'"):
        mmspec.pipelien  # noqa: B018
    assert not hasattr(mmspec, "trainer")


def test_every_public_name_resolves():
    import mmspec

    for name in mmspec.__all__:
        assert getattr(mmspec, name) is not None
