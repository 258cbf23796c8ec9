"""AdaBlock: masked blocks that end at a probable delimiter, such as the end of a line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from mmspec.core.draft import Block
from mmspec.core.verdict import Fill
from mmspec.errors import InputError
from mmspec.places.policies import NOWHERE, PlaceRule, Places
from mmspec.validation import is_integer, is_list, require_number


@dataclass(frozen=True)
class BlockFill(Fill):
    """Places that a round decides, and the length of each row's block.

    Attributes:
        sizes: [B] number of places of the block, from the first lane on.
    """

    sizes: Tensor


@dataclass(frozen=True)
class AdaBlock(PlaceRule):
    """Decides by a threshold, in blocks whose lengths it chooses (AdaBlock-dLLM, 2509.26432).

    The first forward pass of a block chooses its length. The block ends after the surest delimiter among the
    first `window` places if the confidence there is at least `delimiter_threshold`; otherwise it has
    `block_length` places. The rule improves the text, and saves no forward passes.

    Args:
        places_per_step, remask_below, end_cut, fallback: see `PlaceRule`.
        threshold: least probability of a token that is decided.
        delimiters: token ids at which a block may end, such as those of newlines.
        delimiter_threshold: least confidence of a delimiter; published are 0.3 for LLaDA and 0.5 for Dream.
        block_length: number of places of a block without a delimiter.
        window: share of the output that is searched for delimiters.

    Raises:
        InputError: a value is out of range.
    """

    threshold: float = 0.9
    delimiters: Sequence[int] | int = ()
    delimiter_threshold: float = 0.3
    block_length: int = 32
    window: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(not is_integer(each) or each < 0 for each in self.ids):
            raise InputError("delimiters", self.delimiters, "must be token ids")
        if not is_integer(self.block_length) or self.block_length < 1:
            raise InputError("block_length", self.block_length, "must be a positive integer")
        require_number("threshold", self.threshold, 0.0, 2.0, "must be at least 0")
        require_number("delimiter_threshold", self.delimiter_threshold, 0.0, 2.0, "must be at least 0")
        require_number("window", self.window, 0.0, 1.0, "must be a share of the output, between 0 and 1")

    @property
    def ids(self) -> list[int]:
        """Ids of the delimiters."""
        given: Any = self.delimiters
        return list(given) if is_list(given) else [given]

    def lanes(self, length: int, left: int) -> int:
        """Number of places that a block's first forward pass reads, if `left` of `length` places are left."""
        return min(max(int(self.window * length), self.block_length), left)

    def sizes(self, places: Places) -> Tensor:
        """[B] length of each row's block, as chosen before or by this forward pass."""
        index = torch.arange(places.token.shape[1], device=places.token.device)
        is_new = places.decided[:, 0] == 0
        searched = places.exists & (index < int(self.window * places.length))
        ends = (
            torch.isin(places.token, torch.tensor(self.ids, dtype=torch.long, device=index.device)) & searched
        )
        sure = places.confidence.where(ends, NOWHERE)
        best, at = sure.max(-1)
        whole = places.exists.sum(-1)
        cut = torch.where(best >= self.delimiter_threshold, at + 1, whole.clamp_max(self.block_length))
        return torch.where(is_new, cut, whole)

    def fill(self, draft: Block, places: Places, finite: Tensor) -> BlockFill:
        made = super().fill(draft, places, finite)
        held: dict[str, Any] = {each.name: getattr(made, each.name) for each in fields(made)}
        return BlockFill(**held, sizes=self.sizes(places))

    def choose(self, places: Places) -> Tensor:
        return places.confidence >= self.threshold

    def chosen(self, places: Places) -> Tensor:
        index = torch.arange(places.token.shape[1], device=places.token.device)
        inside = index < self.sizes(places)[:, None]
        return super().chosen(replace(places, is_open=places.is_open & inside))
