"""`python -m reference`: the options arrive, and training and scores fit each other."""

import inspect
import json

import pytest
from typer.testing import CliRunner

from mmspec.errors import CheckpointError, InputError
from mmspec.training.run import RunOptions
from reference import image_scores, vlm_scores
from reference.__main__ import app
from tests.packaging.source_tree import ROOT
from tests.tiny_models import save_family


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return save_family("llava", tmp_path_factory.mktemp("models") / "tiny-llava")


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")

    def invoke(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """Arguments that `train_vlm` is called with."""
    called = {}

    def train_vlm(out, **options):
        called.update(options, out=out)
        return out

    monkeypatch.setattr("reference.vlm.train_vlm", train_vlm)
    return called


def test_training_options_arrive(run, trained, tmp_path):
    result = run("train", "vlm", "--out", tmp_path / "x", "--size", "small", "--minutes", "2.5", "--resume")
    assert result.exit_code == 0
    assert result.stdout == f"{tmp_path / 'x'}\n"
    assert trained["out"] == tmp_path / "x"
    assert (trained["size"], trained["minutes"], trained["resume"]) == ("small", 2.5, True)


def test_training_options_exist(trained, run, tmp_path, monkeypatch):
    """Every keyword that the command passes is one that the trainer has."""
    run("train", "vlm", "--out", tmp_path / "x")
    monkeypatch.undo()
    from reference.vlm import train_vlm

    assert set(trained) <= {*inspect.signature(train_vlm).parameters, *RunOptions.__annotations__}


def test_scores_are_shares(run, tiny_folder):
    shown = run("evaluate", "vlm", tiny_folder, "--scenes", 1, "--no-descriptions", "--json")
    scores = json.loads(shown.stdout)
    assert scores["model"] == str(tiny_folder)
    assert 0.0 <= scores["captions"] <= 1.0
    assert scores["scenes"] == 1


def test_scores_are_a_table(run, tiny_folder):
    result = run("evaluate", "vlm", tiny_folder, "--scenes", 1, "--no-descriptions")
    assert "captions" in result.stdout
    assert "0.0%" in result.stdout


def test_what_is_no_checkpoint_is_refused(run):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        run("evaluate", "vlm", ROOT / "mmspec")


def test_the_help_says_how_long_and_with_how_many_examples_a_training_goes_on(run, monkeypatch):
    defaults = {}

    def training(self, out, options, **own):
        assert options == {"seed": 0, "resume": False}, "what is not given is left to the trainer"
        defaults.update(own)
        raise KeyboardInterrupt

    monkeypatch.setattr("mmspec.training.run.Training.__init__", training)
    needed = {"image": ["--vq", "x"], "latents": ["--vae", "x"]}
    for name in ("vlm", "reader", "vq", "autoencoder", "image", "latents"):
        run("train", name, "--out", "x", *needed.get(name, []))
        shown = " ".join(run("train", name, "--help").stdout.split())
        assert f"{defaults['minutes']:g} minutes, {defaults['batch_size']} examples at once" in shown, name


def test_scores_are_of_the_scenes_that_the_help_names(run):
    for name, scores in (("vlm", vlm_scores), ("image", image_scores)):
        assert f"[default: {scores.FIRST_SEED}]" in run("evaluate", name, "--help").stdout


def test_a_misspelt_size_is_named(run):
    with pytest.raises(InputError, match="did you mean 'base'"):
        run("train", "vlm", "--out", "x", "--size", "bas")
