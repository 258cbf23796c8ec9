"""Hybrids, with attention and recurrent layers, give the output of `generate`, with chains and with trees.

The states that commits leave, in closed form, are those of reading the tokens at once. transformers computes
the delta rule in float32 whatever the model's dtype is, so that both agree to its rounding alone.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from mmspec.accelerators import build_accelerator
from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.interfaces import Drafter
from mmspec.errors import UnsupportedModelError
from mmspec.targets import CausalTarget, VisionLanguageTarget
from mmspec.targets.mixers import find_mixers
from mmspec.targets.prefix import PrefixCache
from tests.contracts.running import Prompt, Recorder, decode, generate, random_prompts
from tests.oracles import OracleDrafter, RandomTreeDrafter, tree_of
from tests.targets import loop
from tests.tiny_models import (
    HYBRID_TEXT_MODELS,
    VOCABULARY_SIZE,
    encode,
    tiny_images,
    tiny_qwen3_5,
    tiny_qwen3_5_vl,
    user_message,
)

VOCABULARY, NEW_TOKENS = 64, 20
PROMPTS: list[Prompt] = [random_prompts(1, shortest=n, longest=n, seed=n)[0] for n in (1, 5, 20)]
ROUNDING = 2e-4  # of states and logits about 1 to 10; bugs are above 1e-2


@functools.cache
def target_of(name: str = "qwen3_5") -> CausalTarget:
    return CausalTarget(HYBRID_TEXT_MODELS[name]())


@functools.cache
def expected_of(name: str = "qwen3_5") -> dict[tuple[int, ...], list[int]]:
    """The prompts, with what `generate` says after each."""
    model = target_of(name).model
    return {tuple(prompt): generate(model, prompt, NEW_TOKENS) for prompt in PROMPTS}


def drafters(name: str) -> dict[str, Drafter | None]:
    known = expected_of(name)
    return {
        "none": None,
        "copy": build_accelerator("copy", min_match=1).drafter,
        "chains": OracleDrafter(known, 5, VOCABULARY, corruption=0.3),
        "trees": OracleDrafter(known, 4, VOCABULARY, corruption=0.2, siblings=2),
        "another tree in every row": RandomTreeDrafter(9, VOCABULARY, hints=known),
    }


@pytest.mark.parametrize("name", HYBRID_TEXT_MODELS)
@pytest.mark.every(5)
def test_ragged_rows_say_what_generate_says(name: str) -> None:
    for method, drafter in drafters(name).items():
        run = decode(target_of(name), PROMPTS, drafter, max_new_tokens=NEW_TOKENS)
        assert run.outputs == list(expected_of(name).values()), method
        assert method in ("none", "copy") or sum(run.stats.rounds) < 3 * (NEW_TOKENS - 1), method


def test_rows_that_end_leave_the_others_alone() -> None:
    expected = list(expected_of().values())
    end = expected[2][14]
    cut = [row[: row.index(end) + 1] if end in row else row for row in expected]
    assert len({len(row) for row in cut}) > 1
    for method in ("chains", "trees"):
        drafter = drafters("qwen3_5")[method]
        assert decode(target_of(), PROMPTS, drafter, max_new_tokens=NEW_TOKENS, end=[end]).outputs == cut


@functools.cache
def vision_language() -> tuple[VisionLanguageTarget, list[dict[str, Any]], list[list[int]]]:
    """Qwen3.5 with images; requests with one, two and none; what `generate` says."""
    model, processor = tiny_qwen3_5_vl()
    images = tiny_images()
    inputs = [encode(processor, user_message("what is there ?", images[:count])) for count in (1, 2, 0)]
    return VisionLanguageTarget(model), inputs, [loop.generate(model, row, NEW_TOKENS) for row in inputs]


def test_images_are_described_as_by_generate() -> None:
    target, inputs, expected = vision_language()
    assert len(set(map(tuple, expected))) == 3
    known = {
        tuple(row["input_ids"][0].tolist()): output for row, output in zip(inputs, expected, strict=True)
    }
    drafted = OracleDrafter(known, 4, VOCABULARY_SIZE, corruption=0.3, siblings=1)
    for rows in ([0], [0, 1, 2]):
        prompts = [inputs[row] for row in rows]
        oracle = build_accelerator("none")
        for accelerator in (oracle, type(oracle)("oracle", drafted, oracle.rule)):
            run = loop.decode(target, accelerator, prompts, Stopping(NEW_TOKENS))
            assert run.outputs == [expected[row] for row in rows], accelerator


@pytest.mark.parametrize("name", HYBRID_TEXT_MODELS)
@pytest.mark.every(4)
def test_logits_of_a_node_are_those_of_its_path(name: str) -> None:
    target = target_of(name)
    state, _ = target.prefill([{"input_ids": torch.tensor([list(prompt)])} for prompt in PROMPTS], 64)
    tokens = torch.randint(VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(2))
    draft = tree_of(tokens, [0, 0, 0, 1, 1, 2, 4, 6, 7], DraftKind.POINT)
    logits = target.score(state, draft).logits
    for row, prompt in enumerate(PROMPTS):
        for node in range(9):
            path = tokens[row][draft.ancestors[row, node]].tolist()
            alone = target.model(torch.tensor([[*prompt, *path]])).logits[0, -1]
            assert (logits[row, node] - alone).abs().max() < ROUNDING, f"row {row}, node {node}"


@pytest.mark.parametrize("name", HYBRID_TEXT_MODELS)
@pytest.mark.every(4)
def test_committed_states_are_those_of_a_fresh_prefill(name: str) -> None:
    """After every round, of rows that go on."""
    target = Recorder(target_of(name).model)
    fresh = target_of(name)

    def watch(canvas: Canvas) -> None:
        for row, tokens in enumerate(canvas.ids):
            if canvas.finish_reasons[row] is None:
                read, _ = fresh.prefill([{"input_ids": torch.tensor([tokens[:-1]])}], 64)
                for ours, theirs in zip(target.state.cache.recurrent, read.cache.recurrent, strict=True):
                    assert ours.committed.keys() == theirs.committed.keys() != set()
                    for key, state in ours.committed.items():
                        # of a window, the next token needs no more than the newest inputs
                        newest = slice(1 if key[0] == "conv" else 0, None)
                        difference = state[row][..., newest] - theirs.committed[key][0][..., newest]
                        assert difference.abs().max() < ROUNDING

    for method in ("chains", "another tree in every row"):
        decode(target, PROMPTS, drafters(name)[method], max_new_tokens=8, watch=watch)


def test_scoring_changes_no_state_and_leaves_the_model_as_it_was() -> None:
    target = target_of()
    mixers = find_mixers(target.model)
    own = [mixer.forward for mixer in mixers]
    state, _ = target.prefill([{"input_ids": torch.tensor([list(PROMPTS[1])])}], 64)
    before = [layer.row_states(0) for layer in state.cache.recurrent]
    draft = Tree.chain(torch.tensor([[1, 2, 3]]), DraftKind.POINT)
    target.score(state, draft)
    hook = target.model.get_output_embeddings().register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        target.score(state, draft)
    hook.remove()
    for layer, states in zip(state.cache.recurrent, before, strict=True):
        assert all(torch.equal(layer.committed[key], kept) for key, kept in states.items())
    assert [mixer.forward for mixer in mixers] == own
    assert not any("forward" in vars(mixer) for mixer in mixers)


def fail(*args: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("name", ["qwen3_5", "mamba", "falcon_h1"])
@pytest.mark.every(2)
def test_a_prompt_goes_on_from_the_end_of_another(name: str) -> None:
    """By one token and by several, but from no other place, because no state was stored there."""
    target, memory = CausalTarget(HYBRID_TEXT_MODELS[name]()), PrefixCache(1 << 20)
    target.prefix_cache = memory
    first = (*PROMPTS[2],)
    longer = (*first, 7, *PROMPTS[1])
    cases = {first: 0, (*first, 9): len(first), longer: len(first), (*longer, 1, 2): len(longer)}
    # the same prompt again has no state before its last token
    cases |= {(*first[:-1], (first[-1] + 1) % VOCABULARY, 3): 0}
    for prompt, known in cases.items():
        run = decode(target, [prompt], drafters(name)["copy"], max_new_tokens=8)
        assert run.outputs == [generate(target.model, prompt, 8)], len(prompt)
        assert run.stats.cached_prompt_tokens == known
    again = decode(target, [first], max_new_tokens=8)
    assert again.stats.cached_prompt_tokens == 0 and again.outputs == [generate(target.model, first, 8)]
    rows = [first, (*longer, 5), (*first, 4)]
    run = decode(target, rows, drafters(name)["copy"], max_new_tokens=8)
    assert run.outputs == [generate(target.model, prompt, 8) for prompt in rows]
    assert run.stats.cached_prompt_tokens == len(longer) + len(first)


def test_a_mixer_that_needs_more_than_its_input_is_refused_by_its_layer() -> None:
    model: PreTrainedModel = tiny_qwen3_5()
    mixer = find_mixers(model)[1]

    def forward(
        self: nn.Module, hidden_states: object, more: object, cache_params: object = None
    ) -> None: ...

    mixer.__class__ = type("Needy", (type(mixer),), {"forward": forward})
    with pytest.raises(UnsupportedModelError, match=r"layer 1 .*\(linear_attention\).*, but 0 do"):
        CausalTarget(model)
