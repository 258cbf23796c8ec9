"""Readers of official weight files: pickles in containers and wrappers, safetensors, and shards.

No code in a file is run, and unknown keys raise an error. Each converter interprets the keys of its family.
"""

from __future__ import annotations

import argparse
import pickle
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from mmspec.errors import CheckpointError
from mmspec.models.checkpoint import MAX_CONFIG_BYTES, read_index, read_json
from mmspec.open_types import Json

Model = TypeVar("Model", bound=nn.Module)

INDEX = ".index.json"  # follows the name of a file that is split into shards

# of DDP, torch.compile, and attributes of wrapper modules
WRAPPER_PREFIXES = ("module.", "_orig_mod.", "model.", "draft_model.", "ea_layer.", "eagle_module.")
CONTAINERS = ("state_dict",)  # keys of the tensors in files that hold more than tensors
MAX_NAMED_KEYS = 8


def read_shards(index: Path, read: Callable[[Path], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Read the tensors that an index names; `read` returns the content of one file."""
    shards: dict[str, Mapping[str, Tensor]] = {}
    tensors = {}
    for name, file in read_index(index).items():
        path = index.parent / file
        if file not in shards:
            if not path.is_file():
                raise CheckpointError(str(index), file, "names a file that is missing from its folder")
            shards[file] = read(path)
        if name not in shards[file]:
            rule = f"must have the tensor {name}, which {index.name} names"
            raise CheckpointError(str(path), f"{len(shards[file])} other tensors", rule)
        tensors[name] = shards[file][name]
    return tensors


def check_indexed(folder: Path, name: str) -> None:
    """Raise CheckpointError if a folder has shards of a file but no index of them."""
    stem, _, kind = name.rpartition(".")
    if shards := sorted(folder.glob(f"{stem}-*-of-*.{kind}")):
        rule = f"needs the index {name + INDEX} beside its shards"
        raise CheckpointError(str(folder), shards[0].name, rule)


def open_checkpoint(path: Path) -> Mapping[str, Any]:
    """Open a .safetensors file or a torch pickle (.pt, .pth, .bin, .ckpt), memory-mapped if possible.

    An index (.index.json) returns the content of all its shards. Only tensors, containers and the
    `argparse.Namespace` of a training script are unpickled.

    Raises:
        CheckpointError: the file is missing or damaged, or needs code (the message names the class); or a
            shard is missing, or lacks a tensor that the index names.
    """
    if path.name.endswith(INDEX) and path.is_file():
        return read_shards(path, open_checkpoint)
    if not path.is_file():
        rule = "must be an existing file: .pt, .pth, .bin, .ckpt or .safetensors"
        raise CheckpointError("checkpoint", str(path), rule)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):
            # files from before torch 1.6 are not zip archives and cannot be mapped
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named is None:
            raise CheckpointError("checkpoint", str(path), "is a damaged torch checkpoint") from error
        rule = (
            f"must be a pickle of tensors alone; this one would run {named[1]}. If you trust its author, "
            "save its tensors with torch.save(state_dict) in the environment that wrote it"
        )
        raise CheckpointError("checkpoint", str(path), rule) from error
    except (OSError, RuntimeError, EOFError, ValueError, SafetensorError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        rule = f"must be a complete checkpoint ({path.name}: {reason})"
        raise CheckpointError("checkpoint", str(path), rule) from error
    if not isinstance(content, Mapping):
        rule = f"must be a dict of tensors, not a {type(content).__name__}"
        raise CheckpointError("checkpoint", str(path), rule)
    return content


def find_file(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the first of these files that a folder has, or the index of its shards; None if it has none.

    Raises:
        CheckpointError: there are shards without an index.
    """
    for name in names:
        for path in (folder / name, folder / (name + INDEX)):
            if path.is_file():
                return path
        check_indexed(folder, name)
    return None


def replace_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """The name here of a published tensor; a name without any of the prefixes is unchanged."""
    for theirs, own in prefixes.items():
        if name.startswith(theirs):
            return own + name.removeprefix(theirs)
    return name


def tensor_names(path: Path) -> set[str]:
    """Return the names that `find_tensors` would return, without reading the tensors.

    Raises:
        CheckpointError: as `open_checkpoint`.
    """
    if path.name.endswith(INDEX):
        return set(unwrapped(read_index(path)).values())
    if path.suffix != ".safetensors":
        return set(find_tensors(path, open_checkpoint(path), CONTAINERS))
    try:
        with safe_open(path, framework="pt") as weights:
            return set(unwrapped(weights.keys()).values())
    except (OSError, SafetensorError) as error:
        raise CheckpointError("checkpoint", str(path), f"must be a complete checkpoint ({error})") from error


def read_config(folder: Path) -> Json:
    """Read the config.json beside weights.

    Raises:
        CheckpointError: the file is missing, too large, or not a JSON object.
    """
    file = folder / "config.json"
    stored = read_json(file, MAX_CONFIG_BYTES) if file.is_file() else None
    if not isinstance(stored, dict):
        rule = "must be a file with a JSON object, the config of the weights"
        raise CheckpointError("checkpoint", str(file), rule)
    return stored


def find_tensors(
    path: Path, content: Mapping[str, Any], containers: Sequence[str] = CONTAINERS, *, parts: bool = True
) -> dict[str, Tensor]:
    """Return the state dict of a file, without wrapper prefixes.

    Args:
        path: path of the file, for error messages.
        content: content of the file.
        containers: keys under which it may hold the state dict; otherwise the content is the state dict.
        parts: whether some names may lack the wrapper's prefix, as in `unwrapped`.

    Raises:
        CheckpointError: there is none.
    """
    # the content comes last: beside its containers it may hold a stray tensor, such as a random state
    places = (*(content.get(name) for name in containers), content)
    found = next((place for place in places if _holds_tensors(place)), None)
    if found is None:
        names = ", ".join(map(str, list(content)[:MAX_NAMED_KEYS]))
        places_named = f"at the top level or under one of {', '.join(containers)}"
        rule = f"must hold tensors {places_named}; its keys are: {names or 'none'}"
        raise CheckpointError("checkpoint", str(path), rule)
    tensors = {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
    return {name: tensors[given] for given, name in unwrapped(tensors, parts).items()}


def unwrapped(given: Iterable[str], parts: bool = True) -> dict[str, str]:
    """Map names of tensors to names without the prefixes of wrappers.

    With `parts`, some names may lack the prefix, as the output matrix of a head often does. Prefixes are kept
    if two names would become equal without them.
    """
    names, wrapped = {name: name for name in given}, any if parts else all
    while prefix := next(
        (p for p in WRAPPER_PREFIXES if wrapped(n.startswith(p) for n in names.values())), ""
    ):
        bare = {name: now.removeprefix(prefix) for name, now in names.items()}
        if len(set(bare.values())) < len(bare):
            break
        names = bare
    return names


def _holds_tensors(place: object) -> bool:
    return isinstance(place, Mapping) and any(isinstance(value, Tensor) for value in place.values())


def measure(path: Path, tensors: Mapping[str, Tensor], pattern: str, axis: int = 0) -> int:
    """Return the most common size along an axis of the tensors whose whole name matches `pattern`.

    A single wrong tensor is thus outvoted.

    Raises:
        CheckpointError: no name matches.
    """
    sizes = Counter(
        tensor.shape[axis]
        for name, tensor in tensors.items()
        if re.fullmatch(pattern, name) and tensor.dim() > axis
    )
    if not sizes:
        raise CheckpointError("checkpoint", str(path), f"has missing keys: none matches {pattern!r}")
    return sizes.most_common(1)[0][0]


def count(tensors: Mapping[str, Tensor], pattern: str) -> int:
    """Count the distinct values of a pattern's group at the beginning of the names."""
    return len({match[1] for name in tensors if (match := re.match(pattern, name))})


def check_layout(
    path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], ignored: str
) -> None:
    """Compare names and shapes with those of a model; `ignored` is a pattern of names that are not needed.

    Raises:
        CheckpointError: keys are missing or unknown, or have wrong shapes; the message names them.
    """
    missing = [name for name in expected if name not in tensors]
    surplus = [name for name in tensors if name not in expected and not re.fullmatch(ignored, name)]
    wrong = [
        f"{name} is {tuple(tensors[name].shape)} instead of {shape}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    problems = [
        f"{title}: {', '.join(names[:MAX_NAMED_KEYS])}"
        + (f" and {len(names) - MAX_NAMED_KEYS} more" if len(names) > MAX_NAMED_KEYS else "")
        for title, names in (("missing keys", missing), ("unknown keys", surplus), ("wrong shapes", wrong))
        if names
    ]
    if problems:
        raise CheckpointError("checkpoint", str(path), f"does not fit the model: {'; '.join(problems)}")


def build(
    path: Path,
    tensors: Mapping[str, Tensor],
    make: Callable[[], Model],
    source_name: Callable[[str], str],
    ignored: str = "",
    source_shape: Callable[[str, tuple[int, ...]], tuple[int, ...]] = lambda name, shape: shape,
) -> Model:
    """Build a model in eval mode with copies of published tensors; raises as `check_layout`.

    Args:
        path: path of the file, for error messages.
        tensors: tensors of the file.
        make: makes the model, on the meta device.
        source_name: returns the published name of an own name; several own names may share one, and then
            follow one another in its rows.
        ignored: pattern of names that are not needed.
        source_shape: returns the published shape, given the published name and the own shape.
    """
    with torch.device("meta"):
        model = make()
    expected: dict[str, tuple[int, ...]] = {}
    places: dict[str, tuple[str, int]] = {}  # own name -> name in the file and first row in that tensor
    for name, tensor in model.state_dict().items():
        source = source_name(name)
        first_row = expected[source][0] if source in expected else 0
        places[name] = source, first_row
        expected[source] = source_shape(source, (first_row + tensor.shape[0], *tensor.shape[1:]))
    check_layout(path, tensors, expected, ignored)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    own = {
        name: tensors[source][first_row : first_row + shapes[name][0]].reshape(shapes[name]).clone()
        for name, (source, first_row) in places.items()
    }
    model.load_state_dict(own, assign=True)
    model.eval()
    return model


def fill(path: Path, model: nn.Module, tensors: Mapping[str, Tensor], ignored: str = "") -> None:
    """Load tensors with the model's own names into it; raises as `check_layout`."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    check_layout(path, tensors, expected, ignored)
    model.load_state_dict({name: tensors[name] for name in expected})
