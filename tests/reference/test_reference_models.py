"""The shipped models are what their cards say: standard, small, fit for each other, and skilled."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoProcessor

from reference.vlm_scores import score_vlm

ASSETS = Path(__file__).parents[2] / "assets"
NAMES = ["scenes-llava", "scenes-llava-small"]


def test_reference_models_are_small_and_carry_their_cards() -> None:
    for name in (*NAMES, "scenes-hybrid"):
        files = [path for path in (ASSETS / name).iterdir() if path.is_file()]
        assert sum(path.stat().st_size for path in files) < 10_000_000
        card = (ASSETS / name / "README.md").read_text()
        assert "short captions right to the word" in card and "python -m reference evaluate vlm" in card
        assert not [path for path in files if path.suffix in (".bin", ".pt", ".pkl")], "safetensors only"


def test_draft_and_target_speak_the_same_tokens() -> None:
    one, other = (AutoProcessor.from_pretrained(ASSETS / name) for name in NAMES)
    assert one.tokenizer.get_vocab() == other.tokenizer.get_vocab()
    assert one.chat_template == other.chat_template
    large, small = (AutoConfig.from_pretrained(ASSETS / name).text_config for name in NAMES)
    assert large.num_hidden_layers >= 6 > small.num_hidden_layers


def test_one_file_holds_the_vision_tower_of_both() -> None:
    one, other = (ASSETS / name / "vision_tower.safetensors" for name in NAMES)
    assert other.resolve() == one.resolve()


def test_the_hybrid_and_its_heads_are_small() -> None:
    folders = [ASSETS / name for name in ("scenes-hybrid", "scenes-hybrid-dflash")]
    assert sum(path.stat().st_size for folder in folders for path in folder.iterdir()) < 6_000_000


@pytest.mark.parametrize("name", ["scenes-llava", "scenes-hybrid"])
def test_the_reference_models_caption_and_answer(name: str) -> None:
    scores: dict[str, Any] = score_vlm(ASSETS / name, scenes=24, descriptions=False, batch_size=24)
    # The card's figures come from 500 scenes; of 24, fewer than 18 right has a chance below 1e-3 at 90 %.
    assert scores["captions"] >= 0.75
    assert scores["answers"] >= 0.75
