"""Scoring forward passes with less launch overhead: captured in CUDA graphs, or compiled by torch.compile.

Also the hooks that collect hidden states in them.
"""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from transformers import PreTrainedConfig, PreTrainedModel

from mmspec.core.cache import RaggedCache, mask_width
from mmspec.core.draft import Nodes
from mmspec.core.graphs import Graph, Side, can_capture, capture, graphs_mode
from mmspec.core.round_graphs import RoundGraphs
from mmspec.errors import InputError, UnsupportedModelError
from mmspec.open_types import AnyFunction, Inputs, Keywords
from mmspec.targets.admission import decoder_of

__all__ = ["LEAST_CAPACITY", "CapturedForward", "CompiledForward", "HiddenStates", "StaticCaches"]

NOTHING: Inputs = {}
MAX_GRAPHS = 32
MAX_CACHES = 4
LEAST_CAPACITY = 1024
PATIENCE = 3  # calls of a shape before it is captured, if nobody has asked for it
#: torch stops compiling after 8 compiled forms of a function, counted over all models, without these
#: settings.
FORMS = {"recompile_limit": 64, "isolate_recompiles": True}  # not in torch 2.11

logger = logging.getLogger(__name__)


class CompiledForward:
    """A function compiled by torch.compile: by default one form for a single node, and one for more.

    Hooks that collect hidden states have their own forms. If the compiler fails, the logger warns, and the
    function runs uncompiled from then on. Copies compile again.

    Args:
        name: of the model, for the log.
        forward: returns logits, or their replacement.
        is_dynamic: one form for all sizes; otherwise one for each, which is faster on a CPU.
    """

    def __init__(self, name: str, forward: AnyFunction, is_dynamic: bool = True) -> None:
        self.name, self._eager, self._is_dynamic = name, forward, is_dynamic
        known = inspect.signature(torch.compile).parameters
        settings: Keywords = {name: value for name, value in FORMS.items() if name in known}
        self._compiled: AnyFunction | None = torch.compile(forward, dynamic=is_dynamic, **settings)

    def __reduce__(self) -> tuple[type[CompiledForward], tuple[str, AnyFunction, bool]]:
        return type(self), (self.name, self._eager, self._is_dynamic)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if self._compiled is not None:
            try:
                return self._compiled(*args, **kwargs)
            except torch._dynamo.exc.TorchDynamoException as error:
                reason = " ".join(str(error).split())[:400]
                logger.warning("%s runs without torch.compile: %s", self.name, reason)
                self._compiled = None
        return self._eager(*args, **kwargs)


class Reading(threading.local):
    """The collector of hidden states in this thread."""

    now: HiddenStates | None = None


READING = Reading()


class HiddenStates:
    """Hidden states of chosen layers, collected by hooks in every forward pass until `close`.

    Only forward passes of the thread that created it, or called `begin` last, are collected; others may run
    the same model meanwhile. Hooks work alike on every transformers version; `output_hidden_states=[...]`
    does not (5.17 drops the last index).

    Args:
        model: the model with the decoder.
        taps: layer indices, each for the input of that layer; -1 for the final, normalised states.
        stays: whether `close` keeps the hooks, for the next batch.

    Attributes:
        change: function of a tapped layer, the states [R, n, d] that enter it and the scored nodes, which
            returns other states to enter it. Not in forward passes that are compiled or captured.

    Raises:
        InputError: there is no such layer.
        UnsupportedModelError: a layer has several streams of hidden states (Gemma 3n); raised in the forward
            pass.
    """

    change: Callable[[int, Tensor, Nodes], Tensor] | None = None

    def __init__(self, model: PreTrainedModel, taps: Sequence[int], stays: bool = False) -> None:
        decoder = decoder_of(model)
        layers: Sequence[nn.Module] = getattr(decoder, "layers", getattr(decoder, "h", ()))
        for tap in taps:
            if not -1 <= tap < len(layers):
                raise InputError("taps", tap, f"must be -1, or a layer index from 0 to {len(layers) - 1}")
        self._stays = stays
        self._states: dict[int, Tensor] = {}
        self._handles = [
            decoder.register_forward_hook(self._keep_output)
            if tap == -1
            else layers[tap].register_forward_pre_hook(partial(self._keep_input, tap), with_kwargs=True)
            for tap in taps
        ]
        self.begin()

    def begin(self, nodes: Nodes | None = None) -> None:
        """Collect the states of the next forward passes of this thread, which score `nodes` if given."""
        READING.now, self._nodes = self, nodes

    def take(self) -> dict[int, Tensor]:
        """Return the states of the last forward pass, tap -> [B, n, d], and clear them."""
        states, self._states = self._states, {}
        return states

    def put(self, states: dict[int, Tensor]) -> None:
        """Set the states of a forward pass that was replayed from a graph, where no hook runs."""
        self._states = states

    def close(self) -> None:
        """Remove the hooks, unless `stays` is set."""
        for handle in [] if self._stays else self._handles:
            handle.remove()

    def _keep_input(
        self, tap: int, module: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor] = NOTHING
    ) -> tuple[tuple[Tensor, ...], Mapping[str, Tensor]] | None:
        if READING.now is not self:  # kwargs may be missing while hooks are set
            return None
        state = args[0] if args else kwargs["hidden_states"]
        if state.dim() != 3:
            raise UnsupportedModelError(
                f"{type(module).__name__} has several streams of hidden states, {tuple(state.shape)}; "
                "drafters can read only one stream, [B, n, d]"
            )
        self._states[tap] = state
        if self.change is None or self._nodes is None:
            return None
        changed = self.change(tap, state, self._nodes)
        return ((changed, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": changed})

    def _keep_output(self, module: nn.Module, args: object, output: Any) -> None:
        if READING.now is not self:
            return
        self._states[-1] = output[0] if isinstance(output, tuple) else output.last_hidden_state


class CapturedForward:
    """Scoring forward passes captured in CUDA graphs, one for each number of nodes and width of attention.

    A graph reads and writes the same addresses in every replay: those of its own copies of the inputs, and
    those of the cache. Calls reuse the caches of a pool, which are cleared and never freed.

    If a forward pass cannot be captured, the logger names the module that failed, and forward passes of these
    shapes run without a graph. Copies have no graphs.

    Args:
        model: the model, for the log.
        forward: (keyword arguments, cache) -> logits; tensors among the arguments stay on the device.

    Attributes:
        caches: the pool.
        rounds: graphs of whole rounds, which contain the forward pass.
        patience: calls of a shape before it is captured.
    """

    def __init__(self, model: nn.Module, forward: Callable[[Inputs, RaggedCache], Tensor]) -> None:
        self._model, self._forward = model, forward
        self._graphs: OrderedDict[Hashable, Captured | None] = OrderedDict()
        self._side: Side | None = None
        self._seen: Counter[Hashable] = Counter()
        self._computation: int | None = None
        self.patience = PATIENCE if graphs_mode() == "auto" else 0
        self.caches = StaticCaches()
        self.rounds = RoundGraphs(type(model).__name__, 1 + self.patience)

    def __reduce__(self) -> tuple[type[CapturedForward], tuple[nn.Module, Callable[..., Tensor]]]:
        return type(self), (self._model, self._forward)

    def capture_at_once(self) -> None:
        """Capture each shape when it comes first."""
        self.patience, self.rounds.patience = 0, 1

    def renew(self, computation: int) -> None:
        """Drop all graphs if the model computes something else than when they were captured.

        Args:
            computation: see `computation_of`.
        """
        if computation != self._computation:
            self._computation = computation
            self._graphs.clear()
            self._seen.clear()
            self.rounds.clear()

    def __call__(
        self, inputs: Mapping[str, object], cache: RaggedCache, taps: HiddenStates | None = None
    ) -> Tensor:
        """Score the nodes that `begin_score` prepared; the arguments are those of `forward`."""
        if not can_capture(cache.lengths.device):
            return self._forward(inputs, cache)
        leaves, structure = tree_flatten((inputs, cache.plan.slots))
        # the slots are in the plan
        shapes = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves)
        key = cache.addresses, cache.plan.width, id(taps), str(structure), shapes
        if key not in self._graphs:
            if self._seen[key] < self.patience:
                self._seen[key] += 1
                return self._forward(inputs, cache)
            while len(self._graphs) >= MAX_GRAPHS:
                self._graphs.popitem(last=False)
            self._graphs[key] = self._try_capture(leaves, structure, cache, taps)
        self._graphs.move_to_end(key)
        captured = self._graphs[key]
        if captured is None:
            return self._forward(inputs, cache)
        for own, given in zip(captured.graph.inputs, tensors_of(leaves), strict=True):
            own.copy_(given)
        captured.graph.replay()
        # the next replay overwrites these results, and drafters keep logits and states of several rounds
        if taps is not None:
            taps.put({tap: state.clone() for tap, state in captured.taps.items()})
        return captured.graph.output.clone()

    def _try_capture(
        self, leaves: list[object], structure: TreeSpec, cache: RaggedCache, taps: HiddenStates | None
    ) -> Captured | None:
        def forward(*tensors: Tensor) -> Tensor:
            given = iter(tensors)
            inputs, cache.plan.slots = tree_unflatten(
                [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
            )
            return self._forward(inputs, cache)

        slots = cache.plan.slots
        entered: list[str] = []
        try:
            with modules_entered(self._model, entered):
                if self._side is None:
                    device = cache.lengths.device
                    self._side = Side(torch.cuda.Stream(device), torch.cuda.graph_pool_handle())
                graph = capture(forward, tuple(each.clone() for each in tensors_of(leaves)), self._side)
                return Captured(graph, {} if taps is None else taps.take())
        except RuntimeError as error:
            where = entered[-1] if entered else "the forward pass"
            name = type(self._model).__name__
            logger.warning("%s: %s runs without a CUDA graph: %s", name, where, str(error).splitlines()[0])
            return None
        finally:
            cache.plan.slots = slots


class Captured(NamedTuple):
    """A captured forward pass: its graph, and the hidden states that it writes.

    It does not keep its cache: with another one at the same addresses it computes the same.
    """

    graph: Graph
    taps: dict[int, Tensor]


class StaticCaches:
    """Pool of caches that consecutive batches use at the same addresses."""

    def __init__(self) -> None:
        self._caches: list[RaggedCache] = []
        self._owners: dict[int, weakref.ref[object]] = {}

    def take(self, config: PreTrainedConfig, rows: int, capacity: int, device: torch.device) -> RaggedCache:
        """Return an empty, unused cache, from the pool or new; the arguments are those of `RaggedCache`."""
        capacity = mask_width(max(capacity, LEAST_CAPACITY), device)
        self._caches = [cache for cache in self._caches if not cache.is_taken]
        for cache in self._caches:
            if cache.rows == rows and cache.plan.capacity >= capacity and self._is_free(cache):
                cache.clear()
                return cache
        cache = RaggedCache(config, rows, capacity, device)
        if cache.recurrent:
            return cache
        cache.keeps_buffers = True
        free = [each for each in self._caches if self._is_free(each)]
        if len(self._caches) >= MAX_CACHES and free:
            self._caches.remove(free[0])
        self._caches.append(cache)
        return cache

    def lend(self, cache: RaggedCache, owner: object) -> None:
        """Reserve a cache of the pool until its owner is deleted."""
        self._owners[id(cache)] = weakref.ref(owner)

    def _is_free(self, cache: RaggedCache) -> bool:
        owner = self._owners.get(id(cache))
        return owner is None or owner() is None


def tensors_of(leaves: list[object]) -> list[Tensor]:
    """Return the tensors among leaves, in order."""
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


@contextmanager
def modules_entered(model: nn.Module, names: list[str]) -> Iterator[None]:
    """Record the names of the modules that are running in this thread, innermost last."""
    thread = threading.get_ident()

    def enter(name: str, *_: object) -> None:
        if threading.get_ident() == thread:
            names.append(name)

    def leave(*_: object) -> None:
        if threading.get_ident() == thread:
            names.pop()

    handles = [
        handle
        for name, module in model.named_modules()
        for handle in (
            module.register_forward_pre_hook(partial(enter, name)),
            module.register_forward_hook(leave),
        )
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
