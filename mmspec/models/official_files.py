"""Readers of weights as authors publish them: pickles in containers and wrappers, safetensors, and shards.

No code of a file is run, and no key passes unexplained. What keys mean is the business of each converter.
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
from mmspec.models.checkpoint import MAX_CONFIG_BYTES, SHARDS, read_index, read_json
from mmspec.open_types import Json

Model = TypeVar("Model", bound=nn.Module)

INDEX = ".index.json"  # behind the name of a file that is in shards

# of DDP, of torch.compile, of plain attributes
WRAPPER_PREFIXES = ("module.", "_orig_mod.", "model.", "draft_model.", "ea_layer.", "eagle_module.")
CONTAINERS = ("state_dict",)  # of files that hold more than tensors
MAX_NAMED_KEYS = 8


def read_shards(index: Path, read: Callable[[Path], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors that an index names; `read` gives the content of one file."""
    shards: dict[str, Mapping[str, Tensor]] = {}
    tensors = {}
    for name, file in read_index(index).items():
        path = index.parent / file
        if file not in shards:
            if not path.is_file():
                raise CheckpointError(str(index), file, f"{SHARDS}: this one is not")
            shards[file] = read(path)
        if name not in shards[file]:
            allowed = f"a shard that has {name}, as {index.name} says"
            raise CheckpointError(str(path), f"{len(shards[file])} other tensors", allowed)
        tensors[name] = shards[file][name]
    return tensors


def check_indexed(folder: Path, name: str) -> None:
    """Raise CheckpointError if a folder has shards of a file and no index of them."""
    stem, _, kind = name.rpartition(".")
    if shards := sorted(folder.glob(f"{stem}-*-of-*.{kind}")):
        allowed = f"the file {name + INDEX} beside it, which says what is in which shard"
        raise CheckpointError(str(folder), shards[0].name, allowed)


def open_checkpoint(path: Path) -> Mapping[str, Any]:
    """The content of a .safetensors file or of a torch pickle (.pt, .pth, .bin, .ckpt), left on the disk.

    Of an index (.index.json) it is what all its shards hold. Only tensors, containers and the
    `argparse.Namespace` of a training script are unpickled.

    Raises:
        CheckpointError: no such file, damaged, or in need of code; the message names the class. Or a shard
            is missing, or has not what the index says.
    """
    if path.name.endswith(INDEX) and path.is_file():
        return read_shards(path, open_checkpoint)
    if not path.is_file():
        raise CheckpointError("checkpoint", str(path), "a file: .pt, .pth, .bin, .ckpt or .safetensors")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):
            # files from before torch 1.6 are no zip archives and cannot be mapped
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named is None:
            raise CheckpointError("checkpoint", str(path), "a torch checkpoint; it is damaged") from error
        allowed = (
            f"a pickle of tensors alone; this one would run {named[1]}. If you trust its author, save its "
            "tensors with torch.save(state_dict) in the environment that it came from"
        )
        raise CheckpointError("checkpoint", str(path), allowed) from error
    except (OSError, RuntimeError, EOFError, ValueError, SafetensorError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            "checkpoint", str(path), f"a complete checkpoint ({path.name}: {reason})"
        ) from error
    if not isinstance(content, Mapping):
        raise CheckpointError("checkpoint", str(path), f"a dict of tensors; it is a {type(content).__name__}")
    return content


def find_file(folder: Path, names: Sequence[str]) -> Path | None:
    """The first of these files that the folder has, or the index of its shards; None if it has none.

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
    """The name that a published tensor has here; what begins with none of the prefixes keeps its own."""
    for theirs, own in prefixes.items():
        if name.startswith(theirs):
            return own + name.removeprefix(theirs)
    return name


def tensor_names(path: Path) -> set[str]:
    """The names that `find_tensors` would give, without reading the tensors.

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
        raise CheckpointError("checkpoint", str(path), f"a complete checkpoint ({error})") from error


def read_config(folder: Path) -> Json:
    """The config.json that stands beside weights.

    Raises:
        CheckpointError: it is not there, too large, or no JSON object.
    """
    file = folder / "config.json"
    stored = read_json(file, MAX_CONFIG_BYTES) if file.is_file() else None
    if not isinstance(stored, dict):
        raise CheckpointError("checkpoint", str(file), "the config of the weights: a file with a JSON object")
    return stored


def find_tensors(
    path: Path, content: Mapping[str, Any], containers: Sequence[str] = CONTAINERS, *, parts: bool = True
) -> dict[str, Tensor]:
    """The state dict: that of the first container that holds one, or the content; without wrapper prefixes.

    Args:
        containers: names that it may hold a state dict under.
        parts: whether names may be outside of the wrapper, as of `unwrapped`.

    Raises:
        CheckpointError: there is none.
    """
    # the content last: beside its containers it may hold a stray tensor, such as a random state
    places = (*(content.get(name) for name in containers), content)
    found = next((place for place in places if _holds_tensors(place)), None)
    if found is None:
        names = ", ".join(map(str, list(content)[:MAX_NAMED_KEYS]))
        allowed = f"tensors at the top or under one of {', '.join(containers)}; it holds {names or 'nothing'}"
        raise CheckpointError("checkpoint", str(path), allowed)
    tensors = {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
    return {name: tensors[given] for given, name in unwrapped(tensors, parts).items()}


def unwrapped(given: Iterable[str], parts: bool = True) -> dict[str, str]:
    """Names of tensors without the prefixes of wrappers.

    With `parts` some may be outside of the wrapper, as the output matrix of a head often is; prefixes stay
    where two names would become one.
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
    """The commonest size along an axis of the tensors whose whole name matches: one wrong tensor is outvoted.

    Raises:
        CheckpointError: no name matches.
    """
    sizes = Counter(
        tensor.shape[axis]
        for name, tensor in tensors.items()
        if re.fullmatch(pattern, name) and tensor.dim() > axis
    )
    if not sizes:
        raise CheckpointError("checkpoint", str(path), f"missing keys: none is like {pattern!r}")
    return sizes.most_common(1)[0][0]


def count(tensors: Mapping[str, Tensor], pattern: str) -> int:
    """Count the numbers that the group of a pattern stands for in the names that begin with it."""
    return len({match[1] for name in tensors if (match := re.match(pattern, name))})


def check_layout(
    path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], ignored: str
) -> None:
    """Compare names and shapes with those that a model has; `ignored` are names that are not needed.

    Raises:
        CheckpointError: keys are missing, unknown, or of another shape; the message names them.
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
        raise CheckpointError("checkpoint", str(path), "; ".join(problems))


def build(
    path: Path,
    tensors: Mapping[str, Tensor],
    make: Callable[[], Model],
    source_name: Callable[[str], str],
    ignored: str = "",
    source_shape: Callable[[str, tuple[int, ...]], tuple[int, ...]] = lambda name, shape: shape,
) -> Model:
    """The model, in eval mode, that `make` makes, with copies of published tensors; raises as `check_layout`.

    Args:
        path: names the file in messages.
        tensors: of the file.
        make: makes the model, on the meta device.
        source_name: the published name of each own one; several may share it, one behind another in rows.
        ignored: names that are not needed.
        source_shape: the published shape, of a published name and the shape here.
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
    """Load tensors by the model's own names into it; raises as `check_layout`."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    check_layout(path, tensors, expected, ignored)
    model.load_state_dict({name: tensors[name] for name in expected})
