"""Drafter of PPD (2405.18628): trained prompt tokens after candidates predict the levels of the next tree.

The logits at the prompt tokens after the last accepted node are the levels of the next tree, so that drafting
costs nodes of the target's forward pass, but no forward pass. In each round, the gain of the paper's planner
decides how many of them each node gets; the paper searches a table of trees beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import ceil

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.core.canvas import Canvas
from mmspec.core.distributions import Scores
from mmspec.core.draft import Nodes, Tree
from mmspec.core.indexing import pick
from mmspec.core.interfaces import AnyTarget, TargetOutput
from mmspec.core.rows import named
from mmspec.core.session import PromptBatch
from mmspec.core.verdict import Path
from mmspec.errors import InputError
from mmspec.heads.drafter import HeadDrafter, HeadSession
from mmspec.kernels import best
from mmspec.methods.ppd.head import PromptTokens
from mmspec.open_types import Keywords
from mmspec.targets.causal import CausalState
from mmspec.validation import require_number

__all__ = ["PromptTokensDrafter", "place_probes"]


def place_probes(parents: Tensor, paths: Tensor, worth: Sequence[float], count: int) -> tuple[Tensor, Tensor]:
    """Choose the nodes that get probes, which are the nodes where a round is most likely to end.

    The j-th probe of a node adds P(the accepted path ends there) * worth[j] tokens to the next round (PPD,
    2405.18628: P_last(v) * (f(m) - f(m - 1))).

    Args:
        parents: [B, n] of a tree.
        paths: [B, n] log-probabilities that the path to each node is right.
        worth: gain of each probe, given those before it; decreasing.
        count: P, number of probes.

    Returns:
        [B, P] hosts, ascending, and the index of each probe at its host, from 0 without a gap.
    """
    reached = paths.exp()
    ends = reached.scatter_add(1, parents[:, 1:], -reached[:, 1:]).clamp_min(0)
    gain = ends[..., None] * torch.tensor(worth, dtype=torch.float32, device=paths.device)
    chosen = best(gain.flatten(1), count, ascending=True)
    return chosen // len(worth), chosen % len(worth)


@dataclass(frozen=True)
class PromptTree(Tree):
    """A tree with prompt tokens as query nodes, which are placed again in a part of it.

    A prompt token attends to its host, to the nodes that the host attends to, and to earlier prompt tokens of
    the same host. Prompt tokens are never accepted, and their keys are dropped.

    Attributes:
        hosts: [B, P] the node after which each prompt token is placed, ascending.
        steps: [B, P] index of each among the n; those of one host are 0, 1, ...
        likelihoods: [B, n] log-probabilities of the paths.
        drafter: places the prompt tokens.
    """

    hosts: Tensor
    steps: Tensor
    likelihoods: Tensor
    drafter: PromptTokensDrafter

    row_fields = named("hosts", "steps", "likelihoods")

    @property
    def nodes(self) -> Nodes:
        """The input nodes of the target's forward pass: the nodes of the tree, then the prompt tokens."""
        plain, more = super().nodes, self.hosts.shape[1]
        count = plain.extent + more
        together = (self.hosts[:, :, None] == self.hosts[:, None]) & (
            self.steps[:, None] <= self.steps[..., None]
        )
        seen = torch.cat([pick(plain.visible, self.hosts), together], 2)
        depths = self.depth.gather(1, self.hosts) + 1 + self.steps
        return Nodes(
            torch.cat([self.tokens, self.drafter.fitted_target.vocabulary + self.steps], 1),
            torch.arange(count, device=seen.device).expand(len(seen), -1),
            torch.cat([plain.depths, depths], 1),
            torch.cat([pad(plain.visible, (0, more)), seen], 1),
            self.max_depth + self.drafter.probes,
        )

    def part_of(self, kept: Sequence[Sequence[int]], size: int) -> PromptTree:
        part = super().part_of(kept, size)
        nodes = [[0, *each, *[0] * (size - len(each))] for each in kept]
        likelihoods = self.likelihoods.gather(1, torch.tensor(nodes, device=self.likelihoods.device))
        return self.drafter.probed(part, likelihoods.where(part.valid, -torch.inf))


class PromptTokensSession(HeadSession):
    """Prompt tokens that draft for one batch.

    Attributes:
        logits: [R, n, V] the target's, at the prompt tokens after the newest root's parent.
        known: [B] how many of these there were.
    """

    row_fields = named("logits", "known")

    drafter: PromptTokensDrafter
    head: PromptTokens

    def __init__(self, drafter: PromptTokensDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        prefilled = batch.prefill.logits
        self.logits = prefilled.new_zeros(len(prefilled), drafter.probes, prefilled.shape[-1])
        self.known = torch.zeros(len(batch.requests), dtype=torch.long, device=prefilled.device)

    def attach(self, state: CausalState) -> None:
        state.queries = self.head.embeddings

    def limit(self, nodes: int, least: Callable[[int], Sequence[float]]) -> None:
        return None  # all levels are known already, so that a limit would save nothing

    def propose(self, canvas: Canvas) -> PromptTree:
        level = torch.arange(self.drafter.probes, device=self.known.device)
        log_p = self._log_probabilities(self._guided(self.logits))
        log_p = log_p.masked_fill((level >= self.known[:, None])[..., None], -torch.inf)
        growth = self.growth(canvas)
        while not growth.is_grown:
            growth.grow(log_p[:, growth.level, None].expand(-1, growth.tokens.shape[1], -1))
        return self.drafter.probed(self.rated(growth), self.likelihoods)

    def observe(self, draft: Tree, output: TargetOutput, scores: Scores, verdict: Path) -> None:
        if not isinstance(draft, PromptTree):
            self.known = torch.zeros_like(self.known)
            return
        behind = draft.hosts == verdict.last[:, None]
        self.known = behind.sum(-1)
        at = behind.long().argmax(-1)[:, None] + torch.arange(self.drafter.probes, device=behind.device)
        self.logits = pick(output.queried, self._copied(at.clamp_max(behind.shape[1] - 1)))


class PromptTokensDrafter(HeadDrafter):
    """Drafts a tree of the likeliest tokens at trained prompt tokens of the target's own forward pass.

    A forward pass has 1 + num_draft_tokens nodes, and the prompt tokens.

    Args:
        model: the trained prompt tokens.
        num_draft_tokens, top_k: see `HeadDrafter`.
        depth: see `HeadDrafter`. At most the number of prompt tokens.
        tree: see `HeadDrafter`; or "measured", the best static tree of its size for the hit rates measured in
            training.
        sampling: how candidates are chosen where the target samples. "greedy" takes the likeliest. "coupled"
            draws with the target's own noise, so that equal distributions give equal tokens.
        probes_per_node: mean number of prompt tokens after a candidate, which are placed where their gain is
            largest, from 0 to the number of prompt tokens, which puts all of them after each.

    Raises:
        InputError: a value is out of range; in `fit`, the prompt tokens are not finite.
    """

    session = PromptTokensSession
    shares_tree = False  # its candidates have probes
    model: PromptTokens

    def __init__(
        self,
        model: PromptTokens,
        num_draft_tokens: int | None = None,
        depth: int | None = None,
        top_k: int | None = None,
        tree: str | int | Sequence[int] = "dynamic",
        sampling: str = "greedy",
        probes_per_node: float = 1.0,
    ) -> None:
        super().__init__(model, num_draft_tokens, depth, top_k, tree, sampling)
        if self.kind.is_drawn:
            raise InputError("sampling", sampling, "must be 'greedy' or 'coupled'")
        self.probes = model.config.num_probes
        rule = f"must be between 0 and {self.probes}, the number of prompt tokens"
        require_number("probes_per_node", probes_per_node, 0.0, self.probes, rule)
        self.probes_per_node = probes_per_node
        self.max_nodes += self.queries_of(self.shape.num_draft_tokens)

    @property
    def deepest(self) -> tuple[int, str]:
        return self.model.config.num_probes, "the number of prompt tokens"

    def queries_of(self, candidates: int) -> int:
        return self.probes + ceil(self.probes_per_node * candidates)

    def check(self, target: AnyTarget) -> None:
        super().check(target)
        if not self.model.embeddings.isfinite().all():  # NaN passes through masks to all nodes
            raise InputError("drafter", "prompt tokens with NaN or infinity", "must be finite")

    def probed(self, tree: Tree, paths: Tensor) -> PromptTree:
        """Add prompt tokens to a tree, given the log-probabilities [B, n] of its paths."""
        count = self.queries_of(tree.valid.shape[1] - 1)
        hosts, steps = place_probes(tree.parents, paths, self.model.config.worth, count)
        same: Keywords = {each.name: getattr(tree, each.name) for each in fields(Tree)}
        return PromptTree(**same, hosts=hosts, steps=steps, likelihoods=paths, drafter=self)
