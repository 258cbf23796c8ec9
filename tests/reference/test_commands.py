"""`python -m reference`: options reach the trainers, and scores accept trained folders."""

import inspect

import pytest
from typer.testing import CliRunner

from mmspec.training.run import RunOptions
from reference import image_scores, vlm_scores
from reference.__main__ import app
from reference.vlm import train_vlm


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")

    def invoke(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


def test_training_options_arrive_and_exist(run, monkeypatch, tmp_path):
    called = {}

    def train(out, **options):
        called.update(options, out=out)
        return out

    monkeypatch.setattr("reference.vlm.train_vlm", train)
    out = tmp_path / "x"
    result = run("train", "vlm", "--out", out, "--size", "small", "--minutes", "2.5", "--resume")
    assert result.exit_code == 0 and result.stdout == f"{out}\n"
    wanted = {"out": out, "size": "small", "minutes": 2.5, "resume": True}
    assert wanted.items() <= called.items()
    assert set(called) <= {*inspect.signature(train_vlm).parameters, *RunOptions.__annotations__}


def test_the_help_says_how_long_and_with_how_many_examples_a_training_goes_on(run, monkeypatch):
    defaults = {}

    def training(self, out, options, **own):
        assert options == {"seed": 0, "resume": False}, "what is not given is left to the trainer"
        defaults.update(own)
        raise KeyboardInterrupt

    monkeypatch.setattr("mmspec.training.run.Training.__init__", training)
    needed = {"image": ["--vq", "x"], "latents": ["--vae", "x"]}
    for name in ("vlm", "smol", "reader", "vq", "autoencoder", "image", "latents"):
        run("train", name, "--out", "x", *needed.get(name, []))
        shown = " ".join(run("train", name, "--help").stdout.split())
        assert (
            f"{defaults['minutes']:g} minutes, with batches of {defaults['batch_size']} examples" in shown
        ), name
    for name, scores in (("vlm", vlm_scores), ("image", image_scores)):
        assert f"[default: {scores.FIRST_SEED}]" in run("evaluate", name, "--help").stdout
