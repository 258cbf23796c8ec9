"""Streamers of transformers, fed as `generate` feeds them: one token of every row at a time."""

from __future__ import annotations

import torch
from transformers.generation.streamers import BaseStreamer

from mmspec.decoding.canvas import Canvas

__all__ = ["Steps"]


class Steps:
    """Puts out each step of a batch when all rows have reached it; rows advance at rates of their own.

    Args:
        streamer: gets one tensor [B] on the CPU for every step.
        canvas: of the batch.
        filler: stands for the tokens of rows that have ended.
    """

    def __init__(self, streamer: BaseStreamer, canvas: Canvas, filler: int) -> None:
        self.streamer, self.canvas, self.filler = streamer, canvas, filler
        self.done = 0

    def put(self) -> None:
        """Put out the steps that a round has completed."""
        canvas = self.canvas
        rows = list(zip(canvas.output_lengths, canvas.finish_reasons, strict=True))
        going = [length for length, reason in rows if reason is None]
        reached = min(going) if going else max(length for length, _ in rows)
        for step in range(self.done, reached):
            tokens = [
                ids[start + step] if start + step < len(ids) else self.filler
                for ids, start in zip(canvas.ids, canvas.prompt_lengths, strict=True)
            ]
            self.streamer.put(torch.tensor(tokens))
        self.done = max(self.done, reached)
