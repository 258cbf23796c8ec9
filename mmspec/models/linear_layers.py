"""Fast linear layers on a CPU: each product is computed in the fastest of three ways.

torch computes the product x W^T of a linear layer with the BLAS, which prepares all of W in each call. Two to
sixteen rows then take two to four times as long as one, although the same weights are read. Two other ways
avoid this:

- transposed: W x^T, with x^T padded by zeros to a width at which the BLAS is fast;
- packed: oneDNN's product with weights that were reordered once, as the freezing of torch.compile does. The
  packed weights are a second copy; `Packing` limits it to a share of the free memory.

The fastest way depends on the processor, the BLAS, the sizes and the number of threads. It is measured once
per process and layer width, in about a quarter of a second, at the first product of that width.
"""

from __future__ import annotations

import functools
import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from time import perf_counter
from typing import cast
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from mmspec.models.free_memory import free_bytes
from mmspec.models.replaced import Confined

__all__ = ["LinearLayers", "Packing", "Product", "Way", "fastest", "forget", "measure", "packing_of"]

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
LEAST_WEIGHTS = 2**15  # smaller layers do not repay the overhead of a choice
CLEARLY = 1.1  # factor by which a way must be faster than another; less is noise
PACKED_ROWS = 5  # fewer rows are padded to five, which oneDNN computes faster than one or two
MOST_TRANSPOSED = 32  # rows
SHARE = 0.5  # default share of the free memory for packed weights
SAMPLED = 16  # elements of a weight that are compared to detect uncounted writes

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 256)  # measured numbers of rows; others use the next larger one
DRAFTS = range(4, 65)  # numbers of rows that weights are packed for
SIZES = (288, 576, 1152, 2304, 4608, 9216)  # measured inputs; no powers of two, which are slow in caches
SAMPLE, LEAST_OUT = 2**19, 256  # elements of a measured weight, and its least number of outputs
SAMPLES = 8  # weights that are read in turn, as layers are, so that no cache holds them all
TRIALS = 3  # of all ways in turn
MEASURING = threading.Lock()
LOCK = threading.RLock()  # for all layers; reentrant, since garbage collection may close a decoding inside


class Way(Enum):
    """How the product of a linear layer is computed."""

    TORCH = "torch"
    TRANSPOSED = "transposed"
    PACKED = "packed"


def pack(weight: Tensor) -> Tensor:
    """A copy of a weight [out, in] in the order of elements that oneDNN reads fastest."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8)
    return packed


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product x W^T + b [rows, out] of x [rows, in] and a packed W."""
    rows = len(x)
    if rows < PACKED_ROWS:
        x = pad(x, (0, 0, 0, PACKED_ROWS - rows))
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y if rows >= PACKED_ROWS else y[:rows]


def transposed_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product x W^T + b [rows, out] of x [rows, in], as the transpose of W x^T."""
    rows = len(x)
    # a product with a vector runs on one core, and the BLAS is slow at some widths
    columns = max(2, rows if 4 < rows <= 8 or rows > 16 else bucket(rows))
    if columns > rows:
        x = pad(x, (0, 0, 0, columns - rows))
    y = (weight @ x.T)[:, :rows].T.contiguous()
    return y if bias is None else y.add_(bias)


def bucket(rows: int) -> int:
    """The measured number of rows that stands for another number of rows."""
    return BUCKETS[min(bisect_left(BUCKETS, rows), len(BUCKETS) - 1)]


@functools.cache
def fastest(rows: int, size: int, dtype: torch.dtype, threads: int, packs: bool) -> Way:
    """Return the fastest way to compute x W^T on this machine.

    Args:
        rows: rows of x [rows, in], a value of `bucket`.
        size: columns of x.
        dtype: number format of x and W.
        threads: torch's number of threads.
        packs: whether W may be packed.
    """
    nearest = min(SIZES, key=lambda measured: abs(math.log(measured / size)))
    measured = measure(nearest, dtype, threads)
    seconds = measured[rows]
    if packs and Way.PACKED in seconds:
        drafts = [measured[few] for few in BUCKETS if few in DRAFTS]
        pays = sum(one[Way.TORCH] for one in drafts) > CLEARLY * sum(one[Way.PACKED] for one in drafts)
        if pays and seconds[Way.PACKED] < CLEARLY * min(seconds.values()):
            return Way.PACKED
    is_faster = seconds[Way.TORCH] > CLEARLY * seconds.get(Way.TRANSPOSED, math.inf)
    return Way.TRANSPOSED if is_faster else Way.TORCH


@functools.cache
def measure(size: int, dtype: torch.dtype, threads: int) -> dict[int, dict[Way, float]]:
    """Measure the seconds of a product by number of rows, in each way that this machine supports.

    The result is the minimum over some trials, with all ways in turn; arguments as of `fastest`.
    """
    with MEASURING, torch.inference_mode():
        out = max(LEAST_OUT, SAMPLE // size)
        most = max(2, SAMPLES * SAMPLE // (out * size))
        weights = [torch.ones(out, size, dtype=dtype, device="cpu") for _ in range(most)]
        try:
            packed = [pack(weight) for weight in weights]
            packed_product(weights[0][:1], packed[0])
        except (AttributeError, RuntimeError):  # no oneDNN, or not in this number format
            packed = []
        counts = {rows: max(1, min(most, 64 * most // rows)) for rows in BUCKETS}
        return {rows: time_ways(rows, weights[:count], packed[:count]) for rows, count in counts.items()}


def time_ways(rows: int, weights: Sequence[Tensor], packed: Sequence[Tensor]) -> dict[Way, float]:
    """Seconds of a product of that many rows in each way; `packed` may be empty."""
    x = weights[0].new_zeros(rows, weights[0].shape[1])
    ways: dict[Way, tuple[Callable[[Tensor, Tensor], Tensor], Sequence[Tensor]]] = {
        Way.TORCH: (linear, weights)
    }
    if rows <= MOST_TRANSPOSED:
        ways[Way.TRANSPOSED] = transposed_product, weights
    if packed:
        ways[Way.PACKED] = packed_product, packed
    for product, given in ways.values():
        product(x, given[0])  # oneDNN compiles a product at its first call
    seconds = dict.fromkeys(ways, math.inf)
    for _ in range(TRIALS):
        for way, (product, given) in ways.items():
            begun = perf_counter()
            for weight in given:
                product(x, weight)
            seconds[way] = min(seconds[way], (perf_counter() - begun) / len(weights))
    return seconds


@dataclass
class Packing:
    """Memory limit of packed weights.

    Attributes:
        share: share of the memory that would be free without them; 0 packs nothing, 1 all that fits.
    """

    share: float = SHARE

    def allows(self, more: int) -> bool:
        """Whether that many more bytes may be packed."""
        if not self.share:
            return False
        held = sum(each.nbytes for each in PACKED.values())
        return held + more <= self.share * (free_bytes(torch.device("cpu")) + held)


#: Memory limits of packed weights by model, common to all pipelines of a model.
PACKING: WeakKeyDictionary[nn.Module, Packing] = WeakKeyDictionary()


def packing_of(model: nn.Module) -> Packing:
    """Return the memory limit of a model's packed weights; assign to its `share` to change it."""
    return PACKING.setdefault(model, Packing())


class Packed:
    """Packed copy of a weight [out, in], as the weight was when the copy was made."""

    def __init__(self, weight: Tensor) -> None:
        self.copy, self.nbytes = pack(weight), weight.nbytes
        self._weight, self._sample, self._state = ref(weight), sample(weight), state_of(weight)

    def is_of(self, weight: Tensor) -> bool:
        """Whether this is the copy of a weight as it is now, except for writes that torch does not count."""
        return self._weight() is weight and self._state == state_of(weight)

    def is_current(self, weight: Tensor) -> bool:
        """As `is_of`, and some elements are equal: torch does not count writes through `.data` (LoRA)."""
        return self.is_of(weight) and torch.equal(self._sample, sample(weight))


#: All packed weights of the process, by the `id` of the weight, so that its users share one copy.
PACKED: WeakValueDictionary[int, Packed] = WeakValueDictionary()


def state_of(weight: Tensor) -> tuple[int, int]:
    """The address of a weight and its number of writes, which torch does not count in inference mode."""
    return weight.data_ptr(), -1 if weight.is_inference() else weight._version


def sample(weight: Tensor) -> Tensor:
    """Some elements of a contiguous weight."""
    flat = weight.detach().view(-1)
    return flat[:: max(1, len(flat) // SAMPLED)].clone()


class Product:
    """The product x W^T + b of a linear layer, computed in the fastest way, with a packed W if that is it.

    Attributes:
        packing: memory limit of packed weights.
    """

    __slots__ = ("__weakref__", "_is_settled", "_packed", "packing")

    def __init__(self, packing: Packing) -> None:
        self.packing = packing
        self._packed: Packed | None = None
        self._is_settled = False

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The output [..., out] for x [..., in] and W [out, in]."""
        if not is_open(x, weight):
            return linear(x, weight, bias)
        rows = x.numel() // x.shape[-1]
        kind = bucket(rows), x.shape[-1], weight.dtype, torch.get_num_threads()
        way, packed = fastest(*kind, True), None
        if way is Way.PACKED and (packed := self._copy_of(weight)) is None:
            way = fastest(*kind, False)
        if way is Way.TORCH:
            return linear(x, weight, bias)
        flat = x.reshape(rows, -1)
        y = transposed_product(flat, weight, bias) if packed is None else packed_product(flat, packed, bias)
        return y.view(*x.shape[:-1], -1)

    def begin(self, weight: Tensor) -> None:
        """Begin a pipeline call: drop the copy of a weight that has changed or may no longer be packed."""
        packed = self._packed
        if packed is not None and not (self.packing.share and packed.is_current(weight)):
            self._packed = None
        self._is_settled = False

    def _copy_of(self, weight: Tensor) -> Tensor | None:
        """The packed weight; None if memory is short, or if the weight changed during the call."""
        packed = self._packed
        if packed is None and not self._is_settled:
            self._is_settled = True
            packed = self._packed = packed_of(weight, self.packing)
        return packed.copy if packed is not None and packed.is_of(weight) else None


def is_open(x: Tensor, weight: Tensor) -> bool:
    """Whether a product may be computed in a way other than torch's."""
    return (
        weight.is_cpu
        and x.dtype == weight.dtype
        and weight.dtype in DTYPES
        and weight.numel() >= LEAST_WEIGHTS
        and x.numel() > 0
        and type(weight) in (Tensor, nn.Parameter)
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


def packed_of(weight: Tensor, packing: Packing) -> Packed | None:
    """The packed copy of a weight, made if there is none yet; None if memory is short."""
    with LOCK:
        known = PACKED.get(id(weight))
        if known is not None and known.is_current(weight):
            return known
        if not (weight.is_contiguous() and packing.allows(weight.nbytes)):
            return None
        made = PACKED[id(weight)] = Packed(weight)
        return made


class Fast(threading.local):
    """Whether this thread computes linear layers in the fastest way."""

    here = False


FAST = Fast()


class FastForward(Confined):
    """A `forward` of a linear layer that reads its current weights, and is fast inside `LinearLayers`.

    Attributes:
        product: product of the layer.
        users: number of contexts, in all threads, for which it is installed in the layer.
    """

    __slots__ = ("__weakref__", "_layer", "product", "users")
    stood = None

    def __init__(self, layer: nn.Linear) -> None:
        self._layer, self.product, self.users = ref(layer), Product(Packing()), 0

    def __call__(self, input: Tensor) -> Tensor:
        layer = cast(nn.Linear, self._layer())  # alive, since it is being called
        if torch.compiler.is_compiling():
            product: Tensor = torch.ops.mmspec.linear(input, layer.weight, layer.bias)
            return product
        return (self.product if FAST.here else linear)(input, layer.weight, layer.bias)

    def __reduce__(self) -> tuple[Callable[[nn.Linear], FastForward], tuple[nn.Linear | None]]:
        return forward_of, (self._layer(),)  # a copied layer gets its own


#: The `FastForward` of each layer; weak keys, so that the table keeps no layer alive.
FORWARDS: WeakKeyDictionary[nn.Linear, FastForward] = WeakKeyDictionary()


def forward_of(layer: nn.Linear) -> FastForward:
    """The `FastForward` of a layer, the same one for all its users."""
    with LOCK:
        found = FORWARDS.get(layer)
        if found is None:
            found = FORWARDS[layer] = FastForward(layer)
        return found


#: The product of each layer by the `id` of its weight, for compiled code.
PRODUCTS: WeakValueDictionary[int, Product] = WeakValueDictionary()
OPERATOR = torch.library.Library("mmspec", "FRAGMENT")
OPERATOR.define("linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor")


@torch.library.impl(OPERATOR, "linear", "CPU")
def compiled_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer as an operator that the compiler does not trace: its way depends on the machine."""
    product = PRODUCTS.get(id(weight)) if FAST.here else None
    return (product or linear)(input, weight, bias)


def shape_of_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """An empty tensor of the shape that `compiled_linear` returns."""
    return input.new_empty(*input.shape[:-1], weight.shape[0])


torch.library.register_fake("mmspec::linear", shape_of_linear, lib=OPERATOR)


class LinearLayers:
    """The linear layers of some models during one pipeline call.

    Call it to get a context, any number of times. Inside the context, the thread computes the layers in the
    fastest way; other threads that run the same models compute them as torch does.

    Args:
        models: models with the layers. Layers on other devices keep their `forward`, as do layers whose
            `forward` something else has replaced, such as a hook of accelerate.
        packing: memory limit of packed weights.
    """

    def __init__(self, models: Iterable[nn.Module], packing: Packing) -> None:
        layers = [layer for model in models for layer in model.modules() if type(layer) is nn.Linear]
        self._layers = []
        for layer in layers:
            weight = layer._parameters.get("weight")  # absent if computed for each forward pass
            if weight is not None and weight.is_cpu and weight.numel() >= LEAST_WEIGHTS:
                forward = forward_of(layer)
                forward.product.packing = packing
                forward.product.begin(weight)
                PRODUCTS[id(weight)] = forward.product
                self._layers.append((vars(layer), forward))

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Compute the layers in the fastest way until the end of the block."""
        outer, FAST.here = FAST.here, True
        with LOCK:
            for attributes, forward in self._layers:
                forward.users += 1
                attributes.setdefault("forward", forward)
        try:
            yield
        finally:
            FAST.here = outer
            with LOCK:
                for attributes, forward in self._layers:
                    forward.users -= 1
                    if not forward.users and attributes.get("forward") is forward:
                        del attributes["forward"]


def forget(model: nn.Module) -> None:
    """Free the packed weights of a model's layers that no call is using, and drop its memory limit."""
    PACKING.pop(model, None)
    for layer in model.modules():
        if type(layer) is nn.Linear:
            FORWARDS.pop(layer, None)
