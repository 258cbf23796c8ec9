"""Speculative Jacobi decoding (SJD, 2410.01699): the target drafts a window of tokens for itself."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from mmspec.core.interfaces import AnyTarget
from mmspec.core.promise import Level
from mmspec.errors import InputError
from mmspec.trees.jacobi_session import JacobiSession, WindowDrafter
from mmspec.validation import require_number

__all__ = ["JacobiDrafter"]

WINDOW = 32
CPU_WINDOW = 16  # nodes cost time on a CPU: with a few rows, windows of 32 are slower than plain decoding
LEAST_SHARED = 4  # narrower windows are slower than plain decoding


class JacobiDrafter(WindowDrafter):
    """Drafter that takes a window of tokens from the target's earlier forward passes.

    Args:
        window: see `WindowDrafter`; on a GPU 32, on a CPU 16 (32 with `front`, `reach` or `coupling="exact"`)
            if None.
        coupling, init: see `WindowDrafter`.
        reuse: a place keeps its old draft if the target gives it at least this probability, above 0 to 1, and
            is redrawn otherwise, as in SJD++ (2512.07503), which makes the output approximate; never kept if
            None.
        front, reach: see `WindowDrafter`.

    `front="4x4x4"` with `reach=3` is the published tree of SJD-PAC, and 3x3x3 the default of its code.

    With the default window and `coupling="exact"`, the rows of a forward pass on a CPU share 32 nodes: each
    row gets at least 4 of them, or is decoded plainly.

    Between rounds a session stores two distributions for each place of the window: 4 MB a row at a window of
    32 and 16,384 codes in float32, or 0.5 MB as pairs under a top-k of 1000.

    Raises:
        InputError: a value outside its range.
    """

    session = JacobiSession

    def __init__(
        self,
        window: int | None = None,
        coupling: str = "maximal",
        init: str = "edge",
        front: str | Sequence[int] = (),
        reach: int | None = None,
        reuse: float | None = None,
    ) -> None:
        super().__init__(WINDOW if window is None else window, coupling, init, front, reach)
        self.is_chosen, self.shares = window is None and not self.branches and reach is None, False
        if reuse is not None:
            require_number(
                "reuse", reuse, 0.0, 1.0, "must be above 0 and at most 1, or None", open_below=True
            )
            if coupling == "exact":
                rule = "cannot be combined with coupling='exact', whose tokens are the target's own"
                raise InputError("reuse", reuse, rule)
            self.exactness = Level.APPROXIMATE
        self.reuse = reuse

    def fit(self, target: AnyTarget) -> JacobiDrafter:
        fitted = copy.copy(self)
        if self.is_chosen:
            on_cpu, is_exact = target.device.type == "cpu", self.coupling == "exact"
            fitted.shares = on_cpu and is_exact
            fitted.set_window(CPU_WINDOW if on_cpu and not is_exact else WINDOW)
        fitted.check(target)
        return fitted

    def width(self, rows: int) -> int:
        if not self.shares:
            return self.window
        shared = self.window // rows
        return shared if shared >= LEAST_SHARED else 1
