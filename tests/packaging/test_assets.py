"""The reference models come with every clone, so they are kept small."""

import pytest

from tests.packaging.source_tree import ROOT, committed_files

LIMIT = 48.0  # MB; a machine with a GPU takes 64 with everything else

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="counts what is committed")


def test_the_assets_stay_below_their_limit():
    sizes = {name: (ROOT / name).lstat().st_size / 1e6 for name in committed_files(ROOT / "assets")}
    total, largest = sum(sizes.values()), sorted(sizes, key=sizes.__getitem__)[-5:]
    assert 0 < total < LIMIT, f"{total:.1f} MB, {LIMIT} are allowed; the largest: {', '.join(largest)}"
