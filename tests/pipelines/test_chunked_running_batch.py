"""Prompts that are read in chunks between the rounds of a running batch: outputs of requests alone."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from mmspec.core.cache import RaggedCache
from mmspec.pipelines import VisionLanguagePipeline
from mmspec.targets import CausalTarget, causal
from tests.methods.heads_checks import medusa_for
from tests.pipelines.test_running_batch import PROMPTS, enter_and_leave, text, text_requests

__all__ = ["text"]  # the fixture

SIZE = 16
LONG = " ".join(PROMPTS * 3)
SHORT = {"prompt": PROMPTS[1], "max_new_tokens": 40, "min_new_tokens": 40}


@pytest.fixture
def chunked(text: VisionLanguagePipeline) -> Any:
    text.set_accelerator("none")
    text.enable_chunked_prefill(SIZE)
    yield text
    text.disable_chunked_prefill()
    text.disable_prefix_cache()


def alone(pipe: VisionLanguagePipeline, request: dict[str, Any]) -> Any:
    """The output of a request whose prompt is read whole."""
    pipe.disable_chunked_prefill()
    output = pipe(**request)
    pipe.enable_chunked_prefill(SIZE)
    return output


def first_of(batch: Any) -> tuple[dict[int, list[int]], dict[int, int], dict[int, Any]]:
    """Run a batch to its end: tokens, the step of the first ones, and the last update of each request."""
    tokens, first, last, step = dict[int, list[int]](), dict[int, int](), dict[int, Any](), 0
    while batch.handles:
        for update in batch.step():
            tokens.setdefault(update.handle, []).extend(update.tokens[0])
            if update.tokens[0]:
                first.setdefault(update.handle, step)
            last[update.handle] = update
        step += 1
    return tokens, first, last


@pytest.mark.parametrize("name", ["none", "copy", "draft_model", "eagle", "flash", "medusa"])
@pytest.mark.every(3)
def test_requests_that_enter_and_leave_at_random(chunked: Any, name: str) -> None:
    chunked.set_accelerator(name, **({"drafter": medusa_for(chunked.target)} if name == "medusa" else {}))
    requests = [{"prompt": f"{LONG} {prompt}", **settings} for prompt, settings in text_requests()]
    for number in range(6):
        own = {"max_new_tokens": 1 + 5 * (number % 4), "temperature": 0.8 * (number % 2), "seed": number}
        requests.append({"prompt": PROMPTS[number % 4] if number % 3 else LONG, **own})
    with chunked.running_batch(rows=6) as batch:
        outputs = enter_and_leave(batch, requests, seed=len(name))
    assert len(outputs) >= 8
    for number, output in outputs.items():
        expected = alone(chunked, requests[number])
        assert output.tokens == expected.tokens and output.text == expected.text
        assert output.finish_reasons == expected.finish_reasons
        assert output.stats.nfe == expected.stats.nfe


def test_other_rows_advance_at_every_chunk(chunked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One round for every chunk of the prompt that enters, and no chunk is longer than allowed."""
    read: list[int] = []
    monkeypatch.setattr(CausalTarget, "_read_chunk", recorded(read, CausalTarget._read_chunk))
    long = {"prompt": LONG, "max_new_tokens": 4}
    with chunked.running_batch(rows=2) as batch:
        running = batch.enter(**SHORT)
        batch.step()
        assert batch.handles == [running]
        read.clear()
        entered = batch.enter(**long)
        chunks, rounds = -(-batch.prompt_tokens(entered) // SIZE), 0
        assert read == [] and chunks == 5 and batch.free == 0
        while True:
            updates = {update.handle: update for update in batch.step()}
            if entered in updates:
                break
            assert len(updates[running].tokens[0]) == 1
            rounds += 1
        assert len(read) == chunks == rounds + 1 and max(read) == SIZE
        tokens, _, _ = first_of(batch)
    assert updates[entered].tokens[0] + tokens.get(entered, []) == alone(chunked, long).tokens[0]


@pytest.mark.parametrize("name", ["none", "copy", "draft_model", "eagle", "flash", "medusa"])
@pytest.mark.every(6)
def test_short_prompts_that_wait_together_share_a_forward_pass(
    chunked: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for text and one for images, of the target and of a head; outputs are those of requests alone."""
    read, own = list[tuple[Any, int]](), RaggedCache.begin_prefill_rows

    def begin(self: Any, rows: Any, *args: Any) -> None:
        read.append((len(self.layers), len(rows)))
        own(self, rows, *args)

    chunked.set_accelerator(name, **({"drafter": medusa_for(chunked.target)} if name == "medusa" else {}))
    chunked.enable_chunked_prefill(2048)
    requests: list[dict[str, Any]] = [{"prompt": prompt, **how} for prompt, how in text_requests()]
    for number, prompt in enumerate(PROMPTS):
        requests.append({"prompt": prompt, "max_new_tokens": 9, "temperature": 0.8 * (number % 2), "seed": 7})
    requests.append({"prompt": PROMPTS[0], "max_new_tokens": 1})
    with chunked.running_batch(rows=10) as batch:
        monkeypatch.setattr(RaggedCache, "begin_prefill_rows", begin)
        handles = [batch.enter(**request) for request in requests]
        _, _, last = first_of(batch)
        monkeypatch.undo()
    layers = len(chunked.model.get_decoder().layers)
    assert sorted(rows for depth, rows in read if depth == layers) == [4, 5]
    if name in ("eagle", "flash"):
        assert sorted(rows for depth, rows in read if depth == 1) == [4, 5]
    for handle, request in zip(handles, requests, strict=True):
        expected, output = alone(chunked, request), last[handle].output
        assert output.tokens == expected.tokens and output.finish_reasons == expected.finish_reasons
        assert output.stats.nfe == expected.stats.nfe


def test_a_request_whose_shared_prefill_fails_fails_alone(
    chunked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait again, and have the outputs of requests alone."""
    own = CausalTarget._read_chunk

    def read_chunk(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if inputs["input_ids"].shape[1] == longest:
            raise torch.OutOfMemoryError("planted")
        return own(self, inputs, *args, **kwargs)

    chunked.enable_chunked_prefill(256)
    requests = [{**SHORT, "prompt": prompt} for prompt in ("a", "a b c d e", "c")]
    with chunked.running_batch(rows=3) as batch:
        handles = [batch.enter(**request) for request in requests]
        longest = batch.prompt_tokens(handles[1])
        monkeypatch.setattr(CausalTarget, "_read_chunk", read_chunk)
        tokens, _, last = first_of(batch)
        assert batch.free == 3
    assert isinstance(last[handles[1]].error, torch.OutOfMemoryError)
    for index in (0, 2):
        assert tokens[handles[index]] == alone(chunked, requests[index]).tokens[0]


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["eagle", "flash", "draft_model"])
def test_a_drafter_reads_long_prompts_in_chunks(
    chunked: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step reads more tokens of a prompt than allowed, except for the part of the head's one layer."""
    read, steps, own = list[int](), list[list[int]](), RaggedCache.begin_prefill

    def begin(self: Any, row: int, length: int, start: int = 0) -> None:
        read.append(length * len(self.layers))
        own(self, row, length, start)

    chunked.set_accelerator(name)
    long, layers = {"prompt": LONG, "max_new_tokens": 12}, len(chunked.model.get_decoder().layers)
    monkeypatch.setattr(RaggedCache, "begin_prefill", begin)
    with chunked.running_batch(rows=2) as batch:
        batch.enter(**SHORT)
        batch.step()
        entered, output = batch.enter(**long), None
        length = batch.prompt_tokens(entered)
        while batch.handles:
            read.clear()
            output = next((one.output for one in batch.step() if one.handle == entered), output)
            steps.append([*read])
    monkeypatch.undo()
    assert max(map(sum, steps)) <= SIZE * layers
    of_drafter = length - 1  # rows of a head
    if name == "draft_model":
        of_drafter = length * len(chunked.accelerator.drafter.model.model.get_decoder().layers)
    assert sum(map(sum, steps)) - length * layers in (of_drafter, of_drafter + 1)
    assert output.tokens == alone(chunked, long).tokens


def recorded(read: list[int], own: Any) -> Any:
    """A forward pass over a chunk that records its number of tokens."""

    def read_chunk(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        read.append(inputs["input_ids"].shape[1])
        return own(self, inputs, *args, **kwargs)

    return read_chunk


def test_first_come_first_served(chunked: Any) -> None:
    """A short prompt after a long one waits for it; two short ones are read before the same round."""
    with chunked.running_batch(rows=4) as batch:
        requests = [{**SHORT, "prompt": prompt} for prompt in (LONG, "a", "b")]
        handles = [batch.enter(**request) for request in requests]
        assert batch.handles == handles and batch.free == 1
        tokens, first, _ = first_of(batch)
    long, *short = (first[handle] for handle in handles)
    assert 0 < long <= short[0] and short[0] == short[1]
    for handle, request in zip(handles, requests, strict=True):
        assert tokens[handle] == alone(chunked, request).tokens[0]


@pytest.mark.parametrize("how", ["cancelled", "closed"])
def test_a_request_that_leaves_while_its_prompt_is_read(
    chunked: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No hooks, rows or caches stay; the other row is that of a call of its own."""
    caches: list[weakref.ref[Any]] = []

    class Recorded(causal.RaggedCache):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            caches.append(weakref.ref(self))

    chunked.set_accelerator("eagle")
    with chunked.running_batch(rows=2) as batch:
        running = batch.enter(**SHORT)
        batch.step()
        monkeypatch.setattr(causal.CausalTarget, "cache_class", Recorded)
        gone = batch.enter(LONG, max_new_tokens=4)
        batch.step()
        batch.step()
        assert len(caches) == 1 and caches[0]() is not None
        if how == "closed":
            batch.close()
        else:
            batch.cancel(gone)
            assert batch.handles == [running] and batch.free == 1
            gc.collect()
            assert caches[0]() is None
            assert running in first_of(batch)[0]
    gc.collect()
    assert caches[0]() is None
    assert not any(
        type(hook.__self__).__name__ == "HiddenStates"
        for module in chunked.model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if hasattr(hook, "__self__")
    )


def test_out_of_memory_in_a_chunk_ends_that_request_alone(
    chunked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = CausalTarget._read_chunk

    def read_chunk(self: Any, inputs: Any, cache: Any, *args: Any, **kwargs: Any) -> Any:
        if cache.plan.start == 2 * SIZE:
            raise torch.OutOfMemoryError("planted")
        return own(self, inputs, cache, *args, **kwargs)

    monkeypatch.setattr(CausalTarget, "_read_chunk", read_chunk)
    with chunked.running_batch(rows=3) as batch:
        requests = [SHORT, {**SHORT, "prompt": LONG}, {**SHORT, "prompt": "a", "temperature": 0.9, "seed": 3}]
        handles = [batch.enter(**request) for request in requests]
        tokens, _, last = first_of(batch)
        assert batch.free == 3
    failed = last[handles[1]]
    assert isinstance(failed.error, torch.OutOfMemoryError) and failed.output is None
    for index in (0, 2):
        assert tokens[handles[index]] == alone(chunked, requests[index]).tokens[0]


def test_out_of_memory_in_a_round_ends_the_request_whose_prompt_is_read(
    chunked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is freed for the rows that run; a request whose prefill has not begun stays."""
    own, planted = CausalTarget.score, [False]

    def score(self: Any, *args: Any) -> Any:
        if planted.pop() if planted else False:
            raise torch.OutOfMemoryError("planted")
        return own(self, *args)

    monkeypatch.setattr("mmspec.core.loop.runs_by_itself", lambda device: True)  # so that rounds are repeated
    requests = [SHORT, {**SHORT, "prompt": LONG}, {**SHORT, "prompt": "a"}]
    with chunked.running_batch(rows=3) as batch:
        handles = [batch.enter(**requests[0])]
        batch.step()
        handles += [batch.enter(**request) for request in requests[1:]]
        batch.step()
        monkeypatch.setattr(CausalTarget, "score", score)
        planted.append(True)
        (failed,) = [update for update in batch.step() if update.error is not None]
        assert failed.handle == handles[1] and isinstance(failed.error, torch.OutOfMemoryError)
        assert batch.handles == [handles[0], handles[2]]
        _, _, last = first_of(batch)
    for index in (0, 2):
        assert last[handles[index]].output.tokens == alone(chunked, requests[index]).tokens


def test_the_prefix_cache_fills_and_hits(chunked: Any) -> None:
    chunked.enable_prefix_cache()
    requests = [{"prompt": f"{LONG} {prompt}", **settings} for prompt, settings in text_requests()[:1] * 2]
    with chunked.running_batch(rows=2) as batch:
        for request in requests:
            batch.enter(**request)
        _, _, last = first_of(batch)
    outputs = [update.output for _, update in sorted(last.items())]
    assert outputs[0].stats.cached_prompt_tokens == 0
    assert outputs[1].stats.cached_prompt_tokens > 3 * SIZE, "the first prompt is read before the second"
    chunked.disable_prefix_cache()
    assert [each.tokens for each in outputs] == [alone(chunked, each).tokens for each in requests]
