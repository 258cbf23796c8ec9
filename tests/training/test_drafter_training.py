"""Training drafters: what is learnt and what is not touched, on targets of a few thousand parameters."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModel

from mmspec.decoding.draft import Draft, DraftKind
from mmspec.decoding.interfaces import Request
from mmspec.decoding.sampling import Sampler
from mmspec.drafters.eagle import EagleDrafter
from mmspec.errors import CheckpointError, InputError, MediaError
from mmspec.models.eagle import EagleConfig, EagleHead
from mmspec.targets import CausalTarget
from mmspec.training.data import images as image_data
from mmspec.training.data.images import ImageFile
from mmspec.training.data.scenes import SceneImages, scene_data
from mmspec.training.data.sequences import DrafterBatch, TrainingExample, Trial, acceptance_length
from mmspec.training.drafter import train_drafter, train_on
from mmspec.training.losses.base import read
from mmspec.training.losses.eagle import EagleLoss, positions_of
from mmspec.training.methods import METHODS
from mmspec.training.run import RunOptions, Training
from reference.image_folder import save_image_model
from reference.image_model import (
    SHAPES_BY_SIZE,
    build_caption_tokenizer,
    build_text_encoder,
    build_transformer,
)
from reference.vq import save_vq
from reference.vq_model import build_vq
from tests.contracts.running import random_prompts
from tests.tiny_models import randomise, tiny_llama

WORDS, LENGTH, POOL = 12, 24, 24


@functools.cache
def target() -> CausalTarget:
    return CausalTarget(tiny_llama(vocab=WORDS))


@functools.cache
def sentences() -> list[tuple[list[int], int]]:
    """What the target says after random prompts, and where that begins."""
    said = []
    for prompt in random_prompts(POOL, WORDS, longest=4, seed=1):
        tokens = list(prompt)
        for _ in range(LENGTH):
            tokens.append(int(target().model(torch.tensor([tokens])).logits[0, -1].argmax()))
        said.append((tokens, len(prompt)))
    return said


class Sentences:
    """Data of the target's own words, four a step; the last four are held out."""

    def batch(self, step: int, process: int) -> DrafterBatch:
        rows = [sentences()[(4 * step + row) % (POOL - 4)] for row in range(4)]
        examples = [TrainingExample({"input_ids": torch.tensor([tokens])}, start) for tokens, start in rows]
        return DrafterBatch(tuple(examples), step)

    def trial(self) -> Trial:
        prompts = [tokens[:start] for tokens, start in sentences()[-4:]]
        requests = [Request({"input_ids": torch.tensor([prompt])}) for prompt in prompts]
        return Trial(requests, Sampler(), LENGTH)


class Interrupted(Exception):
    pass


def train(
    state: Path, steps: int, *, resume: bool = False, interrupt: int = 0
) -> tuple[EagleHead, list[float]]:
    sentences()  # made before the seed is set: making them draws random numbers
    torch.manual_seed(0)
    losses: list[float] = []

    def record(step: int, loss: float) -> None:
        losses.append(loss)
        if step == interrupt:
            raise Interrupted

    head = METHODS["eagle"].build(target())
    assert isinstance(head, EagleHead)
    options = RunOptions(steps=steps, state=state, checkpoint_s=0.0 if interrupt else 1e9, check_s=1e9)
    options |= RunOptions(on_step=record, resume=resume)
    training = Training(state.parent, options, minutes=1.0, batch_size=4)
    with contextlib.suppress(Interrupted):
        train_on(training, head, "eagle", target(), Sentences())
    return head.eval(), losses


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[EagleHead, list[float]]:
    return train(tmp_path_factory.mktemp("eagle") / "state.pt", 80)


def accepted(head: EagleHead) -> float:
    drafter = EagleDrafter(head, num_draft_tokens=4, top_k=1)
    return acceptance_length(target(), drafter, Sentences().trial())


def test_the_loss_falls_and_more_is_accepted(trained: tuple[EagleHead, list[float]]) -> None:
    head, losses = trained
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    untrained = EagleHead(head.config).eval()
    assert accepted(head) > accepted(untrained) + 0.5


def test_the_target_gets_no_gradient_and_stays_as_it_is(trained: tuple[EagleHead, list[float]]) -> None:
    model = tiny_llama(vocab=WORDS).requires_grad_(True)
    teacher = CausalTarget(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    learner = EagleLoss(EagleHead(EagleConfig.for_target(model.config, WORDS)), teacher)
    names = {name for name, _ in learner.named_parameters()}
    assert names and all(name.startswith("head.") for name in names)
    learner.target.model.requires_grad_(False)
    learner(Sentences().batch(0, 0))[0].backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in learner.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_the_parts_of_the_loss_have_their_weights(trained: tuple[EagleHead, list[float]]) -> None:
    loss, figures = EagleLoss(trained[0], target())(Sentences().batch(3, 0))
    assert torch.allclose(loss, figures["states"] + 0.1 * figures["tokens"])
    assert 0 < figures["agreement"] <= 1


def test_padding_and_prompts_do_not_count(trained: tuple[EagleHead, list[float]]) -> None:
    """The loss of two sequences of different lengths is the mean over their answers' tokens."""
    learner = EagleLoss(trained[0], target())
    long, short = Sentences().batch(0, 0).examples[0], Sentences().batch(0, 0).examples[1]
    short = replace(short, inputs={"input_ids": short.inputs["input_ids"][:, : short.answer + 9]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmspec.training.losses.eagle.NOISE", 0.0)
        both, first, second = (
            learner(DrafterBatch(rows, 0))[0] for rows in ((long, short), (long,), (short,))
        )
    # the first token of an answer is the target's own: the head predicts those after it, from position 2 on
    counts = [
        sum(index >= max(row.answer, 2) for index in range(row.inputs["input_ids"].shape[1]))
        for row in (long, short)
    ]
    assert torch.allclose(both * sum(counts), first * counts[0] + second * counts[1])


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole, losses = train(tmp_path / "whole.pt", 12)
    _, begun = train(tmp_path / "parts.pt", 12, interrupt=7)
    # the state on disk is that of the step before the interruption
    resumed, rest = train(tmp_path / "parts.pt", 12, resume=True)
    assert begun[: 12 - len(rest)] + rest == losses
    ours, theirs = resumed.state_dict(), whole.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def image_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny image models of random weights, given a caption and given a class."""
    root, shape, tokenizer = (
        tmp_path_factory.mktemp("images"),
        SHAPES_BY_SIZE["tiny"],
        build_caption_tokenizer(),
    )
    torch.manual_seed(0)
    save_vq(build_vq("tiny"), root / "vq", {})
    for condition in ("caption", "class"):
        transformer = randomise(build_transformer(shape, condition), seed=2)
        encoder = build_text_encoder(shape, tokenizer) if condition == "caption" else None
        words = tokenizer if condition == "caption" else None
        save_image_model(transformer, encoder, words, root / condition, {}, vq=root / "vq")  # type: ignore[arg-type]
    return {condition: root / condition for condition in ("caption", "class")}


@pytest.fixture
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode six tokens of a prompt alone."""
    images = image_data.LlamaGenImages
    whole = images.trial_of
    monkeypatch.setattr(images, "trial_of", lambda *rows: replace(whole(*rows), new_tokens=6))


@pytest.mark.parametrize(
    ("condition", "method"), [("caption", "eagle"), *(("class", name) for name in METHODS)]
)
def test_a_drafter_of_images(
    condition: str,
    method: str,
    image_folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if method != "ssd":  # which learns from whole images
        shorten(monkeypatch)
    losses: list[float] = []
    out = train_drafter(
        image_folders[condition],
        tmp_path / "out",
        scene_data,
        method=method,
        steps=12,
        batch_size=2,
        on_step=lambda step, loss: losses.append(loss),
    )
    assert losses[-1] < losses[0]
    record = json.loads((out / "training.json").read_text())
    assert record["stages"][0]["acceptance"] >= 1 and record["method"] == method
    tensors = load_file(out / "model.safetensors").values()
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.float16}
    head = AutoModel.from_pretrained(out)
    assert type(head) is METHODS[method].head and head.dtype == torch.float32 and head.config.vocabulary == 64


def test_a_drafter_may_begin_with_another(
    image_folders: dict[str, Path], short_trials: None, tmp_path: Path
) -> None:
    target = image_folders["class"]
    first = train_drafter(target, tmp_path / "first", scene_data, steps=1, batch_size=2)
    second = train_drafter(target, tmp_path / "second", scene_data, start=first, steps=1, batch_size=2)
    record = json.loads((second / "training.json").read_text())
    assert len(record["stages"]) == 2 and "--from" in record["command"]
    with pytest.raises(CheckpointError, match="start"):
        train_drafter(target, tmp_path / "third", scene_data, start=target, steps=1)


@pytest.mark.parametrize(("condition", "asked"), [("caption", "a red ring"), ("class", 7)])
def test_images_of_a_file(
    condition: str, asked: str | int, image_folders: dict[str, Path], short_trials: None, tmp_path: Path
) -> None:
    """Any size of image, paths beside the file; equal steps give equal rows."""
    name = "prompt" if condition == "caption" else "class"
    for index in range(4):
        Image.new("RGB", (50 + 30 * index, 80), (index, 90, 200)).save(tmp_path / f"{index}.png")
    lines = [json.dumps({"image": f"{index}.png", name: asked}) for index in range(4)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([*lines, ""]))
    target = image_data.open_llamagen(image_folders[condition], torch.device("cpu"))
    data = ImageFile(target, image_folders[condition], 3, 0, file)
    examples, again = data.batch(1, 0).examples, data.batch(1, 0).examples
    for one, other in zip(examples, again, strict=True):
        assert torch.equal(one.inputs["input_ids"], other.inputs["input_ids"])
        assert one.inputs["input_ids"].shape[1] == one.answer + 256
    train_drafter(image_folders[condition], tmp_path / "out", data=file, steps=1, batch_size=1)
    (tmp_path / "0.png").write_bytes((tmp_path / "0.png").read_bytes()[:60])  # of the two that are drawn
    data = ImageFile(target, image_folders[condition], 3, 0, file)
    skipping = [data.batch(step, 0).examples for step in range(2)]
    assert list(data.damaged.found) == ["data, line 1"] and "0.png" in data.left_out["damaged"][0]
    again = ImageFile(target, image_folders[condition], 3, 0, file).batch(1, 0).examples
    for one, other in zip(skipping[1], again, strict=True):
        assert torch.equal(one.inputs["input_ids"], other.inputs["input_ids"])
    (tmp_path / "1.png").write_bytes(b"")
    with pytest.raises(MediaError, match="a row with an image that can be read"):
        ImageFile(target, image_folders[condition], 3, 0, file).batch(0, 0)
    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    for line in (
        "{",
        "[]",
        '{"image": "0.png"}',
        json.dumps({"image": "9.png", name: asked}),
        json.dumps({"image": "0.png", name: asked, "negative": "a"}),
    ):
        file.write_text("\n".join([*lines, line]))
        with pytest.raises(InputError, match="line 5"):
            ImageFile(target, image_folders[condition], 3, 0, file)


def test_examples_of_images_are_prompt_and_codes(image_folders: dict[str, Path]) -> None:
    llamagen = image_data.open_llamagen(image_folders["caption"], torch.device("cpu"))
    data = SceneImages(llamagen, image_folders["caption"], batch_size=24, seed=3)
    examples = data.batch(5, 0).examples
    assert [e.inputs["input_ids"].tolist() for e in examples] == [
        e.inputs["input_ids"].tolist() for e in data.batch(5, 0).examples
    ]
    null = llamagen.model.model.cls_embedding.uncond_embedding
    dropped = 0
    for example in examples:
        ids, features = example.inputs["input_ids"][0], example.inputs["caption_features"][0]
        assert len(ids) == example.answer + 256 and len(features) == example.answer
        assert (ids[: example.answer] == 64).all() and (ids[example.answer :] < 64).all()
        dropped += torch.equal(features, null[-len(features) :])
    assert 0 < dropped < 10, "about a tenth is shown without its caption"


def test_a_larger_target_learns_from_larger_images(image_folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(image_folders["class"], tmp_path / "larger")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"grid_size": 32}))
    llamagen = image_data.open_llamagen(folder, torch.device("cpu"))
    (example,) = SceneImages(llamagen, folder, batch_size=1, seed=0).batch(0, 0).examples
    assert example.inputs["input_ids"].shape[1] == example.answer + 32 * 32


@pytest.mark.parametrize("condition", ["caption", "class"])
def test_the_teacher_reads_a_image_as_decoding_does(condition: str, image_folders: dict[str, Path]) -> None:
    """Prompt first, then its tokens: the same states at the same places, for captions of any length."""
    llamagen = image_data.open_llamagen(image_folders[condition], torch.device("cpu"))
    data = SceneImages(llamagen, image_folders[condition], batch_size=3, seed=0)
    examples = data.batch(0, 0).examples
    reading, positions = read(llamagen, examples, (0, -1)), positions_of(llamagen, examples)
    for row, example in enumerate(examples):
        ids, start = example.inputs["input_ids"], example.answer
        prompt = {name: value for name, value in example.inputs.items() if name != "position_ids"}
        state, output = llamagen.prefill([{**prompt, "input_ids": ids[:, :start]}], ids.shape[1], (0, -1))
        after = llamagen.score(state, Draft.chain(ids[:, start:], DraftKind.POINT))
        state.close()
        for tap, ours in reading.taps.items():
            decoded = torch.cat([output.taps[tap][0], after.taps[tap]], 1)[0]
            assert torch.allclose(ours[row, : ids.shape[1]], decoded, atol=1e-5)
        first = llamagen.config.prefix_length
        assert positions[row, start : ids.shape[1]].tolist() == list(range(first, first + 256))
        assert reading.learnt[row].nonzero()[:, 0].tolist() == list(range(start, ids.shape[1]))


@pytest.mark.parametrize(
    ("argument", "settings", "error"),
    [
        ("method", {"method": "eagel", "steps": 1}, InputError),
        ("steps", {"steps": 1, "minutes": 1.0}, InputError),
        ("target", {"target": "nowhere", "steps": 1}, CheckpointError),
    ],
)
def test_what_cannot_be_trained_is_named(
    argument: str, settings: dict[str, object], error: type[InputError], tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        train_drafter(**({"target": tmp_path, "out": tmp_path / "out", "data": scene_data} | settings))  # type: ignore[arg-type]
    assert caught.value.argument == argument


def test_a_target_without_data_is_refused(tmp_path: Path) -> None:
    target().model.save_pretrained(tmp_path / "llama")
    with pytest.raises(CheckpointError, match="llama"):
        train_drafter(tmp_path / "llama", tmp_path / "out", scene_data, steps=1)
