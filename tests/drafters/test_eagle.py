"""The EAGLE drafter: what it proposes, that no output changes, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, PreTrainedModel

from mmspec.accelerators.accelerator import Accelerator
from mmspec.acceptance.matching import SampleAndMatch
from mmspec.decoding.canvas import Stopping
from mmspec.decoding.image_grid import Grammar, ImageGrid, exclude
from mmspec.decoding.sampling import Sampler
from mmspec.drafters.eagle import EagleDrafter
from mmspec.drafters.none import NoDrafter
from mmspec.drafters.tree import DynamicTree
from mmspec.errors import InputError, UnsupportedModelError
from mmspec.models.eagle import EagleConfig, EagleHead
from mmspec.pipelines.image_prompts import image_requests
from mmspec.targets import CausalTarget, VisionLanguageTarget, image_target
from tests.contracts.checks import PROMPTS, llama, precise
from tests.contracts.mutation import PlantedBug
from tests.contracts.running import decode, generate
from tests.drafters import eagle_checks
from tests.drafters.eagle_checks import head_for, llamagen
from tests.targets import loop
from tests.targets.image_loop import draw
from tests.tiny_models import (
    encode,
    tiny_anole,
    tiny_emu3,
    tiny_emu3_5,
    tiny_gemma2,
    tiny_gpt2,
    tiny_images,
    tiny_janus,
    tiny_llama,
    tiny_llava,
    tiny_lumina,
    tiny_mistral_sliding,
    tiny_qwen2_vl,
    user_message,
)
from tests.tiny_models.common import Family

SHAPES = [{}, {"tree": "eagle"}, {"num_draft_tokens": 3, "top_k": 1}, {"tree": [0, 0, 0, 1, 2]}]
SESSION = "mmspec.drafters.eagle:EagleSession"
READING = "mmspec.drafters.feature_session:FeatureSession"


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("tree", ["dynamic", "eagle"])
def test_drafts_are_those_of_the_slow_way(tree: str, scale: float) -> None:
    eagle_checks.drafts_are_those_of_the_slow_way(scale, tree)


def test_images_are_drafted_as_the_slow_way() -> None:
    eagle_checks.images_are_drafted_as_the_slow_way()


GROWTH = "mmspec.drafters.tree:TreeGrowth"
HEAD = "mmspec.models.eagle:EagleHead"
PATH = "_copied(verdict.path)"
BUGS = {
    "states of the accepted path are shifted": (f"{READING}.observe", PATH, f"{PATH}.roll(1, 1)"),
    "tokens of the accepted path are not shifted": (f"{READING}.observe", ".roll(-1, 1)", ""),
    "the last node's state stands for the root's": (
        f"{READING}._read_committed",
        "take(hidden, accepted)",
        "hidden[:, -1]",
    ),
    "rows of candidates are kept": (f"{READING}._read_committed", "accepted + 1", "accepted + 2"),
    "states of the prompt are not shifted": (f"{HEAD}.read_prompts", "features[:, :-1]", "features[:, 1:]"),
    "positions are off by one": (f"{READING}._read_prompts", "[-1] - count", "[-1] - count - 1"),
    "levels are written over each other": (
        f"{GROWTH}.nodes",
        "parents.shape[1] - count, parents.shape[1]",
        "0, count",
    ),
    "candidates see their siblings": (f"{GROWTH}.nodes", "[:, -count:]", "[:, -count:] | True"),
    "children of another parent": (f"{SESSION}.propose", "self._copied(parent)", "self._copied(0 * parent)"),
    "confidence of the last step alone": (f"{GROWTH}.grow", "(self.scores[", "(0 * self.scores["),
    "guidance is forgotten": (
        "mmspec.drafters.heads:HeadSession._guided",
        "self.sampler.guided(logits.float())",
        "logits.float()[: len(logits) // self.copies]",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_seen(name: str) -> None:
    where, old, new = BUGS[name]

    def check() -> None:
        eagle_checks.drafts_are_those_of_the_slow_way(3.0)

    with PlantedBug(where, ((old, new),), check).planted(), pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy_output_is_that_of_generate(shape: dict[str, object]) -> None:
    drafter = EagleDrafter(head_for(llama()), **shape).fit(llama())  # type: ignore[arg-type]
    expected = [generate(llama().model, prompt, 24) for prompt in PROMPTS]
    assert decode(llama(), PROMPTS, drafter, max_new_tokens=24).outputs == expected
    assert decode(llama(), PROMPTS[:1], drafter, max_new_tokens=24).outputs == expected[:1]


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_images_are_those_of_plain_decoding(shape: dict[str, object], scale: float) -> None:
    """Bitwise, greedy and sampled, alone and in a batch."""
    target = llamagen()
    eagle = Accelerator("eagle", EagleDrafter(head_for(target), **shape), SampleAndMatch()).fit(target)  # type: ignore[arg-type]
    plain = Accelerator("none", NoDrafter(), SampleAndMatch())
    requests = image_requests(target, class_labels=[0, 3, 4], guided=scale != 1)
    for temperature in (0.0, 0.9):
        expected, _ = draw(target, plain, requests, scale, temperature)
        assert draw(target, eagle, requests, scale, temperature)[0] == expected
        assert draw(target, eagle, requests[:1], scale, temperature)[0] == expected[:1]


@pytest.mark.parametrize("family", [tiny_janus, tiny_emu3, tiny_emu3_5, tiny_anole, tiny_lumina])
def test_images_with_syntax_are_those_of_plain_decoding(family: Callable[[], Any]) -> None:
    """Heads of their own for codes, rows that end, forced tokens: drafted for free, and never missed."""
    model, tokenizer, *_ = family()
    target = image_target(model, family="lumina_mgpt" if family is tiny_lumina else None)
    assert target is not None
    eagle = Accelerator("eagle", EagleDrafter(head_for(target)), SampleAndMatch()).fit(target)
    plain = Accelerator("none", NoDrafter(), SampleAndMatch())
    sizes = {tiny_lumina: (32, 64), tiny_emu3: (8, 6), tiny_emu3_5: (64, 48)}
    height, width = sizes.get(family, (None, None))
    requests = image_requests(
        target, ["a red circle", "blue"], height=height, width=width, guided=True, tokenizer=tokenizer
    )
    for temperature in (0.0, 0.9):
        expected, _ = draw(target, plain, requests, 3.0, temperature)
        got, stats = draw(target, eagle, requests, 3.0, temperature)
        assert got == expected
        forced = sum(token >= target.grid.codebook_size for token in expected[0])
        assert stats.target_forwards <= target.grid.length - forced // 2


@pytest.mark.parametrize("family", [tiny_llava, tiny_qwen2_vl])
def test_images_in_the_prompt(family: Callable[[], Family]) -> None:
    """The head reads what the target made of the image: its embeddings and its positions, M-RoPE too."""
    model, processor = family()
    target = VisionLanguageTarget(model)
    inputs = [
        dict(encode(processor, [user_message(text, images=tiny_images(count))]))
        for text, count in (("what is there ?", 1), ("which one is red ?", 2), ("hello there", 0))
    ]
    expected = [loop.generate(model, row, 16) for row in inputs]
    for shape in SHAPES[:2]:
        eagle = Accelerator("eagle", EagleDrafter(head_for(target), **shape), SampleAndMatch()).fit(target)  # type: ignore[arg-type]
        assert loop.decode(target, eagle, inputs, Stopping(16)).outputs == expected
        assert loop.decode(target, eagle, inputs[1:2], Stopping(16)).outputs == expected[1:2]


@pytest.mark.parametrize("build", [tiny_mistral_sliding, tiny_gemma2])
def test_windows_and_additive_masks(build: Callable[[], PreTrainedModel]) -> None:
    target = CausalTarget(build())
    drafter = EagleDrafter(head_for(target)).fit(target)
    expected = [generate(target.model, prompt, 24) for prompt in PROMPTS]
    assert decode(target, PROMPTS, drafter, max_new_tokens=24).outputs == expected


def test_a_head_comes_back_from_its_folder_without_the_targets_weights(tmp_path: Path) -> None:
    for target in (llama(), llamagen()):
        head = head_for(target)
        folder = tmp_path / target.config.model_type
        head.save_pretrained(folder)
        names = set(load_file(folder / "model.safetensors"))
        assert {name.split(".")[0] for name in names} == {"fc", "decoder"}
        assert all(name.startswith(("fc.", "decoder.layers.0.")) for name in names)
        again = AutoModel.from_pretrained(folder, dtype=target.dtype)
        assert type(again) is EagleHead and again.config.vocabulary == target.vocabulary
        parts, places = torch.randn(2, 1, 3, 32, dtype=target.dtype), torch.arange(1, 4)[None]
        assert torch.equal(again(again.fuse(*parts), places), head(head.fuse(*parts), places))


def test_a_family_without_a_stack_of_layers_is_refused() -> None:
    config = EagleConfig.for_target(tiny_gpt2().config, 64)
    with pytest.raises(UnsupportedModelError, match="GPT2Model"):
        EagleHead(config)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda: CausalTarget(tiny_llama(layers=3)), "layers is 3"),
        (lambda: CausalTarget(tiny_llama(vocab=65)), "vocabulary is 65"),
        (lambda: CausalTarget(tiny_llama(hidden=16)), "hidden size is 16"),
        (lambda: CausalTarget(tiny_mistral_sliding()), "model type is mistral"),
    ],
)
def test_another_target_is_refused(other: Callable[[], CausalTarget], named: str) -> None:
    with pytest.raises(InputError, match=named):
        EagleDrafter(head_for(llama())).fit(other())


@pytest.mark.parametrize(
    ("argument", "settings"),
    [
        ("num_draft_tokens", {"num_draft_tokens": 0}),
        ("num_draft_tokens", {"num_draft_tokens": 9999}),
        ("num_draft_tokens", {"tree": "eagle", "num_draft_tokens": 25}),
        ("depth", {"depth": 0}),
        ("depth", {"tree": [0, 0], "depth": 1}),
        ("top_k", {"top_k": 1.5}),
        ("tree", {"tree": "eagel"}),
        ("parents[1]", {"tree": [0, 1]}),
    ],
)
def test_a_setting_out_of_range_is_named(argument: str, settings: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        EagleDrafter(head_for(llama()), **settings)
    assert caught.value.argument == argument


def test_more_children_than_tokens_are_refused_with_the_target() -> None:
    target = CausalTarget(tiny_llama(vocab=6))
    with pytest.raises(InputError, match="at most 6"):
        EagleDrafter(head_for(target)).fit(target)


def test_a_drafter_that_was_not_fitted_is_named() -> None:
    with pytest.raises(InputError, match="fit"):
        decode(llama(), PROMPTS, EagleDrafter(head_for(llama())))


def test_a_head_of_nan_costs_its_drafts_and_no_word() -> None:
    head = head_for(llama())
    head.fc.weight[0, 0] = torch.nan
    run = decode(llama(), PROMPTS, EagleDrafter(head).fit(llama()), max_new_tokens=12)
    assert run.outputs == [generate(llama().model, prompt, 12) for prompt in PROMPTS]
    assert run.stats.draft_faults > 0 and sum(run.stats.drafted) == 0


def test_tokens_that_sampling_excludes_are_not_drafted() -> None:
    drafter = EagleDrafter(head_for(precise()), num_draft_tokens=12, depth=2, top_k=4).fit(precise())
    run = decode(precise(), PROMPTS, drafter, sampler=Sampler(1.0, top_k=2), max_new_tokens=12)
    assert (
        max(drafted / rounds for drafted, rounds in zip(run.stats.drafted, run.stats.rounds, strict=True))
        <= 6
    )


def test_the_grammar_of_a_image() -> None:
    """Codes at cells, the row end alone after a row, the ending alone at the end, nothing beyond it."""
    grid = ImageGrid(2, 2, codebook_size=3, row_end=3, ending=(4,))
    grammar = Grammar([grid, grid], torch.device("cpu"))
    places = [0, 2, 3, 5, 6, 7, 50]
    allowed = [
        exclude(torch.zeros(2, 1, 5), grammar.at(torch.tensor([[place], [0]])), 3)[0, 0]
        .isfinite()
        .nonzero()[:, 0]
        .tolist()
        for place in places
    ]
    assert allowed == [[0, 1, 2], [3], [0, 1, 2], [3], [4], [0, 1, 2], [0, 1, 2]]


def test_the_config_of_a_head_names_its_tree() -> None:
    head = head_for(llama())
    assert EagleDrafter(head).shape == DynamicTree(24, 5, 8)
    head.config.num_draft_tokens, head.config.depth, head.config.top_k = 60, 3, 40
    assert EagleDrafter(head).shape == DynamicTree(60, 3, 40)
    assert EagleDrafter(head, num_draft_tokens=2).shape == DynamicTree(2, 2, 2)
    assert EagleDrafter(head, num_draft_tokens=30, top_k=6).shape == DynamicTree(30, 3, 6)
