"""Folders of Lumina-mGPT, whose norms transformers does not load."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import ChameleonForConditionalGeneration

from tests.cli.test_convert import run
from tests.tiny_models import tiny_lumina

PARTS = 2  # of the model-parallel group: each norm serves two of four query heads, one of two key heads


@pytest.fixture
def published(tmp_path):
    """A model in which heads of a part share their norms, and its folder in the published shapes."""
    model, tokenizer = tiny_lumina()
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            times = norm.weight.shape[0] // PARTS
            for tensor in (norm.weight, norm.bias):
                tensor.data.copy_(torch.randn(PARTS, tensor.shape[1]).repeat_interleave(times, 0))
    folder = tmp_path / "published"
    model.save_pretrained(folder, max_shard_size="50KB")
    tokenizer.save_pretrained(folder)
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        for name, tensor in tensors.items():
            if "_norm." in name and ".self_attn." in name:
                tensors[name] = tensor[:: tensor.shape[0] // PARTS].contiguous()
        save_file(tensors, shard, metadata={"format": "pt"})
    return model.eval(), folder


def test_the_converted_folder_is_the_same_model(published, tmp_path):
    model, folder = published
    with pytest.raises(RuntimeError):
        ChameleonForConditionalGeneration.from_pretrained(folder)
    out = tmp_path / "out"
    written = json.loads(run("convert", folder, "--out", out, "--json").stdout)
    assert written["kind"] == "chameleon" and written["norms"] == 2 * 2 and written["dtype"] == "float32"
    loaded = ChameleonForConditionalGeneration.from_pretrained(out).eval()
    ids = torch.tensor([[1, 5, 9, 30, 7]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    kept = {path.name for path in folder.iterdir()}
    assert {path.name for path in out.iterdir()} == kept and "tokenizer.json" in kept
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for shard in out.glob("*.safetensors") for tensor in load_file(shard).values()
    )
