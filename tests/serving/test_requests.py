"""Invalid, too large or forbidden requests get errors in OpenAI's format, and the server continues."""

import base64
import socket

import openai
import pytest

from tests.serving.conftest import PATIENCE, post, running

GOOD = {"messages": [{"role": "user", "content": "Describe the picture."}], "max_tokens": 2}


def with_image(url: object) -> dict:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    return {**GOOD, "messages": [{"role": "user", "content": parts}]}


@pytest.fixture(autouse=True)
def goes_on(server):
    yield
    assert post(server, GOOD)[0] == 200


BODIES = [b"", b"{", b"nothing", b"[]", b"null", b'{"messages": "\xff\xfe"}', b"[" * 10_000]
BODIES += [b'{"messages": NaN}']
NO_IMAGES = ["data:", "data:image/png;base64,!!!", "data:text/html;base64,AAAA", "", 3, "/etc/passwd"]
NO_IMAGES += ["assets/images/scene.png", "file:///etc/passwd", "ftp://a.org/a.png", "http://127.0.0.1/a.png"]


def test_a_body_that_is_no_request(server):
    for body in BODIES:
        status, _, answer = post(server, body)
        assert status == 400
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["type"] == "invalid_request_error"


def test_an_image_that_cannot_be_read_or_is_one_too_many(server, scene_url):
    for url in NO_IMAGES:
        status, _, answer = post(server, with_image(url))
        assert status == 400
        assert answer["error"]["param"].startswith("messages")
    nine = with_image(scene_url)
    nine["messages"][0]["content"] *= 9
    status, _, answer = post(server, nine)
    assert status == 400 and "max_images" in answer["error"]["message"]


def test_an_unknown_model_and_route_and_method(server):
    assert post(server, {**GOOD, "model": "gpt-9"})[0] == 404
    assert post(server, b"{}", "/v1/nothing")[0] == 404
    status, _, answer = post(server, b"{}", "/v1/models")
    assert (status, answer["error"]["type"]) == (405, "invalid_request_error")


def test_a_body_that_is_too_large_is_not_read(server):
    host, port = server.url.removeprefix("http://").split(":")
    for headers in (b"Content-Length: 1000000000\r\n", b"Transfer-Encoding: chunked\r\n"):
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as client:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n")
            if b"chunked" in headers:
                chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
                try:
                    for _ in range(40):
                        client.sendall(chunk)
                except OSError:
                    pass  # the server has hung up, as it should
            answer = b""
            while b"max_body_bytes" not in answer and (part := client.recv(2**16)):
                answer += part  # head and body may come apart
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"max_body_bytes" in answer


def test_hosts_that_are_allowed_are_fetched_from(scene, scene_url, monkeypatch):
    fetched = []

    def fetch(url, **_):
        fetched.append(url)
        return base64.b64decode(scene_url.partition(",")[2])

    monkeypatch.setattr("mmspec.media.source.fetch", fetch)
    with running("scenes-llava", url_hosts=frozenset({"example.org"})) as server:
        url = "https://example.org/scene.png"
        by_url = post(server, with_image(url))
        by_data = post(server, with_image(scene_url))
        elsewhere = post(server, with_image("https://example.com/scene.png"))
    assert fetched == [url]
    assert by_url[2]["choices"] == by_data[2]["choices"]
    assert elsewhere[0] == 400
    assert "--allow-url-domain" in elsewhere[2]["error"]["message"]


def test_private_addresses_are_refused_even_if_every_host_is_allowed(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with running("scenes-llava", url_hosts=frozenset({"*"})) as server:
        status, _, answer = post(server, with_image(f"{server.url}/health"))
    assert status == 400
    assert "private address" in answer["error"]["message"]


def test_pages_of_allowed_origins_read_answers_and_errors_and_send_the_key(server):
    page, path, allowed = "http://localhost:3000", "/v1/chat/completions", "access-control-allow-origin"
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with running("scenes-llava", api_key="secret", origins=(page,)) as one:
        status, headers, _ = post(one, b"", path, "OPTIONS", Origin=page, **asked)  # as browsers do first
        assert (status, headers[allowed]) == (200, page)
        assert "authorization" in headers["access-control-allow-headers"]
        assert allowed not in post(one, b"", path, "OPTIONS", Origin="http://evil.example", **asked)[1]
        for key, expected in (("secret", 200), ("secret2", 401)):
            status, headers, _ = post(one, GOOD, Origin=page, Authorization=f"Bearer {key}")
            assert (status, headers[allowed]) == (expected, page)
        assert post(one, GOOD)[0] == 401
        for header, expected in (
            ("bearer secret", 200),
            ("BEARER  secret", 200),
            ("Basic secret", 401),
            ("secret", 401),
        ):
            assert post(one, GOOD, Authorization=header)[0] == expected
        with pytest.raises(openai.AuthenticationError, match="API key"):
            one.client.with_options(api_key="wrong").models.list()
    status, headers, _ = post(server, b"", path, "OPTIONS", Origin=page, **asked)  # none is allowed there
    assert status == 405 and not [name for name in headers if name.startswith("access-control")]
