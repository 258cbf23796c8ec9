"""Target of masked language models, which predict any place of a block, given decided tokens and masks.

Such a model is a decoder-only architecture trained without a causal mask, or with a block-causal one;
undecided places hold a mask token. The cache has the keys of tokens at their places, and a later forward pass
over the same places overwrites them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from mmspec.core.cache import check_layer_types
from mmspec.core.draft import Block, Draft, Nodes
from mmspec.core.indexing import pick
from mmspec.core.interfaces import Drafter, PromptOutput, TargetOutput
from mmspec.core.rows import lengthen
from mmspec.core.verdict import Fill
from mmspec.errors import InputError
from mmspec.open_types import Keywords
from mmspec.places.policies import PlaceRule
from mmspec.targets.admission import check_length, refusal
from mmspec.targets.causal import CausalState, CausalTarget
from mmspec.targets.prefix import TOKENS
from mmspec.validation import is_integer
from mmspec.visual_tokens.spans import find_images

__all__ = ["CACHES", "MaskedBlock", "MaskedState", "MaskedTarget"]

CACHES = ("none", "prefix", "dual")
PREDICTS = ("own", "next")
ORDERS = ("confidence", "left_to_right")
CONFIDENCES = ("promised", "own")


@dataclass(frozen=True)
class MaskedBlock(Block):
    """Places of one block of each row, as lanes of one node.

    Lanes are in the order of their places. Other states of the block are further lanes at the same places,
    in slots after the output. Their nodes see each other instead of those of the first state; context in the
    same forward pass sees the first state alone.

    Attributes:
        groups: begin and end of each row's block, as output indices known to the host.
        length: places of the output, including those after its end in a last block that is decoded whole;
            slots from there on belong to no place.
        asked: most tokens of the output.
        cache: what stays cached between forward passes of a model in which all places see each other: "none",
            nothing, which is exact; "prefix", the keys before the block, as computed when the block began;
            "dual", those after the block as well (Fast-dLLM, 2505.22618). The last two change the
            distribution. Block-causal models ignore it, because their finished blocks do not change.
        ends: tokens that end an output.
        judges_own: whether the confidence of a token is its probability in the model's own distribution, not
            in the promised one.
        prompts: tokens before the output of each row, as logits processors count them.
    """

    groups: Sequence[tuple[int, int]]
    length: int
    asked: int
    cache: str
    ends: frozenset[int] = frozenset()
    judges_own: bool = False
    prompts: Sequence[int] = ()

    @property
    def before(self) -> Tensor:
        """[B, L] lane of the place before each lane's, counted from 1; 0 for the place before the block."""
        lane = torch.arange(self.starts.shape[1], device=self.starts.device)
        return lane.where(self.starts > self.starts[:, :1], 0)


@dataclass
class MaskedState(CausalState):
    """State of a batch: its cache, and the tokens at all places of each of R rows.

    Attributes:
        tokens: [R, P + N + 1] prompt, decided tokens, and masks at all other places; the last index is
            unused. [R, P] before the first draft.
        stored: number of tokens of each row whose keys are final, or stay until the row's block ends.
        lanes: number of lanes of the current draft.
    """

    tokens: Tensor
    stored: list[int]
    lanes: int = 0


class MaskedTarget(CausalTarget):
    """Adapter from a masked language model to the Target interface.

    There are two kinds. In LLaDA (2502.09992) all places see each other; exact decoding reads everything in
    every forward pass. In block-causal models (SDAR, 2510.06303) a place sees its block and those before. A
    finished block is read again, without masks, together with the next one, and its keys are then final.
    Blocks are counted from the first token of the prompt, so that the first block of the output may begin
    inside the prompt.

    The mask is a query node: the id V, with the embedding of the mask token, which is never predicted (zero
    masking probabilities, MDLM, 2406.07524). Images of a prompt are embedded once and are query nodes too.

    Args:
        model: a loaded model with an LM head, on its device, in eval mode. Its config sets the attributes
            below, of which all but the first have defaults.

    Attributes:
        mask_token_id: token of an undecided place.
        block_length: places per block of a block-causal model; None, the default, if all places see each
            other.
        predicts: "own", the default, if the logits at a place are of that place, "next" if they are of the
            following place (Dream, 2508.15487).
        order: order in which plain decoding decides the places of a block: "confidence", the default, the
            most confident first (LLaDA), or "left_to_right" (`sequential` of SDAR).
        confidence: distribution in which a token's probability is its confidence: "promised", the default,
            the one that the token is drawn from (SDAR, Dream, LLaDA2), or "own", the model's at temperature 1
            and before truncation (LLaDA).
        masks_unconditional: whether the unconditional prompt of guidance is the prompt with all tokens masked
            (LLaDA); False by default.
        whole_blocks: whether the last block of an output of a block-causal model is decoded whole and then
            cut (SDAR), so that a limit does not change the text before it; else it ends with the output
            (LLaDA2 in diffusers). True by default. False if all places see each other: the limit is
            then the number of places.

    Raises:
        UnsupportedModelError: the model cannot mask its attention as required; the message has the reason.
        InputError: the mask token is not in the vocabulary, or another value of the config is out of its
            range.
    """

    by_blocks = True
    fills_masks = True
    compared = ("none", "freedave", "low_confidence:places_per_step=2", "threshold", "entropy_bound")

    def plain_decoding(self) -> tuple[Drafter, PlaceRule]:
        from mmspec.families.masked_language.unmasking import plain_unmasking  # which imports this module

        return plain_unmasking(self)

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        text = model.config.get_text_config(decoder=True)
        narrow = sorted(set(check_layer_types(text)) - {"full_attention"})
        if narrow:
            raise refusal(model, f"has layers of type {', '.join(narrow)}, which do not see the whole output")
        if hasattr(getattr(model, "model", None), "get_rope_index"):
            raise refusal(model, "counts positions by image grids, which is not supported for masked models")
        self.mask_token_id: int = text.mask_token_id
        self.block_length: int | None = getattr(text, "block_length", None)
        self.predicts: str = getattr(text, "predicts", "own")
        self.order: str = getattr(text, "order", "confidence")
        self.confidence: str = getattr(text, "confidence", "promised")
        self.masks_unconditional = bool(getattr(text, "masks_unconditional", False))
        self.whole_blocks = self.block_length is not None and bool(getattr(text, "whole_blocks", True))
        last = self.vocabulary - 1
        if not is_integer(self.mask_token_id) or not 0 <= self.mask_token_id <= last:
            raise InputError("mask_token_id", self.mask_token_id, f"must be a token id from 0 to {last}")
        if self.block_length is not None and (not is_integer(self.block_length) or self.block_length < 1):
            raise InputError("block_length", self.block_length, "must be a positive integer, or None")
        if self.predicts not in PREDICTS:
            raise InputError("predicts", self.predicts, f"must be {' or '.join(map(repr, PREDICTS))}")
        if self.order not in ORDERS:
            raise InputError("order", self.order, f"must be {' or '.join(map(repr, ORDERS))}")
        if self.confidence not in CONFIDENCES:
            raise InputError("confidence", self.confidence, f"must be {' or '.join(map(repr, CONFIDENCES))}")

    def unconditional(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        if not self.masks_unconditional or set(inputs) - {*TOKENS, "attention_mask"}:
            return None
        return {**inputs, "input_ids": torch.full_like(inputs["input_ids"], self.mask_token_id)}

    def embed_prompt(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Embed a prompt, [L, d], with its images if it has any."""
        if not set(inputs) - {*TOKENS, "attention_mask"}:
            return self.embed(inputs["input_ids"][0].to(self.device))
        return self.read([inputs], (0,))[0][0]

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[MaskedState, PromptOutput]:
        """Store the prompts, with embedded images. Returns the state and empty logits [R, 0, V].

        Raises:
            InputError: `taps` is not empty, or a prompt has inputs besides tokens and images.
        """
        if taps:
            rule = "must be empty: a masked model has no hidden states of a prompt alone"
            raise InputError("taps", tuple(taps), rule)
        mask = torch.tensor([self.mask_token_id], device=self.device)
        rows, queries, count = list[Tensor](), [self.embed(mask)], 1
        for prompt in prompts:
            tokens = prompt["input_ids"][0].to(self.device)
            if more := sorted(set(prompt) - {*TOKENS, "attention_mask"}):
                spans = find_images(self.config, prompt)
                if not spans:
                    rule = "must be input_ids alone: this prompt has no image tokens"
                    raise InputError("inputs", more, rule)
                places = torch.cat(
                    [torch.arange(each.start, each.stop, device=self.device) for each in spans]
                )
                queries.append(self.embed_prompt(prompt)[places])
                ids = self.vocabulary + count + torch.arange(len(places), device=self.device)
                tokens, count = tokens.scatter(0, places, ids), count + len(places)
            rows.append(tokens)
        return self.unread(
            MaskedState,
            [len(row) for row in rows],
            capacity,
            taps,
            offset=torch.zeros(len(rows), dtype=torch.long, device=self.device),
            queries=torch.cat(queries),
            tokens=pad_sequence(rows, batch_first=True, padding_value=self.vocabulary),
            stored=[0] * len(rows),
        )

    def score(self, state: MaskedState, draft: MaskedBlock) -> TargetOutput:
        """Score the lanes of a block in one forward pass, which also reads required tokens without keys."""
        shift = int(self.predicts == "next")
        if (longest := max(state.prompt_lengths)) == state.tokens.shape[1]:
            check_length(self.model, state.prompt_lengths, draft.asked)
            state.tokens = lengthen(state.tokens, longest + draft.length + 1, fill=self.vocabulary)
        nodes = self._nodes(state, draft, shift)
        state.lanes = draft.starts.shape[1] + shift
        logits = self.score_nodes(state, nodes).logits[:, -state.lanes :]
        if shift:  # the node of the place before a lane's place predicts it
            logits = pick(logits, draft.before.repeat(len(logits) // len(draft.starts), 1))
        logits[..., self.mask_token_id] = float("-inf")
        return TargetOutput(logits)

    def _nodes(self, state: MaskedState, draft: MaskedBlock, shift: int) -> Nodes:
        """All nodes of a forward pass: context, the place before the block if it predicts, and the lanes."""
        copies, length = len(state.tokens) // len(draft.valid), draft.length
        slots_of_draft, lanes = draft.depths.shape[1], draft.nodes.repeat_rows(copies)
        bounds = self._bounds(state, draft, copies, shift)
        first, low, high, last, behind = torch.tensor(bounds, device=self.device).T[:, :, None]
        state.cache.longest = max(row[0] for row in bounds)
        state.cache.lengths.copy_(first[:, 0])
        start, junk = state.starts[:, None], max(row[4] - row[0] for row in bounds) + slots_of_draft - length

        count = max(last - first - (high - low) for first, low, high, last, _ in bounds)
        place = first + torch.arange(count, device=self.device)  # counted in tokens from the first of all
        place = place + (place >= low) * (high - low)
        place = torch.cat([place, low[:, :shift]], 1)
        context = state.tokens.gather(1, place.clamp_max(state.tokens.shape[1] - 1))
        tokens = torch.cat([context, lanes.tokens], 1)
        of_lanes = lanes.slots + torch.where(lanes.slots < length, start, behind - length) - first
        slots = torch.cat([(place - first).where(place < last, junk), of_lanes], 1)

        column = first + torch.arange(junk + 1, device=self.device)
        index = torch.where(column < behind, column - start, column - behind + length)
        is_prompt, inside = index < 0, index < slots_of_draft
        index = index.clamp(0, slots_of_draft - 1)
        depths = torch.where(is_prompt, column, start + lanes.depths.gather(1, index)) - first
        queries = lanes.visible.shape[1]
        seen = lanes.visible.gather(2, index[:, None].expand(-1, queries, -1))
        visible = (seen | is_prompt[:, None]) & inside[:, None]
        if place.shape[1] and (queries > 1 or self.block_length is not None):
            sees = (index < length)[:, None].expand(-1, place.shape[1], -1)
            if self.block_length is not None:
                sees = sees & (column[:, None] // self.block_length <= place[:, :, None] // self.block_length)
            visible = torch.cat([sees, visible.expand(-1, of_lanes.shape[1], -1)], 1)
        return Nodes(tokens, slots, depths, visible, junk)

    def _bounds(
        self, state: MaskedState, draft: MaskedBlock, copies: int, shift: int
    ) -> list[tuple[int, int, int, int, int]]:
        """Bounds of the tokens that each row reads in this forward pass, from the first of its prompt.

        Returns:
            R times: the first token read; the begin and end of the lanes; the end of the tokens read; and
            the begin of the slots after the output.
        """
        bounds, is_causal, size = [], self.block_length is not None, self.block_length or 1
        groups = [*draft.groups] * copies
        for row, (prompt, (begin, end)) in enumerate(zip(state.prompt_lengths, groups, strict=True)):
            low, high = prompt + begin - shift, prompt + end
            behind = high if is_causal else prompt + draft.length
            is_kept = is_causal or (draft.cache != "none" and state.stored[row] == low)
            first = state.stored[row] if is_kept else 0
            last = high if first and draft.cache == "dual" else behind
            bounds.append((first, low, high, last, behind))
            state.stored[row] = low // size * size
        return bounds

    def further_inputs(self, state: MaskedState, nodes: Nodes) -> Keywords:
        # lanes are the last nodes
        return {"logits_to_keep": state.lanes}

    def commit(self, state: MaskedState, draft: Draft, verdict: Fill, active: Tensor) -> None:
        """Write decided tokens, and masks at places that were opened again."""
        copies, junk = len(state.tokens) // len(active), state.tokens.shape[1] - 1
        changed = ((verdict.decided | verdict.reopened) & active[:, None]).repeat(copies, 1)
        places = (verdict.places.repeat(copies, 1) + state.starts[:, None]).where(changed, junk)
        values = verdict.values.masked_fill(verdict.reopened, self.vocabulary)
        state.tokens.scatter_(1, places, values.repeat(copies, 1))
