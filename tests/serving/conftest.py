"""A real server in a thread, on the reference models."""

import base64
import contextlib
import functools
import http.client
import io
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import openai
import pytest
import torch
import uvicorn
from PIL import Image

from mmspec.cli.serve import listen
from mmspec.pipelines import MMSpecPipeline
from mmspec.serving.app import create_app
from mmspec.serving.engine import Engine
from mmspec.serving.limits import ServerLimits
from mmspec.serving.metrics import Metrics

PATIENCE = 60


@dataclass
class Server:
    """A server that runs, and its client."""

    url: str
    engines: dict[str, Engine]
    client: openai.OpenAI
    metrics: Metrics

    def chat(self, text: str, **settings: object):
        return self.client.chat.completions.create(
            model="scenes-llava", messages=[{"role": "user", "content": text}], **settings
        )


def post(server, body: object, path: str = "/v1/chat/completions", method: str = "POST", **headers: str):
    """Status, headers and JSON of the answer to a body: bytes, or what becomes JSON."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, data, {"Content-Type": "application/json", **headers})
    with connection.getresponse() as response:
        given = {name.lower(): value for name, value in response.getheaders()}
        text = response.read()
        return response.status, given, json.loads(text) if text[:1] == b"{" else None


def load(name: str) -> MMSpecPipeline:
    accelerator = "flash" if name == "scenes-llava" else "sjd"
    pipe = MMSpecPipeline.from_pretrained(f"assets/{name}", accelerator=accelerator, dtype=torch.float32)
    if name == "scenes-llamagen":
        pipe.set_progress_bar_config(disable=True)
    return pipe


reference = functools.cache(load)  # for comparison, because a server does not share its pipelines
spare = functools.cache(lambda name: load(name))  # of servers that run one after another


@contextlib.contextmanager
def running(
    *names: str,
    rows: int = 8,
    api_key: str | None = None,
    pipelines: dict | None = None,
    origins: tuple[str, ...] = (),
    adapters: Sequence[str] = (),
    **limits: object,
) -> Iterator[Server]:
    """Run a server of reference models, or of the pipelines that are passed."""
    metrics, limited = Metrics(), ServerLimits(**limits)
    pipelines = pipelines or {name: spare(name) for name in names}
    engines = {
        name: Engine(name, pipe, rows, limited.max_waiting, metrics.of_model(name), adapters)
        for name, pipe in pipelines.items()
    }
    app = create_app(list(engines.values()), metrics, limited, api_key, origins)
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=5)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=api_key or "none", max_retries=0, timeout=PATIENCE)
    try:
        until(lambda: server.started)
        yield Server(url, engines, client, metrics)
    finally:
        client.close()
        server.should_exit = True
        thread.join(PATIENCE)
        listener.close()


@contextlib.contextmanager
def without_moves(pipe: MMSpecPipeline) -> Iterator[MMSpecPipeline]:
    """The pipeline as one whose rows cannot enter or leave a batch, and so take turns."""
    pipe.accelerator.drafter.rows_move = False
    yield pipe
    del pipe.accelerator.drafter.rows_move


def data_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def until(is_true: Callable[[], bool]) -> None:
    """Wait for a condition, with a limit."""
    deadline = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running(pipelines={name: load(name) for name in ("scenes-llava", "scenes-llamagen")}) as one:
        yield one


@pytest.fixture(scope="session")
def scene() -> Image.Image:
    from mmspec.scenes import render, sample_scene

    return Image.fromarray(render(sample_scene(5)))


@pytest.fixture(scope="session")
def scene_url(scene) -> str:
    return data_url(scene)
