"""`mmspec train`: the options arrive at the trainers."""

import inspect

from mmspec.training import draft_model, drafter
from mmspec.training.run import RunOptions

DISTILLED = ("start", "divergence", "beta", "own_share", "new_tokens", "regenerate", "rate", "save_dtype")


def test_options_of_drafters_are_those_of_the_trainer(run, run_json, monkeypatch, tmp_path):
    called, known = {}, {*inspect.signature(drafter.train_drafter).parameters, *RunOptions.__annotations__}

    def train_drafter(target, out, **options):
        called.update(options, target=target, out=out)
        return out

    monkeypatch.setattr(drafter, "train_drafter", train_drafter)
    train = ("train", "drafter", "--target", "llava-hf/llava-1.5-7b-hf", "--method")
    asked = ["--data", "a.jsonl", "--max-length", 9, "--regenerate", 64, "--dtype", "bfloat16"]
    asked += [
        "--learn-prompts",
        "--accumulate",
        4,
        "--log-dir",
        tmp_path / "logs",
        "--states",
        tmp_path / "states",
    ]
    result = run(*train, "flash", *asked)
    assert result.exit_code == 0 and set(called) <= known
    assert str(called["out"]) == "llava-1.5-7b-hf-flash", "nothing else is needed"
    assert called["target"] == "llava-hf/llava-1.5-7b-hf" and called["data"].name == "a.jsonl"
    assert (called["max_length"], called["regenerate"], called["accumulate"]) == (9, 64, 4)
    assert (called["dtype"], called["log_dir"]) == ("bfloat16", tmp_path / "logs")
    assert called["states"] == tmp_path / "states" and called["learn_prompts"] is True
    method = "flash:block=10:compressor=latent"
    assert run_json(*train, method, "--out", tmp_path / "x")["method"] == method
    assert (called["method"], called["settings"]) == ("flash", {"block": 10, "compressor": "latent"})


def test_options_of_draft_models_are_those_of_the_trainer(run_json, monkeypatch, tmp_path):
    called = {}

    def train_draft_model(target, out, data, **options):
        called.update(options, target=target, out=out, data=data)
        return out

    known = {*inspect.signature(train := draft_model.train_draft_model).parameters}
    monkeypatch.setattr(draft_model, "train_draft_model", train_draft_model)
    asked = ["train", "draft-model", "--target", "a/my-model", "--data", "a.jsonl"]
    assert run_json(*asked)["divergence"] == "forward_kl" and str(called["out"]) == "my-model-draft"
    assert set(called) <= known | RunOptions.__annotations__.keys()
    assert all(called[name] == inspect.signature(train).parameters[name].default for name in DISTILLED)
    more = ["--from", "layers:3", "--divergence", "tvd", "--own-share", 1, "--new-tokens", 9, "--steps", 5]
    run_json(*asked, *more, "--rate", 0.5, "--save-dtype", "bfloat16", "--out", tmp_path)
    given = ["start", "divergence", "own_share", "new_tokens", "steps", "rate", "save_dtype", "out"]
    assert [called[name] for name in given] == ["layers:3", "tvd", 1, 9, 5, 0.5, "bfloat16", tmp_path]
