"""from_pretrained, set_accelerator, save_pretrained; heads that are loaded and refused."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from mmspec.errors import CheckpointError, InputError
from mmspec.heads.checkpoint import head_of, load_head
from mmspec.pipelines import MMSpecPipeline, VisionLanguagePipeline
from mmspec.pipelines import base as base_module
from mmspec.targets import CausalTarget, VisionLanguageTarget
from tests.contracts.checks import llama
from tests.families.official_layout import store
from tests.methods import flash_checks, test_eagle3_official, test_eagle_official, test_hydra, test_medusa
from tests.methods.eagle_checks import head_for
from tests.methods.heads_checks import medusa_for
from tests.tiny_models import tiny_image, tiny_llama, tiny_llava

RAW: dict[str, Any] = {"apply_chat_template": False, "max_new_tokens": 8}


def test_a_folder_becomes_the_pipeline_of_its_kind(checkpoints: Path) -> None:
    pipe = MMSpecPipeline.from_pretrained(
        checkpoints / "llava",
        dtype=torch.float32,
        device_map="cpu",
        local_files_only=True,
        revision="main",
        attn_implementation="eager",
        num_draft_tokens=3,
    )
    assert isinstance(pipe, VisionLanguagePipeline)
    assert (pipe.dtype, pipe.device) == (torch.float32, torch.device("cpu"))
    assert pipe.model.get_decoder().config._attn_implementation == "eager"
    assert (pipe.accelerator.name, pipe.accelerator.drafter.max_nodes) == ("copy", 4)
    assert set(pipe.components) == {"model", "processor"}
    output = pipe("describe the picture", images=tiny_image(), max_new_tokens=8)
    assert len(output.tokens[0]) == 8


def test_options_of_the_hub_reach_transformers(monkeypatch: pytest.MonkeyPatch, checkpoints: Path) -> None:
    seen: list[dict[str, Any]] = []
    for name in ("load_config", "load_processor", "load_model"):
        original = getattr(base_module, name)

        def spy(*arguments: Any, _original: Any = original, **keywords: Any) -> Any:
            seen.append(keywords)
            return _original(*arguments, **keywords)

        monkeypatch.setattr(base_module, name, spy)
    where = {"revision": "v1", "token": "secret", "cache_dir": "/nowhere", "local_files_only": True}
    MMSpecPipeline.from_pretrained(checkpoints / "text", **where)  # type: ignore[arg-type]
    assert len(seen) == 3
    for keywords in seen:
        assert where.items() <= keywords.items()
        assert keywords["trust_remote_code"] is False


def test_a_refused_accelerator_leaves_the_one_before(text: VisionLanguagePipeline, checkpoints: Path) -> None:
    text.set_accelerator("draft_model", drafter=checkpoints / "draft")
    wanted, before = text("red", **RAW), (text.accelerator, text.draft_processor)
    with pytest.raises(InputError, match="num_draft_tokens"):
        text.set_accelerator("draft_model", drafter=checkpoints / "text", num_draft_tokens=-1)
    assert (text.accelerator, text.draft_processor) == before
    assert text("red", **RAW).tokens == wanted.tokens
    text.set_accelerator("copy")


@pytest.fixture
def with_drafters(checkpoints: Path, tmp_path: Path) -> Path:
    """The text model with a draft model beside it, a head within it, and a file that names both."""
    model = shutil.copytree(checkpoints / "text", tmp_path / "text")
    shutil.copytree(checkpoints / "draft", tmp_path / "draft")
    medusa_for(CausalTarget(tiny_llama(vocab=128))).save_pretrained(model / "head")
    named = {"draft_model": "../draft", "medusa": "head", "flash": "../flash"}
    entries = {name: {"accelerator": name, "drafter": drafter} for name, drafter in named.items()}
    (model / "drafters.json").write_text(json.dumps(entries))
    return model


def test_a_pipeline_finds_the_drafters_that_its_folder_names(
    with_drafters: Path, text: VisionLanguagePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = text.set_accelerator("none")("red blue green", **RAW).tokens
    monkeypatch.chdir(with_drafters.parent)
    pipe: Any = MMSpecPipeline.from_pretrained("text", accelerator="draft_model", num_draft_tokens=3)
    assert pipe.accelerator.drafter.model.model.config.num_hidden_layers == 1
    assert pipe("red blue green", **RAW).tokens == wanted
    monkeypatch.chdir("/")
    assert pipe.set_accelerator("medusa").accelerator.name == "medusa"
    assert pipe("red blue green", **RAW).tokens == wanted
    with pytest.raises(
        CheckpointError, match=r"flash: drafter must be a folder that exists; .*got '\.\./flash'"
    ):
        pipe.set_accelerator("flash")
    with pytest.raises(InputError, match="a head that was trained for the target, which 'eagle' needs"):
        pipe.set_accelerator("eagle")
    own = tiny_llama(vocab=128, layers=3)
    assert pipe.set_accelerator("draft_model", drafter=own).accelerator.drafter.model.model is own


def test_the_default_of_the_folder_is_used_unless_another_accelerator_is_named(
    with_drafters: Path, text: VisionLanguagePipeline
) -> None:
    wanted = text.set_accelerator("none")("red blue green", **RAW).tokens
    file = with_drafters / "drafters.json"
    named = json.loads(file.read_text())
    shutil.move(with_drafters / "head", with_drafters / "mine")  # the entry "medusa" is broken from here on
    named["mine"] = {"accelerator": "medusa", "drafter": "mine"}
    load: Any = MMSpecPipeline.from_pretrained

    def start(default: str, **given: Any) -> Any:
        file.write_text(json.dumps({**named, "default": default}))
        return load(with_drafters, **given)

    pipe = start("draft_model", num_draft_tokens=3)
    assert (pipe.accelerator.name, pipe.accelerator.drafter.max_nodes) == ("draft_model", 4)
    assert pipe("red blue green", **RAW).tokens == wanted
    assert start("mine").accelerator.name == "medusa"
    assert start("draft_model", accelerator="copy").accelerator.name == "copy"
    assert start("flash").accelerator.name == "copy", "the folder of flash is missing"
    with pytest.raises(InputError, match="^drafter must be None; accelerator 'copy' uses no draft model"):
        start("draft_model", drafter=with_drafters.parent / "draft")


def test_a_drafter_that_is_missing_costs_no_load(
    with_drafters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(base_module, "load_model")
    with pytest.raises(
        CheckpointError, match=r"flash: drafter must be a folder that exists; .*got '\.\./flash'"
    ):
        MMSpecPipeline.from_pretrained(with_drafters, accelerator="flash")


def test_saved_and_loaded_gives_the_same_output(llava: VisionLanguagePipeline, tmp_path: Path) -> None:
    call: dict[str, Any] = {"images": tiny_image(), "max_new_tokens": 16, "temperature": 1.0, "seed": 3}
    llava.save_pretrained(tmp_path / "deep" / "saved")
    loaded = MMSpecPipeline.from_pretrained(tmp_path / "deep" / "saved")
    assert loaded("describe", **call).tokens == llava("describe", **call).tokens  # type: ignore[operator]
    for name, weight in llava.model.state_dict().items():
        assert torch.equal(weight, loaded.model.state_dict()[name])
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "saved"]


def test_a_folder_that_holds_something_is_kept_and_a_full_disk_leaves_nothing_behind(
    text: VisionLanguagePipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for place in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(CheckpointError, match="^folder must be a new or an empty folder; got"):
            text.save_pretrained(place)

    def full(folder: Path) -> None:
        (Path(folder) / "half").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(text.processor, "save_pretrained", full)
    with pytest.raises(CheckpointError, match=r"folder .*\d+ free bytes \(No space left on device\)"):
        text.save_pretrained(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == [tmp_path / "notes.txt"]


def test_another_tokenizer_is_refused_with_the_overlap(
    text: VisionLanguagePipeline, checkpoints: Path
) -> None:
    with pytest.raises(
        CheckpointError, match=r"^drafter must use the target's tokenizer; \d+% of the target's \d+"
    ):
        text.set_accelerator("draft_model", drafter=checkpoints / "bytes")


def test_moving_the_pipeline_moves_the_head() -> None:
    model, processor = tiny_llava()
    head = flash_checks.head_for(VisionLanguageTarget(model))
    pipe = VisionLanguagePipeline(model, processor, "flash", drafter=head)
    pipe.to(torch.bfloat16)
    assert pipe.target.dtype == pipe.accelerator.drafter.model.dtype == torch.bfloat16  # type: ignore[attr-defined]
    assert len(pipe("red", images=tiny_image(), max_new_tokens=4).tokens[0]) == 4  # type: ignore[union-attr]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    head_for(llama()).save_pretrained(tmp_path / "head")
    return tmp_path / "head"


def of(target: CausalTarget) -> tuple[PreTrainedConfig, torch.dtype, torch.device]:
    return target.config, target.dtype, target.device


def test_a_head_for_another_accelerator_is_named_for_what_it_is(
    folder: Path, tmp_path: Path, checkpoints: Path
) -> None:
    """As `mmspec train drafter` writes them and as their authors publish them, read with any accelerator."""
    medusa_for(llama()).save_pretrained(tmp_path / "medusa")
    eagle, eagle3 = test_eagle_official, test_eagle3_official
    heads = {
        "eagle": [folder, store(tmp_path / "e1", eagle.published(), eagle.CONFIG)],
        "eagle3": [
            store(tmp_path / "e3", eagle3.published(), eagle3.EAGLE),
            store(tmp_path / "e3s", eagle3.published("layers.0."), {}, "model.safetensors"),
        ],
        "medusa": [
            tmp_path / "medusa",
            store(tmp_path / "m", test_medusa.published(), {}, "medusa_lm_head.pt"),
        ],
        "hydra": [store(tmp_path / "h", test_hydra.published(prefix=True), {}, "hydra_lm_head.pt")],
    }
    for kind, folders in heads.items():
        for each in folders:
            assert head_of(str(each)) == kind
            for name in {*heads, "flash"} - {kind}:
                with pytest.raises(CheckpointError, match=f"use accelerator='{kind}'"):
                    load_head(name, each, *of(llama()))
            with pytest.raises(CheckpointError, match=f"'draft_model', not a head; use accelerator='{kind}'"):
                MMSpecPipeline.from_pretrained(checkpoints / "llava", accelerator="draft_model", drafter=each)
    with pytest.raises(InputError, match="use accelerator='eagle'.*EagleHead"):
        load_head("eagle3", head_for(llama()), *of(llama()))
    pipe = MMSpecPipeline.from_pretrained(checkpoints / "llava", accelerator="none")
    with pytest.raises(
        CheckpointError, match="'draft_model', not a head; use accelerator='eagle'.*EagleHead"
    ):
        pipe.set_accelerator("draft_model", drafter=head_for(llama()))


def test_keys_that_are_missing_or_surplus_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    renamed = {name.replace("fc.bias", "fc.offset"): tensor for name, tensor in tensors.items()}
    broken = {**tensors, "fc.bias": tensors["fc.bias"] * torch.nan}
    for weights, match in (
        (renamed, r"missing keys: fc\.bias.*unknown keys: fc\.offset"),
        (broken, r"NaN or infinity: fc\.bias"),
    ):
        save_file(weights, path, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=match):
            load_head("eagle", folder, *of(llama()))
