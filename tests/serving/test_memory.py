"""Prompts, replies and encoded images that a server keeps between requests; metrics in vLLM's names."""

import base64
import gc
import io
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serving_memory import memory_after
from mmspec.cli.options import ModelOptions
from mmspec.cli.serve import load_engine, remember_prompts
from mmspec.pipelines import MMSpecPipeline
from mmspec.pipelines.running_batch import RunningBatch
from mmspec.serving.limits import ServerLimits
from mmspec.serving.metrics import Metrics
from tests.serving.conftest import PATIENCE, Server, running, until
from tests.tiny_models import tiny_image
from tests.tiny_models.vision_language import save_family

QUESTION = "Describe the image."
LIMIT = 64 * 2**20


@pytest.fixture
def pipe():
    pipe = MMSpecPipeline.from_pretrained("assets/scenes-llava", accelerator="copy")
    pipe.enable_prefix_cache(LIMIT)
    return pipe


def messages(scene_url: str, *texts: str) -> list[dict]:
    """A conversation about one image: the user's and the assistant's texts in turn."""
    image = {"type": "image_url", "image_url": {"url": scene_url}}
    first = {"role": "user", "content": [image, {"type": "text", "text": texts[0]}]}
    roles = ("assistant", "user") * len(texts)
    return [first, *({"role": role, "content": text} for role, text in zip(roles, texts[1:], strict=False))]


def ask(server: Server, conversation: list[dict], **settings):
    what = {"model": "scenes-llava", "max_tokens": 24, "temperature": 0, **settings}
    return server.client.chat.completions.create(messages=conversation, **what)


def metrics_of(server: Server) -> dict[str, float]:
    found: dict[str, float] = {}
    text = server.client._client.get(f"{server.url}/metrics").text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def count_encodings(pipe: MMSpecPipeline, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count images in the vision encoder; a hook would switch the cache off."""
    tower, runs = type(pipe.model.model.vision_tower), []
    see = tower.forward

    def counted(self, pixel_values, *args, **kwargs):
        runs.append(len(pixel_values))
        return see(self, pixel_values, *args, **kwargs)

    monkeypatch.setattr(tower, "forward", counted)
    return runs


def test_a_second_turn_encodes_no_image_and_says_the_same(pipe, scene_url, monkeypatch):
    runs = count_encodings(pipe, monkeypatch)
    fresh = MMSpecPipeline.from_pretrained("assets/scenes-llava", accelerator="none")
    with running(pipelines={"scenes-llava": pipe}) as server:
        first = ask(server, messages(scene_url, QUESTION))
        assert sum(runs) == 1 and first.usage.prompt_tokens_details.cached_tokens == 0
        text = first.choices[0].message.content
        conversation = messages(scene_url, QUESTION, text, "Where is it?")
        second = ask(server, conversation)
        details = second.usage.prompt_tokens_details
        assert first.usage.prompt_tokens <= details.cached_tokens < second.usage.prompt_tokens
        image, question = conversation[0]["content"]
        other = ask(server, [{"role": "user", "content": [question, image]}])
        assert sum(runs) == 1, "neither the second turn nor another order reads the image again"
        found = metrics_of(server)
    prompts = [one.usage.prompt_tokens for one in (first, second, other)]
    assert found["vllm:prefix_cache_queries_total"] == found["vllm:prompt_tokens_total"] == sum(prompts)
    hits = sum(one.usage.prompt_tokens_details.cached_tokens for one in (first, second, other))
    assert found["vllm:prefix_cache_hits_total"] == hits > 0
    assert found["mmspec:image_cache_queries_total"] == 2
    assert found["mmspec:image_cache_hits_total"] == 1
    assert 0 < found["vllm:kv_cache_usage_perc"] < 1
    image = conversation[0]["content"][0]["image_url"]["url"]
    for turns, answer in ((messages(scene_url, QUESTION), first), (conversation, second)):
        content = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
        turns = [{"role": "user", "content": content}, *turns[1:]]
        expected = fresh(turns, max_new_tokens=24, temperature=0.0).text[0]
        assert answer.choices[0].message.content == expected


def test_rounds_go_on_while_an_image_is_encoded(pipe, scene_url, monkeypatch):
    """The encoder waits for rounds of another request; a second question about the image runs none."""
    rounds, seen, stuck, tower = [], [], [], type(pipe.model.model.vision_tower)
    step, see = RunningBatch.step, tower.forward

    def counted(batch):
        updates = step(batch)
        rounds.append(len(updates))
        return updates

    def slow(self, *args, **kwargs):
        seen.append(len(rounds))
        deadline = time.monotonic() + PATIENCE
        while len(rounds) < seen[-1] + 5 and not stuck:
            stuck.extend(["no round"] * (time.monotonic() > deadline))
            time.sleep(0.001)
        return see(self, *args, **kwargs)

    monkeypatch.setattr(RunningBatch, "step", counted)
    monkeypatch.setattr(tower, "forward", slow)
    pipe.enable_chunked_prefill()
    text = [{"role": "user", "content": QUESTION}]
    questions = [messages(scene_url, QUESTION), messages(scene_url, "Where is it?")]
    with running(pipelines={"scenes-llava": pipe}, rows=3) as server, ThreadPoolExecutor(1) as beside:
        long = {"max_tokens": 700, "extra_body": {"min_tokens": 700}}
        other = beside.submit(ask, server, text, **long)
        until(lambda: len(rounds) > 2)
        answers = [ask(server, question).choices[0].message.content for question in questions]
        assert other.result().usage.completion_tokens == 700
    assert len(seen) == 1 and not stuck
    monkeypatch.undo()
    fresh = MMSpecPipeline.from_pretrained("assets/scenes-llava", accelerator="none")
    image = questions[0][0]["content"][0]["image_url"]["url"]
    for question, answer in zip((QUESTION, "Where is it?"), answers, strict=True):
        content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
        turns = [{"role": "user", "content": content}]
        assert answer == fresh(turns, max_new_tokens=24, temperature=0.0).text[0]


def test_n_choices_prefill_their_prompt_once(pipe, scene_url, monkeypatch):
    """Each choice after the first reads the last token of the prompt alone."""
    runs = count_encodings(pipe, monkeypatch)
    with running(pipelines={"scenes-llava": pipe}) as server:
        answer = ask(server, messages(scene_url, QUESTION), n=4, temperature=1.0, seed=3)
        alone = [ask(server, messages(scene_url, QUESTION), temperature=1.0, seed=3)]
        found = metrics_of(server)
    assert sum(runs) == 1
    length = answer.usage.prompt_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert found["vllm:prompt_tokens_total"] == 5 * length
    assert found["vllm:prefix_cache_hits_total"] == 4 * (length - 1)
    assert alone[0].choices[0].message.content == answer.choices[0].message.content


def test_repeated_prompts_are_prefilled_once(pipe):
    with running(pipelines={"scenes-llava": pipe}) as server:
        prompts = [" ".join(["red ring"] * 12)] * 3
        create = server.client.completions.create
        answer = create(model="scenes-llava", prompt=prompts, n=2, max_tokens=4, temperature=1.0, seed=1)
        found = metrics_of(server)
    assert len(answer.choices) == 6
    length = answer.usage.prompt_tokens // 3
    assert found["vllm:prompt_tokens_total"] == 6 * length
    assert found["vllm:prefix_cache_hits_total"] == 5 * (length - 1)


def test_times_are_counted(pipe, scene_url):

    def one(text: str) -> int:
        conversation = [{"role": "user", "content": text}]
        return ask(server, conversation, extra_body={"ignore_eos": True}).usage.completion_tokens

    with running(pipelines={"scenes-llava": pipe}, rows=1) as server, ThreadPoolExecutor(3) as threads:
        tokens = list(threads.map(one, "abc"))
        found = metrics_of(server)
    for name in ("time_to_first_token", "request_queue_time", "e2e_request_latency"):
        assert found[f"vllm:{name}_seconds_count"] == 3, name
    queue, first, whole = (
        found[f"vllm:{name}_seconds_sum"]
        for name in ("request_queue_time", "time_to_first_token", "e2e_request_latency")
    )
    assert 0 < queue < first <= whole
    assert tokens == [24, 24, 24] and found["vllm:generation_tokens_total"] == 72
    assert found["vllm:request_time_per_output_token_seconds_count"] == 3
    assert 3 < found["vllm:inter_token_latency_seconds_count"] <= 72 - 3
    between = found["vllm:inter_token_latency_seconds_sum"]
    assert 0 < between <= whole - first + 1e-6
    assert found["vllm:request_time_per_output_token_seconds_sum"] == pytest.approx(between / 23)


def test_a_server_has_a_prefix_cache_unless_it_is_told_otherwise(tmp_path):
    limits, how = ServerLimits(), ModelOptions(device="cpu")
    source = str(save_family("llava", tmp_path / "tiny"))
    for asked, expected in ((2**20, 2**20), (0, None), (None, ...)):
        metrics = Metrics()
        engine = load_engine(source, "copy", 8, limits, metrics, how, prefix_cache_bytes=asked)
        cache = engine.pipeline.target.prefix_cache
        if expected is None:
            assert cache is None
        else:
            assert cache.max_bytes == expected or (expected is ... and cache.max_bytes > 2**20)


def test_models_without_a_prefix_cache_are_served_without():
    pipe = MMSpecPipeline.from_pretrained("assets/scenes-llamagen", accelerator="none")
    remember_prompts(pipe, None)
    assert pipe.target.prefix_cache is None


@pytest.mark.slow
def test_memory_is_bounded_over_mixed_requests():
    """More prompts than the cache holds, with images, schemas, tools, logprobs and cancelled requests."""
    pytest.importorskip("llguidance")
    sizes = memory_after(600)
    assert sizes[-1] <= 1.05 * sizes[2], sizes


@pytest.mark.slow
def test_memory_is_bounded_over_2000_requests(tmp_path):
    """Different prompts with one of fifty images, far more than the cache holds."""
    pipe = MMSpecPipeline.from_pretrained(save_family("llava", tmp_path / "tiny"), accelerator="copy")
    pipe.enable_prefix_cache(2 * 2**20)
    cache, process, sizes = pipe.target.prefix_cache, psutil.Process(os.getpid()), []
    images = [data_url(tiny_image(seed)) for seed in range(50)]
    words = [word for word in pipe.tokenizer.get_vocab() if word.isalpha()]

    def one(seed: int) -> int:
        text = " ".join(random.Random(seed).choices(words, k=24))
        conversation = messages(images[seed % 50], text) if seed % 3 else [{"role": "user", "content": text}]
        return ask(server, conversation, max_tokens=8).usage.completion_tokens

    with running(pipelines={"scenes-llava": pipe}, max_waiting=100) as server, ThreadPoolExecutor(8) as pool:
        for block in range(10):
            assert all(pool.map(one, range(200 * block, 200 * (block + 1))))
            assert cache.nbytes() <= cache.max_bytes
            gc.collect()
            sizes.append(process.memory_info().rss)
    assert cache.usage > 0.9 and cache.images.hits > 0, "the cache was full"
    assert sizes[-1] <= 1.05 * sizes[1], sizes


def data_url(image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
