"""Copies of pipelines: by `copy.deepcopy` and `pickle`, as transformers' pipelines are copied."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec.pipelines import MMSpecPipeline
from tests.tiny_models.continuous import folder_of
from tests.tiny_models.llamagen import save_llamagen

WORDS: dict[str, Any] = {"prompt": ["red", "blue"], "apply_chat_template": False, "max_new_tokens": 8}
CLASSES: dict[str, Any] = {"class_labels": [1, 3], "output_type": "latent"}
WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pipe: pickle.loads(pickle.dumps(pipe)),  # noqa: S301  its own
    "copy": copy.copy,
}


def drafted(checkpoints: Path, tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    drafter = checkpoints / "draft"
    pipe = MMSpecPipeline.from_pretrained(checkpoints / "text", accelerator="draft_model", drafter=drafter)
    pipe.enable_prefix_cache()
    return pipe, WORDS | {"temperature": 1.2}


def tokens(checkpoints: Path, tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    folder = save_llamagen(tmp_path / "class", "class")
    return MMSpecPipeline.from_pretrained(folder, accelerator="sjd", window=8), CLASSES


def vectors(checkpoints: Path, tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    return MMSpecPipeline.from_pretrained(folder_of("mar")), CLASSES | {"num_inference_steps": 3}


Build = Callable[[Path, Path], tuple[Any, dict[str, Any]]]


@pytest.mark.parametrize(
    ("build", "way"), [(drafted, "deepcopy"), (drafted, "copy"), (tokens, "pickle"), (vectors, "deepcopy")]
)
def test_a_copy_decodes_the_same_and_stands_alone(
    build: Build, way: str, checkpoints: Path, tmp_path: Path
) -> None:
    pipe, asked = build(checkpoints, tmp_path)

    def answer(pipe: Any) -> Any:
        output = pipe(**asked, seed=3)
        return [torch.as_tensor(row).tolist() for row in output.tokens], output.stats.drafted

    expected = answer(pipe)
    with pipe._busy():  # a copy is not
        other = WAYS[way](pipe)
        assert answer(other) == expected
    assert other.target is not pipe.target and other.target.model is other.model
    if other.accelerator.drafter.reader is not None:
        for reader, own in ((other.target, pipe.target), (other.accelerator.drafter.reader, None)):
            assert reader.prefix_cache.max_bytes == pipe._prefix_bytes
            assert own is None or reader.prefix_cache is not own.prefix_cache
    assert (other.model is pipe.model) == (way == "copy")
    if way != "copy":
        with torch.no_grad():
            for weight in other.model.parameters():
                weight.zero_()
        assert answer(pipe) == expected
