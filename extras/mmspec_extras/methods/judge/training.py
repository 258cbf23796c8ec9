"""Training of a judge of draft tokens, with labels that the target makes itself (AutoJudge, 2504.20039).

Where a draft differs from the target's greedy reply, the draft token is inserted and the target finishes the
reply. The token is harmful if the answer changes. AutoJudge continues from harmless tokens, and also reads
states of the draft model; here every label is for the plain reply with one token changed.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

from mmspec.accelerator import Accelerator
from mmspec.core import verdict
from mmspec.core.canvas import Canvas
from mmspec.core.distributions import Scores
from mmspec.core.draft import Draft, DraftKind, Tree
from mmspec.core.indexing import take
from mmspec.core.interfaces import (
    AcceptanceRule,
    Drafter,
    DraftSession,
    PromptOutput,
    Request,
    TargetOutput,
)
from mmspec.core.promise import Level
from mmspec.core.random_stream import RandomStream
from mmspec.errors import InputError
from mmspec.registry import require_known
from mmspec.training.record import write_record
from mmspec.trees.matching import SampleAndMatch
from mmspec_extras.methods.judge.head import JudgeHead, JudgeHeadConfig
from mmspec_extras.methods.judge.rule import FINAL

ANSWERS = ("auto", "number", "words")
FOLDS = 5  # of the prompts; a judge that was trained on the others predicts each


def agreement(plain: str, other: str, answer: str) -> float:
    """Return the agreement of two texts, 0 to 1: equal last numbers (0 or 1), or shared words (F1).

    Args:
        plain, other: the texts; two empty texts agree.
        answer: "number" or "words".
    """
    if answer == "number":
        first, second = (re.findall(r"\d+(?:\.\d+)?", text.replace(",", ""))[-1:] for text in (plain, other))
        return float(first == second)
    first, second = (re.findall(r"\w+", text.lower()) for text in (plain, other))
    shared = (Counter(first) & Counter(second)).total()
    return 2 * shared / (len(first) + len(second)) if first or second else 1.0


@dataclass(frozen=True)
class Watch(SampleAndMatch):
    """Decodes one row as the target does alone, and records the rejected candidates.

    Attributes:
        seen: output index and token of the first rejected candidate of every round that has one.
    """

    seen: list[tuple[int, int]] = field(default_factory=list, compare=False)

    def verify(self, draft: Tree, scores: Any, random: RandomStream, emitted: Tensor) -> verdict.Path:
        path = super().verify(draft, scores, random, emitted)
        if draft.max_children:
            child = int(take(draft.children, path.last)[0, 0])
            if child >= 0:
                self.seen.append((int(emitted[0] + path.accepted[0]), int(draft.tokens[0, child])))
        return path


class Given(Drafter, DraftSession):
    """Drafts the given tokens of each row once, after its first token, and then nothing."""

    kind = DraftKind.POINT

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.rows: list[Tensor] = [torch.tensor(row) for row in rows]
        self.max_nodes = 1 + max(map(len, rows))

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: Any, random: RandomStream
    ) -> DraftSession:
        return self

    def propose(self, canvas: Canvas) -> Draft:
        root, rows, self.rows = canvas.root[:, None], self.rows, []
        if not rows:
            return Tree.chain(root, self.kind)
        tokens = torch.cat([root, pad_sequence(rows, batch_first=True).to(root)], 1)
        lengths = torch.tensor([[len(row)] for row in rows])
        valid = (torch.arange(tokens.shape[1]) <= lengths).to(root.device)
        return Tree.chain(tokens, self.kind, valid=valid)


@dataclass(frozen=True)
class Forced(AcceptanceRule):
    """Accepts every draft, and continues greedily.

    Attributes:
        states: [B, d] the target's final hidden states at the last candidate of each draft.
    """

    states: list[Tensor] = field(default_factory=list, compare=False)

    sound_for = frozenset(DraftKind)
    exactness = Level.LOSSY
    taps = (FINAL,)

    def decide(
        self, draft: Draft, output: TargetOutput, scores: Scores, random: RandomStream, first: Tensor
    ) -> tuple[verdict.Verdict, verdict.Measured]:
        lanes = draft.lanes
        if lanes.max_depth:
            self.states.append(take(output.taps[FINAL], lanes.deepest(lanes.valid)))
        return super().decide(draft, output, scores, random, first)

    def verify(self, draft: Tree, scores: Scores, random: RandomStream, emitted: Tensor) -> verdict.Path:
        node = draft.deepest(draft.valid)
        return verdict.Path.at(draft, node, take(scores.logits.argmax(-1), node))


class Label(NamedTuple):
    """A draft token that was inserted into a reply.

    Attributes:
        place: of the reply.
        token: its id.
        agreement: of the two replies.
        state: [d] the target's final hidden state at the token.
    """

    place: int
    token: int
    agreement: float
    state: Tensor


def label_prompt(
    pipe: Any, call: dict[str, Any], drafts: Accelerator, chosen: random.Random, most: int, answer: str
) -> list[Label]:
    """Label draft tokens that the target rejects in its greedy reply to a prompt; each is inserted once.

    Args:
        pipe: pipeline of text.
        call: keywords of its call, for one prompt at temperature 0.
        drafts: accelerator that drafts the tokens.
        chosen: random numbers that choose among the tokens.
        most: largest number of tokens to insert; their replies are one batch.
        answer: see `train_judge`.
    """
    watch = Watch()
    pipe.accelerator = replace(drafts, rule=watch, length="fixed")
    output = pipe(**call)
    plain, is_whole = output.tokens[0], output.finish_reasons[0] != "length"
    if answer == "auto":
        asks = re.search(r"how (many|much)", str(call["prompt"]), re.IGNORECASE)
        answer = "number" if asks and is_whole else "words"
    found = sorted({(place, token) for place, token in watch.seen if place < len(plain)})
    found = chosen.sample(found, min(most, len(found)))
    if not found:
        return []
    forced, rows = Forced(), len(found)
    given = Given([[*plain[1:place], token] for place, token in found])
    pipe.accelerator = Accelerator("forced", given, forced)
    images = None if call.get("images") is None else [call["images"]] * rows
    others = pipe(**{**call, "prompt": [call["prompt"]] * rows, "images": images}).tokens
    labels = []
    for (place, token), other, state in zip(found, others, forced.states[0].float().cpu(), strict=True):
        start = 0 if answer == "number" else place  # the words before are the same
        said, says = (pipe.tokenizer.decode(ids[start:], skip_special_tokens=True) for ids in (plain, other))
        labels.append(Label(place, token, agreement(said, says, answer), state))
    return labels


def train_judge(
    pipe: Any,
    calls: Sequence[dict[str, Any]],
    out: str | Path,
    *,
    answer: str = "auto",
    bar: float = 0.5,
    tokens_per_prompt: int = 8,
    decay: float = 1.0,
    record: dict[str, Any] | None = None,
) -> Path:
    """Label draft tokens of a pipeline's accelerator, train a judge on them, and save it as a folder.

    Args:
        pipe: pipeline of text.
        calls: keywords of its calls, one prompt each, at temperature 0; five folds of them measure the judge.
        out: the folder to write.
        answer: part of the reply that may not change: the last "number", or the "words" from the token on.
            "auto" compares the number if the prompt asks how many or how much and the reply is complete.
        bar: least agreement (F1) of the words for a harmless token.
        tokens_per_prompt: largest number of draft tokens to label.
        decay: penalty on the squared weights, for standardised states.
        record: further entries of the folder's `training.json`.

    Returns:
        The folder.

    Raises:
        InputError: `answer` is unknown, or all tokens are of one kind.
    """
    require_known("answer", answer, ANSWERS)
    drafts, labels, folds = pipe.accelerator, list[Label](), list[int]()
    try:
        for index, call in enumerate(tqdm(calls, desc="labels", unit="prompt")):
            labels += label_prompt(pipe, call, drafts, random.Random(index), tokens_per_prompt, answer)
            folds += [index % FOLDS] * (len(labels) - len(folds))
    finally:
        pipe.accelerator = drafts
    harmless, fold = torch.tensor([label.agreement >= bar for label in labels]), torch.tensor(folds)
    parts = [fold == part for part in range(FOLDS)]
    if any(len(set(harmless[~part].tolist())) < 2 for part in parts):
        rule = "must be larger: so far all tokens are harmful, or all are harmless"
        raise InputError("samples", len(calls), rule)
    states = torch.stack([label.state for label in labels])
    odds = torch.empty(len(states))
    with torch.no_grad():
        for part in parts:
            odds[part] = fit_judge(states[~part], harmless[~part], decay)(states[part])
    fit_judge(states, harmless, decay).save_pretrained(out)
    measured = {"labels": len(labels), "harmless": harmless.float().mean().item(), "auc": auc(odds, harmless)}
    made = {"answer": answer, "bar": bar, "tokens_per_prompt": tokens_per_prompt, "decay": decay}
    write_record(Path(out), {**(record or {}), **made, **measured})
    return Path(out)


def fit_judge(states: Tensor, harmless: Tensor, decay: float) -> JudgeHead:
    """Fit a judge by logistic regression (L-BFGS), with equal total weight for both kinds of tokens.

    Args:
        states: [N, d] the target's final hidden states at draft tokens.
        harmless: [N] whether each token is harmless.
        decay: penalty on the squared weights, for standardised states.
    """
    mean, scale = states.mean(0), states.std(0).clamp_min(1e-6)
    known, size = (states - mean) / scale, states.shape[1]
    share = harmless.float().mean()
    counts = torch.where(harmless, 0.5 / share, 0.5 / (1 - share))
    weight, bias = torch.zeros(size, requires_grad=True), torch.zeros(1, requires_grad=True)
    solver = torch.optim.LBFGS([weight, bias], max_iter=500, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        nats = binary_cross_entropy_with_logits(known @ weight + bias, harmless.float(), counts)
        total: Tensor = nats + decay / 2 * weight.square().sum()
        total.backward()
        return total

    with torch.enable_grad():
        solver.step(loss)
    head = JudgeHead(JudgeHeadConfig(hidden_size=size))
    with torch.no_grad():
        head.layer.weight.copy_(weight / scale)
        head.layer.bias.copy_(bias - (weight / scale * mean).sum())
    head.eval()
    return head


def auc(odds: Tensor, positive: Tensor) -> float:
    """Return the probability that a positive [N] has larger odds than a negative; ties count half."""
    above = odds[positive][:, None] - odds[~positive]
    return ((above > 0).double() + 0.5 * (above == 0)).mean().item()
