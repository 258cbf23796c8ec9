"""Image models that predict many cells in a forward as targets: LPD, NAR and PAR.

A forward reads the tokens that were decided since the last one, and what asks for the cells to decide:
queries (LPD, 2507.01957), or nothing but those tokens (NAR, 2503.10696; PAR, 2412.15119).
Which cells these are is up to the draft. Keys of tokens stay in the slots of their cells.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmspec.core.cache import RaggedCache
from mmspec.core.distributions import Scores
from mmspec.core.draft import Block, Draft, Nodes
from mmspec.core.indexing import pick
from mmspec.core.interfaces import Drafter, PromptOutput, Rule, TargetOutput
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.families.llamagen.target import LlamaGenTarget
from mmspec.families.parallel_images.published import lpd_settings, par_guidance
from mmspec.targets.attention import mask_dtype
from mmspec.targets.causal import CausalState, to_device

__all__ = [
    "CellGroup",
    "CellSampler",
    "CellStates",
    "LPDState",
    "LPDTarget",
    "NARTarget",
    "PARTarget",
    "ParallelImageTarget",
]

SCHEDULES = ("constant", "rising")
UNREAD = torch.iinfo(torch.long).max  # turn of cells that nothing sees


@dataclass(frozen=True)
class CellGroup(Block):
    """Cells of images that are decided together, as lanes of one node, and the tokens to read before.

    Attributes:
        fresh: [B, k] cells that were decided, and whose keys are not there yet; N where there are fewer.
        tokens_of_fresh: [B, k] the tokens that stand there.
        kept: [B, N + 1] cells whose keys are there.
        ranks: [B, L] how many cells of the image, or scales, guidance counts as decided before each.
        last: the rank at which guidance that rises has its full scale.
        begin: cells that were decided before, known to the host.
        quota: cells that are to be decided of those that are proposed.
    """

    fresh: Tensor
    tokens_of_fresh: Tensor
    kept: Tensor
    ranks: Tensor
    begin: int
    quota: int
    last: int


@dataclass(frozen=True)
class CellStates(CellGroup):
    """Groups of cells that follow each other, each asked for in the state that the guesses before it make.

    What is fresh ends in guesses. A token sees those of its own turn and of turns before. A query sees those
    as well, and the queries of its own turn: none of a guess of its own group, nor of one behind.

    Attributes:
        tokens: [B, L, 1] what is guessed at each cell.
        turns: [B, L] groups between the first that is not decided and that of each cell.
        turns_of_fresh: [B, k] turns of the queries that see each token first: 0 for those that are decided.
        states: turns below states - 1 are guessed.
    """

    turns: Tensor
    turns_of_fresh: Tensor
    states: int

    @property
    def is_guessed(self) -> Tensor:
        """[B, L] whether a later state holds what is guessed at a cell."""
        return self.valid[:, :, 0] & (self.turns < self.states - 1)

    @property
    def candidates(self) -> Tensor:
        return self.is_guessed.sum(-1)


@dataclass(frozen=True)
class CellSampler(Sampler):
    """Sampling settings of such a model: guidance may follow how much of the image is decided.

    Args:
        guidance_schedule: "constant", or "rising" from 1 with the share of the cells that come before: the
            scale of cell j of N in the order of decisions is 1 + (s - 1) j / N (LPD, 2507.01957); that of
            grid k of S, counted from 0, is 1 + (s - 1) k / (S - 1) (VAR, 2404.02905, whose cfg is s - 1).

    Raises:
        InputError: no such schedule.
    """

    guidance_schedule: str = "constant"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.guidance_schedule not in SCHEDULES:
            raise InputError("guidance_schedule", self.guidance_schedule, " or ".join(map(repr, SCHEDULES)))

    def __call__(
        self, logits: Tensor, draft: Draft, history: Sequence[Sequence[int]], first: Tensor
    ) -> Scores:
        rises = self.guidance_schedule == "rising" and self.is_guided
        if not rises or not isinstance(draft, CellGroup) or not draft.starts.shape[1]:
            return super().__call__(logits, draft, history, first)
        asked, unconditional = logits.to(torch.promote_types(logits.dtype, torch.float32)).chunk(2)
        scale = torch.tensor(self.warping.guidance_scale, dtype=torch.float32, device=logits.device)[:, None]
        risen = 1 + (scale - 1) * draft.ranks / draft.last
        guided = unconditional + risen[..., None] * (asked - unconditional)
        return self.scores(guided, draft.lanes.valid.shape)


class ParallelImageTarget(LlamaGenTarget):
    """Base of adapters from image models that predict many cells in a forward.

    Args:
        model, vq, codebook: as of `LlamaGenTarget`.

    Attributes:
        sampler: class of its sampling settings.
        any_cells: whether any cells can be decided next.
        from_prompt: whether a prompt alone predicts the first cell.
        plain: options of `DecodingOrder`, of its plain decoding.
    """

    by_blocks = True
    sampler = CellSampler
    any_cells: ClassVar[bool] = False
    from_prompt: ClassVar[bool] = True
    plain: Mapping[str, Any]

    def plain_decoding(self) -> tuple[Drafter, Rule[Any] | None]:
        from mmspec.families.parallel_images.cells import OrderedCellsDrafter  # which reads this target

        return OrderedCellsDrafter().fitted(self), None

    def score(self, state: CausalState, draft: CellGroup) -> TargetOutput:  # type: ignore[override]
        """Score the cells of a group, in one forward that also reads the tokens decided before it."""
        copies = state.cache.rows // len(draft.starts)
        output = self.score_nodes(state, self.nodes(draft).repeat_rows(copies))  # type: ignore[arg-type]
        return replace(output, logits=self.predict(output.logits, draft))

    @abstractmethod
    def nodes(self, draft: CellGroup) -> Nodes:
        """Build the nodes of a forward, with slots for cells from 0 on, and one for junk at N."""

    def predict(self, logits: Tensor, draft: CellGroup) -> Tensor:
        """Turn the logits of nodes into those of the cells of the group, [R, L, V]."""
        return logits

    def read_fresh(self, draft: CellGroup, extent: int = 0) -> Nodes:
        """Build the nodes of the tokens that are not read yet, which see each other and those before.

        Args:
            draft: the group.
            extent: further slots behind that for junk.
        """
        seen = draft.kept.clone().scatter_(1, draft.fresh, True)
        seen[:, -1] = False
        seen = torch.cat([seen, seen.new_zeros(len(seen), extent)], 1)
        depths = torch.arange(seen.shape[1], device=seen.device).expand(len(seen), -1)
        return Nodes(draft.tokens_of_fresh, draft.fresh, depths, seen[:, None], seen.shape[1] - 1)


@dataclass
class LPDState(CausalState):
    """State of a batch of images that are asked for by queries.

    Attributes:
        unread: [R, P] prompts, as query nodes, before the first forward, which reads them; [R, 0] after it.
        lanes: queries of the forward at work.
    """

    unread: Tensor
    lanes: int = 0

    def tighten(self, emitted: Sequence[int]) -> None:
        """Do nothing: lengths are those of the prompts, whatever is decided."""


class LPDTarget(ParallelImageTarget):
    """Adapter from a model whose cells are asked for by learned queries (LPD, 2507.01957).

    A forward reads the tokens decided in the last one, and a query for each cell of the group. Queries see
    each other and all tokens; tokens see no query, so that keys of queries are never seen again. The first
    forward reads the prompts, whose slots stand in their order before the image.
    """

    any_cells = True
    from_prompt = False

    def __init__(self, model: Any, vq: Any = None, codebook: Tensor | None = None) -> None:
        super().__init__(model, vq, codebook)
        config, (guidance_scale, repulsion) = model.config, lpd_settings(model.config)
        self.published = {"guidance_scale": guidance_scale, "guidance_schedule": "rising", "top_k": 0}
        if config.repulsion_threshold is not None:
            repulsion = config.repulsion_threshold
        how = {"generation_steps": config.generation_steps, "repulsion_threshold": repulsion}
        self.plain = {"order": "proximity", **how}

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[Any, PromptOutput]:
        """Keep the prompts, embedded. Returns the state and logits [R, 0, V]: of no cell.

        Raises:
            InputError: hidden states are asked for.
        """
        if taps:
            raise InputError("taps", tuple(taps), "none: such a model has no state of a prompt alone")
        decoder: Any = self.model.model
        queries, ids, offsets = [decoder.mask_token], list[Tensor](), list[int]()
        count = self.vocabulary + 1
        for prompt in (to_device(prompt, self.device) for prompt in prompts):
            vectors = decoder.embed(prompt["input_ids"], prompt.get("caption_features"))[0]
            offsets.append(self.positions(prompt)[1])
            queries.append(vectors)
            ids.append(count + torch.arange(len(vectors), device=self.device))
            count += len(vectors)
        lengths = [len(row) for row in ids]
        state = LPDState(
            cache=RaggedCache(self.config, len(ids), capacity, self.device),
            offset=torch.tensor(offsets, device=self.device),
            prompt_lengths=lengths,
            hidden=self._reader(()),
            change=self._change,
            additive=mask_dtype(self._decoder),
            queries=torch.cat(queries),
            starts=torch.tensor(lengths, device=self.device),
            unread=pad_sequence(ids, batch_first=True, padding_value=self.vocabulary),
        )
        logits = torch.empty(len(ids), 0, self.vocabulary, dtype=self.dtype, device=self.device)
        return state, PromptOutput(logits, forwards=0)

    def score(self, state: LPDState, draft: CellGroup) -> TargetOutput:  # type: ignore[override]
        state.lanes = draft.starts.shape[1]
        output = super().score(state, draft)
        if state.unread.shape[1]:
            state.cache.lengths.copy_(state.starts)
            state.cache.longest = state.unread.shape[1]
            state.unread = state.unread[:, :0]
        return output

    def nodes(self, draft: CellGroup) -> Nodes:
        if isinstance(draft, CellStates):
            return nodes_of_states(draft, self.vocabulary)
        fresh, (images, lanes) = self.read_fresh(draft), draft.starts.shape
        asked = draft.starts.where(draft.valid[:, :, 0], fresh.extent - 1)
        masks = torch.full_like(asked, self.vocabulary)
        queried = fresh.visible[:, 0].scatter(1, asked, True)
        queried[:, -1] = False
        visible = torch.cat(
            [
                fresh.visible.expand(-1, fresh.slots.shape[1], -1),
                queried[:, None].expand(images, lanes, -1),
            ],
            1,
        )
        tokens, slots = torch.cat([fresh.tokens, masks], 1), torch.cat([fresh.slots, asked], 1)
        return Nodes(tokens, slots, fresh.depths, visible, fresh.deepest)

    def score_nodes(self, state: LPDState, nodes: Nodes) -> TargetOutput:  # type: ignore[override]
        return super().score_nodes(state, behind(state, nodes) if state.unread.shape[1] else nodes)  # type: ignore[arg-type]

    def further_inputs(self, state: LPDState, nodes: Nodes) -> dict[str, Any]:
        return {"logits_to_keep": state.lanes}  # queries come last


def nodes_of_states(draft: CellStates, query: int) -> Nodes:
    """Build the nodes of states: tokens in the slots of their cells, and queries, of an id, behind all."""
    kept, queries = draft.kept, torch.full_like(draft.starts, query)
    read = torch.full_like(draft.depths, UNREAD).masked_fill(kept, -1)  # turn from which a cell is seen
    read = read.scatter(1, draft.fresh, draft.turns_of_fresh)
    read[:, -1] = UNREAD
    turns = torch.cat([draft.turns_of_fresh, draft.turns], 1)
    asks = turns.scatter(1, torch.arange(draft.fresh.shape[1], device=kept.device).expand_as(draft.fresh), -1)
    visible = [read[:, None] <= turns[:, :, None], draft.turns[:, None] == asks[:, :, None]]
    depths = torch.cat([draft.depths, draft.starts], 1)
    behind = kept.shape[1] + torch.arange(draft.starts.shape[1], device=kept.device).expand_as(queries)
    tokens, slots = torch.cat([draft.tokens_of_fresh, queries], 1), torch.cat([draft.fresh, behind], 1)
    return Nodes(tokens, slots, depths, torch.cat(visible, 2), kept.shape[1] - 1)


def behind(state: LPDState, nodes: Nodes) -> Nodes:
    """Put the prompts of a state before the nodes [R, n] of the first forward, by the causal mask."""
    (rows, longest), length = state.unread.shape, state.starts[:, None]
    extent = longest + nodes.extent
    column = torch.arange(extent, device=length.device).expand(rows, -1)
    place = column[:, :longest]
    own = place.where(place < length, extent - 1)  # padding goes where nothing of its row stands
    is_prompt, cell = column < length, (column - length).clamp(0, nodes.extent - 1)
    inside = is_prompt | (column < length + nodes.extent)
    seen = nodes.visible.gather(2, cell[:, None].expand(-1, nodes.visible.shape[1], -1))
    seen = (seen | is_prompt[:, None]) & inside[:, None]
    causal = (column[:, None] <= place[:, :, None]) & is_prompt[:, None]
    depths = column.where(is_prompt, length + nodes.depths.gather(1, cell))
    return Nodes(
        torch.cat([state.unread, nodes.tokens], 1),
        torch.cat([own, nodes.slots + length], 1),
        depths,
        torch.cat([causal, seen.expand(-1, nodes.slots.shape[1], -1)], 1),
        extent - 1,
    )


class NARTarget(ParallelImageTarget):
    """Adapter from a model that predicts the cells right of and below each (NAR, 2503.10696).

    A forward reads an anti-diagonal, whose cells see each other and all before. A cell of the next one has
    the mean of the logits of the cells left of it and above it, or those of the only one that there is.
    """

    plain: Mapping[str, Any] = {"order": "diagonal"}

    def __init__(self, model: Any, vq: Any = None, codebook: Tensor | None = None) -> None:
        super().__init__(model, vq, codebook)
        if model.config.condition_type == "class":  # those of captions are drawn as LlamaGen's are
            self.published = {"guidance_scale": 2.0, "top_k": 0}

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[Any, PromptOutput]:
        """Read the prompts; the first cell has the mean of both predictions."""
        state, output = super().prefill(prompts, capacity, taps)
        right, below = output.logits.chunk(2, -1)
        return state, replace(output, logits=(right + below) / 2)

    def nodes(self, draft: CellGroup) -> Nodes:
        return self.read_fresh(draft)

    def predict(self, logits: Tensor, draft: CellGroup) -> Tensor:
        copies, columns = len(logits) // len(draft.starts), self.grid.columns
        total = torch.zeros(1, device=logits.device, dtype=logits.dtype)
        count = torch.zeros_like(draft.starts)
        inner = draft.starts % columns > 0
        for predicted, distance in zip(logits.chunk(2, -1), (1, columns), strict=True):
            matches = draft.fresh[:, None] == (draft.starts - distance)[:, :, None]  # [B, L, k]
            if distance == 1:
                matches &= inner[:, :, None]
            has = matches.any(-1)
            found = pick(predicted, matches.long().argmax(-1).repeat(copies, 1))
            total = total + found.where(has.repeat(copies, 1)[..., None], 0.0)
            count = count + has
        return total / count.repeat(copies, 1)[..., None]


class PARTarget(ParallelImageTarget):
    """Adapter from a model that decodes the regions of an image side by side (PAR, 2412.15119).

    The first cells of the n regions come one after another. The last of them and n - 1 special tokens, whose
    keys stay, predict the second cell of every region; from then on the token in region r predicts the next
    of region r.
    """

    def __init__(self, model: Any, vq: Any = None, codebook: Tensor | None = None) -> None:
        super().__init__(model, vq, codebook)
        self.published = {"guidance_scale": par_guidance(model.config), "top_k": 0}
        self.group_size: int = model.config.group_size
        self.plain = {"order": "regions", "regions": self.group_size}

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[Any, PromptOutput]:
        """Read the prompts; see `CausalTarget`."""
        state, output = super().prefill(prompts, capacity, taps)
        decoder: Any = self.model.model
        return replace(state, queries=decoder.special_tokens.weight), output

    def nodes(self, draft: CellGroup) -> Nodes:
        special = self.group_size - 1
        fresh = self.read_fresh(draft, extent=special)
        begins = draft.begin == self.group_size
        fresh.visible[:, :, fresh.extent - special :] = draft.begin >= self.group_size
        if not begins:
            return fresh
        # their places are beyond the image, where nothing is rotated, as in the published model
        more = torch.arange(special, device=fresh.slots.device).expand(len(fresh.slots), -1)
        tokens = torch.cat([fresh.tokens, self.vocabulary + more], 1)
        slots = torch.cat([fresh.slots, fresh.extent - special + more], 1)
        return Nodes(tokens, slots, fresh.depths, fresh.visible, fresh.deepest)
