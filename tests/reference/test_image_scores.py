"""Scores and card of an image model, on one of a few thousand parameters that cannot draw."""

from pathlib import Path
from typing import Any

import pytest
import torch

from reference.__main__ import app
from reference.autoencoder import train_autoencoder
from reference.image import train_image
from reference.image_scores import distributions_of, load_pipeline
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


def test_the_command_prints_scores_of_classes_and_writes_their_card(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["evaluate", "image", str(folders["class"]), "--scenes", "3", "--guidance-scales", "4", "--card"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and "guidance 4" in printed and "prompts" not in printed
    assert "--scenes 3 --seed 20000 --guidance-scales 4" in (folders["class"] / "README.md").read_text()


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
