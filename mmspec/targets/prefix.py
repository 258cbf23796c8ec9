"""Prefix cache: the prefill reuses the keys and values of the longest prefix shared with earlier prompts.

The cache stores the keys, values and tapped hidden states of prompts, and the keys and values of replies, by
blocks of tokens. Prompts that begin alike share their blocks; the least recently used is dropped first.
Images begin and end with a block, and the last block of a prompt may be short: the next turn of a
conversation reuses all of its tokens. Recurrent layers have one state for a whole prompt, so that only
prompts that continue it can reuse it.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, starmap

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmspec.core.cache import RowStates
from mmspec.core.once import once
from mmspec.core.recurrent import States
from mmspec.errors import InputError
from mmspec.open_types import Inputs, Keywords
from mmspec.targets.blocks import KEY_BYTES, BlockTable, chain, digest
from mmspec.targets.encoded_images import ImageCache
from mmspec.targets.media_items import MediaItem, find_items
from mmspec.validation import is_integer

__all__ = [
    "MEDIA",
    "PER_TOKEN",
    "TOKENS",
    "TYPES",
    "Prefix",
    "PrefixCache",
    "PromptIdentity",
    "identify",
    "is_causal",
    "media_of",
    "part_of",
]

TOKENS = ("input_ids", "position_ids", "mm_token_type_ids")  # arguments [.., L], as long as the prompt
TYPES = "token_type_ids"  # also as long; 1 for tokens of images
PER_TOKEN = (*TOKENS, TYPES)
#: Models in which tokens of an image attend to all others of that image, and all other tokens are causal.
OWN_IMAGE = frozenset({"gemma3"})
MEDIA = frozenset({
    "pixel_values", "pixel_values_images", "pixel_values_videos", "pixel_attention_mask", "image_sizes",
    "image_grid_thw", "video_grid_thw", "second_per_grid_ts", "batch_num_images",
})  # fmt: skip
# The rest is prefilled with a mask, which costs more than plain causal attention: short prefixes do not pay
# off.
LEAST_SHARE = 0.25
BLOCK = 16
NUMBER_BYTES = 8
FIRST_BLOCKS = 64  # memory is allocated for these at first, and then for twice as many
HOST_BYTES = 512  # about those of a block's entries in tables
IMAGE_SHARE = 8  # encoded images get an eighth of the limit

Name = tuple[str, int]  # of a pool: "keys", "values" or "tap", and the layer


@dataclass(frozen=True)
class PromptIdentity:
    """The inputs that a prompt's keys depend on, in host memory.

    Attributes:
        tokens: [L].
        positions: [axes, L].
        items: images and clips, in the order of their tokens.
        state: hash of the model's state; see `state_of`.
        offset: position of the token after the prompt, minus L.
    """

    tokens: Tensor
    positions: Tensor
    items: tuple[MediaItem, ...]
    state: int
    offset: int = 0

    @once
    def data(self) -> bytes:
        """Bytes of the tokens and their positions, token by token."""
        numbers = torch.cat([self.tokens[None], self.positions]).T.contiguous()
        return numbers.numpy().tobytes()

    def content(self, start: int, stop: int) -> bytes:
        """Return the bytes that identify a block, given the blocks before it."""
        image = next((item.digest for item in self.items if item.start == start), bytes(KEY_BYTES))
        width = NUMBER_BYTES * (1 + len(self.positions))
        return image + self.data[start * width : stop * width]

    def root(self, size: int) -> bytes:
        """Hash of what all blocks of up to `size` tokens depend on."""
        return digest(struct.pack("<qqq", self.state, len(self.positions), size))

    def ends(self, size: int) -> list[int]:
        """Ends of its blocks of up to `size` tokens. Images begin and end with a block."""
        edges = {0, len(self.tokens), *(edge for item in self.items for edge in (item.start, item.stop))}
        parts = pairwise(sorted(edges))
        return [min(first + size, stop) for start, stop in parts for first in range(start, stop, size)]

    def keys(self, size: int) -> list[bytes]:
        """Keys of its blocks."""
        ends = self.ends(size)
        return chain(self.root(size), starmap(self.content, pairwise([0, *ends])))

    def cut(self, length: int) -> int:
        """Largest number of tokens up to `length` that ends in no image or clip."""
        for item in self.items:
            if item.start < length < item.stop:
                return item.start
        return length

    def chunks(self, start: int, size: int) -> list[int]:
        """Ends of chunks of up to `size` tokens, from `start` on. A longer image or clip is one chunk."""
        ends, total = [], len(self.tokens)
        while start < total:
            end = self.cut(min(start + size, total))
            start = end if end > start else next(each.stop for each in self.items if each.start == start)
            ends.append(start)
        return ends

    def followed_by(self, tokens: Sequence[int]) -> PromptIdentity:
        """The prompt followed by output tokens."""
        after = torch.arange(len(tokens), device="cpu") + len(self.tokens) + self.offset
        positions = torch.cat([self.positions, after.expand(len(self.positions), -1)], 1)
        tokens_after = torch.tensor(tokens, dtype=torch.long, device="cpu")
        return replace(self, tokens=torch.cat([self.tokens, tokens_after]), positions=positions)


@dataclass(frozen=True)
class Prefix:
    """Cached prefill of the first tokens of a prompt.

    Attributes:
        length: number of tokens n.
        states: keys and values of every layer, each [n, heads, head_dim].
        taps: tap -> hidden states [1, n, d].
        recurrent: states of every recurrent layer after the last token.
    """

    length: int
    states: RowStates
    taps: dict[int, Tensor]
    recurrent: list[States] = field(default_factory=list)


class PrefixCache:
    """Prefix cache of one model, by blocks of tokens within a memory limit. Copies are empty.

    Args:
        max_bytes: limit for keys, values, hidden states and encoded images.
        block: number of tokens of a block. Models with recurrent layers have blocks of one token.

    Attributes:
        images: cache of encoded images, with a part of the limit.
        queries: number of tokens of all prompts that were looked up.
        hits: number of those that were cached.

    Raises:
        InputError: the limit is not a positive integer.
    """

    def __init__(self, max_bytes: int, block: int = BLOCK) -> None:
        if not is_integer(max_bytes) or max_bytes < 1:
            raise InputError("max_bytes", max_bytes, "must be a positive number of bytes")
        self.max_bytes, self.block = max_bytes, block
        self.images = ImageCache(max_bytes // IMAGE_SHARE)
        self.queries = self.hits = 0
        self._table = BlockTable(0)
        self._pools: dict[Name, Tensor] = {}  # each [slots, block, ...]
        self._taps: dict[int, frozenset[int]] = {}  # slot -> taps that are stored
        self._recurrent = RecurrentStates(0)

    def __reduce__(self) -> tuple[type[PrefixCache], tuple[int, int]]:
        return type(self), (self.max_bytes, self.block)

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._table)

    @property
    def usage(self) -> float:
        """Share of the blocks for which there is room that hold keys, from 0 to 1."""
        return len(self._table) / self._table.limit if self._table.limit else 0.0

    def find(self, prompt: PromptIdentity, taps: Sequence[int], is_recurrent: bool = False) -> Prefix | None:
        """Find the longest cached prefix of a prompt, shorter than the prompt; None if none pays off.

        Args:
            prompt: the prompt to prefill.
            taps: layers whose hidden states are needed for all of its tokens.
            is_recurrent: whether the model has recurrent layers.
        """
        total, size = len(prompt.tokens), 1 if is_recurrent else self.block
        self.queries += total
        needed = frozenset(taps)
        keys, ends = self._matching(prompt, size)
        slots = self._table.find(keys, lambda slot: needed <= self._taps[slot])
        # the last token is processed: its logits are not cached
        length = prompt.cut(min([0, *ends][len(slots)], total - 1))
        recurrent: list[States] = []
        if is_recurrent:
            length, recurrent = self._recurrent.find(keys[:length])
        if length < max(1, LEAST_SHARE * total):
            return None
        self.hits += length
        found = self._read(places(slots, ends, size)[:length])
        layers = sorted(layer for part, layer in found if part == "keys")
        states = {layer: (found["keys", layer], found["values", layer]) for layer in layers}
        return Prefix(length, states, {tap: found["tap", tap][None] for tap in taps}, recurrent)

    def held(self, prompt: PromptIdentity) -> int:
        """Number of the first tokens of a prompt whose blocks are stored."""
        keys, ends = prompt.keys(self.block), [0, *prompt.ends(self.block)]
        return ends[next((index for index, key in enumerate(keys) if key not in self._table), len(keys))]

    def is_worth_waiting(self, prompt: PromptIdentity, others: Sequence[PromptIdentity]) -> bool:
        """Whether a prompt shares half of its tokens with prompts that will be stored, but are not yet."""
        keys, ends = prompt.keys(self.block), [0, *prompt.ends(self.block)]
        coming = {key for other in others for key in other.keys(self.block)}
        held = next((index for index, key in enumerate(keys) if key not in self._table), len(keys))
        shared = held
        while shared < len(keys) and keys[shared] in coming:
            shared += 1
        return shared > held and ends[shared] >= len(prompt.tokens) / 2

    @torch.no_grad()
    def keep(
        self,
        prompt: PromptIdentity,
        states: RowStates,
        taps: Mapping[int, Tensor],
        recurrent: Sequence[States] = (),
    ) -> None:
        """Store the blocks of a prompt, as many of the first ones as the limit allows.

        Args:
            prompt: the prompt.
            states: of all of its tokens; copied.
            taps: hidden states [1, L, d]; copied.
            recurrent: of every recurrent layer, after the last token; not copied.
        """
        size = 1 if recurrent else self.block
        keys, ends = prompt.keys(size), prompt.ends(size)
        hidden: dict[Name, Tensor] = {("tap", tap): each[0] for tap, each in taps.items()}
        attended = {("keys", layer): pair[0] for layer, pair in states.items()}
        attended |= {("values", layer): pair[1] for layer, pair in states.items()}
        self._make_pools({**attended, **hidden}, size, bool(recurrent))
        self._grow(min(self._table.limit, len(self._table) + len(keys)))
        slots, added = self._table.add(keys)
        self._taps |= {slots[index]: frozenset() for index in added}
        untapped = [index for index, slot in enumerate(slots) if not taps.keys() <= self._taps[slot]]
        self._write(attended, slots, ends, added, size)
        self._write(hidden, slots, ends, untapped, size)
        self._taps |= {slots[index]: self._taps[slots[index]].union(taps) for index in untapped}
        if recurrent and keys and len(slots) == len(keys):
            self._recurrent.keep(keys[-1], list(recurrent))

    def nbytes(self) -> int:
        """Size in bytes."""
        pools = sum(pool.nbytes for pool in self._pools.values())
        return pools + HOST_BYTES * len(self._table) + self._recurrent.bytes + self.images.nbytes()

    def _make_pools(self, rows: Mapping[Name, Tensor], size: int, is_recurrent: bool) -> None:
        """Make room for rows [L, ...] of these kinds. With a new kind, all blocks are dropped.

        This happens with the first prompt, and with the first one for a head that reads other layers.
        """
        kinds = {name: (row.shape[1:], row.dtype, row.device) for name, row in rows.items()}
        held = {name: (pool.shape[2:], pool.dtype, pool.device) for name, pool in self._pools.items()}
        if self._table.limit and {**held, **kinds} == held:
            return
        both = {**held, **kinds}
        if any(both[name] != kind for name, kind in held.items()):  # the model was cast or moved
            both = kinds
        with torch.inference_mode(False):  # so that any mode may write into them
            self._pools = {
                name: torch.empty(0, size, *shape, dtype=dtype, device=device)
                for name, (shape, dtype, device) in both.items()
            }
        limit = self.max_bytes - self.images.max_bytes
        if is_recurrent:  # half of it is for the states of recurrent layers
            limit //= 2
        token = sum(shape.numel() * dtype.itemsize for shape, dtype, _ in both.values())
        self._table = BlockTable(limit // (size * token + HOST_BYTES))
        self._taps = {}
        self._recurrent = RecurrentStates(limit if is_recurrent else 0)

    def _grow(self, slots: int) -> None:
        """Allocate memory for slots; if it runs out, the limit is lowered to the memory that there is."""
        if all(len(pool) >= slots for pool in self._pools.values()):
            return
        room = FIRST_BLOCKS
        while room < slots:
            room *= 2
        room = min(room, self._table.limit)
        try:
            with torch.inference_mode(False):
                for name, pool in self._pools.items():
                    larger = pool.new_empty(room, *pool.shape[1:])
                    larger[: len(pool)] = pool
                    self._pools[name] = larger
        except torch.OutOfMemoryError:
            self._table.limit = min(map(len, self._pools.values()))

    def _matching(self, prompt: PromptIdentity, size: int) -> tuple[list[bytes], list[int]]:
        """Return keys and ends of a prompt's first blocks, the last one short if that is what is cached.

        Prompts end with a short block. A prompt that continues one has a longer block in its place.
        """
        keys, ends = prompt.keys(size), prompt.ends(size)
        count = next((index for index, key in enumerate(keys) if key not in self._table), len(keys))
        keys, before, rest = keys[:count], [0, *ends][count], ends[count : count + 1]
        parent = keys[-1] if keys else prompt.root(size)
        for end in range(rest[0] - 1, before, -1) if rest else ():
            key = digest(parent, prompt.content(before, end))
            if key in self._table:
                return [*keys, key], [*ends[:count], end]
        return keys, ends[:count]

    def _write(
        self,
        rows: Mapping[Name, Tensor],
        slots: Sequence[int],
        ends: Sequence[int],
        which: Sequence[int],
        size: int,
    ) -> None:
        """Copy the blocks `which` of rows [L, ...] to their slots."""
        if not which or not rows:
            return
        starts = [0, *ends]
        sources = [token for index in which for token in range(starts[index], ends[index])]
        every = places(slots, ends, size)
        targets = [every[token] for token in sources]
        for name, row in rows.items():
            pool = self._pools[name].flatten(0, 1)
            pool[index_of(targets, pool)] = row[index_of(sources, pool)]

    def _read(self, tokens: Sequence[int]) -> dict[Name, Tensor]:
        """Copy the tokens at these places of the pools, each [n, ...]."""
        pools = {name: pool.flatten(0, 1) for name, pool in self._pools.items()}
        return {name: pool[index_of(tokens, pool)] for name, pool in pools.items()}


def places(slots: Sequence[int], ends: Sequence[int], size: int) -> list[int]:
    """Place of each token of a prompt's first blocks among all places of a pool.

    Args:
        slots: of the blocks.
        ends: of the blocks, in tokens of the prompt.
        size: places of a slot.
    """
    blocks = zip(slots, pairwise([0, *ends]), strict=False)
    return [slot * size + token for slot, (start, stop) in blocks for token in range(stop - start)]


def index_of(numbers: Sequence[int], pool: Tensor) -> Tensor:
    """Index on the device of a pool."""
    return torch.tensor(numbers, dtype=torch.long, device=pool.device)


class RecurrentStates:
    """States of recurrent layers after prompts, within a memory limit, by the key of the last block.

    Args:
        max_bytes: the limit; the least recently used are dropped first.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.bytes = max_bytes, 0
        self._states: OrderedDict[bytes, list[States]] = OrderedDict()  # least recently used first

    def find(self, keys: Sequence[bytes]) -> tuple[int, list[States]]:
        """Return the states after the last possible block, and the number of blocks up to it."""
        for count in range(len(keys), 0, -1):
            if keys[count - 1] in self._states:
                self._states.move_to_end(keys[count - 1])
                return count, self._states[keys[count - 1]]
        return 0, []

    def keep(self, key: bytes, states: list[States]) -> None:
        """Store states, unless they exceed the limit alone."""
        if key in self._states or nbytes_of(states) > self.max_bytes:
            return
        self._states[key] = states
        self.bytes += nbytes_of(states)
        while self.bytes > self.max_bytes:
            self.bytes -= nbytes_of(self._states.popitem(last=False)[1])


def nbytes_of(states: Sequence[States]) -> int:
    """Size of the states of all layers."""
    return sum(state.nbytes for layer in states for state in layer.values())


def identify(
    model: PreTrainedModel,
    inputs: Inputs,
    state: int,
    offset: int = 0,
    media: Mapping[str, Tensor] | None = None,
) -> PromptIdentity | None:
    """Identify a prompt by everything that its keys depend on; None if it cannot be prefilled in two parts.

    This is the case if tokens attend to later ones beyond their own image (PaliGemma, which marks them by
    `token_type_ids`; Gemma 4, which marks images by token types without M-RoPE), if images have no
    placeholder tokens (cross-attention), if a placeholder has no image, or if an argument is unknown.

    Args:
        model: the target's.
        inputs: its arguments, batch size 1, including `position_ids` [.., L].
        state: hash of the model's state; see `state_of`.
        offset: position of the token after the prompt, minus L.
        media: images as the caller passed them, mostly in host memory; None for those of the inputs.
    """
    if not is_causal(model, inputs):
        return None
    own = media_of(inputs)
    pixels = {name: own[name] if media is None else media[name] for name in own}
    tokens = own_copy(inputs["input_ids"][0])
    on_host = {"input_ids": tokens[None], **pixels}
    items = find_items(model.config, on_host, pixels)
    if bool(pixels) != bool(items):
        return None
    positions = own_copy(inputs["position_ids"]).reshape(-1, len(tokens))
    return PromptIdentity(tokens, positions, items, state, offset)


def media_of(inputs: Mapping[str, object]) -> Keywords:
    """The arguments that are not per token: images, clips and their sizes."""
    return {name: value for name, value in inputs.items() if name not in PER_TOKEN}


def is_causal(model: PreTrainedModel, inputs: Mapping[str, object]) -> bool:
    """True if a prompt's arguments are known, and none marks tokens that attend to later ones.

    Tokens of an image may attend to those of their own image, which is never split.
    """
    if TYPES in inputs and model.config.model_type not in OWN_IMAGE:
        return False
    media = media_of(inputs)
    known = media.keys() <= MEDIA and all(isinstance(value, Tensor) for value in media.values())
    typed = "mm_token_type_ids" in inputs and not hasattr(getattr(model, "model", None), "get_rope_index")
    return known and not typed


def part_of(inputs: Inputs, prompt: PromptIdentity, start: int, stop: int) -> dict[str, Tensor]:
    """Arguments for a part of a prompt: tokens, positions and images from `start` to `stop`."""
    first: dict[str, int] = {}  # row of each argument after the images before `start`, and before `stop`
    last: dict[str, int] = {}
    for item in prompt.items:
        for rows, edge in ((first, start), (last, stop)):
            if item.stop <= edge:
                rows |= {name: end for name, (_, end) in item.rows.items()}
    part = {
        name: value[..., start:stop] if name in PER_TOKEN else value[first.get(name, 0) : last.get(name, 0)]
        for name, value in inputs.items()
    }
    return {name: value for name, value in part.items() if len(value)}


def own_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to host memory; callers may modify theirs later."""
    return tensor.detach().to("cpu", copy=True)
