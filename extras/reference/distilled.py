"""Training of a student of a LlamaGen that draws images in few forward passes (2412.17153).

The teacher draws images of captions. The flow back from their tokens to noise, for which one forward pass of
the teacher over an image suffices, makes the pairs of noise and tokens that the student learns. The authors
follow the flow from noise to tokens while the teacher draws. Both ways, pairs have the same distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from mmspec.core.image_grid import ImageGrid
from mmspec.families.lpd.modeling import LPDForCausalLM
from mmspec.scenes import training_seeds
from mmspec.training.data.scenes import PromptedScenes
from mmspec.training.data.sequences import TensorBatch
from mmspec.training.run import RunOptions, Stage, Training, flush_subnormals
from mmspec_extras.families.distilled.flow import noise_of
from mmspec_extras.families.distilled.modeling import DistilledConfig, DistilledForCausalLM
from mmspec_extras.methods.distilled.drafter import first_cells
from reference.begun import Kept, shape_of
from reference.image_model import caption_vectors
from reference.image_scores import distributions_of, load_pipeline
from reference.parallel import begin_with
from reference.trainer import held_out_figures

__all__ = ["DistilledLoss", "NoisyImages", "begin_student", "draw_images", "train_distilled"]

PROGRAM = "python -m extras.reference"
STAGE = 23  # of the seeds of the scenes
DEFAULT_MINUTES = 30.0
CHUNK = 32  # images that are drawn together; those of the first chunk are held out
DRAWS = 2  # noise sequences of an image
FORWARDS = (1, 2, 4)
DISTANCE_WEIGHT = 1.0


@dataclass(frozen=True)
class NoisyImages(TensorBatch):
    """Images of the teacher with noise that the flow maps to their tokens.

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
def draw_images(teacher: Any, tokenizer: Any, seeds: np.ndarray) -> dict[str, Tensor]:
    """Draw an image of each scene's caption with its noise: words, word_mask, tokens, noise [B, draws, N, d].

    Args:
        teacher: the image pipeline of a LlamaGen of captions.
        tokenizer: tokenizer of the captions.
        seeds: [B] of the scenes.
    """
    told = PromptedScenes.of(seeds, dropped=0.0)
    words, mask = told.words(tokenizer)
    texts, scale = [prompt.text for prompt in told.prompts], float(teacher.sampling({})["guidance_scale"])
    drawn = teacher(texts, seed=seeds.tolist(), batch_size=len(texts), output_type="latent").tokens
    codes = teacher.vq.quantize.embedding.weight.float()
    tokens = torch.tensor(drawn, device=codes.device)
    random, noise = torch.Generator(device="cpu").manual_seed(int(seeds[0])), list[Tensor]()
    for text, row in zip(texts, tokens, strict=True):
        (request,) = teacher.prepare(text, {"guidance_scale": scale}).requests
        log_p = distributions_of(teacher, request, row[None], scale)[0].log()
        noise += [noise_of(row, log_p, codes, random) for _ in range(DRAWS)]
    noises = torch.stack(noise).unflatten(0, (len(texts), DRAWS)).cpu()
    return {"words": words, "word_mask": mask, "tokens": tokens.cpu(), "noise": noises}


def drawn_images(folder: Path, teacher: Any, tokenizer: Any, count: int, seed: int) -> dict[str, Tensor]:
    """Return at least `count` images as `draw_images` does, of which the files in a folder hold the first."""
    folder.mkdir(parents=True, exist_ok=True)
    chunks = []
    for index in tqdm(range(-(-count // CHUNK)), desc="images of the teacher"):
        file = folder / f"{index:05}.safetensors"
        if not file.exists():
            seeds = training_seeds(seed, STAGE, index, 0, CHUNK)
            with atomic_file(file) as temporary:
                save_file(draw_images(teacher, tokenizer, seeds), temporary)
        chunks.append(load_file(file))
    return {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}


def begin_student(start: Path, layers: int, queries: Path | None, channels: int) -> DistilledForCausalLM:
    """Return a student with layers of the teacher, or with those and the queries of an LPD of the teacher."""
    lpd = begin_with(start, layers) if queries is None else LPDForCausalLM.from_pretrained(queries).float()
    layers, shape = lpd.config.num_hidden_layers, shape_of(lpd)
    model = DistilledForCausalLM(DistilledConfig(num_hidden_layers=layers, noise_channels=channels, **shape))
    model.load_state_dict(lpd.state_dict(), strict=False)
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
        vectors, begin = caption_vectors(decoder, self.text_encoder, batch), int(batch.begin)  # type: ignore[arg-type]
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
    layers: int = 6,
    images: int = 1024,
    **how: Unpack[RunOptions],
) -> Path:
    """Train a student that draws images in few forward passes, and save it as one folder.

    Args:
        out: the folder to write. The images of the teacher are kept beside it, in `<out>.images`.
        start: the teacher, a LlamaGen of captions.
        queries: a trained LPD of the teacher, whose weights the student begins with; None for those of the
            teacher.
        layers: layers of the teacher that the student begins with.
        images: number of images that the teacher draws.
        how: see `RunOptions`; the default is 30 minutes, with 16 images per step and process. The time in
            which the teacher draws is not counted.

    Returns:
        The folder. Its `training.json` records the settings of the training.

    Raises:
        InputError: `start` is not a LlamaGen of captions, or has fewer layers.
    """
    out, start = Path(out), Path(start)
    training = Training(out, how, minutes=DEFAULT_MINUTES, batch_size=16)
    kept = Kept(start, training.accelerator.device)
    codes = kept.vq.quantize.embedding.weight.detach().float()
    model = begin_student(start, layers, None if queries is None else Path(queries), codes.shape[1])
    where = out.with_name(f"{out.name}.images")
    drawn = drawn_images(where, load_pipeline(start), kept.tokenizer, CHUNK + images, training.seed)
    side = model.config.grid_size
    grid = ImageGrid(side, side, model.config.vocab_size)
    begins = [cell for forwards in FORWARDS for cell in first_cells(grid.rows, grid.columns, forwards)]

    def batch_of(rows: np.ndarray, noise: int, begin: int) -> NoisyImages:
        chosen = {name: part[rows] for name, part in drawn.items()} | {"begin": torch.tensor(begin)}
        dropped = torch.zeros(len(rows), dtype=torch.bool)
        return NoisyImages(**chosen | {"noise": chosen["noise"][:, noise]}, dropped=dropped)

    def make(step: int) -> NoisyImages:
        random = np.random.default_rng([training.seed, STAGE, step, training.accelerator.process_index])
        rows = random.integers(CHUNK, CHUNK + images, training.batch_size)
        return batch_of(rows, int(random.integers(DRAWS)), int(random.choice(begins)))

    learner = DistilledLoss(model, kept.text_encoder, codes)
    check = held_out_figures(batch_of(np.arange(CHUNK), 0, 0), training.accelerator.device, digits=3)
    training.train(Stage("student", learner, make, check, outer=("mask_token", "noise_projection")))
    options = {"queries": queries, "layers": layers, "images": images}
    return kept.finish(training, model, out, "distilled", options, program=PROGRAM)
