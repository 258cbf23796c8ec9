"""Compressors: fewer visual tokens for the drafter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import entry_points

from mmspec.compressors.interface import Compressor
from mmspec.errors import UnknownArgumentError
from mmspec.plugins import Located
from mmspec.registry import did_you_mean

__all__ = ["COMPRESSORS", "Compressor", "build_compressor"]

COMPRESSORS = Located(
    "compressor",
    lambda: (
        {
            "none": "mmspec.compressors.pooling:NoTokens",
            "identity": "mmspec.compressors.pooling:Identity",
            "latent": "mmspec.compressors.queries:Latent",
            "pooling": "mmspec.compressors.pooling:Pooling",
            "attention_pruning": "mmspec.compressors.pruning:AttentionPruning",
            "similarity_pruning": "mmspec.compressors.pruning:SimilarityPruning",
            "convolution": "mmspec.compressors.pooling:Convolution",
            "resampler": "mmspec.compressors.queries:Resampler",
            "gate": "mmspec.compressors.gate:Gate",
            "vispec": "mmspec.compressors.queries:ViSpec",
        }
        | {point.name: point.value for point in entry_points(group="mmspec.compressors")}
    ),
)


def build_compressor(name: str, width: int, **options: object) -> Compressor:
    """Make a compressor from its name and options, as a draft checkpoint's config holds them.

    Args:
        name: in the registry.
        width: d, of the features.
        options: such as `tokens`, the number of tokens per image.

    Raises:
        InputError: no such compressor, or a value outside its range.
        UnknownArgumentError: an option that it does not have.
    """
    compressor: Callable[..., Compressor] = COMPRESSORS[name]
    known = set(inspect.signature(compressor).parameters) - {"width"}
    for option in options:
        if option not in known:
            allowed = did_you_mean(option, known) if known else "it has no options"
            raise UnknownArgumentError(f"option of compressor {name!r}", option, allowed)
    return compressor(width, **options)
