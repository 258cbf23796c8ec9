"""Scores and card of an image model, on one of a few thousand parameters that cannot draw."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmspec.errors import CheckpointError, InputError
from reference.__main__ import app
from reference.autoencoder import train_autoencoder
from reference.cards import write_image_card
from reference.image import train_image
from reference.image_scores import distributions_of, load_pipeline, score_image_model
from reference.latents import train_latent_model
from reference.reader import train_reader
from reference.vq import train_vq


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of captions and of classes, trained for one step each."""
    root = tmp_path_factory.mktemp("models")
    how: dict[str, Any] = {"size": "tiny", "steps": 1, "batch_size": 2}
    reader = train_reader(root / "reader", **how)
    vq = train_vq(root / "vq", **how)
    return {
        condition: train_image(root / condition, vq, reader=reader, condition=condition, **how)
        for condition in ("caption", "class")
    }


@pytest.mark.parametrize("condition", ["caption", "class"])
def test_scores_and_card(folders: dict[str, Path], condition: str) -> None:
    folder = folders[condition]
    scores = score_image_model(folder, scenes=3, guidance_scales=[1.0], batch_size=3)
    assert list(scores["guidance"]) == ["1", "4"], "the default scale is always among them"
    for figures in (*scores["guidance"].values(), scores["real"], scores["reconstructed"]):
        assert 0 <= figures["share"] <= 1
    assert ("prompts" in scores) == (condition == "caption")
    # An untrained model of 64 codes: near log 64 nats, and hardly any context.
    assert scores["nats"] == pytest.approx(np.log(64), abs=0.3)
    assert 0 < scores["neighbour_tv"] < 0.5 and 0 <= scores["redraw_tv"] < 0.5
    card = write_image_card(folder, scores, "python -m reference evaluate image tiny").read_text()
    assert "guidance 4 (default)" in card and "python -m reference evaluate image tiny" in card
    assert json.loads((folder / "training.json").read_text())["command"] in card
    assert json.loads((folder / "vq" / "training.json").read_text())["command"] in card


def test_scores_and_card_of_continuous_tokens(tmp_path: Path) -> None:
    how: dict[str, Any] = {"size": "tiny", "steps": 1, "batch_size": 2}
    reader, vae = train_reader(tmp_path / "reader", **how), train_autoencoder(tmp_path / "vae", **how)
    folder = train_latent_model(tmp_path / "mar", vae, kind="mar", reader=reader, **how)
    scores = score_image_model(folder, scenes=3, guidance_scales=[2.0], batch_size=3)
    assert scores["condition"] == "class" and list(scores["guidance"]) == ["2"]
    assert scores["guidance"]["2"]["margin"] > 0
    assert set(scores["real"]["by_attribute"]) == {"colour", "shape"}
    card = write_image_card(folder, scores, "as printed").read_text()
    assert "kernel distance" in card and "`vae/` holds" in card and "TV after a redraw" not in card


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_measured_distributions_are_those_that_images_are_drawn_from(
    folders: dict[str, Path], scale: float
) -> None:
    """Greedy images are the arg-max of the measured distributions, place by place."""
    pipe = load_pipeline(folders["caption"])
    with torch.no_grad():
        pipe.model.lm_head.weight.mul_(40)  # so that no two tokens are nearly as likely
    prompt = "a red ring left of a small blue square"
    (tokens,) = pipe(prompt, guidance_scale=scale, temperature=0.0).tokens
    (request,) = pipe.prepare(prompt, {"guidance_scale": scale}).requests
    with torch.inference_mode():
        distributions = distributions_of(pipe, request, torch.tensor([tokens]), scale)[0]
    assert distributions.argmax(-1).tolist() == tokens


def test_the_command_prints_the_scores(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["evaluate", "image", str(folders["class"]), "--scenes", "3", "--guidance-scales", "4"])
    assert ended.value.code == 0
    assert "guidance 4" in capsys.readouterr().out


def test_what_cannot_be_scored_is_refused_before_the_work(folders: dict[str, Path], tmp_path: Path) -> None:
    for wrong in ({"scenes": 2}, {"seed": 10**6}, {"guidance_scales": [-1.0]}):
        with pytest.raises(InputError):
            score_image_model(folders["class"], **wrong)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError):
        score_image_model(tmp_path)
    with pytest.raises(CheckpointError):
        write_image_card(tmp_path, {"condition": "class"}, "")
