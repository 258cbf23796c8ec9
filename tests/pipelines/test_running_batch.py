"""Requests that enter and leave a running batch have the same outputs as alone."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec.accelerators import Accelerator
from mmspec.core import cache as cache_module
from mmspec.errors import InputError, NoRoomError, NumericalError, PipelineBusyError
from mmspec.heads.feature_session import FeatureSession
from mmspec.pipelines import ImagePipeline, MMSpecPipeline, VisionLanguagePipeline
from mmspec.scenes import render, sample_scene
from mmspec.trees.pacing import PacedDrafter
from tests.methods.heads_checks import medusa_for
from tests.tiny_models.llamagen import tiny_llamagen, tiny_vq
from tests.trees.length_checks import PACE, Script, Scripts

ASSETS = Path(__file__).parents[2] / "assets"
PROMPTS = [
    "Describe the image in detail.",
    "What is in the image?",
    "Describe the image.",
    "How many objects are there?",
]


@pytest.fixture(scope="module")
def text() -> VisionLanguagePipeline:
    return MMSpecPipeline.from_pretrained(ASSETS / "scenes-llava", dtype=torch.float32)


@pytest.fixture(scope="module")
def drawing() -> ImagePipeline:
    # in float32 the last bits of a row's logits change with the number of rows, and tokens have near ties
    pipe = ImagePipeline(tiny_llamagen("class").double(), vq=tiny_vq())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def text_requests() -> list[tuple[str, dict[str, Any]]]:
    """Four requests that differ in image, length, temperature, seed and truncation."""
    own: list[dict[str, Any]] = [
        {"max_new_tokens": 24},
        {"max_new_tokens": 7, "temperature": 0.9, "seed": 3},
        {"max_new_tokens": 16, "temperature": 1.2, "top_k": 5, "seed": 4},
        {"max_new_tokens": 12, "stop_strings": "t", "temperature": 0.7, "top_p": 0.9, "seed": 5},
    ]
    images = [render(sample_scene(index)) for index in range(len(own))]
    return [(PROMPTS[index], {"images": images[index], **settings}) for index, settings in enumerate(own)]


def enter_and_leave(batch: Any, requests: list[dict[str, Any]], seed: int) -> dict[int, Any]:
    """Let requests enter at random moments, and cancel two; the outputs of the others by number."""
    chance, cancelled = random.Random(seed), 0
    waiting, numbers, outputs = list(range(len(requests))), dict[int, int](), dict[int, Any]()
    streamed, logged = defaultdict[int, list[int]](list), defaultdict[int, list[Any]](list)
    while waiting or batch.handles:
        while waiting and batch.free >= 2 and (chance.random() < 0.5 or not batch.handles):
            number = waiting.pop(0)
            numbers[batch.enter(**requests[number])] = number
        if len(batch.handles) > 1 and cancelled < 2 and chance.random() < 0.3:
            batch.cancel(chance.choice(batch.handles))
            cancelled += 1
        for update in batch.step():
            number = numbers[update.handle]
            streamed[number] += update.tokens[0]
            logged[number] += update.logprobs[0]
            if update.output is not None:
                outputs[number] = update.output
        assert batch.handles == sorted(batch.handles)
    assert all(
        len(output.tokens) > 1 or output.tokens[0] == streamed[number] for number, output in outputs.items()
    )
    assert all(getattr(each, "logprobs", [[]])[0] == logged[number] for number, each in outputs.items())
    return outputs


RANDOM = {
    **{("scenes-llava", name): {} for name in ("none", "copy", "draft_model", "eagle", "flash", "medusa")},
    ("scenes-hybrid", "dflash"): {},
}


@pytest.mark.parametrize("source, name", RANDOM, ids=[f"{name} on {source}" for source, name in RANDOM])
@pytest.mark.every(4)
def test_text_of_requests_that_enter_and_leave_at_random(text: Any, source: str, name: str) -> None:
    pipe = text if source == "scenes-llava" else MMSpecPipeline.from_pretrained(ASSETS / source)
    pipe.set_accelerator(name, **({"drafter": medusa_for(pipe.target)} if name == "medusa" else {}))
    requests = [{"prompt": prompt, **settings} for prompt, settings in text_requests()]
    for number in range(6):
        own = {"max_new_tokens": 1 + 5 * (number % 4), "temperature": 0.8 * (number % 2), "seed": number}
        own |= {"logprobs": 1} if number % 3 else {}
        requests.append({"prompt": PROMPTS[number % 4], **own})
    with pipe.running_batch(rows=6) as batch:
        outputs = enter_and_leave(batch, requests, seed=len(name))
    assert len(outputs) >= 8
    for number, output in outputs.items():
        alone = pipe(**requests[number])
        assert output.tokens == alone.tokens and output.text == alone.text
        assert output.finish_reasons == alone.finish_reasons
        assert [each.token for each in output.logprobs[0]] == [each.token for each in alone.logprobs[0]]
        assert output.stats.nfe == alone.stats.nfe
        assert output.stats.acceptance_length == alone.stats.acceptance_length


def follow_scripts(pipe: MMSpecPipeline, pace: Sequence[int] = PACE) -> Scripts:
    """Let the drafts of a pipeline have sizes by a list, for every number of rows."""
    scripts, accelerator = Scripts(pace), pipe.accelerator
    for rows in range(1, 9):
        scripts.setdefault(rows, PacedDrafter(accelerator.drafter, {}).new_policy(rows))
    accelerator.costs.update(scripts)
    return scripts


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["copy", "eagle", "draft_model"])
def test_text_of_requests_whose_drafts_change_in_size_and_rest(text: Any, name: str) -> None:
    requests = [{"prompt": prompt, **settings} for prompt, settings in text_requests() * 2]
    text.set_accelerator("none")
    alone = [text(**request) for request in requests]
    text.set_accelerator(name, length="cost")
    follow_scripts(text)
    with text.running_batch(rows=6) as batch:
        outputs = enter_and_leave(batch, requests, seed=1)
        drafted, rounds = sum(batch.stats.drafted), sum(batch.stats.rounds)
    assert len(outputs) >= 6
    assert all(output.tokens == alone[number].tokens for number, output in outputs.items())
    assert 0 < drafted < 3 * rounds, "there were drafts, and plain rounds"


def test_a_head_reads_the_prompts_of_rows_that_joined_at_their_first_draft(
    text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [{"prompt": prompt, **settings} for prompt, settings in text_requests()]
    text.set_accelerator("none")
    alone = [text(**request).tokens for request in requests]
    text.set_accelerator("eagle", length="cost")
    real, read = FeatureSession._read_prompts, list[int]()

    def counted(session: Any, prompts: Any) -> Any:
        read.append(len(prompts.requests))
        return real(session, prompts)

    monkeypatch.setattr(FeatureSession, "_read_prompts", counted)
    for pace, expected in (((0,), []), ((0, 3, 0), [3])):
        follow_scripts(text, pace)
        with text.running_batch(rows=4) as batch:
            for request in requests[:3]:
                batch.enter(**request)
            batch.step()
            batch.enter(**requests[3])
            batch.cancel(0)
            outputs = run_more(batch)
        assert [outputs[handle].tokens for handle in (1, 2, 3)] == alone[1:]
        assert read == expected


def test_drafts_are_whole_while_the_output_of_a_row_depends_on_their_size(
    text: Any, chosen_by_cost: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Speculative sampling uses other random numbers for other draft sizes, and greedy rows do not."""
    monkeypatch.setattr(Accelerator, "is_paced", chosen_by_cost)
    requests = [
        {"prompt": PROMPTS[0], "max_new_tokens": 24},
        {"prompt": PROMPTS[1], "max_new_tokens": 8, "temperature": 1.3, "seed": 1},
        {"prompt": PROMPTS[2], "max_new_tokens": 20},
    ]
    options = {"sampling": "sampled", "num_draft_tokens": 4}
    text.set_accelerator("draft_model", length="fixed", **options)
    alone = [text(**request).tokens for request in requests]
    text.set_accelerator("draft_model", **options)
    scripts = follow_scripts(text)
    with text.running_batch(rows=3) as batch:
        for request in requests:
            batch.enter(**request)
        sizes: list[tuple[int, float]] = []
        outputs: dict[int, Any] = {}
        while batch.handles:
            running, before = batch.handles, sum(batch.stats.drafted)
            outputs |= {each.handle: each.output for each in batch.step() if each.output is not None}
            sizes.append((len(running), (sum(batch.stats.drafted) - before) / len(running)))
    assert [outputs[handle].tokens for handle in range(3)] == alone
    assert {drafted for running, drafted in sizes if running == 3} == {4.0}
    assert len({drafted for running, drafted in sizes if running < 3}) > 1
    chosen = {rows: len(script.rounds) for rows, script in scripts.items() if isinstance(script, Script)}
    assert chosen[2] and not chosen[3]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("name", "options"), [("none", {}), ("sjd", {"coupling": "exact"}), ("lantern", {"window": 8})]
)
def test_guided_images_that_enter_and_leave_at_random(
    drawing: ImagePipeline, name: str, options: dict[str, Any]
) -> None:
    drawing.set_accelerator(name, **options)
    requests = [
        {"prompt": None, "class_labels": 1 + seed % 4, "seed": seed, "guidance_scale": 2.0 + seed % 3}
        | {"num_images_per_prompt": 1 + seed % 2}
        for seed in range(7)
    ]
    with drawing.running_batch(rows=5) as batch:
        outputs = enter_and_leave(batch, requests, seed=1)
    assert len(outputs) >= 5
    for number, output in outputs.items():
        own = {key: value for key, value in requests[number].items() if key != "prompt"}
        alone = drawing(**own)
        assert output.tokens == alone.tokens
        assert [each.tobytes() for each in output.images] == [each.tobytes() for each in alone.images]


@pytest.mark.parametrize("name", ["draft_model", "eagle"])  # each has a cache of its own beside the target's
def test_a_request_for_which_memory_runs_out_leaves_the_others_alone(
    text: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text.set_accelerator(name)
    requests = [{"prompt": prompt, "max_new_tokens": 20, "seed": 1} for prompt in PROMPTS[:3]]
    requests[2]["max_new_tokens"] = 200  # needs more room for every row
    alone = [text(**arguments).tokens for arguments in requests]
    real, left, failed = cache_module.resized, 0, 0

    def allocate(*arguments: Any) -> torch.Tensor:
        nonlocal left
        left -= 1
        if left == 0:
            raise torch.OutOfMemoryError("planted")
        return real(*arguments)

    monkeypatch.setattr(cache_module, "resized", allocate)
    with text.running_batch(rows=4) as batch:
        for arguments in requests[:2]:
            batch.enter(**arguments)
        while len(batch.handles) == 2:
            left = failed + 1
            try:
                batch.enter(**requests[2])
            except torch.OutOfMemoryError:
                failed += 1
                assert batch.handles == [0, 1] and batch.free == 2
        left = 0
        outputs = run_more(batch)
    assert failed > 4
    assert [output.tokens for _, output in sorted(outputs.items())] == alone


def test_windows_of_rows_that_join_may_differ_in_width(drawing: ImagePipeline) -> None:
    """Rows share the nodes of a forward pass, so that a new request has a wider window than running rows."""
    requests = [{"class_labels": label, "seed": label} for label in range(4)]
    drawing.set_accelerator("none")
    plain = [drawing(**arguments).tokens for arguments in requests]
    drawing.set_accelerator("sjd", coupling="exact")
    assert all(drawing(**each).tokens == tokens for each, tokens in zip(requests, plain, strict=True))
    with drawing.running_batch(rows=4) as batch:
        for arguments in requests[:3]:
            batch.enter(None, **arguments)
        batch.step()
        batch.cancel(1)  # those that stay have narrow windows, and room for wider ones
        batch.cancel(2)
        batch.enter(None, **requests[3])
        updates: dict[int, Any] = {}
        while batch.handles:
            updates |= {each.handle: each for each in batch.step() if each.output is not None}
        assert batch.stats.draft_faults == 0
    assert [updates[handle].output.tokens for handle in (0, 3)] == [plain[0], plain[3]]


@pytest.fixture
def forwards(text: VisionLanguagePipeline) -> Iterator[list[int]]:
    """Numbers of rows of the model's forwards."""
    seen: list[int] = []
    hook = text.model.get_decoder().register_forward_hook(
        lambda module, args, output: seen.append(len(output.last_hidden_state))
    )
    yield seen
    hook.remove()


def test_a_cancelled_request_is_not_decoded_any_more(
    text: VisionLanguagePipeline, forwards: list[int]
) -> None:
    text.set_accelerator("copy")
    requests = text_requests()
    alone = text(requests[0][0], **requests[0][1])
    with text.running_batch(rows=2) as batch:
        kept, cancelled = (batch.enter(prompt, **arguments) for prompt, arguments in requests[::2])
        assert batch.free == 0
        batch.step()
        assert forwards[-1] == 2
        batch.cancel(cancelled)
        assert batch.free == 1 and batch.handles == [kept]
        outputs = run_more(batch)
        assert set(forwards[-3:]) == {1}
        count = len(forwards)
        assert batch.step() == [] and len(forwards) == count
        with pytest.raises(InputError, match="handle"):
            batch.cancel(cancelled)
    assert outputs[kept].tokens == alone.tokens
    assert batch.stats.new_tokens[0] >= len(alone.tokens[0])


def run_more(batch: Any) -> dict[int, Any]:
    finished = {}
    while batch.handles:
        finished |= {each.handle: each.output for each in batch.step() if each.output is not None}
    return finished


def test_a_refused_request_leaves_the_others_alone(text: VisionLanguagePipeline) -> None:
    text.set_accelerator("draft_model")
    requests = text_requests()
    alone = text(requests[0][0], **requests[0][1])
    with text.running_batch(rows=1) as batch:
        batch.enter(requests[0][0], **requests[0][1])
        batch.step()
        with pytest.raises(InputError, match="temperature"):
            batch.enter("What?", temperature=-1.0)
        with pytest.raises(InputError, match="streamer"):
            batch.enter("What?", streamer=object())
        with pytest.raises(InputError, match="^rows must be at most 1, .*got 2"):
            batch.enter(["What?", "Who?"])
        with pytest.raises(NoRoomError, match="0 rows are free, 1 are needed"):
            batch.enter("What?")
        with pytest.raises(PipelineBusyError):
            text("What?")
        outputs = run_more(batch)
    assert outputs[0].tokens == alone.tokens
    assert text("What?", max_new_tokens=2).tokens  # it is free again


def test_an_error_of_one_request_ends_it_alone(text: VisionLanguagePipeline) -> None:
    text.set_accelerator("none")
    (first, own), (second, others) = text_requests()[:2]
    alone = text(first, **own)

    def break_down(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * float("nan") if ids.shape[1] > broken_from else scores

    with text.running_batch(rows=2) as batch:
        batch.enter(first, **own)
        broken_from = len(text._prepare_request(second, {**others})[0].requests[0].prompt_tokens) + 3
        batch.enter(second, **others, logits_processor=[break_down])
        updates: list[Any] = []
        while batch.handles:
            updates += [each for each in batch.step() if each.output is not None]
    broken, whole = updates
    assert isinstance(broken.error, NumericalError) and broken.output.finish_reasons == ["error"]
    assert len(broken.output.tokens[0]) == 4
    assert whole.error is None and whole.output.tokens == alone.tokens


def test_rows_that_stay_together_are_refused(text: VisionLanguagePipeline, drawing: ImagePipeline) -> None:
    drawing.set_accelerator("zipar")
    with pytest.raises(InputError, match="stay together.*zipar"):
        drawing.running_batch()
    drawing.set_accelerator("sjd")
    with pytest.raises(InputError, match="^rows must be an integer from 1 to 1024; got 0"):
        drawing.running_batch(0)
