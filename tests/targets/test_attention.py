"""The packed mask of `tree_attention`, and the models that support it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from mmspec.core.cache import RaggedCache
from mmspec.core.draft import DraftKind, Nodes, Tree
from mmspec.targets import CausalTarget, attention
from mmspec.targets.attention import EXPRESSED, PLAIN_ATTENTION, attends_plainly, tree_mask
from tests.oracles import ragged_tree
from tests.tiny_models import TEXT_MODELS, tiny_llama, tiny_mistral_sliding, tiny_qwen2_mixed_sliding
from tests.tiny_models.llamagen import tiny_llamagen

LENGTHS = [0, 3, 20]


def scoring(model: transformers.PreTrainedModel) -> tuple[RaggedCache, Nodes]:
    """Make a cache of ragged rows, and a random tree for each row."""
    generator = torch.Generator().manual_seed(0)
    cache = RaggedCache(model.config, len(LENGTHS), 64, torch.device("cpu"))
    cache.lengths.copy_(torch.tensor(LENGTHS))
    cache.longest = max(LENGTHS)
    parents = (torch.rand(3, 12, generator=generator) * torch.arange(12)).long()
    parents[0] = (torch.arange(12) - 1).clamp_min(0)
    tokens = torch.zeros_like(parents)
    nodes = ragged_tree(tokens, parents, tokens == 0, DraftKind.POINT).nodes
    cache.begin_score(nodes.slots, nodes.extent)
    return cache, nodes


def expand(packed: Tensor, width: int) -> Tensor:
    """The boolean mask [B, 1, n, width] that is meant, a column at a time."""
    rows, _, nodes, _ = packed.shape
    mask = torch.zeros(rows, 1, nodes, width, dtype=torch.bool)
    for row in range(rows):
        for node in range(nodes):
            first, length, *slots = packed[row, 0, node].tolist()
            mask[row, 0, node, first:length] = True
            mask[row, 0, node, length : length + len(slots)] = torch.tensor(slots).bool()
    return mask


@pytest.mark.parametrize("build", [tiny_llama, tiny_mistral_sliding, tiny_qwen2_mixed_sliding])
def test_the_packed_mask_means_the_mask(build) -> None:
    cache, nodes = scoring(build())
    masks, packed = cache.attention_mask(nodes, None), tree_mask(cache, nodes)
    if not isinstance(masks, dict):
        masks, packed = {"": masks}, {"": packed}
    assert masks.keys() == packed.keys()
    for kind, mask in masks.items():
        assert packed[kind].dtype == torch.int32
        assert torch.equal(expand(packed[kind], cache.plan.width), mask), kind


@pytest.mark.parametrize("name", ["llama", "mistral_sliding", "gemma2", "gemma3n", "gpt2"])
def test_models_with_other_attention_keep_theirs(name: str) -> None:
    plain = attends_plainly(TEXT_MODELS[name]().get_decoder())
    assert plain == (name in ("llama", "mistral_sliding"))


def test_attention_of_our_image_models_is_plain() -> None:
    assert attends_plainly(tiny_llamagen("class").get_decoder())


def test_plain_attention_asks_for_nothing_that_the_kernel_cannot_express() -> None:
    """Checks the sources of transformers: keywords of every call of an attention function."""
    found = set()
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        source = path.read_text()
        names = {name for name in PLAIN_ATTENTION if f"class {name}(" in source}
        for part in ast.parse(source).body if names else ():
            if not isinstance(part, ast.ClassDef) or part.name not in names:
                continue
            for call in ast.walk(part):
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "attention_interface":
                    keywords = {keyword.arg for keyword in call.keywords} - {None, "dropout", "scaling"}
                    assert keywords <= EXPRESSED, part.name
                    assert getattr(call.args[4], "id", "") == "attention_mask", part.name
                    found.add(part.name)
            stores = [n for n in ast.walk(part) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
            assert "attention_mask" not in {name.id for name in stores}, part.name
    assert found == PLAIN_ATTENTION - {"LlamaGenAttention"}  # that one is ours


@pytest.mark.parametrize("groups", [1, 2])
def test_drafts_on_a_cpu_read_shared_keys_where_they_lie(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing changes if each head has its own keys, for one node, or for a prompt."""
    config = tiny_llama().config
    config.num_key_value_heads = config.num_attention_heads // groups
    target = CausalTarget(transformers.LlamaForCausalLM(config).eval())
    state, _ = target.prefill([{"input_ids": torch.tensor([[3, 1, 4, 1, 5]])}], 16)
    lengths: list[int] = []
    grouped = attention.scaled_dot_product_attention

    def noted(query: Tensor, *rest: Tensor, **how: Any) -> Tensor:
        lengths.append(query.shape[2])
        found: Tensor = grouped(query, *rest, **how)
        return found

    draft = Tree.chain(torch.tensor([[9, 2, 6]]), DraftKind.POINT)
    monkeypatch.setattr(attention, "shares_keys", lambda config: False)
    expected = target.score(state, draft).logits
    monkeypatch.undo()
    monkeypatch.setattr(attention, "scaled_dot_product_attention", noted)
    target.score(state, Tree.chain(torch.tensor([[9]]), DraftKind.POINT))
    torch.testing.assert_close(target.score(state, draft).logits, expected)
    assert lengths == ([3] * config.num_hidden_layers if groups > 1 else [])
