"""Plain decoding: a drafter for the speculative loop that proposes no tokens.

Targets without next-token prediction have their own plain decoding (`Target.plain_decoding`).
"""

from __future__ import annotations

from collections.abc import Sequence

from mmspec.core.canvas import Canvas
from mmspec.core.distributions import Distribution
from mmspec.core.draft import Draft, DraftKind, Tree
from mmspec.core.interfaces import AnyTarget, Drafter, DraftSession, PromptOutput, Request
from mmspec.core.random_stream import RandomStream
from mmspec.core.rows import named
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError

__all__ = ["NoDrafter"]


class NoDrafter(Drafter, DraftSession):
    """Drafter that proposes the root alone, which makes the loop plain decoding."""

    kind = DraftKind.POINT
    max_nodes = 1
    distribution = Distribution
    is_plain = True
    runs_ahead = True
    rows_move = True
    row_fields = named()

    def check(self, target: AnyTarget) -> None:
        if target.vector_size and target.any_order:
            rule = "must be 'masked' for MAR, which decides its cells in its own order"
            raise InputError("accelerator", "none", rule)

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: Sampler, random: RandomStream
    ) -> DraftSession:
        return self

    def propose(self, canvas: Canvas) -> Draft:
        return Tree.chain(canvas.root[:, None], self.kind)
