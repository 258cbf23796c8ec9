r"""Times of text accelerators without noise: replies decoded again on a clock that forwards do not disturb.

What the target computed of a prompt and of its own greedy reply is recorded, and decoding reads it there:
loop, drafters and cost models run as they always do, and all but the target's forwards counts for as long as
it takes. A forward counts for what one of so many nodes takes, the reading of a prompt for what its tokens
take: medians, measured before anything is decoded. So every forward of a kind takes equally long, and an
accelerator decodes sixty questions in a minute. In place of a forward memory of the size of a last cache is
read, since behind a real one the weights of a head are not cached either.

Cost models know nothing at first, and learn from one question to the next; their first rounds count. Drafts
of `ppd` come from the target's own forwards, and cannot be replayed.

    python -m benchmarks.replay runs/smollm2 runs/spec_bench.jsonl --accelerators copy,mtp
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import rich
import torch
import typer
from torch import Tensor
from tqdm import tqdm

from mmspec import MMSpecPipeline
from mmspec.cli.choice import parse_choices
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.interfaces import PromptOutput, TargetOutput, TargetState
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.evaluation.contenders import Contender, contender, decode_conversations
from mmspec.evaluation.examples import Example
from mmspec.evaluation.machine import environment
from mmspec.evaluation.prompt_files import read_prompt_file
from mmspec.evaluation.speed.record import Record, as_json, summarise
from mmspec.evaluation.speed.timing import BASELINE, TimedRun, batches_of
from mmspec.evaluation.tables import figures
from mmspec.models import linear_layers
from mmspec.trees.pacing import PacedDrafter

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # nodes of the forwards that are measured
PASSES = 15  # of each size
TOGETHER = 10  # prompts whose replies are written in a batch
MEASURED = 20  # prompts whose reading is timed
LAST_CACHE = 64 * 2**20  # bytes, which is more than a last-level cache of one such machine has


@dataclass(frozen=True)
class Costs:
    """Seconds of the target's forwards on this machine.

    Attributes:
        scores: of a forward by its nodes, for `SIZES`.
        token: of a token of a prompt.
    """

    scores: Mapping[int, float]
    token: float

    def score(self, nodes: int) -> float:
        """Seconds of a forward of so many nodes."""
        return float(np.interp(nodes, list(self.scores), list(self.scores.values())))


@dataclass(frozen=True)
class Recording:
    """What the target computed of a prompt and its reply.

    Attributes:
        prompt: the target's keyword arguments, with `input_ids` [1, L].
        reply: its n tokens, and the end of the text behind them if it ended.
        taps: layer -> [1, L + n, d] hidden states.
    """

    prompt: Mapping[str, Tensor]
    reply: list[int]
    taps: dict[int, Tensor]

    @property
    def prompt_length(self) -> int:
        """L, in tokens."""
        return self.prompt["input_ids"].shape[1]


@dataclass
class ReplayState(TargetState):
    """How many tokens of the reply are committed: all that were emitted but the newest."""

    recording: Recording
    committed: int = 0

    def tighten(self, emitted: Sequence[int]) -> None:
        (count,) = emitted
        self.committed = count - 1


class Replay:
    """Plays recordings in place of a target's forwards, and is the clock on which they take what they cost.

    Args:
        target: whose methods are replaced; batches of one row, greedy.
        costs: of its forwards.
    """

    def __init__(self, target: Any, costs: Costs) -> None:
        self.costs, self.vocabulary, self.recording = costs, target.vocabulary, Recording({}, [], {})
        self._ahead = 0.0  # seconds that this clock is ahead of the real one
        self._evicting = torch.zeros(LAST_CACHE // 4)
        target.prefill, target.score, target.commit = self.prefill, self.score, self.commit

    def __call__(self) -> float:
        return perf_counter() + self._ahead

    @contextmanager
    def _taking(self, seconds: float) -> Iterator[None]:
        begun = perf_counter()
        yield
        self._evicting.sum()
        self._ahead += seconds - (perf_counter() - begun)

    def prefill(
        self, prompts: Sequence[Any], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[ReplayState, PromptOutput]:
        length = self.recording.prompt_length
        with self._taking(length * self.costs.token):
            read = {tap: [self.recording.taps[tap][:, :length]] for tap in taps}
            return ReplayState(self.recording), PromptOutput(self._certain([self.recording.reply[0]]), read)

    def score(self, state: ReplayState, draft: Tree) -> TargetOutput:
        with self._taking(self.costs.score(draft.tokens.shape[1])):
            reply, prompt = state.recording.reply, state.recording.prompt_length
            tokens, parents = draft.tokens[0].tolist(), draft.parents[0].tolist()
            places = [state.committed]  # in the reply, of each node
            on_path = [True]
            for node, parent in list(enumerate(parents))[1:]:
                places.append(min(places[parent] + 1, len(reply)))
                on_path.append(on_path[parent] and tokens[node : node + 1] == reply[places[node] :][:1])
            # what would follow another text is never asked for, nor what follows the end of this one
            following = [
                (reply[place + 1 :] or [0])[0] if on else 0 for place, on in zip(places, on_path, strict=True)
            ]
            index = torch.tensor(places).clamp_max(len(reply) - 1) + prompt
            taps = {tap: states[:, index] for tap, states in state.recording.taps.items()}
            return TargetOutput(self._certain(following), taps)

    def commit(self, *_: Any) -> None:
        """Nothing: `ReplayState.tighten` is told how many tokens were emitted."""

    def _certain(self, tokens: Sequence[int]) -> Tensor:
        """[1, n, V] logits that choose these tokens."""
        logits = torch.zeros(1, len(tokens), self.vocabulary)
        logits[0, range(len(tokens)), tokens] = 1.0
        return logits


@torch.inference_mode()
def measure_costs(target: Any, prompts: Sequence[Mapping[str, Tensor]], largest: int) -> Costs:
    """Measure the target's forwards behind the middle one of some prompts, all sizes in turns."""
    rates, middle = [], sorted(prompts, key=lambda each: each["input_ids"].shape[1])[len(prompts) // 2]
    for prompt in prompts:
        begun = perf_counter()
        target.prefill([prompt], prompt["input_ids"].shape[1])[0].close()
        rates.append((perf_counter() - begun) / prompt["input_ids"].shape[1])
    sizes = [size for index, size in enumerate(SIZES) if index < 2 or SIZES[index - 1] < largest]
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    state, _ = target.prefill([middle], middle["input_ids"].shape[1] + max(sizes) + 1)
    token = middle["input_ids"][:, -1:]
    for _ in tqdm(range(PASSES), desc="forwards", unit="pass"):
        for size in random.sample(sizes, len(sizes)):
            draft = Tree.chain(token.expand(1, size), DraftKind.POINT)
            begun = perf_counter()
            target.score(state, draft)
            seconds[size].append(perf_counter() - begun)
    state.close()
    return Costs({size: median(found) for size, found in seconds.items()}, median(rates))


class Prompts:
    """Notes the prompts that a target is given."""

    def __init__(self, target: Any) -> None:
        self.seen = list[Mapping[str, Tensor]]()
        self._prefill: Callable[..., Any] = target.prefill
        target.prefill = self

    def __call__(self, prompts: Sequence[Mapping[str, Tensor]], *how: Any) -> Any:
        self.seen += prompts
        return self._prefill(prompts, *how)


def record_replies(
    pipe: Any, examples: Sequence[Example], max_new_tokens: int, taps: Sequence[int]
) -> list[Recording]:
    """Write the replies of plain decoding, and record what the target computes of prompts and replies."""
    prompts, replies = Prompts(pipe.target), list[list[int]]()
    ends = pipe.model.generation_config.eos_token_id
    end = ends[0] if isinstance(ends, list) else ends
    for start in tqdm(range(0, len(examples), TOGETHER), desc="replies", unit="batch"):
        batch = examples[start : start + TOGETHER]
        told = decode_conversations(pipe, batch, max_new_tokens=max_new_tokens, temperature=0.0)
        for reply in told.tokens:
            ended = len(reply) < max_new_tokens and reply[-1:] != [end]
            replies.append([*reply, end] if ended else reply)
    del pipe.target.prefill
    both = tqdm(list(zip(prompts.seen, replies, strict=True)), desc="recorded", unit="reply")
    return [record(pipe.target, prompt, reply, taps) for prompt, reply in both]


@torch.inference_mode()
def record(target: Any, prompt: Mapping[str, Tensor], reply: list[int], taps: Sequence[int]) -> Recording:
    """Record what the target computes of a prompt and its reply."""
    ids = torch.cat([prompt["input_ids"], torch.tensor([reply])], 1)
    state, output = target.prefill([{"input_ids": ids}], ids.shape[1], taps)
    state.close()
    return Recording(prompt, reply, {tap: states[0] for tap, states in output.taps.items()})


def paced(one: Contender, clock: Callable[[], float]) -> Contender:
    """The contender with its drafts chosen by cost on another clock, where they are."""
    accelerator = one.accelerator
    if not accelerator.is_paced(Sampler(temperature=0.0), one.pipe.device):
        return one
    drafter = PacedDrafter(accelerator.drafter, accelerator.costs, clock)
    return replace(one, accelerator=replace(accelerator, drafter=drafter, length="fixed"))


def main(
    model: Annotated[str, typer.Argument(help="Folder of the target, a language model.")],
    prompts: Annotated[Path, typer.Argument(help="A file of prompts; the first turn of each is asked.")],
    accelerators: Annotated[str, typer.Option(help="As of mmspec bench.")] = "copy",
    samples: Annotated[int, typer.Option(min=1, help="Prompts, equally many of each category.")] = 60,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest reply.")] = 64,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    as_torch: Annotated[
        bool,
        typer.Option(
            "--as-torch", help="Compute linear layers as torch does (mmspec/models/linear_layers.py)."
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="JSON file to write, as of mmspec bench --out.")] = None,
) -> None:
    """Print the tokens a forward of each accelerator, and its speed-up over plain decoding by category."""
    if threads is not None:
        torch.set_num_threads(threads)
    if as_torch:
        linear_layers.fastest = lambda *_: linear_layers.Way.TORCH  # type: ignore[assignment]
    pipe: Any = MMSpecPipeline.from_pretrained(model, accelerator="none")
    choices = [one for one in parse_choices(accelerators) if one.name != BASELINE]
    contenders = {BASELINE: contender(pipe, BASELINE)}
    for choice in choices:
        made = contender(pipe, choice.name, **choice.options)
        if made.accelerator.drafter.probes_of(0):
            allowed = "one whose drafts the target's own forwards do not make"
            raise InputError("--accelerators", choice.label, allowed)
        contenders[choice.label] = made
    read = [replace(one, turns=one.turns[:1]) for one in read_prompt_file(prompts, samples, evenly=True)]
    examples = [one for batch in batches_of(read, 1) for one in batch]
    taps = sorted({tap for one in contenders.values() for tap in one.accelerator.drafter.taps})
    largest = max(one.accelerator.drafter.max_nodes for one in contenders.values())
    contenders[BASELINE].enter()
    recordings = record_replies(pipe, examples, max_new_tokens, taps)
    with pipe.target.computing()():
        costs = measure_costs(pipe.target, [each.prompt for each in recordings[:MEASURED]], largest)
    clock = Replay(pipe.target, costs)
    runs = list(replayed(contenders, examples, recordings, clock, max_new_tokens))
    settings = {
        "model": model,
        "task": str(prompts),
        "max_new_tokens": max_new_tokens,
        "as_torch": as_torch,
        **environment(pipe.device, pipe.dtype),
        "seconds_by_nodes": dict(costs.scores),
        "seconds_by_prompt_token": costs.token,
    }
    labels, categories = list(contenders), list(dict.fromkeys(one.category for one in examples))
    records = [
        one
        for name in (None, *categories)
        for one in summarise(runs, labels, category=name, settings=settings)
    ]
    rich.print(shown(records, labels, categories))
    rich.print({nodes: f"{seconds / costs.score(1):.2f}" for nodes, seconds in costs.scores.items()})
    if out is not None:
        out.write_text(json.dumps(as_json(records), indent=1) + "\n", encoding="utf-8")


def replayed(
    contenders: Mapping[str, Contender],
    examples: Sequence[Example],
    recordings: Sequence[Recording],
    clock: Replay,
    max_new_tokens: int,
) -> Iterator[TimedRun]:
    """Decode each recorded reply again with every accelerator."""
    contenders = {label: paced(one, clock) for label, one in contenders.items()}
    batches = list(zip(batches_of(examples, 1), recordings, strict=True))
    for index, (batch, clock.recording) in enumerate(tqdm(batches, desc="replayed", unit="reply")):
        for label, one in contenders.items():
            begun = clock()
            decoded = decode_conversations(one.enter(), batch, max_new_tokens=max_new_tokens, temperature=0.0)
            yield TimedRun(label, 0, index, batch[0].category, clock() - begun, decoded)


def shown(records: Sequence[Record], labels: Sequence[str], categories: Sequence[str]) -> Any:
    """A table of the records: tokens a forward, the median prompt's speed-up, and those by category."""
    found = {(one.accelerator, one.category): one for one in records}

    def ratio(label: str, category: str) -> str:
        paired = found[label, category].over_plain
        return "-" if paired is None else f"{paired['median']:.3f}x"

    rows = [
        (
            label,
            f"{found[label, ''].identical:.0%}",
            f"{found[label, ''].acceptance_length:.2f}",
            ratio(label, ""),
            f"{found[label, ''].speedup:.3f}x",
            f"{found[label, ''].time['draft']:.1%}",
            *(ratio(label, category) for category in categories),
        )
        for label in labels
    ]
    columns = ("accelerator", "identical", "tokens", "median", "all", "drafting", *categories)
    return figures(columns, rows)


if __name__ == "__main__":
    typer.run(main)
