"""Training of a reference model that draws coarse tokens and refines them: CTF (2503.16194).

The training begins with a LlamaGen of captions, and does not change its text encoder and image tokenizer.
Coarse tokens are clusters of code vectors by k-means; their weights begin as the means of their entries'
weights.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import T5EncoderModel

from mmspec.errors import InputError
from mmspec.training.data.images import DROPPED
from mmspec.training.run import RunOptions, Training, flush_subnormals
from mmspec_extras.clusters import cluster_codes
from mmspec_extras.families.ctf.modeling import CTFConfig, CTFForCausalLM
from reference.begun import Kept, evenly_spread, shape_of, trained_llamagen
from reference.image_data import ImageBatch, image_batch
from reference.image_model import BESIDE_OBJECT, beside_objects, caption_vectors
from reference.trainer import train_on_scenes

PROGRAM = "python -m extras.reference"
STAGE = 15  # of the seeds of the scenes
CHECK_SCENES = 32
DEFAULT_MINUTES = 30.0


def full_clusters(codebook: Tensor, count: int) -> Tensor:
    """Return the cluster [V] of each code vector [V, d]; an empty cluster takes an entry of the largest one.

    Raises:
        InputError: there are more clusters than entries, or none.
    """
    if not 1 <= count <= len(codebook):
        raise InputError("clusters", count, f"must be from 1 to {len(codebook)}, the size of the codebook")
    found = cluster_codes(codebook, count)
    for cluster in range(count):
        if not (found == cluster).any():
            found[(found == found.mode().values).nonzero()[0]] = cluster
    return found


@torch.no_grad()
def coarsened(folder: Path, clusters: Tensor, refiner_layers: int) -> CTFForCausalLM:
    """Return a model of coarse tokens with a refiner, both with the weights of a LlamaGen of captions.

    Args:
        folder: folder of the trained LlamaGen.
        clusters: [V] cluster of each entry of its codebook.
        refiner_layers: number of layers of the refiner, copied from evenly spread layers of the LlamaGen.

    Raises:
        InputError: the LlamaGen is not conditioned on captions, or has fewer layers.
    """
    trained = trained_llamagen(folder, refiner_layers, "refiner_layers")
    depth, count = trained.config.num_hidden_layers, 1 + int(clusters.max())
    shape = shape_of(trained) | {"vocab_size": count, "codebook_size": trained.config.vocab_size}
    model = CTFForCausalLM(CTFConfig(num_hidden_layers=depth, refiner_layers=refiner_layers, **shape))
    weights = trained.state_dict()
    whole = ("model.embed_tokens.weight", "lm_head.weight")
    shares = F.one_hot(clusters, count).T.float()
    means = {name: shares @ weights[name] / shares.sum(1, keepdim=True) for name in whole}
    missing, _ = model.load_state_dict(weights | means, strict=False)
    if any(not name.startswith("refiner.") for name in missing):
        raise ValueError(f"weights are missing in the LlamaGen: {missing}")
    refiner = model.refiner
    refiner.cluster_of.copy_(clusters)
    refiner.embed_tokens.weight.copy_(means[whole[0]])
    refiner.lm_head.load_state_dict(trained.lm_head.state_dict())
    refiner.norm.load_state_dict(trained.model.norm.state_dict())
    for layer, place in zip(refiner.layers, evenly_spread(refiner_layers, depth), strict=True):
        layer.load_state_dict(trained.model.layers[place].state_dict())
    model.generation_config = trained.generation_config
    return model


class CoarseLoss(nn.Module):
    """Cross-entropy of coarse tokens, and of the fine tokens that the refiner predicts from them.

    Args:
        transformer: the model to train, with its refiner.
        text_encoder: encoder of the captions; not trained.
    """

    def __init__(self, transformer: CTFForCausalLM, text_encoder: T5EncoderModel) -> None:
        super().__init__()
        self.transformer = transformer
        self.text_encoder = text_encoder.requires_grad_(False)

    def forward(self, batch: ImageBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, and figures: nats per coarse and per fine token, share of right fine tokens."""
        refiner, tokens = self.transformer.refiner, batch.tokens
        coarse = refiner.cluster_of[tokens]
        losses = F.cross_entropy(self.read(batch, coarse).transpose(1, 2), coarse, reduction="none")
        weights = 1 + (BESIDE_OBJECT - 1) * beside_objects(batch.place_labels[..., 0] > 0)
        refined = refiner(coarse)
        fine = F.cross_entropy(refined.transpose(1, 2), tokens, reduction="none")
        loss = ((losses + fine) * weights).sum() / weights.sum()
        right = (refined.argmax(-1) == tokens).float()
        return loss, {"nats": losses.mean(), "fine": fine.mean(), "refined": right.mean()}

    def read(self, batch: ImageBatch, coarse: Tensor) -> Tensor:
        """Return logits [B, N, K] of coarse tokens [B, N], given the caption and the tokens before each."""
        decoder: Any = self.transformer.model
        vectors = caption_vectors(decoder, self.text_encoder, batch)
        slots = vectors.shape[1]
        seen = F.pad(batch.word_mask, (0, coarse.shape[1] - 1), value=1)
        read = torch.cat([vectors, decoder.embed_tokens(coarse[:, :-1])], dim=1)
        states = decoder(inputs_embeds=read, attention_mask=seen, use_cache=False).last_hidden_state
        logits: Tensor = self.transformer.lm_head(states[:, slots - 1 :]).float()
        return logits


@flush_subnormals()
def train_coarse(
    out: str | Path,
    *,
    start: str | Path,
    clusters: int = 128,
    refiner_layers: int = 4,
    **how: Unpack[RunOptions],
) -> Path:
    """Train a reference model of coarse tokens with its refiner, and save it as one folder.

    Args:
        out: the folder to write; its matrices are stored in float8.
        start: the trained LlamaGen of captions to begin with; its text encoder, tokenizers and reader are
            kept.
        clusters: number of coarse tokens.
        refiner_layers: number of layers of the refiner.
        how: see `RunOptions`; the default is 30 minutes, with 16 images per step and process.

    Returns:
        The folder. Its `training.json` records the settings of the training.

    Raises:
        InputError: `start` is not a LlamaGen of captions, or has too few layers or codebook entries.
    """
    out, start = Path(out), Path(start)
    training = Training(out, how, minutes=DEFAULT_MINUTES, batch_size=16)
    kept = Kept(start, training.accelerator.device)
    found = full_clusters(kept.vq.quantize.embedding.weight.detach().cpu(), clusters)
    model = coarsened(start, found, refiner_layers)

    def batch_of(seeds: np.ndarray, **which: Any) -> ImageBatch:
        return kept.with_tokens(image_batch(seeds, kept.tokenizer, grid=model.config.grid_size, **which))

    train_on_scenes(
        training,
        CoarseLoss(model, kept.text_encoder),
        partial(batch_of, dropped=DROPPED),
        batch_of(np.arange(CHECK_SCENES), dropped=0.0),
        title="coarse tokens, and their refiner",
        stage=STAGE,
    )
    options = {"clusters": clusters, "refiner-layers": refiner_layers}
    return kept.finish(training, model, out, "coarse", options, program=PROGRAM)
