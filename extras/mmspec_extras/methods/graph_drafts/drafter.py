"""Drafts as graphs (2407.16207): vertices of equal tokens are merged, and computed once.

For the target, all paths are unrolled to a tree.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft, Nodes
from mmspec.errors import InputError
from mmspec.targets import CausalTarget
from mmspec.validation import is_integer, require_number
from mmspec_extras.draft_models import RereadDrafter, RereadSession, lay_out


@dataclass(eq=False)
class Vertex:
    """Vertex of a draft graph.

    Attributes:
        path: the tokens to this vertex from below the root, through the fathers that were met first.
        score: log-probability of that path.
        children: vertices that may follow, each with its log-probability.
        slots: of the keys of that path, as far as the draft model has read it.
    """

    path: tuple[int, ...] = ()
    score: float = 0.0
    children: list[tuple[Vertex, float]] = field(default_factory=list)
    slots: tuple[int, ...] = ()


class DraftGraph:
    """Graph that grows level by level.

    Args:
        repeat: see `GraphDrafter`.

    Attributes:
        newest: vertices of the deepest level, the likeliest first.
    """

    def __init__(self, repeat: int) -> None:
        self.root, self.repeat = Vertex(), repeat
        self.newest = [self.root]

    def grow(self, likely: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Add the tokens after each of the `newest` vertices, with their log-probabilities."""
        level: dict[tuple[int, ...], Vertex] = {}
        for father, tokens in zip(self.newest, likely, strict=True):
            for token, log_p in tokens:
                path = (*father.path, token)
                key = path[-(self.repeat + 1) :]  # with -1 the whole path, which no other vertex has
                vertex = level.setdefault(key, Vertex(path, father.score + log_p, slots=father.slots))
                father.children.append((vertex, log_p))
        self.newest = sorted(level.values(), key=lambda each: -each.score)

    def unroll(self, nodes: int) -> list[tuple[int, int]]:
        """Return the likeliest paths as a tree of at most `nodes` candidates: their tokens and parents."""
        tree: list[tuple[int, int]] = []
        waiting = [(0.0, 0, 0, self.root)]
        count = 0  # of equal scores the earlier one is taken, so that no vertices are compared
        while waiting and len(tree) < nodes:
            cost, _, parent, vertex = heapq.heappop(waiting)
            if vertex.path:
                tree.append((vertex.path[-1], parent))
            for child, log_p in vertex.children:
                count += 1
                heapq.heappush(waiting, (cost - log_p, count, len(tree), child))
        return tree


class GraphSession(RereadSession):
    """Draft model of one batch.

    Attributes:
        vertices: number of vertices that the draft model has read, roots excluded.
    """

    counters = RereadSession.counters | {"vertices"}

    drafter: GraphDrafter
    vertices: int = 0

    def _draft(self, canvas: Canvas, step: Tensor, counts: Tensor | None) -> Draft:
        how, depths, logits = self.drafter, list[int](), self._read(step, counts)
        graphs = [DraftGraph(how.repeat) for _ in canvas.ids]
        faulty = torch.zeros_like(canvas.root, dtype=torch.bool)
        for level in range(how.depth):
            if level:
                width = max(len(graph.newest) for graph in graphs)
                if not width:
                    break
                depths += [level - 1] * width
                logits = self._read_level(graphs, depths, width)
            log_p, tokens = logits.log_softmax(-1).topk(how.siblings)
            faulty = faulty | log_p.isnan().flatten(1).any(-1)
            rows = torch.stack([tokens.double(), log_p.double()], -1).tolist()  # one read of the device
            for graph, row in zip(graphs, rows, strict=True):
                graph.grow([how.kept(*each) for each in zip(graph.newest, row, strict=False)])
        trees = [graph.unroll(how.num_draft_tokens) for graph in graphs]
        return lay_out(canvas.root, trees, how.depth, faulty)

    def _read_level(self, graphs: Sequence[DraftGraph], depths: Sequence[int], width: int) -> Tensor:
        """Feed the newest vertices of each row, padded to `width`; return their logits [B, width, V].

        Args:
            graphs: of the rows.
            depths: of all slots of the draft; those of these vertices come last.
            width: number of slots of this level.
        """
        slots = range(len(depths) - width, len(depths))
        tokens, seen = [], []
        for graph in graphs:
            for vertex, slot in zip(graph.newest, slots, strict=False):
                vertex.slots += (slot,)
            self.vertices += len(graph.newest)
            level = graph.newest + [Vertex((0,), slots=(slot,)) for slot in slots[len(graph.newest) :]]
            tokens.append([vertex.path[-1] for vertex in level])
            seen.append([[slot in vertex.slots for slot in range(len(depths))] for vertex in level])
        device, rows = self.drafter.model.device, len(graphs)
        nodes = Nodes(
            torch.tensor(tokens, device=device),
            torch.tensor([*slots], device=device).expand(rows, -1),
            torch.tensor(depths, device=device).expand(rows, -1),
            torch.tensor(seen, device=device),
            depths[-1],
        )
        return self._score(nodes)


class GraphDrafter(RereadDrafter):
    """Drafts a graph with a smaller model, in which equal tokens of a level share what follows them.

    Args:
        model: the draft model.
        num_draft_tokens: largest number of candidates, after the paths are unrolled for the target.
        depth: of the graph.
        siblings: largest number of tokens after a vertex.
        repeat: number of tokens before that must agree too where equal tokens are merged; -1 merges nothing.
        least_share: smallest probability of a token, as a share of the likeliest one's, 0 to 1.
        least_path: smallest probability of a path, above 0 to 1; no level has more than 1 / least_path
            vertices.

    Raises:
        InputError: a value is out of range.
    """

    session = GraphSession

    def __init__(
        self,
        model: CausalTarget,
        num_draft_tokens: int = 32,
        depth: int = 6,
        siblings: int = 4,
        repeat: int = 0,
        least_share: float = 0.1,
        least_path: float = 0.02,
    ) -> None:
        if not is_integer(repeat) or repeat < -1:
            raise InputError("repeat", repeat, "must be a number of tokens, or -1 to merge nothing")
        require_number("least_share", least_share, 0.0, 1.0, "must be a share from 0 to 1")
        require_number("least_path", least_path, 0.0, 1.0, "must be above 0 and at most 1", open_below=True)
        super().__init__(model, depth, num_draft_tokens, siblings=siblings)
        self.depth, self.num_draft_tokens = depth, num_draft_tokens
        self.siblings, self.repeat = siblings, repeat
        self.least_share, self.least_path = least_share, math.log(least_path)

    def kept(self, vertex: Vertex, likely: Sequence[Sequence[float]]) -> list[tuple[int, float]]:
        """Choose the tokens after a vertex from ids and log-probabilities of the likeliest, best first."""
        least = self.least_share * math.exp(likely[0][1])
        return [
            (int(token), log_p)
            for token, log_p in likely
            if math.exp(log_p) >= least and vertex.score + log_p >= self.least_path
        ]
