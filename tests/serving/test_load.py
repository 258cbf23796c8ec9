"""Many requests, clients that disconnect, and workers that fail."""

import asyncio
import gc
import itertools
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import openai
import psutil
import pytest
import torch

from mmspec.errors import NoRoomError
from mmspec.pipelines import ImagePipeline
from mmspec.serving.engine import Engine, Ticket, WaitingRows
from mmspec.serving.errors import RequestError
from mmspec.serving.metrics import Metrics
from mmspec.serving.rows import Event, TextRows
from tests.serving.conftest import load, running, until
from tests.tiny_models.llamagen import tiny_llamagen, tiny_vq

PROMPT = "Describe the picture."


def ask(server, seed: int, **settings: object) -> str:
    """The answer's text, or the status of the refusal."""
    try:
        answer = server.chat(PROMPT, seed=seed, temperature=1.5, max_tokens=10, **settings)
    except openai.APIStatusError as error:
        return str(error.status_code)
    return answer.choices[0].message.content


@contextmanager
def counted_forwards(pipe):
    """A list that grows by one with each forward of the model."""
    forwards = []
    score = pipe.target.score

    def counted(*arguments, **keywords):
        forwards.append(time.monotonic())
        return score(*arguments, **keywords)

    pipe.target.score = counted
    yield forwards
    del pipe.target.score


def test_more_choices_than_places_lose_no_text():
    with running("scenes-llava", rows=2) as server:
        three = server.chat(PROMPT, n=3, seed=0, temperature=1.5, max_tokens=10)
        alone = [ask(server, seed) for seed in range(3)]
    assert [choice.message.content for choice in three.choices] == alone


def test_what_does_not_fit_is_told_when_to_come_back():
    with running("scenes-llava", rows=2, max_waiting=2) as server:
        alone = [ask(server, seed) for seed in range(8)]
        with ThreadPoolExecutor(8) as threads:
            together = list(threads.map(lambda seed: ask(server, seed), range(8)))
        with pytest.raises(openai.RateLimitError, match="max_waiting=2") as refused:
            server.chat(PROMPT, n=3)
    assert refused.value.response.headers["retry-after"] == "1"
    assert 0 < together.count("429") < 8
    assert all(answer in ("429", alone[seed]) for seed, answer in enumerate(together))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_stops_the_model_within_a_round(stream):
    body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 2, "seed": 0, "stream": stream}
    pipe = load("scenes-llava")
    pipe.set_accelerator("none")  # a forward a token
    pipe.model.generation_config.eos_token_id = None  # and none of them the last
    with counted_forwards(pipe) as forwards, running(pipelines={"scenes-llava": pipe}) as server:
        host, port = server.url.removeprefix("http://").split(":")
        data = json.dumps({**body, "max_tokens": 900}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client = socket.create_connection((host, int(port)))
        client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        until(lambda: len(forwards) > 20)
        engine = server.engines["scenes-llava"]
        cancel, seen = engine.waiting.cancel, []
        engine.waiting.cancel = lambda ticket: (seen.append(len(forwards)), cancel(ticket))
        client.close()
        until(lambda: seen and not engine._running)
        time.sleep(0.2)
        assert len(forwards) - seen[0] <= 1
        assert len(forwards) < 800
        assert ask(server, 1)


def test_what_takes_too_long_is_given_up():
    with running("scenes-llava", run_seconds=0.02) as server:
        with pytest.raises(openai.InternalServerError, match="run_seconds=0.02") as late:
            server.chat(PROMPT, temperature=2, max_tokens=300, n=4)
        assert late.value.status_code == 504
        stream = server.chat(PROMPT, temperature=2, max_tokens=300, n=4, stream=True)
        with pytest.raises(openai.APIError, match="run_seconds"):
            list(stream)
        until(lambda: not server.engines["scenes-llava"]._running)


def test_a_round_that_fails_ends_its_rows_and_the_next_is_answered(monkeypatch):
    pipe = load("scenes-llava")
    with running(pipelines={"scenes-llava": pipe}) as server:
        with monkeypatch.context() as broken:
            broken.setattr(pipe.target, "prefill", lambda *_a, **_k: 1 / 0)
            with pytest.raises(openai.InternalServerError) as failed:
                server.chat(PROMPT)
        assert "division" not in str(failed.value)
        assert server.chat(PROMPT, max_tokens=2).choices
        assert counted_as_failed(server) == 1


def counted_as_failed(server) -> float:
    lines = server.client._client.get(f"{server.url}/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("mmspec:rows_failed_total")).split()[-1])


def test_a_request_that_is_refused_is_no_row_that_failed():
    with running("scenes-llava") as server:
        for wrong in ({"bad_words": [" "]}, {"stop_token_ids": [10**6]}):
            with pytest.raises(openai.BadRequestError):
                server.chat(PROMPT, extra_body=wrong)
        assert counted_as_failed(server) == 0


def test_a_request_for_which_memory_runs_out_ends_alone(monkeypatch):
    pipe = load("scenes-llava")
    with running(pipelines={"scenes-llava": pipe}) as server:
        alone = [ask(server, seed) for seed in range(4)]
        prefill, count = pipe.target.prefill, itertools.count()

        def allocate(*arguments, **keywords):
            if next(count) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return prefill(*arguments, **keywords)

        monkeypatch.setattr(pipe.target, "prefill", allocate)
        with ThreadPoolExecutor(4) as threads:
            together = list(threads.map(lambda seed: ask(server, seed), range(4)))
        assert together.count("503") == 1
        assert all(answer in ("503", alone[seed]) for seed, answer in enumerate(together))
        assert counted_as_failed(server) == 1


def test_64_requests_at_once_are_answered_with_the_default_limits():
    with running("scenes-llava") as server, ThreadPoolExecutor(64) as threads:
        answers = list(threads.map(lambda seed: ask(server, seed), range(64)))
    assert not [answer for answer in answers if answer.isdigit()]


def test_a_request_waits_while_the_queue_moves():
    async def wait(moves: int) -> float:
        queue = WaitingRows(8)
        ticket, began = Ticket([""], [{}], queue), time.monotonic()

        async def move() -> None:
            for _ in range(moves):
                await asyncio.sleep(0.1)
                queue.last_move = time.monotonic()

        moving = asyncio.create_task(move())
        with pytest.raises(RequestError, match="no request entered the batch within wait_seconds=0.5"):
            await ticket.entered(0.5)
        await moving
        return time.monotonic() - began

    assert asyncio.run(wait(0)) >= 0.5
    assert asyncio.run(wait(10)) >= 1.5


def test_text_of_a_row_that_entered_first_keeps_its_order():
    """All events have come before the request reads the first one."""

    async def read() -> list[tuple[int, int]]:
        ticket = Ticket(["", ""], [{}, {}], WaitingRows(8))
        entered, early, later = Event(prompt_tokens=3), Event(tokens=1), Event(tokens=2)
        end = Event(finish_reason="stop", output=SimpleNamespace(stats=None))
        for index, event in [(0, entered), (0, early), (1, entered), (0, later), (1, later)]:
            ticket.events.put_nowait((index, event))
        for index in (0, 1):
            ticket.events.put_nowait((index, end))
        await ticket.entered(1.0)
        return [(index, event.tokens) async for index, event in ticket.updates(1.0)]

    assert asyncio.run(read()) == [(0, 1), (0, 2), (1, 2), (0, 0), (1, 0)]


def test_requests_enter_in_the_order_in_which_they_came(monkeypatch):
    """Rows with and without guidance are not decoded together: the second waits, and the third behind it."""
    pipe = ImagePipeline(tiny_llamagen("class"), vq=tiny_vq())
    pipe.set_progress_bar_config(disable=True)
    scales, entered, refused = [1.0, 3.0, 1.0, 1.0, 3.0, 1.0], [], set()
    enter = TextRows.enter

    def watched(batch, prompt, **settings):
        try:
            handle, event = enter(batch, prompt, **settings)
        except NoRoomError:
            refused.add(settings["seed"])
            raise
        entered.append(settings["seed"])
        return handle, event

    async def ask_all():
        tickets = []
        for seed, scale in enumerate(scales):
            settings = {"class_labels": 1, "seed": seed, "guidance_scale": scale}
            tickets.append(engine.submit([None], [settings]))
        for ticket in tickets:
            await ticket.entered(60)
            assert [event.finish_reason async for _, event in ticket.updates(60)][-1] is not None

    monkeypatch.setattr(TextRows, "enter", watched)
    engine = Engine("drawing", pipe, 4, 8, Metrics().of_model("drawing"))
    engine.start()
    asyncio.run(ask_all())
    engine.close()
    assert entered == list(range(len(scales)))
    assert refused == {1, 2, 4, 5}


def test_a_row_that_comes_to_the_front_of_the_queue_is_prepared():
    queue, rows = WaitingRows(4, ahead=1), [SimpleNamespace(prepared=None) for _ in range(2)]
    thread = threading.Thread(target=queue.prepare, args=[id])
    thread.start()
    queue.add(rows)
    queue.wait()
    time.sleep(0.05)  # the thread waits
    assert rows[1].prepared is None and queue.take() is rows[0]
    until(lambda: rows[1].prepared is not None)
    assert [row.prepared.result() for row in rows] == [id(row) for row in rows]
    queue.close()
    thread.join()


def test_health_tells_of_a_worker_that_has_died(server):
    get = server.client._client.get
    assert get(f"{server.url}/health").json()["status"] == "ok"
    pipe = load("scenes-llava")
    with running(pipelines={"scenes-llava": pipe}) as other:
        other.engines["scenes-llava"].close()
        answer = get(f"{other.url}/health")
        assert answer.status_code == 503
        assert "scenes-llava" in answer.json()["error"]["message"]
        with pytest.raises(openai.InternalServerError) as dead:
            other.chat(PROMPT)
        assert dead.value.status_code == 503


def test_metrics_count_what_the_answers_say(scene_url):
    from prometheus_client.parser import text_string_to_metric_families

    parts = [{"type": "image_url", "image_url": {"url": scene_url}}, {"type": "text", "text": PROMPT}]
    what = {"model": "scenes-llava", "messages": [{"role": "user", "content": parts}], "max_tokens": 40}
    with running("scenes-llava") as server:
        usage = [server.client.chat.completions.create(**what).usage for _ in range(3)]
        text = server.client._client.get(f"{server.url}/metrics").text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    details = [one.completion_tokens_details for one in usage]
    accepted = sum(one.accepted_prediction_tokens for one in details)
    assert accepted
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == accepted
    assert found["vllm:spec_decode_num_draft_tokens_total"] == accepted + sum(
        one.rejected_prediction_tokens for one in details
    )
    assert found["vllm:spec_decode_num_drafts_total"] > 0
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total"] >= accepted
    assert found["vllm:generation_tokens_total"] == sum(one.completion_tokens for one in usage)
    assert found["vllm:request_success_total"] == 3
    assert found["vllm:num_requests_running"] == 0


@pytest.mark.slow
def test_memory_stays_as_it_is_over_2000_requests():
    process = psutil.Process(os.getpid())
    with running("scenes-llava", max_waiting=100) as server, ThreadPoolExecutor(8) as threads:
        sizes = []
        for block in range(10):
            seeds = range(200 * block, 200 * (block + 1))
            assert all(threads.map(lambda seed: ask(server, seed), seeds))
            gc.collect()
            sizes.append(process.memory_info().rss)
        assert not server.engines["scenes-llava"]._running
    assert sizes[-1] <= 1.05 * sizes[0], sizes
    assert threading.active_count() < 40
