"""Training of networks that predict from a block's confidences which places are final, or come next.

For the filter of Learn2PD (2509.25188), plain decoding first gives the final outputs. Then an oracle decodes
them again, and decides in each forward pass every place whose token is already the final one. The filter
learns from these forward passes. A head for the order (after SPOT, 2610.22543) learns from plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, pad
from tqdm.auto import tqdm

from mmspec.accelerator import Accelerator
from mmspec.core.draft import Block
from mmspec.core.verdict import Fill
from mmspec.errors import InputError
from mmspec.families.masked_language.unmasking import UnmaskingDrafter
from mmspec.places.policies import PlaceRule, Places
from mmspec.registry import did_you_mean
from mmspec.training.record import write_record
from mmspec_extras.methods.learned.filter import CommitFilter, CommitFilterConfig

__all__ = ["Orders", "Replay", "replay", "train_filter", "watch"]

RATE = 3e-3
HELD_OUT = 10  # every tenth example, since files are often sorted by task


@dataclass(frozen=True)
class Replay:
    """Forward passes of the oracle over one example.

    Attributes:
        confidence: [n, W] confidences of a block's places; 1 where a place is decided or does not exist.
        right: [n, W] whether the token chosen there is the final one.
        counted: [n, W] whether the place is open and part of the output.
    """

    confidence: Tensor
    right: Tensor
    counted: Tensor

    def loss(self, logits: Tensor) -> Tensor:
        """Return the cross-entropy of `right` under logits [n, W], in nats per counted place."""
        nats = binary_cross_entropy_with_logits(logits, self.right.float(), reduction="none")
        return (nats * self.counted).sum() / self.counted.sum()

    def measure(self, logits: Tensor, threshold: float) -> dict[str, float]:
        """Return the share of wrong places among those above a threshold, and of right ones above it."""
        passes = (logits.sigmoid() > threshold) & self.counted
        wrong = (passes & ~self.right).sum() / passes.sum().clamp_min(1)
        found = (passes & self.right).sum() / (self.right & self.counted).sum().clamp_min(1)
        return {"false_positives": round(wrong.item(), 4), "found": round(found.item(), 4)}


@dataclass(frozen=True)
class Orders:
    """Forward passes of plain decoding over one example.

    Attributes:
        confidence: see `Replay`.
        rank: [n, W] number of forward passes until each place is decided; -1 where it is not open, or is
            never decided.
    """

    confidence: Tensor
    rank: Tensor

    def loss(self, logits: Tensor) -> Tensor:
        """Return the nats per place of the order of decisions (Plackett-Luce), under logits [n, W]."""
        total, places = logits.new_zeros(()), 0
        for step in range(int(self.rank.amax()) + 1):
            now = self.rank == step
            left = logits.masked_fill(self.rank < step, float("-inf"))
            rows = now.any(-1)
            nats = left.logsumexp(-1) - logits.where(now, 0.0).sum(-1)
            total, places = total + nats[rows].sum(), places + int(rows.sum())
        return total / max(1, places)

    def measure(self, logits: Tensor, threshold: float) -> dict[str, float]:
        """Return the share of forward passes whose next place is predicted, and the same by confidence."""
        is_open = self.rank >= 0
        rows = (self.rank == 0).any(-1)
        found = {}
        for name, by in (("next", logits), ("by_confidence", self.confidence)):
            first = by.masked_fill(~is_open, float("-inf")).argmax(-1, keepdim=True)
            found[name] = round((self.rank.gather(-1, first)[rows] == 0).float().mean().item(), 4)
        return found


@dataclass(frozen=True)
class Watch(PlaceRule):
    """Decides the surest place, and records it.

    Attributes:
        seen: for every forward pass, the confidences, the output indices of all places, and that of the
            decided one.
    """

    seen: list[tuple[Tensor, Tensor, int]] = field(default_factory=list, compare=False)

    def choose(self, places: Places) -> Tensor:
        return torch.zeros_like(places.is_open)

    def fill(self, draft: Block, places: Places, finite: Tensor) -> Fill:
        made = super().fill(draft, places, finite)
        confidence = torch.where(places.is_open & places.exists, places.confidence, 1.0)
        self.seen.append((confidence[0], draft.starts[0], int(draft.starts[0][made.decided[0]][0])))
        return made


def watch(pipe: Any, call: dict[str, Any], drafter: UnmaskingDrafter, block_length: int) -> Orders:
    """Decode a prompt plainly, and return the order of its decisions; for arguments, see `replay`."""
    rule = Watch()
    pipe.set_accelerator(Accelerator("watch", drafter, rule))
    pipe(**call)
    when = {place: step for step, (_, _, place) in enumerate(rule.seen)}
    confidences, ranks = [], []
    for step, (confidence, places, _) in enumerate(rule.seen):
        later = [when.get(place, -1) - step for place in places.tolist()]
        short = block_length - len(later)
        confidences.append(pad(confidence, (0, short), value=1.0))
        ranks.append(torch.tensor([max(each, -1) for each in later] + [-1] * short))
    return Orders(torch.stack(confidences), torch.stack(ranks))


@dataclass(frozen=True)
class Oracle(PlaceRule):
    """Decides every place whose token is already the final one, and the surest place with its final token.

    Attributes:
        final: [N] output of one row.
        seen: for every forward pass, the confidences, and whether each place is right and is counted.
    """

    final: Any = field(default=None, compare=False)
    seen: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list, compare=False)

    def choose(self, places: Places) -> Tensor:
        return places.token == self.goal(places)

    def goal(self, places: Places) -> Tensor:
        """[1, n] final tokens; -1 after the end of the output."""
        place = places.begin[:, None] + torch.arange(places.token.shape[1], device=places.token.device)
        whole = pad(self.final, (0, int(place.amax()) + 1), value=-1)
        return whole[place]

    def fill(self, draft: Block, places: Places, finite: Tensor) -> Fill:
        goal, chosen = self.goal(places), self.chosen(places)
        confidence = torch.where(places.is_open & places.exists, places.confidence, 1.0)
        self.seen.append((confidence, places.token == goal, places.is_open & (goal >= 0)))
        values = torch.where(goal >= 0, goal, places.token)
        nothing = torch.zeros_like(chosen)
        return Fill.of(draft.starts, values, chosen, nothing, nothing.any(-1))


def replay(pipe: Any, call: dict[str, Any], drafter: UnmaskingDrafter, block_length: int) -> Replay:
    """Decode a prompt plainly, then with the oracle, and return the oracle's forward passes; one row.

    Args:
        pipe: pipeline of a masked model.
        call: keywords of its calls.
        drafter: drafter of the blocks to learn.
        block_length: number W of places per block.
    """
    pipe.set_accelerator("none")
    final = torch.tensor(pipe(**call).tokens[0], device=pipe.target.device)
    oracle = Oracle(final=final)
    pipe.set_accelerator(Accelerator("oracle", drafter, oracle))
    pipe(**call)
    values = (1.0, False, False)
    parts = zip(zip(*oracle.seen, strict=True), values, strict=True)
    padded = [
        torch.cat([pad(each, (0, block_length - each.shape[1]), value=value) for each in rounds])
        for rounds, value in parts
    ]
    return Replay(*padded)


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
    if learn not in LEARNT:
        raise InputError("learn", learn, did_you_mean(learn, LEARNT))
    drafter = UnmaskingDrafter(block_length).fit(pipe.target)
    size = drafter.block_length
    if size is None:
        raise InputError("block_length", None, "must be set: the model has no blocks of its own")
    if len(calls) < 2:
        raise InputError("samples", len(calls), "must be at least 2, because some are held out")
    before = pipe.accelerator
    try:
        asked = tqdm(calls, desc="replays", unit="prompt")
        replays = [LEARNT[learn](pipe, call, UnmaskingDrafter(block_length), size) for call in asked]
    finally:
        pipe.set_accelerator(before)
    unseen = gathered(replays[::HELD_OUT])
    seen = gathered([one for index, one in enumerate(replays) if index % HELD_OUT])
    torch.manual_seed(0)
    filter = CommitFilter(CommitFilterConfig(block_length=size, log_odds=True))
    optimizer = torch.optim.AdamW(filter.parameters(), lr=RATE)
    with torch.enable_grad():
        for _ in tqdm(range(epochs), desc="filter", unit="step"):
            loss = seen.loss(filter(seen.confidence))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        measured = unseen.measure(filter(unseen.confidence), threshold)
    measured = {"forwards": len(seen.confidence), **measured}
    filter.save_pretrained(out)
    write_record(Path(out), {**(record or {}), "learn": learn, "threshold": threshold, **measured})
    return Path(out)


def gathered(replays: Sequence[Any]) -> Any:
    """Concatenate the forward passes of several examples."""
    kind = type(replays[0])
    return kind(*(torch.cat([getattr(one, each.name) for one in replays]).cpu() for each in fields(kind)))


#: Functions (pipeline, call, drafter, block length) -> training example, by the name of the task.
LEARNT: dict[str, Callable[..., Replay | Orders]] = {"right": replay, "order": watch}
