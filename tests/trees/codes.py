"""Targets that consist of a codebook, which is sufficient for fitting rules."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.core.image_grid import ImageGrid
from mmspec.core.interfaces import AcceptanceRule


@dataclass
class Codes:
    """Code vectors [K, d], and the vocabulary that they are the first part of."""

    codebook: Tensor | None
    vocabulary: int
    grid: ImageGrid | None = None
    device: torch.device = torch.device("cpu")


def random_codes(vocabulary: int, syntax: int = 0, dimensions: int = 2, seed: int = 0) -> Codes:
    generator = torch.Generator().manual_seed(seed)
    size = vocabulary - syntax
    grid = ImageGrid(1, 1, size) if syntax else None
    return Codes(torch.randn(size, dimensions, generator=generator), vocabulary, grid)


def fitted(rule: AcceptanceRule, vocabulary: int, syntax: int = 0) -> AcceptanceRule:
    """Fit a rule to some target with that many tokens."""
    return rule.fit(random_codes(vocabulary, syntax))  # type: ignore[arg-type]
