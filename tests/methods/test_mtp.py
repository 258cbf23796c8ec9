"""MTP: a layer in the target's checkpoint, with the results of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from mmspec.errors import CheckpointError
from mmspec.methods.mtp.published import read_mtp
from mmspec.pipelines import MMSpecPipeline
from mmspec.targets import CausalTarget
from tests.contracts.running import random_prompts
from tests.methods.mtp_checks import head_for, save_with_head
from tests.tiny_models import tiny_images, tiny_qwen3_5, tiny_qwen3_5_vl
from tests.versions import OLDEST

PROMPTS = [random_prompts(1, shortest=n, longest=n, seed=n)[0] for n in (1, 5, 20)]
SHAPE: dict[str, Any] = {"num_draft_tokens": 8, "depth": 3, "top_k": 3}


@pytest.mark.skipif(OLDEST, reason="transformers 5.17 does not know Qwen3.5's names of the layer")
def test_it_computes_what_transformers_computes(tmp_path: Path) -> None:
    """Compares the rows of a text with transformers' class, loaded from the same checkpoint."""
    made = CausalTarget(tiny_qwen3_5())
    save_with_head(made.model, head_for(made), tmp_path)
    model = type(made.model).from_pretrained(tmp_path).eval()
    head = read_mtp(tmp_path, model.config)
    assert head is not None
    text = model.config.get_text_config()
    text.num_mtp_layers, text.mtp_layer_types = 1, ["full_attention"]
    theirs = MtpModel.from_pretrained(model)
    ids = torch.tensor([[*PROMPTS[2], *PROMPTS[1]]])
    hidden = model.model(ids).last_hidden_state[:, :-1]
    cache, places = MtpCache(config=model.config.get_mtp_config()), torch.arange(ids.shape[1] - 1)[None]
    due = theirs.forward_layer(0, hidden, places, cache, input_ids=ids[:, 1:])
    embedded = model.get_input_embeddings()(ids[:, 1:])
    assert (head(head.fuse(embedded, hidden), places) - due).abs().max() < 1e-5


@pytest.mark.parametrize("layout", ["qwen", "deepseek"])
def test_published_layouts_are_read(layout: str, tmp_path: Path) -> None:
    target = CausalTarget(tiny_qwen3_5())
    head = head_for(target)
    save_with_head(target.model, head, tmp_path, layout)
    copies = {"embed_tokens": target.model.get_input_embeddings(), "shared_head.head": target.model.lm_head}
    if layout == "deepseek":  # copies of the target's matrices are ignored
        file = tmp_path / "model.safetensors"
        more = {f"model.layers.4.{name}.weight": part.weight.clone() for name, part in copies.items()}
        save_file(load_file(file) | more, file, metadata={"format": "pt"})
    found = read_mtp(tmp_path, target.config)
    assert found is not None
    assert all(torch.equal(found.state_dict()[name], own) for name, own in head.state_dict().items())


def test_a_damaged_layer_is_named(tmp_path: Path) -> None:
    target = CausalTarget(tiny_qwen3_5())
    save_with_head(target.model, head_for(target), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    fusion = tensors.pop("mtp.fc.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing keys: fc\.weight"):
        read_mtp(tmp_path, target.config)
    save_file({**tensors, "mtp.fc.weight": fusion[:, :-1].contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"wrong shapes: fc\.weight"):
        read_mtp(tmp_path, target.config)


def test_the_weights_of_the_checkpoint_draft_for_images(tmp_path: Path) -> None:
    """`accelerator="mtp"` alone: the pipeline finds the layer in the model's own folder."""
    model, processor = tiny_qwen3_5_vl()
    save_with_head(model, head_for(CausalTarget(model)), tmp_path)
    processor.save_pretrained(tmp_path)
    pipe = MMSpecPipeline.from_pretrained(tmp_path, accelerator="mtp", **SHAPE)
    prompts, images = ["what is it", "which colour", "where"], [*tiny_images()[:2], None]
    settings: dict[str, Any] = {"images": images, "max_new_tokens": 24}
    drafted = pipe(prompts, **settings)
    assert drafted.stats.accelerator == "mtp" and drafted.stats.draft_passes > 0
    plain = pipe.set_accelerator("none")(prompts, **settings)
    assert drafted.tokens == plain.tokens
    sampled = [
        pipe.set_accelerator(name, **shape)(prompts, temperature=0.9, seed=3, **settings).tokens
        for name, shape in (("mtp", SHAPE), ("none", {}))
    ]
    assert sampled[0] == sampled[1] != plain.tokens
