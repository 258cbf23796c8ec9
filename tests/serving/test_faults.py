"""Faults under load: the other requests get the answers that they get alone, and nothing is left behind."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch

from tests.serving.conftest import PATIENCE, load, post, running, until

PROMPT = "write a long description of the picture."


def body_of(seed: int, **more: object) -> dict:
    message = {"role": "user", "content": PROMPT}
    return {"messages": [message], "seed": seed, "temperature": 1.5, "max_tokens": 12, **more}


def ask(server, seed: int) -> str:
    """The answer's text, or the status of the error."""
    status, _, answer = post(server, body_of(seed))
    return answer["choices"][0]["message"]["content"] if status == 200 else str(status)


def together(server, seeds, ask=ask) -> list[str]:
    with ThreadPoolExecutor(len(seeds)) as threads:
        return list(threads.map(lambda seed: ask(server, seed), seeds))


def is_empty(server) -> bool:
    """Whether no row is left in the batch and in the queue."""
    return all(engine.running == len(engine.waiting) == 0 for engine in server.engines.values())


def value_of(server, name: str) -> float:
    return server.metrics.registry.get_sample_value(name, {"model_name": "scenes-llava"})


def hung_up(server, seed: int, events: int) -> str:
    """Read so many events of a stream of an answer without an end, and hang up."""
    host, port = server.url.removeprefix("http://").split(":")
    body = {**body_of(seed, stream=True, ignore_eos=True), "max_tokens": 900}
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as client:
        client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        read = b""
        while read.count(b"data: ") < events and (part := client.recv(4096)):
            read += part
    return ""


def test_clients_that_hang_up_change_no_other_answer():
    with running("scenes-llava", rows=4) as server:
        alone = [ask(server, seed) for seed in range(8)]

        def mixed(server, seed):
            return hung_up(server, seed, 1 + seed % 5) if seed >= 8 else ask(server, seed)

        answers = together(server, range(16), mixed)
        until(lambda: is_empty(server))
        assert answers[:8] == alone
        assert value_of(server, "mmspec:rows_cancelled_total") == 8
        assert [ask(server, seed) for seed in range(8)] == alone


@pytest.mark.every(3)
@pytest.mark.parametrize("part", ["score", "commit", "prefill"])
def test_a_failure_in_any_part_of_a_round_loses_no_request(monkeypatch, part):
    """Each request gets the answer that it gets alone, or an error; afterwards all get their answers."""
    pipe = load("scenes-llava")
    with running(pipelines={"scenes-llava": pipe}, rows=4) as server:
        alone = [ask(server, seed) for seed in range(12)]
        with monkeypatch.context() as broken:
            own, count = getattr(pipe.target, part), itertools.count()

            def failing(*arguments, **keywords):
                if next(count) % 7 == 5:
                    raise RuntimeError("planted")
                return own(*arguments, **keywords)

            broken.setattr(pipe.target, part, failing)
            answers = together(server, range(12))
        assert all(answer in ("500", one) for answer, one in zip(answers, alone, strict=True))
        assert 0 < answers.count("500") == value_of(server, "mmspec:rows_failed_total")
        until(lambda: is_empty(server))
        assert together(server, range(12)) == alone


@pytest.mark.parametrize("part", ["score", "prefill"])
def test_a_worker_that_dies_answers_everyone_and_is_reported(monkeypatch, part):
    """SystemExit ends the worker, as would anything that is not an ordinary error of a round or of a row."""
    pipe = load("scenes-llava")
    with running(pipelines={"scenes-llava": pipe}, rows=2) as server:
        own, count = getattr(pipe.target, part), itertools.count()

        def dying(*arguments, **keywords):
            if next(count) == 3:
                raise SystemExit
            return own(*arguments, **keywords)

        monkeypatch.setattr(pipe.target, part, dying)
        answers = together(server, range(8))
        assert answers.count("503") >= 5  # those in the batch and those in the queue
        assert post(server, b"", "/health", "GET")[0] == 503
        assert ask(server, 0) == "503"
        assert is_empty(server)
        monkeypatch.undo()
        with pipe._busy():
            pass  # the pipeline is free again


@pytest.mark.every(2)
@pytest.mark.parametrize("chunk", [None, 8])
def test_rows_without_memory_end_alone_within_their_streams(monkeypatch, chunk):
    """A row that runs out of memory in its prefill gets a status; the others' streams continue, unchanged."""
    pipe = load("scenes-llava")
    if chunk is not None:
        pipe.enable_chunked_prefill(chunk)
    with running(pipelines={"scenes-llava": pipe}, rows=4) as server:

        def stream(server, seed: int) -> str:
            try:
                chunks = list(
                    server.client.chat.completions.create(model="scenes-llava", **body_of(seed), stream=True)
                )
            except openai.APIStatusError as error:
                return str(error.status_code)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

        alone = [stream(server, seed) for seed in range(8)]
        own, count = pipe.target._read_chunk, itertools.count()

        def allocate(*arguments, **keywords):
            if next(count) in (2, 6):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return own(*arguments, **keywords)

        monkeypatch.setattr(pipe.target, "_read_chunk", allocate)
        answers = together(server, range(8), stream)
        assert answers.count("503") == 2 and next(count) >= (8 if chunk is None else 12)
        assert all(answer in ("503", one) for answer, one in zip(answers, alone, strict=True))


def test_jumps_of_the_clock_neither_end_nor_extend_a_request(monkeypatch):
    """Wall-clock time jumps a day ahead and back; timeouts and histograms count on."""
    with running("scenes-llava", run_seconds=30, wait_seconds=30) as server:
        alone = [ask(server, seed) for seed in range(6)]
        now, jumps = time.time, itertools.cycle([86400.0, -86400.0])
        monkeypatch.setattr(time, "time", lambda: now() + next(jumps))
        assert together(server, range(6)) == alone
        spent = value_of(server, "vllm:e2e_request_latency_seconds_sum")
        assert 0 < spent < 12 * PATIENCE


def test_200_connections_at_once_are_all_answered():
    """More than fit: each one gets its own answer or a 429 with Retry-After, and threads do not pile up."""
    with running("scenes-llava", rows=8, max_waiting=64) as server:
        alone = {seed: ask(server, seed) for seed in range(10)}
        threads = threading.active_count()
        barrier = threading.Barrier(200)

        def ask_at_once(server, number: int) -> str:
            barrier.wait(PATIENCE)
            status, headers, answer = post(server, body_of(number % 10))
            if status == 429:
                assert headers["retry-after"] == "1"
                return "429"
            assert status == 200
            assert answer["choices"][0]["message"]["content"] == alone[number % 10]
            return "200"

        answers = together(server, range(200), ask_at_once)
        assert len(answers) == 200 and answers.count("200") >= 64
        until(lambda: is_empty(server))
        assert threading.active_count() <= threads + 40  # the pool for images of the event loop
        assert ask(server, 3) == alone[3]


def test_200_idle_connections_do_not_keep_others_waiting():
    """Connections that never finish their request get 408, while others are answered."""
    with running("scenes-llava", idle_seconds=2) as server:
        host, port = server.url.removeprefix("http://").split(":")
        idle = [socket.create_connection((host, int(port)), timeout=PATIENCE) for _ in range(200)]
        for client in idle:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert not ask(server, 0).isdigit()
        statuses = {client.recv(12) for client in idle}
        for client in idle:
            client.close()
        assert statuses == {b"HTTP/1.1 408"}
