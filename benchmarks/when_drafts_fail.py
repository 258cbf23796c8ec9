r"""Signs that tell beforehand whether a drafter is right, at every place of plain decoding.

Printed is the area under each one's ROC curve (0.5 tells nothing, 1.0 all): of the drafter's own probability,
of its entropy, of how often it was right of late (what `length=auto` goes by where a drafter rates nothing),
of the target's attention to visual tokens one place before and at the place itself (ViSkip, 2603.14989;
the mean of all layers, and the layer that turns out best), and of logistic regressions, five folds over
prompts: of probability and attention of all layers, and of a trained stop model (2409.10644), which reads
probability, entropy and the drafter's hidden state.

    python -m benchmarks.when_drafts_fail assets/scenes-llava --accelerators draft_model,eagle
    python -m benchmarks.when_drafts_fail runs/smollm2 --prompts runs/spec_bench.jsonl \
        --accelerators eagle:drafter=runs/heads/eagle
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Annotated, Any

import rich
import torch
import typer
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, pad

from mmspec import MMSpecPipeline
from mmspec.cli.choice import parse_choices
from mmspec.core.canvas import Canvas
from mmspec.core.draft import Tree
from mmspec.core.interfaces import DraftSession
from mmspec.core.session import PromptBatch, SessionDrafter
from mmspec.evaluation.contenders import decode_conversations
from mmspec.evaluation.examples import scene_examples
from mmspec.evaluation.prompt_files import read_prompt_file
from mmspec.evaluation.tables import figures
from mmspec.trees.pacing import DEFAULT_PACING
from mmspec.visual_tokens.spans import find_images

FOLDS, RIDGE = 5, 100.0
OF_DRAFTER, OF_IMAGES = (
    ["probability", "entropy", "of late"],
    ["mass before", "its layer", "mass at", "its layer"],
)


class Watched(SessionDrafter, DraftSession):
    """Lets a drafter draft in every round, keeps what its first pass says, and proposes nothing."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.kind, self.max_nodes, self.taps = inner, inner.kind, inner.max_nodes, inner.taps
        self.places: list[tuple[Tensor, Tensor]] = []  # hidden state [d] and logits [V']
        self.is_head = not hasattr(inner.model, "score_nodes")
        if self.is_head:
            own = inner.model.logits
            inner.model.logits = lambda states, read_out: self.keep(states, own(states, read_out))
        else:
            output = inner.model.model.get_output_embeddings()
            output.register_forward_hook(lambda _, given, logits: self.keep(given[0], logits))

    def keep(self, states: Tensor, logits: Tensor) -> Tensor:
        at = 0 if self.is_head else -1  # the nearest of several heads; the newest of several tokens
        self.seen = self.seen or (states.flatten(0, -2)[at], logits.flatten(0, -2)[at])
        return logits

    def session(self, _: Any, batch: PromptBatch) -> DraftSession:  # type: ignore[override]
        self.seen: Any = None
        self.prompt = batch.requests[0].inputs
        self.running = self.inner.start(batch.requests, batch.prefill, batch.sampler, batch.random)
        self.places = []
        return self

    def attach(self, state: Any) -> None:
        self.running.attach(state)

    def propose(self, canvas: Canvas) -> Tree:
        self.seen = None
        self.running.propose(canvas)
        self.places.append(self.seen)
        return Tree.chain(canvas.root[:, None], self.kind)

    def observe(self, *what: Any) -> None:
        self.running.observe(*what)


def attention_to_images(model: Any, prompt: dict[str, Tensor], reply: list[int]) -> Tensor:
    """[n, layers] attention to visual tokens, mean of heads, where each token of a reply is chosen."""
    ids = torch.cat([prompt["input_ids"], torch.tensor([reply])], 1)
    kinds = {
        name: pad(value, (0, len(reply))) for name, value in prompt.items() if name == "mm_token_type_ids"
    }
    inputs = {**prompt, **kinds, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    maps = model(**inputs, output_attentions=True, use_cache=False).attentions
    shown = [place for span in find_images(model.config, prompt) for place in range(span.start, span.stop)]
    first = prompt["input_ids"].shape[1] - 1
    return torch.stack([each[0, :, first:-1, shown].sum(-1).mean(0) for each in maps], 1)


def auc(sign: Tensor, right: Tensor) -> float:
    """Share of pairs of a right and a wrong place in which the right one has the larger sign; ties half."""
    good, bad = sign[right].double(), sign[~right].double()
    return float((good[:, None] > bad).double().mean() + (good[:, None] == bad).double().mean() / 2)


@torch.enable_grad()
def fitted(x: Tensor, right: Tensor) -> Tensor:
    """Weights [k] of a logistic regression on signs [n, k], of which the first is 1."""
    weights = torch.zeros(x.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        misfit = binary_cross_entropy_with_logits(x @ weights, right.float(), reduction="sum")
        total = misfit + RIDGE * weights[1:].square().sum()
        total.backward()
        return total

    optimizer.step(loss)
    return weights.detach()


def regressed(signs: Tensor, right: Tensor, prompts: Tensor) -> Tensor:
    """Logits [n] of logistic regressions on signs [n, k], each fitted on the other folds of prompts."""
    told = torch.zeros(len(right))
    for fold in range(FOLDS):
        held = prompts % FOLDS == fold
        mean, std = signs[~held].mean(0), signs[~held].std(0).clamp_min(1e-6)
        x = pad((signs - mean) / std, (1, 0), value=1.0)
        told[held] = x[held] @ fitted(x[~held], right[~held])
    return told


@torch.no_grad()
def record(pipe: Any, watched: Watched, examples: list[Any], tokens: int) -> dict[str, Tensor]:
    """The signs at all places of the replies but the first."""
    reading = copy.deepcopy(pipe.model)
    reading.set_attn_implementation("eager")
    names = getattr(watched.inner.model, "draft_tokens", None)
    parts: dict[str, list[Tensor]] = {name: [] for name in ("hidden", "logits", "right", "late", "prompt")}
    masses = []
    for index, example in enumerate(examples):
        one = replace(example, turns=example.turns[:1])
        reply = decode_conversations(pipe, [one], max_new_tokens=tokens, temperature=0.0).tokens[0]
        hidden, logits = (
            torch.stack(each).float() for each in zip(*watched.places[: len(reply) - 1], strict=True)
        )
        guess = logits.argmax(-1) if names is None else names[logits.argmax(-1)]
        right, late, decay = guess == torch.tensor(reply[1:]), [0.5], DEFAULT_PACING.decay
        for each in right[:-1].tolist():
            late.append(decay * late[-1] + (1 - decay) * each)
        found = hidden, logits, right, torch.tensor(late), torch.full_like(guess, index)
        for part, values in zip(parts.values(), found, strict=True):
            part.append(values)
        if find_images(reading.config, watched.prompt):
            mass = attention_to_images(reading, dict(watched.prompt), reply)
            masses.append(torch.stack([mass[:-1], mass[1:]]))
    joined = {name: torch.cat(values) for name, values in parts.items()}
    return joined | ({"mass": torch.cat(masses, 1)} if masses else {})


def areas(found: dict[str, Tensor]) -> list[str]:
    """Areas under the curves of all signs, in words; of the reasons to stop, the area of not having them."""
    right, prompts, log_p = found["right"], found["prompt"], found["logits"].log_softmax(-1)
    p, entropy = log_p.amax(-1), -(log_p.exp() * log_p).nansum(-1)
    told = [auc(p, right), auc(-entropy, right), auc(found["late"], right)]
    if "mass" in found:
        for mass in found["mass"]:
            layers = [auc(-layer, right) for layer in mass.T]
            told += [auc(-mass.mean(-1), right), max(layers, key=lambda area: abs(area - 0.5))]
        told.append(auc(regressed(torch.cat([p[:, None], *found["mass"]], 1), right, prompts), right))
    signs = torch.cat([p[:, None], entropy[:, None], found["hidden"]], 1)
    told.append(auc(regressed(signs, right, prompts), right))
    return [f"{len(right)}", f"{float(right.float().mean()):.1%}", *(f"{area:.3f}" for area in told)]


def main(
    model: Annotated[str, typer.Argument(help="Folder of the target.")],
    accelerators: Annotated[str, typer.Option(help="Drafters, as of mmspec bench.")] = "draft_model",
    tasks: Annotated[str, typer.Option(help="Of scenes, without --prompts.")] = "describe,question",
    prompts: Annotated[str | None, typer.Option(help="A file of prompts.")] = None,
    samples: Annotated[int, typer.Option(min=FOLDS, help="Prompts of each task.")] = 40,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest reply.")] = 128,
) -> None:
    """Print a row for each drafter and task."""
    torch.manual_seed(0)
    pipe = MMSpecPipeline.from_pretrained(model, accelerator="none")
    sets = (
        {task: scene_examples(task, samples) for task in tasks.split(",")}
        if prompts is None
        else {"file": read_prompt_file(prompts, samples, evenly=True)}
    )
    rows, heads = [], [*OF_DRAFTER, *OF_IMAGES, "p + mass", "stop model"]
    for choice in parse_choices(accelerators):
        pipe.set_accelerator(choice.name, **choice.options)
        watched = Watched(pipe.accelerator.drafter)
        pipe.accelerator = replace(pipe.accelerator, drafter=watched, length="fixed")
        for task, examples in sets.items():
            found = areas(record(pipe, watched, examples, max_new_tokens))
            heads = heads if len(found) == 2 + len(heads) else [*OF_DRAFTER, "stop model"]
            rows.append((choice.label, task, *found))
    rich.print(figures(("drafter", "task", "places", "right", *heads), rows, words=2))


if __name__ == "__main__":
    typer.run(main)
