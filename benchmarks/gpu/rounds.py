"""Time of a round of the loop: a draft of so many nodes behind so many tokens, beside its floor.

Weights may be random: a round takes as long whatever its tokens are, and random drafts are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.ceilings import Cost
from mmspec.accelerator import pair
from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.draft import Draft, DraftKind, Tree
from mmspec.core.interfaces import Drafter, DraftSession, PromptOutput, Request
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.core.statistics import timed_by_device
from mmspec.targets.memory import cached_bytes

__all__ = ["RoundShape", "RoundTime", "cost_of_round", "measure_round", "random_requests"]

LAUNCHING = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")  # calls, by how their names begin
SAMPLER = Sampler(temperature=1.0)  # a random model repeats itself under greedy decoding, and drafts with it


@dataclass(frozen=True)
class RoundShape:
    """Size of a round: rows, nodes of each one's draft (root included), and tokens before them."""

    batch: int = 1
    nodes: int = 1
    context: int = 256


@dataclass(frozen=True)
class RoundTime:
    """Seconds of a round, and of its parts: median of the whole, means of the parts."""

    seconds: float
    target: float
    draft: float
    verify: float
    launches: float | None = None  # of kernels and graphs, a round; None off CUDA

    @property
    def rest(self) -> float:
        """Seconds outside the three parts: the loop, the canvas, and waiting for the device."""
        return max(0.0, self.seconds - self.target - self.draft - self.verify)


class FixedDrafter(Drafter, DraftSession):
    """Proposes a tree of the same random tokens in every round.

    Args:
        nodes: of a draft, its root included.
        vocabulary: V of the target.
        children: of every node; 1 for a chain.
    """

    runs_ahead = True

    def __init__(self, nodes: int, vocabulary: int, children: int = 1) -> None:
        self.max_nodes, self.children, self.branches = nodes, children, children > 1
        self.kind = DraftKind.COUPLED if self.branches else DraftKind.POINT
        self.vocabulary = vocabulary

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: Sampler, random: RandomStream
    ) -> DraftSession:
        noise = torch.Generator().manual_seed(0)
        shape = len(requests), self.max_nodes - 1
        tokens = torch.randint(self.vocabulary, shape, generator=noise)
        self.tokens = tokens.to(prefill.logits.device)
        return self

    def propose(self, canvas: Canvas) -> Draft:
        chain = Tree.chain(torch.cat([canvas.root[:, None], self.tokens], 1), self.kind)
        if not self.branches:
            return chain
        order = torch.arange(self.max_nodes, device=self.tokens.device)
        parents = ((order - 1).clamp_min(0) // self.children).expand_as(chain.parents)
        depth = math.ceil(math.log(self.max_nodes * (self.children - 1) + 1, self.children)) - 1
        return replace(chain, parents=parents, max_depth=depth, max_children=self.children)


def random_requests(target: Any, shape: RoundShape) -> list[Request]:
    """Prompts of random tokens; of a LlamaGen, a class and a part of the image, and a negative prompt."""
    noise = torch.Generator().manual_seed(1)
    rows = torch.randint(target.vocabulary, (shape.batch, 1, shape.context), generator=noise)
    if target.grid is None:
        return [Request({"input_ids": row}) for row in rows]
    places = torch.arange(shape.context)[None]
    config = target.config
    made = []
    for row in rows:
        prompts = []
        for label in (0, config.num_classes):
            prompt = row.clone()
            prompt[0, 0] = config.vocab_size + label
            prompts.append({"input_ids": prompt, "position_ids": places})
        made.append(Request(prompts[0], negative_inputs=prompts[1], layout=target.grid))
    return made


def measure_round(
    target: Any,
    shape: RoundShape,
    *,
    rounds: int = 10,
    sampler: Sampler = SAMPLER,
    warm_up: int = 2,
    drafter: Drafter | None = None,
) -> RoundTime:
    """Time rounds of the loop, the host's work included; prefill is not timed.

    Args:
        target: of a model of any weights.
        shape: of every round.
        rounds: that are timed, after a call of `warm_up` rounds, in which kernels are compiled.
        sampler: as of `speculate`.
        drafter: of as many nodes as the shape says; None proposes random tokens, at no cost.
    """
    requests = random_requests(target, shape)
    drafter = drafter or FixedDrafter(shape.nodes, target.vocabulary)
    for _ in _rounds(target, drafter, requests, warm_up, sampler):
        pass
    with timed_by_device():
        times = list(_rounds(target, drafter, requests, rounds, sampler))
    stats = times.pop()
    forwards = stats.target_forwards - 1
    parts = (stats.target_seconds, stats.draft_seconds, stats.verify_seconds)
    launches = count_launches(target, drafter, requests, sampler) if target.device.type == "cuda" else None
    return RoundTime(median(times), *(part / forwards for part in parts), launches=launches)


def count_launches(target: Any, drafter: Drafter, requests: list[Request], sampler: Sampler) -> float:
    """Launches of kernels and graphs by the host in a round, as torch.profiler counts them."""
    rounds = _rounds(target, drafter, requests, 8, sampler)
    for _ in islice(rounds, 3):  # the prefill, and what runs once
        pass
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in islice(rounds, 4):
            pass
    counts = [event.count for event in seen.key_averages() if event.key.startswith(LAUNCHING)]
    return float(sum(counts)) / 4


def _rounds(
    target: Any, drafter: Drafter, requests: list[Request], count: int, sampler: Sampler
) -> Iterator[Any]:
    """Seconds of each round of one call, and its statistics at the end."""
    accelerator = pair("timed", drafter).with_length("fixed").fit(target)
    random = RandomStream.from_seed(0, len(requests), target.device)
    is_refused = isinstance(drafter, FixedDrafter)
    most = (count + 1) * (1 if is_refused else drafter.max_nodes)
    call = accelerator.call(target, sampler, requests, Stopping(most), random)
    started = None
    for _ in islice(call.rounds(), count + 1):
        now = perf_counter()
        if started is not None:
            yield now - started
        started = perf_counter()
    yield call.stats


def cost_of_round(target: Any, shape: RoundShape, guided: bool = False) -> dict[str, Cost]:
    """Floor of a round: what the target and what the verification must move and compute at least.

    target: every weight once (of the embedding table only the rows of the tokens), keys and values of the
    context once, those of the nodes written; two operations for each weight and token, and the products of
    attention. verify: logits are written once and read once.
    """
    model = target.model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    weights: dict[int, Tensor] = {id(one): one for one in model.get_decoder().parameters()}
    if embedding is not None:
        weights.pop(id(embedding.weight), None)
    if head is not None:
        weights[id(head.weight)] = head.weight
    text = model.config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    rows = shape.batch * (2 if guided else 1)
    tokens, seen = rows * shape.nodes, shape.context + shape.nodes
    cached = rows * cached_bytes(model.config, model.dtype)
    count = sum(one.numel() for one in weights.values())
    return {
        "target": Cost(
            sum(one.nbytes for one in weights.values()) + cached * (seen + shape.nodes),
            2 * count * tokens + 4 * text.num_hidden_layers * tokens * seen * heads * width,
        ),
        "verify": Cost(2 * tokens * target.vocabulary * model.dtype.itemsize),
    }
