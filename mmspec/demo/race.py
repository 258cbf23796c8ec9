"""Race of accelerators over one prompt, in turns on one machine, each by a clock of its own."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mmspec.pipelines.text_stream import TextDeltas

if TYPE_CHECKING:
    from mmspec.pipelines import TextOutput

__all__ = ["Lane", "race"]


@dataclass(eq=False)
class Lane:
    """One accelerator at work.

    Attributes:
        name: of the accelerator.
        rounds: the outputs so far, one after every round, as `VisionLanguagePipeline.watch` yields them.
        tokenizer: of the model.
        output: the newest of them.
        pieces: the text that each token of it completed.
        finished: whether it was the last one.
    """

    name: str
    rounds: Generator[TextOutput, None, None]
    tokenizer: Any
    output: TextOutput | None = None
    pieces: list[str] = field(default_factory=list)
    finished: bool = False

    def __post_init__(self) -> None:
        self._deltas = TextDeltas(self.tokenizer)

    @property
    def seconds(self) -> float:
        """Time of this lane's own work."""
        return 0.0 if self.output is None else self.output.stats.seconds

    def advance(self) -> None:
        """Decode one round."""
        output = next(self.rounds, None)
        if output is None:
            self.finished = True
            if self.pieces:
                self.pieces[-1] += self._deltas.finish()
            return
        self.output = output
        self.pieces += [self._deltas.add([token]) for token in output.tokens[0][len(self.pieces) :]]


def race(lanes: Sequence[Lane]) -> Generator[Lane, None, None]:
    """Advance lanes to their ends, always the one whose clock is furthest behind; yield it.

    So what all of them show at any moment is what each would show after the same time alone. Closing the
    iterator ends the work of all.
    """
    with ExitStack() as stack:
        for lane in lanes:
            stack.enter_context(closing(lane.rounds))
        while running := [lane for lane in lanes if not lane.finished]:
            behind = min(running, key=lambda lane: lane.seconds)
            behind.advance()
            yield behind
