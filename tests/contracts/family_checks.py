"""Checks of a model family, as functions of a small random checkpoint of it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from mmspec.errors import CheckpointError, InputError, MMSpecError
from mmspec.pipelines import ImagePipeline, MMSpecPipeline
from mmspec.plugins import FAMILIES, Family, family_of, load, register_families

WEIGHTS = "model.safetensors"
SEEDS = (11, 4)
NEW_TOKENS = 9  # of text


@dataclass(frozen=True)
class Checkpoint:
    """A small random checkpoint of a family.

    Attributes:
        family: name of the family.
        write: writes the checkpoint to a new folder.
        asked: two prompts, or two class labels.
        settings: settings of every call.
        weight: a weight in the folder's `model.safetensors`.
        loaded_as: name of this weight in the model, if it differs.
        wrong: for each entry that is changed in the config, the rule of the error; {} if the family has no
            rules besides those of sizes.
        oracle: the output of a prompt, sampled with a seed, or greedy: a function of the pipeline, the
            prompt and the seed, independent of mmspec's loop; None if there is none.
        greedy: whether the oracle is greedy.
        loading: keywords of `from_pretrained`.
        name: name of the folder.
    """

    family: str
    write: Callable[[Path], object]
    asked: Sequence[object] = ("a red circle", "the small green star on a large square")
    settings: Mapping[str, Any] = field(default_factory=dict)
    weight: str = "lm_head.weight"
    loaded_as: str | None = None
    wrong: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    oracle: Callable[[Any, Any, int], list[int]] | None = None
    greedy: bool = False
    loading: Mapping[str, Any] = field(default_factory=dict)
    name: str = "checkpoint"

    @property
    def record(self) -> Family:
        return FAMILIES[self.family]

    def open(self, folder: Path, **keywords: Any) -> Any:
        """Load the pipeline, for images if the family draws them."""
        kind = ImagePipeline if self.record.draws == "tokens" else MMSpecPipeline
        pipe: Any = kind.from_pretrained(folder, **{**self.loading, **keywords})
        if self.record.draws:
            pipe.set_progress_bar_config(disable=True)
        return pipe

    def outputs(self, pipe: Any, rows: Sequence[int] = (0, 1), **more: Any) -> list[Any]:
        """Tokens or vectors of the rows' prompts, with the seeds of the rows."""
        asked, settings = [self.asked[row] for row in rows], {**self.settings, **more}
        settings["seed"] = [SEEDS[row] for row in rows]
        if not self.record.draws:
            settings |= {"apply_chat_template": False, "max_new_tokens": NEW_TOKENS}
            return list(pipe(asked, **settings).tokens)
        what = "prompt" if pipe.target.classes is None else "class_labels"
        return list(pipe(**{what: asked}, output_type="latent", **settings).tokens)


def is_equal(outputs: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether tokens are equal, or vectors up to rounding."""
    if isinstance(outputs[0], Tensor):
        return all(
            torch.allclose(one, other, atol=1e-4, rtol=1e-3)
            for one, other in zip(outputs, expected, strict=True)
        )
    return list(outputs) == list(expected)


def config_alone_tells_the_family(checkpoint: Checkpoint, folder: Path) -> None:
    register_families()
    found = family_of(AutoConfig.from_pretrained(folder))
    assert found is checkpoint.record


def outputs_are_the_oracles(checkpoint: Checkpoint, pipe: Any, plain: Sequence[Any]) -> None:
    """Outputs of plain decoding, which differ by prompt and seed."""
    assert not is_equal(plain[:1], plain[1:])
    if checkpoint.oracle is not None:
        pipe.set_accelerator("none")
        outputs = checkpoint.outputs(pipe, temperature=0.0) if checkpoint.greedy else plain
        for asked, seed, output in zip(checkpoint.asked, SEEDS, outputs, strict=True):
            assert output == checkpoint.oracle(pipe, asked, seed)


def rows_are_independent(checkpoint: Checkpoint, pipe: Any, plain: Sequence[Any]) -> None:
    """A batch equals single runs, in any order."""
    pipe.set_accelerator("none")
    assert is_equal(checkpoint.outputs(pipe, [1]), plain[1:])
    assert is_equal(checkpoint.outputs(pipe, [1, 0]), plain[::-1])


def methods_of(family: Family, default: str) -> list[str]:
    """The accelerators that a family names: its default, presets, and those its target is compared with."""
    named = dict.fromkeys([family.accelerator or default, *family.presets, *family.presets.values()])
    return list(named | dict.fromkeys(getattr(load(family.target), "compared", ())))


def named_methods_decode(checkpoint: Checkpoint, pipe: Any) -> None:
    """Greedy outputs of exact methods are those of plain decoding; vectors have no greedy decoding."""
    greedy = {} if checkpoint.record.draws == "vectors" else {"temperature": 0.0}
    pipe.set_accelerator("none")
    plain, reference = checkpoint.outputs(pipe, **greedy), pipe.accelerator.keeps
    for name in methods_of(checkpoint.record, pipe.default_accelerator):
        try:
            pipe.set_accelerator(name)
        except InputError as error:  # not all models of the family can be decoded with it
            assert error.argument == "accelerator", name
            continue
        outputs = checkpoint.outputs(pipe, **greedy)
        assert [len(row) for row in outputs] == [len(row) for row in plain], name
        if pipe.accelerator.exactness == "exact" and pipe.accelerator.keeps == reference:
            assert is_equal(outputs, plain), name


def saved_folder_gives_the_same(checkpoint: Checkpoint, pipe: Any, plain: Sequence[Any], out: Path) -> None:
    pipe.save_pretrained(out)
    again = checkpoint.open(out, accelerator="none")
    assert type(again) is type(pipe) and type(again.target) is type(pipe.target)
    assert is_equal(checkpoint.outputs(again), plain)


def wrong_weights_are_named(checkpoint: Checkpoint, folder: Path, out: Path) -> None:
    """A missing weight and a wrong shape are errors; a surplus weight is an error or a warning."""
    broken = out / folder.name
    shutil.copytree(folder, broken)
    weights = load_file(folder / WEIGHTS)
    weight, name = weights[checkpoint.weight], checkpoint.weight
    others = {other: one for other, one in weights.items() if other != name}
    cases = [
        (checkpoint.loaded_as or name, others),
        (checkpoint.loaded_as or name, {**weights, name: weight.repeat(2, *[1] * (weight.dim() - 1))}),
        ("surplus.weight", {**weights, "surplus.weight": torch.ones(1)}),
    ]
    for named, changed in cases:
        save_file(changed, broken / WEIGHTS, metadata={"format": "pt"})
        log, heard = logging.getLogger("mmspec"), BufferingHandler(1000)
        log.addHandler(heard)
        try:
            checkpoint.open(broken)
        except CheckpointError as error:
            assert named in str(error)
        else:
            assert named == "surplus.weight"
            assert any(named in record.getMessage() for record in heard.buffer)
        finally:
            log.removeHandler(heard)


def wrong_configs_are_named(checkpoint: Checkpoint, folder: Path, out: Path) -> None:
    """An impossible size, and what the family itself does not accept."""
    broken = out / folder.name
    shutil.copytree(folder, broken)
    config = json.loads((folder / "config.json").read_text())
    cases = dict(checkpoint.wrong)
    size = next((name for name in config if name.endswith("_size") and isinstance(config[name], int)), None)
    if size is not None:
        cases[size] = -1, f"{size} must be between 0"
    for name, (value, rule) in cases.items():
        (broken / "config.json").write_text(json.dumps({**config, name: value}))
        with pytest.raises(MMSpecError, match=rule):
            checkpoint.open(broken)
    assert cases


def check_all(checkpoint: Checkpoint, base: Path) -> None:
    """The whole contract, in new folders of `base`."""
    folder = base / "first" / checkpoint.name
    checkpoint.write(folder)
    config_alone_tells_the_family(checkpoint, folder)
    pipe = checkpoint.open(folder, accelerator="none")
    plain = checkpoint.outputs(pipe)
    outputs_are_the_oracles(checkpoint, pipe, plain)
    rows_are_independent(checkpoint, pipe, plain)
    named_methods_decode(checkpoint, pipe)
    saved_folder_gives_the_same(checkpoint, pipe, plain, base / "saved")
    wrong_weights_are_named(checkpoint, folder, base / "weights")
    wrong_configs_are_named(checkpoint, folder, base / "configs")
