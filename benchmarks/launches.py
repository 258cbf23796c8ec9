"""Count the kernel launches of decoding rounds, and the bytes that moving rows copy, on a simulated GPU.

    python -m benchmarks.launches            # a table of all scenarios
    python -m benchmarks.launches --json     # one JSON object

Models are tiny and random: the number of launches depends on the layers, not on their sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from statistics import median
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
)

from benchmarks.gpu.rounds import RoundShape, random_requests
from benchmarks.simulated_gpu import Counts, SimulatedGPU
from mmspec.accelerator import Accelerator, Call, pair
from mmspec.accelerators import make
from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.interfaces import Request
from mmspec.core.loop import Batch, begin
from mmspec.core.plain import NoDrafter
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.core.statistics import DecodingStats
from mmspec.families.llamagen.configuration import LlamaGenConfig
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.families.llamagen.target import LlamaGenTarget
from mmspec.methods.eagle3.drafter import Eagle3Drafter
from mmspec.methods.eagle3.head import Eagle3Config, Eagle3Head
from mmspec.pipelines.base import ROUNDS_TO_COMPILE
from mmspec.pipelines.running_batch import RunningBatch, fill_holes
from mmspec.plugins import METHODS
from mmspec.targets import adapt
from mmspec.targets.causal import CausalTarget
from mmspec.targets.steps import CapturedForward
from mmspec.trees.pacing import PacedDrafter

__all__ = [
    "FAMILIES",
    "SCENARIOS",
    "Scenario",
    "count_joining",
    "count_layer",
    "count_moves",
    "count_rounds",
    "count_running",
]

WARM_UP, ROUNDS = 8, 8
LAYERS = 4
RUNNING_REQUESTS = 40
PREFILL_TOKENS = 512


@dataclass(frozen=True)
class Scenario:
    """A batch that is decoded.

    Attributes:
        target: makes the target.
        accelerator: makes the accelerator of a target.
        rows: number of requests.
        context: tokens of each prompt.
        sampler: its settings.
    """

    target: Callable[[], CausalTarget]
    accelerator: Callable[[CausalTarget], Accelerator]
    rows: int = 1
    context: int = 40
    sampler: Sampler = field(default_factory=Sampler)


def llama(layers: int = LAYERS, head_dim: int = 8) -> CausalTarget:
    """A Llama with two queries for each key head."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers}
    sizes["head_dim"] = head_dim
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=2048))
    return CausalTarget(model.eval().requires_grad_(False))


def llamagen(layers: int = LAYERS) -> CausalTarget:
    """A LlamaGen of classes."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2}
    config = LlamaGenConfig(grid_size=24, vocab_size=64, **sizes)
    return LlamaGenTarget(LlamaGenForCausalLM(config).eval().requires_grad_(False))


def plain(target: CausalTarget) -> Accelerator:
    return pair("none", NoDrafter()).fit(target)


def eagle3(target: CausalTarget, length: str = "fixed") -> Accelerator:
    """A random EAGLE-3 head with its usual tree of 59 candidates, or a smaller one or none."""
    torch.manual_seed(1)
    head = Eagle3Head(Eagle3Config.for_target(target.config, target.vocabulary)).eval().requires_grad_(False)
    drafter = Eagle3Drafter(head, num_draft_tokens=59, depth=6, top_k=10)
    if target.steps is not None:
        drafter.compile()
    return pair("eagle3", drafter).fit(target).with_length(length)


def sjd(target: CausalTarget) -> Accelerator:
    return make(METHODS["sjd"], window=32).fit(target)


PENALTY = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.05)])
SCENARIOS: dict[str, Scenario] = {
    "none, 8 rows": Scenario(llama, plain, rows=8),
    "EAGLE-3, 59 nodes": Scenario(llama, eagle3),
    "EAGLE-3, 59 nodes, repetition_penalty": Scenario(llama, eagle3, sampler=Sampler(processors=[PENALTY])),
    "EAGLE-3, length=auto": Scenario(llama, partial(eagle3, length="cost")),
    "sjd, 32 nodes": Scenario(llamagen, sjd, context=1, sampler=Sampler(1.0, guidance_scale=4.0)),
}


#: Keys and values as wide as those of large models, beside which the other numbers of a row are small.
MOVES: dict[str, Scenario] = {
    "none, 64 rows": Scenario(partial(llama, head_dim=128), plain, rows=64),
    "EAGLE-3, 64 rows": Scenario(partial(llama, head_dim=128), eagle3, rows=64),
}


#: Running batches, in which requests have settings of their own.
RUNNING: dict[str, Scenario] = {
    "none": Scenario(llama, plain, rows=8),
    "EAGLE-3, 59 nodes": Scenario(llama, eagle3, rows=8),
    "EAGLE-3, length=auto": Scenario(llama, partial(eagle3, length="cost"), rows=8),
    "sjd, 32 nodes": Scenario(llamagen, sjd, rows=8, context=1, sampler=Sampler(1.0, guidance_scale=4.0)),
}


def count_rounds(scenario: Scenario, gpu: SimulatedGPU, compiled: bool = True) -> Iterator[Counts]:
    """Decode a batch on a simulated GPU, and yield the counts of each round; the first is the prefill's.

    Drafts of chosen lengths are rehearsed before, as `MMSpecPipeline.compile` does.
    """
    target = scenario.target()
    if compiled:
        target.steps = CapturedForward(target.model, target._step)
    accelerator = scenario.accelerator(target)
    requests = random_requests(target, RoundShape(scenario.rows, 1, scenario.context))
    most = min(400, getattr(target.grid, "length", 400))

    def call() -> Call:
        random = RandomStream.from_seed(0, scenario.rows, target.device)
        return accelerator.call(target, scenario.sampler, requests, Stopping(most), random)

    drafter = accelerator.decoder_of_any.drafter
    if compiled and isinstance(drafter, PacedDrafter):
        for _ in drafter.rehearse(target.device):
            for _ in islice(call().rounds(), ROUNDS_TO_COMPILE):
                pass
    gpu.take()
    for _ in call().rounds():
        yield gpu.take()


@torch.inference_mode()
def count_moves(scenario: Scenario, gpu: SimulatedGPU) -> dict[str, dict[str, float]]:
    """Count the copies when a row leaves a batch and another enters; a row is its keys and values."""
    target = scenario.target()
    accelerator = scenario.accelerator(target)

    def first_round(rows: int) -> Batch[Any]:
        requests = random_requests(target, RoundShape(rows, 1, scenario.context))
        prompts = [each.prompt_tokens for each in requests]
        canvas = Canvas(prompts, Stopping(100), DecodingStats(), target.device)
        random = RandomStream.from_seed(0, rows, target.device)
        batch, _ = begin(target, accelerator.decoder, scenario.sampler, requests, canvas, random)
        batch.decode_round()
        batch.read_round()
        return batch

    batch, one = first_round(scenario.rows), first_round(1)
    size = one.state.nbytes()
    moves = {}
    gpu.take()
    left = batch.part(fill_holes(scenario.rows, [scenario.rows // 2]))
    moves["leaves"] = gpu.take()
    left.joined(one)
    moves["enters"] = gpu.take()
    return {
        name: {"rows_copied": each.moved_bytes / size, "launches": each.launches.total()}
        for name, each in moves.items()
    }


@dataclass
class Served:
    """The parts of a pipeline that a running batch uses; a prompt is the number of a request.

    Attributes:
        samplers: settings of the requests, in turn.
    """

    target: CausalTarget
    accelerator: Accelerator
    samplers: Sequence[Sampler]
    context: int
    made: dict[int, list[Request]] = field(default_factory=dict)

    @property
    def model(self) -> Any:
        return self.target.model

    def _busy(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _examples(self, rows: int) -> list[Call]:
        return [self._call(number) for number in range(len(self.samplers))]

    def _prepare_request(self, prompt: Any, arguments: Any) -> tuple[Call, Any]:
        return self._call(prompt), lambda canvas: canvas

    def requests_of(self, prompt: int) -> list[Request]:
        """The request of this number, made once."""
        if prompt not in self.made:
            shape = RoundShape(1, 1, self.context + prompt % 5)
            self.made[prompt] = random_requests(self.target, shape)
        return self.made[prompt]

    def _call(self, prompt: int) -> Call:
        requests = self.requests_of(prompt)
        random = RandomStream.from_seed(prompt, 1, self.target.device)
        sampler = self.samplers[prompt % len(self.samplers)]
        stopping = Stopping(min(10 + 3 * (prompt % 4), getattr(self.target.grid, "length", 100)))
        return self.accelerator.call(self.target, sampler, requests, stopping, random)


def count_running(scenario: Scenario, gpu: SimulatedGPU, compiled: bool) -> dict[str, float]:
    """Count the rounds of a running batch that new requests enter as soon as others leave.

    Graphs are captured before. The launches of a request that enters are those beside the target's forward
    pass over its prompt.
    """
    target = scenario.target()
    if compiled:
        target.steps = CapturedForward(target.model, target._step)
    scale = scenario.sampler.guidance_scale
    samplers = [Sampler(0.0, guidance_scale=scale), Sampler(0.9, top_p=0.9, guidance_scale=scale)]
    samplers += [Sampler(1.2, top_k=5, guidance_scale=scale)]
    served: Any = Served(target, scenario.accelerator(target), samplers, scenario.context)
    entered, rounds, prompts, outside = [], [], list[int](), list[int]()
    forward = target.forward

    def counted_forward(*args: Any, **how: Any) -> torch.Tensor:
        before = gpu.counts.launches.total()
        logits = forward(*args, **how)
        prompts.append(gpu.counts.launches.total() - before)
        return logits

    target.forward = counted_forward  # type: ignore[method-assign]
    with RunningBatch(served, scenario.rows) as batch:
        batch.capture()
        while True:
            while batch.free and len(entered) < RUNNING_REQUESTS:
                served.requests_of(len(entered))
                gpu.take()
                prompts.clear()
                batch.enter(len(entered))
                entered.append(gpu.take())
                outside.append(entered[-1].launches.total() - sum(prompts))
            if not batch.handles:
                break
            batch.step()
            rounds.append(gpu.take())
    timed = rounds[len(rounds) // 2 : -WARM_UP]
    return {
        "round": median(each.total for each in timed),
        "outside_graphs": median(each.outside_graphs for each in timed),
        "copies": median(each.copies for each in timed),
        "reads": median(each.reads for each in timed),
        "captures": sum(each.captures for each in rounds + entered),
        "enters": median(outside[len(outside) // 2 :]),
    }


@torch.inference_mode()
def count_joining(scenario: Scenario, gpu: SimulatedGPU, compiled: bool) -> dict[str, float]:
    """Count what it takes until as many requests as there are rows, of short prompts, have joined at once."""
    target = scenario.target()
    target.prefill_tokens = PREFILL_TOKENS
    if compiled:
        target.steps = CapturedForward(target.model, target._step)
    scale = scenario.sampler.guidance_scale
    served: Any = Served(
        target, scenario.accelerator(target), [Sampler(guidance_scale=scale)], scenario.context
    )
    passes, forward = [], target.forward

    def counted_forward(*args: Any, **how: Any) -> torch.Tensor:
        passes.append(args)
        return forward(*args, **how)

    with RunningBatch(served, scenario.rows) as batch:
        batch.capture()
        target.forward = counted_forward  # type: ignore[method-assign]
        for number in range(scenario.rows):
            batch.enter(number)
        gpu.take()
        batch._prefill_some()
        joined = gpu.take()
    counts = {"forwards": len(passes), "launches": joined.launches.total(), "reads": joined.reads}
    return counts | {"captures": joined.captures}


def causal(name: str, kind: str, layers: int, **settings: Any) -> CausalTarget:
    """A tiny decoder of transformers: the names of its config and its model, without "Config" and so on."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    made = config(**sizes, **settings)
    return adapt(getattr(transformers, kind)(made).eval().requires_grad_(False))


def vision_language(name: str, layers: int) -> CausalTarget:
    """A Qwen-VL with a tiny vision tower: its text layers have M-RoPE."""
    torch.manual_seed(0)
    text: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 8}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    vision: dict[str, Any] = {"depth": 1, "num_heads": 2}
    vision |= {"embed_dim": 32} if name == "Qwen2VL" else {"hidden_size": 32, "out_hidden_size": 32}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    return adapt(model.eval().requires_grad_(False))


#: What Chameleon needs besides its decoder.
CODES: dict[str, Any] = {"embed_dim": 8, "num_embeddings": 8, "latent_channels": 16, "resolution": 32}
CODES |= {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1}
PIXELS: dict[str, Any] = {"vocabulary_map": {"<image>": 63}, "vq_config": CODES}

#: Families of layers that have fused kernels: what makes a target with so many layers.
FAMILIES: dict[str, Callable[[int], CausalTarget]] = {
    "Llama": llama,
    "LlamaGen": llamagen,
    "Mistral": partial(causal, "Mistral", "MistralForCausalLM"),
    "Qwen2": partial(causal, "Qwen2", "Qwen2ForCausalLM"),
    "Qwen3": partial(causal, "Qwen3", "Qwen3ForCausalLM", head_dim=8),
    "Qwen2-VL": partial(vision_language, "Qwen2VL"),
    "Qwen2.5-VL": partial(vision_language, "Qwen2_5_VL"),
    "Qwen3-VL": partial(vision_language, "Qwen3VL"),
    "Gemma": partial(causal, "Gemma", "GemmaForCausalLM", head_dim=8),
    "Gemma 3": partial(causal, "Gemma3Text", "Gemma3ForCausalLM", head_dim=8),
    "Chameleon": partial(causal, "Chameleon", "ChameleonForConditionalGeneration", **PIXELS),
}


def count_layer(make: Callable[[int], CausalTarget] = llama, *, is_fused: bool = True) -> int:
    """Count the launches that a layer adds to a captured scoring forward pass.

    Args:
        make: makes a target of so many layers.
        is_fused: False for the modules' own `forward`, except for attention.
    """

    def made(layers: int) -> CausalTarget:
        target = make(layers)
        if not is_fused:
            target._fused = []
        return target

    captured = []
    for layers in (1, 2):
        scenario = Scenario(partial(made, layers), plain, context=1)
        with SimulatedGPU() as gpu:
            captured.append([each.captured for each in islice(count_rounds(scenario, gpu), 4)][-1])
    return captured[1] - captured[0]


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    eager: Annotated[bool, typer.Option(help="Count without compiled steps.")] = False,
    show: Annotated[bool, typer.Option(help="List the operators outside graphs.")] = False,
) -> None:
    """Count the kernel launches of decoding rounds, on a simulated GPU."""
    rows: dict[str, dict[str, float]] = {}
    table = Table("round", "kernels", "outside graphs", "copies", "reads", "captures")
    for name, scenario in SCENARIOS.items():
        with SimulatedGPU() as gpu:
            rounds = list(islice(count_rounds(scenario, gpu, not eager), WARM_UP + ROUNDS))
        timed = rounds[WARM_UP:]
        row = {
            "round": median(each.total for each in timed),
            "outside_graphs": median(each.outside_graphs for each in timed),
            "copies": median(each.copies for each in timed),
            "reads": median(each.reads for each in timed),
            "captures": sum(each.captures for each in rounds),
        }
        rows[name] = row
        table.add_row(name, *(f"{value:g}" for value in row.values()))
        if show:
            Console().print(name, timed[-1].launches.most_common())
    moved = Table("running batch", "rows copied", "kernels")
    for name, scenario in MOVES.items():
        with SimulatedGPU() as gpu:
            for move, counts in count_moves(scenario, gpu).items():
                rows[f"{name}, one {move}"] = counts
                moved.add_row(f"{name}, one {move}", *(f"{value:.3g}" for value in counts.values()))
    layers = {name: (count_layer(make, is_fused=False), count_layer(make)) for name, make in FAMILIES.items()}
    of_layers = Table("layer of a captured target", "launches of its modules", "fused")
    for name, counted in layers.items():
        of_layers.add_row(name, *map(str, counted))
    running = Table(
        "running batch, 8 rows", "kernels", "outside graphs", "copies", "reads", "captures", "enters"
    )
    for name, scenario in RUNNING.items():
        with SimulatedGPU() as gpu:
            rows[f"running {name}"] = counts = count_running(scenario, gpu, not eager)
        running.add_row(name, *(f"{value:g}" for value in counts.values()))
    joining = Table("8 short prompts at once", "forward passes", "kernels", "reads", "captures")
    for name in ("none", "EAGLE-3, 59 nodes"):
        with SimulatedGPU() as gpu:
            rows[f"joining {name}"] = counts = count_joining(RUNNING[name], gpu, not eager)
        joining.add_row(name, *(f"{value:g}" for value in counts.values()))
    if as_json:
        fused = {name: dict(zip(("modules", "fused"), each, strict=True)) for name, each in layers.items()}
        print(json.dumps({**rows, "layers": fused}, indent=1))
    else:
        Console().print(table, moved, running, joining, of_layers)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
