"""Block heads as they are published: Liquid's DSpark for images, rotated pairs, three axes, and exports."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration, LlamaConfig

from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft
from mmspec.core.plain import NoDrafter
from mmspec.core.sampling import Sampler
from mmspec.errors import CheckpointError, InputError
from mmspec.heads.checkpoint import load_head
from mmspec.methods.dflash.drafter import BlockSession, DFlashDrafter
from mmspec.methods.dflash.export import write_head
from mmspec.methods.dflash.head import DFlashHead
from mmspec.targets import CausalTarget, VisionLanguageTarget
from mmspec.trees.rejection import SpeculativeSampling
from tests.contracts.running import decode
from tests.methods.dflash_checks import KINDS, head_for
from tests.methods.flash_checks import answer, target_of
from tests.methods.naive_candidates import correlated, selected
from tests.methods.naive_dflash import naive_block
from tests.targets import loop
from tests.tiny_models import randomise, tiny_llama

IMAGE, NOISE, BLOCK = 5, 60, 9
SAMPLER, SEEDS = Sampler(0.9, top_p=0.95), [3, 4, 5]


@functools.cache
def liquid(dtype: torch.dtype = torch.float32) -> VisionLanguageTarget:
    """A tiny LFM2-VL: short convolutions and attention in turn, behind a tower of images of any shape."""
    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"] * 2, "tie_word_embeddings": False,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "patch_size": 4, "num_patches": 16,
    }  # fmt: skip
    parts = {"text_config": text, "vision_config": vision, "projector_hidden_size": 32}
    config = Lfm2VlConfig(**parts, image_token_id=IMAGE, tie_word_embeddings=False)
    model = randomise(Lfm2VlForConditionalGeneration(config), 3, silent_ids=[0, 1, 2, IMAGE])
    return VisionLanguageTarget(model.to(dtype).eval())


def prompts(dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    """Ragged prompts with images of two shapes, and without."""
    made: list[dict[str, Any]] = [{"input_ids": torch.tensor([[7, 8, 9]])}]
    for rows, columns, before, after in ((2, 4, [7, 8], [9, 10, 11]), (4, 4, [7], [12, 13])):
        count, generator = rows * columns, torch.Generator().manual_seed(rows)
        ids = [*before, *[IMAGE] * (count // 4), *after]
        made.append(
            {
                "input_ids": torch.tensor([ids]),
                "pixel_values": torch.randn(1, 16, 48, generator=generator).to(dtype),
                "spatial_shapes": torch.tensor([[rows, columns]]),
                "pixel_attention_mask": (torch.arange(16) < count).long()[None],
            }
        )
    return made


def published_by_liquid(folder: Path, **changes: Any) -> Path:
    """Write a head of random weights, with the fields of LFM2.5-VL-3B-DSpark."""
    head = head_for(liquid(), "dspark", block=BLOCK, mask_token=NOISE, taps=[1, 3])
    config = {
        "architectures": ["Lfm2DSparkDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": head.config.intermediate_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": head.config.num_key_value_heads,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": 64,
        "rope_theta": 1e4,
        "max_position_embeddings": 128000,
        "layer_types": ["full_attention"] * 2,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": NOISE, "target_layer_ids": [0, 2], "num_target_layers": 4},
        "markov_rank": 6,
        "rope_is_neox_style": False,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_file(head.state_dict(), folder / "model.safetensors")
    return folder


def read(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_head("dspark", folder, liquid().config, dtype)


def rows(count: int = 11) -> tuple[Tensor, Tensor]:
    made = torch.randn(count + BLOCK, 32, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return made[:count], made[count:]


@torch.no_grad()
@pytest.mark.parametrize("pairs", [True, False])
def test_neighbours_are_rotated_where_the_config_says_so(pairs: bool, tmp_path: Path) -> None:
    """Compared with the stored weights, rotated in pairs one slot at a time."""
    folder = published_by_liquid(tmp_path, rope_is_neox_style=not pairs)
    head, stored = read(folder, torch.float64), head_for(liquid(), "dspark", block=BLOCK, taps=[1, 3])
    stored.load_state_dict(load_file(folder / "model.safetensors"), strict=False)  # its noise is a token
    context, block = rows()
    due = naive_block(stored.double(), context, block, pairs=pairs)
    made = head(block[None], context[None], torch.arange(len(context) + BLOCK)[None])[0]
    torch.testing.assert_close(made, due, rtol=1e-5, atol=1e-5)
    assert (made - naive_block(stored, context, block, pairs=not pairs)).abs().max() > 1e-3


def test_a_head_of_liquid_drafts_nine_tokens_about_images(tmp_path: Path) -> None:
    """Greedy answers are those of transformers, sampled ones those of plain decoding, and rows are alone."""
    folder = published_by_liquid(tmp_path)
    head = read(folder)
    assert head.config.depth == BLOCK and head.config.confidence and head.config.markov == "vanilla"
    drafter, given = DFlashDrafter(head).fit(liquid()), prompts()
    run = answer(liquid(), drafter, given, Sampler(), 14)
    assert run.outputs() == [loop.generate(liquid().model, each, 14) for each in given]
    assert len(run.stats.drafted) and max(run.stats.accepted_histogram) <= BLOCK
    exact, given = liquid(torch.float64), prompts(torch.float64)
    drafter = DFlashDrafter(read(folder, torch.float64), sampling="coupled").fit(exact)
    expected = answer(exact, NoDrafter(), given, SAMPLER, 14, seed=SEEDS).outputs()
    assert answer(exact, drafter, given, SAMPLER, 14, seed=SEEDS).outputs() == expected
    drawn = DFlashDrafter(read(folder, torch.float64), tree="1x1x1x1", sampling="sampled").fit(exact)
    rule = SpeculativeSampling()
    together = answer(exact, drawn, given, SAMPLER, 14, rule, SEEDS).outputs()
    alone = [
        answer(exact, drawn, [each], SAMPLER, 14, rule, [seed]).outputs()[0]
        for each, seed in zip(given, SEEDS, strict=True)
    ]
    assert together == alone


def test_a_field_of_tomorrow_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="gate_depth"):
        read(published_by_liquid(tmp_path, gate_depth=3))
    with pytest.raises(CheckpointError, match=r"projector_type 'dspine'"):
        read(published_by_liquid(tmp_path, projector_type="dspine"))


ROPE = {"rope_theta": 1e4, "mrope_section": [1, 1, 2]}


@pytest.mark.parametrize("kind", ["mrope", "default"])
def test_three_axes_are_read_if_the_type_of_the_rotary_positions_is_mrope(kind: str, tmp_path: Path) -> None:
    """Beside another type, sections are a copy of the target's config that the published classes ignore."""
    target, plain = target_of("qwen2_5_vl"), CausalTarget(tiny_llama())
    head = head_for(target, "dflash", mask_token=7, mrope_section=[1, 1, 2])
    write_head(head, "specforge", "a/target", target.config, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = ROPE | {"rope_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(config))
    again: Any = load_head("dflash", tmp_path, target.config)
    assert again.config.mrope_section == ([1, 1, 2] if kind == "mrope" else None)
    if kind == "mrope":
        with pytest.raises(CheckpointError, match="must be absent for this target"):
            load_head("dflash", tmp_path, LlamaConfig(**plain.config.to_dict() | {"num_hidden_layers": 2}))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_head_reads_as_the_same_head(kind: str, tmp_path: Path) -> None:
    target = target_of("qwen2_5_vl") if "axes" in kind else CausalTarget(tiny_llama())
    head = head_for(target, kind)
    write_head(head, "specforge", "a/target", target.config, tmp_path)
    again: Any = load_head(kind.split(",")[0], tmp_path, target.config)
    own, read = head.state_dict(), again.state_dict()
    assert own.keys() == read.keys() and all(torch.equal(read[name], own[name]) for name in own)
    settings = (
        "taps", "block", "anchor_predicts", "markov", "confidence", "layers", "mrope_section", "conv_taps",
        "conv_group", "candidates", "selector_rank", "lattice_layers", "lattice_heads", "lattice_scale",
        "lattice_eps", "logit_scale", "logit_cap", "embedding_scale",
    )  # fmt: skip
    assert {one: getattr(again.config, one) for one in settings} == {
        one: getattr(head.config, one) for one in settings
    }
    block, context = (each.float()[None] for each in reversed(rows()))
    block, places = block[:, : head.config.block], torch.arange(11 + head.config.block)[None]
    assert torch.equal(again(block, context, places), head(block, context, places))


REFUSED: dict[str, dict[str, Any]] = {
    "taps": {"taps": [0, -1]},
    "draft_vocabulary": {"draft_vocabulary": 12},
    "causal": {"causal": [True, False]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_without_a_field_in_the_layout_is_refused(name: str, tmp_path: Path) -> None:
    target = CausalTarget(tiny_llama())
    make: Callable[..., DFlashHead] = head_for
    with pytest.raises(InputError, match=name):
        write_head(make(target, "dflash", **REFUSED[name]), "specforge", "a/target", target.config, tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dflash, two", "dflash, lilicorr"])
def test_a_draft_is_the_path_that_the_head_chooses(kind: str) -> None:
    """Ragged prompts with images: scores and tokens equal those computed one candidate at a time."""
    target, given = liquid(torch.float64), prompts(torch.float64)
    drafter = DFlashDrafter(head_for(target, kind, block=4)).fit(target)
    head, seen, changed = drafter.model, list[int](), 0

    class Watched(BlockSession):
        def propose(self, canvas: Canvas) -> Draft:
            draft = super().propose(canvas)
            for row, prompt in enumerate(given):
                if canvas.finish_reasons[row] is None:
                    seen.append(self.compare(draft.tokens[row].tolist(), prompt, canvas.ids[row]))
            return draft

        def compare(self, tokens: list[int], prompt: dict[str, Any], ids: list[int]) -> int:
            whole = {**prompt, "input_ids": torch.tensor([ids[:-1]])}
            taps = target.read([whole], tuple(head.taps))
            context = head.join([taps[tap][0] for tap in head.taps])
            block = head.slots(torch.tensor([ids[-1]]), target.embed)[0]
            hidden = naive_block(head, context, block)[1:]
            logits = target.head(hidden) * head.config.logit_scale
            if cap := head.config.logit_cap:
                logits = (logits / cap).tanh() * cap
            if head.lilicorr is None:
                path, scores = selected(head, logits, hidden, ids[-1])
            else:
                path, scores = correlated(head, logits, hidden, context[-1], target.embed)
            assert tokens == [ids[-1], *path]
            lattice = head.lattice(hidden[None], logits[None], context[-1:], target.embed)
            before = torch.tensor([[ids[-1], *path[:-1]]])
            for level, due in enumerate(scores):
                said = head.scores(lattice, level, before[:, level, None], hidden[None, level, None])
                torch.testing.assert_close(said[0, 0].double(), due, rtol=1e-5, atol=1e-5)
            return sum(a != b for a, b in zip(path, logits.argmax(-1).tolist(), strict=True))

    drafter.session = Watched  # type: ignore[assignment]
    answer(target, drafter, given, Sampler(), 6)
    changed = sum(seen)
    assert len(seen) > 8 and changed > 8, "the choice differs from the likeliest token of each slot"


@pytest.mark.parametrize("kind", ["dflash, two", "dflash, lilicorr"])
def test_sampled_candidates_have_an_honest_q(kind: str) -> None:
    """A node's q is that of the candidates alone, given the token drawn before it."""
    target = liquid(torch.float64)
    head = head_for(target, kind, block=4)
    drafter, drafts = DFlashDrafter(head, tree="1x1x1", sampling="sampled").fit(target), list[Draft]()

    class Watched(BlockSession):
        def propose(self, canvas: Canvas) -> Draft:
            drafts.append(super().propose(canvas))
            return drafts[-1]

    drafter.session = Watched  # type: ignore[assignment]
    answer(target, drafter, prompts(torch.float64), Sampler(1.0), 8, SpeculativeSampling(), SEEDS)
    for draft in drafts:
        q: Tensor = draft.q.p  # type: ignore[union-attr]
        assert ((q > 0).sum(-1) <= head.config.candidates).all()
        assert torch.allclose(q.sum(-1), torch.ones_like(q[..., 0]))
        assert (q.gather(-1, draft.tokens[:, 1:, None]) > 0).all()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dflash, two", "dflash, lilicorr"])
def test_guidance_combines_the_choices_of_both_prompts(kind: str) -> None:
    """Both have the same candidates, the best of the guided logits; u + s (c - u) of their scores chooses."""
    target, scale, changed = CausalTarget(tiny_llama().double()), 2.5, 0
    given, negatives = [[7, 8, 9], [10, 11, 12, 13, 14]], [[3, 4, 5, 6], [4]]
    drafter = DFlashDrafter(head_for(target, kind, block=4)).fit(target)
    head = drafter.model

    def block(ids: list[int]) -> tuple[Tensor, ...]:
        taps = target.read([{"input_ids": torch.tensor([ids[:-1]])}], tuple(head.taps))
        context = head.join([taps[tap][0] for tap in head.taps])
        hidden = naive_block(head, context, head.slots(torch.tensor([ids[-1]]), target.embed)[0])[1:]
        return hidden[None], head.logits(hidden[None], target.head), context[-1:]

    class Watched(BlockSession):
        def propose(self, canvas: Canvas) -> Draft:
            nonlocal changed
            draft = super().propose(canvas)
            for row, prompt in enumerate(given):
                if canvas.finish_reasons[row] is not None:
                    continue
                ids = canvas.ids[row]
                both = [block(ids), block([*negatives[row], *ids[len(prompt) :]])]
                ranked = both[1][1] + scale * (both[0][1] - both[1][1])
                lattices = [head.lattice(*each, target.embed, ranked) for each in both]
                token, best = ids[-1], list[int]()
                for level in range(3):
                    conditional, unconditional = (
                        head.scores(lattice, level, torch.tensor([[token]]), hidden[:, level, None])
                        for lattice, (hidden, _, _) in zip(lattices, both, strict=True)
                    )
                    rank = (unconditional + scale * (conditional - unconditional)).argmax()
                    token = int(lattices[0].tokens[0, level, rank])
                    best.append(token)
                assert draft.tokens[row, 1:].tolist() == best
                changed += best != ranked[0].argmax(-1).tolist()
            return draft

    drafter.session = Watched  # type: ignore[assignment]
    sampler = Sampler(guidance_scale=scale)
    run = decode(target, given, drafter, sampler=sampler, negatives=negatives, max_new_tokens=6)
    plain = decode(target, given, NoDrafter(), sampler=sampler, negatives=negatives, max_new_tokens=6)
    assert run.outputs == plain.outputs
    assert changed > 3, "the choice differs from the likeliest tokens"
