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
        rows = list(zip(self.canvas.output_lengths, self.canvas.finish_reasons, strict=True))
        going = [length for length, reason in rows if reason is None]
        self._put_until(min(going) if going else max(length for length, _ in rows))

    def end(self) -> None:
        """Tell the streamer that there is no more."""
        self.streamer.end()

    def _put_until(self, length: int) -> None:
        starts = self.canvas.prompt_lengths
        for step in range(self.done, length):
            tokens = [
                ids[start + step] if start + step < len(ids) else self.filler
                for ids, start in zip(self.canvas.ids, starts, strict=True)
            ]
            self.streamer.put(torch.tensor(tokens))
        self.done = max(self.done, length)
