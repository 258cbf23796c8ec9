"""The file `drafters.json` in a model's folder, which lists the model's drafters.

It maps labels, the drafters' names in tables, to objects of two strings: `accelerator`, the accelerator that
runs the drafter, and `drafter`, a folder relative to the model's or a hub id. The key `default` may name the
label of the drafter that is used by default:

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
    """An entry: the accelerator that runs the drafter, its folder or hub id as written, and the folder."""

    accelerator: str
    written: str
    folder: Path | None


@dataclass(frozen=True)
class OwnDrafters:
    """The drafters of a model's `drafters.json` by label, and the label that is used by default."""

    path: Path
    entries: dict[str, OwnDrafter] = field(default_factory=dict)
    default: str | None = None

    @property
    def default_drafter(self) -> OwnDrafter | None:
        """The drafter that is used by default; None if the file names none, or one without a folder here."""
        one = None if self.default is None else self.entries[self.default]
        return None if one is None or one.folder is None else one

    def source_for(self, accelerator: str) -> str | None:
        """Return the folder or hub id of an accelerator's drafter; None if the file has none.

        An entry whose label is the accelerator's name has precedence.

        Raises:
            CheckpointError: the file names a folder that does not exist.
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
            f"must be a folder that exists; there is no {missing}, and no reference model named {name!r}",
        )


def read_drafters(
    model: str | Path, accelerators: Mapping[str, bool], elsewhere: Mapping[str, Path]
) -> OwnDrafters:
    """Read the drafters that a model's folder names; none for a hub id or a folder without the file.

    Args:
        model: folder or hub id of the model.
        accelerators: names of all accelerators, and whether each runs a drafter.
        elsewhere: folders by name, for drafters that do not exist at the path in the file.
    """
    path = Path(model) / FILE
    if not os.path.isfile(path):
        return OwnDrafters(path)
    table = read_json(path, MAX_CONFIG_BYTES)
    if not isinstance(table, dict):
        raise CheckpointError(str(path), table, f"must be an object of labels, each with an object of {KEYS}")
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
    """Raise CheckpointError unless an entry has two usable strings and a label of its own."""
    if not isinstance(entry, dict) or set(entry) != set(KEYS):
        rule = f"must be an object with the keys {' and '.join(map(repr, KEYS))}"
        raise CheckpointError(where, entry, rule)
    accelerator, written = (entry[key] for key in KEYS)
    drafted = [name for name, runs_a_drafter in accelerators.items() if runs_a_drafter]
    if accelerator not in drafted:
        raise CheckpointError(f"{where}: accelerator", accelerator, did_you_mean(accelerator, drafted))
    if not isinstance(written, str) or not written:
        rule = "must be a folder relative to the model's, or a hub id"
        raise CheckpointError(f"{where}: drafter", written, rule)
    if label in accelerators and label != accelerator:
        rule = f"must run the accelerator {label!r}, or have a label that is no accelerator's name"
        raise CheckpointError(where, accelerator, rule)
