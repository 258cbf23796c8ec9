"""Axial transformers (1912.12180) as a target: the outer stack runs once per row, and its keys are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.core.draft import Tree
from mmspec.core.interfaces import PromptOutput, TargetOutput, TargetState
from mmspec.core.rows import named
from mmspec.core.verdict import Path
from mmspec.errors import InputError
from mmspec.families.llamagen.target import LlamaGenTarget
from mmspec.targets.causal import to_device
from mmspec_extras.families.axial.modeling import AxialConfig, AxialForCausalLM

__all__ = ["AxialState", "AxialTarget", "Drawing"]


@dataclass
class Drawing:
    """An image while it is drawn.

    Attributes:
        begin: [1, d] of its prompt.
        known: for each outer layer, keys and values [1, W, r, 2 d] of r rows.
        summaries: [1, r, W, d] of the same rows.
        tokens: the decided tokens that have been read.
    """

    begin: Tensor
    known: list[Tensor]
    summaries: Tensor
    tokens: list[int]

    def keep(self, rows: int) -> None:
        """Drop what was computed for rows after the first ones."""
        self.known = [each[:, :, :rows] for each in self.known]
        self.summaries = self.summaries[:, :rows]


@dataclass
class AxialState(TargetState):
    """The images of a batch."""

    row_fields = named("drawings")

    drawings: list[Drawing]


class AxialTarget(LlamaGenTarget):
    """Adapter from an axial transformer. Raster accelerators that draft chains can be used.

    The outer stack runs when a row is complete, also on drafts that complete one. The inner stack reads the
    current row anew for each token. Images of a batch are computed one after another.
    """

    config: AxialConfig
    model: AxialForCausalLM

    def treats_alike(self, prompt: Mapping[str, Tensor]) -> bool:
        return True

    def compile(self) -> None:
        """Forward passes are not compiled."""

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[AxialState, PromptOutput]:
        if taps:
            raise InputError("taps", tuple(taps), "must be empty: heads cannot read an axial transformer")
        asked = [to_device(prompt, self.device) for prompt in prompts]
        begins = [self.model.begin(each["input_ids"], each.get("caption_features")) for each in asked]
        size = self.config.grid_size, self.config.hidden_size
        drawings = [
            Drawing(begin, self.model.nothing(begin), begin.new_empty(1, 0, *size), []) for begin in begins
        ]
        logits = [self.predict(drawing, [])[:, :1] for drawing in drawings]
        return AxialState(drawings), PromptOutput(torch.cat(logits))

    def score(self, state: AxialState, draft: Tree) -> TargetOutput:
        if not draft.lanes.is_chain:
            raise InputError("tree", draft.max_depth, "must be a chain, since rows are summarised in order")
        chains = draft.tokens.tolist()
        rows = enumerate(state.drawings)
        return TargetOutput(torch.cat([self.predict(each, chains[row % len(chains)]) for row, each in rows]))

    def predict(self, drawing: Drawing, chain: list[int]) -> Tensor:
        """Logits [1, n, V] after each token of a chain, or [1, W, V] of the first row without one."""
        width, cells = self.grid.columns, self.grid.cells
        tokens = [*drawing.tokens, *chain]
        begin, end = len(drawing.tokens) + bool(chain), min(len(tokens), cells - 1)
        first, last = min(begin, end) // width, end // width
        tokens += [0] * ((last + 1) * width - len(tokens))  # those of the row that are not drawn
        image = torch.tensor(tokens[:cells], device=self.device).view(1, -1, width)
        if (ready := drawing.summaries.shape[1]) <= last:
            above = image.roll(1, 1)[:, ready : last + 1]
            more, drawing.known = self.model.summarise(drawing.begin, above, drawing.known, ready)
            drawing.summaries = torch.cat([drawing.summaries, more], 1)
        rows = slice(first, last + 1)
        logits = self.model.row_logits(drawing.begin, image[:, rows], drawing.summaries[:, rows], first)
        if not chain:
            return logits[:, 0]
        place = torch.arange(begin, begin + len(chain), device=self.device).clamp_max(cells - 1)
        return logits.flatten(1, 2)[:, place - first * width]

    def commit(self, state: AxialState, draft: Tree, verdict: Path, active: Tensor) -> None:
        chains, counts = draft.tokens.tolist(), (verdict.decided * active).tolist()
        for row, drawing in enumerate(state.drawings):
            row %= len(chains)
            drawing.tokens = drawing.tokens + chains[row][: counts[row]]
            drawing.keep(len(drawing.tokens) // self.grid.columns + 1)
