"""Windows of Jacobi drafts, with and without a head: images are those of plain decoding, rows independent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mmspec.core.sampling import Sampler
from mmspec.methods.cjd.drafter import CorrectedDrafter
from mmspec.trees.jacobi import JacobiDrafter
from mmspec.trees.jacobi_session import WindowDrafter
from mmspec.trees.window import KIND_OF_COUPLING
from tests.methods import corrected_checks
from tests.trees.jacobi_checks import GRID, SAMPLER, draw, images, plain


def cjd(window: int, coupling: str = "maximal", **tree: Any) -> WindowDrafter:
    corrected = max(len(tree.get("front", ())), window - 3 if "reach" not in tree else 2, 1)
    head = corrected_checks.head_for(images(), strength=0.3)
    return CorrectedDrafter(head, window, min(corrected, window - 1), coupling, passes=2, **tree).fit(
        images()
    )


WINDOWS: dict[str, Callable[..., WindowDrafter]] = {"sjd": JacobiDrafter, "cjd": cjd}
TREES: list[dict[str, Any]] = [{}, {"front": (3, 2)}, {"front": (2, 2), "reach": 4}]


@pytest.mark.parametrize("window", [2, 7])
@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.every(3)
def test_the_targets_own_noise_gives_the_images_of_plain_decoding(kind: str, window: int) -> None:
    """Bitwise, with row ends, in batches of one and of three, guided or not; in no more forwards."""
    sampler = Sampler(0.9, guidance_scale=2.0) if window == 7 else SAMPLER
    for tree in TREES if window > 4 else TREES[:1]:
        made = WINDOWS[kind](window, "exact", **tree)
        outputs, stats, _ = draw(made, sampler=sampler)
        assert outputs == plain(sampler), tree
        assert all(-(-GRID.length // window) <= count + 1 <= GRID.length for count in stats.rounds)
        assert draw(made, [window % 3], sampler=sampler)[0] == [plain(sampler)[window % 3]]


@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.every(3)
def test_greedy_images_are_those_of_plain_decoding(kind: str) -> None:
    for coupling, tree in zip(KIND_OF_COUPLING, [*TREES, {}], strict=True):
        assert draw(WINDOWS[kind](8, coupling, **tree), sampler=Sampler())[0] == plain(Sampler()), tree


@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.every(3)
def test_a_row_of_a_batch_is_drawn_as_it_is_alone(kind: str) -> None:
    for tree in TREES[::2]:
        made = WINDOWS[kind](7, **tree)
        assert [draw(made, [row])[0][0] for row in (2, 1)] == draw(made, [2, 1])[0], tree
