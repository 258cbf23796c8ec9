"""Base of the losses of drafting heads: a frozen target's hidden states on sequences, and blocks of tokens.

The target runs along, except where its states were stored before (`StoredStates`). How a new head begins is
here too: the tokens that it drafts, and an output matrix of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence

from mmspec.core.image_grid import ImageGrid, Layout
from mmspec.heads.model import EMBEDDINGS, HIDDEN, DraftingHead, Prompts
from mmspec.heads.window_states import codebook_sample
from mmspec.open_types import Json, Keywords
from mmspec.targets import CausalTarget
from mmspec.training.data.conversations import ConversationRows
from mmspec.training.data.sequences import DrafterBatch, DrafterData, TrainingExample
from mmspec.training.data.states import StoredStates, Summary
from mmspec.training.losses.goals import Goals, agrees, soft_cross_entropy
from mmspec.visual_tokens.spans import ImageSpan, find_images

__all__ = [
    "Blocks",
    "DrafterLoss",
    "Reading",
    "choose_vocabulary",
    "learnt_images",
    "learnt_pairs",
    "read",
    "take_rows",
    "token_counts",
    "token_loss",
]


@dataclass(frozen=True)
class Reading:
    """A batch of sequences, padded on the right, where causal attention never looks.

    Attributes:
        tokens: [B, L] prompts and answers.
        lengths: B.
        learnt: [B, L] True at the tokens of answers.
        spans: B lists of images.
        taps: layer index -> [B, L, d] hidden states; see `TargetOutput.taps`.
        summary: [B, L] of the target's logits, where they are stored.
    """

    tokens: Tensor
    lengths: list[int]
    learnt: Tensor
    spans: list[list[ImageSpan]]
    taps: dict[int, Tensor]
    summary: Summary | None = None

    def prompts(self, features: Tensor) -> Prompts:
        """The sequences as a head reads whole prompts, with its features [B, L, d] at the tokens."""
        questions = (self.learnt.long().argmax(-1) - 1).clamp_min(0)
        return Prompts(self.taps[EMBEDDINGS], features, self.lengths, self.spans, questions)


@torch.no_grad()
def read(
    target: CausalTarget,
    examples: Sequence[TrainingExample],
    taps: Sequence[int],
    stored: StoredStates | None = None,
) -> Reading:
    """Run the target over sequences that are not stored, together where they can be batched."""
    ids = [example.inputs["input_ids"][0] for example in examples]
    return Reading(
        pad_sequence(ids, batch_first=True),
        [len(each) for each in ids],
        pad_sequence([example.learnt for example in examples], batch_first=True),
        [find_images(target.config, example.inputs) for example in examples],
        (target if stored is None else stored).read([example.inputs for example in examples], taps),
    )


def learnt_images(target: CausalTarget, layout: Layout | None) -> Keywords:
    """Attributes of a head's config that say of which images it has learnt: of that target, laid out so."""
    sample = [] if target.codebook is None else codebook_sample(target).tolist()
    codebook = [float(f"{number:.4g}") for number in sample]
    return {"columns": layout.columns if isinstance(layout, ImageGrid) else 0, "codebook": codebook}


def learnt_pairs(learnt: Tensor, block: int) -> Tensor:
    """The pairs (row t, offset i) that are learnt: [B, L] learnt tokens -> [B, L, K].

    Offset i of row t predicts what follows token t + i. It counts if all of the tokens t + 1 ... t + i + 1
    are learnt ones, so that a block never reaches past its answer, into the next turn or into padding.
    """
    following = pad(learnt, (0, block)).unfold(1, block, 1)[:, 1 : learnt.shape[1] + 1]
    return following.long().cumprod(-1).bool()


@dataclass(frozen=True)
class Blocks:
    """The roots that a batch can have, and the tokens that K heads learn after each.

    Attributes:
        row: [m] of the batch.
        before: [m] place of the token before each root, whose hidden state is read.
        ahead: [m, K] places of the root and of the tokens after it; head i predicts what follows the i-th.
        counted: [m, K] which of those are learnt; other places are cut to lie within the batch.
    """

    row: Tensor
    before: Tensor
    ahead: Tensor
    counted: Tensor

    @classmethod
    def of(cls, learnt: Tensor, heads: int) -> Blocks:
        """The blocks of K heads in a batch whose learnt tokens are [B, L]."""
        counted = learnt_pairs(learnt, heads)
        counted[:, 0] = False  # no hidden state before it
        row, root = counted[..., 0].nonzero(as_tuple=True)
        ahead = root[:, None] + torch.arange(heads, device=root.device)
        return cls(row, root - 1, ahead.clamp_max(learnt.shape[1] - 1), counted[row, root])

    def at(self, index: Tensor) -> Blocks:
        """Return some of the blocks."""
        return Blocks(*(each[index] for each in (self.row, self.before, self.ahead, self.counted)))


def token_loss(
    logits: Tensor, goal: Tensor | Goals, counted: Tensor, discount: float
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of what K heads predict, averaged over the tokens that count.

    Args:
        logits: [m, K, V'] of the tokens that they know.
        goal: [m, K] tokens by their index among those, or the distributions that a target has of them.
        counted: [m, K].
        discount: weight of head i is discount^i.

    Returns:
        The loss; and [K] how often each head finds no token likelier than the goal's likeliest.
    """
    heads = counted.shape[1]
    weights = counted * discount ** torch.arange(heads, device=counted.device)
    if isinstance(goal, Goals):
        meant, nats = goal.meant(), soft_cross_entropy(logits.flatten(0, 1), goal.table, goal.at.flatten())
    else:
        meant, nats = goal, cross_entropy(logits.float().flatten(0, 1), goal.flatten(), reduction="none")
    agreement = (agrees(logits, meant) & counted).sum(0) / counted.sum(0).clamp_min(1)
    return (nats.view_as(weights) * weights).sum() / weights.sum().clamp_min(1.0), agreement


class DrafterLoss(nn.Module):
    """The loss of a head on sequences that its target reads.

    `forward` takes a `DrafterBatch` and returns the loss, a scalar, and a table of figures.

    Args:
        head: learns.
        target: does not; its embeddings and output matrix are used as they are.

    Attributes:
        outer: names of matrices that read inputs or write outputs, which Muon is not for.
        rate: factor of the optimizers' rates; one layer bears twice the rate of deep models.
        stored: hidden states of the target on these sequences; None runs the target along.
    """

    outer: ClassVar[tuple[str, ...]] = ()
    rate: ClassVar[float] = 2.0

    def __init__(self, head: Any, target: CausalTarget) -> None:
        super().__init__()
        self.head = head
        self.target = target  # no module: neither trained nor saved
        self.stored: StoredStates | None = None

    def read(self, batch: DrafterBatch) -> Reading:
        """Hidden states of the target on the sequences: those that the head reads or learns."""
        taps = dict.fromkeys((EMBEDDINGS, *self.head.taps, HIDDEN))
        reading = read(self.target, batch.examples, tuple(taps), self.stored)
        if self.stored is None or self.head.draft_tokens is None:
            return reading
        inputs = [example.inputs for example in batch.examples]
        return replace(reading, summary=self.stored.summary(inputs, reading.taps[HIDDEN]))

    def goals(
        self,
        reading: Reading,
        place: tuple[Tensor, Tensor],
        counted: Tensor,
        *,
        conditional: bool = False,
    ) -> Goals:
        """The target's distributions at places of a batch, of tokens that the head drafts; see `Goals.of`."""
        return Goals.of(
            self.target,
            reading.taps[HIDDEN],
            place,
            counted,
            self.head.draft_tokens,
            conditional=conditional,
            summary=reading.summary,
            read_out=None if reading.summary is None else self.read_few,
        )

    def make(self, data: DrafterData, step: int, process: int) -> DrafterBatch:
        """The batch of a step, in one of the processes that train: by default, sequences of the data."""
        return data.batch(step, process)

    @functools.cached_property
    def read_out(self) -> Callable[[Tensor], Tensor]:
        """States [..., d] -> logits by the target's output matrix, of the tokens that the head drafts.

        Made when it is first asked for: then the head has its tokens, and is where it learns.
        """
        return self.target.head_of(self.head.rows_read)

    @functools.cached_property
    def read_few(self) -> Callable[[Tensor], Tensor]:
        """The same for a head that has an output matrix of its own: of the tokens that it drafts."""
        same = self.head.config.reads_targets_matrix
        return self.read_out if same else self.target.head_of(self.head.draft_tokens)

    @staticmethod
    def prepare(head: Any, data: DrafterData, target: CausalTarget) -> None:
        """Prepare a new head, once, before it learns from the data of that target."""
        choose_vocabulary(head, data)
        take_rows(head, target)

    def measure(self, batches: Iterable[DrafterBatch]) -> Json:
        """Measure a trained head on batches that it has not seen: attributes of its config."""
        return {}


VOCABULARY_BATCHES = 128


def choose_vocabulary(head: DraftingHead, data: DrafterData, batches: int = VOCABULARY_BATCHES) -> None:
    """Let a new head of a reduced vocabulary know the tokens that are learnt most often, then the first ones.

    Every process counts the same: all texts that are given, or batches of data that are made in each step.
    """
    if head.draft_tokens is None:
        return
    if isinstance(data, ConversationRows) and not data.regenerate:
        learnt: Iterable[Tensor] = data.learnt_texts()
    else:
        drawn = (example for step in range(batches) for example in data.batch(step, 0).examples)
        learnt = (example.inputs["input_ids"][0][example.learnt].cpu() for example in drawn)
    count = token_counts(learnt, head.config.vocabulary)
    often = count.sort(descending=True, stable=True).indices
    head.learn_vocabulary(often[: head.config.draft_size])


def token_counts(texts: Iterable[Tensor], vocabulary: int) -> Tensor:
    """[V] occurrences of each token in texts [L]."""
    count = torch.zeros(vocabulary, dtype=torch.long)
    for tokens in texts:
        count += torch.bincount(tokens, minlength=len(count))
    return count


@torch.no_grad()
def take_rows(head: DraftingHead, target: CausalTarget) -> None:
    """Let a new head's own output matrix, if any, begin as the target's rows of the tokens that it drafts.

    It stays as it is where the target's are of another width, or do not lie open (`output_rows`).
    """
    matrix: nn.Linear | None = getattr(head, "lm_head", None)
    if matrix is None:
        return
    known = head.draft_tokens
    rows = target.output_rows(torch.arange(head.config.vocabulary) if known is None else known)
    if rows is not None and rows[0].shape == matrix.weight.shape:
        matrix.weight.copy_(rows[0])
