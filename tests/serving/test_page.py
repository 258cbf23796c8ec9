"""The page of the server, its API documentation in a browser, and the OpenAPI document."""

import html
import json
import re
import shlex
import subprocess

import jsonschema
import pytest

from mmspec import __version__
from mmspec.serving.openapi import ROUTES
from tests.demo.conftest import PHONE, browser, columns_fit, visiting  # noqa: F401
from tests.serving.conftest import post, reference, running

EVIL = "<script>alert(1)</script>&\"'"
PROMPT = "Describe the picture."


def fetch(server, path: str):
    return server.client._client.get(server.url + path)


def facts(text: str) -> dict[str, str]:
    """Terms of the page with their values."""
    pairs = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text)
    return {html.unescape(term): html.unescape(value) for term, value in pairs}


def test_the_page_says_what_runs(server):
    answer = fetch(server, "/")
    assert answer.headers["content-type"].startswith("text/html")
    text = answer.text
    llava, drawn = text.split("<article>")[1:3]
    assert f"Version {__version__}" in text
    assert "<h3>scenes-llava</h3>" in llava and "<h3>scenes-llamagen</h3>" in drawn
    assert facts(llava.partition("</article>")[0]) == {
        "Task": "text from text and images",
        "Accelerator": "flash",
        "Promise": "exact",
        "Rows": "0 of 8 running, 0 waiting",
        "State": "running",
    }
    assert facts(drawn)["Task"] == "images from text"
    assert facts(text)["Tokens"] == "4,096 per answer" and facts(text)["API key"] == "none"
    assert re.findall(r'href="(?!data:)(.*?)"', text) == ["docs", "health", "metrics"]
    assert [fetch(server, f"/{path}").status_code for path in ("docs", "health", "metrics")] == [200] * 3


def test_the_example_of_the_page_runs_in_a_shell(server):
    command = html.unescape(re.search(r"<pre>(.*?)</pre>", fetch(server, "/").text, re.DOTALL)[1])
    ran = subprocess.run(["bash", "-c", f"{command} -s"], capture_output=True, text=True, timeout=60)
    assert json.loads(ran.stdout)["choices"][0]["message"]["content"]


def test_names_are_escaped_and_a_key_is_named():
    with running(pipelines={EVIL: reference("scenes-llava")}, api_key="secret") as one:
        text = fetch(one, "/").text
        assert "secret" not in text.replace("x", "")
        command = html.unescape(re.search(r"<pre>(.*?)</pre>", text, re.DOTALL)[1])
    assert "<script" not in text
    assert html.escape(EVIL).split("&amp;")[0] in text
    arguments = shlex.split(command)
    assert "Authorization: Bearer KEY" in arguments
    assert json.loads(arguments[-1])["model"] == EVIL
    assert "required" in facts(text)["API key"]


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_fit_a_phone_and_load_nothing_from_elsewhere(server, browser, path):  # noqa: F811
    with visiting(browser, server.url, PHONE) as page:
        page.goto(server.url + path)
        if path == "/docs":
            page.wait_for_selector(".opblock-summary-path")
            paths = [
                one.inner_text().replace("\u200b", "")
                for one in page.query_selector_all(".opblock-summary-path")
            ]
            assert set(paths) == set(fetch(server, "/openapi.json").json()["paths"])
        assert columns_fit(page)


def test_each_route_is_described(server):
    document = fetch(server, "/openapi.json").json()
    assert set(document["paths"]) == set(ROUTES)
    assert "securitySchemes" not in document["components"]
    assert "HTTPValidationError" not in json.dumps(document)
    with running("scenes-llava", api_key="secret") as one:
        document = fetch(one, "/openapi.json").json()
    secured = {path for path, each in document["paths"].items() if "security" in [*each.values()][0]}
    assert secured == {path for path in ROUTES if path.startswith("/v1/")}


def test_answers_have_the_described_form(server):
    document = fetch(server, "/openapi.json").json()

    def judge(
        path: str, answer: object, status: str = "200", method: str = "get", media: str = "application/json"
    ):
        schema = document["paths"][path][method]["responses"][status]["content"][media]["schema"]
        jsonschema.validate(answer, {**schema, "components": document["components"]})
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"other": 1}, {**schema, "components": document["components"]})

    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
    judge("/v1/chat/completions", post(server, chat)[2], method="post")
    judge("/v1/chat/completions", post(server, {})[2], "default", method="post")
    stream = server.client._client.post(f"{server.url}/v1/chat/completions", json={**chat, "stream": True})
    first = json.loads(stream.text.partition("\n")[0].removeprefix("data: "))
    judge("/v1/chat/completions", first, method="post", media="text/event-stream")
    raw = {"model": "scenes-llava", "prompt": "a red", "max_tokens": 4}
    judge("/v1/completions", post(server, raw, "/v1/completions")[2], method="post")
    stream = server.client._client.post(f"{server.url}/v1/completions", json={**raw, "stream": True})
    first = json.loads(stream.text.partition("\n")[0].removeprefix("data: "))
    judge("/v1/completions", first, method="post", media="text/event-stream")
    drawn = post(server, {"prompt": "a red ring", "seed": 1}, "/v1/images/generations")[2]
    judge("/v1/images/generations", drawn, method="post")
    judge("/v1/models", fetch(server, "/v1/models").json())
    judge("/v1/models/{name}", fetch(server, "/v1/models/scenes-llava").json())
    judge("/health", fetch(server, "/health").json())
