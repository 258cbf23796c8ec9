"""The loss of an EAGLE-3 head, compared with its drafting session and with slow drafting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.core.draft import DraftKind, Nodes, Tree
from mmspec.core.interfaces import Request
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.heads.feature_session import GrownTreeDrafter, GrownTreeSession
from mmspec.methods.eagle.loss import positions_of
from mmspec.methods.eagle3 import loss as eagle3_loss
from mmspec.methods.eagle3.drafter import Eagle3Drafter
from mmspec.methods.eagle3.head import Eagle3Head
from mmspec.methods.eagle3.loss import Eagle3Loss
from mmspec.methods.mtp.head import MtpHead
from mmspec.targets.causal import CausalTarget
from mmspec.training.data.sequences import DrafterBatch, TrainingExample
from mmspec.training.losses.base import choose_vocabulary, draw_anchors, read
from tests.contracts.running import canvas_of
from tests.methods import mtp_checks
from tests.methods.eagle3_checks import head_for
from tests.methods.flash_checks import target_of
from tests.methods.naive_eagle import read_whole
from tests.methods.naive_eagle3 import NaiveEagle3
from tests.training.own_answers import Sentences, own_answers, speaker

STEPS = 4
PER_TOKEN = ("input_ids", "mm_token_type_ids")


def decoded(
    head: Eagle3Head | MtpHead, target: CausalTarget, example: TrainingExample, root: int
) -> list[Tensor]:
    """[V'] logits after the root and after each token that really follows, by the session that drafts."""
    ids = example.inputs["input_ids"]
    before = {name: example.inputs[name][:, :root] for name in PER_TOKEN if name in example.inputs}
    request = Request({**example.inputs, **before})
    runs = GrownTreeDrafter if isinstance(head, MtpHead) else Eagle3Drafter
    drafter = runs(head, num_draft_tokens=1).fit(target)
    _, prefill = target.prefill([request.inputs], root + 1, drafter.taps)
    session = drafter.start([request], prefill, Sampler(), RandomStream.from_seed(0, 1))
    assert isinstance(session, GrownTreeSession)
    hidden = session._read_committed(canvas_of([ids[0, : root + 1].tolist()], emitted=1))[:, None]
    logits = [head.logits(hidden, target.head)[0, 0]]
    chain = Tree.chain(ids[:, root + 1 : root + STEPS], DraftKind.POINT)
    for step in range(chain.tokens.shape[1]):
        token, slot = chain.tokens[:, step : step + 1], torch.tensor([[step]])
        reached = chain.ancestors[:, step : step + 1, : step + 1]
        hidden = session._read(hidden, Nodes(token, slot, chain.depth[:, : step + 1], reached, step))
        logits.append(head.logits(hidden, target.head)[0, 0])
    return logits


@pytest.mark.parametrize(
    ("family", "kind", "window"),
    [
        ("llava", "eagle3", None),
        ("llava", "eagle3", 2),  # shorter than the steps, whose first rows are left behind too
        ("llava", "eagle3", 6),
        ("llava", "mtp", None),
        ("qwen2_5_vl", "eagle3", None),
        ("qwen2_5_vl", "mtp", None),
    ],
)
@pytest.mark.every(2)
def test_training_reads_what_decoding_reads(family: str, kind: str, window: int | None) -> None:
    """Step i after token t, in a padded batch with images, is what the session computes there alone."""
    target = target_of(family, torch.float64)
    head: Any
    head = mtp_checks.head_for(target) if kind == "mtp" else None
    head = head or head_for(target, draft_vocabulary=13, sliding_window=window)
    given = own_answers(family)
    reading = read(target, given.examples, (0, 1, -1))
    features = head.join([reading.taps[tap] for tap in head.taps])
    roots = torch.arange(3, reading.tokens.shape[1] - 1)[::2]  # rows that are not unrolled lie between them
    positions = None if head.position_lag is None else positions_of(target, given.examples)
    first, *later = eagle3_loss.unroll(head, reading.taps[0], features, STEPS, roots, positions)
    for row, example in enumerate(given.examples):
        for index, before in enumerate(roots.tolist()):
            if not example.answer <= before + 1 < reading.lengths[row]:
                continue
            states = [first[row, before], *(state[row, index] for state in later)]
            for step, due in enumerate(decoded(head, target, example, before + 1)):
                made = head.logits(states[step], target.head)
                assert torch.allclose(made, due, atol=1e-6), (row, before, step)


@pytest.mark.parametrize("anchors", [None, 3])
def test_the_loss_is_that_of_drafting_the_slow_way(anchors: int | None) -> None:
    """Compares each token t and step i with the weights alone; tokens outside the vocabulary do not count."""
    target = target_of("llava", torch.float64)
    head, given = head_for(target, draft_vocabulary=40), own_answers()
    assert head.draft_tokens is not None
    loss, figures = Eagle3Loss(head, target, steps=STEPS, anchors=anchors)(given)
    lengths = [example.inputs["input_ids"].shape[1] - example.answer for example in given.examples]
    sequences = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    drawn = {*draw_anchors(sequences, anchors or max(lengths), given.seed).tolist()}
    assert len(drawn) == sum(min(length, anchors or length) for length in lengths)
    nats: list[list[Tensor]] = [[] for _ in range(STEPS)]
    hits: list[list[float]] = [[] for _ in range(STEPS)]
    left_out, number = 0, 0
    for example in given.examples:
        ids, start = example.inputs["input_ids"], example.answer
        prompt: dict[str, Any] = {**example.inputs, "input_ids": ids[:, :start]}
        naive = NaiveEagle3(head, target, [prompt], Sampler())
        answer = ids[0, start:].tolist()
        true = target.head(read_whole(target, prompt, answer)[0][-1])[0]
        for t in range(start - 1, ids.shape[1] - 1):
            steps, number = STEPS if number in drawn else 1, number + 1
            for step in range(min(steps, ids.shape[1] - 1 - t)):
                output, path = answer[: t + 1 - start], answer[t + 1 - start : t + 1 - start + step]
                guess = naive.logits(prompt, output, tuple(path)).log_softmax(-1)[head.draft_tokens]
                distribution = true[t + step][head.draft_tokens].softmax(-1)
                if int(true[t + step].argmax()) not in head.draft_tokens.tolist():
                    left_out += 1
                    continue
                nats[step].append(-(distribution * guess).sum())
                hits[step].append(float(distribution.argmax() == guess.argmax()))
    due = sum(0.8**step * torch.stack(each).mean() for step, each in enumerate(nats))
    assert left_out > 0
    assert torch.allclose(loss.double(), torch.as_tensor(due).double(), rtol=1e-5)
    shares = torch.tensor([sum(each) / len(each) for each in hits])
    assert torch.allclose(figures["agreement"], shares, atol=1e-6)


def test_the_vocabulary_is_what_is_learnt_most() -> None:
    """Tokens of answers, by how often they come; unseen ones follow in their order."""
    head = head_for(speaker(), draft_vocabulary=5)
    example = TrainingExample({"input_ids": torch.tensor([[1, 1, 1, 1, 7, 9, 9, 11, 9, 7]])}, 4)

    class Data(Sentences):
        def batch(self, step: int, process: int) -> DrafterBatch:
            return DrafterBatch((example,), step)

    choose_vocabulary(head, Data(), 2)
    assert head.draft_tokens is not None and head.draft_tokens.tolist() == [0, 1, 7, 9, 11]
    whole = head_for(speaker())
    choose_vocabulary(whole, Data(), 2)
    assert whole.draft_tokens is None
