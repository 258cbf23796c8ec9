"""The shipped drafter of images: small, documented, made for the shipped model, and of use to it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModel

from mmspec.drafters.eagle import EagleDrafter
from mmspec.models.eagle import EagleHead
from mmspec.reference.training.scene_images import SceneImages
from mmspec.training.data.llamagen_images import open_llamagen
from mmspec.training.data.sequences import acceptance_length

ASSETS = Path(__file__).parents[2] / "assets"
FOLDER = ASSETS / "scenes-llamagen-eagle"


def test_it_is_small_and_carries_its_card() -> None:
    files = [path for path in FOLDER.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 3_000_000
    assert not [path for path in files if path.suffix in (".bin", ".pt", ".pkl")], "safetensors only"
    record = json.loads((FOLDER / "training.json").read_text())
    card = (FOLDER / "README.md").read_text()
    assert record["method"] == "eagle" and record["target"] == "scenes-llamagen"
    assert all(str(stage["steps"]) in card for stage in record["stages"]), "the card is of these weights"


def test_it_saves_forwards_of_its_target() -> None:
    """Two prompts, the first 48 tokens, a tree of 24 candidates; a head of random weights gets 1.02."""
    folder = ASSETS / "scenes-llamagen"
    target = open_llamagen(folder, torch.device("cpu"))
    head = AutoModel.from_pretrained(FOLDER).eval()
    assert isinstance(head, EagleHead)
    trial = replace(SceneImages(target, folder, batch_size=1, seed=0).trial(), new_tokens=48)
    drafter = EagleDrafter(head, num_draft_tokens=24, depth=3, top_k=8)
    assert acceptance_length(target, drafter, trial) > 1.1
