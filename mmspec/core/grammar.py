"""Grammars: the tokens that a grammar allows after every node of a draft, and those that it forces.

Where a grammar leaves one text, the tokenizer's own tokens of that text are the only allowed ones, although
others spell it too: text is then tokenised as in training, and a forced token is certain. Certain tokens are
candidates of every drafter that accepts them, with q = 1, so that structured output takes fewer forward
passes than free text. Plain decoding follows the same rule; outputs are therefore equal.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import LogitsProcessor

from mmspec.core.distributions import AnyDistribution, Categorical, PointMass
from mmspec.core.draft import Draft, DraftKind, Tree
from mmspec.core.graphs import can_capture, power_of_two
from mmspec.core.indexing import pick
from mmspec.core.processors import KINDS, Paths, Vectorized

if TYPE_CHECKING:
    from mmspec.core.canvas import Canvas

__all__ = ["MOST_CERTAIN", "GrammarProcessor", "Matcher", "TextGrammar", "with_certain"]

MOST_CERTAIN = 32  # certain tokens that are added to the draft of a row; each is one more node to score
BITS = 8  # of a byte of a mask
DRAWN = (DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT)

logger = logging.getLogger("mmspec")


@dataclass(frozen=True)
class TextGrammar:
    """A grammar over the tokens of one tokenizer.

    Attributes:
        source: in llguidance's own format.
        tokenizer: an `llguidance.LLTokenizer`, whose end tokens are allowed where the grammar may end.
    """

    source: str
    tokenizer: Any

    def start(self) -> Matcher:
        """Return a matcher at the beginning of an output."""
        return Matcher(self)


class Allowed(NamedTuple):
    """The tokens that a grammar allows after a path.

    Attributes:
        bits: one bit for each token of the tokenizer, from the lowest bit of the first byte on.
        only: the allowed token, if it is the only one.
        ended: whether the path is outside the grammar or behind its end, so that no candidate can follow.
    """

    bits: bytes
    only: int | None
    ended: bool = False

    def allows(self, token: int) -> bool:
        """Whether a token is allowed."""
        place, bit = divmod(token, BITS)
        return place < len(self.bits) and bool(self.bits[place] >> bit & 1)


class Matcher:
    """Position of one row in its grammar, which follows any path and goes back from rejected nodes.

    Args:
        grammar: the grammar of the row.

    Attributes:
        everything: the bits of `Allowed` that exclude nothing.
    """

    def __init__(self, grammar: TextGrammar) -> None:
        from llguidance import LLMatcher  # optional; the grammar's tokenizer is made with it

        tokenizer = grammar.tokenizer
        self._matcher = LLMatcher(tokenizer, grammar.source)
        self._ends = frozenset(tokenizer.eos_tokens)
        self._size = (tokenizer.vocab_size + BITS - 1) // BITS
        self.everything = b"\xff" * self._size
        self._output: list[int] = []
        self._path: list[int] = []  # tokens that the matcher has consumed
        self._known: dict[tuple[int, ...], Allowed] = {}  # of paths after the output

    def commit(self, output: Sequence[int]) -> None:
        """Set the committed tokens of the row, without its prompt."""
        if output != self._output:
            self._output, self._known = list(output), {}

    def after(self, path: tuple[int, ...] = ()) -> Allowed:
        """Return the tokens that are allowed after the output and a path of candidates."""
        if path not in self._known:
            self._known[path] = self._look([*self._output, *path])
        return self._known[path]

    def _look(self, tokens: Sequence[int]) -> Allowed:
        pairs = enumerate(zip(self._path, tokens, strict=False))
        shared = next((place for place, (old, new) in pairs if old != new), min(len(self._path), len(tokens)))
        if shared < len(self._path):
            self._matcher.rollback(len(self._path) - shared)
        more = list(tokens[shared:])
        ends = next((place for place, token in enumerate(more) if token in self._ends), len(more))
        shared += self._matcher.try_consume_tokens(more[:ends])
        self._path = list(tokens[:shared])
        if shared < len(tokens):
            return self._bits_of(self._ends, ended=True)
        if forced := self._matcher.compute_ff_tokens():
            return self._bits_of({forced[0]})
        bits = self._matcher.compute_bitmask()[: self._size]  # whole words of 32 bits, and one more
        if self._matcher.is_error():
            logger.warning("a row ends, because its grammar failed: %s", self._matcher.get_error())
            return Allowed(
                bytes(self._size), None, ended=True
            )  # logits without a token are an error of the row
        number = int.from_bytes(bits, "little")
        return Allowed(bits, number.bit_length() - 1 if number.bit_count() == 1 else None)

    def _bits_of(self, tokens: Set[int], ended: bool = False) -> Allowed:
        bits = bytearray(self._size)
        for token in tokens:
            bits[token // BITS] |= 1 << token % BITS
        return Allowed(bytes(bits), min(tokens) if len(tokens) == 1 else None, ended)


class GrammarProcessor(LogitsProcessor):
    """Logits processor that excludes the tokens that the grammar of a row does not allow.

    It serves one call: the first ids that it receives are the prompts. Where other processors exclude every
    token that the grammar allows, such as the end token before `min_new_tokens`, the grammar's tokens are
    equally likely.

    Args:
        grammars: one for all rows, or one for each row; None for rows without a grammar.
    """

    depends_on_path_alone = True

    def __init__(self, grammars: Sequence[TextGrammar | None]) -> None:
        self.grammars = list(grammars)
        self._matchers: list[Matcher | None] = []
        self._prompt_length = 0

    def of_row(self, row: int) -> GrammarProcessor | None:
        """Return a new processor of one row; None if the row has no grammar."""
        grammar = self.grammars[row % len(self.grammars)]
        return None if grammar is None else GrammarProcessor([grammar])

    def matchers(self, rows: Sequence[Sequence[int]]) -> list[Matcher | None]:
        """Return the matchers of all rows after their committed ids, those of the prompts included."""
        if not self._matchers:
            self._prompt_length = len(rows[0])
            grammars = [self.grammars[row % len(self.grammars)] for row in range(len(rows))]
            self._matchers = [None if grammar is None else grammar.start() for grammar in grammars]
        for matcher, ids in zip(self._matchers, rows, strict=True):
            if matcher is not None:
                matcher.commit(ids[self._prompt_length :])
        return self._matchers

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        matchers = self.matchers(input_ids.tolist())
        bits = [None if matcher is None else [matcher.after().bits] for matcher in matchers]
        return exclude_others(scores[:, None], bits)[:, 0]


class GrammarMasks(Vectorized):
    """Excludes the tokens that the rows' grammars do not allow, after every node of a draft."""

    def __init__(self, rows: Sequence[Any], logits: Tensor) -> None:
        self.rows: Sequence[GrammarProcessor | None] = rows

    def __call__(self, logits: Tensor, paths: Paths) -> Tensor:
        draft, bits = paths.draft, list[list[bytes] | None]()
        nodes = torch.stack([draft.tokens, draft.parents, draft.valid], 1).tolist()  # one read of the device
        for matcher, row in zip(matchers_of(self.rows, paths.history.ids), nodes, strict=True):
            if matcher is None:
                bits.append(None)
                continue
            taken: list[tuple[int, ...]] = []
            for token, parent, _ in zip(*row, strict=True):
                taken.append((*taken[parent], token) if taken else ())
            valid = zip(taken, row[2], strict=True)  # padding is not accepted, whatever its logits are
            bits.append([matcher.after(path).bits if real else matcher.everything for path, real in valid])
        return exclude_others(logits, bits)


KINDS[GrammarProcessor] = GrammarMasks


def matchers_of(
    rows: Sequence[GrammarProcessor | None], committed: Sequence[Sequence[int]]
) -> list[Matcher | None]:
    """Return the matcher of each row after its committed ids; None for rows without a grammar."""
    pairs = zip(rows, committed, strict=True)
    return [None if processor is None else processor.matchers([ids])[0] for processor, ids in pairs]


def exclude_others(logits: Tensor, bits: Sequence[Sequence[bytes] | None]) -> Tensor:
    """Exclude the tokens that grammars do not allow.

    Args:
        logits: [B, n, V].
        bits: of each row, the bits of its n nodes (see `Allowed`); None to leave a row unchanged.
    """
    acting = [row for row, own in enumerate(bits) if own is not None]
    if not acting:
        return logits
    packed = bytearray(b"".join(each for own in bits for each in own or ()))
    bytes_of = torch.frombuffer(packed, dtype=torch.uint8).view(len(acting), logits.shape[1], -1)
    powers = torch.tensor([1 << bit for bit in range(BITS)], dtype=torch.uint8, device=logits.device)
    allowed = (bytes_of.to(logits.device)[..., None] & powers).ne(0).flatten(2)
    missing = logits.shape[-1] - allowed.shape[-1]  # models have rows without a token, and tokenizers bits
    allowed = pad(allowed, (0, missing))
    everyone = len(acting) == len(logits)
    index = torch.tensor(acting, device=logits.device)
    masked = (logits if everyone else logits[index]).masked_fill(~allowed, -math.inf)
    nothing = masked.amax(-1, keepdim=True) == -math.inf
    masked = masked.masked_fill(nothing & allowed, 0.0)
    return masked if everyone else logits.index_copy(0, index, masked)


class Node(NamedTuple):
    """Node of a draft with certain tokens.

    Attributes:
        token: its id.
        parent: index of its parent in the new draft.
        source: index in the drafter's draft; 0 for tokens that the drafter did not propose.
        depth: number of edges from the root.
        certain: whether the grammar forces the token.
    """

    token: int
    parent: int
    source: int
    depth: int
    certain: bool


def with_certain(
    draft: Draft, rows: Sequence[GrammarProcessor | None], canvas: Canvas, vocabulary: int
) -> Draft:
    """Add the tokens that grammars force to a draft, and remove candidates that cannot be accepted.

    A certain token replaces all candidates of its place: the target gives it probability 1. Candidates that
    the grammar excludes are removed, unless they were drawn: their rejection is then a part of the rule.
    Candidates behind an excluded token or an end token are removed.

    Args:
        draft: of the drafter. Blocks and trees with more than candidates are returned as they are.
        rows: processor of each row; None for rows without a grammar.
        canvas: the output so far.
        vocabulary: V.
    """
    if type(draft) is not Tree:
        return draft
    drawn = draft.kind in DRAWN
    packed = torch.stack([draft.tokens, draft.parents, draft.valid], 1).tolist()  # one read of the device
    trees, changed = list[list[Node]](), False
    for row, (matcher, nodes) in enumerate(zip(matchers_of(rows, canvas.ids), packed, strict=True)):
        tokens, parents, valid = nodes
        given = [node for node, is_valid in enumerate(valid) if is_valid]
        left = canvas.stopping[row].max_new_tokens - canvas.output_lengths[row]
        tree = grow(None if canvas.finish_reasons[row] else matcher, tokens, parents, valid, drawn, left)
        trees.append(tree)
        changed |= sorted(node.source for node in tree) != given
        changed |= drawn and any(node.certain for node in tree)
    return tree_of(draft, trees, drawn, vocabulary) if changed else draft


def grow(
    matcher: Matcher | None,
    tokens: Sequence[int],
    parents: Sequence[int],
    valid: Sequence[int],
    drawn: bool,
    left: int,
) -> list[Node]:
    """Return the nodes of a row's new draft, parents before children and siblings in their order.

    Args:
        matcher: at the root; None to keep the draft.
        tokens, parents, valid: [n] of the drafter's draft.
        drawn: whether candidates were drawn from q.
        left: tokens that the row may still emit.
    """
    children: dict[int, list[int]] = {}
    for node in range(1, len(tokens)):
        if valid[node]:
            children.setdefault(parents[node], []).append(node)
    found, room = [Node(tokens[0], 0, 0, 0, False)], MOST_CERTAIN
    paths: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]  # node, source and tokens behind the root

    def add(token: int, parent: int, source: int, certain: bool, path: tuple[int, ...]) -> None:
        found.append(Node(token, parent, source, found[parent].depth + 1, certain))
        paths.append((len(found) - 1, source, (*path, token)))

    for node, source, path in paths:  # which grow meanwhile
        of_drafter = children.get(source, []) if source or not node else []
        allowed = None if matcher is None else matcher.after(path)
        if allowed is None:
            for child in of_drafter:
                add(tokens[child], node, child, False, path)
        elif allowed.ended:
            continue
        elif allowed.only is not None:
            source = next((child for child in of_drafter if tokens[child] == allowed.only), 0)
            if source or (room and found[node].depth < left):
                room -= not source
                add(allowed.only, node, source, True, path)
        else:
            for child in of_drafter:
                if allowed.allows(tokens[child]):
                    add(tokens[child], node, child, False, path)
                elif drawn:
                    found.append(Node(tokens[child], node, child, found[node].depth + 1, False))
    return found


def tree_of(draft: Tree, trees: Sequence[Sequence[Node]], drawn: bool, vocabulary: int) -> Tree:
    """Build the tree of nodes that were grown from a draft; chains stay chains."""
    size = max(map(len, trees))
    if can_capture(draft.tokens.device):  # few sizes, because each is captured in a graph
        size = power_of_two(size)
    nothing = Node(0, 0, 0, 0, False)
    columns = [[*tree, *[nothing] * (size - len(tree))] for tree in trees]
    table = torch.tensor(columns, dtype=torch.long, device=draft.tokens.device)  # [B, n, 5]
    tokens, parents, sources, depths, certain = table.unbind(-1)
    lengths = torch.tensor([[len(tree)] for tree in trees], device=tokens.device)
    valid = torch.arange(size, device=tokens.device) < lengths
    q: AnyDistribution = PointMass(tokens[:, 1:])
    if drawn:
        q = Categorical(q_of(draft.q, tokens[:, 1:], sources[:, 1:], certain[:, 1:].bool(), vocabulary))
    if draft.max_children <= 1:
        return Tree.chain(tokens, draft.kind, q, valid, draft.faulty)
    return Tree(
        tokens, valid, draft.kind, q, draft.faulty, parents, int(max(map(deepest, trees))), draft.max_children
    )


def q_of(q: AnyDistribution, tokens: Tensor, sources: Tensor, certain: Tensor, vocabulary: int) -> Tensor:
    """[B, n - 1, V] distributions of the new candidates: the drafter's own, and q = 1 at certain tokens."""
    ones = torch.zeros(*tokens.shape, vocabulary, device=tokens.device).scatter_(-1, tokens[..., None], 1.0)
    if not isinstance(q, Categorical) or not q.p.shape[1]:
        return ones
    own = pick(q.p, (sources - 1).clamp_min(0))
    return torch.where(certain[..., None], ones.to(own.dtype), own)


def deepest(tree: Sequence[Node]) -> int:
    """Return the depth of the deepest node."""
    return max(node.depth for node in tree)
