"""Time of a round of the loop, by batch size, nodes and context, and its lower bound.

The weights may be random: the time of a round does not depend on its tokens, and random drafts are rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

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

SAMPLER = Sampler(temperature=1.0)  # with greedy decoding, a random model repeats itself and accepts drafts


@dataclass(frozen=True)
class RoundShape:
    """Size of a round: rows, nodes of each row's draft (root included), and tokens before the draft."""

    batch: int = 1
    nodes: int = 1
    context: int = 256


@dataclass(frozen=True)
class RoundTime:
    """Median seconds of a round, and mean seconds of its parts."""

    seconds: float
    target: float
    draft: float
    verify: float

    @property
    def rest(self) -> float:
        """Seconds outside the three parts: for the loop, the canvas, and waiting for the device."""
        return max(0.0, self.seconds - self.target - self.draft - self.verify)


class FixedDrafter(Drafter, DraftSession):
    """Proposes a chain of the same random tokens in every round.

    Args:
        nodes: nodes of a draft, root included.
        vocabulary: vocabulary size of the target.
    """

    kind = DraftKind.POINT
    runs_ahead = True

    def __init__(self, nodes: int, vocabulary: int) -> None:
        self.max_nodes = nodes
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
        return Tree.chain(torch.cat([canvas.root[:, None], self.tokens], 1), self.kind)


def random_requests(target: Any, shape: RoundShape) -> list[Request]:
    """Make prompts of random tokens; for a LlamaGen, of a class and image tokens, with negative prompts."""
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
    """Time rounds of the loop, including the work of the host but not the prefill.

    Args:
        target: a target with any weights.
        shape: size of every round.
        rounds: number of timed rounds.
        sampler: the sampler of the call.
        warm_up: rounds of a call before, in which kernels are compiled.
        drafter: a drafter with as many nodes as the shape; None for random tokens, which cost no time.
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
    return RoundTime(median(times), *(part / forwards for part in parts))


def _rounds(
    target: Any, drafter: Drafter, requests: list[Request], count: int, sampler: Sampler
) -> Iterator[Any]:
    """Yield the seconds of each round of one call, then its statistics."""
    accelerator = pair("timed", drafter).fit(target)
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
    """Return the least work of a round, by part.

    Returns:
        - `target`: each weight is read once, except for the embedding table. The keys and values of the
          context are read, and those of the nodes are written. Each weight has two operations per token;
          the products of attention are added.
        - `verify`: logits are written once and read once.
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
