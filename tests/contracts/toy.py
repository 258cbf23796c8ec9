"""Targets that are tables: Markov chains of order two with an exactly known joint distribution."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.core.distributions import Categorical
from mmspec.core.draft import Draft
from mmspec.core.interfaces import PromptOutput, Target, TargetOutput
from mmspec.core.verdict import Path

VOCABULARY = 6
Warp = Callable[[Tensor], Tensor]


def dirichlet(*shape: int, seed: int, concentration: float = 0.7) -> Tensor:
    """Draw random distributions [*shape], float64."""
    generator = torch.Generator().manual_seed(seed)
    alpha = torch.full(shape, concentration, dtype=torch.float64)
    gamma = torch._standard_gamma(alpha, generator=generator)
    return gamma / gamma.sum(-1, keepdim=True)


@dataclass
class TableState:
    """The committed tokens. As with keys and values, the root is not included.

    Attributes:
        tokens: [B, capacity].
        lengths: [B].
        table: [B] which table a row follows.
    """

    tokens: Tensor
    lengths: Tensor
    table: Tensor

    def tighten(self, emitted: Sequence[int]) -> None:
        return None

    def nbytes(self) -> int:
        return self.tokens.nbytes

    def close(self) -> None:
        return None


class TableTarget:
    """A target whose logits are a table of the last two tokens on the node's path.

    The token before the root is read from the cache, so a commit that keeps a rejected token, or drops an
    accepted one, changes the distribution of what follows.

    Args:
        logits: [T, V, V, V]; [t, a, b] is the distribution after ... a, b. The first token of a prompt,
            modulo T, says which table its row follows.
    """

    device = torch.device("cpu")
    config = grid = codebook = None
    vector_size = 0
    distribution = Categorical
    any_order = by_blocks = False

    def plain_decoding(self) -> None:
        """Decode one token after the other."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.vocabulary = logits.shape[-1]

    computing = Target.computing
    remember = Target.remember
    chunked_prefill = Target.chunked_prefill

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[TableState, PromptOutput]:
        ids = torch.cat([prompt["input_ids"] for prompt in prompts])  # toy prompts have one length
        tokens = torch.zeros(len(prompts), 2 * capacity, dtype=torch.long)
        tokens[:, : ids.shape[1]] = ids
        state = TableState(tokens, torch.full((len(prompts),), ids.shape[1]), ids[:, 0] % len(self.logits))
        return state, PromptOutput(self.logits[state.table, ids[:, -2], ids[:, -1]][:, None])

    def score(self, state: TableState, draft: Draft) -> TargetOutput:
        copies = len(state.lengths) // len(draft.tokens)
        before, tokens = (
            draft.tokens.gather(1, draft.parents).repeat(copies, 1),
            draft.tokens.repeat(copies, 1),
        )
        before[:, 0] = state.tokens.gather(1, state.lengths[:, None] - 1)[:, 0]
        return TargetOutput(self.logits[state.table[:, None], before, tokens])

    def commit(self, state: TableState, draft: Draft, verdict: Path, active: Tensor) -> None:
        self.check(draft, verdict)
        copies = len(state.lengths) // len(active)
        path = draft.tokens.gather(1, verdict.nodes)
        places = state.lengths[:, None] + torch.arange(path.shape[1])
        state.tokens.scatter_(1, places, path.repeat(copies, 1))
        state.lengths += ((verdict.accepted + 1) * active).repeat(copies)

    def check(self, draft: Draft, verdict: Path) -> None:
        """Assert that a verdict describes a path of valid nodes from the root down."""
        steps = torch.arange(verdict.nodes.shape[1])
        kept = steps <= verdict.accepted[:, None]
        above = draft.parents.gather(1, verdict.nodes)[:, 1:]
        assert (verdict.nodes[:, 0] == 0).all(), "a path starts at the root"
        assert ((above == verdict.nodes[:, :-1]) | ~kept[:, 1:]).all(), "a node follows its own parent"
        assert (draft.valid.gather(1, verdict.nodes) | ~kept).all(), "padding is never accepted"
        assert (verdict.accepted <= draft.max_depth).all(), "a path is no longer than the draft"

    def joint(self, prompts: Sequence[Sequence[int]], length: int, warp: Warp) -> Tensor:
        """[V] * length: exact joint distribution of the next tokens, by enumeration.

        Args:
            prompts: one prompt; or the conditional and the unconditional one.
            warp: a reference for the warping: logits [1 or 2, m, V] -> probabilities [m, V].
        """
        size = self.vocabulary
        joint = torch.ones((), dtype=torch.float64)
        for index in range(length):
            places = torch.meshgrid(*[torch.arange(size)] * index, indexing="ij") if index else ()
            logits = []
            for prompt in prompts:
                path = [*(torch.tensor(token) for token in prompt), *places]
                logits.append(self.logits[prompt[0] % len(self.logits), path[-2], path[-1]])
            flat = torch.stack([rows.expand(*[size] * (index + 1)).reshape(-1, size) for rows in logits])
            steps = warp(self.constrain(flat, torch.tensor(index)))
            joint = joint[..., None] * steps.view(*[size] * (index + 1))
        return joint

    def constrain(self, logits: Tensor, index: Tensor) -> Tensor:
        """Logits [..., V] for output places `index` with a grammar applied; a table alone has none."""
        return logits


def toy_target(tables: int = 1, vocabulary: int = VOCABULARY) -> TableTarget:
    return TableTarget(dirichlet(tables, vocabulary, vocabulary, vocabulary, seed=0).log())


def toy_distribution(seed: int = 1, vocabulary: int = VOCABULARY) -> Tensor:
    """[V, V] draft distribution: half the target's mean, half noise; about 0.7 of its draws are accepted."""
    target = dirichlet(1, vocabulary, vocabulary, vocabulary, seed=0)[0].mean(0)
    return 0.5 * target + 0.5 * dirichlet(vocabulary, vocabulary, seed=seed)
