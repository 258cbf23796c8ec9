"""Nearest-neighbour tables of a codebook.

A table is computed once for a codebook, a metric and a number of neighbours, and cached in the model's folder
if it is writable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn.functional import normalize

from mmspec.atomic_file import atomic_file
from mmspec.core.interfaces import AnyTarget
from mmspec.errors import InputError
from mmspec.registry import did_you_mean
from mmspec.validation import is_integer

METRICS = ("l2", "cosine")
INT16_CODES = 2**15
BLOCK_ELEMENTS = 2**22  # size of a block of distances


def check_neighbours(neighbours: int, metric: str) -> None:
    """Raise InputError unless the arguments describe a table."""
    if not is_integer(neighbours) or neighbours < 1:
        raise InputError("neighbours", neighbours, "must be an integer of at least 1")
    if metric not in METRICS:
        raise InputError("metric", metric, did_you_mean(metric, METRICS))


def fitted(table: Tensor | None) -> Tensor:
    """Return the table; raise TypeError if the rule was not fitted to a target."""
    if table is None:
        raise TypeError("this rule needs the target's codebook: call rule.fit(target)")
    return table


def codebook_of(target: AnyTarget) -> Tensor:
    """[K, d] the target's code vectors.

    Raises:
        InputError: the target has no codebook, or not exactly one vector for each code of its vocabulary.
    """
    codebook, grid = target.codebook, target.grid
    codes = target.vocabulary if grid is None else grid.codebook_size
    if codebook is None:
        rule = "is required by this rule; use a target of image tokens that has a codebook"
        raise InputError("codebook", None, rule)
    # without a grid, only the codebook gives the number of codes
    counted = codes if grid is not None else min(len(codebook), codes)
    if codebook.dim() != 2 or len(codebook) != counted or not bool(codebook.isfinite().all()):
        rule = f"must hold finite numbers [{codes}, d], one vector for each code of the vocabulary"
        raise InputError("codebook", codebook, rule)
    vectors: Tensor = codebook
    return vectors


def neighbour_table(target: AnyTarget, count: int, metric: str) -> Tensor:
    """[K, min(count, K - 1)] the nearest codes of each code of a target, from the cache if possible.

    Raises:
        InputError: the target has no codebook, or one that does not match its vocabulary.
    """
    codebook = codebook_of(target).detach().cpu()
    count = min(count, len(codebook) - 1)
    folder = model_folder(target)
    path = None if folder is None else folder / cache_name(codebook, count, metric)
    table = None if path is None else read_table(path, len(codebook), count)
    if table is None:
        table = find_neighbours(codebook, count, metric)
        if path is not None:
            write_table(path, table)
    return table.to(target.device)


def find_neighbours(codebook: Tensor, count: int, metric: str) -> Tensor:
    """Find the `count` nearest codes of each code, nearest first; ties are ordered by index.

    Args:
        codebook: [K, d] finite numbers.
        metric: "l2", or "cosine" (1 - cos, which has the order of the distance of the unit vectors).

    Returns:
        [K, count] int16, or int32 for large codebooks; no code is its own neighbour.
    """
    vectors = codebook.double() if metric == "l2" else normalize(codebook.double(), dim=-1)
    size = len(vectors)
    rows = max(1, BLOCK_ELEMENTS // size)
    tables = []
    for start in range(0, size, rows):
        block = vectors[start : start + rows]
        # not by a matrix product, whose rounding errors would break ties between equal vectors
        distance = torch.cdist(block, vectors, compute_mode="donot_use_mm_for_euclid_dist")
        index = torch.arange(len(block), device=block.device)
        distance[index, start + index] = float("inf")
        tables.append(smallest(distance, count))
    return torch.cat(tables).to(torch.int16 if size <= INT16_CODES else torch.int32)


def smallest(values: Tensor, count: int) -> Tensor:
    """[rows, count] indices of the smallest of values [rows, K > count], in order; ties by index."""
    nearest, index = values.topk(count + 1, dim=-1, largest=False)
    index = index[:, :count].sort(dim=-1).values  # `topk` orders ties arbitrarily
    index = index.gather(1, values.gather(1, index).argsort(dim=-1, stable=True))
    # if the last one ties with the first excluded one, `topk` may have chosen the wrong one
    tied = (nearest[:, -2:-1] == nearest[:, -1:]).any(-1)
    for row in tied.nonzero()[:, 0].tolist():
        index[row] = values[row].argsort(stable=True)[:count]
    return index


def model_folder(target: AnyTarget) -> Path | None:
    """Local folder that the target's model was loaded from, or None."""
    name = getattr(getattr(target, "model", None), "name_or_path", "")
    return Path(name) if name and Path(name).is_dir() else None


def cache_name(codebook: Tensor, count: int, metric: str) -> str:
    """File name of a table, unique for every codebook, metric and number of neighbours."""
    numbers = codebook.float().contiguous().numpy()
    digest = hashlib.sha256(f"{numbers.shape}".encode() + numbers.tobytes()).hexdigest()
    return f"neighbours-{metric}-{count}-{digest[:16]}.safetensors"


def read_table(path: Path, size: int, count: int) -> Tensor | None:
    """Read a cached table; None if it is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            table: Tensor = file.get_tensor("neighbours")
            metadata: Mapping[str, str] = file.metadata() or {}
    except (OSError, SafetensorError):
        return None
    fits = table.shape == (size, count) and table.dtype in (torch.int16, torch.int32)
    return table if fits and metadata.get("sha256") == checksum(table) else None


def write_table(path: Path, table: Tensor) -> None:
    """Write a table to the cache, ignoring folders that are not writable."""
    content = save({"neighbours": table}, {"sha256": checksum(table)})
    with suppress(OSError), atomic_file(path) as temporary:
        temporary.write_bytes(content)


def checksum(table: Tensor) -> str:
    """SHA-256 of a table's numbers."""
    return hashlib.sha256(table.numpy().tobytes()).hexdigest()
