"""Bad requests and checkpoints, one after another: rows 33 to 60.

`python -O -m tests.bad_inputs.requests_table` tries all of them: no check may hide in an `assert`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from transformers.utils import logging

from tests.bad_inputs.checkpoint_rows import CHECKPOINTS
from tests.bad_inputs.image_rows import IMAGES, DrawingBench
from tests.bad_inputs.prompt_rows import PROMPTS
from tests.bad_inputs.refusals import Bench, problems
from tests.bad_inputs.setting_rows import SETTINGS
from tests.media.network import only_local_connections

ROWS = [*PROMPTS, *SETTINGS, *CHECKPOINTS]


def main() -> int:
    """Try every row; print the problems, return their number."""
    logging.set_verbosity_error()
    found: list[str] = []
    with tempfile.TemporaryDirectory() as base, only_local_connections() as tried:
        for kind, rows in ((Bench, ROWS), (DrawingBench, IMAGES)):
            bench = kind(Path(base), Path(base))
            for row in rows:
                with tempfile.TemporaryDirectory() as folder:
                    bench.folder = Path(folder)
                    found += problems(row, bench)
    found += [f"connected to {address}" for address in tried]
    print(
        "\n".join(found)
        or f"{len([*ROWS, *IMAGES])} bad inputs refused, assertions {'on' if __debug__ else 'off'}"
    )
    return len(found)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
