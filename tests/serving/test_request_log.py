"""The log: one line a request with its id and counts, without prompts; ids in lines of the worker."""

import json
import logging
import re
import socket
import sys
from contextlib import contextmanager

import pytest

from mmspec.serving.request_log import LogFormatter, fields_of, request_id
from tests.serving.conftest import load, post, running, until

SECRET = "zebra-crossing"
BODY = {"messages": [{"role": "user", "content": f"Describe the {SECRET}."}], "max_tokens": 20}


@contextmanager
def logged(as_json=True):
    """The lines of the server's log: parsed JSON, or text."""
    lines = []

    class Lines(logging.Handler):
        def emit(self, record):
            line = self.format(record)
            lines.append(json.loads(line) if as_json else line)

    handler, logger = Lines(), logging.getLogger("mmspec.serving")
    handler.setFormatter(LogFormatter(as_json=as_json))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def about_requests(lines) -> list[dict]:
    return [line for line in lines if line["message"] == "request"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_line_with_the_counts_of_its_answer(server, stream):
    body = {**BODY, "n": 2, "stream": stream, "stream_options": {"include_usage": True}}
    if not stream:
        del body["stream_options"]
    with logged() as lines:
        status, headers, answer = post(server, body, **{"X-Request-ID": "abc-1"})
        post(server, b"", "/health", "GET")
        until(lambda: len(lines) == 2)
    chat, health = about_requests(lines)
    assert status == 200 and headers["x-request-id"] == chat["id"] == "abc-1"
    assert (chat["method"], chat["route"], chat["model"]) == ("POST", "/v1/chat/completions", "scenes-llava")
    assert (chat["status"], chat["bytes"]) == (200, len(json.dumps(body)))
    assert 0 < chat["time_to_first_token"] < chat["seconds"]
    assert 1 <= chat["tokens_per_forward_pass"] < 20
    if not stream:
        usage = answer["usage"]
        assert chat["prompt_tokens"] == usage["prompt_tokens"]
        assert chat["new_tokens"] == usage["completion_tokens"]
    assert chat["new_tokens"] > 0
    assert set(health) == {
        "time", "level", "logger", "message", "id", "method", "route", "status", "bytes", "seconds"
    }  # fmt: skip
    assert SECRET not in json.dumps(lines)


def test_refused_and_unfinished_requests_are_lines_too(server):
    with logged() as lines:
        post(server, {**BODY, "temperature": SECRET, "model": SECRET})
        post(server, b"", "/v1/a%0a2026%20request%20id=x", "GET")
        post(server, b"", "/v1/" + "a" * 3000, "GET")
        host, port = server.url.removeprefix("http://").split(":")
        data = json.dumps({**BODY, "max_tokens": 900, "ignore_eos": True, "stream": True}).encode()
        with socket.create_connection((host, int(port))) as client:
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            read = b""
            while read.count(b"data: ") < 4:
                read += client.recv(4096)
        until(lambda: len(lines) == 4)
    refused, unknown, long, gone = about_requests(lines)
    assert refused["status"] == 400 and "model" not in refused
    assert unknown["route"] == "/v1/a%0A2026%20request%20id%3Dx"
    assert len(long["route"]) == 200
    assert (gone["status"], gone["model"]) == (499, "scenes-llava")
    assert gone["prompt_tokens"] > 0 and 0 < gone["new_tokens"] < 900
    assert "tokens_per_forward_pass" not in gone  # which is known of finished rows
    assert SECRET not in json.dumps(lines)


def test_errors_of_the_worker_name_their_requests(monkeypatch):
    pipe = load("scenes-llava")
    with running(pipelines={"scenes-llava": pipe}) as server, logged() as lines:
        for name in ("prefill", "score"):
            with monkeypatch.context() as broken:
                broken.setattr(pipe.target, name, lambda *_a, **_k: 1 / 0)
                status, headers, answer = post(server, BODY, **{"X-Request-ID": f"id-of-{name}"})
            assert status == 500 and "request id" in answer["error"]["message"]
        until(lambda: len(about_requests(lines)) == 2)
    failures = [line for line in lines if "exception" in line]
    assert len(failures) == 2
    for name, line in zip(("prefill", "score"), failures, strict=True):
        assert f"id-of-{name}" in (line.get("id"), *line.get("ids", ()))
        assert "ZeroDivisionError" in line["exception"]
        assert SECRET not in line["exception"]


def test_text_lines_have_the_same_fields_and_break_in_no_value(server):
    with logged(as_json=False) as lines:
        post(server, BODY, **{"X-Request-ID": "abc-2"})
        until(lambda: len(lines) == 1)
    assert re.fullmatch(
        r"[\d-]+ [\d:,]+ request id=abc-2 method=POST route=/v1/chat/completions model=scenes-llava "
        r"status=200 "
        r"bytes=\d+ seconds=[\d.]+ prompt_tokens=\d+ new_tokens=\d+ time_to_first_token=[\d.]+ "
        r"tokens_per_forward_pass=[\d.]+",
        lines[0],
    )
    record = logging.makeLogRecord({"msg": "x", **fields_of(model="a b\nc")})
    assert LogFormatter(as_json=False).format(record).endswith('x model="a b\\nc"')


def test_lines_within_a_request_have_its_id_and_one_line_of_json_each():
    token = request_id.set("abc-3")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info(), "levelname": "ERROR"})
    finally:
        line = LogFormatter(as_json=True).format(record)
        request_id.reset(token)
    assert "\n" not in line
    assert (json.loads(line)["id"], json.loads(line)["level"]) == ("abc-3", "error")
    assert "two\nlines" in json.loads(line)["exception"]
    assert "id" not in json.loads(LogFormatter(as_json=True).format(logging.makeLogRecord({"msg": "x"})))
