"""Speculative Jacobi decoding (2410.01699): a window of tokens from the target's own earlier forwards."""

from __future__ import annotations

from collections.abc import Sequence

from mmspec.drafters.jacobi_session import JacobiSession, WindowDrafter
from mmspec.errors import InputError
from mmspec.validation import require_number

__all__ = ["JacobiDrafter"]


class JacobiDrafter(WindowDrafter):
    """Drafts a window of tokens from the target's own earlier forwards.

    Args:
        window, coupling, init: as of `WindowDrafter`.
        reuse: probability from which on a place's old draft stays as it is, as in SJD++ (2512.07503), in
            place of the coupling; the outputs are then no longer distributed as the target's. None for never.
        front, reach: as of `WindowDrafter`; `front="4x4x4"` with `reach=3` is the published tree of SJD-PAC,
            and 3x3x3 the default of its code.

    Between rounds a session keeps two distributions for each place of the window: 4 MB a row at a window of
    32 and 16,384 codes in float32, or 0.5 MB as pairs under a top-k of 1000.

    Raises:
        InputError: a value outside its range.
    """

    session = JacobiSession

    def __init__(
        self,
        window: int = 32,
        coupling: str = "maximal",
        init: str = "edge",
        front: str | Sequence[int] = (),
        reach: int | None = None,
        reuse: float | None = None,
    ) -> None:
        super().__init__(window, coupling, init, front, reach)
        if reuse is not None:
            require_number("reuse", reuse, 0.0, 1.0, "a probability above 0, or None", open_below=True)
            if coupling == "exact":
                raise InputError("reuse", reuse, "None: with coupling=exact every token is the target's own")
            self.exactness = "approximate"
        self.reuse = reuse
