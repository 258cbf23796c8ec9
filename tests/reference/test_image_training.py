"""Trainings of the image models on tiny ones: what holds for them holds for the shipped ones, skill apart."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from diffusers.models.autoencoders.vq_model import VQModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, T5EncoderModel

from mmspec.errors import CheckpointError, InputError
from mmspec.families.llamagen.modeling import caption_prompt, null_caption_prompt
from mmspec.families.mar.modeling import MARForImageGeneration
from mmspec.families.nextstep.modeling import NextStepForImageGeneration
from mmspec.models.autoencoders import decode_tokens, encode_image, load_autoencoder
from mmspec.scenes import IMAGE_TOKENS, sample_scene
from mmspec.scenes.reader import AttributeReader
from mmspec.training.data.scenes import CAPTION_LENGTH
from mmspec.training.optimizers import Muon, orthogonalize
from reference.autoencoder import (
    KL_WEIGHT,
    KLReconstruction,
    build_autoencoder,
    noisy_batch,
    train_autoencoder,
)
from reference.image import train_image
from reference.image_data import image_batch, pixel_batch
from reference.image_model import (
    SHAPES_BY_SIZE,
    ImageLoss,
    build_caption_tokenizer,
    build_text_encoder,
    build_transformer,
)
from reference.latent_model import LatentBatch, build_latent_tokenizer
from reference.latents import encode_latents, train_latent_model
from reference.reader import train_reader
from reference.vq import Reconstruction, build_vq, train_vq

TINY = SHAPES_BY_SIZE["tiny"]
VAE_WEIGHTS = "diffusion_pytorch_model.safetensors"
STEPS = {"reader": 12, "vq": 12, "autoencoder": 12, "image": 6}


@dataclass
class Trained:
    """Tiny models in a folder, each the next one's input, and the losses on the way."""

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


def test_the_loss_of_image_tokens_can_be_lowered() -> None:
    torch.manual_seed(0)
    tokenizer = build_caption_tokenizer()
    learner = ImageLoss(build_transformer(TINY, "caption"), build_text_encoder(TINY, tokenizer))
    batch = image_batch(np.arange(4), tokenizer)
    batch = replace(batch, tokens=torch.randint(0, TINY.entries, (4, 256)))
    optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-2)
    told = []
    for _ in range(12):
        loss, figures = learner(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told.append(float(figures["nats"].detach()))
    assert told[-1] < told[0] - 0.1
    assert all(each.grad is not None for each in learner.parameters())


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


def test_a_model_of_classes_begins_with_one_of_captions(trained: Trained, tmp_path: Path) -> None:
    folder, start = tmp_path / "class", trained.root / "image"
    how: dict[str, Any] = {"size": "tiny", "steps": 1, "batch_size": 4}
    train_image(folder, trained.root / "vq", condition="class", start=start, **how)
    before, model = (AutoModelForCausalLM.from_pretrained(each) for each in (start, folder))
    assert model.config.condition_type == "class" and model.config.num_classes == 48
    assert not (folder / "text_encoder").exists()
    moved = (model.lm_head.weight - before.lm_head.weight).abs().max()
    assert moved < 2e-3, "one step away from where it began"
    record = json.loads((folder / "training.json").read_text())
    assert [stage["steps"] for stage in record["stages"]] == [STEPS["image"], 1]


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


def test_batches_hold_images_and_labels_of_the_scenes_and_more_prompts() -> None:
    tokenizer = build_caption_tokenizer()
    batch = image_batch(np.arange(10), tokenizer, only_prompts=4)
    scenes = [sample_scene(seed, profile=IMAGE_TOKENS) for seed in range(6)]
    assert torch.equal(batch.pixels, pixel_batch(np.arange(6)).pixels)
    assert batch.class_labels.tolist() == [scene.class_label for scene in scenes]
    covered = (batch.place_labels[..., 0] > 0).float().mean(1)
    assert len(covered) == 6 and (covered > 0.02).all() and (covered < 0.5).all()
    assert set(pixel_batch(np.arange(6), 3.0).weights.unique().tolist()) == {1.0, 3.0}
    assert len(batch.words) == len(batch.caption_labels) == 10 and not batch.dropped[6:].any()
    assert torch.equal(image_batch(np.arange(6), tokenizer).words, batch.words[:6])


def test_dead_codes_come_to_life_and_held_out_images_move_none() -> None:
    torch.manual_seed(0)
    learner = Reconstruction(build_vq("tiny"))
    batch = pixel_batch(np.arange(8))
    used = [int(learner(batch)[1]["codes"]) for _ in range(12)]
    assert used[-1] > max(used[0], 40)
    codes = learner.vq.quantize.embedding.weight
    torch.testing.assert_close(codes.norm(dim=-1), torch.ones(len(codes)), atol=1e-5, rtol=0)
    before = codes.clone()
    with torch.no_grad():
        learner(batch)
    assert torch.equal(before, learner.vq.quantize.embedding.weight)


@pytest.mark.parametrize("shape", [(8, 3, 3, 3), (64, 4, 1, 1), (48, 16)])
def test_an_update_of_a_matrix_or_kernel_is_nearly_orthogonal_and_of_the_promised_size(
    shape: tuple[int, ...],
) -> None:
    torch.manual_seed(0)
    kernel = torch.nn.Parameter(torch.zeros(shape))
    kernel.grad = torch.randn(shape)
    Muon([kernel], lr=1e-2, weight_decay=0.0).step()
    rows = max(kernel.flatten(1).shape)
    values = torch.linalg.svdvals(kernel.detach().flatten(1)) / (0.2 * 1e-2 * rows**0.5)
    assert values.min() > 0.6 and values.max() < 1.3
    matrix = torch.diag(torch.tensor([3.0, -1.0, 0.5]))
    assert torch.equal(orthogonalize(matrix).sign(), matrix.sign())


def test_scaled_latents_of_an_autoencoder_have_deviation_one(trained: Trained) -> None:
    folder = trained.root / "autoencoder"
    vae = AutoencoderKL.from_pretrained(folder, torch_dtype=torch.float32)
    assert all(tensor.dtype == torch.float16 for tensor in load_file(folder / VAE_WEIGHTS).values())
    with torch.no_grad():
        latents = vae.encode(pixel_batch(np.arange(256)).pixels).latent_dist
        scaled = latents.sample(torch.Generator().manual_seed(0)) * vae.config.scaling_factor
        assert scaled.shape == (256, 8, 16, 16) and float(scaled.std()) == pytest.approx(1.0, abs=0.01)
        assert vae.decode(scaled[:2] / vae.config.scaling_factor).sample.shape == (2, 3, 64, 64)


@pytest.mark.parametrize(("name", "train"), [("autoencoder", train_autoencoder), ("vq", train_vq)])
@pytest.mark.slow
def test_a_second_training_goes_on_from_the_first(
    name: str, train: Callable[..., Path], trained: Trained, tmp_path: Path
) -> None:
    start = trained.root / name
    out = train(tmp_path / "more", start=start, size="tiny", steps=1, batch_size=2)
    stages = json.loads((out / "training.json").read_text())["stages"]
    assert [stage["steps"] for stage in stages] == [STEPS[name], 1]
    assert "features" in stages[0] and "features" not in stages[1]
    before, after = load_file(start / VAE_WEIGHTS), load_file(out / VAE_WEIGHTS)
    learnt = [key for key in before if "quantize" not in key]
    assert max(float((before[key] - after[key]).abs().max()) for key in learnt) < 1e-2


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


@pytest.mark.parametrize(
    ("kind", "model_class"), [("nextstep", NextStepForImageGeneration), ("mar", MARForImageGeneration)]
)
@pytest.mark.slow
def test_a_training_on_latents_saves_what_can_be_loaded(
    kind: str, model_class: Any, trained: Trained, tmp_path: Path
) -> None:
    losses: list[float] = []
    how: dict[str, Any] = {"size": "tiny", "steps": 3, "batch_size": 2}
    how["on_step"] = lambda step, loss: losses.append(loss)
    folder = train_latent_model(tmp_path / kind, trained.root / "autoencoder", kind=kind, **how)
    assert len(losses) == 3 and all(np.isfinite(losses))
    model = model_class.from_pretrained(folder, dtype=torch.float32)
    assert all(weight.isfinite().all() for weight in model.parameters())
    assert load_autoencoder(folder / "vae").config.latent_channels == 8
    assert f"--kind {kind}" in json.loads((folder / "training.json").read_text())["command"]


def test_latents_stand_in_raster_order(trained: Trained) -> None:
    batch = image_batch(np.arange(2), build_latent_tokenizer(), objects=1)
    latents = encode_latents(load_autoencoder(trained.root / "autoencoder"), batch.pixels)
    both = LatentBatch.of(batch, latents)
    assert both.latents.shape == (2, 256, 8)
    assert torch.equal(both.latents[1, 16 * 3 + 5], latents[1, :, 3, 5])


def test_what_does_not_fit_is_refused_before_the_work(trained: Trained, tmp_path: Path) -> None:
    out, vq, vae = tmp_path / "out", trained.root / "vq", trained.root / "autoencoder"
    nothing, tiny = tmp_path, {"size": "tiny"}
    wrong: list[tuple[Callable[..., Path], tuple[Path, ...], dict[str, Any], type[Exception]]] = [
        *((train, (), {"size": "huge"}, InputError) for train in (train_vq, train_autoencoder, train_reader)),
        (train_image, (vq,), {"size": "huge"}, InputError),
        (train_image, (vq,), {"condition": "prose"}, InputError),
        (train_image, (vq,), tiny | {"minutes": 1.0}, InputError),
        (train_latent_model, (vae,), {"kind": "nextsteps"}, InputError),
        (train_latent_model, (vae,), {"kind": "mar", "size": "halve"}, InputError),
        (train_latent_model, (nothing,), tiny | {"kind": "mar"}, CheckpointError),
        (train_image, (vq,), {}, CheckpointError),  # a codebook of 64 for a model of 1024
        (train_image, (nothing,), tiny, CheckpointError),
        (train_image, (vq,), tiny | {"reader": nothing}, CheckpointError),
        (train_image, (vq,), tiny | {"start": nothing}, CheckpointError),
        (train_image, (vq,), tiny | {"resume": True}, CheckpointError),
        (train_vq, (), tiny | {"reader": nothing}, CheckpointError),
        *((train, (), tiny | {"start": nothing}, CheckpointError) for train in (train_vq, train_reader)),
        (train_autoencoder, (), {"start": vae}, CheckpointError),  # a tiny one for the base size
    ]
    for train, given, how, error in wrong:
        with pytest.raises(error):
            train(out, *given, steps=1, **how)
    assert not out.exists()
