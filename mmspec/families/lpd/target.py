"""Target of LPD (2507.01957), which predicts any cells of an image by learned queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmspec.core.draft import Nodes
from mmspec.core.interfaces import PromptOutput, TargetOutput
from mmspec.families.lpd.modeling import LPDForCausalLM
from mmspec.families.parallel_images.target import CellGroup, ParallelImageTarget
from mmspec.open_types import Keywords
from mmspec.targets.causal import CausalState, to_device
from mmspec.targets.image_tokens import AnyVQ

__all__ = ["CellStates", "LPDState", "LPDTarget"]

UNREAD = torch.iinfo(torch.long).max  # turn of cells that no node sees


# Guidance scale, which rises with the image, and repulsion threshold of published checkpoints
# of github.com/mit-han-lab/lpd, by layers, width and cells: --cfg and --lpd_order_file of
# scripts/eval/lpd_{l,xl,xxl}_res{256,512}_steps{20,48}.sh; orders/run_lpd_order.sh makes these orders.
# Layers and widths are those of models/lpd.py.
LPD = {
    (24, 1024, 256): (4.8, 2),  # L
    (36, 1280, 256): (4.9, 2),  # XL
    (48, 1536, 256): (5.9, 3),  # XXL
    (24, 1024, 1024): (7.3, 4),
    (36, 1280, 1024): (6.0, 4),
}
OTHER_LPD = (4.8, 2)


@dataclass(frozen=True)
class CellStates(CellGroup):
    """Several consecutive groups of cells, each predicted given the draft tokens of the groups before it.

    The last of the fresh tokens are draft tokens. A token sees the tokens of its own turn and of earlier
    turns. A query sees these too, and the queries of its own turn; it sees no draft token of its own group or
    of later groups.

    Attributes:
        tokens: [B, L, 1] draft token of each cell.
        turns: [B, L] number of groups between the first undecided one and that of each cell.
        turns_of_fresh: [B, k] first turn whose queries see each token; 0 for decided tokens.
        states: turns below states - 1 have draft tokens.
    """

    turns: Tensor
    turns_of_fresh: Tensor
    states: int

    @property
    def is_guessed(self) -> Tensor:
        """[B, L] whether a later state contains the draft token of a cell."""
        return self.valid[:, :, 0] & (self.turns < self.states - 1)

    @property
    def candidates(self) -> Tensor:
        return self.is_guessed.sum(-1)


@dataclass
class LPDState(CausalState):
    """State of a batch of images that are predicted by queries.

    Attributes:
        unread: [R, P] prompts, as query nodes, until the first forward pass reads them; [R, 0] afterwards.
        lanes: number of queries of the current forward pass.
    """

    unread: Tensor
    lanes: int = 0

    def tighten(self, emitted: Sequence[int]) -> None:
        """Do nothing: the lengths are those of the prompts throughout."""


class LPDTarget(ParallelImageTarget):
    """Adapter from a model with learned queries for cells (LPD, 2507.01957) to the Target interface.

    A forward pass reads the tokens decided in the previous one, and a query for each cell of the group.
    Queries see each other and all tokens. Tokens see no query, so that the keys of queries are used once. The
    first forward pass also reads the prompts, whose slots precede those of the image.
    """

    model: LPDForCausalLM
    any_cells = True
    compared = ("lpd", "maskgit")
    from_prompt = False

    def __init__(self, model: LPDForCausalLM, vq: AnyVQ = None, codebook: Tensor | None = None) -> None:
        super().__init__(model, vq, codebook)
        config = model.config
        shape = config.num_hidden_layers, config.hidden_size, config.grid_size**2
        guidance_scale, repulsion = LPD.get(shape, OTHER_LPD) if config.body == "vit" else OTHER_LPD
        self.published = {"guidance_scale": guidance_scale, "guidance_schedule": "rising", "top_k": 0}
        if config.repulsion_threshold is not None:
            repulsion = config.repulsion_threshold
        how = {"generation_steps": config.generation_steps, "repulsion_threshold": repulsion}
        self.plain = {"order": "proximity", **how}

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[LPDState, PromptOutput]:
        """Store the embedded prompts, without a forward pass; see `unread`."""
        decoder = self.model.model
        queries, ids, offsets = list[Tensor]([decoder.mask_token]), list[Tensor](), list[int]()
        count = self.vocabulary + 1
        for prompt in (to_device(prompt, self.device) for prompt in prompts):
            vectors = decoder.embed(prompt["input_ids"], prompt.get("caption_features"))[0]
            offsets.append(self.positions(prompt)[1])
            queries.append(vectors)
            ids.append(count + torch.arange(len(vectors), device=self.device))
            count += len(vectors)
        return self.unread(
            LPDState,
            [len(row) for row in ids],
            capacity,
            taps,
            offset=torch.tensor(offsets, device=self.device),
            queries=torch.cat(queries),
            unread=pad_sequence(ids, batch_first=True, padding_value=self.vocabulary),
        )

    def score(self, state: LPDState, draft: CellGroup) -> TargetOutput:
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

    def score_nodes(self, state: LPDState, nodes: Nodes) -> TargetOutput:
        return super().score_nodes(state, behind(state, nodes) if state.unread.shape[1] else nodes)

    def further_inputs(self, state: LPDState, nodes: Nodes) -> Keywords:
        return {"logits_to_keep": state.lanes}  # queries come last


def nodes_of_states(draft: CellStates, query: int) -> Nodes:
    """Build the nodes of states: tokens in the slots of their cells, and queries of the id `query` after."""
    kept, queries = draft.kept, torch.full_like(draft.starts, query)
    read = torch.full_like(draft.depths, UNREAD).masked_fill(kept, -1)  # first turn that sees a cell
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
    """Put the prompts of a state, with a causal mask, before the nodes [R, n] of the first forward pass."""
    (rows, longest), length = state.unread.shape, state.starts[:, None]
    extent = longest + nodes.extent
    column = torch.arange(extent, device=length.device).expand(rows, -1)
    place = column[:, :longest]
    own = place.where(place < length, extent - 1)  # padding is written to an unused slot
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
