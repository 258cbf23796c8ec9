"""Replace functions of a model for the calling thread alone.

Other threads may run the same model at the same time, directly or in pipelines of their own. A `Switch` is
installed for each replaced function, and removed when the last thread has left. It calls the replacement of
the calling thread, or the original function if that thread has none.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeVar

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmspec.open_types import AnyFunction, Keywords

__all__ = [
    *("Confined", "Maker", "Replacement", "Switch", "computes_plainly", "rebound", "replaced_attention"),
    *("replaced_forwards", "twin"),
]

Maker = Callable[[AnyFunction], AnyFunction]
"""Returns the replacement of a function, given the function."""
M = TypeVar("M", bound=nn.Module)
ATTENTION = "sdpa"


class Replacements(threading.local):
    """The replacements of a thread, by the `id` of the object whose function each replaces."""

    def __init__(self) -> None:
        self.functions: dict[int, AnyFunction] = {}


HERE = Replacements()
LOCK = threading.RLock()  # for all switches; reentrant, since garbage collection may close a decoding inside


class Confined:
    """Base of objects that are installed in place of a function and act in some threads only.

    Attributes:
        stood: previous value in the dictionary; None if the function was inherited.
    """

    __slots__ = ()
    stood: AnyFunction | None


class Switch(Confined):
    """Calls the calling thread's replacement of a function, or the function if there is none.

    Args:
        owner: object that the function belongs to.
        own: the function.
        stood: see `Confined`.

    Attributes:
        users: number of contexts, in all threads, in which the function is replaced.
    """

    __slots__ = ("__wrapped__", "key", "stood", "users")

    def __init__(self, owner: object, own: AnyFunction, stood: AnyFunction | None = None) -> None:
        self.__wrapped__, self.key, self.stood, self.users = own, id(owner), stood, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return HERE.functions.get(self.key, self.__wrapped__)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, object]) -> AnyFunction:
        own: AnyFunction = copy.deepcopy(self.__wrapped__, memo)  # a copied model has its own `forward`
        return own


class Replacement(NamedTuple):
    """Replacement of a module's `forward`.

    Attributes:
        module: the module.
        make: returns the replacement, given the module's own `forward`.
        switch: switch to install each time; None makes a new one each time.
    """

    module: nn.Module
    make: Maker
    switch: Switch | None = None


@contextmanager
def replaced(places: Iterable[tuple[object, Keywords, str, Maker, Switch | None]]) -> Iterator[None]:
    """Replace functions for the calling thread until the context ends.

    Args:
        places: (owner, dictionary, name, maker, switch) of each function; the owner inherits a function that
            is not in the dictionary.
    """
    functions = HERE.functions
    entered: list[tuple[Keywords, str, Switch, AnyFunction | None]] = []
    try:
        with LOCK:
            for owner, names, name, make, switch in places:
                stood = names.get(name)
                if type(stood) is Switch:
                    switch = stood
                else:
                    own = getattr(owner, name) if stood is None else stood
                    if switch is None or stood is not None or switch.__wrapped__ != own:
                        switch = Switch(owner, own, stood)
                    names[name] = switch
                switch.users += 1
                before = functions.get(switch.key)
                entered.append((names, name, switch, before))
                functions[switch.key] = make(switch.__wrapped__ if before is None else before)
        yield
    finally:
        with LOCK:
            for names, name, switch, before in reversed(entered):
                if before is None:
                    functions.pop(switch.key, None)
                else:
                    functions[switch.key] = before
                switch.users -= 1
                stands: object = names.get(name)
                if switch.users or stands is not switch:
                    continue
                if switch.stood is None:
                    del names[name]
                else:
                    names[name] = switch.stood


def replaced_forwards(replacements: Iterable[Replacement]) -> AbstractContextManager[None]:
    """Replace the `forward` of modules for the calling thread until the context ends."""
    return replaced(
        (each.module, vars(each.module), forward_name(each.module), *each[1:]) for each in replacements
    )


def forward_name(module: nn.Module) -> str:
    """The name under which a module's own `forward` is called."""
    # hooks of accelerate (device_map, offloading) replace `forward`, and call the module's own by this name
    return "_old_forward" if "_hf_hook" in vars(module) else "forward"


def computes_plainly(module: nn.Module) -> bool:
    """True unless a module's `forward` is replaced for every thread."""
    stands = vars(module).get("forward")
    return stands is None or (isinstance(stands, Confined) and stands.stood is None)


def replaced_attention(make: Maker) -> AbstractContextManager[None]:
    """Replace the attention "sdpa" of transformers for the calling thread.

    Configs, which other threads read, do not change. The first argument of the function is the attention
    module.
    """
    functions = ALL_ATTENTION_FUNCTIONS
    names = functions._local_mapping if ATTENTION in functions._local_mapping else functions._global_mapping
    return replaced([(functions, names, ATTENTION, make, None)])


def twin(module: M) -> M:
    """Return a shallow copy of a module, whose attributes, buffers and parts can be replaced.

    Only functions that are `rebound` to the copy use it, so that hooks run on the original module alone.
    """
    made = object.__new__(type(module))
    vars(made).update(vars(module))
    for name in ("_buffers", "_modules", "_non_persistent_buffers_set"):
        vars(made)[name] = copy.copy(vars(module)[name])
    return made


def rebound(own: AnyFunction, module: nn.Module) -> AnyFunction:
    """Bind the method `own` to another module; bind the class's `forward` if `own` is not a method."""
    function = getattr(own, "__func__", type(module).forward)
    bound: AnyFunction = function.__get__(module)
    return bound
