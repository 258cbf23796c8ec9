"""Base class of the losses of drafting heads: hidden states of a frozen target, and blocks of tokens.

The hidden states are computed on the fly or loaded (`StoredStates`). The module also initializes new heads:
the tokens of a reduced vocabulary, and the rows of a separate output matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, pad
from torch.nn.utils.rnn import pad_sequence

from mmspec.core.image_grid import ImageGrid, Layout
from mmspec.errors import InputError
from mmspec.heads.model import EMBEDDINGS, HIDDEN, DraftingHead, Prompts
from mmspec.heads.window_states import codebook_sample
from mmspec.open_types import Json, Keywords
from mmspec.targets import CausalTarget
from mmspec.targets.encoder_decoder import ENCODED
from mmspec.training.data.audio import AudioRows
from mmspec.training.data.conversations import ConversationRows
from mmspec.training.data.sequences import DrafterBatch, DrafterData, TrainingExample
from mmspec.training.data.states import StoredStates, Summary
from mmspec.training.losses.goals import Goals, agrees, soft_cross_entropy
from mmspec.validation import is_integer
from mmspec.visual_tokens.spans import ImageSpan, find_images

__all__ = [
    "Blocks",
    "DrafterLoss",
    "Reading",
    "check_anchors",
    "choose_vocabulary",
    "draw_anchors",
    "learnt_images",
    "learnt_pairs",
    "read",
    "take_rows",
    "token_counts",
    "token_loss",
]

MAX_ANCHORS = 4096


@dataclass(frozen=True)
class Reading:
    """Tokens and hidden states of a batch, padded on the right, which causal attention ignores.

    Attributes:
        tokens: [B, L] prompts and answers.
        lengths: B lengths without padding.
        learnt: [B, L] True at the learnt tokens, those of answers.
        spans: B lists of the image spans.
        taps: layer index -> [B, L, d] hidden states; see `TargetOutput.taps`.
        encoded: B outputs [1, S, d] of the target's encoder; none for other targets.
        summary: [B, L] summary of the target's logits if states are stored, else None.
    """

    tokens: Tensor
    lengths: list[int]
    learnt: Tensor
    spans: list[list[ImageSpan]]
    taps: dict[int, Tensor]
    encoded: list[Tensor]
    summary: Summary | None = None

    def prompts(self, features: Tensor) -> Prompts:
        """The batch as whole prompts for a head, with the features [B, L, d] of its tokens."""
        questions = (self.learnt.long().argmax(-1) - 1).clamp_min(0)
        return Prompts(self.taps[EMBEDDINGS], features, self.lengths, self.spans, questions)


@torch.no_grad()
def read(
    target: CausalTarget,
    examples: Sequence[TrainingExample],
    taps: Sequence[int],
    stored: StoredStates | None = None,
) -> Reading:
    """Compute or load the hidden states of the examples, batched where possible."""
    ids = [example.inputs["input_ids"][0] for example in examples]
    return Reading(
        pad_sequence(ids, batch_first=True),
        [len(each) for each in ids],
        pad_sequence([example.learnt for example in examples], batch_first=True),
        [find_images(target.config, example.inputs) for example in examples],
        (target if stored is None else stored).read([example.inputs for example in examples], taps),
        [example.inputs[ENCODED] for example in examples if ENCODED in example.inputs],
    )


def learnt_images(target: CausalTarget, layout: Layout | None) -> Keywords:
    """Attributes of a head's config that identify the images that it learnt: codebook and layout."""
    sample = [] if target.codebook is None else codebook_sample(target).tolist()
    codebook = [float(f"{number:.4g}") for number in sample]
    return {"columns": layout.columns if isinstance(layout, ImageGrid) else 0, "codebook": codebook}


def learnt_pairs(learnt: Tensor, block: int) -> Tensor:
    """The pairs (position t, offset i) that are learnt: [B, L] learnt tokens -> [B, L, K].

    Offset i of position t predicts the token after t + i. It counts if all tokens from t + 1 to t + i + 1 are
    learnt, so that a block never extends beyond its answer, into the next turn or into padding.
    """
    following = pad(learnt, (0, block)).unfold(1, block, 1)[:, 1 : learnt.shape[1] + 1]
    return following.long().cumprod(-1).bool()


@dataclass(frozen=True)
class Blocks:
    """The m possible draft roots of a batch, and the tokens that K heads learn after each.

    Attributes:
        row: [m] row of the batch.
        before: [m] position of the token before each root, whose hidden state the heads read.
        ahead: [m, K] positions of the root and the tokens after it; head i predicts the one after the i-th.
        counted: [m, K] which of these are learnt; other positions are clamped to the batch.
    """

    row: Tensor
    before: Tensor
    ahead: Tensor
    counted: Tensor

    @classmethod
    def of(cls, learnt: Tensor, heads: int) -> Blocks:
        """The blocks of K heads in a batch whose learnt tokens are [B, L]."""
        counted = learnt_pairs(learnt, heads)
        counted[:, 0] = False  # no hidden state precedes the first token
        row, root = counted[..., 0].nonzero(as_tuple=True)
        ahead = root[:, None] + torch.arange(heads, device=root.device)
        return cls(row, root - 1, ahead.clamp_max(learnt.shape[1] - 1), counted[row, root])

    def at(self, index: Tensor) -> Blocks:
        """Select some of the blocks."""
        return Blocks(*(each[index] for each in (self.row, self.before, self.ahead, self.counted)))


def check_anchors(anchors: Any) -> None:
    """Raise InputError unless a number of anchors of a sequence is in range."""
    if not is_integer(anchors) or not 1 <= anchors <= MAX_ANCHORS:
        raise InputError("anchors", anchors, f"must be an integer from 1 to {MAX_ANCHORS}")


def draw_anchors(row: Tensor, most: int, seed: int) -> Tensor:
    """Draw at most `most` blocks of each sequence; [m] the sequences of the blocks -> [k] their indices."""
    generator = torch.Generator(row.device).manual_seed(seed)
    order = torch.rand(len(row), generator=generator, device=row.device).argsort()
    same = one_hot(row[order])
    rank = (same.cumsum(0) * same).sum(-1)  # from 1, among the blocks of its sequence
    return order[rank <= most].sort().values


def token_loss(
    logits: Tensor, goal: Tensor | Goals, counted: Tensor, discount: float
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the predictions of K heads, averaged over the counted tokens.

    Args:
        logits: [m, K, V'] logits of the tokens that the heads draft.
        goal: [m, K] indices of the right tokens among these, or the target's distributions of them.
        counted: [m, K] True where the loss counts.
        discount: head i has the weight discount^i.

    Returns:
        The loss; and [K] how often each head gives the goal's likeliest token the largest logit.
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
    """Base class of the losses of heads, on the hidden states of a frozen target.

    `forward` takes a `DrafterBatch` and returns the loss, a scalar, and a table of figures.

    Args:
        head: the head to train.
        target: the frozen target; its embeddings and output matrix are not trained.

    Attributes:
        outer: names of input and output matrices, which AdamW trains instead of Muon.
        rate: factor of the optimizers' rates; one layer tolerates twice the rate of deep models.
        stored: stored hidden states of the target; None computes them on the fly.
    """

    outer: ClassVar[tuple[str, ...]] = ()
    rate: ClassVar[float] = 2.0

    def __init__(self, head: Any, target: CausalTarget) -> None:
        super().__init__()
        self.head = head
        self.target = target  # not a module: neither trained nor saved
        self.stored: StoredStates | None = None

    def read(self, batch: DrafterBatch) -> Reading:
        """Return the hidden states of the target on the batch that the head reads or learns."""
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
        """The target's distributions of the drafted tokens at positions of a batch; see `Goals.of`."""
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
        """Return the batch of a step and process; the default is a batch of the data's sequences."""
        return data.batch(step, process)

    @functools.cached_property
    def read_out(self) -> Callable[[Tensor], Tensor]:
        """Function: states [..., d] -> logits of the drafted tokens, by the target's output matrix.

        Created on first use, when the head has its tokens and is on its device.
        """
        return self.target.head_of(self.head.rows_read)

    @functools.cached_property
    def read_few(self) -> Callable[[Tensor], Tensor]:
        """The same as `read_out`, also for a head with a separate output matrix."""
        same = self.head.config.reads_targets_matrix
        return self.read_out if same else self.target.head_of(self.head.draft_tokens)

    @staticmethod
    def prepare(head: Any, data: DrafterData, target: CausalTarget) -> None:
        """Initialize a new head before its training on the data."""
        choose_vocabulary(head, data)
        take_rows(head, target)

    def measure(self, batches: Iterable[DrafterBatch]) -> Json:
        """Measure a trained head on unseen batches, and return attributes to set in its config."""
        return {}


VOCABULARY_BATCHES = 128


def choose_vocabulary(head: DraftingHead, data: DrafterData, batches: int = VOCABULARY_BATCHES) -> None:
    """Set a new head's reduced vocabulary to the most frequent learnt tokens; ties prefer lower ids.

    All processes count the same texts: all given ones, or the first batches of changing data.
    """
    if head.draft_tokens is None:
        return
    if isinstance(data, ConversationRows | AudioRows) and not data.regenerate:
        learnt: Iterable[Tensor] = data.learnt_texts()
    else:
        drawn = (example for step in range(batches) for example in data.batch(step, 0).examples)
        learnt = (example.inputs["input_ids"][0][example.learnt].cpu() for example in drawn)
    count = token_counts(learnt, head.config.vocabulary)
    often = count.sort(descending=True, stable=True).indices
    head.learn_vocabulary(often[: head.config.draft_size])


def token_counts(texts: Iterable[Tensor], vocabulary: int) -> Tensor:
    """Count the occurrences [V] of each token in texts [L]."""
    count = torch.zeros(vocabulary, dtype=torch.long)
    for tokens in texts:
        count += torch.bincount(tokens, minlength=len(count))
    return count


@torch.no_grad()
def take_rows(head: DraftingHead, target: CausalTarget) -> None:
    """Initialize a new head's separate output matrix, if any, with the target's rows of the drafted tokens.

    The matrix stays unchanged if the target's has another width or is not accessible (`output_rows`).
    """
    matrix: nn.Linear | None = getattr(head, "lm_head", None)
    if matrix is None:
        return
    known = head.draft_tokens
    rows = target.output_rows(torch.arange(head.config.vocabulary) if known is None else known)
    if rows is not None and rows[0].shape == matrix.weight.shape:
        matrix.weight.copy_(rows[0])
