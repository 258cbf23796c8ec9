"""`mmspec.enable(pipe)` on diffusers' `DiffusionGemmaPipeline`: canvases of mmspec in the pipeline's output.

What canvases hold is tested against transformers in tests/families/test_diffusion_gemma.py.
"""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch

import mmspec
from mmspec.errors import InputError
from mmspec.pipelines import VisionLanguagePipeline
from tests.tiny_models import tiny_images
from tests.tiny_models.diffusion_gemma_pipeline import HAS_CANVAS_PIPELINE, tiny_canvas_pipeline

pytestmark = pytest.mark.skipif(not HAS_CANVAS_PIPELINE, reason="diffusers or transformers has no such model")

LENGTH = 6
TWO = ["how many", "where is the red circle ? what is there ?"]
CALL: dict[str, Any] = {"num_inference_steps": 3, "gen_length": 2 * LENGTH - 1}


@pytest.fixture(scope="module")
def made() -> Any:
    return tiny_canvas_pipeline(LENGTH)


@pytest.fixture
def pipe(made: Any) -> Any:
    """A pipeline of its own around the one model."""
    other = diffusers.DiffusionGemmaPipeline(**made.components)
    other.set_progress_bar_config(disable=True)
    return other


def calls(pipe: Any) -> int:
    return mmspec.summary(pipe)[0].calls


def asked_of(pipe: Any, prompt: str, images: Any = None, **options: Any) -> list[int]:
    """Tokens of our own pipeline."""
    own: Any = VisionLanguagePipeline(pipe.model, pipe.processor)
    own.set_accelerator("renoise", **options)
    how = {"max_new_tokens": 2 * LENGTH, "do_sample": True, "temperature": 1.0, "seed": 3}
    tokens: list[int] = own(prompt, images=images, **how).tokens[0]
    return tokens


def test_it_answers_as_our_own_pipeline(pipe: Any) -> None:
    """By the settings of its call and scheduler, or those that it was enabled with."""
    assert mmspec.enable(pipe, "none", seed=3) is pipe
    output = pipe(TWO[0], **CALL)
    assert output.sequences.tolist() == [asked_of(pipe, TWO[0], denoising_steps=3)]
    assert output.texts == pipe.processor.batch_decode(output.sequences, skip_special_tokens=True)
    (told,) = mmspec.summary(pipe)
    assert (told.name, told.accelerator, told.exactness) == ("model", "none", "exact")
    assert (told.calls, told.tokens, told.forwards) == (1, 2 * LENGTH, 1 + 2 * 3)
    settings = {"entropy_bound": 2.0, "t_min": 0.3, "t_max": 0.9}
    pipe.scheduler = diffusers.EntropyBoundScheduler(**settings)
    mmspec.enable(pipe, "renoise", denoising_steps=2, seed=3)
    sequences, texts = pipe(TWO[0], **CALL, output_type="seq", return_dict=False)
    assert sequences.tolist() == [asked_of(pipe, TWO[0], denoising_steps=2, **settings)] and texts is None
    (told,) = mmspec.summary(pipe)
    assert (told.exactness, told.forwards) == ("lossy", 1 + 2 * 2)


def test_rows_of_a_batch_end_where_they_end(pipe: Any) -> None:
    """Rows are filled up to whole canvases behind their end tokens, which texts stop at."""
    mmspec.enable(pipe, "none", seed=3)
    whole = pipe(TWO, **CALL, eos_early_stop=False).sequences
    assert whole.shape == (2, 2 * LENGTH)
    assert whole[:1].tolist() == pipe(TWO[:1], **CALL, eos_early_stop=False).sequences.tolist()
    end = int(whole[0, 2])
    for early in (False, True):
        output = pipe(TWO, **CALL, eos_token_id=end, eos_early_stop=early)
        for row, (tokens, text) in enumerate(zip(output.sequences.tolist(), output.texts, strict=True)):
            own = whole[row].tolist()
            kept = own[: own.index(end) + 1] if end in own else own
            behind = [end] * (2 * LENGTH - len(kept)) if early else own[len(kept) :]
            assert tokens == (kept + behind)[: len(tokens)]
            assert text == pipe.processor.decode(kept, skip_special_tokens=True)
    alone = pipe(TWO[0], **CALL, eos_token_id=end)
    assert alone.sequences.tolist() == [[*whole[0, :3].tolist(), *[end] * (LENGTH - 3)]]


def test_images_go_to_the_rows_that_show_them(pipe: Any) -> None:
    mmspec.enable(pipe, "none", seed=3)
    first, second, *_ = tiny_images()
    seen = pipe(TWO[0], image=first, **CALL).sequences
    assert seen.tolist() == [asked_of(pipe, TWO[0], [first], denoising_steps=3)]
    together = [{"type": "image", "image": first}, {"type": "text", "text": TWO[0]}]
    told = pipe(messages=[{"role": "user", "content": together}], **CALL).sequences
    assert torch.equal(told, seen)
    rows = pipe([TWO[0], TWO[0], TWO[0]], image=[first, None, second], **CALL).sequences
    other = pipe([TWO[0], TWO[0], TWO[0]], image=[first, None, first], **CALL).sequences
    assert torch.equal(rows[:1], seen) and torch.equal(rows[:2], other[:2])
    assert not torch.equal(rows[2], other[2])


def test_generators_and_seeds_repeat_a_call(pipe: Any) -> None:
    mmspec.enable(pipe, "none")

    def drawn(seed: int, count: int = 1) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        return [pipe(TWO[0], generator=generator, **CALL).sequences.tolist() for _ in range(count)]

    first, second = drawn(1, 2)
    assert [first, second] == drawn(1, 2) and first != second and [first] != drawn(2)
    mmspec.enable(pipe, "none", seed=5)
    assert drawn(1) == [first]  # a generator is nearer than the seed
    assert torch.equal(pipe(TWO[0], **CALL).sequences, pipe(TWO[0], **CALL).sequences)


def end_of_step(pipe: Any, step: int, time: int, tensors: dict[str, Any]) -> dict[str, Any]:
    return tensors


def padded_right(pipe: Any, **how: Any) -> Any:
    ids, mask, media = type(pipe)._prepare_inputs(pipe, **how)
    return ids.flip(-1), mask.flip(-1), media


@pytest.mark.parametrize(
    ("said", "how", "scheduler"),
    [
        ("callback_on_step_end", {"callback_on_step_end": end_of_step}, None),
        ("cache_implementation", {"cache_implementation": "dynamic"}, None),
        ("confidence_threshold", {"confidence_threshold": -1.0}, None),
        ("eos_token_id", {"eos_token_id": torch.tensor(1)}, None),
        ("scheduler", {}, "BlockRefinementScheduler"),
        ("scheduler", {}, "DiscreteDDIMScheduler"),
        ("attention_mask", {"prompt": TWO}, None),
    ],
)
def test_what_our_loop_cannot_do_is_passed_on(
    said: str,
    how: dict[str, Any],
    scheduler: str | None,
    pipe: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if scheduler is not None:
        pipe.scheduler = getattr(diffusers, scheduler)()
    if said == "attention_mask":
        monkeypatch.setattr(pipe, "_prepare_inputs", lambda **given: padded_right(pipe, **given))
    asked = {"prompt": TWO[0], **CALL, **how}
    untouched = pipe(**asked, generator=torch.Generator().manual_seed(0))
    mmspec.enable(pipe, "none")
    with caplog.at_level(logging.INFO, "mmspec"):
        passed = pipe(**asked, generator=torch.Generator().manual_seed(0))
    assert torch.equal(passed.sequences, untouched.sequences) and passed.texts == untouched.texts
    assert calls(pipe) == 0 and f"passed on to diffusers: {said}" in caplog.text


def test_what_the_pipeline_refuses_it_refuses_still(pipe: Any) -> None:
    mmspec.enable(pipe, "none")
    with pytest.raises(ValueError, match="Provide either `prompt`"):
        pipe(**CALL)
    with pytest.raises(ValueError, match="num_inference_steps"):
        pipe(TWO[0], num_inference_steps=0)
    with pytest.raises(ValueError, match="output_type"):
        pipe(TWO[0], output_type="words", **CALL)
    with pytest.raises(TypeError, match="wrong"):
        pipe(TWO[0], wrong=1)
    assert calls(pipe) == 0


def test_what_was_enabled_can_be_undone_and_copied(pipe: Any, made: Any) -> None:
    asked = {"prompt": TWO[0], **CALL}
    untouched = pipe(**asked, generator=torch.Generator().manual_seed(0)).sequences
    kept = dict(vars(pipe))
    mmspec.enable(pipe, "none")
    pipe(**asked)
    made(**asked)  # another pipeline around the same model is not touched
    with pytest.raises(InputError, match=r"mmspec\.enable"):
        mmspec.summary(made)
    twin = copy.deepcopy(pipe)
    assert calls(pipe) == 1 and calls(twin) == 0
    assert mmspec.disable(pipe) is pipe
    assert dict(vars(pipe)) == kept
    twin(**asked)
    assert calls(twin) == 1
    again = pipe(**asked, generator=torch.Generator().manual_seed(0)).sequences
    assert torch.equal(again, untouched)


def test_what_cannot_be_accelerated_is_said(pipe: Any) -> None:
    """A model whose `generate` takes no loop would not be called by any of ours."""
    with pytest.raises(InputError, match="accelerator"):
        mmspec.enable(pipe)
    with pytest.raises(InputError, match="accepts a custom loop"):
        mmspec.enable(pipe.model, "none")
    with pytest.raises(InputError, match="accepts a custom loop"):
        mmspec.enable(SimpleNamespace(components={"model": pipe.model}), "none")
    pipe.model = torch.nn.Linear(2, 2)
    with pytest.raises(InputError, match="transformers' DiffusionGemma"):
        mmspec.enable(pipe, "none")
