"""Replace functions of a model for the calling thread alone.

Other threads may run the same model at the same time, through pipelines of their own or its plain forward. A
`Switch` is installed for each replaced function and removed when the last thread has left. It calls the
replacement of the calling thread, or the original function if that thread has none.
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
"""Makes another function of the one that is replaced."""
M = TypeVar("M", bound=nn.Module)
ATTENTION = "sdpa"


class Replacements(threading.local):
    """The replacements of a thread, by the `id` of the module whose function each replaces."""

    def __init__(self) -> None:
        self.functions: dict[int, AnyFunction] = {}


HERE = Replacements()
LOCK = threading.RLock()  # of all switches; re-entered where a collection of garbage closes a decoding


class Confined:
    """Base of objects that are installed in place of a function and act in some threads only.

    Attributes:
        stood: the value that the dictionary held before; None if the function was inherited.
    """

    __slots__ = ()
    stood: AnyFunction | None


class Switch(Confined):
    """Call the calling thread's replacement of a function, or the function if there is none.

    Args:
        owner: the object that the function belongs to.
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
        own: AnyFunction = copy.deepcopy(self.__wrapped__, memo)  # a copied model has its own forward
        return own


class Replacement(NamedTuple):
    """Replacement of the forward of a module.

    Attributes:
        module: whose it is.
        make: makes the other forward of the module's own.
        switch: to stand there, again and again; None makes a new one each time.
    """

    module: nn.Module
    make: Maker
    switch: Switch | None = None


@contextmanager
def replaced(places: Iterable[tuple[object, Keywords, str, Maker, Switch | None]]) -> Iterator[None]:
    """Replace functions for the calling thread, until the context is left.

    Args:
        places: (owner, dictionary, name, maker, switch) of each; what the dictionary does not hold is
            inherited by the owner.
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
    """Let modules compute something else in the calling thread, until the context is left."""
    return replaced(
        (each.module, vars(each.module), forward_name(each.module), *each[1:]) for each in replacements
    )


def forward_name(module: nn.Module) -> str:
    """The name by which a module's own forward is called."""
    # accelerate's hooks (device_map, offloading) stand at `forward`, and call the module's own by this name
    return "_old_forward" if "_hf_hook" in vars(module) else "forward"


def computes_plainly(module: nn.Module) -> bool:
    """True unless something stands in the place of a module's forward that every thread meets."""
    stands = vars(module).get("forward")
    return stands is None or (isinstance(stands, Confined) and stands.stood is None)


def replaced_attention(make: Maker) -> AbstractContextManager[None]:
    """Let another function compute the attention "sdpa" of transformers in the calling thread.

    No config changes, which other threads read. The function is called with the attention module first.
    """
    functions = ALL_ATTENTION_FUNCTIONS
    names = functions._local_mapping if ATTENTION in functions._local_mapping else functions._global_mapping
    return replaced([(functions, names, ATTENTION, make, None)])


def twin(module: M) -> M:
    """A module that holds what another does, and can be given other attributes, buffers and parts.

    Only functions that are `rebound` to it see it, so that hooks run on the other module alone.
    """
    made = object.__new__(type(module))
    vars(made).update(vars(module))
    for name in ("_buffers", "_modules", "_non_persistent_buffers_set"):
        vars(made)[name] = copy.copy(vars(module)[name])
    return made


def rebound(own: AnyFunction, module: nn.Module) -> AnyFunction:
    """Bind the method `own` of a module to its twin; that of the class where `own` is no method."""
    function = getattr(own, "__func__", type(module).forward)
    bound: AnyFunction = function.__get__(module)
    return bound
