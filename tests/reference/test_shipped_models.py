"""The shipped models match their cards: standard formats, sizes, matching drafters, and scores."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModel, AutoProcessor, AutoTokenizer

from mmspec.core.interfaces import Drafter
from mmspec.evaluation.quality.attributes import AttributeJudge
from mmspec.families.image_parts import load_vq
from mmspec.families.llamagen.target import LlamaGenTarget
from mmspec.models.autoencoders import decode_tokens, encode_image
from mmspec.pipelines import MMSpecPipeline
from mmspec.scenes import IMAGE_TOKENS, caption, render, sample_scene
from mmspec.scenes.reader import load_reader
from mmspec.training.data.images import open_llamagen
from mmspec.training.data.scenes import SceneImages
from mmspec.training.data.sequences import Trial, acceptance_length
from reference.image_scores import attribute_scores
from reference.vlm_scores import score_vlm

ASSETS = Path(__file__).parents[2] / "assets"
LLAMAGEN, LONG = ASSETS / "scenes-llamagen", ASSETS / "scenes-llamagen-long"
MEGABYTES = {"scenes-llamagen": 20, "scenes-llava": 10, "scenes-llava-small": 10}  # others: less than 6
LEAST = 3.0  # tokens per forward pass of heads for text; heads with random weights have 1.0 to 1.1


def test_folders_are_small_hold_no_pickles_and_their_cards_are_of_these_weights() -> None:
    for folder in (card.parent for card in ASSETS.glob("s*/README.md")):
        files = [path for path in folder.rglob("*") if path.is_file()]
        own = [path for path in files if path.resolve().is_relative_to(folder)]
        assert sum(path.stat().st_size for path in own) < 1_000_000 * MEGABYTES.get(folder.name, 6), folder
        assert not [path for path in files if path.suffix in (".bin", ".pt", ".pkl")], "safetensors only"
        record, card = json.loads((folder / "training.json").read_text()), (folder / "README.md").read_text()
        for stage in record["stages"]:
            assert str(stage["steps"]) in card or f"{stage['steps']:,}" in card, folder
        if "method" in record:
            assert folder.name == f"{record['target']}-{record['method']}"
        else:
            assert "python -m reference train" in card, folder


def test_draft_and_target_speak_the_same_tokens_and_share_the_file_of_their_tower() -> None:
    folders = [ASSETS / name for name in ("scenes-llava", "scenes-llava-small")]
    one, other = map(AutoProcessor.from_pretrained, folders)
    assert one.tokenizer.get_vocab() == other.tokenizer.get_vocab()
    assert one.chat_template == other.chat_template
    assert len({(folder / "vision_tower.safetensors").resolve() for folder in folders}) == 1


@pytest.mark.parametrize("name", ["scenes-llava", "scenes-hybrid"])
@pytest.mark.every(2)
def test_the_models_caption_and_answer(name: str) -> None:
    """Greedy, on fixed scenes. The cards state 90 % or more of 500 scenes."""
    scores = score_vlm(ASSETS / name, scenes=12, descriptions=False, batch_size=24)
    assert scores["captions"] >= 0.75 and scores["answers"] >= 0.75


@functools.cache
def pipeline(model: str) -> Any:
    return MMSpecPipeline.from_pretrained(str(ASSETS / model), accelerator="none", dtype=torch.float32)


def answer(model: str) -> Any:
    image = Image.fromarray(render(sample_scene(21_001)))
    return pipeline(model)("describe the picture in detail.", images=image, max_new_tokens=64)


@functools.cache
def plain(model: str) -> list[list[int]]:
    pipeline(model).set_accelerator("none")
    tokens: list[list[int]] = answer(model).tokens
    return tokens


@pytest.mark.parametrize(
    ("name", "accelerator"),
    [
        ("scenes-llava-eagle", "eagle"),
        ("scenes-llava-flash", "flash"),
        ("scenes-hybrid-dflash", "dflash"),
        ("scenes-hybrid-dspark", "dspark"),
        ("scenes-hybrid", "mtp"),
    ],
)
@pytest.mark.every(2)
def test_a_head_says_the_same_in_fewer_forwards(name: str, accelerator: str) -> None:
    model, _, method = name.rpartition("-")
    model, own = (name, {}) if accelerator == "mtp" else (model, {"drafter": str(ASSETS / name)})
    due = plain(model)
    pipeline(model).set_accelerator(accelerator, **own)
    fast = answer(model)
    assert fast.tokens == due and fast.stats.acceptance_length > LEAST, method


def test_image_models_draw_in_the_tokens_of_their_tokenizer() -> None:
    config, vq = AutoConfig.from_pretrained(LLAMAGEN), load_vq(str(LLAMAGEN))
    assert config.condition_type == "caption" and config.vocab_size == vq.config.num_vq_embeddings == 1024
    tokenizer = AutoTokenizer.from_pretrained(LLAMAGEN / "tokenizer")
    ids = tokenizer("a red ring left of a small blue square", add_special_tokens=False)["input_ids"]
    assert len(ids) == 9 and tokenizer.unk_token_id not in ids
    assert tokenizer.model_max_length == config.caption_length
    assert (LONG / "vq").resolve() == (LLAMAGEN / "vq").resolve()
    pipe: Any = MMSpecPipeline.from_pretrained(LONG, accelerator="none")
    assert pipe.dtype == torch.float32, "float8 on disk only"
    assert pipe.target.grid.rows == pipe.target.grid.columns == 32


def test_the_reader_reads_and_the_tokenizer_keeps_what_it_reads() -> None:
    scenes = [sample_scene(seed, profile=IMAGE_TOKENS) for seed in range(30_000, 30_040)]
    images = np.stack([render(scene, 64) for scene in scenes])
    real = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    judge = AttributeJudge(load_reader(LLAMAGEN / "reader"))
    captions = [caption(scene) for scene in scenes]
    assert min(attribute_scores(judge, real, captions).by_attribute.values()) >= 0.95
    vq = load_vq(str(LLAMAGEN))
    tokens = encode_image(vq, real * 2 - 1)
    assert len(tokens.unique()) > 800, "the codebook is in use"
    made = (decode_tokens(vq, tokens) + 1) / 2
    assert attribute_scores(judge, made, captions).share >= 0.96


@functools.cache
def trial(folder: Path) -> tuple[LlamaGenTarget, Trial]:
    target = open_llamagen(folder, torch.device("cpu"))
    return target, SceneImages(target, folder, batch_size=1, seed=0).trial()


def accepted(drafter: Drafter, new_tokens: int, folder: Path = LLAMAGEN) -> float:
    target, whole = trial(folder)
    return acceptance_length(target, drafter, replace(whole, new_tokens=new_tokens))


def head_of(method: str, target: Path = LLAMAGEN) -> Any:
    return AutoModel.from_pretrained(target.with_name(f"{target.name}-{method}")).eval()
