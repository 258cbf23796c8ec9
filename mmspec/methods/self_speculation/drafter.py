"""Self-speculation: a model that can fill masked blocks drafts for its own token-by-token decoding.

This is the quadratic self-speculation of Nemotron-Labs-Diffusion (2607.05722). A block of masks that sees
itself follows the root and every candidate. In the forward pass that scores the candidates, the block after
the last accepted one predicts the next candidates, so that drafting costs nodes but no forward pass.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from mmspec.core.canvas import Canvas
from mmspec.core.distributions import Categorical, Scores
from mmspec.core.draft import DraftKind, Nodes, Tree
from mmspec.core.indexing import pick
from mmspec.core.interfaces import AnyTarget, DraftSession, TargetOutput
from mmspec.core.random_stream import Purpose
from mmspec.core.rows import named
from mmspec.core.session import PromptBatch, SessionDrafter
from mmspec.core.verdict import Path
from mmspec.errors import InputError
from mmspec.families.masked_language.target import MaskedTarget
from mmspec.targets import CausalTarget
from mmspec.trees.siblings import kind_of
from mmspec.validation import check_draft_tokens

__all__ = ["BlockTree", "SelfSpeculationDrafter"]


@dataclass(frozen=True)
class BlockTree(Tree):
    """A chain of candidates, with a block of K masks after each of its nodes. Masks are never accepted.

    Attributes:
        chain_nodes: of the chain, the root included.
        masks: K.
    """

    chain_nodes: int = 1
    masks: int = 0

    @property
    def nodes(self) -> Nodes:
        """The nodes for a target's forward pass: masks of one block see each other."""
        plain = super().nodes
        index = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        block = (index - self.chain_nodes).div(max(1, self.masks), rounding_mode="floor")
        block = block.where(index >= self.chain_nodes, -1 - index)
        return replace(plain, visible=plain.visible | (block[:, None] == block))


class SelfSpeculationSession(DraftSession):
    """Drafts of a batch.

    Attributes:
        q: [B, K] distributions of the next candidates, as the masks predict them; K is 0 at first.
    """

    row_fields = named("random", "q")

    def __init__(self, drafter: SelfSpeculationDrafter, batch: PromptBatch) -> None:
        self.drafter, self.random = drafter, batch.random
        self.q = Scores(batch.prefill.logits[: len(batch.requests), :0].float(), greedy=False)

    def propose(self, canvas: Canvas) -> BlockTree:
        masks, kind, root = self.drafter.num_draft_tokens, self.drafter.kind, canvas.root
        place = canvas.emitted[:, None] + torch.arange(self.q.shape[1], device=root.device)
        purpose = Purpose.DRAFT if kind is DraftKind.IID else Purpose.TARGET
        drafted = self.q.sample(self.random, place, purpose)
        nodes = 1 + drafted.shape[1]
        blocks = nodes * masks
        q = Categorical(self.q.p) if kind is DraftKind.IID else None
        chain = Tree.chain(torch.cat([root[:, None], drafted], 1), kind, q)
        index = torch.arange(blocks, device=root.device)
        behind = torch.where(index % masks == 0, index // masks, nodes + index - 1)
        fill = index.new_full((len(root), blocks), self.drafter.mask)
        return BlockTree(
            torch.cat([chain.tokens, fill], 1),
            pad(chain.valid, (0, blocks)),
            kind,
            chain.q.map(lambda each: pad(each, (0, 0) * (each.dim() - 2) + (0, blocks))),
            chain.faulty,
            torch.cat([chain.parents, behind.expand(len(root), -1)], 1),
            nodes - 1 + masks,
            2,
            nodes,
            masks,
        )

    def observe(self, draft: BlockTree, output: TargetOutput, scores: Scores, verdict: Path) -> None:
        block = draft.chain_nodes + verdict.accepted[:, None] * draft.masks
        at = block + torch.arange(draft.masks, device=block.device)
        self.q = Scores(pick(scores.logits, at), scores.greedy)


class SelfSpeculationDrafter(SessionDrafter):
    """Drafts with masked blocks of the target itself, in the forward pass that scores the draft before.

    The target must have been trained to fill blocks of masks and to predict the next token
    (L_AR + 0.3 L_block), and is decoded token by token. A forward pass has (K + 1)^2 nodes for K candidates.

    Args:
        num_draft_tokens: length K of a draft, 1 to 512.
        sampling: how draft tokens are drawn. "coupled": with the target's own noise, so that the output is
            bitwise that of plain sampling. "sampled": independently from the masks' own distributions, for
            rejection rules.

    With "sampled", the distribution of a candidate does not depend on the others, so that it is known.

    Raises:
        InputError: a value is out of range.
    """

    branches = True  # the chain of candidates has blocks beside it
    runs_ahead = True
    session = SelfSpeculationSession
    mask: int

    def __init__(self, num_draft_tokens: int = 8, sampling: str = "coupled") -> None:
        self.num_draft_tokens = check_draft_tokens(num_draft_tokens)
        self.kind = kind_of(sampling, ("coupled", "sampled"))
        self.max_nodes = (num_draft_tokens + 1) ** 2

    def fit(self, target: AnyTarget) -> SelfSpeculationDrafter:
        text = None if target.config is None else target.config.get_text_config(decoder=True)
        mask = getattr(text, "mask_token_id", None)
        is_causal = isinstance(target, CausalTarget) and not isinstance(target, MaskedTarget)
        if mask is None or not is_causal or getattr(text, "predicts", None) != "next":
            rule = "needs a model of masked blocks that predicts the next token and decodes token by token"
            raise InputError("accelerator", "self_speculation", rule)
        fitted = copy.copy(self)
        fitted.mask = mask
        return fitted
