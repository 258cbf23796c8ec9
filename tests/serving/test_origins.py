"""Pages in browsers: which may read answers, and what they are told before they ask."""

import http.client

import pytest

from mmspec.errors import InputError
from mmspec.serving.app import read_origin
from tests.serving.conftest import PATIENCE, running

ASKED = {"role": "user", "content": "Describe the picture."}


def preflight(server, origin):
    """Status and headers of what a browser asks before it sends a request with a key."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    connection.request("OPTIONS", "/v1/chat/completions", headers={"Origin": origin, **asked})
    with connection.getresponse() as response:
        return response.status, {name.lower(): value for name, value in response.getheaders()}


def test_pages_of_allowed_origins_read_answers_and_errors(server):
    page, other = "http://localhost:3000", "http://evil.example"
    with running("scenes-llava", api_key="secret", origins=(page,)) as one:
        status, headers = preflight(one, page)
        assert status == 200
        assert headers["access-control-allow-origin"] == page
        assert "authorization" in headers["access-control-allow-headers"]
        assert "access-control-allow-origin" not in preflight(one, other)[1]
        given = one.client.with_options(default_headers={"Origin": page}).chat.completions.with_raw_response
        good = given.create(model="scenes-llava", messages=[ASKED], max_tokens=2)
        assert good.headers["access-control-allow-origin"] == page
        host, port = one.url.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
        connection.request("POST", "/v1/chat/completions", b"{}", {"Origin": page})
        with connection.getresponse() as refused:
            assert refused.status == 401
            assert refused.getheader("Access-Control-Allow-Origin") == page
    status, headers = preflight(server, page)  # no origin is allowed there
    assert status == 405
    assert not [name for name in headers if name.startswith("access-control")]


def test_origins_are_read_as_browsers_write_them():
    given = ["*", "http://localhost:3000", "HTTPS://Chat.Example:443", "app://obsidian.md", "http://[::1]:80"]
    wanted = ["*", "http://localhost:3000", "https://chat.example", "app://obsidian.md", "http://[::1]"]
    assert [read_origin(origin) for origin in given] == wanted
    for wrong in ("localhost:3000", "http://a.org/", "http://*.a.org", "", "http://", "http://a b"):
        with pytest.raises(InputError, match="--allow-origin"):
            read_origin(wrong)
