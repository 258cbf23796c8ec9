"""Parts that the cards of all reference models share: the header, and the record of the training."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["HEADER", "describe_stages", "write_readme"]

HEADER = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: {task}
tags: [{tags}, synthetic, speculative-decoding]
---
"""


def describe_stages(record: dict[str, Any], held_out: str, form: str) -> str:
    """List the stages of a training: their lengths, and the figures at their ends.

    Args:
        record: of the training.
        held_out: what the figures are of, in words.
        form: format of the figures.
    """
    lines = []
    for stage in record["stages"]:
        figures = ", ".join(
            f"{name} {value:{form}}"
            for name, value in stage.items()
            if name not in ("stage", "steps", "seconds")
        )
        length = f"{stage['steps']} steps in {stage['seconds'] / 60:.1f} minutes"
        ending = f"; at its end, {held_out}: {figures}" if figures else ""
        lines.append(f"- {stage['stage']}: {length}{ending}.")
    return "\n".join(lines)


def write_readme(folder: Path, parts: Iterable[str]) -> Path:
    """Write a card into the folder of its model; returns its path."""
    path = folder / "README.md"
    path.write_text("\n".join(parts))
    return path
