"""Types that are declared once, of values that are handed on as they are or that share no class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

__all__ = ["AnyFunction", "Inputs", "Json", "Keywords", "Processor"]

#: An object of JSON, or a record that becomes one.
Json: TypeAlias = dict[str, Any]
#: Keyword arguments on their way to a call.
Keywords: TypeAlias = dict[str, Any]
#: Arguments of a model's forward pass, by name.
Inputs: TypeAlias = Mapping[str, Any]
#: A processor of transformers, or the tokenizer of a model of text alone: they share no class.
Processor: TypeAlias = Any
#: A function of any form, such as one that stands for another.
AnyFunction: TypeAlias = Callable[..., Any]
