"""KV cache of packed blocks and a buffer of recent tokens, whose content depends on the text alone.

A token of block k attends to the blocks before k - 1 in packed form, and to the rest in full precision. A
block is packed when it is complete; the full-precision copy of the block before it is then dropped. A draft
may reach into the next block: the mask chooses the form of a block node by node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig

from mmspec.core.cache import WIDTH_BLOCK, RaggedCache, RaggedLayer, WritePlan, additive_mask, round_up
from mmspec.core.draft import Nodes
from mmspec.core.rows import concat, overwrite, select
from mmspec.errors import InputError, UnsupportedModelError
from mmspec_extras.gear.packing import Packed, Packing

AXES = (2, 3)  # a vector is a channel of a block's keys, and a token of its values


@dataclass
class StoredRow:
    """A row's number of committed tokens, the tokens of its reply, and its packed blocks by layer."""

    length: int = 0
    tokens: list[int] = field(default_factory=list)
    layers: dict[int, list[Packed]] = field(default_factory=dict)


@dataclass
class GearPlan(WritePlan):
    """`WritePlan` with the packed blocks of all rows, [B]."""

    packing: Packing = field(default_factory=Packing)
    stored: list[StoredRow] = field(default_factory=list)

    def seen(self, place: Any) -> Any:
        """Number of tokens that the token at a place attends to in packed form; the buffers hold the rest."""
        block = place // self.packing.block - 1
        return (block.clamp_min(0) if isinstance(block, Tensor) else max(block, 0)) * self.packing.block

    @property
    def packed(self) -> int:
        """Largest number of packed tokens of a row."""
        return max(row.length for row in self.stored) // self.packing.block * self.packing.block


class GearLayer(RaggedLayer):
    """Keys and values of one layer. The buffers hold the recent tokens of each row."""

    plan: GearPlan

    def __init__(self, plan: GearPlan, index: int) -> None:
        super().__init__(plan)
        self.index = index

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        plan = self.plan
        if plan.prefill_row is None or not plan.keeps or key_states.shape[2] != plan.tokens:
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        row, block = plan.stored[plan.prefill_row], plan.packing.block
        base, end = plan.seen(plan.start), plan.start + plan.tokens
        new, attended = [], []
        for buffer, states, along, before in zip(
            self.buffers, (key_states, value_states), AXES, self.unpacked(row, base), strict=True
        ):
            held = buffer[plan.prefill_row]
            recent = torch.cat([held[: plan.start - base], states[0].transpose(0, 1)])  # from `base` on
            complete = recent[plan.start // block * block - base : end // block * block - base]
            new.append(plan.packing.pack(complete.unflatten(0, (-1, block)).transpose(1, 2), along))
            attended.append(torch.cat([before, recent])[None].transpose(1, 2))
            later = held[end - base : row.length - base]  # after a block that is read again
            kept = torch.cat([recent, later])[plan.seen(end) - base :]
            held[: len(kept)] = kept
        known = row.layers.get(self.index)
        row.layers[self.index] = new if known is None else list(map(Packed.followed_by, known, new))
        return attended[0], attended[1]

    def unpacked(self, row: StoredRow, length: int) -> list[Tensor]:
        """The first packed keys and values of a row, each [length, heads, d]."""
        if self.index not in row.layers:
            return [buffer[0, :0] for buffer in self.buffers]
        packing, count = self.plan.packing, length // self.plan.packing.block
        blocks = [Packed(*(part[:count] for part in each)) for each in row.layers[self.index]]
        read = [packing.unpack(*each, self.keys.dtype) for each in zip(blocks, AXES, strict=True)]
        return [each.transpose(1, 2).flatten(0, 1) for each in read]

    def _read(self) -> tuple[Tensor, Tensor]:
        """Packed tokens of all rows, padded, and then the buffer."""
        keys, values = super()._read()
        if not self.plan.packed:
            return keys, values
        rows = zip(*(self.unpacked(row, row.length) for row in self.plan.stored), strict=True)
        before = [pad_sequence(list(each), batch_first=True).transpose(1, 2) for each in rows]
        return torch.cat([before[0], keys], 2), torch.cat([before[1], values], 2)


class GearCache(RaggedCache):
    """`RaggedCache` of packed blocks.

    Attributes:
        packing: how blocks are compressed.
        drafted: [B, n] tokens of the last scored draft.

    Raises:
        UnsupportedModelError: the model has layers other than full attention.
    """

    packing: ClassVar[Packing]
    plan: GearPlan
    drafted: Tensor

    def __init__(self, config: PreTrainedConfig, rows: int, capacity: int, device: torch.device) -> None:
        super().__init__(config, rows, 0, device)
        if set(self.layer_types) != {"full_attention"}:
            raise UnsupportedModelError("GEAR compresses models whose layers all have full attention")
        stored = [StoredRow() for _ in range(rows)]
        self.plan = GearPlan(rows, 3 * self.packing.block, packing=self.packing, stored=stored)
        self.ragged = [GearLayer(self.plan, index) for index in range(len(self.layers))]
        self.layers = list(self.ragged)

    @property
    def filled(self) -> Tensor:
        filled: Tensor = self.lengths - self.plan.seen(self.lengths)
        return filled

    def begin_prefill(self, row: int, length: int, start: int = 0) -> None:
        super().begin_prefill(row, length, start)
        self.plan.stored[row].length = start + length

    def begin_score(self, slots: Tensor, extent: int) -> None:
        self._settle()
        width = 2 * self.packing.block + extent
        self._make_room(self.rows, round_up(width, WIDTH_BLOCK))
        super().begin_score(slots, extent)
        self.plan.width = width

    def _reserve(self, tokens: int) -> None:
        """The buffers hold recent tokens alone; `begin_score` makes room for a draft."""

    def attention_mask(self, nodes: Nodes, dtype: torch.dtype | None) -> Tensor:
        """Mask [B, 1, n, packed + width]. Each node attends to every token in one form."""
        if nodes.deepest >= self.packing.block:
            rule = f"must be below {self.packing.block}, the tokens of a block of the compressed cache"
            raise InputError("num_draft_tokens", nodes.deepest, rule)
        recent: Any = super().attention_mask(nodes, None)
        seen = self.plan.seen(self.lengths[:, None] + nodes.depth)[:, None, :, None]
        packed = torch.arange(self.plan.packed, device=seen.device) < seen
        first = self.plan.seen(self.lengths)[:, None, None, None]
        places = first + torch.arange(recent.shape[-1], device=seen.device)
        mask = torch.cat([packed, recent & (places >= seen)], -1)
        return mask if dtype is None else additive_mask(mask, dtype)

    def commit(self, path: Tensor | None, counts: Tensor) -> None:
        super().commit(path, counts)
        tokens = self.drafted if path is None else self.drafted.gather(1, path)
        for row, ids, count in zip(self.plan.stored, tokens.tolist(), counts.tolist(), strict=True):
            row.tokens += ids[:count]
            row.length += count

    def due(self) -> Iterator[tuple[int, int, list[int]]]:
        """Rows whose newest complete block is not packed: row, first token of the reply in it, its tokens."""
        block = self.packing.block
        for index, row in enumerate(self.plan.stored):
            packed = next((len(keys.codes) for keys, _ in row.layers.values()), 0)
            if (end := row.length // block * block) > packed * block:
                prompt = row.length - len(row.tokens)
                start = max(end - block, prompt)
                yield index, start, row.tokens[start - prompt : end - prompt]

    def part(self, rows: Sequence[int], count: int | None = None) -> Self:
        part = super().part(rows, count)
        part.plan.stored = select(self.plan.stored, rows, count)
        return part

    def joined(self, other: Self, counts: tuple[int, int]) -> Self:
        both = super().joined(other, counts)
        both.plan.stored = concat(self.plan.stored, other.plan.stored, counts)
        return both

    def overwritten(self, slots: Sequence[int], other: Self, counts: tuple[int, int]) -> Self:
        changed = super().overwritten(slots, other, counts)
        changed.plan.stored = overwrite(self.plan.stored, slots, other.plan.stored, counts)
        return changed

    def nbytes(self) -> int:
        packed = [each for row in self.plan.stored for pair in row.layers.values() for each in pair]
        return super().nbytes() + sum(part.nbytes for each in packed for part in each)
