"""Whole decoding rounds in CUDA graphs: propose, score, verify and commit in one replay.

Between rounds, a batch is its `Rows`: the tensors in their row fields, and a few Python values. A graph owns
a copy of these tensors. `RoundGraphs` binds a batch to the copies of the graph of its kind, and each replay
leaves the values of the next round in them. Keys and values stay in the buffers of their cache, whose address
is fixed.

Python code of drafters and rules runs only while a graph is captured. What it depends on is part of the kind:
shapes, Python values, and the objects and tensors that are not row fields, by identity. `Rows.counters`,
`Rows.scratch` and `Rows.converted` name the attributes that are not. A cache is known by the addresses of its
buffers, so that rows may enter and leave it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor

from mmspec.core.cache import RaggedCache, WritePlan
from mmspec.core.canvas import Canvas
from mmspec.core.distributions import Categorical, Pairs
from mmspec.core.graphs import Graph, Side, can_capture, capture
from mmspec.core.image_grid import Layout
from mmspec.core.processors import EndingBias, Vectorized
from mmspec.core.rows import Rows
from mmspec.core.sampling import RowSettings

__all__ = ["RoundGraphs", "Steady"]

MAX_GRAPHS = 256  # a running batch has some for each of its sizes and lengths of drafts
MAX_SEEN = 4096
#: Lists of attributes on which no computation depends; see `Rows`.
LEFT_OUT = ("scratch", "counters", "converted")
#: Values that are equal for equal rounds; other objects are compared by identity.
PLAIN = (bool, int, float, str, Enum, torch.dtype, torch.device, type(None))

logger = logging.getLogger(__name__)


class Leaf(NamedTuple):
    """A tensor that a batch keeps between rounds: the attribute `name` of `owner`."""

    owner: Any
    name: str
    value: Tensor

    def set(self, value: Tensor) -> None:
        """Rebind the attribute, also of a frozen dataclass."""
        object.__setattr__(self.owner, self.name, value)


class Steady:
    """The state that a batch keeps between rounds: objects with attributes, and tensors among these.

    Args:
        rows: the parts of the batch that change from round to round.

    Attributes:
        objects: all `Rows` among them, and the write plans of caches.
        leaves: tensors in their row fields. Keys and values are not among them.
        is_static: whether all per-row state consists of tensors, in caches that a graph can read.
    """

    def __init__(self, rows: Sequence[Rows]) -> None:
        self.objects: list[Any] = []
        self.leaves: list[Leaf] = []
        self.is_static = True
        for each in rows:
            self._visit(each)

    @property
    def caches(self) -> list[RaggedCache]:
        """The caches among the objects."""
        return [each for each in self.objects if isinstance(each, RaggedCache)]

    def _visit(self, rows: Rows) -> None:
        if any(rows is each for each in self.objects):
            return
        self.objects.append(rows)
        if isinstance(rows, RaggedCache):
            self.objects.append(rows.plan)
            self.leaves.append(Leaf(rows, "lengths", rows.lengths))
            self.is_static &= rows.plan.reads_all and not rows.recurrent
            return
        if isinstance(rows, Categorical):
            self.is_static &= type(rows) in (Categorical, Pairs)
            names = list(vars(rows))
        elif type(rows).row_fields is None:
            self.is_static = False
            return
        else:
            names = [field.name for field in rows._fields()]
        for name in names:
            value = getattr(rows, name)
            if isinstance(value, Tensor):
                self.leaves.append(Leaf(rows, name, value))
            elif isinstance(value, Rows) and not isinstance(rows, Canvas):  # whose statistics are the host's
                self._visit(value)
            elif isinstance(value, list) and any(isinstance(item, Tensor) for item in value):
                self.is_static = False
        for each in rows.constants():
            self.objects.append(each)
            held = [(name, value) for name, value in vars(each).items() if isinstance(value, Tensor)]
            self.leaves += [Leaf(each, name, value) for name, value in held]

    def bind(self, own: Sequence[Tensor]) -> None:
        """Move the values of the leaves to the tensors of a graph, which the batch uses from now on."""
        moved: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for leaf, tensor in zip(self.leaves, own, strict=True):
            if leaf.value is not tensor:
                to, values = moved.setdefault(tensor.dtype, ([], []))
                to.append(tensor)
                values.append(leaf.value)
                leaf.set(tensor)
        for to, values in moved.values():  # one launch for each dtype
            torch._foreach_copy_(to, values)

    def kind(self) -> Hashable:
        """Describe all that the round's Python code reads, but for the values of tensors and counters."""
        shapes = tuple((leaf.name, leaf.value.shape, leaf.value.dtype) for leaf in self.leaves)
        held = {(id(leaf.owner), leaf.name) for leaf in self.leaves}
        return shapes, tuple(kind_of(each, held) for each in self.objects)

    def forget_derived(self) -> None:
        """Drop values that frozen objects have derived from tensors which replays have overwritten."""
        for each in self.objects:
            if is_dataclass(each) and not isinstance(
                each, RowSettings
            ):  # which derive from the host's values
                known = {field.name for field in fields(each)}
                for name in vars(each).keys() - known:
                    del vars(each)[name]


def kind_of(thing: Any, leaves: Set[tuple[int, str]]) -> Hashable:
    """Describe the attributes of an object that a round's Python code may read, without its leaves."""
    if isinstance(thing, Canvas):
        return Canvas, thing.most_logprobs  # the rest is for the host
    if isinstance(thing, RaggedCache):
        return RaggedCache, thing.addresses
    names = [field.name for field in fields(thing)] if is_dataclass(thing) else sorted(vars(thing))
    left_out = {name for kind in LEFT_OUT for name in getattr(thing, kind, ())}
    read = [name for name in names if name not in left_out and (id(thing), name) not in leaves]
    return type(thing), *((name, seen(vars(thing).get(name))) for name in read)


def seen(value: Any) -> Hashable:
    """A value for comparison: itself if it is plain, else its address; "" for the host's lists of numbers."""
    if isinstance(value, Tensor):
        return value.data_ptr(), value.shape
    if isinstance(value, Rows | WritePlan | Vectorized | EndingBias):
        return ""  # a part of its own
    if isinstance(value, LogitsProcessor):  # each call makes new ones
        return type(value), *((name, seen(each)) for name, each in sorted(vars(value).items()))
    if isinstance(value, list):
        return "" if all(isinstance(each, int) for each in value) else tuple(map(seen, value))
    if isinstance(value, tuple):
        return tuple(map(seen, value))
    found: Hashable = value if isinstance(value, (*PLAIN, Layout)) else id(value)
    return found


@dataclass
class CapturedRound:
    """A captured round.

    Attributes:
        graph: its graph; its inputs are the leaves of the batch.
        result: of the round, in memory of the graph.
        counted: increments of counters: index of the object, name, and amount.
        kept: objects and tensors that the graph reads, or that its kind identifies by `id`. Buffers of caches
            are not among them: they may be replaced, after which the kind does not come again.
    """

    graph: Graph
    result: Any
    counted: list[tuple[int, str, int]]
    kept: list[object]


class UnsteadyError(RuntimeError):
    """A round leaves another kind of state than it began with, so that no replay could follow another."""


class RoundGraphs:
    """Least-recently-used cache of the graphs of rounds, by their kind.

    A round runs eagerly until its kind has come `patience` times, in which kernels are compiled. Copies start
    empty.

    Args:
        name: of the model, for the log.
        patience: eager rounds before a capture.

    Attributes:
        is_settled: whether the last round took as long as further ones of its kind: no graph of it is still
            to be captured, and none was.
    """

    def __init__(self, name: str, patience: int = 1) -> None:
        self.name, self.patience = name, patience
        self._graphs: OrderedDict[Hashable, CapturedRound | None] = OrderedDict()
        self._seen: Counter[Hashable] = Counter()
        self._side: Side | None = None
        self._lock = threading.Lock()
        self.is_settled = True

    def __reduce__(self) -> tuple[type[RoundGraphs], tuple[str, int]]:
        return type(self), (self.name, self.patience)

    def clear(self) -> None:
        """Drop all graphs: the models compute something else now."""
        with self._lock:
            self._graphs.clear()
            self._seen.clear()

    def run(self, parts: Sequence[Rows], fixed: Sequence[Any], nodes: int, compute: Callable[[], Any]) -> Any:
        """Compute a round, replayed from a graph if one fits.

        Args:
            parts: of the batch that the round reads and changes.
            fixed: further objects that the round reads: the target, the drafter and the rule.
            nodes: number of nodes of the largest draft.
            compute: computes the round eagerly.

        Returns:
            What `compute` returns. In a graph's memory, it is valid until the next round begins.
        """
        steady, self.is_settled = Steady(parts), True
        if not steady.is_static or not can_capture(steady.leaves[0].value.device):
            return compute()
        for cache in steady.caches:
            cache.reserve(2 * nodes)  # of a head: the committed tokens and the tree
        kind = steady.kind(), tuple(map(id, fixed))
        with self._lock:
            if kind not in self._graphs:
                self.is_settled = False
                if self._seen[kind] < self.patience:
                    self._seen[kind] += 1
                    if len(self._seen) > MAX_SEEN:
                        self._seen.clear()
                    steady.forget_derived()
                    return compute()
                while len(self._graphs) >= MAX_GRAPHS:
                    self._graphs.popitem(last=False)
                steady.forget_derived()
                self._graphs[kind] = self._try_capture(parts, steady, fixed, compute)
            self._graphs.move_to_end(kind)
            captured = self._graphs[kind]
            if captured is None:
                steady.forget_derived()
                return compute()
            steady.bind(captured.graph.inputs)
            captured.graph.replay()
            for index, name, amount in captured.counted:
                owner = steady.objects[index]
                setattr(owner, name, getattr(owner, name) + amount)
            return captured.result

    def _try_capture(
        self, parts: Sequence[Rows], steady: Steady, fixed: Sequence[Any], compute: Callable[[], Any]
    ) -> CapturedRound | None:
        before = [dict(vars(each)) for each in steady.objects]
        originals: dict[int, Tensor] = {}
        own = tuple(originals.setdefault(id(leaf.value), leaf.value.clone()) for leaf in steady.leaves)
        results: list[Any] = []
        places = [cache.capacity for cache in steady.caches]

        def round(*tensors: Tensor) -> Tensor:
            results.append(compute())
            after = [leaf.value for leaf in Steady(parts).leaves]
            if [each.shape for each in after] != [each.shape for each in tensors]:
                raise UnsteadyError("the shapes of the state change in this round")
            if [cache.capacity for cache in steady.caches] != places:
                raise UnsteadyError("a cache grows in this round")
            for target, value in moves(tensors, after):
                target.copy_(value)
            return tensors[0]

        try:
            if self._side is None:
                device = own[0].device
                self._side = Side(torch.cuda.Stream(device), torch.cuda.graph_pool_handle())
            for leaf, tensor in zip(steady.leaves, own, strict=True):
                leaf.set(tensor)
            graph = capture(round, own, self._side, warm_ups=0)
            counted = [
                (index, name, getattr(each, name) - before[index][name])
                for index, each in enumerate(steady.objects)
                for name in getattr(each, "counters", ())
                if name in before[index]
            ]
            owners = zip(steady.objects, before, strict=True)
            read = (value for each, values in owners for value in values.values() if not is_cache(each))
            kept = [*fixed, *(value for value in read if not isinstance(value, Rows))]
            return CapturedRound(graph._replace(function=torch.clone), results[-1], counted, kept)
        except UnsteadyError:  # the first round after a prompt, for example
            return None
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            logger.warning("%s: rounds run without a CUDA graph of their own: %s", self.name, reason)
            return None
        finally:
            for each, values in zip(steady.objects, before, strict=True):
                vars(each).clear()
                vars(each).update(values)


def is_cache(thing: object) -> bool:
    """Return whether an object holds the buffers of a cache, or describes them."""
    return isinstance(thing, RaggedCache | WritePlan)


def moves(tensors: Sequence[Tensor], after: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair the tensors of a graph with the new values that they get, none of which a move overwrites."""
    storages = {each.untyped_storage().data_ptr() for each in tensors}
    pairs = [(old, new) for old, new in zip(tensors, after, strict=True) if new is not old]
    safe = [new.clone() if new.untyped_storage().data_ptr() in storages else new for _, new in pairs]
    yield from zip((old for old, _ in pairs), safe, strict=True)
