"""Feature caching for MAR (2503.12450): most forward passes compute some tokens and reuse the others.

Each forward pass of decoding changes a few tokens of an image, and hardly changes most hidden states.
Therefore only some forward passes are full: they compute all tokens. The partial ones between them compute
the new tokens, the requested ones, and those that changed most.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mmspec.core.indexing import pick, put
from mmspec.errors import InputError
from mmspec.families.mar.modeling import MARConfig, MARForImageGeneration, known_first
from mmspec.validation import is_integer, require_number


@dataclass(frozen=True)
class FeatureCaching:
    """Settings of feature caching: which forward passes are full, and the size of the others (2503.12450).

    Args:
        refresh: distance from one full forward pass to the next; 1 is no caching.
        warm_up: number of full forward passes at the beginning, at least 1.
        share: share of the optional tokens that a partial forward pass computes: those that changed most.
            With 1 the result is that of a full forward pass, up to rounding. The paper uses a table by
            forward pass instead, which falls from 1 to 0.05.
        test_layer: index of the block, in encoder and decoder alike, whose values measure how much a token
            changed. All blocks before it compute all tokens.

    Raises:
        InputError: a value is out of range.
    """

    refresh: int = 9
    warm_up: int = 6
    share: float = 0.1
    test_layer: int = 3

    def __post_init__(self) -> None:
        require_number("share", self.share, 0.0, 1.0, "must be between 0 and 1")
        # The values of block 0 depend on the inputs alone, and those of old tokens do not change.
        for name in ("refresh", "warm_up", "test_layer"):
            if not is_integer(value := getattr(self, name)) or value < 1:
                raise InputError(name, value, "must be a positive integer")

    def check(self, config: MARConfig) -> None:
        """Raise InputError if the model has no such test layer."""
        layers = min(config.encoder_layers, config.decoder_layers)
        if self.test_layer >= layers:
            rule = f"must be between 1 and {layers - 1}" if layers > 1 else "cannot be used"
            raise InputError("test_layer", self.test_layer, f"{rule}: the model has {layers} blocks")

    def is_full(self, forward: int) -> bool:
        """Return whether forward pass number `forward`, counted from 0, computes all tokens."""
        return forward < self.warm_up or (forward - self.warm_up + 1) % self.refresh == 0


class Choice(NamedTuple):
    """Choice among given tokens: those that a forward pass computes through all blocks.

    Attributes:
        required, absent: [B, n] whether each token is computed in any case, and whether it is padding.
        counts, most: [B] number of computed tokens in each row, and the largest number, on the host.
        mask: [B, 1, 1, P] added to the attention scores of all places, or None.
    """

    required: Tensor
    absent: Tensor
    counts: Tensor
    most: int
    mask: Tensor | None


class CachedBlocks:
    """Cached keys and values of the blocks of an encoder or a decoder, from the test layer on, by place.

    Places are those of the buffer, then the cells of the image, then one unused place. If rows choose
    different numbers of tokens, the padding of shorter rows is written there, so that rows stay independent.

    Args:
        blocks: the timm blocks as MAR builds them: without gates and without norms after the attention.
        test_layer: index of the block that measures changes.
        places: number P of places.
        like: a weight, for dtype and device.
        rows: number of rows of the batch.
    """

    def __init__(self, blocks: Iterable[Any], test_layer: int, places: int, like: Tensor, rows: int) -> None:
        every = list(blocks)
        # Blocks before the test layer always compute all tokens and need no cache.
        self.before, self.blocks = every[:test_layer], every[test_layer:]
        attention = every[test_layer].attn
        shape = rows, places + 1, attention.num_heads, attention.head_dim
        self.keys = [like.new_zeros(shape) for _ in self.blocks]
        self.values = [like.new_zeros(shape) for _ in self.blocks]
        # Values of the test layer when a token last ran through all blocks, so that small changes add up.
        self.tested = like.new_zeros(shape)
        self.held = [*self.keys, *self.values, self.tested]

    def compute(
        self, hidden: Tensor, places: Tensor, mask: Tensor | None, choice: Choice | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run all blocks on all tokens, or the test layer and later blocks on chosen tokens.

        Other tokens keep their keys and values in blocks after the test layer.

        Args:
            hidden: [R, n, D] inputs of the first block; the cache keeps as many first rows as it has.
            places: [R, n] place of each token.
            mask: [R, 1, 1, n] added to attention scores, or None.
            choice: the chosen tokens; None for all.

        Returns:
            [R, m, D] hidden states of the chosen tokens after the last block, and their places [R, m].
        """
        rows = len(self.tested)
        for block in self.before:
            hidden = block(hidden, attn_mask=mask)
        for layer, block in enumerate(self.blocks):
            query, key, value = project(block, hidden)
            self._keep(layer, places, key, value)
            if layer == 0:
                if choice is not None:
                    chosen, is_chosen = self._choose(value, places, choice)
                    hidden, query, value = (pick(each, chosen) for each in (hidden, query, value))
                    places = pick(places, chosen).where(is_chosen, self.tested.shape[1] - 1)
                put(self.tested, places[:rows], value[:rows])
            if choice is not None:
                key, value, mask = self.keys[layer][:, :-1], self.values[layer][:, :-1], choice.mask
            hidden = finish(block, hidden, query, key, value, mask)
        return hidden, places

    def _keep(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        rows = len(self.tested)
        put(self.keys[layer], places[:rows], key[:rows])
        put(self.values[layer], places[:rows], value[:rows])

    def _choose(self, value: Tensor, places: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
        """Return indices [B, m] of tokens to compute, and whether each counts.

        Required tokens come first, then those that changed most. The paper takes the cosine of the values to
        those of the forward pass before; the relative distance used here also detects changes of length.
        """
        new, old = value.flatten(2), pick(self.tested, places).flatten(2)
        change = (new - old).norm(dim=-1) / new.norm(dim=-1).clamp_min(torch.finfo(new.dtype).tiny)
        change = change.masked_fill(choice.required, float("inf")).masked_fill(choice.absent, float("-inf"))
        chosen = change.argsort(dim=1, descending=True, stable=True)[:, : choice.most]
        return chosen, torch.arange(choice.most, device=value.device) < choice.counts[:, None]


class FeatureCache:
    """Cached keys, values and features of a batch of images, each from the last forward pass with its token.

    The encoder's part holds keys and values of the blocks from the test layer on, and the features that the
    decoder reads, for the buffer and the cells known in the last forward pass. Other cells are masked,
    because the encoder does not see them. A cell is computed in the first forward pass after its decision.

    The decoder's part holds keys and values of such blocks and the outputs of the last block, for all places.
    The features of a decided cell replace its mask token at the same place.

    With guidance, partial forward passes compute the conditional rows alone, and reuse the difference of both
    conditions from the last full one.

    Differences from the paper: tokens of the buffer, and tokens that the encoder has read before, are also
    computed when they change; the attention of the test layer runs for the chosen tokens only; the reused
    difference is that of the conditions, after the last norm. The denoising head is not cached.

    Args:
        model: the model, in eval mode.
        caching: the settings.
        rows: number B of rows of the batch.
        copies: 2 with guidance, or 1.
    """

    def __init__(self, model: MARForImageGeneration, caching: FeatureCaching, rows: int, copies: int) -> None:
        self.model, self.caching, self.is_guided = model, caching, copies > 1
        config, like = model.config, model.mask_token
        self.buffer = config.buffer_size
        self.places = places = config.buffer_size + config.image_tokens
        self.encoder = CachedBlocks(model.encoder_blocks, caching.test_layer, places, like, rows)
        self.decoder = CachedBlocks(model.decoder_blocks, caching.test_layer, places, like, rows)
        self.known = torch.zeros(rows, config.image_tokens, dtype=torch.bool, device=like.device)
        self.features = like.new_zeros(rows, places + 1, config.hidden_size)  # of the encoder
        self.hidden = like.new_zeros(rows, places + 1, config.hidden_size)  # after the decoder
        self.difference: Tensor | None = None
        self.forwards = 0

    def conditions(self, tokens: Tensor, known: Tensor, labels: Tensor, cells: Tensor) -> Tensor:
        """Read the known tokens, and return the conditions [R, N, D] of all cells, some of them cached.

        The host reads the device once, as often as without a cache.

        Args:
            tokens, known, labels: see the model; conditional rows come before unconditional ones.
            cells: [B, k] requested cells, which every forward pass computes.
        """
        is_full, rows = self.caching.is_full(self.forwards), len(self.known)
        self.forwards += 1
        if is_full:
            conditions = self._compute(tokens, known, labels, None)
            if self.is_guided:
                self.difference = conditions[:rows] - conditions[rows:]
            return conditions
        conditions = self._compute(tokens[:rows], known[:rows], labels[:rows], cells)
        if self.difference is None:
            return conditions
        return torch.cat([conditions, conditions - self.difference])

    def nbytes(self) -> int:
        """Return the size of the cache in bytes."""
        own = self.features, self.hidden, self.known, self.difference
        held = (*self.encoder.held, *self.decoder.held, *own)
        return sum(each.nbytes for each in held if each is not None)

    def _compute(self, tokens: Tensor, known: Tensor, labels: Tensor, cells: Tensor | None) -> Tensor:
        """Return conditions [R, N, D]: new for all cells, or for `cells` [B, k] and what changed most."""
        model, rows, counts = self.model, len(self.known), known.sum(1)
        sizes, new = [*counts.aminmax()], known[:rows] & ~self.known
        if cells is not None:
            wanted = new.scatter(1, cells, True)
            reads = self._count(new, counts + self.buffer)
            computes = self._count(wanted, torch.full_like(counts, self.places))
            sizes += [reads.max(), computes.max()]
        fewest, most, *largest = torch.stack(sizes).tolist()

        order, is_seen = known_first(known, counts, most)
        hidden = model.encoder_inputs(tokens, order, labels)
        mask = None if fewest == most else model.key_mask(is_seen, hidden.dtype)
        everywhere = torch.arange(self.places, device=known.device).expand(len(known), -1)
        at = torch.cat([everywhere[:, : self.buffer], order + self.buffer], 1)  # padding is at unknown cells
        read = computed = None
        if cells is not None:
            buffer = new.new_zeros(rows, self.buffer)
            is_new, is_padding = (torch.cat([buffer, each], 1) for each in (pick(new, order), ~is_seen))
            read = Choice(is_new, is_padding, reads, largest[0], model.key_mask(known, hidden.dtype))
            wanted = torch.cat([buffer, wanted], 1)
            computed = Choice(wanted, torch.zeros_like(wanted), computes, largest[1], None)

        hidden, places = self.encoder.compute(hidden, at, mask, read)
        features = model.features(hidden)
        put(self.features, places[:rows], features[:rows])
        if cells is not None:
            features = pick(self.features, at)
        hidden = model.decoder_inputs(features, order, is_seen)
        hidden, places = self.decoder.compute(hidden, everywhere, None, computed)
        put(self.hidden, places[:rows], hidden[:rows])
        self.known = known[:rows].clone()
        return model.read_out(hidden if cells is None else self.hidden[:, :-1])

    def _count(self, required: Tensor, total: Tensor) -> Tensor:
        """[B] number of tokens to compute, of `total` [B]: the required ones and the share of the others."""
        count = required.sum(1)
        return count + (self.caching.share * (total - count)).round().long()


def project(block: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [B, n, H, d] of a timm block, from its inputs [B, n, D]."""
    attention = block.attn
    mixed = attention.qkv(block.norm1(hidden))
    query, key, value = mixed.unflatten(-1, (3, attention.num_heads, attention.head_dim)).unbind(2)
    return attention.q_norm(query), attention.k_norm(key), value


def finish(
    block: Any, hidden: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """Return the outputs [B, n, D] of a timm block for some tokens, which may also attend to others.

    With keys and values [B, m, H, d] of those tokens alone, this is the block's own forward method with fused
    attention, bit for bit.
    """
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    hidden = hidden + block.attn.proj(mixed.transpose(1, 2).flatten(2))
    outputs: Tensor = hidden + block.mlp(block.norm2(hidden))
    return outputs
