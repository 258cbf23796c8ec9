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
    """Models given captions, classes, and classes with continuous tokens, trained for one step each."""
    root = tmp_path_factory.mktemp("models")
    how: dict[str, Any] = {"size": "tiny", "steps": 1, "batch_size": 1}
    reader, vq = train_reader(root / "reader", **how), train_vq(root / "vq", **how)
    vae, how["reader"] = train_autoencoder(root / "vae", **how), reader
    return {
        **{name: train_image(root / name, vq, condition=name, **how) for name in ("caption", "class")},
        "mar": train_latent_model(root / "mar", vae, kind="mar", **how),
    }


@pytest.mark.slow
def test_scores_and_card_of_captions(folders: dict[str, Path]) -> None:
    folder = folders["caption"]
    scores = score_image_model(folder, scenes=3, guidance_scales=[1.0], batch_size=3)
    assert list(scores["guidance"]) == ["1", "4"], "the default scale is always among them"
    for figures in (*scores["guidance"].values(), scores["real"], scores["reconstructed"], scores["prompts"]):
        assert 0 <= figures["share"] <= 1
    # An untrained model of 64 codes: near log 64 nats, and hardly any context.
    assert scores["nats"] == pytest.approx(np.log(64), abs=0.3)
    assert 0 < scores["neighbour_tv"] < 0.5 and 0 <= scores["redraw_tv"] < 0.5
    card = write_image_card(folder, scores, "python -m reference evaluate image tiny").read_text()
    assert "guidance 4 (default)" in card and "python -m reference evaluate image tiny" in card
    assert json.loads((folder / "training.json").read_text())["command"] in card
    assert json.loads((folder / "vq" / "training.json").read_text())["command"] in card


def test_the_command_prints_scores_of_classes_and_writes_their_card(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["evaluate", "image", str(folders["class"]), "--scenes", "3", "--guidance-scales", "4", "--card"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and "guidance 4" in printed and "prompts" not in printed
    assert "--scenes 3 --seed 20000 --guidance-scales 4" in (folders["class"] / "README.md").read_text()


@pytest.mark.slow
def test_scores_and_card_of_continuous_tokens(folders: dict[str, Path]) -> None:
    scores = score_image_model(folders["mar"], scenes=3, guidance_scales=[2.0], batch_size=3)
    assert scores["condition"] == "class" and list(scores["guidance"]) == ["2"]
    assert scores["guidance"]["2"]["margin"] > 0
    assert set(scores["real"]["by_attribute"]) == {"colour", "shape"}
    card = write_image_card(folders["mar"], scores, "as printed").read_text()
    assert "kernel distance" in card and "`vae/` holds" in card and "TV after a redraw" not in card


def test_measured_distributions_are_those_that_images_are_drawn_from(folders: dict[str, Path]) -> None:
    """Greedy images are the arg-max of the measured distributions, place by place."""
    pipe = load_pipeline(folders["caption"])
    with torch.no_grad():
        pipe.model.lm_head.weight.mul_(40)  # so that no two tokens are nearly as likely
    prompt = "a red ring left of a small blue square"
    for scale in (1.0, 2.0):
        (tokens,) = pipe(prompt, guidance_scale=scale, temperature=0.0).tokens
        (request,) = pipe.prepare(prompt, {"guidance_scale": scale}).requests
        with torch.inference_mode():
            distributions = distributions_of(pipe, request, torch.tensor([tokens]), scale)[0]
        assert distributions.argmax(-1).tolist() == tokens


def test_what_cannot_be_scored_is_refused_before_the_work(folders: dict[str, Path], tmp_path: Path) -> None:
    for wrong in ({"scenes": 2}, {"seed": 10**6}, {"guidance_scales": [-1.0]}):
        with pytest.raises(InputError):
            score_image_model(folders["class"], **wrong)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError):
        score_image_model(tmp_path)
    with pytest.raises(CheckpointError):
        write_image_card(tmp_path, {"condition": "class"}, "")
