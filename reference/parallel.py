"""Training of scenes-parallel: a LlamaGen with queries (LPD), which decides many cells in a forward pass.

The model starts from a LlamaGen of captions, whose text encoder and image tokenizer are frozen. A sequence
contains an image twice: as tokens in groups of some order, and as queries. Queries of a group attend to each
other and to the tokens of earlier groups. Tokens do not attend to queries (LPD, 2507.01957, section 3.2).

Groups are drawn in two ways, so that the model learns every decoding order: many groups whose sizes grow like
a cosine, or a few groups and then all remaining cells at once, as in decoding by confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import T5EncoderModel

from mmspec.core.image_grid import ImageGrid
from mmspec.core.random_stream import RandomStream
from mmspec.families.lpd.modeling import LPDConfig, LPDForCausalLM
from mmspec.families.parallel_images.orders import (
    DecodingOrder,
    cells_by_forward,
    diagonal_order,
    group_sizes,
)
from mmspec.scenes.reader import label_heads
from mmspec.training.data.images import DROPPED
from mmspec.training.run import RunOptions, Training, flush_subnormals
from reference.begun import Kept, evenly_spread, shape_of, trained_llamagen
from reference.image_data import ImageBatch, image_batch
from reference.image_model import BESIDE_OBJECT, caption_vectors, place_loss
from reference.trainer import train_on_scenes
from reference.vlm_data import PATCH_CLASSES

__all__ = ["QueryLoss", "begin_with", "beside_decided", "queries_see", "sample_groups", "train_parallel"]

STAGE = 14  # key of the seeds: no other training draws the same scenes
CHECK_SCENES = 32
DEFAULT_MINUTES = 60.0
DEFAULT_LAYERS = 6
MASKED_SHARE = 0.25  # share of the steps that predict all remaining cells of an image at once
ORDERS = {"random": 0.3, "proximity": 0.4, "diagonal": 0.2, "raster": 0.1}
MOST_STEPS = 64  # for an image of 16 x 16 tokens
ITERATIONS = (4, 16)  # fewest and most iterations of decoding by confidence
PLACE_WEIGHT = 0.5
POSITION_SCALE = 0.02


def sample_groups(grid: ImageGrid, batch: int, noise: np.random.Generator) -> tuple[Tensor, list[int]]:
    """Draw orders of the cells [B, N], and the sizes of the groups, which are the same for all images."""
    cells = grid.cells
    order = str(noise.choice(list(ORDERS), p=list(ORDERS.values())))
    if noise.random() < MASKED_SHARE:
        counts = cells_by_forward(cells, min(cells, int(noise.integers(*ITERATIONS, endpoint=True))))
        known = counts[: int(noise.integers(len(counts)))]
        sizes = [*known, cells - sum(known)]
        order = "random" if order in ("diagonal", "raster") else order
    elif order == "diagonal":
        sizes = [len(group) for group in diagonal_order(grid.rows, grid.columns)]
    else:
        fewest, most = max(2, cells // 32), max(2, MOST_STEPS * cells // 256)
        sizes = group_sizes(cells, int(noise.integers(fewest, most, endpoint=True)))
    if order == "proximity":
        # drawing an order is slow, so the batch uses the eight symmetries of one
        random = RandomStream.from_seed(int(noise.integers(2**31)), 1)
        steps = min(len(sizes), cells)
        one = DecodingOrder(order, generation_steps=steps).draw(grid, random)[0].numpy()
        orders = [mirrored(one, grid, int(noise.integers(8))) for _ in range(batch)]
        return torch.from_numpy(np.stack(orders)), sizes
    if order == "random":
        return torch.from_numpy(np.stack([noise.permutation(cells) for _ in range(batch)])), sizes
    return DecodingOrder(order).draw(grid, RandomStream.from_seed(0, batch)), sizes


def mirrored(order: np.ndarray, grid: ImageGrid, which: int) -> np.ndarray:
    """Return one of the eight symmetries of an order of the cells of a square."""
    image = np.arange(grid.cells).reshape(grid.rows, grid.columns)
    image = np.rot90(image if which < 4 else image.T, which % 4)
    turned: np.ndarray = image.reshape(-1)[order]
    return turned


def queries_see(slots: int, sizes: Sequence[int]) -> Tensor:
    """Return the attention mask of a sequence: condition, tokens of all groups but the last, and queries.

    Args:
        slots: slots of the condition, which have the causal mask.
        sizes: cells of each group.

    Returns:
        [S, S] bool; True where the place of the row attends to the place of the column.
    """
    group = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    tokens = group[: len(group) - sizes[-1]]
    place = torch.arange(slots)
    # ranks: a slot, then the queries of a group, then its tokens; equal ranks attend to each other
    read = torch.cat([place - slots, 2 * tokens + 1, 2 * group])
    is_query = torch.arange(len(read)) >= slots + len(tokens)
    before = read[:, None] >= read
    return before & (~is_query | (read[:, None] == read))


@dataclass(frozen=True)
class SeededImages:
    """Images, the seed of their decoding orders, and the kind of order; None draws the kind too."""

    batch: ImageBatch
    seed: int
    order: DecodingOrder | None = None

    def to(self, device: torch.device) -> SeededImages:
        """Move all tensors."""
        return replace(self, batch=self.batch.to(device))


class QueryLoss(nn.Module):
    """Cross entropy of the tokens at all queries, and an auxiliary loss on the labels of their places.

    The auxiliary loss reads the states in the middle layer. Cells next to decided cells of an object have a
    larger weight, because background is most of an image. The weight depends on decided cells only, so that
    it biases no distribution.

    Args:
        transformer: the model in training.
        text_encoder: text encoder of the captions; it is frozen.
    """

    def __init__(self, transformer: LPDForCausalLM, text_encoder: T5EncoderModel) -> None:
        super().__init__()
        config = transformer.config
        self.transformer = transformer
        self.text_encoder = text_encoder.requires_grad_(False)
        self.grid = ImageGrid(config.grid_size, config.grid_size, config.vocab_size)
        self.middle = config.num_hidden_layers // 2
        self.place_heads = label_heads(config.hidden_size, PATCH_CLASSES)

    def forward(self, images: SeededImages) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, and figures: nats per token, and the accuracy of the labels of places."""
        batch = images.batch
        tokens, device = batch.tokens, batch.tokens.device
        if images.order is None:
            order, sizes = sample_groups(self.grid, len(tokens), np.random.default_rng([images.seed, STAGE]))
        else:
            order = images.order.draw(self.grid, RandomStream.from_seed(images.seed, len(tokens)))
            sizes = images.order.counts(self.grid)
        order = order.to(device)
        logits, states = self.read(batch, order, sizes)
        losses = F.cross_entropy(logits.transpose(1, 2), tokens.gather(1, order), reduction="none")
        covered = batch.place_labels[..., 0] > 0
        group = torch.arange(len(sizes), device=device).repeat_interleave(torch.tensor(sizes, device=device))
        when = torch.empty_like(order).scatter_(1, order, group.expand_as(order))
        weights = 1 + (BESIDE_OBJECT - 1) * beside_decided(covered, when, self.grid.columns).gather(1, order)
        raster = torch.empty_like(states).scatter_(1, order[..., None].expand_as(states), states)
        places, placed = place_loss(raster, batch, self.place_heads)
        loss = (losses * weights).sum() / weights.sum() + PLACE_WEIGHT * places
        return loss, {"nats": losses.mean(), "places": placed}

    def read(self, batch: ImageBatch, order: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return logits [B, N, V] and states of the middle layer [B, N, D] of the queries, in their order."""
        decoder: Any = self.transformer.model
        vectors = caption_vectors(decoder, self.text_encoder, batch)
        slots, known = vectors.shape[1], order[:, : order.shape[1] - sizes[-1]]
        queries = decoder.mask_token.expand(*order.shape, -1)
        embedded = [vectors, decoder.embed_tokens(batch.tokens.gather(1, known)), queries]
        first = torch.arange(slots, device=order.device).expand(len(order), -1)
        places = torch.cat([first, known + slots, order + slots], 1)
        sees = queries_see(slots, sizes).to(order.device)
        heard = F.pad(batch.word_mask.bool(), (0, len(sees) - slots), value=True)
        itself = torch.eye(len(sees), dtype=torch.bool, device=order.device)
        read = decoder(
            inputs_embeds=torch.cat(embedded, 1),
            position_ids=places,
            attention_mask=(sees & heard[:, None] | itself)[:, None],  # padding needs at least one key
            use_cache=False,
            output_hidden_states=True,
        )
        count = order.shape[1]
        logits: Tensor = self.transformer.lm_head(read.last_hidden_state[:, -count:]).float()
        return logits, read.hidden_states[self.middle][:, -count:]


def beside_decided(covered: Tensor, when: Tensor, columns: int) -> Tensor:
    """Mark cells with a neighbour that belongs to an object and is decided earlier.

    Args:
        covered: [B, N] whether an object covers each cell of a grid.
        when: [B, N] group of each cell.
        columns: columns of the grid.

    Returns:
        [B, N] 0 or 1.
    """
    late = when.max() + 1
    time = when.where(covered, late).unflatten(1, (-1, columns))
    rows, padded = time.shape[1], F.pad(time, (1, 1, 1, 1), value=int(late))
    shifts = [(down, across) for down in range(3) for across in range(3) if (down, across) != (1, 1)]
    earliest = torch.stack([padded[:, i : i + rows, j : j + columns] for i, j in shifts]).amin(0)
    return (earliest.flatten(1) < when).long()


def begin_with(folder: Path, layers: int) -> LPDForCausalLM:
    """Build a model with queries from `layers` evenly spread layers of a trained LlamaGen of captions.

    Raises:
        InputError: the LlamaGen is not conditioned on captions, or has fewer layers.
    """
    trained = trained_llamagen(folder, layers)
    kept = evenly_spread(layers, trained.config.num_hidden_layers)
    trained.model.layers = nn.ModuleList(trained.model.layers[place] for place in kept)
    model = LPDForCausalLM(LPDConfig(num_hidden_layers=layers, **shape_of(trained)))
    model.load_state_dict(trained.state_dict(), strict=False)
    decoder: Any = model.model
    with torch.no_grad():
        decoder.mask_token.copy_(decoder.embed_tokens.weight.mean(0, keepdim=True))
        decoder.position_embedding.weight.normal_(std=POSITION_SCALE)
        decoder.position_embedding.weight[: model.config.prefix_length] = 0.0
    model.generation_config = trained.generation_config
    return model


@flush_subnormals()
def train_parallel(
    out: str | Path, *, start: str | Path, layers: int = DEFAULT_LAYERS, **how: Unpack[RunOptions]
) -> Path:
    """Train a reference model with queries, and save it as one folder.

    Args:
        out: the folder to write; its matrices are stored in float8.
        start: the trained LlamaGen of captions to start from. The model reuses its text encoder, tokenizers
            and reader.
        layers: number of its layers to keep.
        how: see `RunOptions`; by default 60 minutes, with 16 images per step and process.

    Returns:
        The folder. Its `training.json` records the training.

    Raises:
        InputError: `start` is not a LlamaGen of captions, or has fewer layers.
    """
    out, start = Path(out), Path(start)
    training = Training(out, how, minutes=DEFAULT_MINUTES, batch_size=16)
    model = begin_with(start, layers)
    kept = Kept(start, training.accelerator.device)

    def batch_of(seeds: np.ndarray, order: DecodingOrder | None = None, **which: Any) -> SeededImages:
        batch = image_batch(seeds, kept.tokenizer, grid=model.config.grid_size, **which)
        return SeededImages(kept.with_tokens(batch), int(seeds[0]), order)

    train_on_scenes(
        training,
        QueryLoss(model, kept.text_encoder),
        partial(batch_of, dropped=DROPPED),
        batch_of(np.arange(CHECK_SCENES), order=DecodingOrder(), dropped=0.0),
        title="image tokens, in any order",
        stage=STAGE,
        outer=("mask_token",),
    )
    return kept.finish(training, model, out, "parallel", {"layers": layers}, within="")
