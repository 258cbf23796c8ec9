"""Linear layers of few rows on a CPU: a draft of a few nodes then takes hardly longer than a single token.

A linear layer is asked for x W^T, [rows, in] times [in, out], which takes twice as long for a few rows as for
one, although it reads the same weights: presumably the BLAS packs the whole of W anew in each call. W x^T,
the same product turned round, does not. The cases of `width`
were measured with MKL on an AMD EPYC (`python -m benchmarks.replay` prints such costs); whether turning pays
at all is measured once in each process.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from mmspec.models.replaced import Confined

__all__ = ["FewRows", "few_rows_linear"]

SAMPLE = 4096, 1024  # of W, in the measurement
TRIALS = 7
LEAST_SPEEDUP = 1.2


class Turning(threading.local):
    """Whether this thread computes few rows in the faster way."""

    here = False


TURNING = Turning()
LOCK = threading.RLock()  # of all models; re-entered where a collection of garbage closes a decoding


class FewRows:
    """The linear layers of a model, which compute few rows in the faster way for a while, in one thread.

    Args:
        model: whose layers of float32 on the CPU do so; others, and those whose `forward` something else has
            replaced by then, such as a hook of accelerate, stay as they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers = [
            (vars(layer), TurnedForward(layer)) for layer in model.modules() if type(layer) is nn.Linear
        ]
        self._users = OF_MODEL.setdefault(model, Users())

    def __reduce__(self) -> tuple[type[FewRows], tuple[nn.Module]]:
        return type(self), (self._model,)  # attributes of layers are not those of their copies

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Let the layers compute so in this thread until the end of the block."""
        outer, TURNING.here = TURNING.here, True
        with LOCK:
            self._users.count += 1
            self._users.entered.add(self)
            for attributes, turned in self._layers:
                attributes.setdefault("forward", turned)
        try:
            yield
        finally:
            TURNING.here = outer
            with LOCK:
                self._users.count -= 1
                if not self._users.count:
                    self._users.leave()

    def leave(self) -> None:
        """Take the forwards away that stand in the layers."""
        for attributes, turned in self._layers:
            if attributes.get("forward") is turned:
                del attributes["forward"]


@dataclass
class Users:
    """Number of threads that compute few rows of a model so, and what they entered until none is left."""

    count: int = 0
    entered: set[FewRows] = field(default_factory=set)

    def leave(self) -> None:
        """Take all forwards away."""
        for each in self.entered:
            each.leave()
        self.entered.clear()


OF_MODEL: WeakKeyDictionary[nn.Module, Users] = WeakKeyDictionary()


class TurnedForward(Confined):
    """The forward of a linear layer, by its weights as they are now; the faster one within `FewRows`."""

    __slots__ = ("layer",)
    stood = None

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer

    def __call__(self, input: Tensor) -> Tensor:
        layer = self.layer
        return (few_rows_linear if TURNING.here else linear)(input, layer.weight, layer.bias)


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The output [..., out] of a linear layer for x [..., in], in whichever way is faster."""
    threads, rows = torch.get_num_threads(), x.numel() // x.shape[-1]
    columns = width(rows, threads)
    is_plain = weight.is_cpu and weight.dtype == x.dtype == torch.float32
    if not (columns and is_plain and turning_pays(threads)):
        return linear(x, weight, bias)
    flat = x.reshape(rows, -1).contiguous()
    if columns > rows:
        flat = pad(flat, (0, 0, 0, columns - rows))
    y = (weight @ flat.T)[:, :rows].T.contiguous()
    if bias is not None:
        y += bias
    return y.view(*x.shape[:-1], -1)


def width(rows: int, threads: int) -> int:
    """Columns of x^T, zeros included, with which so many rows are computed; 0 where x W^T is as fast."""
    if rows == 1:
        return 2 if threads > 1 else 0  # a product with a vector runs on one thread alone
    if rows > (32 if threads > 1 else 6):
        return 0
    return 4 if rows == 3 else 16 if 8 < rows < 16 else rows


@functools.cache
def turning_pays(threads: int) -> bool:
    """Whether four rows are computed clearly faster so, by the BLAS and the processor of this machine."""
    weight, x = (torch.zeros(size, dtype=torch.float32, device="cpu") for size in (SAMPLE, (4, SAMPLE[1])))
    ways = (lambda: linear(x, weight)), (lambda: (weight @ x.T).T.contiguous())
    seconds: tuple[list[float], list[float]] = [], []
    with torch.inference_mode():
        for _ in range(TRIALS):
            for way, found in zip(ways, seconds, strict=True):
                begun = perf_counter()
                way()
                found.append(perf_counter() - begun)
    return min(seconds[0]) > LEAST_SPEEDUP * min(seconds[1])
