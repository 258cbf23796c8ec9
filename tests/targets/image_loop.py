"""Images from the loop, and from a naive loop with full recomputation, guidance and grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from mmspec.accelerator import Accelerator
from mmspec.accelerators import build_accelerator
from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.image_grid import FREE, ImageGrid
from mmspec.core.interfaces import Request
from mmspec.core.loop import speculate
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.core.statistics import DecodingStats
from mmspec.targets import ImageTokenTarget
from mmspec.trees.matching import SampleAndMatch
from tests.oracles import OracleDrafter

#: Logits [K] of the codes at the next place, given the output so far (in compact tokens).
CodeLogits = Callable[[Sequence[int]], Tensor]

DRAFTERS = ["none", "oracle 0 %", "oracle 30 %"]
DEPTH = (
    6  # of the oracle's drafts; more than what is left in the last rounds, so that they point beyond the end
)


def naive_image(
    grid: ImageGrid, conditional: CodeLogits, unconditional: CodeLogits | None = None, scale: float = 1.0
) -> list[int]:
    """The greedy output, token by token: the syntax where the grid says so, else the likeliest code."""
    output: list[int] = []
    for place in range(grid.length):
        row, column = divmod(place, grid.columns + (grid.row_end is not None))
        if row >= grid.rows:
            output.append(grid.ending[place - grid.rows * (grid.columns + (grid.row_end is not None))])
        elif column == grid.columns:
            is_last = row == grid.rows - 1 and grid.last_row_end is not None
            end = grid.last_row_end if is_last else grid.row_end
            assert end is not None
            output.append(end)
        else:
            logits = conditional(output).double().log_softmax(-1)
            if unconditional is not None:
                other = unconditional(output).double().log_softmax(-1)
                logits = other + scale * (logits - other)
            output.append(int(logits.argmax()))
    assert [token >= grid.codebook_size for token in output] == [token != FREE for token in grid.forced]
    return output


def accelerator(
    name: str, requests: Sequence[Request], answers: Sequence[list[int]], codes: int, depth: int = DEPTH
) -> Accelerator:
    """Return `none`, `copy`, or an oracle with wrong tokens at a share of the places."""
    if not name.startswith("oracle"):
        return build_accelerator(name, **({"min_match": 1} if name == "copy" else {}))
    prompts = [tuple(request.prompt_tokens) for request in requests]
    known = dict(zip(prompts, answers, strict=True))
    drafter = OracleDrafter(known, depth, codes, int(name.split()[1]) / 100, siblings=1)
    return Accelerator("oracle", drafter, SampleAndMatch())


def draw(
    target: ImageTokenTarget,
    accelerator: Accelerator,
    requests: Sequence[Request],
    scale: float = 1.0,
    temperature: float = 0.0,
    seeds: Sequence[int] | None = None,
) -> tuple[list[list[int]], DecodingStats]:
    """Decode a batch to its end, every row with a seed of its own."""
    stats = DecodingStats()
    lengths = {request.layout.length for request in requests if request.layout is not None}
    prompts = [request.prompt_tokens for request in requests]
    canvas = Canvas(prompts, Stopping(max(lengths)), stats, target.device)
    stream = RandomStream.from_seed(seeds or range(len(requests)), len(requests))
    sampler = Sampler(temperature=temperature, guidance_scale=scale)
    for _ in speculate(target, accelerator.decoder, sampler, requests, canvas, stream):
        pass
    outputs = canvas.outputs()
    lengths_of_rows = [request.layout.length if request.layout else 0 for request in requests]
    return [row[:length] for row, length in zip(outputs, lengths_of_rows, strict=True)], stats
