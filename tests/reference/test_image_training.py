"""Trainings of the image models on tiny ones: what holds for them holds for the shipped ones, skill apart."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vq_model import VQModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, T5EncoderModel

from mmspec.errors import CheckpointError, InputError
from mmspec.models.autoencoders import decode_tokens, encode_image
from mmspec.models.llamagen import caption_prompt, null_caption_prompt
from mmspec.scenes import IMAGE_TOKENS, sample_scene
from mmspec.scenes.reader import AttributeReader
from mmspec.training.data.scenes import CAPTION_LENGTH
from mmspec.training.optimizers import KernelMuon, orthogonalize
from reference.image import train_image
from reference.image_data import image_batch, pixel_batch
from reference.image_model import (
    SHAPES_BY_SIZE,
    ImageLoss,
    build_caption_tokenizer,
    build_text_encoder,
    build_transformer,
)
from reference.reader import train_reader
from reference.vq import Reconstruction, build_vq, train_vq

TINY = SHAPES_BY_SIZE["tiny"]


@dataclass
class Trained:
    """Tiny models, each the next one's input, and the losses on the way."""

    reader: Path
    vq: Path
    image: Path
    losses: dict[str, list[float]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("image")
    made = Trained(folder / "reader", folder / "vq", folder / "model", {"reader": [], "vq": [], "image": []})

    def record(name: str) -> Callable[[int, float], None]:
        return lambda step, loss: made.losses[name].append(loss)

    train_reader(made.reader, size="tiny", steps=12, batch_size=8, on_step=record("reader"))
    train_vq(made.vq, reader=made.reader, size="tiny", steps=12, batch_size=4, on_step=record("vq"))
    train_image(
        made.image,
        made.vq,
        reader=made.reader,
        size="tiny",
        steps=12,
        batch_size=4,
        on_step=record("image"),
    )
    return made


@pytest.mark.parametrize("name", ["reader", "vq"])
def test_training_lowers_the_loss(trained: Trained, name: str) -> None:
    losses = trained.losses[name]
    assert len(losses) == 12
    assert np.mean(losses[-3:]) < np.mean(losses[:3])


def test_training_lowers_the_loss_of_image_tokens(trained: Trained, tmp_path: Path) -> None:
    """Few images a step are noisy: it takes more steps to see."""
    losses: list[float] = []
    train_image(
        tmp_path / "model",
        trained.vq,
        size="tiny",
        steps=60,
        batch_size=8,
        on_step=lambda step, loss: losses.append(loss),
    )
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.1


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("name", ["reader", "vq", "image"])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    trained: Trained, tmp_path: Path, name: str
) -> None:
    out = tmp_path / name
    trainings: dict[str, Callable[..., Path]] = {
        "reader": lambda **how: train_reader(out, batch_size=8, **how),
        "vq": lambda **how: train_vq(out, reader=trained.reader, batch_size=4, **how),
        "image": lambda **how: train_image(out, trained.vq, reader=trained.reader, batch_size=4, **how),
    }
    settings: dict[str, Any] = {"size": "tiny", "steps": 12}
    losses: list[float] = []

    def record(step: int, loss: float) -> None:
        losses.append(loss)
        if len(losses) == 5:
            raise Interrupted

    with pytest.raises(Interrupted):
        trainings[name](**settings, checkpoint_s=0, on_step=record)
    trainings[name](**settings, resume=True, on_step=record)
    assert losses == trained.losses[name]
    file = "diffusion_pytorch_model.safetensors" if name == "vq" else "model.safetensors"
    one, other = load_file(getattr(trained, name) / file), load_file(out / file)
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_a_trained_folder_loads_part_by_part_as_any_other(trained: Trained) -> None:
    transformer = AutoModelForCausalLM.from_pretrained(trained.image)
    encoder = T5EncoderModel.from_pretrained(trained.image / "text_encoder")
    tokenizer = AutoTokenizer.from_pretrained(trained.image / "tokenizer")
    vq = VQModel.from_pretrained(trained.image / "vq", torch_dtype=torch.float32)
    AttributeReader.from_pretrained(trained.image / "reader")
    assert transformer.dtype == encoder.dtype == torch.float32, "half precision is for the disk"
    assert load_file(trained.image / "model.safetensors")["lm_head.weight"].dtype == torch.float16
    assert transformer.generation_config.max_new_tokens == 256 and transformer.generation_config.do_sample
    ids = tokenizer("A red ring, left of a cross", return_tensors="pt", add_special_tokens=False).input_ids
    assert ids.shape == (1, 9 - 1)
    prompt = caption_prompt(transformer.config, encoder(input_ids=ids).last_hidden_state)
    assert transformer(**prompt).logits.shape == (1, 8, 64)
    assert null_caption_prompt(transformer)["caption_features"].abs().sum() > 0, "it was learnt"
    codebook = load_file(trained.image / "vq" / "raw_codebook.safetensors")["codebook"]
    assert torch.allclose(codebook.float().norm(dim=-1), torch.ones(64), atol=1e-3)
    tokens = encode_image(vq, torch.zeros(1, 3, 64, 64))
    assert decode_tokens(vq, tokens).shape == (1, 3, 64, 64)


def test_the_record_says_how_it_was_made(trained: Trained) -> None:
    record = json.loads((trained.image / "training.json").read_text())
    assert record["command"].startswith("python -m reference train image --out ")
    assert record["stages"][0]["steps"] == 12 and record["seed"] == 0


def test_a_model_of_classes_begins_with_one_of_captions(trained: Trained, tmp_path: Path) -> None:
    before = AutoModelForCausalLM.from_pretrained(trained.image)
    seen: list[float] = []
    train_image(
        tmp_path / "class",
        trained.vq,
        condition="class",
        start=trained.image,
        size="tiny",
        steps=1,
        batch_size=4,
        on_step=lambda step, loss: seen.append(loss),
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "class")
    assert model.config.condition_type == "class" and model.config.num_classes == 48
    assert not (tmp_path / "class" / "text_encoder").exists()
    moved = (model.lm_head.weight - before.lm_head.weight).abs().max()
    assert moved < 2e-3, "one step away from where it began"
    record = json.loads((tmp_path / "class" / "training.json").read_text())
    assert [stage["steps"] for stage in record["stages"]] == [12, 1]


def test_training_and_inference_give_a_caption_the_same_distribution() -> None:
    """Padded slots are masked, so the padded rows of training equal unpadded prompts, null ones included."""
    torch.manual_seed(0)
    tokenizer = build_caption_tokenizer()
    encoder, transformer = build_text_encoder(TINY, tokenizer), build_transformer(TINY, "caption")
    learner = ImageLoss(transformer, encoder).eval()
    learner.write_null_embedding()
    batch = image_batch(np.arange(40), tokenizer, dropped=0.4)
    batch.tokens = torch.randint(0, TINY.entries, (40, 256))
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


def test_prompts_without_images_are_there_for_the_text_encoder_alone() -> None:
    tokenizer = build_caption_tokenizer()
    batch = image_batch(np.arange(10), tokenizer, only_prompts=7)
    assert len(batch.pixels) == len(batch.place_labels) == len(batch.class_labels) == 3
    assert len(batch.words) == len(batch.caption_labels) == 10
    assert not batch.dropped[3:].any()
    alone = image_batch(np.arange(3), tokenizer)
    assert torch.equal(alone.pixels, batch.pixels) and torch.equal(alone.words, batch.words[:3])


def test_images_and_labels_are_those_of_the_scenes() -> None:
    batch = image_batch(np.arange(6), build_caption_tokenizer(), dropped=0.0)
    scenes = [sample_scene(seed, profile=IMAGE_TOKENS) for seed in range(6)]
    assert torch.equal(batch.pixels, pixel_batch(np.arange(6)).pixels)
    assert batch.class_labels.tolist() == [scene.class_label for scene in scenes]
    covered = (batch.place_labels[..., 0] > 0).float().mean(1)
    assert (covered > 0.02).all() and (covered < 0.5).all()
    weights = pixel_batch(np.arange(6), 3.0).weights
    assert set(weights.unique().tolist()) == {1.0, 3.0}


def test_dead_codes_come_to_life() -> None:
    torch.manual_seed(0)
    learner = Reconstruction(build_vq("tiny"))
    batch = pixel_batch(np.arange(8))
    used = []
    for _ in range(12):
        _, figures = learner(batch)
        used.append(int(figures["codes"]))
    assert used[-1] > max(used[0], 40)
    lengths = learner.vq.quantize.embedding.weight.norm(dim=-1)
    assert torch.allclose(lengths, torch.ones_like(lengths), atol=1e-5)


def test_looking_at_held_out_images_moves_no_code() -> None:
    learner = Reconstruction(build_vq("tiny"))
    before = learner.vq.quantize.embedding.weight.clone()
    with torch.no_grad():
        learner(pixel_batch(np.arange(2)))
    assert torch.equal(before, learner.vq.quantize.embedding.weight)


@pytest.mark.parametrize("shape", [(8, 3, 3, 3), (64, 4, 1, 1)])
def test_an_update_of_a_kernel_is_nearly_orthogonal_and_of_the_promised_size(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    kernel = torch.nn.Parameter(torch.zeros(shape))
    kernel.grad = torch.randn(shape)
    KernelMuon([kernel], lr=1e-2, weight_decay=0.0).step()
    rows = max(kernel.flatten(1).shape)
    values = torch.linalg.svdvals(kernel.detach().flatten(1)) / (0.2 * 1e-2 * rows**0.5)
    assert values.min() > 0.6 and values.max() < 1.3


def test_orthogonalize_keeps_the_singular_vectors() -> None:
    matrix = torch.diag(torch.tensor([3.0, -1.0, 0.5]))
    assert torch.equal(orthogonalize(matrix).sign(), matrix.sign())


def test_what_does_not_fit_is_refused_before_the_work(trained: Trained, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for call in (
        lambda: train_image(out, trained.vq, size="huge", steps=1),
        lambda: train_image(out, trained.vq, condition="prose", steps=1),
        lambda: train_image(out, trained.vq, size="tiny", steps=1, minutes=1.0),
        lambda: train_vq(out, size="huge", steps=1),
        lambda: train_reader(out, size="huge", steps=1),
    ):
        with pytest.raises(InputError):
            call()
    for call in (
        lambda: train_image(out, trained.vq, steps=1),  # a codebook of 64 for a model of 1024
        lambda: train_image(out, tmp_path, size="tiny", steps=1),
        lambda: train_image(out, trained.vq, reader=tmp_path, size="tiny", steps=1),
        lambda: train_image(out, trained.vq, start=tmp_path, size="tiny", steps=1),
        lambda: train_image(out, trained.vq, size="tiny", steps=1, resume=True),
        lambda: train_vq(out, reader=tmp_path, size="tiny", steps=1),
        lambda: train_vq(out, start=tmp_path, size="tiny", steps=1),
        lambda: train_reader(out, start=tmp_path, size="tiny", steps=1),
    ):
        with pytest.raises(CheckpointError):
            call()
    assert not out.exists()
