"""Training with weights and optimizer states in parts: two processes, FSDP 2 over gloo, on CPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from PIL import Image
from safetensors.torch import load_file

from mmspec.errors import InputError
from mmspec.training.run import open_accelerator
from reference.vq import train_vq
from tests.packaging.source_tree import ROOT
from tests.tiny_models import save_family
from tests.training.sharded_runs import STEPS, train_head


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two processes have done all that `sharded_runs` does."""
    folder = tmp_path_factory.mktemp("sharded")
    save_family("llava", folder / "target")
    Image.new("RGB", (30, 30), "red").save(folder / "circle.png")
    row = {"prompt": "describe the circle", "response": "the circle is red"}
    rows = [row | ({"image": "circle.png"} if index % 2 else {}) for index in range(12)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(ROOT / "tests" / "training" / "sharded_runs.py"), str(folder)]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def state_of(folder: Path, name: str) -> Any:
    return torch.load(folder / f"{name}.training.pt", weights_only=True)


def settings_of(state: Any) -> Any:
    """The groups of optimizers; torch reads tuples back as lists."""
    return json.loads(json.dumps(state["optimizers"]["param_groups"]))


def assert_equal(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "vlm-"])
def test_a_resumed_sharded_run_ends_where_an_uninterrupted_one_does(runs: Path, prefix: str) -> None:
    """Within one stage, and in the second of two."""
    stopped, whole = state_of(runs, f"{prefix}stopped"), state_of(runs, f"{prefix}whole")
    assert stopped["step"] == whole["step"] > 0 and stopped["stage"] == whole["stage"]
    assert_equal(stopped["weights"], whole["weights"])
    assert_equal(stopped["optimizers"]["state"], whole["optimizers"]["state"])
    assert settings_of(stopped) == settings_of(whole)
    ours, theirs = (
        load_file(runs / f"{prefix}{name}" / "model.safetensors") for name in ("stopped", "whole")
    )
    assert_equal(ours, theirs)


@pytest.mark.slow
def test_sharded_weights_become_those_of_processes_that_hold_them_all(runs: Path) -> None:
    """Sums depend on the order of what is summed."""
    sharded, parallel = state_of(runs, "whole"), state_of(runs, "parallel")
    for name, ours in sharded["weights"].items():
        assert (ours - parallel["weights"][name]).abs().mean() < 3e-5, name  # they have moved by some 5e-4
    assert settings_of(sharded) == settings_of(parallel)
    assert sharded["optimizers"]["state"].keys() == parallel["optimizers"]["state"].keys()


@pytest.mark.slow
def test_one_process_goes_on_from_the_state_of_two(runs: Path) -> None:
    before = load_file(runs / "whole" / "model.safetensors")
    train_head(runs, "whole", resume=True)
    assert_equal(load_file(runs / "whole" / "model.safetensors"), before)
    made = json.loads((runs / "whole" / "training.json").read_text())
    assert made["stages"][0]["steps"] == STEPS and "processes" not in made


def test_shards_that_are_no_matrices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Accelerator, "is_fsdp2", False)
    for kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        monkeypatch.setattr(Accelerator, "distributed_type", kind)
        with pytest.raises(InputError, match="fsdp_version 2"):
            open_accelerator()


def test_a_codebook_is_not_sharded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Accelerator, "is_fsdp2", True)
    with pytest.raises(InputError, match="FSDP would lose the codes"):
        train_vq(tmp_path / "vq", size="tiny", steps=1)
