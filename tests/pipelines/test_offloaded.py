"""Models of which parts lie on the CPU or the disk, and weights in formats of one byte."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from mmspec.accelerators.tuned import fingerprint
from mmspec.errors import CheckpointError, InputError
from mmspec.models.weights import execution_device, is_finite
from mmspec.pipelines import ContinuousImagePipeline, ImagePipeline, MMSpecPipeline
from mmspec.targets import VisionLanguageTarget
from tests.drafters import flash_checks
from tests.drafters.heads_checks import medusa_for
from tests.tiny_models import tiny_emu3, tiny_image, tiny_janus, tiny_llama
from tests.tiny_models.continuous import folder_of

CALL: dict[str, Any] = {"images": tiny_image(), "max_new_tokens": 10}
TOWER, PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
EMBEDDINGS, LAYERS = "model.language_model.embed_tokens", "model.language_model.layers"
REST = "model.language_model"


def placed(*on_disk: str) -> dict[str, str]:
    """A device map of a tiny LLaVA with those parts on the disk, and the others in memory."""
    parts = [TOWER, PROJECTOR, "lm_head", EMBEDDINGS, f"{LAYERS}.0", f"{LAYERS}.1", f"{REST}.norm"]
    return {part: "disk" if part in on_disk else "cpu" for part in [*parts, f"{REST}.rotary_emb"]}


MAPS = {
    "all": {"": "disk"},
    "seeing": placed(TOWER, PROJECTOR),
    "vocabulary": placed(EMBEDDINGS, "lm_head"),
    "one layer": placed(f"{LAYERS}.1"),
}


@pytest.mark.parametrize("name", ["all", "seeing", "vocabulary", "one layer"])
def test_a_model_in_parts_answers_as_it_does_whole(name: str, checkpoints: Path) -> None:
    whole: Any = MMSpecPipeline.from_pretrained(checkpoints / "llava", device_map="cpu")
    parts: Any = MMSpecPipeline.from_pretrained(checkpoints / "llava", device_map=MAPS[name])
    assert any(weight.is_meta for weight in parts.model.parameters())
    assert parts.device == torch.device("cpu")
    drafters = {
        "none": None,
        "copy": None,
        "draft_model": checkpoints / "draft",
        "flash": flash_checks.head_for(VisionLanguageTarget(whole.model)),
        "medusa": medusa_for(VisionLanguageTarget(whole.model)),
    }
    for accelerator, drafter in drafters.items():
        wanted, given = (
            pipe.set_accelerator(accelerator, drafter=drafter)("describe the picture", **CALL)
            for pipe in (whole, parts)
        )
        assert given.tokens == wanted.tokens, accelerator
        assert given.stats.target_forwards == wanted.stats.target_forwards, accelerator
    assert fingerprint(parts.model) == fingerprint(parts.model)


def test_what_needs_a_whole_model_says_so(checkpoints: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe: Any = MMSpecPipeline.from_pretrained(checkpoints / "llava", device_map={"": "disk"})
    wanted = pipe("describe", **CALL).tokens
    with pytest.raises(InputError, match="to: got .*offloaded"):
        pipe.to(torch.bfloat16)
    with caplog.at_level(logging.WARNING, "mmspec"):
        pipe.compile()
    assert "runs uncompiled: parts of it are offloaded" in caplog.text
    assert pipe("describe", **CALL).tokens == wanted
    with pytest.raises(InputError, match=r"device_map: .* in memory"):
        ContinuousImagePipeline.from_pretrained(folder_of("nextstep"), device_map={"": "disk"})


def test_a_faulty_weight_on_the_disk_is_named(checkpoints: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints / "text", tmp_path / "text")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for device_map in ({"": "disk"}, {"": "cpu"}):
        with pytest.raises(CheckpointError, match=r"NaN or infinity: model\.layers\.1\.mlp\.up_proj"):
            MMSpecPipeline.from_pretrained(folder, device_map=device_map)


@pytest.mark.parametrize("tiny", [tiny_janus, tiny_emu3])
def test_an_image_is_drawn_by_offloaded_parts(tiny: Any) -> None:
    pictures = []
    for is_offloaded in (False, True):
        model, tokenizer = tiny()
        if is_offloaded:
            cpu_offload(model, execution_device=torch.device("cpu"))
        pipe: Any = ImagePipeline(model, tokenizer, "lantern", window=8, neighbours=4)
        pipe.set_progress_bar_config(disable=True)
        size = {} if tiny is tiny_janus else {"height": 4 * pipe.stride, "width": 4 * pipe.stride}
        pictures.append(pipe("red", seed=1, guidance_scale=2.0, **size))
    assert pictures[0].tokens == pictures[1].tokens
    assert pictures[0].images[0].tobytes() == pictures[1].images[0].tobytes()


def test_the_device_is_that_of_the_innermost_hooks() -> None:
    model = tiny_llama(vocab=128)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert next(model.parameters()).is_meta
    assert execution_device(model) == torch.device("cpu")


FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz]


def test_faults_are_seen_in_every_format() -> None:
    for dtype in (*FORMATS, torch.bfloat16):
        sound, broken = (torch.tensor([0.5, value]).to(dtype) for value in (1.0, torch.nan))
        assert is_finite(sound) and not is_finite(broken)
        assert is_finite(nn.Parameter(sound, requires_grad=False))
    assert is_finite(torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    whole = TwoTensor(torch.zeros(2), torch.ones(2))  # as quantised tensors are made
    assert is_finite(whole) and not is_finite(TwoTensor(torch.zeros(2), torch.tensor([1.0, torch.inf])))


def test_weights_stored_in_eight_bits_are_loaded(checkpoints: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints / "text", tmp_path / "text")
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: weight.to(torch.float8_e4m3fn) for name, weight in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    call: dict[str, Any] = {"apply_chat_template": False, "max_new_tokens": 4}
    for device_map in ("cpu", {"": "disk"}):
        pipe: Any = MMSpecPipeline.from_pretrained(folder, device_map=device_map, dtype=torch.float32)
        assert pipe.dtype == torch.float32 and len(pipe("red blue", **call).tokens[0]) == 4
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float8_e4m3fn"}))
    with pytest.raises(CheckpointError, match="dtype=torch.bfloat16: its weights are in float8"):
        MMSpecPipeline.from_pretrained(folder)
