"""P-EAGLE heads in the layouts of speculators and SpecForge: every level as the release computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.core.sampling import Sampler
from mmspec.heads.checkpoint import load_head
from mmspec.methods.eagle3.drafter import Eagle3Drafter
from mmspec.methods.eagle3.head import ParallelConfig, ParallelHead
from mmspec.targets import CausalTarget
from mmspec.visual_tokens.spans import find_images
from tests.contracts.running import decode, generate, random_prompts
from tests.families.naive_llama import attention, feed_forward, layer_weights, rms_norm
from tests.families.official_layout import store
from tests.methods.eagle_checks import Examined, Gullible
from tests.methods.flash_checks import answer, inputs_of
from tests.methods.flash_checks import target_of as target_of_images
from tests.methods.naive_eagle import NaiveEagle, read_whole
from tests.methods.naive_eagle import Path as Tokens
from tests.methods.test_eagle3_official import (
    CHOSEN,
    GROUPS,
    HEADS,
    INNER,
    LAYER,
    SPECULATORS,
    THETA,
    WIDTH,
    WORDS,
    published,
)
from tests.targets import loop
from tests.tiny_models import tiny_llama

MASK, TAPS = 11, [1, 2, 3]
LAYERS = {**LAYER, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "speculators": {
        **SPECULATORS,
        "speculators_model_type": "peagle",
        "transformer_layer_config": LAYERS,
        "eagle_aux_hidden_state_layer_ids": TAPS,
        "mask_token_id": MASK,
        "embed_requires_grad": True,
        "speculators_config": {"algorithm": "peagle", "proposal_methods": [{"speculative_tokens": 4}]},
    },
    "specforge": {
        **LAYERS,
        "architectures": ["PEagleDraftModel"],
        "draft_vocab_size": 5,
        "mask_token_id": MASK,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    },
}


def weights_of(normed: bool = False) -> dict[str, Tensor]:
    """Random weights of two layers, and what a mask is made of."""
    made = published("layers.0.")
    second = layer_weights(WIDTH, HEADS, GROUPS, INNER, WIDTH) | {
        "input_layernorm.weight": torch.rand(WIDTH) + 0.5
    }
    made |= {f"layers.1.{name}": weight for name, weight in second.items()}
    made |= {"mask_hidden": torch.randn(1, 1, 3 * WIDTH), "embed_tokens.weight": torch.randn(WORDS, WIDTH)}
    return made | ({"input_norm.weight": torch.rand(3 * WIDTH) + 0.5} if normed else {})


class Release(NaiveEagle):
    """The published forward: rows of the sequence, then as many of the mask as the level asks for."""

    weights: dict[str, Tensor]
    before_residual: bool
    window: int | None = None

    def logits(self, prompt: dict[str, Any], output: list[int], path: Tokens) -> Tensor:
        taps, _ = read_whole(self.target, prompt, output, (0, *TAPS))
        own = {name: weight.double() for name, weight in self.weights.items()}
        first, second = (
            {
                name.removeprefix(f"layers.{i}."): each
                for name, each in own.items()
                if name.startswith(f"layers.{i}.")
            }
            for i in (0, 1)
        )
        ids = [*prompt["input_ids"][0].tolist()[1:], *output, *[MASK] * len(path)]
        states = torch.cat([taps[tap][0, :-1] for tap in TAPS], -1)
        states = torch.cat([states, own["mask_hidden"][0].expand(len(path), -1)])
        if "input_norm.weight" in own:
            states = rms_norm(states, own["input_norm.weight"])
        given = states @ own["fc.weight"].T
        normed = rms_norm(given, first["hidden_norm.weight"])
        embedded = rms_norm(own["embed_tokens.weight"][ids], first["input_layernorm.weight"])
        rows = normed if self.before_residual else given
        rows = rows + attention(first, torch.cat([embedded, normed], -1), THETA, self.window)
        rows = rows + feed_forward(first, rms_norm(rows, first["post_attention_layernorm.weight"]))
        rows = rows + attention(second, rms_norm(rows, second["input_layernorm.weight"]), THETA, self.window)
        rows = rows + feed_forward(second, rms_norm(rows, second["post_attention_layernorm.weight"]))
        known = rms_norm(rows[-1], own["norm.weight"]) @ own["lm_head.weight"].T
        return torch.full((WORDS,), -torch.inf, dtype=known.dtype).scatter(0, CHOSEN, known)


def target_of(dtype: torch.dtype = torch.float32) -> CausalTarget:
    return CausalTarget(tiny_llama(hidden=WIDTH, vocab=WORDS, layers=4).to(dtype))


@pytest.mark.parametrize(
    ("layout", "shape", "window"),
    [("speculators", {}, 5), ("specforge", {"num_draft_tokens": 8, "depth": 3, "top_k": 2}, None)],
)
def test_drafts_are_those_of_the_release(
    layout: str, shape: dict[str, int], window: int | None, tmp_path: Path
) -> None:
    """Ragged prompts and accepted paths, chains and trees, in float64."""
    target = target_of(torch.float64)
    weights, config = weights_of(normed=bool(shape)), CONFIGS[layout]
    if window:
        slides = {"layer_types": ["sliding_attention"] * 2, "sliding_window": window}
        nested = {"transformer_layer_config": {**LAYERS, **slides}}
        config = config | (nested if layout == "speculators" else slides)
    store(tmp_path, weights, config | ({"norm_before_fc": True} if shape else {}))
    head: Any = load_head("eagle3", tmp_path, target.config, target.dtype, target.device)
    assert isinstance(head, ParallelHead) and head.config.depth == (4 if layout == "speculators" else 8)
    assert head.config.taps == TAPS
    Release.weights, Release.before_residual = weights, layout == "speculators"
    Release.window = window
    drafter = Eagle3Drafter(head, **shape).fit(target)
    examined = Examined(drafter, 10, Release)
    prompts = random_prompts(3, WORDS, longest=6, seed=4)
    run = decode(target, prompts, examined, Gullible(), Sampler(1.0), max_new_tokens=10)
    assert examined.drafts >= 4 and max(run.stats.accepted_histogram) >= 2
    run = decode(target, prompts, drafter, max_new_tokens=10)
    assert run.outputs == [generate(target.model, prompt, 10) for prompt in prompts]
    assert run.stats.draft_passes <= run.stats.target_forwards


def test_a_prompt_with_images_keeps_their_rows() -> None:
    """The head embeds text, and the target embeds images, which have no tokens to embed."""
    target = target_of_images("llava")
    settings: dict[str, Any] = {"mask_token": 3, "own_embedding": True, "num_layers": 2, "depth": 4}
    config = ParallelConfig.for_target(target.config, target.vocabulary, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drafter = Eagle3Drafter(ParallelHead(config).eval().requires_grad_(False)).fit(target)
    head: Any = drafter.model
    read, told = head.read_prompts, []
    head.read_prompts = lambda prompts: told.append(prompts.embeddings.clone()) or read(prompts)
    inputs = inputs_of("llava")
    cases = [inputs[case] for case in ("two images", "no image")]
    run = answer(target, drafter, cases, Sampler(), 12)
    assert run.outputs() == [loop.generate(target.model, case, 12) for case in cases]
    for case, made in zip(cases, told, strict=True):
        own = head.embed_tokens(case["input_ids"])
        for span in find_images(target.config, case):
            assert (
                not torch.isclose(made[0, span.start : span.stop], own[0, span.start : span.stop])
                .all(-1)
                .any()
            )
            own[0, span.start : span.stop] = made[0, span.start : span.stop]
        assert torch.equal(made, own)
