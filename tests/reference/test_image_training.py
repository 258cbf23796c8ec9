"""Training of tiny image models, with the code that trains the shipped models."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vq_model import VQModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, T5EncoderModel

from mmspec.families.llamagen.modeling import caption_prompt, null_caption_prompt
from mmspec.models.autoencoders import decode_tokens, encode_image
from mmspec.scenes.reader import AttributeReader
from mmspec.training.data.scenes import CAPTION_LENGTH
from reference.autoencoder import (
    KL_WEIGHT,
    KLReconstruction,
    build_autoencoder,
    noisy_batch,
    train_autoencoder,
)
from reference.image import train_image
from reference.image_data import image_batch
from reference.image_model import (
    SHAPES_BY_SIZE,
    ImageLoss,
    build_caption_tokenizer,
    build_text_encoder,
    build_transformer,
)
from reference.reader import train_reader
from reference.vq import train_vq

TINY = SHAPES_BY_SIZE["tiny"]
VAE_WEIGHTS = "diffusion_pytorch_model.safetensors"
STEPS = {"reader": 12, "vq": 12, "autoencoder": 12, "image": 6}


@dataclass
class Trained:
    """Tiny models in a folder, each the input of the next, and their training losses."""

    root: Path
    losses: dict[str, list[float]] = field(default_factory=dict)

    def train(self, name: str, out: Path, **how: Any) -> Path:
        reader = {"reader": self.root / "reader"}
        trainings: dict[str, Callable[..., Path]] = {
            "reader": lambda **how: train_reader(out, batch_size=8, **how),
            "vq": lambda **how: train_vq(out, batch_size=4, **reader, **how),
            "autoencoder": lambda **how: train_autoencoder(out, batch_size=4, **reader, **how),
            "image": lambda **how: train_image(out, self.root / "vq", batch_size=4, **reader, **how),
        }
        return trainings[name](size="tiny", steps=STEPS[name], **how)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    made = Trained(tmp_path_factory.mktemp("image"))
    for name in STEPS:
        losses = made.losses[name] = []
        made.train(name, made.root / name, on_step=lambda _, loss, losses=losses: losses.append(loss))
    return made


@pytest.mark.parametrize("name", sorted(STEPS.keys() - {"image"}))  # whose batches are too noisy to see it
@pytest.mark.every(3)
def test_training_lowers_the_loss(trained: Trained, name: str) -> None:
    losses = trained.losses[name]
    assert len(losses) == STEPS[name] and np.mean(losses[-3:]) < np.mean(losses[:3])


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.every(4)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    trained: Trained, tmp_path: Path, name: str
) -> None:
    losses: list[float] = []

    def record(step: int, loss: float) -> None:
        losses.append(loss)
        if len(losses) == 4:
            raise Interrupted

    with pytest.raises(Interrupted):
        trained.train(name, tmp_path / name, checkpoint_s=0, on_step=record)
    trained.train(name, tmp_path / name, resume=True, on_step=record)
    assert losses == trained.losses[name]
    file = VAE_WEIGHTS if name in ("vq", "autoencoder") else "model.safetensors"
    one, other = load_file(trained.root / name / file), load_file(tmp_path / name / file)
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_a_trained_folder_loads_part_by_part_as_any_other(trained: Trained) -> None:
    folder = trained.root / "image"
    transformer = AutoModelForCausalLM.from_pretrained(folder)
    encoder = T5EncoderModel.from_pretrained(folder / "text_encoder")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    vq = VQModel.from_pretrained(folder / "vq", torch_dtype=torch.float32)
    AttributeReader.from_pretrained(folder / "reader")
    assert transformer.dtype == encoder.dtype == torch.float32, "half precision is for the disk"
    assert load_file(folder / "model.safetensors")["lm_head.weight"].dtype == torch.float16
    assert transformer.generation_config.max_new_tokens == 256 and transformer.generation_config.do_sample
    ids = tokenizer("A red ring, left of a cross", return_tensors="pt", add_special_tokens=False).input_ids
    assert ids.shape == (1, 9 - 1)
    prompt = caption_prompt(transformer.config, encoder(input_ids=ids).last_hidden_state)
    assert transformer(**prompt).logits.shape == (1, 8, 64)
    assert null_caption_prompt(transformer)["caption_features"].abs().sum() > 0, "it was learnt"
    codebook = load_file(folder / "vq" / "raw_codebook.safetensors")["codebook"]
    assert torch.allclose(codebook.float().norm(dim=-1), torch.ones(64), atol=1e-3)
    assert decode_tokens(vq, encode_image(vq, torch.zeros(1, 3, 64, 64))).shape == (1, 3, 64, 64)
    record = json.loads((folder / "training.json").read_text())
    assert record["command"].startswith("python -m reference train image --out ")
    assert record["stages"][0]["steps"] == STEPS["image"] and record["seed"] == 0


def test_training_and_inference_give_a_caption_the_same_distribution() -> None:
    """Padded slots are masked, so the padded rows of training equal unpadded prompts, null ones included."""
    torch.manual_seed(0)
    tokenizer = build_caption_tokenizer()
    encoder, transformer = build_text_encoder(TINY, tokenizer), build_transformer(TINY, "caption")
    learner = ImageLoss(transformer, encoder).eval()
    learner.write_null_embedding()
    batch = image_batch(np.arange(40), tokenizer, dropped=0.4)
    batch = replace(batch, tokens=torch.randint(0, TINY.entries, (40, 256)))
    expected = []
    with torch.no_grad():
        nats = learner(batch)[1]["nats"]
        for row in range(len(batch.tokens)):
            shown = batch.word_mask[row].bool()
            length = int(shown.sum())
            if batch.dropped[row]:
                inputs = null_caption_prompt(transformer, length)
            else:
                features = encoder(input_ids=batch.words[row, shown][None]).last_hidden_state
                inputs = caption_prompt(transformer.config, features)
            ids = torch.cat([inputs.pop("input_ids"), batch.tokens[row : row + 1, :-1]], dim=1)
            places = torch.arange(CAPTION_LENGTH - length, CAPTION_LENGTH + 255)[None]
            logits = transformer(input_ids=ids, position_ids=places, **inputs).logits[0, length - 1 :]
            expected.append(torch.nn.functional.cross_entropy(logits, batch.tokens[row]))
    assert {int(mask.sum()) for mask in batch.word_mask[batch.dropped]} >= {CAPTION_LENGTH}
    torch.testing.assert_close(nats, torch.stack(expected).mean(), rtol=1e-5, atol=1e-5)


def test_the_loss_of_an_autoencoder_is_that_of_the_drawn_latents() -> None:
    """Noise reaches the images, and the KL is a mean over the latents' elements."""
    torch.manual_seed(0)
    batch = noisy_batch(np.arange(2))
    learner = KLReconstruction(build_autoencoder("tiny"))
    with torch.no_grad():
        loss, figures = learner(batch)
        latents = learner.vae.encode(batch.pixels).latent_dist
        drawn = learner.vae.decode(latents.mean + latents.std * batch.noise).sample
    error = ((drawn - batch.pixels).square() * batch.weights).mean() / batch.weights.mean()
    kl = 0.5 * (latents.mean.square() + latents.var - 1 - latents.logvar).mean()
    torch.testing.assert_close(figures["kl"], kl)
    torch.testing.assert_close(loss, error + KL_WEIGHT * kl)
