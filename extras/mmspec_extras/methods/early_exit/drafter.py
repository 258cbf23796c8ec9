"""Self-speculation by early exit: the first layers of the target draft, and all its layers verify.

As in LayerSkip (2404.16710), a draft token leaves the target after E layers, through its final norm and LM
head. The drafting forward passes read the target's cache, and write keys and values of the first E layers
after the committed ones. The verifying forward pass writes the same slots again; nothing else is kept. The
exit layer and the draft length are chosen as in DEL (2504.05598).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft, DraftKind, Tree
from mmspec.core.interfaces import DraftSession, Target
from mmspec.core.rows import named
from mmspec.core.session import PromptBatch, SessionDrafter
from mmspec.errors import InputError
from mmspec.targets.causal import CausalState, CausalTarget
from mmspec.trees.growth import StaticTree, TreeGrowth
from mmspec.trees.pacing import DEFAULT_PACING, half_lengths
from mmspec.trees.siblings import SiblingDraws
from mmspec.validation import check_draft_tokens, is_integer
from mmspec_extras.methods.early_exit.exits import count_layers, first_layers, head_cost

AUTO = "auto"
PARTS = 8  # of the stack of layers; the exits to choose among lie between them


def best_exit(rates: Mapping[int, float], most: int, layers: int, head: float) -> tuple[int, int]:
    """Return the exit and the draft length with the most expected tokens per layer (TPL of DEL, 2504.05598).

    Args:
        rates: by exit, the probability that a draft token is accepted if those before it are.
        most: largest draft length.
        layers: number of layers of the target.
        head: cost of the LM head in layers; every forward pass runs the LM head.

    Returns:
        The exit and the length; the length is 0 if no draft is better than plain rounds.
    """

    def tokens_per_layer(choice: tuple[int, int]) -> float:
        exit, length = choice
        tokens = sum(rates[exit] ** drafted for drafted in range(length + 1))
        return tokens / (length * (exit + head) + layers + head)

    choices = [(exit, length) for length in range(most + 1) for exit in rates]  # max keeps the shortest
    return max(choices, key=tokens_per_layer)


class ExitRates:
    """Acceptance rates of a target's exits in recent rounds, and the choice of the next draft.

    Rates begin as Beta(1, 1). The counts of an exit decay in each round that it drafts (omega of DEL,
    2504.05598). Each exit first drafts one token in each of `trials` rounds. After that, the exit with the
    fewest such rounds drafts one token in every `revisit_rounds`-th round.

    Args:
        exits: numbers of layers to choose among.
        layers, head: see `best_exit`.
    """

    config = DEFAULT_PACING

    def __init__(self, exits: Sequence[int], layers: int, head: float) -> None:
        self.exits, self.layers, self.head = exits, layers, head
        self._right, self._wrong = dict.fromkeys(exits, 0.0), dict.fromkeys(exits, 0.0)
        self._trials = dict.fromkeys(exits, 0)
        self._rounds = 0

    def __getitem__(self, exit: int) -> float:
        """Expected acceptance rate of an exit."""
        return (1 + self._right[exit]) / (2 + self._right[exit] + self._wrong[exit])

    def choose(self, most: int) -> tuple[int, int]:
        """Return the exit and the length of the next draft, at most `most`; length 0 is no draft."""
        self._rounds += 1
        least = min(self.exits, key=self._trials.__getitem__)
        if self._trials[least] < self.config.trials or self._rounds % self.config.revisit_rounds == 0:
            self._trials[least] += 1
            return least, 1
        return best_exit({exit: self[exit] for exit in self.exits}, most, self.layers, self.head)

    def record(self, exit: int, right: int, wrong: int) -> None:
        """Record how many draft tokens of a round were accepted, and how many rows rejected one."""
        self._right[exit] = self.config.decay * self._right[exit] + right
        self._wrong[exit] = self.config.decay * self._wrong[exit] + wrong


class EarlyExitSession(DraftSession):
    """Drafts of a batch.

    Attributes:
        state: state of the target.
        exit, length: number of layers that draft, and largest length of a chain.
        drafted: length of the last chain.
        lengths: lengths of the outputs before that chain.
    """

    row_fields = named("sampler", "random")
    scratch = DraftSession.scratch | {"drafted", "lengths"}  # read by the host alone

    state: CausalState

    def __init__(self, drafter: EarlyExitDrafter, batch: PromptBatch) -> None:
        self.drafter, self.sampler, self.random = drafter, batch.sampler, batch.random
        self.exit, self.length = drafter.exits[0], drafter.num_draft_tokens
        self.drafted, self.lengths = 0, list[int]()

    def attach(self, state: Any) -> None:
        self.state = state

    def rows_changed(self) -> None:
        self.drafted = 0  # the drafts of new rows are unknown here

    def resize(self, choice: int) -> None:
        self.length = self.drafter.sizes[choice]

    def propose(self, canvas: Canvas) -> Draft:
        if self.drafter.rates is not None:
            self._choose(canvas, self.drafter.rates)
        self.drafted = 0
        if not self.length:
            return Tree.chain(canvas.root[:, None], DraftKind.COUPLED)
        noise = self.sampler, self.random, canvas.emitted
        draws = SiblingDraws(DraftKind.COUPLED, *noise, self.drafter.uncompiled.vocabulary)
        growth = TreeGrowth(chain_of(self.length, self.drafter.stop_below), canvas.root, draws)
        tokens = canvas.root[:, None]
        while True:
            growth.grow(self.sampler.warp(self.read(tokens)).log_softmax(-1))
            if growth.is_grown:
                self.drafted = growth.level
                return growth.draft()[0]
            tokens = torch.cat([tokens, growth.tokens], 1)

    def _choose(self, canvas: Canvas, rates: ExitRates) -> None:
        """Record the last round, which the host has read, and choose the next exit and length."""
        if self.drafted:
            rows = zip(canvas.output_lengths, self.lengths, canvas.finish_reasons, strict=True)
            accepted = [now - before - 1 for now, before, ended in rows if ended is None]
            rates.record(self.exit, sum(accepted), sum(count < self.drafted for count in accepted))
        self.exit, self.length = rates.choose(self.drafter.num_draft_tokens)
        self.lengths = list(canvas.output_lengths)

    def read(self, tokens: Tensor) -> Tensor:
        """Return guided logits [B, 1, V] after chains [B, n], whose other tokens were read before."""
        return self.score(self.exit, tokens)

    def score(self, exit: int, tokens: Tensor, count: int = 1) -> Tensor:
        """Run the first layers on the last tokens of chains [B, n]; return guided logits [B, 1, V].

        Args:
            exit: number of layers.
            tokens: the chains.
            count: number of last tokens that these layers have not read.
        """
        self.passes += 1
        target, chain = self.drafter.uncompiled, Tree.chain(tokens, DraftKind.COUPLED).nodes
        last, visible = tokens[:, -count:], chain.visible[:, -count:]
        # slots after the committed tokens, whose length stays: verification writes all these slots again
        node = replace(chain, tokens=last, slots=chain.slots[:, -count:], visible=visible)
        copies = self.state.cache.rows // len(tokens)
        with self.layers(exit):
            logits = target.score_nodes(self.state, node.repeat_rows(copies)).logits
        guided: Tensor = self.sampler.guided(logits[:, -1:])
        return guided

    def layers(self, exit: int) -> AbstractContextManager[None]:
        """Return a context in which the target runs the layers of an exit alone."""
        return first_layers(self.drafter.uncompiled.model, exit)


class EarlyExitDrafter(SessionDrafter):
    """Drafts a chain with the first layers of the target, its final norm and LM head (LayerSkip, 2404.16710).

    Tokens are drawn with the target's own noise, so that the output is bitwise that of plain sampling.

    Args:
        layers: number E of layers that draft. "auto" chooses among seven exits, and the draft length, by the
            most expected tokens per layer (DEL, 2504.05598), and drafts nothing if no exit is faster.
        num_draft_tokens: length of the chain; its largest length with "auto".

    Raises:
        InputError: a value is out of range.

    Attributes:
        exits: numbers of layers that may draft.
        uncompiled: a copy of the target whose forward passes are not compiled.
        rates: acceptance rates of the exits, over all batches; None if `layers` is a number.
    """

    kind = DraftKind.COUPLED
    rows_move = True
    session: Callable[[Any, PromptBatch], EarlyExitSession] = EarlyExitSession
    exits: tuple[int, ...]
    uncompiled: CausalTarget
    rates: ExitRates | None = None
    stop_below = 0.0

    def __init__(self, layers: int | str = AUTO, num_draft_tokens: int = 6) -> None:
        if layers != AUTO and (isinstance(layers, str) or not is_integer(layers) or layers < 1):
            raise InputError("layers", layers, "must be 'auto' or a positive integer")
        self.layers, self.num_draft_tokens = layers, check_draft_tokens(num_draft_tokens)
        self.max_nodes = num_draft_tokens + 1
        self.runs_ahead = layers != AUTO  # "auto" needs the result of the last round on the host

    @property
    def sizes(self) -> tuple[int, ...]:
        return () if self.layers == AUTO else half_lengths(self.num_draft_tokens)

    def stopping_below(self, probability: float) -> EarlyExitDrafter:
        cautious = copy.copy(self)
        cautious.stop_below = probability
        return cautious

    def exits_of(self, most: int) -> tuple[int, ...]:
        """Return the numbers of layers that may draft, of a target with `most` layers."""
        if isinstance(self.layers, str):
            return tuple(sorted({max(1, most * part // PARTS) for part in range(1, PARTS)}))
        if self.layers > most:
            rule = f"must be 'auto' or between 1 and {most}, the layers of this model"
            raise InputError("layers", self.layers, rule)
        return (self.layers,)

    def fit(self, target: Target[Any]) -> Self:
        if not isinstance(target, CausalTarget) or not (most := count_layers(target.model)):
            rule = "must have a causal decoder of tokens, without recurrent layers, to draft with some layers"
            raise InputError("model", type(target).__name__, rule)
        fitted = copy.copy(self)
        fitted.exits, fitted.uncompiled = self.exits_of(most), copy.copy(target)
        fitted.uncompiled.steps = None
        if self.layers == AUTO:
            fitted.rates = ExitRates(fitted.exits, most, head_cost(target.model))
        return fitted


@functools.cache
def chain_of(length: int, stop_below: float) -> StaticTree:
    """Return a chain of `length` candidates; it ends early if the likeliest one is below `stop_below`."""
    return StaticTree([0, *range(length)]).stopping_below(stop_below)
