"""Target of masked autoregressive image models (MAR, 2406.11838), which predict any cell given any others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.core.distributions import Continuous
from mmspec.core.draft import Block, Draft
from mmspec.core.image_grid import ImageGrid
from mmspec.core.indexing import pick, put
from mmspec.core.interfaces import PromptOutput, TargetOutput, TargetState
from mmspec.core.verdict import Fill, Path
from mmspec.errors import InputError
from mmspec.families.mar.modeling import MARForImageGeneration
from mmspec.open_types import Keywords
from mmspec.targets.image_tokens import PromptPair
from mmspec.targets.model_target import ModelTarget
from mmspec.targets.steps import CompiledForward
from mmspec.vectors.denoising_head import DenoisingHead, DenoisingSchedule, StepAnnealing
from mmspec.vectors.sampling import DenoisingSampler

__all__ = ["CellBlock", "ConditionReader", "MARSampler", "MARState", "MARTarget"]

#: Guidance scales of github.com/LTH14/mar, README.md, by the width of mar_base, mar_large and mar_huge.
GUIDANCE = {768: 2.9, 1024: 3.0, 1280: 3.2}


@dataclass(frozen=True)
class CellBlock(Block):
    """Cells of a MAR's images, and the progress of the images.

    Attributes:
        iteration, iterations: forward passes before this one, and of the whole image.
        before, after: cells that are decided before and after this round; [T, 1, 1] if lanes differ.
        annealing: annealing of the denoising head's steps; None for equally many in every forward pass.
        rolls_back: whether each lane was drafted given the candidates before it, and is rejected with the
            first rejected one.
    """

    iteration: int
    iterations: int
    before: int | Tensor
    after: int | Tensor
    annealing: StepAnnealing | None = None
    rolls_back: bool = False

    def verdict(self, path: Path, finite: Tensor) -> Fill:
        if self.rolls_back:
            kept = (path.accepted == 1).long().view(len(self.valid), -1)
            stands = pad(kept[:, :-1], (1, 0), value=1).cumprod(-1).flatten()
            path = replace(path, accepted=path.accepted * stands, decided=path.decided * stands)
        return super().verdict(path, finite)


@dataclass(frozen=True, kw_only=True)
class MARSampler(DenoisingSampler):
    """Sampling settings of a MAR: steps and guidance depend on the decided share of the image."""

    def schedule_of(self, draft: CellBlock) -> DenoisingSchedule:
        if draft.annealing is None:
            return self.schedule
        steps = draft.annealing.steps(self.schedule.steps, draft.iteration, draft.iterations)
        return self.schedule.with_steps(steps)

    def progress(self, draft: CellBlock, first: Tensor, like: Tensor) -> tuple[int | Tensor, int | Tensor]:
        return draft.before, draft.after


class ConditionReader(Protocol):
    """Computes the conditions of a batch of images in place of their model, with state between calls."""

    def conditions(self, tokens: Tensor, known: Tensor, labels: Tensor, cells: Tensor) -> Tensor:
        """[R, N, D] conditions; arguments as of the model, and the required cells [B, k]."""

    def nbytes(self) -> int:
        """Bytes of its state."""


@dataclass
class MARState(TargetState):
    """Known cells of a batch of images.

    Attributes:
        tokens: [R, N + 1, d] vectors of the cells; index N is unused.
        known: [R, N + 1] whether each is decided.
        labels: [R] classes; R is B, or 2B under guidance.
        reader: computes conditions in place of the model, if a session attached one.
    """

    tokens: Tensor
    known: Tensor
    labels: Tensor
    reader: ConditionReader | None = None

    def write(self, cells: Tensor, values: Tensor) -> None:
        """Write values [B, k, d] at cells [B, k] of each image; index N is ignored."""
        copies = len(self.labels) // len(cells)
        put(self.tokens, cells.repeat(copies, 1), values.to(self.tokens.dtype).repeat(copies, 1, 1))
        self.known.scatter_(1, cells.repeat(copies, 1), True)
        self.known[:, -1] = False

    def nbytes(self) -> int:
        return self.tokens.nbytes + (0 if self.reader is None else self.reader.nbytes())


class MARTarget(ModelTarget[MARState]):
    """Adapter from a MAR to the Target interface.

    The interface's logits are conditions of the denoising head, [R, n, D]. Every forward pass reads all known
    cells, since attention is bidirectional; nothing is cached.

    Args:
        model: a loaded model in eval mode. A prompt is `input_ids` [1, 1], the class; the number of classes
            stands for no class.

    Attributes:
        any_order: True; cells are predicted in any order.
        vocabulary, device, grid, codebook, config, vector_size: as of `Target`.
        published, classes: as of `ImageTokenTarget`.
        sampler: class of its sampling settings.
    """

    model: MARForImageGeneration
    grid: ImageGrid
    any_order = True
    distribution = Continuous
    compared = ("masked:iterations=20:order=checkerboard", "masked:iterations=32")
    sampler = MARSampler
    published: Keywords

    def __init__(self, model: MARForImageGeneration) -> None:
        self.model = model
        self.config = model.config
        scale = GUIDANCE.get(model.config.hidden_size, GUIDANCE[1024])
        self.published = {"guidance_scale": scale, "guidance_schedule": "rising"}
        self.classes: int = model.config.num_classes
        self.vocabulary: int = self.classes + 1
        self.vector_size: int = model.config.token_size
        side: int = model.config.grid_size
        self.grid = ImageGrid(side, side, 1)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.largest_image: int = self.grid.cells
        self.steps: CompiledForward | None = None

    def encode_prompt(self, asked: int | None, *others: object) -> PromptPair:
        """Encode a label, or None for no class; see `ImageTokenTarget`."""
        label = self.classes if asked is None else asked
        own, none = torch.tensor([[[label]], [[self.classes]]], device="cpu")
        return {"input_ids": own}, {"input_ids": none}

    def compile(self) -> None:
        """Compile the forward passes of the transformer, each at its first call."""
        self.steps = CompiledForward(type(self.model).__name__, self.model.conditions)

    @property
    def read(self) -> Callable[..., Tensor]:
        """Compute conditions of known cells; see `MARForImageGeneration.conditions`."""
        return self.model.conditions if self.steps is None else self.steps

    @property
    def denoiser(self) -> DenoisingHead:
        """Denoising head, which draws a token given a condition."""
        return self.model.diffloss

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[MARState, PromptOutput]:
        """Store the classes, without a forward pass. Returns the state and empty conditions [R, 0, D].

        Raises:
            InputError: `taps` is not empty.
        """
        if taps:
            raise InputError("taps", tuple(taps), "must be empty: MAR has no hidden states of a prompt alone")
        labels = torch.cat([prompt["input_ids"].flatten() for prompt in prompts]).to(self.device)
        tokens = torch.zeros(
            len(labels), self.grid.cells + 1, self.vector_size, dtype=self.dtype, device=self.device
        )
        state = MARState(tokens, torch.zeros_like(tokens[..., 0], dtype=torch.bool), labels)
        size = len(labels), 0, self.model.config.hidden_size
        nothing = torch.empty(size, dtype=torch.float32, device=self.device)
        return state, PromptOutput(nothing, forwards=0)

    def score(self, state: MARState, draft: CellBlock) -> TargetOutput:
        """Conditions [R, n, D] of the cells of a draft.

        If its lanes see different cells, each lane is read in a row of its own: a cell may be masked for one
        lane and known to another, and attention is bidirectional.
        """
        nodes = draft.nodes
        copies = len(state.labels) // len(nodes.slots)
        _, lanes, size = draft.valid.shape
        lanes = lanes if nodes.visible.shape[1] > 1 else 1
        if lanes == 1:
            conditions = self._conditions(state, nodes.slots, draft)
        else:
            seen = nodes.visible[:, ::size]  # [B, L, N] of the first node of each lane, the only mask
            candidates = replace(state, tokens=state.tokens.clone(), known=state.known.clone())
            drafted = draft.valid.clone()
            drafted[..., 0] = False
            candidates.write(nodes.slots.where(drafted.flatten(1), self.grid.cells), nodes.tokens)
            seen = seen.repeat(copies, 1, 1).flatten(0, 1)
            tokens, known, labels = (
                each.repeat_interleave(lanes, 0)
                for each in (candidates.tokens[:, :-1], candidates.known[:, :-1], state.labels)
            )
            conditions = self.read(tokens, known & seen, labels)
        slots = nodes.slots.view(len(nodes.slots) * lanes, -1).repeat(copies, 1)
        picked = pick(conditions, slots)
        return TargetOutput(picked.view(len(state.labels), -1, picked.shape[-1]))

    def commit(self, state: MARState, draft: Draft, verdict: Fill, active: Tensor) -> None:
        """Write the cells that were decided."""
        decided = verdict.decided & active[:, None]
        state.write(verdict.places.where(decided, self.grid.cells), verdict.values)

    def _conditions(self, state: MARState, cells: Tensor, draft: CellBlock) -> Tensor:
        """[R, N, D] conditions, which are valid at `cells` [B, n]."""
        tokens, known, labels = state.tokens[:, :-1], state.known[:, :-1], state.labels
        if state.reader is not None:
            return state.reader.conditions(tokens, known, labels, cells)
        # rows that ended in an error have fewer known cells, but their results are not used
        count = draft.before if isinstance(draft.before, int) else None
        return self.read(tokens, known, labels, count)
