"""Running batches replay rounds from graphs, on a simulated GPU, with the outputs of eager ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.simulated_gpu import SimulatedGPU
from mmspec.core import cache, loop
from mmspec.core.cache import RaggedCache
from mmspec.core.graphs import graphs_mode
from mmspec.errors import InputError
from mmspec.pipelines import ImagePipeline
from mmspec.pipelines.running_batch import RunningBatch
from mmspec.pipelines.vision_language import VisionLanguagePipeline
from mmspec.targets import CausalTarget, steps
from tests.methods import eagle_checks
from tests.pipelines.test_running_batch import follow_scripts
from tests.tiny_models import VISION_LANGUAGE_FAMILIES
from tests.tiny_models.llamagen import tiny_llamagen, tiny_vq

REQUESTS: list[dict[str, Any]] = [
    {"prompt": "a b c", "max_new_tokens": 30, "temperature": 0.0},
    {"prompt": "b", "max_new_tokens": 24, "temperature": 0.9, "seed": 1},
    {"prompt": "c a", "max_new_tokens": 9, "temperature": 1.3, "top_k": 5, "seed": 2},
    {"prompt": "a", "max_new_tokens": 1, "temperature": 0.7, "seed": 3},
    {"prompt": "b b", "max_new_tokens": 26, "temperature": 0.8, "top_p": 0.8, "seed": 4},
    {"prompt": "c", "max_new_tokens": 12, "temperature": 0.0, "repetition_penalty": 1.3},
    {"prompt": "a c", "max_new_tokens": 18, "temperature": 1.0, "min_p": 0.1, "seed": 6},
    {"prompt": "c c", "max_new_tokens": 22, "temperature": 1.1, "repetition_penalty": 1.7, "seed": 7},
    {"prompt": "b a", "max_new_tokens": 15, "temperature": 0.6, "top_k": 3, "seed": 8},
]


def decode(batch: RunningBatch, requests: list[dict[str, Any]], together: int) -> list[list[int]]:
    """Decode requests, one entering a round while fewer than `together` run; their tokens, in order."""
    waiting, numbers, found = list(enumerate(requests)), dict[int, int](), dict[int, list[int]]()
    while waiting or batch.handles:
        if waiting and len(batch.handles) < together and batch.free:
            number, request = waiting.pop(0)
            numbers[batch.enter(**request)] = number
        for update in batch.step():
            if update.output is not None:
                found[numbers[update.handle]] = update.output.tokens[0]
    return [found[number] for number in range(len(requests))]


def text_pipe(accelerator: str) -> VisionLanguagePipeline:
    model, processor = VISION_LANGUAGE_FAMILIES["llava"]()
    name, _, changes = accelerator.partition(", ")
    options: dict[str, Any] = {"length": "cost" if changes else "fixed"}
    if name == "eagle":
        options["drafter"] = eagle_checks.head_for(CausalTarget(model))
    pipe = VisionLanguagePipeline(model, processor, accelerator=name, **options)
    if changes:
        follow_scripts(pipe)
    return pipe


def image_pipe(accelerator: str, **options: Any) -> ImagePipeline:
    pipe = ImagePipeline(tiny_llamagen("class").double(), vq=tiny_vq())
    pipe.set_progress_bar_config(disable=True)
    pipe.set_accelerator(accelerator, **options)
    return pipe


@pytest.mark.every(2)
@pytest.mark.parametrize("accelerator", ["none", "eagle", "copy"])
def test_requests_that_join_and_leave_share_graphs(accelerator: str) -> None:
    pipe = text_pipe(accelerator)
    expected = [pipe(**request).tokens[0] for request in REQUESTS]
    with SimulatedGPU() as gpu:
        pipe = text_pipe(accelerator).compile(())
        with pipe.running_batch(rows=4) as batch:
            for _ in range(3):  # a rare kind of round is captured when it comes again
                assert decode(batch, REQUESTS, 4) == expected
            gpu.take()
            assert decode(batch, REQUESTS, 4) == expected
            counts, stats = gpu.take(), batch.stats
    assert sum(stats.new_tokens) == 4 * sum(map(len, expected))
    assert counts.replays > 20
    if accelerator != "copy":  # whose drafts have many sizes
        assert counts.captures == 0


@pytest.mark.every(2)
@pytest.mark.parametrize("coupling", ["maximal", "exact"])
def test_images_that_join_and_leave_share_graphs(coupling: str) -> None:
    requests: list[dict[str, Any]] = [
        {"class_labels": 1 + seed % 4, "seed": seed, "guidance_scale": 2.0 + seed % 3} for seed in range(5)
    ]
    options = {"coupling": coupling, "window": 8}
    pipe = image_pipe("sjd", **options)
    expected = [pipe(**request).tokens[0] for request in requests]
    with SimulatedGPU() as gpu:
        pipe = image_pipe("sjd", **options).compile(())
        with pipe.running_batch(rows=4) as batch:
            assert decode(batch, [{"prompt": None, **each} for each in requests], 4) == expected
            gpu.take()
            assert decode(batch, [{"prompt": None, **each} for each in requests], 4) == expected
            counts = gpu.take()
    assert counts.captures == 0
    assert counts.replays > 10


def test_a_slot_that_keeps_its_old_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = text_pipe("none")
    expected = [pipe(**request).tokens[0] for request in REQUESTS]
    monkeypatch.setattr(RaggedCache, "_write", lambda *_: None)
    with SimulatedGPU():
        pipe = text_pipe("none").compile(())
        with pipe.running_batch(rows=4) as batch:
            assert decode(batch, REQUESTS, 4) != expected


@pytest.mark.every(2)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_round_without_memory_ends_the_newest_request(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = text_pipe("eagle")
    expected = [pipe(**request).tokens[0] for request in REQUESTS[:2]]
    real = CausalTarget.score
    with SimulatedGPU():
        pipe = text_pipe("eagle")
        if compiled:
            pipe.compile(())
        with pipe.running_batch(rows=4) as batch:
            handles = [batch.enter(**request) for request in (*REQUESTS[:2], REQUESTS[4])]
            batch.step()

            def fail(target: CausalTarget, state: Any, draft: Any) -> Any:
                if len(draft.tokens) > 2:
                    raise torch.OutOfMemoryError("planted")
                return real(target, state, draft)

            monkeypatch.setattr(CausalTarget, "score", fail)
            updates = [update for _ in range(40) for update in batch.step()]
    ended = {update.handle: update for update in updates if update.output is not None}
    assert isinstance(ended[handles[2]].error, torch.OutOfMemoryError)
    assert [ended[handle].output.tokens[0] for handle in handles[:2]] == expected  # type: ignore[union-attr]
    assert ended[handles[0]].error is None and ended[handles[1]].error is None


@pytest.mark.every(3)
@pytest.mark.parametrize("accelerator", ["none", "eagle", "eagle, of changing sizes"])
def test_a_batch_that_captures_at_first_captures_nothing_later(accelerator: str) -> None:
    """Settings of the usual kinds, also when a request with another kind has been and gone."""
    unusual = "min_p", "repetition_penalty"
    requests = [
        {name: value for name, value in request.items() if name not in unusual} for request in REQUESTS
    ]
    pipe = text_pipe(accelerator)
    expected = [pipe(**request).tokens[0] for request in requests]
    with SimulatedGPU() as gpu:
        pipe = text_pipe(accelerator).compile(())
        with pipe.running_batch(rows=4) as batch:
            batch.capture()
            assert gpu.take().captures > 0
            assert sum(batch.stats.new_tokens) == 0
            assert decode(batch, requests, 4) == expected
            assert gpu.take().captures == 0
            long = batch.enter(prompt="a b", max_new_tokens=1000)
            batch.step()
            batch.cancel(long)
            assert gpu.take().captures == 0
            decode(batch, [REQUESTS[7], *requests[:4]], 4)  # with a penalty: a kind of its own
            gpu.take()
            assert decode(batch, requests, 4) == expected
            assert gpu.take().captures == 0


def test_a_second_long_request_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers grow to powers of two, and stay: two captures for each, here of 32, 64, 128 and 256 places."""
    monkeypatch.setattr(steps, "LEAST_CAPACITY", 32)
    monkeypatch.setattr(cache, "CAPACITY_BLOCK", 32)
    monkeypatch.setattr(loop, "PREALLOCATED_TOKENS", 8)
    long = {"prompt": "a b c", "max_new_tokens": 200, "temperature": 0.7, "seed": 1}
    expected = text_pipe("none")(**long).tokens[0]
    with SimulatedGPU() as gpu:
        pipe = text_pipe("none").compile(())
        with pipe.running_batch(rows=2) as batch:
            assert decode(batch, [REQUESTS[1], long], 1)[1] == expected
            assert 4 <= gpu.take().captures <= 10
            assert decode(batch, [long, REQUESTS[1], long], 1)[::2] == [expected] * 2
            assert gpu.take().captures == 0


@pytest.mark.parametrize(("accelerator", "ahead"), [("none", 1), ("eagle", 1), ("copy", 0)])
def test_a_round_runs_while_the_host_reads_the_one_before(accelerator: str, ahead: int) -> None:
    """No round waits for the host, but those of drafts that the host makes, and after a change of rows."""
    with SimulatedGPU(), text_pipe(accelerator).compile(()).running_batch(rows=4) as batch:
        for request in REQUESTS[:2]:
            batch.enter(**request)
        for _ in range(3):
            batch.step()
            assert batch._of_batch.canvas.unread == ahead
        batch.enter(**REQUESTS[4])
        assert batch._of_batch.canvas.unread == 0


def push(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + torch.linspace(-3, 3, output.shape[-1], dtype=output.dtype, device=output.device)


def test_hooks_that_are_set_after_the_capture_act() -> None:
    pipe = text_pipe("none")
    expected = pipe(**REQUESTS[0]).tokens
    with hooked(pipe.model):
        pushed = pipe(**REQUESTS[0]).tokens
    assert pushed != expected
    with SimulatedGPU() as gpu:
        pipe = text_pipe("none").compile()
        assert pipe(**REQUESTS[0]).tokens == expected
        with hooked(pipe.model):
            assert pipe(**REQUESTS[0]).tokens == pushed
            assert gpu.take().captures > 0
            assert pipe(**REQUESTS[0]).tokens == pushed
            assert gpu.take().captures == 0
        assert pipe(**REQUESTS[0]).tokens == expected


def hooked(model: Any) -> Any:
    return model.get_decoder().layers[0].mlp.register_forward_hook(push)


def test_a_switched_adapter_acts() -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> tuple[VisionLanguagePipeline, Any]:
        pipe = text_pipe("none")
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            wrapped = peft.get_peft_model(pipe.model, config, "one").eval()
            wrapped.add_adapter("two", config)
        for parameter in wrapped.parameters():
            parameter.requires_grad_(False)
            if parameter.shape[0] == 4 or parameter.shape[-1] == 4:
                parameter.mul_(20)
        return pipe, wrapped

    def answers(pipe: VisionLanguagePipeline, wrapped: Any) -> list[Any]:
        found = []
        for name in ("one", "two", "one"):
            wrapped.set_adapter(name)
            found.append(pipe(**REQUESTS[0]).tokens)
        return found

    expected = answers(*adapted())
    assert expected[0] != expected[1]
    with SimulatedGPU():
        pipe, wrapped = adapted()
        assert answers(pipe.compile(), wrapped) == expected


@pytest.mark.parametrize("mode, captures", [("auto", True), ("compile", False), ("off", False)])
def test_graphs_without_compile_are_chosen_by_the_environment(
    mode: str, captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMSPEC_GRAPHS", mode)
    expected = text_pipe("none")(**REQUESTS[1]).tokens
    with SimulatedGPU() as gpu:
        pipe = text_pipe("none")
        assert pipe(**REQUESTS[1]).tokens == expected
        assert (gpu.take().captures > 0) == captures
        if mode == "off":
            assert pipe.compile()(**REQUESTS[1]).tokens == expected
            assert gpu.take().captures == 0


def test_an_unknown_mode_of_graphs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMSPEC_GRAPHS", "always")
    with pytest.raises(InputError, match="MMSPEC_GRAPHS must be one of auto, compile, off"):
        graphs_mode()
