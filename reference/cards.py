"""Figures and training of a reference model, as sections of its model card."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.errors import CheckpointError
from mmspec.training.record import RECORD

__all__ = ["write_card"]

#: Subfolders of a model with their own training, and their titles.
PARTS = {"vq": "Image tokenizer", "vae": "Autoencoder", "reader": "Reader"}
FIGURES, TRAINING, LIMITS = "## Figures\n", "## Training\n", "## Limits\n"
DATA = """\
Each batch has new scenes (seeds from 1,000,000). The optimizers are Muon and AdamW. The code is in
`reference/`.
"""


def write_card(
    folder: str | Path,
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    command: str,
) -> Path:
    """Write the sections on figures and training to the `README.md` of a model, and keep all other text.

    Args:
        folder: the folder of the model, with the record of its training.
        title: conditions of the figures.
        columns, rows: the table of figures.
        command: the command that printed the figures.

    Returns:
        The path of the card.

    Raises:
        CheckpointError: the folder has no record of its training.
    """
    folder = Path(folder)
    trainings = {"Model": read_record(folder)}
    trainings |= {PARTS[part]: read_record(folder / part) for part in PARTS if (folder / part).is_dir()}
    path = folder / "README.md"
    text = path.read_text() if path.is_file() else f"# {folder.name}\n\n"
    before, _, rest = text.partition(FIGURES)
    _, _, limits = rest.partition(LIMITS)
    table = "\n".join(f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *rows))
    parts = [FIGURES, f"{title}:\n", f"{table}\n", f"Printed by `{command}`.\n"]
    parts += [TRAINING, *(_training(part, record) for part, record in trainings.items()), DATA]
    parts += [LIMITS, limits.lstrip("\n")] if limits else []
    path.write_text(before + "\n".join(parts))
    return path


def read_record(folder: Path) -> dict[str, Any]:
    """Read the record of a training from the model's folder."""
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError("folder", str(folder), f"must contain the {RECORD} of its training") from error
    return record


def _training(part: str, record: Mapping[str, Any]) -> str:
    """Lines of a card on the training of a part: its command, and the stages with their final results."""
    stages = []
    for stage in record["stages"]:
        figures = ", ".join(
            f"{name} {value:g}" for name, value in stage.items() if name not in ("stage", "steps", "seconds")
        )
        ending = f"; held-out results at the end: {figures}" if figures else ""
        stages.append(
            f"- {stage['stage']}: {stage['steps']} steps in {stage['seconds'] / 60:.1f} minutes{ending}."
        )
    note = f"\n\n{record['note']}" if record.get("note") else ""
    return (
        f"{part} ({record['parameters'] / 1e6:.2f} M parameters): `{record['command']}`, seed "
        f"{record['seed']}, batches of {record['batch_size']}, on {record['device']}, torch "
        f"{record['torch']}.\n\n" + "\n".join(stages) + f"{note}\n"
    )
