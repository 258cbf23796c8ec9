"""Training of an axial transformer (1912.12180), which begins with parts of a LlamaGen of captions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import T5EncoderModel

from mmspec.training.data.images import DROPPED
from mmspec.training.run import RunOptions, Training, flush_subnormals
from mmspec_extras.families.axial.modeling import AxialConfig, AxialForCausalLM
from reference.begun import Kept, evenly_spread, shape_of, trained_llamagen
from reference.image_data import ImageBatch, image_batch
from reference.image_model import caption_vectors
from reference.trainer import train_on_scenes

__all__ = ["AxialLoss", "begin_axial", "train_axial"]

PROGRAM = "python -m extras.reference"
STAGE = 17  # of the seeds of the scenes
CHECK_SCENES = 32
DEFAULT_MINUTES = 30.0


@torch.no_grad()
def begin_axial(folder: Path, outer_layers: int, inner_layers: int) -> AxialForCausalLM:
    """Return a model with the inner layers, embeddings and head of a LlamaGen, and a new outer stack."""
    trained = trained_llamagen(folder, inner_layers, "inner_layers")
    sizes = {"num_hidden_layers": inner_layers, "outer_layers": outer_layers}
    model = AxialForCausalLM(AxialConfig(**sizes, **shape_of(trained)))
    weights = {name: each for name, each in trained.state_dict().items() if ".layers." not in name}
    model.load_state_dict(weights, strict=False)
    places = evenly_spread(inner_layers, trained.config.num_hidden_layers)
    for layer, place in zip(model.model.layers, places, strict=True):
        layer.load_state_dict(trained.model.layers[place].state_dict())
    model.generation_config = trained.generation_config
    return model


class AxialLoss(nn.Module):
    """Cross-entropy of the tokens of images, in one pass over all rows.

    Args:
        transformer: the model to train.
        text_encoder: encoder of the captions; not trained.
    """

    def __init__(self, transformer: AxialForCausalLM, text_encoder: T5EncoderModel) -> None:
        super().__init__()
        self.transformer = transformer
        self.text_encoder = text_encoder.requires_grad_(False)

    def forward(self, batch: ImageBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, and the figure: nats per token."""
        vectors = caption_vectors(self.transformer.model, self.text_encoder, batch)
        heard = batch.word_mask[..., None].to(vectors.dtype)
        begin = (vectors * heard).sum(1) / heard.sum(1)
        logits = self.transformer.image_logits(begin, batch.tokens)
        nats = F.cross_entropy(logits.transpose(1, 2), batch.tokens)
        return nats, {"nats": nats}


@flush_subnormals()
def train_axial(
    out: str | Path,
    *,
    start: str | Path,
    outer_layers: int = 6,
    inner_layers: int = 2,
    **how: Unpack[RunOptions],
) -> Path:
    """Train a reference axial transformer, and save it as one folder.

    Args:
        out: the folder to write; its matrices are stored in float8.
        start: the trained LlamaGen of captions to begin with; its text encoder and tokenizers are kept.
        outer_layers, inner_layers: layers of the two stacks.
        how: see `RunOptions`; the default is 30 minutes, with 16 images per step and process.

    Returns:
        The folder. Its `training.json` records the settings of the training.

    Raises:
        InputError: `start` is not a LlamaGen of captions, or has too few layers.
    """
    out, start = Path(out), Path(start)
    training = Training(out, how, minutes=DEFAULT_MINUTES, batch_size=16)
    kept = Kept(start, training.accelerator.device)
    model = begin_axial(start, outer_layers, inner_layers)

    def batch_of(seeds: np.ndarray, **which: Any) -> ImageBatch:
        return kept.with_tokens(image_batch(seeds, kept.tokenizer, grid=model.config.grid_size, **which))

    train_on_scenes(
        training,
        AxialLoss(model, kept.text_encoder),
        partial(batch_of, dropped=DROPPED),
        batch_of(np.arange(CHECK_SCENES), dropped=0.0),
        title="axial transformer",
        stage=STAGE,
    )
    options = {"outer-layers": outer_layers, "inner-layers": inner_layers}
    return kept.finish(training, model, out, "axial", options, program=PROGRAM)
