"""KV cache for transformers models: static buffers in which every row has its own length.

New nodes are written after a row's committed tokens; a commit moves the accepted path there and advances the
row's length. The cache is never cropped: entries beyond the length are masked, and overwritten later. Prompts
are prefilled one row at a time, so that no row is padded.

Rows enter and leave between rounds (`Rows`). Buffers may therefore have more rows than the batch, which has
the first ones. A row that enters is copied to the first free row. If a row leaves, the last one replaces it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from mmspec.core.draft import Nodes
from mmspec.core.graphs import has_graphs, power_of_two, rows_of_graph
from mmspec.core.recurrent import HYBRID_LAYER, RECURRENT_LAYERS, RecurrentLayer
from mmspec.core.rows import Rows, concat, overwrite, runs, select
from mmspec.errors import UnsupportedModelError
from mmspec.kernels import compact_cache, rotate_into_cache

CAPACITY_BLOCK = 256
WIDTH_BLOCK = 32
MASKABLE_LAYERS = {"full_attention", "sliding_attention"}
STATELESS_LAYERS = {"mlp", "moe"}

RowStates = dict[int, tuple[Tensor, Tensor]]
"""Layer -> keys and values of one row, each [n, heads, head_dim]."""


@dataclass
class WritePlan:
    """Buffer places that the next forward pass writes, shared by all layers."""

    scratch: ClassVar[frozenset[str]] = frozenset({
        *("prefill_row", "start", "group", "tokens", "slots", "width")
    })  # fmt: skip

    rows: int
    capacity: int  # of the buffers, in tokens
    prefill_row: int | None = None  # None in a scoring forward pass
    start: int = 0  # number of tokens of that row before those of this forward pass
    group: tuple[Tensor, Tensor] | None = None  # rows [G] prefilled together, and places [G, n] of the tokens
    tokens: int = 0  # number n of tokens per row in this forward pass
    keeps: bool = True  # False if nothing is written
    slots: Tensor = field(  # [B * n] of new nodes
        default_factory=lambda: torch.empty(0, dtype=torch.long, device="cpu")
    )
    width: int = 0  # number of columns that attention reads
    reads_all: bool = False  # whether that is the capacity: the kernel stops at each row's length


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer: [B, capacity, heads, head_dim], so that a token is one entry.

    Attributes:
        buffers: memory of keys and values, each [S, capacity, heads, head_dim], S >= B.
        keys, values: views of the first B rows; the others are free.
        window: number of newest tokens that a token attends to, itself included; None for all.
    """

    is_sliding = False  # the buffer holds every token; the window is part of the mask
    is_croppable = False
    buffers: tuple[Tensor, ...]
    keys: Tensor
    values: Tensor

    def __init__(self, plan: WritePlan, window: int | None = None) -> None:
        super().__init__()
        self.plan, self.window = plan, window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.hold(self._allocate(key_states), self._allocate(value_states))
        self.is_initialized = True

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Set the buffers, whose first rows are those of the plan."""
        self.buffers = keys, values
        rows = self.plan.rows
        self.keys, self.values = (each if len(each) == rows else each[:rows] for each in self.buffers)

    def _allocate(self, states: Tensor) -> Tensor:
        # zeros, not empty: a masked NaN still gives NaN in 0 * NaN
        return states.new_zeros(self.plan.rows, self.plan.capacity, states.shape[1], states.shape[3])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write new states [B, heads, n, head_dim], and return the states that attention reads.

        Raises:
            UnsupportedModelError: the number of states differs from the number of tokens.
        """
        plan = self.plan
        if not plan.keeps:
            return key_states, value_states
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = key_states.shape[2]
        if length != plan.tokens:
            raise UnsupportedModelError(
                f"the model caches {length} states for {plan.tokens} tokens. mmspec supports models whose "
                "prompt has one token for each image feature"
            )
        if plan.prefill_row is not None and plan.group is None:
            row, end = plan.prefill_row, plan.start + length
            for buffer, states in ((self.keys, key_states), (self.values, value_states)):
                buffer[row, plan.start : end] = states[0].transpose(0, 1)
            if not plan.start:
                return key_states, value_states
            seen = slice(first_seen(plan.start, self.window), end)
            return self.keys[None, row, seen].transpose(1, 2), self.values[None, row, seen].transpose(1, 2)
        slots = plan.slots.to(key_states.device)  # a device_map may put layers on several devices
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            buffer.flatten(0, 1).index_copy_(0, slots, states.transpose(1, 2).flatten(0, 1))
        if plan.group is None:
            return self._read()
        if not plan.start:
            return key_states, value_states
        rows = plan.group[0].to(key_states.device)
        keys, values = (buffer[rows, : plan.width] for buffer in (self.keys, self.values))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def update_rotated(
        self, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, **how: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate queries [B, n, heads, d] and keys, and `update`, in a scoring forward pass.

        Args:
            query: before the rotation.
            key, value: [B, n, key heads, d].
            cos, sin: [B or 1, n, d], as `rotate_into_cache` takes them.
            how: its arguments after the buffers.

        Returns:
            Queries [B, heads, n, d], and the keys and values that attention reads.
        """
        if not self.is_initialized:
            self.lazy_initialization(key.transpose(1, 2), value.transpose(1, 2))
        slots = self.plan.slots.to(key.device)
        rotated = rotate_into_cache(query, key, value, cos, sin, slots, self.keys, self.values, **how)
        return rotated.transpose(1, 2), *self._read()

    def _read(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, width, d] that attention reads."""
        width = self.plan.width
        return self.keys[:, :width].transpose(1, 2), self.values[:, :width].transpose(1, 2)

    def resize(self, rows: int, capacity: int) -> None:
        """Copy the batch into buffers of other sizes. If memory runs out, the layer is unchanged."""
        self.hold(*(resized(buffer, rows, capacity) for buffer in (self.keys, self.values)))

    def shorten(self, capacity: int) -> None:
        """Set a smaller capacity by way of the host, when the device has no memory for a copy."""
        device = self.keys.device
        saved = [buffer[:, :capacity].to("cpu", copy=True) for buffer in self.buffers]
        del self.buffers, self.keys, self.values
        self.hold(*(each.to(device) for each in saved))

    def rearrange(self, moves: Sequence[tuple[slice, slice]]) -> None:
        """Copy rows, given as (to, from); all are read before any is written."""
        written = {row for to, _ in moves for row in range(to.start, to.stop)}
        overlap = any(row in written for _, by in moves for row in range(by.start, by.stop))
        for buffer in self.buffers:
            read = [buffer[by].clone() if overlap else buffer[by] for _, by in moves]
            for (to, _), rows in zip(moves, read, strict=True):
                buffer[to] = rows

    def get_seq_length(self) -> int:
        return 0  # positions and masks are always passed explicitly, and a prefill starts at 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.2x

    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers) if self.is_initialized else 0


class HybridLayer(RecurrentLayer, RaggedLayer):
    """Cache of a layer with attention and a recurrent mixer (Falcon-H1, Zamba2)."""

    is_compileable = False  # the two base classes have different values

    def __init__(self, plan: WritePlan, number_of_states: int = 1) -> None:
        RaggedLayer.__init__(self, plan)
        RecurrentLayer.__init__(self, plan, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        # attention passes keys and values by position, mixers pass their states by name
        if args:
            RaggedLayer.lazy_initialization(self, *args)
        else:
            RecurrentLayer.lazy_initialization(self, **kwargs)


class RaggedCache(Cache, Rows):
    """Static KV buffers with per-row lengths.

    Args:
        config: the model's config: number of layers, and which of them have a sliding window.
        rows: batch size B (twice that under guidance).
        capacity: tokens per row to allocate at first; grows in blocks of 256, or to powers of two where
            CUDA graphs store the addresses of the buffers.
        device: of the lengths; buffers follow the model.

    Raises:
        UnsupportedModelError: the model has layers whose state is of an unknown kind.

    Attributes:
        order: index of each row in the buffers, if rows have to move before the next forward pass; else None.
        is_taken: whether the buffers have got other rows, so that a pool cannot use them again.
        keeps_buffers: whether buffers stay when few rows are left, because CUDA graphs store their addresses.
        rearranged: number of commits that have moved or overwritten what a repeated round would read.
    """

    counters = frozenset({"longest", "rearranged"})
    is_taken = False
    keeps_buffers = False
    rearranged = 0

    def __init__(self, config: PreTrainedConfig, rows: int, capacity: int, device: torch.device) -> None:
        text = config.get_text_config(decoder=True)
        kinds = check_layer_types(text)
        # types of masks: a hybrid layer needs the masks of attention and of the mixer
        self.layer_types = [
            mask
            for kind in kinds
            for mask in (("full_attention", "linear_attention") if kind == HYBRID_LAYER else (kind,))
        ]
        self.sliding_window: int | None = getattr(text, "sliding_window", None)
        self.plan = WritePlan(rows, round_up(capacity, CAPACITY_BLOCK))
        self.order: list[int] | None = None
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        # upper bound of max(lengths), known to the host: exact after each round's read, never too small
        self.longest = 0
        states = getattr(text, "number_of_conv_states", 1)
        stateful = dict.fromkeys(RECURRENT_LAYERS, RecurrentLayer) | {HYBRID_LAYER: HybridLayer}
        layers: list[Any] = [
            stateful[kind](self.plan, states)
            if kind in stateful
            else RaggedLayer(self.plan, self.window_of(kind))
            for kind in kinds
        ]
        self.ragged = [layer for layer in layers if isinstance(layer, RaggedLayer)]
        self.recurrent = [layer for layer in layers if isinstance(layer, RecurrentLayer)]
        super().__init__(layers=layers)

    @property
    def rows(self) -> int:
        return self.plan.rows

    @property
    def capacity(self) -> int:
        """Tokens of each row for which there is room."""
        return self.plan.capacity

    @property
    def filled(self) -> Tensor:
        """[B] index in the buffers of each row's first new node: the length, unless a cache packs tokens."""
        return self.lengths

    @property
    def addresses(self) -> tuple[tuple[int, torch.Size], ...]:
        """Addresses and shapes of the keys and values, which CUDA graphs store."""
        held = (each for layer in self._initialized for each in (layer.keys, layer.values))
        return tuple((each.data_ptr(), each.shape) for each in held)

    def reserve(self, tokens: int) -> None:
        """Make room for tokens after those of the longest row."""
        self._reserve(self.longest + tokens)

    @property
    def buffer_rows(self) -> int:
        """Number of rows for which all buffers have room."""
        return min((len(layer.buffers[0]) for layer in self._initialized), default=self.rows)

    @property
    def is_initialized(self) -> bool:
        """False in the first chunk of a prompt, so that the model takes it as the start of a sequence."""
        continues = self.plan.prefill_row is None or self.plan.start > 0
        return continues and any(layer.is_initialized for layer in self.ragged)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the running mixer has a state.

        OLMo hybrid in transformers 5.17 passes no index. The base class would then look at the last layer,
        which may not be the running one.
        """
        if layer_idx is None:
            return any(all(layer.has_previous_state.values()) for layer in self.recurrent)
        found: bool = super().has_previous_state(layer_idx, state_idx)
        return found

    def begin_prefill(self, row: int, length: int, start: int = 0) -> None:
        """Prepare the next forward pass to prefill one row with `length` tokens, after `start` others."""
        end = start + length
        self._reserve(end)
        self.plan.prefill_row, self.plan.start, self.plan.tokens = row, start, length
        self.plan.group = None
        self.lengths[row] = end
        self.longest = max(self.longest, end)

    def begin_prefill_rows(
        self, rows: Sequence[int], lengths: Sequence[int], starts: Sequence[int] | None = None
    ) -> None:
        """Prepare the next forward pass to prefill some rows, padded on the right to the longest.

        Padding is written behind the tokens of a row, where its next tokens overwrite it.

        Args:
            rows: G rows of the batch.
            lengths: number of tokens of each.
            starts: number of tokens of each before those; None for 0.
        """
        starts = [0] * len(rows) if starts is None else starts
        if len(rows) == 1:
            self.begin_prefill(rows[0], lengths[0], starts[0])
            return
        plan, tokens = self.plan, max(lengths)
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        self._reserve(max(starts) + tokens)
        plan.prefill_row, plan.start, plan.tokens = rows[0], max(starts), tokens
        plan.width = max(starts) + tokens
        numbers = torch.tensor([[*rows], [*starts], ends], device=self.lengths.device)
        index, before, after = numbers.unbind()
        places = before[:, None] + torch.arange(tokens, device=index.device)
        plan.group = index, places
        plan.slots = (index[:, None] * plan.capacity + places).flatten()
        self.lengths.index_copy_(0, index, after)
        self.longest = max(self.longest, *ends)

    def begin_reading(self) -> None:
        """Prepare all following forward passes to read whole sequences without caching them."""
        self.plan.keeps = False

    def load(self, states: RowStates) -> None:
        """Write the cached keys and values of a prompt's prefix, after `begin_prefill`."""
        for layer, (keys, values) in states.items():
            self.ragged[layer].update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])

    @contextmanager
    def recurrent_from(self, row: int) -> Iterator[None]:
        """Continue the recurrent layers of one row from its states, which they update."""
        try:
            for layer in self.recurrent:
                layer.enter({key: state[row : row + 1] for key, state in layer.committed.items()})
            yield
        finally:
            for layer in self.recurrent:
                layer.leave()

    def row_states(self, row: int, length: int) -> RowStates:
        """Views of a row's keys and values for its first `length` tokens; later rounds leave them."""
        place = row if self.order is None else self.order[row]
        return {
            index: (layer.keys[place, :length], layer.values[place, :length])
            for index, layer in enumerate(self.ragged)
            if layer.is_initialized
        }

    def clear(self) -> None:
        """Empty the cache for another batch, keeping the addresses of its buffers."""
        self.plan.prefill_row, self.longest = None, 0
        self.lengths.zero_()
        held = [each for layer in self._initialized for each in (layer.keys, layer.values)]
        if held:  # masked entries are still multiplied and might be NaN
            torch._foreach_zero_(held)

    def part(self, rows: Sequence[int], count: int | None = None) -> Self:
        size = self.rows if count is None else count
        kept = [first + row for first in range(0, self.rows, size) for row in rows]
        self.is_taken = True
        self._make_room(len(kept), self.plan.capacity)
        part = self._mapped(lambda values: select(values, rows, count), len(kept))
        part.order = kept if self.order is None else [self.order[row] for row in kept]
        if len(kept) <= self.rows:  # else later: see `joined`
            part._settle()
            part._shrink()
        return part

    def joined(self, other: Self, counts: tuple[int, int]) -> Self:
        """Return these rows followed by those of `other`. After an error these rows are unchanged."""
        for cache in (self, other):
            cache._settle()
        self.is_taken, rows = True, self.rows + other.rows
        self._make_room(rows, max(self.plan.capacity, other.plan.capacity))
        self._write(range(self.rows, rows), other)
        values = iter(other._values())
        both = self._mapped(lambda each: concat(each, next(values), counts), rows)
        both.longest = max(self.longest, other.longest)
        # Under guidance, the second copy of these rows has to move. It does in the next forward pass: until
        # then, an error leaves these rows as they are.
        both.order = concat(list(range(self.rows)), list(range(self.rows, rows)), counts)
        return both

    def overwritten(self, slots: Sequence[int], other: Self, counts: tuple[int, int]) -> Self:
        """Write the rows of `other` to these rows, in the same buffers; after an error the others stay."""
        for cache in (self, other):
            cache._settle()
        self._make_room(self.rows, max(self.plan.capacity, other.plan.capacity))
        copies = range(self.rows // counts[0])
        places = [copy * counts[0] + slot for copy in copies for slot in slots]
        self._write(places, other)
        self.lengths = overwrite(self.lengths, slots, other.lengths, counts)
        for own, fresh in zip(self.recurrent, other.recurrent, strict=True):
            own.committed = {
                key: overwrite(state, slots, fresh.committed[key], counts)
                for key, state in own.committed.items()
            }
        self.longest = max(self.longest, other.longest)
        return self

    def _write(self, places: Sequence[int], other: RaggedCache) -> None:
        """Copy the batch of another cache, whose capacity is not larger, to these rows of the buffers.

        All layers are written in one launch, and cleared behind the copies in another.
        """
        written, copied, cleared = [], [], []
        for layer, new in zip(self._initialized, other._initialized, strict=True):
            for buffer, states in zip(layer.buffers, (new.keys, new.values), strict=True):
                first = 0
                for run in runs(places):
                    to, first = buffer[run], first + run.stop - run.start
                    written.append(to[:, : states.shape[1]])
                    copied.append(states[first - len(to) : first])
                    # a row that has left may have had a NaN there; see `_allocate`
                    cleared.append(to[:, states.shape[1] :])
        if written:
            torch._foreach_copy_(written, copied)
            torch._foreach_zero_(cleared)

    @property
    def _initialized(self) -> list[RaggedLayer]:
        """Layers with buffers: those that share another layer's keys and values have none."""
        return [layer for layer in self.ragged if layer.is_initialized]

    def _values(self) -> list[Tensor]:
        """The lengths and the recurrent states, which have no free rows."""
        return [self.lengths, *(state for layer in self.recurrent for state in layer.committed.values())]

    def _mapped(self, change: Callable[[Tensor], Tensor], rows: int) -> Self:
        """Return a cache of other rows in the same buffers, with `change` applied to each of `_values`."""
        changed = copy.copy(self)
        changed.plan = replace(self.plan, rows=rows)
        changed.lengths = change(self.lengths)
        changed.layers = [copy.copy(layer) for layer in self.layers]
        changed.ragged = [layer for layer in changed.layers if isinstance(layer, RaggedLayer)]
        for layer in changed.ragged:
            layer.plan = changed.plan
            if layer.is_initialized:
                layer.hold(*layer.buffers)
        changed.recurrent = [layer for layer in changed.layers if isinstance(layer, RecurrentLayer)]
        for recurrent in changed.recurrent:
            recurrent.plan = changed.plan
            recurrent.committed = {key: change(state) for key, state in recurrent.committed.items()}
        return changed

    def _settle(self) -> None:
        """Move the rows to their order."""
        if self.order is None:
            return
        first, moves = 0, []
        for run in runs(self.order):
            to = slice(first, first + run.stop - run.start)
            moves += [(to, run)] if to != run else []
            first = to.stop
        for layer in self._initialized if moves else ():
            layer.rearrange(moves)
        self.order = None

    def _make_room(self, rows: int, capacity: int) -> None:
        """Grow the buffers, if necessary, for `rows` rows of `capacity` tokens."""
        own = self.buffer_rows
        if rows > own or capacity > self.plan.capacity:
            self._resize(rows_of_graph(rows) if rows > own else own, max(capacity, self.plan.capacity))

    def _shrink(self) -> None:
        """Free most of the buffers when few rows are left, but keep room for as many again."""
        rows = 2 * rows_of_graph(self.rows)
        if 2 * rows <= self.buffer_rows and not self.keeps_buffers:
            with suppress(torch.OutOfMemoryError):  # larger buffers serve as well
                self._resize(rows, self.plan.capacity)

    def _resize(self, rows: int, capacity: int) -> None:
        """Copy into buffers of other sizes, layer by layer, so that memory never holds all of them twice.

        If memory runs out, the capacity is unchanged, and all rows are where they were.
        """
        before = self.plan.capacity
        try:
            for layer in self._initialized:
                layer.resize(rows, capacity)
        except RuntimeError:
            for layer in self._initialized:
                if layer.keys.shape[1] > before:
                    layer.shorten(before)
            raise
        self.plan.capacity = capacity

    def begin_score(self, slots: Tensor, extent: int) -> None:
        """Prepare the next forward pass to write nodes after each row's committed tokens.

        Args:
            slots: [B, n] from 0 to extent - 1. Nodes scored since the last commit stay until they are
                overwritten.
            extent: number of slots that attention reads.
        """
        self._settle()
        self._reserve(self.longest + extent)
        plan = self.plan
        plan.prefill_row, plan.group, plan.tokens = None, None, slots.shape[1]
        width = plan.capacity if plan.reads_all else mask_width(self.longest + extent, self.lengths.device)
        plan.width = min(width, plan.capacity)
        firsts = torch.arange(plan.rows, device=slots.device) * plan.capacity + self.filled
        plan.slots = (firsts[:, None] + slots).flatten()

    def commit(self, path: Tensor | None, counts: Tensor) -> None:
        """Keep the accepted nodes and advance the lengths.

        Args:
            path: [B, m] node indices from the root down, padded; None if node i is at depth i.
            counts: [B] number of nodes to keep, root included; 0 leaves a row unchanged.
        """
        if path is not None:
            buffers: dict[torch.device, list[Tensor]] = {}  # a device_map may put layers on several devices
            for layer in self._initialized:
                buffers.setdefault(layer.keys.device, []).extend((layer.keys, layer.values))
            for device, together in buffers.items():
                compact_cache(together, *(each.to(device) for each in (path, self.filled, counts)))
        self.rearranged += path is not None or bool(self.recurrent)
        if self.recurrent:
            last = (counts - 1).clamp_min(0)
            node = last if path is None else path.gather(1, last[:, None])[:, 0]
            for recurrent in self.recurrent:
                recurrent.commit(node, counts > 0)
        self.lengths = self.lengths + counts  # not in place: a round that fails is computed again

    def attention_mask(
        self, nodes: Nodes, dtype: torch.dtype | None
    ) -> Tensor | dict[str, Tensor | None] | None:
        """4-D attention mask of a scoring forward pass: committed tokens and each node's visible slots.

        Args:
            nodes: n nodes in m slots.
            dtype: of an additive mask; None for a boolean one.

        Returns:
            [B, 1, n, width]; a dict with one mask per layer type for models that mix types, None for
            recurrent layers.
        """
        rows, queries, extent = nodes.visible.shape
        column = torch.arange(self.plan.width, device=self.lengths.device)
        committed = (column < self.filled[:, None])[:, None, :].expand(rows, queries, -1)
        new = self.filled[:, None, None] + torch.arange(extent, device=column.device)
        full = committed.scatter(2, new.expand(rows, queries, extent), nodes.visible)
        masks = {"full_attention": full}
        window = self.window_of("sliding_attention")
        if "sliding_attention" in self.layer_types and window is not None:
            # The distance to a key is measured in depth: a key's column does not give its position.
            position = column.expand(rows, -1).scatter(1, new[:, 0], self.lengths[:, None] + nodes.depths)
            distance = (self.lengths[:, None] + nodes.depth)[:, :, None] - position[:, None, :]
            masks["sliding_attention"] = full & (distance < window)
        kinds = set(self.layer_types)
        if dtype is not None:
            masks = {kind: additive_mask(mask, dtype) for kind, mask in masks.items()}
        shown = {kind: masks[kind][:, None] if kind in masks else None for kind in kinds}
        return shown if len(kinds) > 1 else shown[kinds.pop()]

    def window_of(self, kind: str) -> int | None:
        """Number of newest tokens that a token attends to in layers of a kind; None for all."""
        return self.sliding_window if kind == "sliding_attention" else None

    def chunk_mask(
        self, dtype: torch.dtype | None, images: Tensor | None = None
    ) -> Tensor | dict[str, Tensor | None] | None:
        """Attention mask of chunks of prompts that a forward pass prefills; see `attention_mask`.

        Args:
            dtype: of an additive mask; None for a boolean one.
            images: [G, n] number of the image whose tokens attend to one another; -1 for other tokens.

        Returns:
            [G, 1, n, m] for n tokens of each of G prompts and the m keys that `update` returns: all keys of
            the rows, or for one prompt in layers with a sliding window those of at most window - 1 + n
            tokens.
        """
        start, end, group = self.plan.start, self.plan.start + self.plan.tokens, self.plan.group
        places = torch.arange(start, end, device=self.lengths.device)[None] if group is None else group[1]
        query = places[:, None, :, None]
        masks: dict[str, Tensor | None] = dict.fromkeys(self.layer_types)
        for kind in MASKABLE_LAYERS & masks.keys():
            window = self.window_of(kind)
            first = first_seen(start, window) if group is None else 0
            key = torch.arange(first, end, device=query.device)
            seen = key <= query
            if images is not None:
                own = images.new_full((len(images), len(key)), -1).scatter_(1, places - first, images)
                seen = seen | ((images[:, :, None] == own[:, None]) & (images[:, :, None] >= 0))[:, None]
            seen = seen if window is None else seen & (query - key < window)
            masks[kind] = seen if dtype is None else additive_mask(seen, dtype)
        return masks if len(masks) > 1 else masks[self.layer_types[0]]

    def nbytes(self) -> int:
        """Size in bytes of the keys, values and recurrent states."""
        keys = sum(RaggedLayer.nbytes(layer) for layer in self.ragged)
        return keys + sum(layer.nbytes() for layer in self.recurrent)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def _reserve(self, tokens: int) -> None:
        if tokens > self.plan.capacity:
            # graphs are captured anew at each capacity, so that these are powers of two
            more = power_of_two(tokens) if self.keeps_buffers else round_up(tokens, CAPACITY_BLOCK)
            self._make_room(self.rows, more)


def check_layer_types(text: PreTrainedConfig) -> list[str]:
    """Attention type of every layer.

    Raises:
        UnsupportedModelError: the model has layers of an unknown kind, whose state cannot be rolled back
            after a rejection, or attention in chunks; or it has no layer count.
    """
    if not hasattr(text, "num_hidden_layers"):
        reason = "its config has no num_hidden_layers, the number of layers of a single decoder"
        raise UnsupportedModelError(f"models of type {text.model_type!r} are not supported: {reason}")
    types = getattr(text, "layer_types", None)
    if types is None:
        types = getattr(text, "layers_block_type", None)
    if types is None:
        sliding = getattr(text, "sliding_window", None) is not None and getattr(
            text, "use_sliding_window", True
        )
        types = ["sliding_attention" if sliding else "full_attention"] * text.num_hidden_layers
    known = MASKABLE_LAYERS | RECURRENT_LAYERS | STATELESS_LAYERS | {HYBRID_LAYER}
    for index, kind in enumerate(types):
        if kind not in known:
            raise UnsupportedModelError(
                f"layer {index} of {text.model_type} ({kind}) keeps a state that cannot drop rejected "
                f"draft tokens; supported layer types: {', '.join(sorted(known))}"
            )
    return list(types)


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask to an additive one, which eager attention needs."""
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill(~mask, torch.finfo(dtype).min)


def first_seen(token: int, window: int | None) -> int:
    """First token that a token attends to."""
    return 0 if window is None else max(0, token - window + 1)


def mask_width(columns: int, device: torch.device) -> int:
    """Round the number of mask columns up, so that few different shapes occur.

    CUDA uses powers of two, because each shape is captured in its own graph. A CPU uses blocks: shapes are
    free there, and powers of two cost a tenth of an image's time in wider attention.
    """
    if has_graphs(device):
        return max(WIDTH_BLOCK, power_of_two(columns))
    return round_up(columns, WIDTH_BLOCK)


def resized(batch: Tensor, rows: int, capacity: int) -> Tensor:
    """Copy a batch [B, n, ...] into a new buffer [rows, capacity, ...] of zeros."""
    buffer = batch.new_zeros(rows, capacity, *batch.shape[2:])
    buffer[: len(batch), : batch.shape[1]] = batch
    return buffer


def round_up(value: int, block: int) -> int:
    """Smallest multiple of `block` that is at least `value`."""
    return -(-value // block) * block
