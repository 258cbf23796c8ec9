"""Scoring forwards that cost less to launch: captured in CUDA graphs, or compiled by torch.compile.

And the hooks that read hidden states in them.
"""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from transformers import PreTrainedConfig, PreTrainedModel

from mmspec.core.cache import RaggedCache, mask_width
from mmspec.core.graphs import Graph, Side, can_capture, capture
from mmspec.errors import InputError, UnsupportedModelError
from mmspec.open_types import AnyFunction, Inputs, Keywords

__all__ = ["LEAST_CAPACITY", "CapturedForward", "CompiledForward", "HiddenStates", "StaticCaches"]

NOTHING: Inputs = {}
MAX_GRAPHS = 32
MAX_CACHES = 4
LEAST_CAPACITY = 1024
#: Beyond 8 compiled forms of a function, of all models together, torch would go on without more of them.
FORMS = {"recompile_limit": 64, "isolate_recompiles": True}  # not in torch 2.11

logger = logging.getLogger(__name__)


class CompiledForward:
    """A forward compiled by torch.compile: by default one form for a node alone, one for more.

    Hooks that read hidden states have forms of their own.

    Where the compiler fails, the logger says so, and the forward runs as it is from then on. Copies compile
    anew.

    Args:
        name: of the model, for the log.
        forward: returns logits, or what stands for them.
        is_dynamic: one form for all sizes; else one for each, which is faster on a CPU.
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
    """The hidden states that are read in forwards of this thread."""

    now: HiddenStates | None = None


READING = Reading()


class HiddenStates:
    """Hidden states of chosen layers, collected by hooks in every forward until `close`.

    Forwards of the thread that made it, or called `begin` last; others run the same model meanwhile.

    Hooks work alike on every transformers version; `output_hidden_states=[...]` does not (5.17 drops the last
    index).

    Args:
        model: whose decoder is hooked.
        taps: layer indices, each for the input of that layer; -1 for the final, normed states.
        stays: whether `close` keeps the hooks, for the next batch.

    Raises:
        InputError: there is no such layer.
        UnsupportedModelError: a layer reads several streams of hidden states (Gemma 3n); in the forward.
    """

    def __init__(self, model: PreTrainedModel, taps: Sequence[int], stays: bool = False) -> None:
        decoder = model.get_decoder()
        layers: Sequence[nn.Module] = getattr(decoder, "layers", getattr(decoder, "h", ()))
        for tap in taps:
            if not -1 <= tap < len(layers):
                raise InputError("taps", tap, f"-1, or a layer index from 0 to {len(layers) - 1}")
        self._stays = stays
        self._states: dict[int, Tensor] = {}
        self._handles = [
            decoder.register_forward_hook(self._keep_output)
            if tap == -1
            else layers[tap].register_forward_pre_hook(partial(self._keep_input, tap), with_kwargs=True)
            for tap in taps
        ]
        self.begin()

    def begin(self) -> None:
        """Collect the states of the next forwards of this thread."""
        READING.now = self

    def take(self) -> dict[int, Tensor]:
        """Return the states of the last forward, tap -> [B, n, d], and forget them."""
        states, self._states = self._states, {}
        return states

    def put(self, states: dict[int, Tensor]) -> None:
        """Set the states of a forward that was replayed from a graph, where no hook runs."""
        self._states = states

    def close(self) -> None:
        """Remove the hooks, unless they stay."""
        for handle in [] if self._stays else self._handles:
            handle.remove()

    def _keep_input(
        self, tap: int, module: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor] = NOTHING
    ) -> None:
        if READING.now is not self:  # without keywords where the hook was just set, or is just being removed
            return
        state = args[0] if args else kwargs["hidden_states"]
        if state.dim() != 3:
            raise UnsupportedModelError(
                f"{type(module).__name__} reads several streams of hidden states, {tuple(state.shape)}; "
                "drafters can read those of one stream, [B, n, d]"
            )
        self._states[tap] = state

    def _keep_output(self, module: nn.Module, args: object, output: Any) -> None:
        if READING.now is not self:
            return
        self._states[-1] = output[0] if isinstance(output, tuple) else output.last_hidden_state


class CapturedForward:
    """Scoring forwards captured in CUDA graphs, one for each number of nodes and width of attention.

    A graph reads and writes the same addresses in every replay: those of its own copies of the inputs, and
    those of the cache. Calls take turns with the caches of a pool, which are cleared and not given back.

    Where a forward cannot be captured, the logger names the module that failed, and forwards of these shapes
    run as they are. Copies have no graphs.

    Args:
        model: whose forwards these are; for the log.
        forward: (keyword arguments, cache) -> logits; tensors among the arguments stay on the device.

    Attributes:
        caches: the pool.
    """

    def __init__(self, model: nn.Module, forward: Callable[[Inputs, RaggedCache], Tensor]) -> None:
        self._model, self._forward = model, forward
        self._graphs: OrderedDict[Hashable, Captured | None] = OrderedDict()
        self._side: Side | None = None
        self.caches = StaticCaches()

    def __reduce__(self) -> tuple[type[CapturedForward], tuple[nn.Module, Callable[..., Tensor]]]:
        return type(self), (self._model, self._forward)

    def __call__(
        self, inputs: Mapping[str, object], cache: RaggedCache, taps: HiddenStates | None = None
    ) -> Tensor:
        """Score the nodes that the cache was told of by `begin_score`; arguments as of `forward`."""
        if not can_capture(cache.lengths.device):
            return self._forward(inputs, cache)
        leaves, structure = tree_flatten((inputs, cache.plan.slots))
        # places to write to are in the plan; a cache that grew is at another address
        shapes = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves)
        key = id(cache), cache.plan.capacity, cache.plan.width, id(taps), str(structure), shapes
        if key not in self._graphs:
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
        # the next replay writes over what this one wrote, and drafters keep logits and states of several
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
                return Captured(graph, {} if taps is None else taps.take(), cache)
        except RuntimeError as error:
            where = entered[-1] if entered else "the forward"
            name = type(self._model).__name__
            logger.warning("%s: %s runs without a CUDA graph: %s", name, where, str(error).splitlines()[0])
            return None
        finally:
            cache.plan.slots = slots


class Captured(NamedTuple):
    """A captured forward: its graph, the hidden states that it writes, and the cache at its address."""

    graph: Graph
    taps: dict[int, Tensor]
    cache: RaggedCache


class StaticCaches:
    """Caches that one batch after another decodes in, at the same addresses."""

    def __init__(self) -> None:
        self._caches: list[RaggedCache] = []
        self._owners: dict[int, weakref.ref[object]] = {}

    def take(self, config: PreTrainedConfig, rows: int, capacity: int, device: torch.device) -> RaggedCache:
        """Return an empty cache that nobody decodes in, of the pool or new; arguments as of `RaggedCache`."""
        capacity = mask_width(max(capacity, LEAST_CAPACITY), device)
        for cache in self._caches:
            if cache.rows == rows and cache.plan.capacity >= capacity and self._is_free(cache):
                cache.clear()
                return cache
        cache = RaggedCache(config, rows, capacity, device)
        if cache.recurrent:
            return cache
        free = [each for each in self._caches if self._is_free(each)]
        if len(self._caches) >= MAX_CACHES and free:
            self._caches.remove(free[0])
        self._caches.append(cache)
        return cache

    def lend(self, cache: RaggedCache, owner: object) -> None:
        """Keep a cache of the pool from others until its owner is gone."""
        self._owners[id(cache)] = weakref.ref(owner)

    def _is_free(self, cache: RaggedCache) -> bool:
        owner = self._owners.get(id(cache))
        return owner is None or owner() is None


def tensors_of(leaves: list[object]) -> list[Tensor]:
    """Return the tensors among leaves, in order."""
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


@contextmanager
def modules_entered(model: nn.Module, names: list[str]) -> Iterator[None]:
    """Keep the names of the modules whose forwards this thread has begun and not ended, innermost last."""
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
