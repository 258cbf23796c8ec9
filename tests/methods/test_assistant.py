"""Assistants of Gemma 4: drafts equal those of transformers for single rows, outputs equal `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    PreTrainedModel,
)

from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft
from mmspec.core.sampling import Sampler
from mmspec.errors import CheckpointError
from mmspec.heads.checkpoint import load_head
from mmspec.methods.assistant.drafter import AssistantDrafter, AssistantSession
from mmspec.methods.assistant.head import AssistantHead, all_shared
from mmspec.methods.copy.beside_head import CopyBesideHeadDrafter
from mmspec.targets import CausalTarget
from mmspec.transformers_versions import CACHE
from tests.contracts.running import decode, generate, random_prompts
from tests.tiny_models import randomise, tiny_gemma4

PROMPTS = [random_prompts(1, shortest=n, longest=n, seed=n)[0] for n in (3, 12, 20)]
TOKENS = 4


def tiny_assistant(target: PreTrainedModel, seed: int = 5, **more: Any) -> Gemma4AssistantForCausalLM:
    """Make an assistant of two layers, which attend to the target's sliding and full keys."""
    own = target.config.get_text_config()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    text = Gemma4TextConfig(
        **{name: getattr(own, name) for name in names},
        num_hidden_layers=2,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=own.sliding_window,
        head_dim=8,
        global_head_dim=16,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
    )
    config = Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=own.hidden_size, tie_word_embeddings=False, **more
    )
    model = randomise(Gemma4AssistantForCausalLM(all_shared(config)), seed)
    if config.use_ordered_embeddings:
        order = torch.randperm(own.vocab_size, generator=torch.Generator().manual_seed(0))
        model.masked_embedding.token_ordering.copy_(order)
    return model


def alone(assistant: Any, model: Any, tokens: list[int]) -> list[int]:
    """Return the chain that an assistant drafts after tokens, with a new prefill of the target."""
    ids = torch.tensor([tokens])
    read = model.model(ids[:, :-1], **{CACHE: DynamicCache()}, return_shared_kv_states=True)
    hidden, token = read.last_hidden_state[:, -1:], ids[:, -1:]
    chain = []
    for _ in range(TOKENS):
        embedded = torch.cat([model.get_input_embeddings()(token), hidden], -1)
        out = assistant(
            inputs_embeds=embedded,
            position_ids=torch.tensor([[len(tokens) - 1]]),
            shared_kv_states=dict(read.shared_kv_states),
        )
        token, hidden = out.logits.argmax(-1), out.last_hidden_state
        chain.append(int(token))
    return chain


@pytest.mark.parametrize(
    "more", [{}, {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 3}]
)
@pytest.mark.every(2)
def test_drafts_are_those_of_each_row_alone(more: dict[str, Any]) -> None:
    """Rows of different lengths, longer than the sliding window; heads of all tokens, or of some."""
    target = CausalTarget(tiny_gemma4())
    assistant = tiny_assistant(target.model, **more)
    seen: list[bool] = []

    class Compared(AssistantSession):
        def propose(self, canvas: Canvas) -> Draft:
            draft = super().propose(canvas)
            for row, tokens in enumerate(canvas.ids):
                if canvas.finish_reasons[row] is None:
                    seen.append(draft.tokens[row, 1:].tolist() == alone(assistant, target.model, tokens))
            return draft

    drafter = AssistantDrafter(AssistantHead.adopt(assistant), TOKENS, depth=TOKENS, top_k=1).fit(target)
    drafter.session = Compared  # type: ignore[assignment]
    run = decode(target, PROMPTS, drafter, max_new_tokens=12)
    assert run.outputs == [generate(target.model, prompt, 12) for prompt in PROMPTS]
    assert len(seen) > 20 and all(seen)


@pytest.mark.parametrize("beside", [False, True])
def test_outputs_are_those_of_plain_decoding(beside: bool) -> None:
    """By an assistant alone, and with copies beside its candidates."""
    target = CausalTarget(tiny_gemma4())
    drafter: Any = AssistantDrafter(AssistantHead.adopt(tiny_assistant(target.model)), 9, depth=3)
    drafter = (CopyBesideHeadDrafter(drafter) if beside else drafter).fit(target)
    how: dict[str, Any] = {"sampler": Sampler(0.9, top_p=0.9), "max_new_tokens": 32, "seed": [1, 2, 3]}
    run = decode(target, PROMPTS, drafter, **how)
    assert run.outputs == decode(target, PROMPTS, **how).outputs
    assert run.stats.draft_passes > 0


def test_a_folder_is_read(tmp_path: Path) -> None:
    target = CausalTarget(tiny_gemma4())
    tiny_assistant(target.model).save_pretrained(tmp_path)
    where = target.config, target.dtype, target.device
    head: Any = load_head("assistant", tmp_path, *where)
    expected = [generate(target.model, prompt, 12) for prompt in PROMPTS]
    assert decode(target, PROMPTS, AssistantDrafter(head).fit(target), max_new_tokens=12).outputs == expected
    adopted: Any = load_head("assistant", tiny_assistant(target.model), *where)
    assert isinstance(adopted, AssistantHead)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="a complete assistant"):
        load_head("assistant", tmp_path, *where)
    target.model.save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="gemma4"):
        load_head("assistant", tmp_path / "other", *where)
    with pytest.raises(CheckpointError, match="an assistant of Gemma 4"):
        load_head("assistant", target.model, *where)
