"""Training of networks that predict from a block's confidences which places are final, or come next.

For the filter of Learn2PD (2509.25188), plain decoding first gives the final outputs. Then an oracle decodes
them again, and decides in each forward pass every place whose token is already the final one. The filter
learns from these forward passes. A head for the order (after SPOT, 2610.22543) learns from plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, pad
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

from mmspec.accelerator import Accelerator
from mmspec.core.draft import Block
from mmspec.core.verdict import Fill
from mmspec.errors import InputError
from mmspec.families.masked_language.unmasking import UnmaskingDrafter
from mmspec.places.policies import PlaceRule, Places
from mmspec.registry import require_known
from mmspec.training.record import write_record
from mmspec_extras.methods.learned.filter import CommitFilter, CommitFilterConfig

RATE = 3e-3
LEARNT = ("right", "order")
Pass = tuple[Tensor, Tensor, Tensor]
"""The parts of a `Replay` for one forward pass, [1, n]."""
HELD_OUT = 10  # every tenth example, since files are often sorted by task


@dataclass(frozen=True)
class Replay:
    """Forward passes over some examples.

    Attributes:
        confidence: [n, W] confidences of a block's places; 1 where a place is decided or does not exist.
        right: [n, W] whether the token chosen there is the final one; or, for the order of places, whether
            plain decoding decides the place next.
        counted: [n, W] whether the place is open and part of the output.
    """

    confidence: Tensor
    right: Tensor
    counted: Tensor

    @classmethod
    def of(cls, passes: Sequence[Pass]) -> Replay:
        """Join forward passes on the CPU; places that shorter blocks lack do not count."""
        parts = zip(zip(*passes, strict=True), (1.0, False, False), strict=True)
        return cls(*(pad_sequence([each[0] for each in part], True, value).cpu() for part, value in parts))

    def loss(self, logits: Tensor, learn: str) -> Tensor:
        """Return the cross-entropy of `right` under logits [n, W], in nats per place, or per next place."""
        if learn == "order":
            left = logits.masked_fill(~self.counted, -torch.inf)
            return (left.logsumexp(-1) - logits.where(self.right, 0.0).sum(-1)).mean()
        nats = binary_cross_entropy_with_logits(logits, self.right.float(), reduction="none")
        return (nats * self.counted).sum() / self.counted.sum()

    def measure(self, logits: Tensor, learn: str, threshold: float) -> dict[str, float]:
        """Return the share of wrong places among those above a threshold, and of right ones above it.

        For the order of places: how often the next one has the largest logit, or the largest confidence.
        """
        if learn == "order":
            found = {}
            for name, by in (("next", logits), ("by_confidence", self.confidence)):
                first = by.masked_fill(~self.counted, -torch.inf).argmax(-1, keepdim=True)
                found[name] = self.right.gather(-1, first).float().mean()
        else:
            passes, right = (logits.sigmoid() > threshold) & self.counted, self.right & self.counted
            found = {"false_positives": (passes & ~right).sum() / passes.sum().clamp_min(1)}
            found["found"] = (passes & right).sum() / right.sum().clamp_min(1)
        return {name: round(share.item(), 4) for name, share in found.items()}


@dataclass(frozen=True)
class Watch(PlaceRule):
    """Decides the surest place of one row, and records the forward passes.

    Attributes:
        seen: for each, the parts of a `Replay`.
    """

    seen: list[Pass] = field(default_factory=list, compare=False)

    def choose(self, places: Places) -> Tensor:
        return torch.zeros_like(places.is_open)

    def fill(self, draft: Block, places: Places, finite: Tensor) -> Fill:
        made = super().fill(draft, places, finite)
        self.record(places, made.decided, places.is_open & places.exists)
        return made

    def record(self, places: Places, right: Tensor, counted: Tensor) -> None:
        confidence = places.confidence.where(places.is_open & places.exists, 1.0)
        self.seen.append((confidence, right, counted))


@dataclass(frozen=True)
class Oracle(Watch):
    """Decides every place whose token is already the final one, and the surest place with its final token.

    Attributes:
        final: [N] output of the row.
    """

    final: Any = field(default=None, compare=False)

    def choose(self, places: Places) -> Tensor:
        return places.token == self.goal(places)

    def goal(self, places: Places) -> Tensor:
        """[1, n] final tokens; -1 after the end of the output."""
        place = places.begin[:, None] + torch.arange(places.token.shape[1], device=places.token.device)
        whole = pad(self.final, (0, int(place.amax()) + 1), value=-1)
        return whole[place]

    def fill(self, draft: Block, places: Places, finite: Tensor) -> Fill:
        goal, chosen = self.goal(places), self.chosen(places)
        self.record(places, places.token == goal, places.is_open & (goal >= 0))
        values = torch.where(goal >= 0, goal, places.token)
        nothing = torch.zeros_like(chosen)
        return Fill.of(draft.starts, values, chosen, nothing, nothing.any(-1))


def replay(pipe: Any, call: dict[str, Any], drafter: UnmaskingDrafter, learn: str) -> list[Pass]:
    """Decode a prompt plainly, then for "right" with the oracle, and return the last forward passes.

    Args:
        pipe: pipeline of a masked model.
        call: keywords of its call, for one row.
        drafter: drafter of the blocks to learn.
        learn: see `train_filter`.
    """
    rule = Watch()
    if learn == "right":
        pipe.set_accelerator("none")
        rule = Oracle(final=torch.tensor(pipe(**call).tokens[0], device=pipe.target.device))
    pipe.set_accelerator(Accelerator("replay", drafter, rule))
    pipe(**call)
    return rule.seen


def train_filter(
    pipe: Any,
    calls: Sequence[dict[str, Any]],
    out: str | Path,
    *,
    block_length: int | None = None,
    epochs: int = 2000,
    threshold: float = 0.96,
    learn: str = "right",
    record: dict[str, Any] | None = None,
) -> Path:
    """Train a filter for the target of a pipeline, and save it as a folder.

    Args:
        pipe: pipeline of a masked model.
        calls: keywords of its calls, one prompt each; every tenth, from the first on, is held out.
        out: the folder to write.
        block_length: number of places per block; None for the model's own.
        epochs: number of AdamW steps, each on all training examples.
        threshold: threshold at which the errors of the filter are measured.
        learn: "right", for `learned:filter=`; or "order", for `spot:head=`.
        record: further entries of the folder's `training.json`.

    Returns:
        The folder.

    Raises:
        InputError: there are too few prompts, the model has no masked blocks, or `learn` is unknown.
    """
    require_known("learn", learn, LEARNT)
    drafter = UnmaskingDrafter(block_length).fit(pipe.target)
    size = drafter.block_length
    if size is None:
        raise InputError("block_length", None, "must be set: the model has no blocks of its own")
    if len(calls) < 2:
        raise InputError("samples", len(calls), "must be at least 2, because some are held out")
    before = pipe.accelerator
    try:
        asked = tqdm(calls, desc="replays", unit="prompt")
        replays = [replay(pipe, call, UnmaskingDrafter(block_length), learn) for call in asked]
    finally:
        pipe.set_accelerator(before)
    unseen = Replay.of([each for one in replays[::HELD_OUT] for each in one])
    seen = Replay.of([each for index, one in enumerate(replays) if index % HELD_OUT for each in one])
    torch.manual_seed(0)
    filter = CommitFilter(CommitFilterConfig(block_length=size))
    optimizer = torch.optim.AdamW(filter.parameters(), lr=RATE)
    with torch.enable_grad():
        for _ in tqdm(range(epochs), desc="filter", unit="step"):
            loss = seen.loss(filter(seen.confidence), learn)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        measured = unseen.measure(filter(unseen.confidence), learn, threshold)
    measured = {"forwards": len(seen.confidence), **measured}
    filter.save_pretrained(out)
    write_record(Path(out), {**(record or {}), "learn": learn, "threshold": threshold, **measured})
    return Path(out)
