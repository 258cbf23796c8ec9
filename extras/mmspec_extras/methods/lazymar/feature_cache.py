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

__all__ = ["FeatureCache", "FeatureCaching"]


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
        reuse_guidance: whether, with guidance, partial forward passes compute only the conditional rows, and
            reuse the difference to the unconditional ones from the last full forward pass.

    Raises:
        InputError: a value is out of range.
    """

    refresh: int = 9
    warm_up: int = 6
    share: float = 0.1
    test_layer: int = 3
    reuse_guidance: bool = True

    def __post_init__(self) -> None:
        if not is_integer(self.refresh) or self.refresh < 1:
            raise InputError(
                "refresh",
                self.refresh,
                "must be a positive integer; 1 computes everything in each forward pass",
            )
        if not is_integer(self.warm_up) or self.warm_up < 1:
            raise InputError(
                "warm_up",
                self.warm_up,
                "must be a positive integer: the first forward pass computes everything",
            )
        require_number("share", self.share, 0.0, 1.0, "must be between 0 and 1")
        if not is_integer(self.test_layer) or self.test_layer < 1:
            # The values of block 0 depend on the inputs alone, and those of old tokens do not change.
            raise InputError("test_layer", self.test_layer, "must be a positive integer")
        if not isinstance(self.reuse_guidance, bool):
            raise InputError("reuse_guidance", self.reuse_guidance, "must be True or False")

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

    def nbytes(self) -> int:
        """Return the size of the cache in bytes."""
        return sum(each.nbytes for each in (*self.keys, *self.values, self.tested))

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

    `FeatureCaching` defines which forward passes are full. If guidance is reused, the cache holds only the
    conditional rows, and the difference of both conditions in the last full forward pass.

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
        self.model, self.caching = model, caching
        self.reuses_guidance = caching.reuse_guidance and copies > 1
        config, like = model.config, model.mask_token
        self.buffer = config.buffer_size
        self.places = places = config.buffer_size + config.image_tokens
        kept = rows if self.reuses_guidance else rows * copies
        self.encoder = CachedBlocks(model.encoder_blocks, caching.test_layer, places, like, kept)
        self.decoder = CachedBlocks(model.decoder_blocks, caching.test_layer, places, like, kept)
        self.known = torch.zeros(kept, config.image_tokens, dtype=torch.bool, device=like.device)
        self.features = like.new_zeros(kept, places + 1, config.hidden_size)  # of the encoder
        self.hidden = like.new_zeros(kept, places + 1, config.hidden_size)  # after the decoder
        self.difference: Tensor | None = None
        self.forwards = 0

    def conditions(self, tokens: Tensor, known: Tensor, labels: Tensor, cells: Tensor) -> Tensor:
        """Read the known tokens, and return the conditions [R, N, D] of all cells, some of them cached.

        The host reads the device once, as often as without a cache.

        Args:
            tokens, known, labels: see the model; conditional rows come before unconditional ones.
            cells: [B, k] requested cells, which every forward pass computes.
        """
        is_full = self.caching.is_full(self.forwards)
        self.forwards += 1
        if is_full:
            return self._compute_all(tokens, known, labels)
        kept = len(self.known)
        cells = cells.repeat(kept // len(cells), 1)
        conditions = self._compute_some(tokens[:kept], known[:kept], labels[:kept], cells)
        if self.difference is None:
            return conditions
        return torch.cat([conditions, conditions - self.difference])

    def nbytes(self) -> int:
        """Return the size of the cache in bytes."""
        more = 0 if self.difference is None else self.difference.nbytes
        held = self.encoder.nbytes() + self.decoder.nbytes() + self.features.nbytes + self.hidden.nbytes
        return held + self.known.nbytes + more

    def _compute_all(self, tokens: Tensor, known: Tensor, labels: Tensor) -> Tensor:
        """Compute `MARForImageGeneration.conditions`, and keep the values that later forward passes reuse."""
        model, kept = self.model, len(self.known)
        counts = known.sum(1)
        fewest, most = torch.stack(counts.aminmax()).tolist()
        order, is_seen = known_first(known, counts, most)
        hidden = model.encoder_inputs(tokens, order, labels)
        mask = None if fewest == most else model.key_mask(is_seen, hidden.dtype)
        at = self._places(order)
        features = model.features(self.encoder.compute(hidden, at, mask)[0])
        put(self.features, at[:kept], features[:kept])

        hidden = model.decoder_inputs(features, order, is_seen)
        hidden, _ = self.decoder.compute(hidden, self._everywhere(len(tokens)), None)
        self.hidden[:, :-1] = hidden[:kept]
        self.known = known[:kept].clone()
        conditions = model.read_out(hidden)
        if self.reuses_guidance:
            self.difference = conditions[:kept] - conditions[kept:]
        return conditions

    def _compute_some(self, tokens: Tensor, known: Tensor, labels: Tensor, cells: Tensor) -> Tensor:
        """Return conditions [B, N, D], new for `cells` [B, k] and for the tokens that changed most."""
        model, buffer = self.model, self.buffer
        new, counts = known & ~self.known, known.sum(1)
        wanted = new.scatter(1, cells, True)
        reads = self._count(new, counts + buffer)
        computes = self._count(wanted, torch.full_like(counts, self.places))
        sizes = torch.stack([*counts.aminmax(), reads.max(), computes.max()])
        fewest, most, most_reads, most_computes = sizes.tolist()

        order, is_seen = known_first(known, counts, most)
        hidden = model.encoder_inputs(tokens, order, labels)
        mask = None if fewest == most else model.key_mask(is_seen, hidden.dtype)
        at = self._places(order)
        is_new = torch.cat([new.new_zeros(len(new), buffer), pick(new, order)], dim=1)
        is_padding = torch.cat([new.new_zeros(len(new), buffer), ~is_seen], dim=1)
        choice = Choice(is_new, is_padding, reads, most_reads, model.key_mask(known, hidden.dtype))
        hidden, places = self.encoder.compute(hidden, at, mask, choice)
        put(self.features, places, model.features(hidden))

        hidden = model.decoder_inputs(pick(self.features, at), order, is_seen)
        wanted = torch.cat([new.new_zeros(len(new), buffer), wanted], dim=1)
        choice = Choice(wanted, torch.zeros_like(wanted), computes, most_computes, None)
        hidden, places = self.decoder.compute(hidden, self._everywhere(len(known)), None, choice)
        put(self.hidden, places, hidden)
        self.known = known.clone()
        return model.read_out(self.hidden[:, :-1])

    def _count(self, required: Tensor, total: Tensor) -> Tensor:
        """[B] number of tokens to compute, of `total` [B]: the required ones and the share of the others."""
        count = required.sum(1)
        return count + (self.caching.share * (total - count)).round().long()

    def _places(self, order: Tensor) -> Tensor:
        """[B, buffer + n] places of the buffer and of cells at `order`; padding is at unknown cells."""
        return torch.cat([self._everywhere(len(order))[:, : self.buffer], order + self.buffer], dim=1)

    def _everywhere(self, rows: int) -> Tensor:
        """[B, P] all places but the unused one."""
        return torch.arange(self.places, device=self.known.device).expand(rows, -1)


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

    With keys and values [B, m, H, d] of those tokens alone, this is the block's own forward method, bit for
    bit.
    """
    attention = block.attn
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if attention.fused_attn:
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    else:
        scores = (query * attention.scale) @ key.transpose(-2, -1)
        weights = (scores if mask is None else scores + mask).softmax(dim=-1)
        mixed = attention.attn_drop(weights) @ value
    mixed = attention.proj_drop(attention.proj(mixed.transpose(1, 2).flatten(2)))
    hidden = hidden + block.drop_path1(block.ls1(mixed))
    outputs: Tensor = hidden + block.drop_path2(block.ls2(block.mlp(block.norm2(hidden))))
    return outputs
