"""Training of a student of a LlamaGen that draws images in few forward passes (2412.17153).

One forward pass of the teacher over a real image gives its distributions. The flow back from the tokens to
noise makes the pairs of noise and tokens that the student learns. The authors follow the flow from noise to
tokens, while the teacher draws an image. Both kinds of pairs are of one function, and have one distribution
if the teacher is that of real images.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import GenerationConfig, T5EncoderModel

from mmspec.atomic_file import atomic_file
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.families.lpd.modeling import LPDForCausalLM
from mmspec.scenes import training_seeds
from mmspec.training.data.sequences import TensorBatch
from mmspec.training.run import RunOptions, Stage, Training, flush_subnormals
from mmspec_extras.families.distilled.flow import noise_of
from mmspec_extras.families.distilled.modeling import DistilledConfig, DistilledForCausalLM
from mmspec_extras.methods.distilled.drafter import first_cells
from reference.begun import Kept, shape_of, trained_llamagen
from reference.image_data import ImageBatch, image_batch
from reference.image_model import caption_vectors
from reference.parallel import begin_with
from reference.trainer import held_out_figures

__all__ = ["DistilledLoss", "NoisyImages", "begin_student", "log_probabilities", "train_distilled"]

PROGRAM = "python -m extras.reference"
STAGE = 23  # of the seeds of the scenes
DEFAULT_MINUTES = 30.0
CHUNK = 32  # images of a file; those of the first are held out
DRAWS = 2  # noise sequences of an image
STEPS = (1, 2, 4)  # forward passes per image that are learnt
DISTANCE_WEIGHT = 1.0


@dataclass(frozen=True)
class NoisyImages(TensorBatch):
    """Images with noise that the flow maps to their tokens.

    Attributes:
        words, word_mask, dropped: [B, n] and [B] captions, none of them dropped; see `ImageBatch`.
        tokens: [B, N].
        noise: [B, N, d].
        begin: number of cells whose tokens the student reads; it reads the noise of the others.
    """

    words: Tensor
    word_mask: Tensor
    dropped: Tensor
    tokens: Tensor
    noise: Tensor
    begin: Tensor


@torch.inference_mode()
def log_probabilities(
    teacher: LlamaGenForCausalLM, text_encoder: T5EncoderModel, batch: ImageBatch, guidance_scale: float
) -> Tensor:
    """Return the teacher's guided log-probabilities [B, N, V] of all cells, given the tokens before each."""
    logits = []
    for dropped in (batch.dropped, torch.ones_like(batch.dropped)):
        vectors = caption_vectors(teacher.model, text_encoder, replace(batch, dropped=dropped))
        read = torch.cat([vectors, teacher.model.embed_tokens(batch.tokens[:, :-1])], 1)
        seen = F.pad(batch.word_mask, (0, batch.tokens.shape[1] - 1), value=1)
        states = teacher.model(inputs_embeds=read, attention_mask=seen, use_cache=False).last_hidden_state
        logits.append(teacher.lm_head(states[:, vectors.shape[1] - 1 :]).float())
    asked, free = logits
    guided: Tensor = free + guidance_scale * (asked - free)
    return guided.log_softmax(-1)


def noisy_images(
    folder: Path, teacher: LlamaGenForCausalLM, kept: Kept, count: int, seed: int, guidance_scale: float
) -> dict[str, Tensor]:
    """Make images with their noise, in chunks that a folder keeps, so that another run begins with them.

    Returns:
        The fields of `NoisyImages` for all images; noise is [n, draws, N, d].
    """
    folder.mkdir(parents=True, exist_ok=True)
    codes, chunks = kept.vq.quantize.embedding.weight.float(), []
    for index in tqdm(range(-(-count // CHUNK)), desc="noise of images"):
        file = folder / f"{index:05}.safetensors"
        if not file.exists():
            seeds = training_seeds(seed, STAGE, index, 0, CHUNK)
            batch = kept.with_tokens(
                image_batch(seeds, kept.tokenizer, dropped=0.0, grid=teacher.config.grid_size)
            )
            log_p = log_probabilities(teacher, kept.text_encoder, batch, guidance_scale).flatten(0, 1)
            random, tokens = torch.Generator(device="cpu").manual_seed(seed + index), batch.tokens.flatten()
            noise = [noise_of(tokens, log_p, codes, random).unflatten(0, (CHUNK, -1)) for _ in range(DRAWS)]
            found = {name: getattr(batch, name) for name in ("words", "word_mask", "dropped", "tokens")}
            with atomic_file(file) as temporary:
                save_file({**found, "noise": torch.stack(noise, 1)}, temporary)
        chunks.append(load_file(file))
    return {name: torch.cat([chunk[name] for chunk in chunks])[:count] for name in chunks[0]}


def begin_student(begun: LPDForCausalLM, channels: int) -> DistilledForCausalLM:
    """Return a student with the weights of an LPD, and a new projection of noise of some channels."""
    shape = shape_of(begun) | {"num_hidden_layers": begun.config.num_hidden_layers}
    model = DistilledForCausalLM(DistilledConfig(noise_channels=channels, **shape))
    model.load_state_dict(begun.state_dict(), strict=False)
    cells = model.config.image_tokens
    model.generation_config = GenerationConfig(do_sample=False, guidance_scale=1.0, max_new_tokens=cells)
    return model


class DistilledLoss(nn.Module):
    """Cross-entropy of the tokens, and squared distance of the mean of their code vectors.

    Args:
        transformer: the student.
        text_encoder: encoder of the captions; not trained.
        codes: [V, d] code vectors.
    """

    codes: Tensor

    def __init__(
        self, transformer: DistilledForCausalLM, text_encoder: T5EncoderModel, codes: Tensor
    ) -> None:
        super().__init__()
        self.transformer = transformer
        self.text_encoder = text_encoder.requires_grad_(False)
        self.register_buffer("codes", codes, persistent=False)

    def forward(self, batch: NoisyImages) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, and figures: nats and squared distance per token, share of right tokens."""
        logits, wanted = self.read(batch), batch.tokens[:, int(batch.begin) :]
        nats = F.cross_entropy(logits.transpose(1, 2), wanted)
        distance = (logits.softmax(-1) @ self.codes - self.codes[wanted]).square().sum(-1).mean()
        right = (logits.argmax(-1) == wanted).float().mean()
        figures = {"nats": nats, "distance": distance, "right": right}
        return nats + DISTANCE_WEIGHT * distance, figures

    def read(self, batch: NoisyImages) -> Tensor:
        """Return logits [B, N - begin, V] of the cells whose noise is read."""
        decoder: Any = self.transformer.model
        vectors = caption_vectors(decoder, self.text_encoder, batch)  # type: ignore[arg-type]  # its captions
        begin = int(batch.begin)
        queries = decoder.embed_noise(batch.noise[:, begin:])
        read = torch.cat([vectors, decoder.embed_tokens(batch.tokens[:, :begin]), queries], 1)
        places = torch.arange(read.shape[1], device=read.device).expand(len(read), -1)
        seen = F.pad(batch.word_mask, (0, batch.tokens.shape[1]), value=1)
        how = {"position_ids": places, "attention_mask": seen, "use_cache": False}
        states = decoder(inputs_embeds=read, **how).last_hidden_state
        logits: Tensor = self.transformer.lm_head(states[:, vectors.shape[1] + begin :]).float()
        return logits


@flush_subnormals()
def train_distilled(
    out: str | Path,
    *,
    start: str | Path,
    queries: str | Path | None = None,
    images: int = 1024,
    guidance_scale: float = 2.0,
    **how: Unpack[RunOptions],
) -> Path:
    """Train a student that draws images in few forward passes, and save it as one folder.

    Args:
        out: the folder to write. Images and their noise are kept beside it, in `<out>.images`.
        start: the teacher, a LlamaGen of captions.
        queries: a trained LPD that the student begins with; None for the teacher.
        images: number of images.
        guidance_scale: guidance of the teacher. Large scales make noise of real images less normal.
        how: see `RunOptions`; the default is 30 minutes, with 16 images per step and process, after the
            noise is made.

    Returns:
        The folder. Its `training.json` records the settings of the training.

    Raises:
        InputError: `start` is not a LlamaGen of captions.
    """
    out, start = Path(out), Path(start)
    training = Training(out, how, minutes=DEFAULT_MINUTES, batch_size=16, check_s=300.0)
    kept = Kept(start, training.accelerator.device)
    codes = kept.vq.quantize.embedding.weight.detach().float()
    teacher = trained_llamagen(start).eval().requires_grad_(False).to(training.accelerator.device)
    if queries is None:
        begun = begin_with(start, teacher.config.num_hidden_layers)
    else:
        begun = LPDForCausalLM.from_pretrained(queries, dtype=torch.float32)
    model = begin_student(begun, codes.shape[1])
    folder, count = out.with_name(f"{out.name}.images"), CHUNK + images
    made = noisy_images(folder, teacher, kept, count, training.seed, guidance_scale)
    side = model.config.grid_size
    begins = [cell for count in STEPS for cell in first_cells(side, side, count)]

    def batch_of(rows: np.ndarray, draw: int, begin: int) -> NoisyImages:
        fields = {name: part[rows] for name, part in made.items()}
        return NoisyImages(**{**fields, "noise": fields["noise"][:, draw]}, begin=torch.tensor(begin))

    def make(step: int) -> NoisyImages:
        random = np.random.default_rng([training.seed, STAGE, step, training.accelerator.process_index])
        rows = random.integers(CHUNK, count, training.batch_size)
        return batch_of(rows, int(random.integers(DRAWS)), int(random.choice(begins)))

    learner = DistilledLoss(model, kept.text_encoder, codes)
    check = held_out_figures(batch_of(np.arange(CHUNK), 0, 0), training.accelerator.device, digits=3)
    training.train(Stage("student", learner, make, check, outer=("mask_token", "noise_projection")))
    options = {"queries": queries, "images": images, "guidance-scale": guidance_scale}
    return kept.finish(training, model, out, "distilled", options, program=PROGRAM)
