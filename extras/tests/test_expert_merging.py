"""UNCURL: experts that are alike become one, and the smaller model drafts for the larger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig
from typer.testing import CliRunner

from mmspec.errors import InputError, UnsupportedModelError
from mmspec.pipelines import VisionLanguagePipeline
from mmspec_extras.cli import app
from mmspec_extras.expert_merging import expert_layers, merge_experts
from tests.tiny_models import tiny_llama
from tests.tiny_models.processors import tiny_tokenizer
from tests.tiny_models.weights import randomise

CALLS: list[dict[str, Any]] = [{"prompt": text, "max_new_tokens": 20} for text in ("red", "what is there ?")]


def mixture(noise: float = 0.0) -> Any:
    """A Mixtral whose experts 2 and 3 are 0 and 1 in another order of hidden units, up to noise."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    config = MixtralConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=1,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = randomise(AutoModelForCausalLM.from_config(config), 3).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in expert_layers(model).values():
            layer.gate.weight[2:] = layer.gate.weight[:2]
            layer.experts.down_proj *= 30  # so that experts decide the text
            for expert in (0, 1):
                order = torch.randperm(24, generator=generator)
                both = torch.cat([order, order + 24])
                layer.experts.gate_up_proj[expert + 2] = layer.experts.gate_up_proj[expert][both]
                layer.experts.down_proj[expert + 2] = layer.experts.down_proj[expert][:, order]
            for weight in (layer.gate.weight, layer.experts.gate_up_proj, layer.experts.down_proj):
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return VisionLanguagePipeline(model, tokenizer, accelerator="none")


def test_experts_that_are_alike_become_one_without_a_change() -> None:
    pipe = mixture()
    smaller = merge_experts(pipe, CALLS, 2)
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        torch.testing.assert_close(smaller(ids).logits, pipe.model(ids).logits, atol=1e-4, rtol=1e-4)
    size = sum(weight.numel() for weight in smaller.parameters())
    experts = sum(weight.numel() for weight in expert_layers(smaller)["model.layers.0.mlp"].parameters())
    assert size == sum(weight.numel() for weight in pipe.model.parameters()) - 2 * experts


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_smaller_model_drafts_and_the_text_is_that_of_the_larger(temperature: float) -> None:
    pipe = mixture(noise=0.3)
    how = {"temperature": temperature, "seed": 3}
    plain = [pipe(**call, **how) for call in CALLS]
    pipe.set_accelerator("draft_model", drafter=merge_experts(pipe, CALLS, 2))
    drafted = [pipe(**call, **how) for call in CALLS]
    assert [output.tokens for output in drafted] == [output.tokens for output in plain]
    assert all(output.stats.acceptance_rate > 0.2 for output in drafted)


def test_the_command_writes_a_draft_model(tmp_path: Path) -> None:
    pipe = mixture()
    for part in (pipe.model, pipe.processor):
        part.save_pretrained(tmp_path / "moe")
    out = tmp_path / "draft"
    given = ["merge-experts", str(tmp_path / "moe"), "--prompt", "red", "--experts", "2", "--out", str(out)]
    made = CliRunner().invoke(app, [*given, "--max-new-tokens", "12"])
    assert made.exit_code == 0, made.output
    assert AutoModelForCausalLM.from_pretrained(out).config.num_local_experts == 2
    VisionLanguagePipeline.from_pretrained(out)


def test_other_counts_and_models_are_refused() -> None:
    with pytest.raises(InputError, match="experts must be between 1 and 3"):
        merge_experts(mixture(), CALLS, 4)
    with pytest.raises(UnsupportedModelError, match="no experts"):
        expert_layers(tiny_llama())
