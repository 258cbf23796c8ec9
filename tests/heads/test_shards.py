"""Published heads whose weights are in shards, or under the prefixes of wrappers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig

from mmspec.errors import CheckpointError
from mmspec.methods.dflash.published import read_dflash
from mmspec.methods.eagle.published import read_eagle
from mmspec.methods.eagle3.published import read_eagle3
from mmspec.methods.hydra.published import read_hydra
from mmspec.methods.medusa.published import read_medusa
from mmspec.targets import CausalTarget
from tests.methods import (
    dflash_checks,
    test_dflash,
    test_eagle3_official,
    test_eagle_official,
    test_hydra,
    test_medusa,
)
from tests.tiny_models import tiny_llama


class Published(NamedTuple):
    """A head as its authors publish it."""

    read: Callable[..., Any]
    weights: dict[str, Tensor]
    config: dict[str, Any]
    target: PreTrainedConfig
    file: str = "model.safetensors"


def published(name: str) -> Published:
    if name == "dflash":
        llama = CausalTarget(tiny_llama(layers=4))
        head = dflash_checks.head_for(llama, mask_token=7, taps=[0, 2, 3])
        weights = {name: weight.contiguous() for name, weight in head.state_dict().items()}
        return Published(read_dflash, weights, test_dflash.config_of(head, "z-lab"), llama.config)
    if name == "medusa":
        weights, target = test_medusa.published(), test_medusa.TARGET
        return Published(read_medusa, weights, {}, target, "medusa_lm_head.safetensors")
    if name == "hydra":
        weights = test_hydra.published(False)
        return Published(read_hydra, weights, test_hydra.CONFIG, test_hydra.TARGET, "hydra_lm_head.pt")
    one: Any = {"eagle": test_eagle_official, "eagle3": test_eagle3_official}[name]
    config = one.CONFIG if name == "eagle" else one.EAGLE
    reads = {"eagle": read_eagle, "eagle3": read_eagle3}
    return Published(reads[name], one.published(), config, one.TARGET)


def store(folder: Path, head: Published, layout: str) -> Path:
    """Write a head whole, with a prefix, in shards, or in shards of pickles."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(head.config))
    weights, file = dict(head.weights), head.file
    if "prefix" in layout:
        inside = {"d2t", "t2d", "lm_head.weight"} if layout == "prefix, not of all" else set()
        weights = {name if name in inside else f"model.{name}": one for name, one in weights.items()}
    if layout == "pickles" and file == "model.safetensors":
        file = "pytorch_model.bin"
    write: Any = save_file if file.endswith(".safetensors") else torch.save
    if layout not in ("shards", "pickles", "shards with a prefix"):
        write(weights, folder / file)
        return folder
    stem, _, kind = file.rpartition(".")
    names = sorted(weights)
    parts = {name: f"{stem}-0000{1 + index % 2}-of-00002.{kind}" for index, name in enumerate(names)}
    for part in set(parts.values()):
        write({name: weights[name] for name in names if parts[name] == part}, folder / part)
    (folder / f"{file}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": parts}))
    return folder


LAYOUTS = ["shards", "prefix", "prefix, not of all", "shards with a prefix", "pickles"]


@pytest.mark.parametrize("name", ["eagle", "eagle3", "dflash", "medusa", "hydra"])
def test_a_head_is_the_same_in_every_layout(name: str, tmp_path: Path) -> None:
    head = published(name)
    whole = head.read(store(tmp_path / "whole", head, "whole"), head.target)
    assert whole is not None
    for layout in LAYOUTS:
        read = head.read(store(tmp_path / layout, head, layout), head.target)
        assert read is not None, layout
        for key, weight in whole.state_dict().items():
            assert torch.equal(weight, read.state_dict()[key]), (layout, key)


def test_damaged_shards_are_named(tmp_path: Path) -> None:
    first = "model-00001-of-00002.safetensors"
    cases: list[tuple[Callable[[Path, dict[str, str]], object], str]] = [
        (
            lambda folder, _: (folder / first).unlink(),
            r"index\.json names a file that is missing .*; got 'model-00001-of-00002\.safetensors'",
        ),
        (
            lambda folder, _: (folder / first).write_bytes((folder / first).read_bytes()[:-7]),
            r"a complete checkpoint \(model-00001-of-00002\.safetensors: ",
        ),
        (
            lambda _, table: table.update({"fc.weight": "../model.safetensors"}),
            r"index\.json must name files in the same folder; got '\.\./model\.safetensors'",
        ),
        (
            lambda _, table: table.update({"norm.weight": first, "fc.weight": first}),
            r"model-00001-of-00002\.safetensors must have the tensor (fc|norm)\.weight",
        ),
        (lambda _, table: table.pop("fc.weight"), r"missing keys: fc\.weight"),
        (lambda _, table: table.clear(), r"model\.safetensors\.index\.json must be .*'weight_map'"),
    ]
    head = published("eagle3")
    for number, (damage, match) in enumerate(cases):
        folder = store(tmp_path / str(number), head, "shards")
        index = folder / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        damage(folder, content["weight_map"])
        index.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=match):
            head.read(folder, head.target)
    index.write_text("{")
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json must be valid JSON"):
        head.read(folder, head.target)
    index.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json beside it"):
        head.read(folder, head.target)


def test_a_folder_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    """Folders of mmspec, with other tensor names, which the auto classes load; and folders without a head."""
    tiny_llama().save_pretrained(tmp_path / "llama")
    for name in ("eagle", "eagle3", "dflash", "medusa", "hydra"):
        head = published(name)
        own = head.read(store(tmp_path / name, head, "whole"), head.target)
        assert own is not None
        own.save_pretrained(tmp_path / f"our {name}")
        assert head.read(tmp_path / f"our {name}", head.target) is None, name
        again = AutoModel.from_pretrained(tmp_path / f"our {name}", dtype=torch.float32)
        assert type(again) is type(own) and again.state_dict().keys() == own.state_dict().keys()
        assert all(torch.equal(again.state_dict()[key], each) for key, each in own.state_dict().items())
        assert head.read(tmp_path / "llama", head.target) is None, name
