"""Base of drafters that wrap another one, which rests in some rounds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.distributions import Categorical, Scores
from mmspec.core.draft import Draft, Tree
from mmspec.core.interfaces import Drafter, DraftSession, Request, TargetOutput
from mmspec.core.rows import named
from mmspec.core.session import PromptBatch, SessionDrafter
from mmspec.core.verdict import Path

__all__ = ["RestingDrafter", "RestingSession"]

INHERITED = ("kind", "max_nodes", "branches", "exactness", "keeps", "rows_move", "draws_anew", "taps")


class RestingSession(DraftSession):
    """Wraps another drafter's session.

    Attributes:
        inner: the wrapped session.
    """

    row_fields = named("inner")

    def __init__(self, drafter: RestingDrafter, batch: PromptBatch) -> None:
        self.drafter: Any = drafter
        self.inner = drafter.inner.start(batch.requests, batch.prefill, batch.sampler, batch.random)
        logits = batch.prefill.logits
        self._nothing = logits.new_zeros(1, 0, logits.shape[-1])

    def prepare(self) -> None:
        self.inner.prepare()

    def tighten(self, emitted: Sequence[int]) -> None:
        self.inner.tighten(emitted)

    def attach(self, state: Any) -> None:
        self.inner.attach(state)

    @abstractmethod
    def resting(self) -> Tensor:
        """[B] whether nothing is drafted for a row in this round."""

    def propose(self, canvas: Canvas) -> Draft:
        rows = zip(self.resting().tolist(), canvas.finish_reasons, strict=True)
        rests = [row for row, (rest, ended) in enumerate(rows) if rest or ended is not None]
        if len(rests) == len(canvas.finish_reasons):
            kind = self.drafter.kind
            no_q = Categorical(self._nothing.expand(len(rests), -1, -1)) if kind.is_drawn else None
            return Tree.chain(canvas.root[:, None], kind, no_q)
        draft = self.inner.propose(canvas)
        self.passes = self.inner.passes
        return draft.roots_alone(rests) if rests else draft

    def observe(self, draft: Tree, output: TargetOutput, scores: Scores, verdict: Path) -> None:
        self.inner.observe(draft, output, scores, verdict)


class RestingDrafter(SessionDrafter):
    """Wraps a drafter.

    Args:
        inner: the wrapped drafter.
    """

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        for name in INHERITED:
            setattr(self, name, getattr(inner, name))

    @property
    def modules(self) -> Sequence[nn.Module]:
        return self.inner.modules

    def admit(self, requests: Sequence[Request], sampler: Any, stopping: Stopping) -> None:
        self.inner.admit(requests, sampler, stopping)

    def to(self, *args: object, **kwargs: object) -> None:
        self.inner.to(*args, **kwargs)

    def compile(self) -> None:
        self.inner.compile()

    @property
    def reader(self) -> Any:
        return self.inner.reader
