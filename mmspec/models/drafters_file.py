"""The file `drafters.json` in a model's folder: which drafters belong to the model, and where they are.

It maps labels, which tables call the drafters by, to objects of two strings: `accelerator`, the name of what
runs the drafter, and `drafter`, a folder relative to the model's or a hub id. The key `default` may name the
label of the one to use where nothing is said:

    {
      "default": "flash",
      "flash": {"accelerator": "flash", "drafter": "../my-model-flash"},
      "vispec": {"accelerator": "eagle", "drafter": "../my-model-vispec"}
    }
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mmspec.errors import CheckpointError
from mmspec.models.checkpoint import MAX_CONFIG_BYTES, read_json
from mmspec.registry import did_you_mean

__all__ = ["OwnDrafter", "OwnDrafters", "read_drafters"]

FILE, DEFAULT = "drafters.json", "default"
KEYS = ("accelerator", "drafter")


@dataclass(frozen=True)
class OwnDrafter:
    """An entry: the accelerator that runs it, its folder or hub id as written, the folder if found."""

    accelerator: str
    written: str
    folder: Path | None


@dataclass(frozen=True)
class OwnDrafters:
    """The drafters that a model's folder names, by label; `default` is the label used if none is said."""

    path: Path
    entries: dict[str, OwnDrafter] = field(default_factory=dict)
    default: str | None = None

    def source_for(self, accelerator: str) -> str | None:
        """The folder or hub id that an accelerator runs; None if the file names nothing for it.

        An entry whose label is the accelerator's name comes before others that it runs.

        Raises:
            CheckpointError: the file names a folder that is not there.
        """
        fitting = {label: one for label, one in self.entries.items() if one.accelerator == accelerator}
        if not fitting:
            return None
        label = accelerator if accelerator in fitting else next(iter(fitting))
        one = fitting[label]
        if one.folder is not None:
            return str(one.folder)
        if not one.written.startswith((".", "/", "~")):
            return one.written
        missing, name = Path(os.path.normpath(self.path.parent / one.written)), Path(one.written).name
        raise CheckpointError(
            f"{self.path}: {label}: drafter",
            one.written,
            f"a folder that is there: {missing} is not, and no reference model here is called {name!r}",
        )


def read_drafters(
    model: str | Path, accelerators: Mapping[str, bool], elsewhere: Mapping[str, Path]
) -> OwnDrafters:
    """The drafters that a model's folder names; none for a folder without the file, and for a hub id.

    Args:
        accelerators: the names of all, and whether they run a drafter.
        elsewhere: folders by name, for those that are not where the file says.
    """
    path = Path(model) / FILE
    if not os.path.isfile(path):
        return OwnDrafters(path)
    table = read_json(path, MAX_CONFIG_BYTES)
    if not isinstance(table, dict):
        raise CheckpointError(str(path), table, f"an object of labels, each with an object of {KEYS}")
    default = table.pop(DEFAULT, None)
    if default is not None and (not isinstance(default, str) or default not in table):
        raise CheckpointError(f"{path}: {DEFAULT}", default, did_you_mean(default, list(table)))
    entries = {}
    for label, entry in table.items():
        check_entry(f"{path}: {label}", label, entry, accelerators)
        written = entry["drafter"]
        places = (path.parent / written, elsewhere.get(Path(written).name))
        folder = next((place for place in places if place is not None and os.path.isdir(place)), None)
        entries[label] = OwnDrafter(entry["accelerator"], written, folder and folder.resolve())
    return OwnDrafters(path, entries, default)


def check_entry(where: str, label: str, entry: object, accelerators: Mapping[str, bool]) -> None:
    """Raise CheckpointError unless an entry has two strings that can be used, and a label of its own."""
    if not isinstance(entry, dict) or set(entry) != set(KEYS):
        raise CheckpointError(where, entry, f"an object with the keys {' and '.join(map(repr, KEYS))}")
    accelerator, written = (entry[key] for key in KEYS)
    drafted = [name for name, runs_a_drafter in accelerators.items() if runs_a_drafter]
    if accelerator not in drafted:
        raise CheckpointError(f"{where}: accelerator", accelerator, did_you_mean(accelerator, drafted))
    if not isinstance(written, str) or not written:
        raise CheckpointError(f"{where}: drafter", written, "a folder relative to this one, or a hub id")
    if label in accelerators and label != accelerator:
        raise CheckpointError(where, accelerator, f"{label!r}, or a label that is no accelerator's name")
