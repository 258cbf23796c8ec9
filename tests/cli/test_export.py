"""The command `mmspec export`."""

import json
import shutil

import pytest
import torch

from mmspec.errors import CheckpointError, InputError
from mmspec.heads.checkpoint import head_of
from mmspec.methods.eagle3.head import Eagle3Head
from mmspec.methods.eagle3.published import read_eagle3
from mmspec.methods.mtp.published import read_mtp
from mmspec.targets import CausalTarget
from tests.contracts.running import generate
from tests.methods.mtp_checks import head_for
from tests.methods.test_medusa import published
from tests.tiny_models import tiny_llama, tiny_qwen3_5

LLAVA = "assets/scenes-llava"


@pytest.mark.parametrize("layout", ["speculators", "specforge"])
def test_a_head_is_written_and_drafts_as_before(run, tmp_path, eagle3_head, layout):
    from transformers import AutoConfig

    out = tmp_path / "out"
    result = run("export", eagle3_head, "--out", out, "--to", layout, "--target", LLAVA, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["taps"] == [3, 4, 5]
    again = read_eagle3(out, AutoConfig.from_pretrained(LLAVA))
    stored = Eagle3Head.from_pretrained(eagle3_head).state_dict()
    assert stored.keys() == again.state_dict().keys()
    assert all(torch.equal(stored[name], weight) for name, weight in again.state_dict().items())
    asked = ("--accelerator", "eagle3", "--drafter", out, "--compare", "--max-new-tokens", 6)
    assert run("caption", *asked).exit_code == 0


def in_hub_cache(cache, name):
    """Make the folder of a repository's only revision in a cache of the hub."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    return repository / "snapshots" / "abc"


@pytest.mark.parametrize("layout", ["speculators", "specforge"])
def test_a_head_with_a_hub_id_needs_no_accelerator(run, tmp_path, monkeypatch, eagle3_head, layout):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = in_hub_cache(tmp_path, "acme/head")
    assert (
        run("export", eagle3_head, "--out", tmp_path / "out", "--to", layout, "--target", LLAVA).exit_code
        == 0
    )
    shutil.copytree(tmp_path / "out", folder, dirs_exist_ok=True)
    result = run("caption", "--drafter", "acme/head", "--max-new-tokens", 6, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)[0]["accelerator"] == "eagle3"


def test_heads_without_a_config_and_sharded_draft_models_are_recognised_by_hub_id(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    torch.save(published(), in_hub_cache(tmp_path, "acme/medusa") / "medusa_lm_head.pt")
    assert head_of("acme/medusa") == "medusa"
    model = tiny_llama()
    model.save_pretrained(folder := in_hub_cache(tmp_path, "acme/draft"), max_shard_size="20KB")
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    assert (folder / "model.safetensors.index.json").is_file() and head_of("acme/draft") is None
    with pytest.raises(CheckpointError, match="nor in the hub's cache"):
        head_of("acme/none")


def test_a_trained_head_goes_into_a_copy_of_its_target(tmp_path, run) -> None:
    """`mmspec export --to checkpoint`: the copy contains the head, and its model is unchanged."""
    target = CausalTarget(tiny_qwen3_5())
    head = head_for(target)
    target.model.save_pretrained(tmp_path / "model")
    head.save_pretrained(tmp_path / "head")
    where = ("--to", "checkpoint", "--target", tmp_path / "model")
    assert run("export", tmp_path / "head", "--out", tmp_path / "both", *where).exit_code == 0
    read = read_mtp(tmp_path / "both", target.config)
    assert read is not None
    assert all(torch.equal(read.state_dict()[name], own) for name, own in head.state_dict().items())
    model = type(target.model).from_pretrained(tmp_path / "both").eval()
    assert model.config.mtp_num_hidden_layers == 1
    assert generate(model, [3, 1, 4, 1, 5], 8) == generate(target.model, [3, 1, 4, 1, 5], 8)
    with pytest.raises(CheckpointError, match="must not have an MTP layer already"):
        run("export", tmp_path / "head", "--out", tmp_path / "again", *where[:3], tmp_path / "both")
    assert not (tmp_path / "again").exists()
    tiny_llama().save_pretrained(tmp_path / "llama")
    with pytest.raises(InputError, match="whose num_hidden_layers is 4"):
        run("export", tmp_path / "head", "--out", tmp_path / "c", *where[:3], tmp_path / "llama")
