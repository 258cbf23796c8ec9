"""`drafter=` with the folder of a trained head: what is loaded, and what is refused before any forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from mmspec.drafters.eagle import EagleDrafter
from mmspec.drafters.level_heads import MedusaDrafter
from mmspec.errors import CheckpointError, InputError
from mmspec.models.head_checkpoint import load_head
from mmspec.targets import CausalTarget
from tests.contracts.checks import PROMPTS, llama, precise
from tests.contracts.running import decode, generate
from tests.drafters.eagle_checks import head_for
from tests.tiny_models import tiny_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    head_for(llama()).save_pretrained(tmp_path / "head")
    return tmp_path / "head"


def of(target: CausalTarget) -> tuple[PreTrainedConfig, torch.dtype, torch.device]:
    return target.config, target.dtype, target.device


def test_a_head_is_loaded_in_the_dtype_of_its_target(folder: Path) -> None:
    head = load_head("eagle", folder, *of(precise()))
    assert head.dtype == torch.float64 and not head.training
    assert load_head("eagle", head, *of(llama())) is head
    EagleDrafter(load_head("eagle", str(folder), *of(llama()))).fit(llama())  # type: ignore[arg-type]


def test_a_model_that_is_no_head_is_named(tmp_path: Path) -> None:
    llama().model.save_pretrained(tmp_path / "llama")
    with pytest.raises(CheckpointError, match="llama.*mmspec train drafter --method eagle"):
        load_head("eagle", tmp_path / "llama", *of(llama()))
    with pytest.raises(InputError, match="LlamaForCausalLM"):
        load_head("eagle", llama().model, *of(llama()))


def test_keys_that_are_missing_or_surplus_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    renamed = {name.replace("fc.bias", "fc.offset"): tensor for name, tensor in tensors.items()}
    save_file(renamed, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing keys: fc\.bias.*unknown keys: fc\.offset"):
        load_head("eagle", folder, *of(llama()))


def test_weights_that_are_not_finite_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["fc.bias"][0] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"NaN or infinity: fc\.bias"):
        load_head("eagle", folder, *of(llama()))


def medusa_weights() -> dict[str, torch.Tensor]:
    """Three heads for `llama()` by the names of Medusa's release."""
    width, words = llama().config.hidden_size, llama().vocabulary
    return {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(place))
        for place in range(3)
        for name, shape in (
            (f"{place}.0.linear.weight", (width, width)),
            (f"{place}.0.linear.bias", (width,)),
            (f"{place}.1.weight", (words, width)),
        )
    }


def test_a_published_head_is_recognised_and_drafts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2, "medusa_num_layers": 1}')
    torch.save(medusa_weights(), tmp_path / "medusa_lm_head.pt")
    head = load_head("medusa", tmp_path, *of(precise()))
    assert head.dtype == torch.float64 and head.config.num_heads == 3 and not head.training
    drafter = MedusaDrafter(load_head("medusa", tmp_path, *of(llama()))).fit(llama())  # type: ignore[arg-type]
    expected = [generate(llama().model, prompt, 12) for prompt in PROMPTS]
    assert decode(llama(), PROMPTS, drafter, max_new_tokens=12).outputs == expected
    with pytest.raises(InputError, match="hidden size is"):
        drafter.fit(CausalTarget(tiny_llama(hidden=16)))


def test_a_published_head_that_is_not_finite_is_named(tmp_path: Path) -> None:
    weights = medusa_weights()
    weights["1.0.linear.bias"][0] = torch.nan
    torch.save(weights, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match=r"NaN or infinity: blocks\.1\.0\.bias"):
        load_head("medusa", tmp_path, *of(llama()))


def test_a_published_head_of_another_method_is_refused(tmp_path: Path) -> None:
    torch.save(medusa_weights(), tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="config"):
        load_head("hydra", tmp_path, *of(llama()))
