"""Property that is computed once, in a way that `torch.compile` can trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from functools import cached_property as once
else:

    class once:  # as `property` is written
        """`functools.cached_property` without the lock of Python 3.11, which `torch.compile` cannot enter."""

        def __init__(self, func):
            self.func, self.__doc__ = func, func.__doc__

        def __set_name__(self, owner, name):
            self.name = name

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            value = self.func(instance)
            object.__setattr__(instance, self.name, value)  # from now on found before this descriptor
            return value


__all__ = ["once"]
