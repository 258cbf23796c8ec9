"""Shared type aliases, for values that are passed on unchanged or that share no class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

__all__ = ["AnyFunction", "Inputs", "Json", "Keywords", "Processor"]

#: A JSON object, or a record that becomes one.
Json: TypeAlias = dict[str, Any]
#: Keyword arguments of a call.
Keywords: TypeAlias = dict[str, Any]
#: Arguments of a model's forward pass, by name.
Inputs: TypeAlias = Mapping[str, Any]
#: A processor of transformers, or the tokenizer of a text-only model, which share no class.
Processor: TypeAlias = Any
#: A function with any signature, such as a replacement of another.
AnyFunction: TypeAlias = Callable[..., Any]
