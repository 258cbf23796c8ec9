"""`mmspec train vlm` and `mmspec evaluate vlm`: the options arrive, and the two fit each other."""

import importlib

import pytest

from mmspec.training.run import RunOptions
from tests.packaging.source_tree import ROOT


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """What `train_vlm` is called with."""
    called = {}

    def train_vlm(out, **options):
        called.update(options, out=out)
        return out

    monkeypatch.setattr("mmspec.reference.training.vlm.train_vlm", train_vlm)
    return called


def test_training_options_arrive(run, trained, tmp_path):
    result = run("train", "vlm", "--out", tmp_path / "x", "--size", "small", "--minutes", "2.5", "--resume")
    assert result.exit_code == 0
    assert result.stdout == f"{tmp_path / 'x'}\n"
    assert trained["out"] == tmp_path / "x"
    assert (trained["size"], trained["minutes"], trained["resume"]) == ("small", 2.5, True)


def test_training_options_exist(trained, run, tmp_path, monkeypatch):
    """Every keyword that the command passes is one that the trainer has."""
    import inspect

    run("train", "vlm", "--out", tmp_path / "x")
    monkeypatch.undo()
    from mmspec.reference.training.vlm import train_vlm

    assert set(trained) <= {*inspect.signature(train_vlm).parameters, *RunOptions.__annotations__}


def test_scores_are_shares(run_json, tiny_folder):
    scores = run_json("evaluate", "vlm", tiny_folder, "--scenes", 1, "--no-descriptions")
    assert scores["model"] == str(tiny_folder)
    assert 0.0 <= scores["captions"] <= 1.0
    assert scores["scenes"] == 1


def test_scores_are_a_table(run, tiny_folder):
    result = run("evaluate", "vlm", tiny_folder, "--scenes", 1, "--no-descriptions")
    assert "captions" in result.stdout
    assert "0.0%" in result.stdout


def test_what_is_no_checkpoint_is_refused(run):
    from mmspec.errors import CheckpointError

    with pytest.raises(CheckpointError, match=r"config\.json"):
        run("evaluate", "vlm", ROOT / "mmspec")


def test_a_method_of_drafters_is_written_with_its_settings(run, run_json, monkeypatch, tmp_path):
    called = {}

    def train_drafter(target, out, **options):
        called.update(options)
        return out

    monkeypatch.setattr("mmspec.training.drafter.train_drafter", train_drafter)
    method = "flash:block=10:compressor=latent"
    result = run_json("train", "drafter", "--target", "t", "--out", tmp_path / "x", "--method", method)
    assert (called["method"], called["settings"]) == ("flash", {"block": 10, "compressor": "latent"})
    assert result["method"] == method


def test_options_of_drafters_are_those_of_the_trainer(run, monkeypatch, tmp_path):
    import inspect

    from mmspec.training import drafter

    called, known = {}, {*inspect.signature(drafter.train_drafter).parameters, *RunOptions.__annotations__}

    def train_drafter(target, out, **options):
        called.update(options, target=target, out=out)
        return out

    monkeypatch.setattr(drafter, "train_drafter", train_drafter)
    asked = ["--data", "a.jsonl", "--max-length", 9, "--regenerate", 64, "--dtype", "bfloat16"]
    asked += ["--accumulate", 4, "--log-dir", tmp_path / "logs"]
    result = run("train", "drafter", "--target", "llava-hf/llava-1.5-7b-hf", "--method", "flash", *asked)
    assert result.exit_code == 0 and set(called) <= known
    assert str(called["out"]) == "llava-1.5-7b-hf-flash", "nothing else is needed"
    assert called["target"] == "llava-hf/llava-1.5-7b-hf" and called["data"].name == "a.jsonl"
    assert (called["max_length"], called["regenerate"], called["accumulate"]) == (9, 64, 4)
    assert (called["dtype"], called["log_dir"]) == ("bfloat16", tmp_path / "logs")


def test_the_help_names_every_method_of_drafters(run):
    from mmspec.training.methods import METHODS

    shown = " ".join(run("train", "drafter", "--help").stdout.split())
    assert all(name in shown for name in METHODS)


@pytest.mark.parametrize("name", ["vlm", "reader", "vq", "autoencoder", "image", "drafter"])
def test_the_help_says_how_long_and_with_how_many_examples_a_training_goes_on(run, monkeypatch, name):
    defaults = {}

    def training(self, out, options, **own):
        assert options == {"seed": 0, "resume": False}, "what is not given is left to the trainer"
        defaults.update(own)
        raise KeyboardInterrupt

    monkeypatch.setattr("mmspec.training.run.Training.__init__", training)
    needed = {"image": ["--vq", "x"], "drafter": ["--target", "x"]}
    run("train", name, "--out", "x", *needed.get(name, []))
    shown = " ".join(run("train", name, "--help").stdout.split())
    assert f"{defaults['minutes']:g} minutes, {defaults['batch_size']} examples at once" in shown


@pytest.mark.parametrize("name", ["vlm", "image"])
def test_scores_are_of_the_scenes_that_the_help_names(run, name):
    scoring = importlib.import_module(f"mmspec.reference.scoring.{name}")
    assert f"[default: {scoring.FIRST_SEED}]" in run("evaluate", name, "--help").stdout
