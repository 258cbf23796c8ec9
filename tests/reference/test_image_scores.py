"""Scores and card of an image model, on one of a few thousand parameters that cannot draw."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmspec.decoding.sampling import Sampler
from mmspec.errors import CheckpointError, InputError
from reference.__main__ import app
from reference.image import train_image
from reference.image_card import write_card
from reference.image_scores import ImageModel, _distributions, score_image_model
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
    scores = score_image_model(folder, scenes=2, guidance_scales=[1.0, 2.5], batch_size=2)
    assert list(scores["guidance"]) == ["1", "2.5", "4"], "the default scale is always among them"
    for figures in (*scores["guidance"].values(), scores["real"], scores["reconstructed"]):
        assert 0 <= figures["share"] <= 1
    assert ("prompts" in scores) == (condition == "caption")
    # An untrained model of 64 codes: near log 64 nats, and hardly any context.
    assert scores["nats"] == pytest.approx(np.log(64), abs=0.3)
    assert 0 < scores["neighbour_tv"] < 0.5 and 0 <= scores["redraw_tv"] < 0.5
    card = write_card(folder, scores, "python -m reference evaluate image tiny").read_text()
    assert "guidance 4 (default)" in card and "python -m reference evaluate image tiny" in card
    assert json.loads((folder / "training.json").read_text())["command"] in card
    assert json.loads((folder / "vq" / "training.json").read_text())["command"] in card


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_measured_distributions_are_those_that_images_are_drawn_from(
    folders: dict[str, Path], scale: float
) -> None:
    """Greedy images of the loop are the arg-max of the measured distributions, place by place."""
    model = ImageModel.from_folder(folders["caption"])
    prompts = ["a red ring left of a small blue square", "a large star on sand."]
    with torch.no_grad():
        model.target.model.lm_head.weight.mul_(40)  # so that no two tokens are nearly as likely
    tokens = model.draw(prompts, Sampler(guidance_scale=scale), [0, 1])
    for prompt, row in zip(prompts, tokens, strict=True):
        with torch.inference_mode():
            distributions = _distributions(model, model.request(prompt), row[None], scale)[0]
        assert torch.equal(distributions.argmax(-1), row)


def test_equal_seeds_draw_equal_images_whatever_the_batch(folders: dict[str, Path]) -> None:
    model = ImageModel.from_folder(folders["class"])
    sampler = Sampler(1.0, guidance_scale=2.0)
    together = model.draw([3, 17, 40], sampler, [5, 6, 7])
    alone = model.draw([3, 17, 40], sampler, [5, 6, 7], batch_size=1)
    assert torch.equal(together, alone)


def test_the_command_prints_the_scores(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["evaluate", "image", str(folders["class"]), "--scenes", "1", "--guidance-scales", "3"])
    assert ended.value.code == 0
    assert "guidance 3" in capsys.readouterr().out


def test_what_cannot_be_scored_is_refused_before_the_work(folders: dict[str, Path], tmp_path: Path) -> None:
    for call in (
        lambda: score_image_model(folders["class"], scenes=0),
        lambda: score_image_model(folders["class"], seed=10**6),
        lambda: score_image_model(folders["class"], guidance_scales=[-1.0]),
    ):
        with pytest.raises(InputError):
            call()
    with pytest.raises(CheckpointError):
        score_image_model(tmp_path)
    with pytest.raises(CheckpointError):
        write_card(tmp_path, {"condition": "class"}, "")
