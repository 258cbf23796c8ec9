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
    """Build a compressor from its name and options, as in a draft checkpoint's config.

    Args:
        name: a key of `COMPRESSORS`.
        width: d of the features.
        options: such as `tokens`, the number of tokens per image.

    Raises:
        InputError: the compressor does not exist, or a value is outside its range.
        UnknownArgumentError: the compressor lacks an option.
    """
    compressor: Callable[..., Compressor] = COMPRESSORS[name]
    known = set(inspect.signature(compressor).parameters) - {"width"}
    for option in options:
        if option not in known:
            rule = did_you_mean(option, known) if known else "must be left out: there are no options"
            raise UnknownArgumentError(f"option of compressor {name!r}", option, rule)
    return compressor(width, **options)
