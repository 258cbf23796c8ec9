"""LANTERN's drafters in their published layout with random weights, compared with its forward pass by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.accelerator import Accelerator
from mmspec.core.interfaces import Request
from mmspec.errors import CheckpointError
from mmspec.families.llamagen.modeling import caption_prompt, null_caption_prompt
from mmspec.families.llamagen.target import LlamaGenTarget
from mmspec.heads.feature_session import GrownTreeDrafter
from mmspec.methods.eagle.published import read_eagle
from mmspec.pipelines.image_prompts import image_requests
from tests.families import official_layout
from tests.families.naive_llama import feed_forward
from tests.families.naive_llamagen import rotated
from tests.families.official_layout import Changes, changed
from tests.methods.eagle_checks import Examined, Gullible
from tests.methods.naive_eagle import NaiveEagle, read_whole
from tests.methods.naive_eagle import Path as Tokens
from tests.targets.image_loop import draw
from tests.tiny_models import tiny_llama
from tests.tiny_models.llamagen import tiny_llamagen

WIDTH, HEADS, INNER, CODES, GRID, EPS = 32, 2, 40, 48, 4, 1e-6
LABELS = {"caption": "t2i", "class": "c2i"}


def published(seed: int = 5) -> dict[str, Tensor]:
    """Random weights by the names of LANTERN's files, with the embedding that they hold."""
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    layer = {f"self_attn.{name}_proj.weight": made(WIDTH, WIDTH) for name in "qkvo"}
    layer |= {f"mlp.{name}_proj.weight": made(INNER, WIDTH) for name in ("gate", "up")}
    layer |= {"mlp.down_proj.weight": made(WIDTH, INNER), "post_attention_layernorm.weight": made(WIDTH) + 1}
    own = {
        "embed_tokens.weight": made(CODES, WIDTH),
        "fc.weight": made(WIDTH, 2 * WIDTH),
        "fc.bias": made(WIDTH),
    }
    return own | {f"layers.0.{name}": weight for name, weight in layer.items()}


def store(folder: Path, weights: dict[str, Tensor], condition: str, **changes: Any) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "input_type": LABELS[condition],
        "caption_dim": 2048,
        "num_hidden_layers": 1,
        "num_key_value_heads": HEADS,
        "rms_norm_eps": EPS,
        "rope_scaling": None,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "vocab_size": CODES,
    }
    return official_layout.store(folder, weights, config | changes, "model.safetensors")


def forward(weights: dict[str, Tensor], tokens: list[int], states: Tensor, slots: int) -> Tensor:
    """States [L - 1, d] at a whole sequence without its first slot; slots hold token 0 in `tokens`."""
    weights = {name.removeprefix("layers.0."): weight.double() for name, weight in weights.items()}
    rows = torch.cat([weights["embed_tokens.weight"][tokens[1:]], states], -1)
    rows = rows @ weights["fc.weight"].T + weights["fc.bias"]
    q, k, v = (
        (rows @ weights[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (HEADS, -1)) for name in "qkv"
    )
    for place in range(len(rows)):
        for head in range(HEADS):  # without the first slot, the image begins one row earlier
            q[place, head] = rotated(q[place, head], place, slots - 1, GRID)
            k[place, head] = rotated(k[place, head], place, slots - 1, GRID)
    scores = torch.einsum("qhw,khw->hqk", q, k) * (WIDTH // HEADS) ** -0.5
    later = torch.ones(len(rows), len(rows)).triu(1).bool()
    mixed = torch.einsum("hqk,khw->qhw", scores.masked_fill(later, -torch.inf).softmax(-1), v).flatten(1)
    rows = rows + mixed @ weights["self_attn.o_proj.weight"].T
    normed = (
        rows / (rows.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weights["post_attention_layernorm.weight"]
    )
    return rows + feed_forward(weights, normed)


class Lantern(NaiveEagle):
    """The published forward pass, which replaces that of the head."""

    weights: dict[str, Tensor]

    def logits(self, prompt: dict[str, Any], output: list[int], path: Tokens) -> Tensor:
        taps, _ = read_whole(self.target, prompt, output)
        slots = prompt["input_ids"].shape[1]
        tokens, states = [0] * slots + output, taps[-1][0, :-1]
        for token in (*path, None):
            hidden = forward(self.weights, tokens, states, slots)
            if token is not None:
                tokens, states = [*tokens, token], torch.cat([states, hidden[-1:]])
        logits: Tensor = self.target.head(hidden[-1])
        return logits


def requests_of(target: LlamaGenTarget) -> list[Request]:
    if target.config.condition_type == "class":
        return image_requests(target, class_labels=[3], guided=True)
    size = 1, target.config.caption_length, target.config.caption_dim
    features = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(target.dtype)
    prompt, null = caption_prompt(target.config, features), null_caption_prompt(target.model)
    return [Request(prompt, negative_inputs=null, layout=target.grid)]


@pytest.mark.parametrize("condition", LABELS)
def test_drafts_are_those_of_the_published_forward(condition: str, tmp_path: Path) -> None:
    """Both rows of guidance, prompts of slots, positions of the raster, its own embedding: in float64."""
    target = LlamaGenTarget(tiny_llamagen(condition, grid=GRID).double())
    weights = published()
    head = read_eagle(store(tmp_path, weights, condition), target.config)
    assert head is not None and head.config.layer_config().rms_norm_eps == EPS
    Lantern.weights = weights
    drafter = GrownTreeDrafter(head.double().eval(), num_draft_tokens=6, depth=2, top_k=3).fit(target)
    examined = Examined(drafter, GRID**2, Lantern)
    requests = requests_of(target)
    draw(target, Accelerator("eagle", examined, Gullible()), requests, 3.0, 0.8)
    assert examined.drafts > 3


def test_drafters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    captions, classes = (tiny_llamagen(condition, grid=GRID).config for condition in ("caption", "class"))
    cases: list[tuple[Any, Changes, dict[str, Any], str]] = [
        (
            classes,
            {},
            {"input_type": "t2i"},
            "input_type 't2i' needs a LlamaGen that",
        ),
        (captions, {}, {"input_type": "c2i"}, "conditioned on a class"),
        (captions, {}, {"intermediate_size": 41}, "wrong shapes: decoder.layers.0.mlp"),
        (captions, {}, {"num_attention_heads": 3}, "heads"),
        (tiny_llama().config, {}, {}, "a LlamaGen that is conditioned on a caption"),
        (captions, {"embed_tokens.weight": None}, {}, r"missing keys: embed_tokens\.weight"),
    ]
    for config, changes, fields, named in cases:
        with pytest.raises(CheckpointError, match=named):
            read_eagle(store(tmp_path, changed(published(), changes), "caption", **fields), config)
