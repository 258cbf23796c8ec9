"""`mmspec doctor` and `mmspec scenes`."""

import pytest
from PIL import Image

from mmspec.errors import CheckpointError
from tests.tiny_models import tiny_falcon_h1, tiny_qwen3_5


def test_doctor_names_what_is_here_and_what_is_not(run_json, no_reference_models):
    findings = run_json("doctor")
    assert {package["name"] for package in findings["packages"]} >= {"torch", "transformers"}
    assert all(package["ok"] for package in findings["packages"])
    assert [p["note"] for p in findings["packages"] if p["name"] == "transformers"] == [
        "tested (5.17 to 5.24)"
    ]
    for package in findings["optional"]:
        assert package["ok"] or package["remedy"]
    assert findings["devices"][0]["name"] == "cpu"
    accelerators = {accelerator["name"]: accelerator for accelerator in findings["accelerators"]}
    assert accelerators["none"]["exactness"] == "exact"
    assert accelerators["draft_model"]["needs"].startswith("--drafter: a smaller model")
    for name in ("eagle", "flash"):
        assert accelerators[name]["needs"].startswith("--drafter: a head")
    assert accelerators["copy"]["needs"] is None
    assert not any(model["ok"] for model in findings["reference_models"])


@pytest.mark.parametrize(
    ("backend", "runs_as", "reason"),
    [
        ("", "torch", "Triton has no kernels for cpu"),
        ("torch", "torch", "MMSPEC_BACKEND=torch"),
        ("triton", "triton", "MMSPEC_BACKEND=triton, interpreted"),
        ("cuda", "none", "'cuda'; allowed: torch, triton"),
    ],
)
def test_doctor_says_what_every_kernel_runs_as_and_why(run_json, monkeypatch, backend, runs_as, reason):
    pytest.importorskip("triton")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delenv("MMSPEC_BACKEND", raising=False)
    if backend:
        monkeypatch.setenv("MMSPEC_BACKEND", backend)
    from mmspec import kernels

    found = run_json("doctor")["kernels"]
    assert [one["name"] for one in found] == kernels.OPS
    for one in found:
        assert (one["backend"], one["ok"], one["device"]) == (runs_as, runs_as == "triton", "cpu")
        assert reason in one["reason"]
        assert one["summary"]


def test_doctor_prints_every_line_without_colours(run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = run("doctor")
    assert "accelerator copy" in result.stdout
    assert "device cpu" in result.stdout
    assert "kernel philox_uniform" in result.stdout
    assert "\x1b[3" not in result.stdout  # NO_COLOR is set by `run`


def test_scenes_draws_a_sheet(run, tmp_path):
    path = tmp_path / "deep" / "sheet.png"
    assert run("scenes", "--out", path, "--count", 2).stdout == f"{path}\n"
    assert Image.open(path).width > 200


@pytest.mark.parametrize("seed", [0, 3])
def test_scenes_are_the_same_for_a_seed(run, tmp_path, seed):
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for path in paths:
        run("scenes", "--out", path, "--count", 1, "--seed", seed)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_doctor_looks_at_a_model_by_its_config(run, run_json, tmp_path):
    model = tiny_qwen3_5()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path / "hybrid")
    found = run_json("doctor", str(tmp_path / "hybrid"))
    assert found["ok"] and found["layers"] == {"linear_attention": 3, "full_attention": 1}
    assert found["node_bytes"] > 0
    result = run("doctor", str(tmp_path / "hybrid"))
    assert "3 Qwen3_5GatedDeltaNet" in result.stdout and "in closed form" in result.stdout
    model = tiny_falcon_h1()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path / "refused")
    result = run("doctor", str(tmp_path / "refused"))
    assert result.exit_code == 1 and "layer 0 (hybrid)" in result.stdout
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="a folder"):
            run("doctor", str(folder))
