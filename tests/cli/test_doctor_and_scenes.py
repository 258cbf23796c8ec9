"""`mmspec doctor` and `mmspec scenes`."""

import json
import re

import pytest
from PIL import Image

from mmspec.errors import CheckpointError
from mmspec.evaluation.recommendation import LIST
from mmspec.methods.dflash.export import write_head
from mmspec.plugins import METHODS
from mmspec.targets import CausalTarget
from tests.methods.dflash_checks import head_for
from tests.tiny_models import (
    tiny_llama,
    tiny_minimax,
    tiny_qwen3_5,
)


def test_doctor_names_what_is_here_and_what_is_not(run, run_json, monkeypatch):
    monkeypatch.setattr("mmspec.assets.reference_models", dict)
    findings = run_json("doctor")
    packages = {package["name"]: package for package in findings["packages"]}
    assert all(package["ok"] for package in packages.values()) and "torch" in packages
    assert packages["transformers"]["note"] == "tested (5.17 to 5.24)"
    assert all(package["ok"] or package["remedy"] for package in findings["optional"])
    assert findings["devices"][0]["name"] == "cpu"
    accelerators = {accelerator["name"]: accelerator for accelerator in findings["accelerators"]}
    assert accelerators["none"]["exactness"] == "exact" and accelerators["copy"]["needs"] is None
    assert accelerators["draft_model"]["needs"].startswith("--drafter: a smaller model")
    assert all(accelerators[name]["needs"].startswith("--drafter: a head") for name in ("eagle", "flash"))
    assert not any(model["ok"] for model in findings["reference_models"])
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = run("doctor").stdout
    assert all(row in shown for row in ("Devices", "Kernels", "Accelerators", "philox_uniform"))
    assert not re.search(r"\x1b\[3\d", shown), "NO_COLOR is set by `run`"


@pytest.mark.parametrize(
    ("backend", "runs_as", "reason"),
    [
        ("", "torch", "Triton has no kernels for cpu"),
        ("triton", "triton", "MMSPEC_BACKEND=triton, interpreted"),
        ("cuda", "none", "must be torch or triton; got 'cuda'"),
    ],
)
def test_doctor_says_what_every_kernel_runs_as_and_why(run_json, monkeypatch, backend, runs_as, reason):
    pytest.importorskip("triton")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("MMSPEC_BACKEND", backend)
    if not backend:
        monkeypatch.delenv("MMSPEC_BACKEND")
    from mmspec import kernels

    found = run_json("doctor")["kernels"]
    assert [one["name"] for one in found] == kernels.OPS
    for one in found:
        assert (one["backend"], one["ok"], one["device"]) == (runs_as, runs_as == "triton", "cpu")
        assert reason in one["reason"] and one["summary"]


def test_scenes_draws_a_sheet_that_is_the_same_for_a_seed(run, tmp_path):
    paths = [tmp_path / "deep" / name for name in ("a.png", "b.png")]
    for path in paths:
        assert run("scenes", "--out", path, "--count", 2, "--seed", 3).stdout == f"{path}\n"
    assert Image.open(paths[0]).width > 200
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_doctor_looks_at_a_model_by_its_config(run, run_json, tmp_path):
    for name, model in (("hybrid", tiny_qwen3_5()), ("refused", tiny_minimax())):
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(tmp_path / name)
    found = run_json("doctor", tmp_path / "hybrid")
    assert found["ok"] and found["layers"] == {"linear_attention": 3, "full_attention": 1}
    assert found["node_bytes"] > 0
    shown = run("doctor", tmp_path / "hybrid").stdout
    assert "3 Qwen3_5GatedDeltaNet" in shown and "in closed form" in shown
    result = run("doctor", tmp_path / "refused")
    assert result.exit_code == 1 and "layer 0 of MiniMaxForCausalLM (linear_attention)" in result.stdout
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="a folder"):
            run("doctor", folder)


@pytest.mark.parametrize(
    ("name", "accelerator", "drafter"),
    [
        ("scenes-llava", "flash", "assets/scenes-llava-flash"),  # the default of its drafters.json
        ("scenes-hybrid-dflash/../scenes-hybrid", "dflash", "assets/scenes-hybrid-dflash"),
        ("scenes-diffusion", "freedave", None),
    ],
)
def test_a_recommendation_uses_the_folder_or_the_family(run_json, name, accelerator, drafter):
    found = run_json("doctor", f"assets/{name}")["recommended"]
    assert (found["accelerator"], found["drafter"]) == (accelerator, drafter)
    assert found["command"].startswith(f"mmspec check assets/{name} --accelerator {accelerator}")


def test_a_recommendation_names_published_heads_and_exact_methods(run, run_json, llamagens, tmp_path):
    config = tiny_llama().config
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "Qwen3-8B")
    found = run_json("doctor", tmp_path / "Qwen3-8B")["recommended"]
    assert (found["accelerator"], found["drafter"]) == ("eagle3", "RedHatAI/Qwen3-8B-speculator.eagle3")
    assert found["others"] == [
        "eagle3: AngelSlim/Qwen3-8B_eagle3", "dflash: z-lab/Qwen3-8B-DFlash-b16",
        "draft_model: amd/PARD-Qwen3-0.6B",
    ]  # fmt: skip
    assert "other heads" in run("doctor", tmp_path / "Qwen3-8B").stdout
    config.save_pretrained(tmp_path / "own-llama")
    found = run_json("doctor", tmp_path / "own-llama")["recommended"]
    assert (found["accelerator"], found["drafter"]) == ("copy", None)
    assert found["command"].startswith(f"mmspec train drafter --target {tmp_path / 'own-llama'}")
    found = run_json("doctor", llamagens["class"])["recommended"]
    assert (found["accelerator"], found["drafter"]) == ("sjd", None)


def test_every_published_head_names_an_accelerator_and_its_source():
    heads = json.loads(LIST.read_text(encoding="utf-8"))["heads"]
    needed = {"target", "accelerator", "drafter", "source"}
    assert all(needed <= set(head) <= needed | {"license", "date"} for head in heads)
    assert all(METHODS[head["accelerator"]].needs for head in heads)
    assert len({(head["target"], head["drafter"]) for head in heads}) == len(heads)


def test_a_head_is_checked_for_its_target_and_by_the_list(run, run_json, tmp_path):
    """A folder with the name of a published head must hold that head, for that target."""
    target = CausalTarget(tiny_llama())
    target.config.architectures = ["LlamaForCausalLM"]
    head = head_for(target, "dspark", mask_token=7)
    folder, model = tmp_path / "LFM2.5-VL-3B-DSpark", tmp_path / "LFM2.5-VL-3B"
    folder.mkdir()
    write_head(head, "specforge", "a/target", target.config, folder)
    target.config.save_pretrained(model)
    found = run_json("doctor", model, "--head", folder)
    assert found["ok"] and "dspark" in found["accelerators"]
    assert found["listed"]["drafter"] == "LiquidAI/LFM2.5-VL-3B-DSpark"
    target.config.save_pretrained(tmp_path / "other")
    refused = run("doctor", tmp_path / "other", "--head", folder)
    assert refused.exit_code == 1 and "must have the target" in " ".join(refused.stdout.split())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"gate_depth": 3}))
    assert "gate_depth" in run("doctor", model, "--head", folder).stdout
    (folder / "config.json").write_text(json.dumps(config))
    tiny_llama(layers=3).config.save_pretrained(model)
    assert "target of 3 layers" in " ".join(run("doctor", model, "--head", folder).stdout.split())
