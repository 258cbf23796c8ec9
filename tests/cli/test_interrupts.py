"""Ctrl-C during a command: the command prints the finished results, and the exit code is 130."""

from __future__ import annotations

import json
import pkgutil
from typing import Any

import pytest

DECODE = "mmspec.evaluation.contenders.decode_conversations"
LLAVA = " --accelerator copy --max-new-tokens 4"
#: Command; the function that interrupts it, after a number of calls; rows of the result, and their content.
INTERRUPTED: list[tuple[str, str, int, str, str, list[Any]]] = [
    ("caption {tiny} 0.png 1.png" + LLAVA, "mmspec.cli.caption._decode", 1, "", "new_tokens", [4]),
    ("check {tiny} --samples 1" + LLAVA, "mmspec.evaluation.identity.checks.IdentityCheck.sampled", 0,
     "comparisons", "mode", ["greedy"]),
    ("bench {tiny} --accelerator copy --samples 2 --max-new-tokens 4 --repeats 1", DECODE, 5, "records",
     "samples", [1, 1]),
    ("evaluate text {tiny} --samples 3" + LLAVA, DECODE, 6, "rows", "accelerator", ["none"]),
    ("generate {class} --class 1 --out {tmp}/a.png --accelerator none,sjd:window=8",
     "mmspec.pipelines.ImagePipeline.__call__", 1, "", "accelerator", ["none"]),
    ("evaluate images {class} --accelerator none,sjd --samples 3 --metrics entropy",
     "mmspec.evaluation.quality.image_folder.draw_images", 1, "rows", "images", ["none"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "function", "calls", "part", "key", "said"),
    INTERRUPTED,
    ids=[row[0].split(" --")[0] for row in INTERRUPTED],
)
def test_what_is_done_is_printed(
    run, tiny_folder, llamagens, images, tmp_path, monkeypatch, command, function, calls, part, key, said
):
    named = {"tiny": tiny_folder, "tmp": tmp_path, **llamagens}
    shown = {"0.png": images[0], "1.png": images[1]}
    owner, _, name = function.rpartition(".")
    made = []

    def interrupted(*arguments, **options):
        made.append(arguments)
        if len(made) > calls:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    real = getattr(pkgutil.resolve_name(owner), name)
    monkeypatch.setattr(function, interrupted)
    result = run(*(shown.get(word, word.format(**named)) for word in command.split()), "--json")
    assert result.exit_code == 130 and "interrupted" in result.stderr
    table = json.loads(result.stdout)
    assert [row[key] for row in (table[part] if part else table)] == said
