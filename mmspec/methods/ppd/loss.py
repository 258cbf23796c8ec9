"""Loss of PPD's prompt tokens (2405.18628) with the target's own distributions, at random cuts."""

from __future__ import annotations

from contextlib import closing

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmspec.core.draft import Nodes
from mmspec.core.interfaces import PromptOutput
from mmspec.errors import UnsupportedModelError
from mmspec.heads.model import HIDDEN
from mmspec.methods.ppd.head import PromptTokens
from mmspec.targets import CausalTarget
from mmspec.targets.causal import CausalState
from mmspec.training.data.sequences import DrafterBatch, DrafterData
from mmspec.training.losses.base import learnt_pairs
from mmspec.training.losses.goals import Goals
from mmspec.training.losses.levels import LevelLoss

__all__ = ["PromptTokensLoss"]


class PromptTokensLoss(LevelLoss):
    """Cross-entropy of the target's predictions at the prompt tokens with its own at the same places.

    The target reads a sequence once, without gradients. Then the prompt tokens of many cuts follow in one
    forward pass; those of each cut see the same tokens as in decoding.

    Args:
        cuts: of each sequence, drawn anew in every step.
        discount: weight of prompt token i is discount^i; the paper has 0.8.
    """

    rate = 10.0  # 1e-2 of AdamW, as published: only embeddings are trained

    def __init__(
        self, head: PromptTokens, target: CausalTarget, *, cuts: int = 48, discount: float = 0.8
    ) -> None:
        super().__init__(head, target)
        self.cuts, self.discount = cuts, discount

    @staticmethod
    @torch.no_grad()
    def prepare(head: PromptTokens, data: DrafterData, target: CausalTarget) -> None:
        """Initialise prompt tokens as the mean of some of the target's embeddings, with a little noise."""
        words = target.embed(torch.arange(min(1024, target.vocabulary), device=target.device))
        head.embeddings.copy_(words.mean(0) + 0.1 * words.std() * torch.randn_like(head.embeddings))

    def judge(self, batch: DrafterBatch) -> tuple[Tensor, Goals, Tensor, Tensor]:
        target, probes = self.target, self.probes
        learnt = pad_sequence([example.learnt for example in batch.examples], batch_first=True)
        rows, length = learnt.shape
        pairs = learnt_pairs(learnt, probes)
        pairs[:, 0] = False  # no token before it
        possible = pairs[..., 0]
        cuts = min(self.cuts, int(possible.sum(-1).max()))
        noise = torch.rand(possible.shape, generator=torch.Generator().manual_seed(batch.seed))
        root = noise.to(learnt.device).where(possible, -1.0).topk(cuts).indices  # [B, C]
        row = torch.arange(rows, device=root.device)[:, None]
        step = torch.arange(probes, device=root.device)
        counted, ahead = pairs[row, root], (root[..., None] + step).clamp_max(length - 1)  # [B, C, n]
        prompts = [example.inputs for example in batch.examples]
        with torch.no_grad():
            state, read = target.prefill(prompts, length + cuts * probes, (HIDDEN, *self.head.taps))
        with closing(state):
            if state.cache.recurrent:
                raise UnsupportedModelError(
                    f"{type(target.model).__name__} keeps a recurrent state, which cannot be read at many "
                    "places of a sequence as prompt tokens need; train another kind of head"
                )
            # nothing is committed: each node lists the tokens of the sequence that it sees
            state.cache.lengths.zero_()
            state.cache.longest = 0
            logits = self.score(batch, state, read, root, nodes_at(root, probes, length, target.vocabulary))
        states = pad_sequence([hidden[0] for hidden in read.taps[HIDDEN]], batch_first=True)
        place = row.repeat_interleave(cuts, 0), ahead.flatten(0, 1)
        goals = Goals.of(target, states, place, counted.flatten(0, 1))
        return logits.view(-1, probes, logits.shape[-1]), goals, counted.flatten(0, 1), goals.known[goals.at]

    @property
    def probes(self) -> int:
        """Number of nodes after each cut."""
        return len(self.head.embeddings)

    def score(
        self, batch: DrafterBatch, state: CausalState, read: PromptOutput, root: Tensor, nodes: Nodes
    ) -> Tensor:
        """Return the logits [B, C * n, V] at the nodes after each cut; see `put_probes`."""
        self.put_probes(state, read, root)
        return self.target.score_nodes(state, nodes).logits

    def put_probes(self, state: CausalState, read: PromptOutput, root: Tensor) -> None:
        """Set what the target reads at the prompt tokens, which follow the token before each root [B, C].

        Args:
            state: of the sequences.
            read: hidden states at the taps of the head.
            root: see above.
        """
        state.queries = self.head.embeddings.to(self.target.dtype)


def nodes_at(root: Tensor, probes: int, length: int, vocabulary: int) -> Nodes:
    """Return nodes of n prompt tokens after the tokens before each root [B, C], in sequences of that length.

    Slots of the sequences come first, then those of the prompt tokens, cut by cut.
    """
    (rows, cuts), device = root.shape, root.device
    step = torch.arange(probes, device=device)
    place = torch.arange(length, device=device)
    depth = (root[..., None] + step).flatten(1)
    seen = place < root.repeat_interleave(probes, 1)[..., None]
    own = torch.ones(probes, probes, dtype=torch.bool, device=device).tril()
    together = torch.block_diag(*[own] * cuts).expand(rows, -1, -1)
    return Nodes(
        (vocabulary + step).repeat(cuts).expand(rows, -1),
        (length + torch.arange(cuts * probes, device=device)).expand(rows, -1),
        torch.cat([place.expand(rows, -1), depth], 1),
        torch.cat([seen, together], 2),
        length + probes,
    )
