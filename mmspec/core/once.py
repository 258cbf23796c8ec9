"""Cached property that `torch.compile` can trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from functools import cached_property as once
else:

    class once:  # lower case, as `property`
        """`functools.cached_property` without Python 3.11's lock, which `torch.compile` cannot trace."""

        def __init__(self, func):
            self.func, self.__doc__ = func, func.__doc__

        def __set_name__(self, owner, name):
            self.name = name

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            value = self.func(instance)
            object.__setattr__(instance, self.name, value)  # later look-ups find the instance attribute
            return value


__all__ = ["once"]
