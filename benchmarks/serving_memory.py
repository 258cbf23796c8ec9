"""Memory of a server over many mixed requests: `python -m benchmarks.serving_memory [REQUESTS]`.

A tiny model with random weights answers requests of texts, images, schemas, tools, log-probabilities and
`n`, of which some are cancelled. The resident memory after all of them is compared with that after a tenth.
"""

from __future__ import annotations

import base64
import gc
import io
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import psutil
from PIL import Image

from tests.serving.byte_llava import byte_llava
from tests.serving.conftest import Server, running

CACHE_BYTES = 2 * 2**20  # far less than the prompts of all requests
CLIENTS = 8
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer"}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "paint", "strict": True, "parameters": SCHEMA}}
KINDS: list[dict[str, Any]] = [
    {},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [TOOL]},
    {"logprobs": True, "top_logprobs": 3},
    {"n": 2, "temperature": 1.0},
    {"frequency_penalty": 0.5, "stop": ["x"], "logit_bias": {"5": -3}},
]


def image_url(seed: int) -> str:
    """An image of random pixels as a `data:` URL."""
    pixels = np.random.default_rng(seed).integers(0, 256, (28, 28, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


IMAGES = [image_url(seed) for seed in range(50)]


def ask(server: Server, seed: int) -> None:
    """Send one request; its kind, its text and its end follow from the seed."""
    chance = random.Random(seed)
    text = "".join(chance.choices("abcdefgh ", k=24))
    content: Any = text
    if seed % 3:
        image = {"type": "image_url", "image_url": {"url": IMAGES[seed % len(IMAGES)]}}
        content = [image, {"type": "text", "text": text}]
    what = {"max_tokens": 8, "seed": seed, **KINDS[seed % len(KINDS)]}
    (name,) = server.engines
    create = server.client.chat.completions.create
    if seed % 11:
        create(model=name, messages=[{"role": "user", "content": content}], **what)
        return
    stream = create(
        model=name,
        messages=[{"role": "user", "content": content}],
        stream=True,
        **{**what, "max_tokens": 200},
    )
    next(iter(stream))
    stream.close()  # the server cancels the request


def memory_after(requests: int, parts: int = 10) -> list[float]:
    """Return the resident memory after each part of the requests, in MB."""
    pipe, sizes, process = byte_llava(), list[float](), psutil.Process(os.getpid())
    pipe.enable_prefix_cache(CACHE_BYTES)
    edges = [requests * part // parts for part in range(parts + 1)]
    with running(pipelines={"tiny": pipe}, max_waiting=100) as server, ThreadPoolExecutor(CLIENTS) as pool:
        server.client = openai.OpenAI(base_url=server.client.base_url, api_key="none", timeout=600)
        for start, end in zip(edges, edges[1:], strict=False):
            for _ in pool.map(lambda seed: ask(server, seed), range(start, end)):
                pass
            gc.collect()
            sizes.append(process.memory_info().rss / 1e6)
            print(f"{end} requests: {sizes[-1]:.1f} MB", flush=True)
    return sizes


if __name__ == "__main__":
    sizes = memory_after(int(sys.argv[1]) if len(sys.argv) > 1 else 5000)
    print(f"growth from the first tenth to the end: {sizes[-1] / sizes[0] - 1:.1%}")
