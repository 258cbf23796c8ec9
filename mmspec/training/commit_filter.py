"""Training of the filter of Learn2PD (2509.25188): which places of a block are right already, by confidences.

Outputs of plain decoding are known first. Then they are decoded again by an oracle that decides, in each
forward, every place whose token is already the final one; what it saw and decided is what a filter learns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, pad
from tqdm.auto import tqdm

from mmspec.accelerators.accelerator import Accelerator
from mmspec.acceptance.places import PlaceRule, Places
from mmspec.decoding.draft import Block
from mmspec.decoding.verdict import Fill
from mmspec.drafters.masked_blocks import UnmaskingDrafter
from mmspec.errors import InputError
from mmspec.models.commit_filter import CommitFilter, CommitFilterConfig
from mmspec.training.record import write_record

__all__ = ["Replay", "replay", "train_filter"]

RATE = 3e-3
HELD_OUT = 10  # one example of so many


@dataclass(frozen=True)
class Replay:
    """Forwards of the oracle over one example.

    Attributes:
        confidence: [n, W] of the places of a block; 1 where one is decided, or does not exist.
        right: [n, W] whether the token chosen there is the final one.
        counted: [n, W] which places are open, and are part of the output.
    """

    confidence: Tensor
    right: Tensor
    counted: Tensor


@dataclass(frozen=True)
class Oracle(PlaceRule):
    """Decide every place whose token is the final one already, and the surest with its final one.

    Attributes:
        final: [N] the output, for one row.
        seen: confidences, which are right, and which count, of every forward.
    """

    final: Any = field(default=None, compare=False)
    seen: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list, compare=False)

    def choose(self, places: Places) -> Tensor:
        return places.token == self.goal(places)

    def goal(self, places: Places) -> Tensor:
        """[1, n] final tokens; -1 behind the end of the output."""
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
    """Decode a prompt plainly, then by the oracle; one row.

    Args:
        pipe: a pipeline of a masked model.
        call: keywords of its calls.
        drafter: of the blocks that are learnt.
        block_length: W.
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
    record: dict[str, Any] | None = None,
) -> Path:
    """Train a filter for the target of a pipeline, and save it as the folder that `learned:filter=` takes.

    Args:
        pipe: of a masked model.
        calls: keywords of calls, of one prompt each; a tenth is held out.
        out: the folder to write.
        block_length: places of a block; None is the model's own.
        epochs: steps of AdamW, each on all that was seen.
        threshold: by which the share of wrong places among those let through is measured.
        record: entries of the folder's `training.json`.

    Returns:
        The folder.

    Raises:
        InputError: too few prompts, or a model without masked blocks.
    """
    drafter = UnmaskingDrafter(block_length).fit(pipe.target)
    size = drafter.block_length
    if size is None:
        raise InputError("block_length", None, "places of a block: the model has no blocks of its own")
    if len(calls) < 2:
        raise InputError("samples", len(calls), "2 or more, of which a tenth is held out")
    before = pipe.accelerator
    try:
        asked = tqdm(calls, desc="replays", unit="prompt")
        replays = [replay(pipe, call, UnmaskingDrafter(block_length), size) for call in asked]
    finally:
        pipe.set_accelerator(before)
    held = max(1, len(replays) // HELD_OUT)
    seen, unseen = gathered(replays[held:]), gathered(replays[:held])
    torch.manual_seed(0)
    filter = CommitFilter(CommitFilterConfig(block_length=size))
    optimizer = torch.optim.AdamW(filter.parameters(), lr=RATE)
    with torch.enable_grad():
        for _ in tqdm(range(epochs), desc="filter", unit="step"):
            nats = binary_cross_entropy_with_logits(
                filter(seen.confidence), seen.right.float(), reduction="none"
            )
            loss = (nats * seen.counted).sum() / seen.counted.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        passes = (filter(unseen.confidence).sigmoid() > threshold) & unseen.counted
    measured = {
        "forwards": len(seen.confidence),
        "false_positives": round(((passes & ~unseen.right).sum() / passes.sum().clamp_min(1)).item(), 4),
        "found": round(((passes & unseen.right).sum() / (unseen.right & unseen.counted).sum()).item(), 4),
    }
    filter.save_pretrained(out)
    write_record(Path(out), {**(record or {}), "threshold": threshold, **measured})
    return Path(out)


def gathered(replays: Sequence[Replay]) -> Replay:
    """All forwards of several examples."""
    parts = ([getattr(one, name) for one in replays] for name in ("confidence", "right", "counted"))
    return Replay(*(torch.cat(each).cpu() for each in parts))
