"""Keys and values rounded to 8 or 4 bits: memory, and how far the words of plain decoding change.

python -m benchmarks.cache_bits runs/smollm2 runs/spec_bench.jsonl --samples 12
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import rich
import torch
import typer
from rich.progress import track

from mmspec import MMSpecPipeline
from mmspec.evaluation.prompt_files import read_prompt_file
from mmspec.evaluation.tables import figures
from mmspec.targets.memory import cached_bytes


def alike(first: list[int], second: list[int]) -> int:
    """Tokens until two outputs part."""
    pairs = zip(first, second, strict=False)
    return next(
        (place for place, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second))
    )


def measure(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a language model.")],
    prompts: Annotated[Path, typer.Argument(help="A file of prompts, as of mmspec bench.")],
    samples: Annotated[int, typer.Option(min=1)] = 12,
    new_tokens: Annotated[int, typer.Option(min=1)] = 48,
) -> None:
    """Decode prompts plainly and with `copy`, with keys and values as they are, in 8 and in 4 bits."""
    pipe: Any = MMSpecPipeline.from_pretrained(model, accelerator="none", dtype=torch.float32)
    asked = [each.turns[0] for each in read_prompt_file(prompts, samples, evenly=True)]
    rows: list[tuple[str, ...]] = []
    plain: list[list[int]] = []
    for bits in (None, 8, 4):
        pipe.quantize_cache(bits)
        outputs = {}
        for name in ("none", "copy"):
            pipe.set_accelerator(name, length="fixed")
            outputs[name] = [
                pipe(each, max_new_tokens=new_tokens).tokens[0]
                for each in track(asked, f"{bits} bits, {name}")
            ]
        plain = plain or outputs["none"]
        pairs = list(zip(plain, outputs["none"], strict=True))
        row = (
            str(bits or "as they are"),
            f"{cached_bytes(pipe.model.config, pipe.model.dtype, bits):,}",
            f"{sum(one == other for one, other in pairs)} of {len(pairs)}",
            f"{sum(alike(*pair) for pair in pairs) / len(pairs):.1f} of {new_tokens}",
            f"{sum(map(list.__eq__, outputs['none'], outputs['copy']))} of {len(pairs)}",
        )
        rows.append(row)
    columns = ("bits", "bytes a token", "texts unchanged", "tokens until they part", "copy is exact")
    rich.print(figures(columns, rows, words=1))


if __name__ == "__main__":
    typer.run(measure)
