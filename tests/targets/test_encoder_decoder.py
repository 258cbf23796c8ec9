"""Encoder-decoders: the output of `generate`, for rows with encoder states of different lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

import mmspec
from mmspec.accelerator import Accelerator
from mmspec.accelerators import build_accelerator
from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.interfaces import Request
from mmspec.core.loop import speculate
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.core.statistics import DecodingStats
from mmspec.errors import InputError, UnsupportedModelError
from mmspec.plugins import HEADS
from mmspec.targets import CausalTarget, adapt
from mmspec.targets.encoder_decoder import EncoderDecoderTarget, prompt_of
from tests.targets.loop import decode, oracle
from tests.targets.test_every_class import verdict
from tests.tiny_models import tiny_llama
from tests.tiny_models.any_class import encoder_inputs, tiny_of_class
from tests.tiny_models.encoder_decoder import (
    ENCODER_DECODERS,
    PLACES,
    VOCABULARY,
    encoder_inputs_of,
    tiny_bart,
    tiny_moonshine,
    tiny_trocr,
    tiny_whisper,
)

NEW_TOKENS = 40
FORWARDS_OF_COPY = 9  # the prompt, and four drafts and a token more in each of eight


def prefixed(model: PreTrainedModel, inputs: Mapping[str, Tensor], seed: int) -> dict[str, Any]:
    """The prompt of a row, whose decoder begins with `seed` tokens after the start token."""
    prompt = prompt_of(model, inputs)
    more = torch.randint(4, VOCABULARY, (1, seed), generator=torch.Generator().manual_seed(seed))
    return prompt | {"input_ids": torch.cat([prompt["input_ids"], more], 1)}


def generated(model: PreTrainedModel, inputs: Mapping[str, Tensor], tokens: Tensor) -> list[int]:
    """The greedy tokens of `generate` after the given ones; Whisper's own would drop the first."""
    how = dict(decoder_input_ids=tokens, do_sample=False, max_new_tokens=NEW_TOKENS)
    output = GenerationMixin.generate(model, **inputs, **how)
    return output[0, tokens.shape[1] :].tolist()


@pytest.fixture(params=ENCODER_DECODERS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return ENCODER_DECODERS[request.param]()


@torch.inference_mode()
def rows_of(model: PreTrainedModel) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Three prompts, whose sounds and texts differ in length, and their outputs by `generate`."""
    inputs = [encoder_inputs_of(model, seed) for seed in (0, 1, 2)]
    prompts = [prefixed(model, row, seed) for seed, row in enumerate(inputs)]
    answers = [
        generated(model, row, prompt["input_ids"]) for row, prompt in zip(inputs, prompts, strict=True)
    ]
    assert len({tuple(answer) for answer in answers}) == 3
    return prompts, answers


def test_ragged_batch_gives_what_generate_gives_for_each_row(model: PreTrainedModel) -> None:
    prompts, answers = rows_of(model)
    target = adapt(model)
    assert isinstance(target, EncoderDecoderTarget)
    methods = [build_accelerator("none"), build_accelerator("copy", min_match=1)]
    methods += [oracle(prompts, answers, 4, VOCABULARY, corruption) for corruption in (0.0, 0.3)]
    for accelerator in methods:
        assert decode(target, accelerator, prompts, Stopping(NEW_TOKENS)).outputs == answers


def test_output_depends_on_the_encoder_and_reads_it_once(model: PreTrainedModel) -> None:
    prompts, answers = rows_of(model)
    same = [prompt | {"input_ids": prompts[0]["input_ids"]} for prompt in prompts]
    calls: list[int] = []
    handle = model.get_encoder().register_forward_hook(lambda *_: calls.append(1))
    run = decode(adapt(model), build_accelerator("none"), same, Stopping(NEW_TOKENS))
    handle.remove()
    assert len(calls) == 3
    assert run.outputs[0] == answers[0] and len({tuple(row) for row in run.outputs}) == 3


def test_rows_that_enter_leave_and_are_overwritten_keep_their_encoder_states(model: PreTrainedModel) -> None:
    """Scores of one more token after rows have moved are those of the row alone."""
    target, tokens = adapt(model), torch.tensor([[7]])
    prompts, _ = rows_of(model)

    def state(rows: list[int]) -> Any:
        return target.prefill([prompts[row] for row in rows], 16)[0]

    def scores(moved: Any) -> Tensor:
        draft = Tree.chain(tokens.expand(moved.cache.rows, 1), DraftKind.POINT)
        return target.score(moved, draft).logits[:, 0]

    alone = torch.cat([scores(state([row])) for row in range(3)])
    assert not torch.allclose(alone[0], alone[1], atol=1e-2)
    joined = state([0]).joined(state([2, 1]), (1, 2))
    torch.testing.assert_close(scores(joined), alone[[0, 2, 1]])
    left = joined.part([2, 0], 3)
    torch.testing.assert_close(scores(left), alone[[1, 0]])
    torch.testing.assert_close(scores(left.overwritten([0], state([2]), (2, 1))), alone[[2, 0]])
    torch.testing.assert_close(scores(left.joined(state([1]), (2, 1)).part([2, 1], 3)), alone[[1, 0]])


def sampled(
    target: CausalTarget, prompts: list[dict[str, Any]], rows: list[int], accelerator: Accelerator
) -> list[list[int]]:
    """Drawn outputs of some rows, each with its own seed."""
    requests = [Request(prompts[row]) for row in rows]
    canvas = Canvas([each.prompt_tokens for each in requests], Stopping(20), DecodingStats(), target.device)
    random = RandomStream.from_seed([5 + row for row in rows], len(rows))
    sampler = Sampler(temperature=0.8, top_p=0.95)
    for _ in speculate(target, accelerator.fit(target).decoder, sampler, requests, canvas, random):
        pass
    return canvas.outputs()


def test_sampled_rows_are_those_of_the_row_alone_and_of_plain_decoding(model: PreTrainedModel) -> None:
    (prompts, _), target = rows_of(model), adapt(model)
    plain = build_accelerator("none")
    together = sampled(target, prompts, [0, 1, 2], plain)
    assert [sampled(target, prompts, [row], plain)[0] for row in range(3)] == together
    assert sampled(target, prompts, [0, 1, 2], build_accelerator("copy", min_match=1)) == together


@pytest.mark.parametrize(("options", "mask"), [({}, None), ({"tree": "2x2"}, None), ({}, VOCABULARY - 1)])
def test_draft_model_with_the_same_encoder_reads_its_output(
    options: dict[str, str], mask: int | None
) -> None:
    """With a mask, it drafts a chain in one forward pass (PARD)."""
    model, draft = tiny_whisper(), tiny_whisper(seed=3)
    draft.config.pard_token = mask
    draft.model.encoder.load_state_dict(model.model.encoder.state_dict())
    (prompts, answers), target = rows_of(model), adapt(model)
    accelerator = build_accelerator("draft_model", model=draft, **options).fit(target)
    calls: list[int] = []
    for each in (model, draft):
        each.get_encoder().register_forward_hook(lambda *_: calls.append(1))
    run = decode(target, accelerator, prompts, Stopping(NEW_TOKENS))
    assert run.outputs == answers and len(calls) == 3
    assert mask is None or run.stats.draft_passes == run.stats.target_forwards - 1
    plain = sampled(target, prompts, [0, 1, 2], build_accelerator("none"))
    if not options:
        assert sampled(target, prompts, [0, 1, 2], accelerator) == plain
    inputs = encoder_inputs_of(model, 0)
    loop = mmspec.accelerate("draft_model", drafter=draft, **options)
    expected = GenerationMixin.generate(model, **inputs, max_new_tokens=8)
    assert torch.equal(
        GenerationMixin.generate(model, **inputs, max_new_tokens=8, custom_generate=loop), expected
    )


def test_exact_copy_of_the_model_is_always_right() -> None:
    """Its drafts would be wrong with other encoder states, positions or masks than the target's."""
    for model in (tiny_whisper(), tiny_bart(), tiny_trocr(), tiny_moonshine()):
        prompts, answers = rows_of(model)
        run = copied(model, prompts)
        assert run.outputs == answers and run.stats.target_forwards == FORWARDS_OF_COPY


def copied(model: PreTrainedModel, prompts: list[dict[str, Any]]) -> Any:
    """Decode with the model as its own draft model."""
    target = adapt(model)
    accelerator = build_accelerator("draft_model", model=model, num_draft_tokens=4).fit(target)
    return decode(target, accelerator, prompts, Stopping(NEW_TOKENS))


def test_draft_model_with_another_encoder_reads_the_sound_itself() -> None:
    model, draft = tiny_whisper(), tiny_whisper(seed=3)
    (prompts, answers), target = rows_of(model), adapt(model)
    accelerator = build_accelerator("draft_model", model=draft).fit(target)
    assert decode(target, accelerator, prompts, Stopping(NEW_TOKENS)).outputs == answers
    loop = mmspec.accelerate("draft_model", drafter=draft)
    with pytest.raises(InputError, match="encoder of its target"):
        model.generate(**encoder_inputs_of(model, 0), max_new_tokens=8, custom_generate=loop)
    with pytest.raises(InputError, match="must be an encoder-decoder"):
        build_accelerator("draft_model", model=tiny_llama()).fit(target)


def test_padded_batch_of_generate_gives_the_tokens_of_generate() -> None:
    """Texts padded on the right; prompts of the decoder padded on the left, as Whisper passes them."""
    bart, whisper = tiny_bart(), tiny_whisper()
    texts = [encoder_inputs_of(bart, seed)["input_ids"][0] for seed in (0, 2)]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    texts_padded = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    tokens = torch.tensor([[0, 0, 3, 9], [3, 8, 7, 30]])
    sounds = torch.cat([encoder_inputs_of(whisper, seed)["input_features"] for seed in (0, 1)])
    prompts = {"decoder_input_ids": tokens, "decoder_attention_mask": (tokens != 0).long()}
    for model, inputs in ((bart, texts_padded), (whisper, {"input_features": sounds, **prompts})):
        for name in ("none", "copy"):
            loop = mmspec.accelerate(name)
            how: dict[str, Any] = {**inputs, "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
            expected = GenerationMixin.generate(model, **how).sequences
            assert torch.equal(
                GenerationMixin.generate(model, **how, custom_generate=loop).sequences, expected
            )


def test_last_position_is_reached_with_drafts_and_not_passed() -> None:
    for model in (tiny_whisper(), tiny_bart()):
        inputs, start = encoder_inputs_of(model, 0), torch.tensor([[3]])
        how: dict[str, Any] = {**inputs, "decoder_input_ids": start, "max_new_tokens": PLACES}
        expected = GenerationMixin.generate(model, **how)
        for loop in (
            mmspec.accelerate("none"),
            mmspec.accelerate("copy", min_match=1, num_draft_tokens=8),
        ):
            assert torch.equal(GenerationMixin.generate(model, **how, custom_generate=loop), expected)
        how["max_new_tokens"] = PLACES + 1
        with pytest.raises(UnsupportedModelError, match=f"has {PLACES} positions"):
            GenerationMixin.generate(model, **how, custom_generate=loop)


def test_rows_of_a_model_without_encoder_masks_must_be_alike() -> None:
    model = tiny_whisper()
    target, prompt = adapt(model), prompt_of(model, encoder_inputs_of(model, 0))
    short = BaseModelOutput(torch.randn(1, 12, 32))
    prompts = [prompt, {"input_ids": prompt["input_ids"], "encoder_outputs": short}]
    with pytest.raises(UnsupportedModelError, match="no mask for encoder states"):
        decode(target, build_accelerator("none"), prompts, Stopping(4))


def test_whisper_runs_in_place_and_shares_the_rules_of_its_generate() -> None:
    """Suppressed tokens, timestamps and sounds longer than a window, which transformers splits."""
    model = tiny_whisper()
    config = model.generation_config
    config.update(suppress_tokens=[4, 5], begin_suppress_tokens=[6], eos_token_id=49)
    config.no_timestamps_token_id, config.is_multilingual = 50, False
    sounds = torch.cat([encoder_inputs_of(model, seed)["input_features"] for seed in (0, 1)])
    for settings in ({}, {"return_timestamps": True}, {"temperature": 0.0}):
        expected = model.generate(input_features=sounds, max_new_tokens=NEW_TOKENS, **settings)
        mmspec.enable(model, "copy", min_match=1)
        found = model.generate(input_features=sounds, max_new_tokens=NEW_TOKENS, **settings)
        (summary,) = mmspec.summary(model)
        mmspec.disable(model)
        assert torch.equal(found, expected) and summary.calls >= 1


@pytest.mark.every(3)
@pytest.mark.parametrize("make", [tiny_whisper, tiny_moonshine])
@pytest.mark.parametrize(
    ("name", "settings"),
    [("medusa", {}), ("medusa", {"merged_states": 3}), ("hydra", {}), ("eagle3", {}), ("dflash", {})],
)
def test_heads_read_the_states_of_the_decoder(
    name: str, settings: dict[str, int], make: Callable[[], PreTrainedModel]
) -> None:
    """Rows of Moonshine have different numbers of encoder states, which some heads read too."""
    model = make()
    (prompts, answers), target = rows_of(model), adapt(model)
    kind = HEADS[name].load("model")
    head = kind(kind.config_class.for_target(target.config, target.vocabulary, **settings)).eval()
    accelerator = build_accelerator(name, model=head).fit(target)
    run = decode(target, accelerator, prompts, Stopping(NEW_TOKENS))
    assert run.outputs == answers and sum(run.stats.drafted) > 0
    if settings:
        plain = sampled(target, prompts, [0, 1, 2], build_accelerator("none"))
        assert sampled(target, prompts, [0, 1, 2], accelerator) == plain
        for other in (tiny_llama(), tiny_trocr()):
            head.config.target_type = head.config.target_layers = head.config.vocabulary = 0
            head.config.hidden_size = other.config.get_text_config(decoder=True).hidden_size
            with pytest.raises(InputError, match="needs an encoder-decoder whose encoder is as wide"):
                build_accelerator(name, model=head).fit(adapt(other))


@pytest.mark.parametrize("name", ["CohereAsr", "MoonshineStreaming"])
def test_decoders_that_change_the_encoder_states_give_the_tokens_of_generate(name: str) -> None:
    """One projects them in each forward pass, the other adds positions to them in place."""
    assert verdict(f"{name}ForConditionalGeneration") == "identical"
    model = tiny_of_class(f"{name}ForConditionalGeneration")
    model.generation_config.eos_token_id = None
    run = copied(model, [prompt_of(model, encoder_inputs(model))])
    assert run.stats.target_forwards == FORWARDS_OF_COPY


@pytest.mark.parametrize("make", [tiny_whisper, tiny_moonshine, tiny_trocr])
@pytest.mark.parametrize("name", ["eagle", "mtp"])
def test_heads_with_a_layer_of_the_target_are_refused(name: str, make: Callable[[], PreTrainedModel]) -> None:
    target, kind = adapt(make()), HEADS[name].load("model")
    with pytest.raises(UnsupportedModelError, match=r"use a head .*eagle3, medusa.*, draft_model or copy"):
        kind(kind.config_class.for_target(target.config, target.vocabulary))
