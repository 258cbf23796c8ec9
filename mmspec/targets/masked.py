"""Masked language models, which see the whole output and predict any place of it, as a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from mmspec.decoding.cache import additive_mask, check_layer_types
from mmspec.decoding.draft import Draft, Nodes
from mmspec.decoding.image_grid import FREE
from mmspec.decoding.interfaces import PromptOutput, Target, TargetOutput, TargetState
from mmspec.decoding.verdict import Verdict
from mmspec.errors import InputError
from mmspec.models.weights import execution_device
from mmspec.targets.admission import check_length, check_model, length_limit, refusal
from mmspec.targets.attention import mask_dtype
from mmspec.targets.steps import CompiledForward
from mmspec.validation import is_integer


@dataclass
class MaskedState(TargetState):
    """Prompts of a batch, which are all that a masked target keeps.

    Attributes:
        prompts: [B, P] token ids, padded on the right; [2B, P] under guidance.
        lengths: [B] or [2B] tokens of each prompt.
        limit: of a row's length, by `length_limit`.
    """

    prompts: Tensor
    lengths: Tensor
    limit: tuple[float, str]


class MaskedTarget(Target[MaskedState]):
    """Adapter from a masked language model to the Target interface (LLaDA, 2502.09992).

    Such a model is a decoder-only architecture trained without the causal mask: prompt and output see each
    other, places that are not decided hold a mask token, and the logits at a place are of that place. No keys
    are cached, because each decided token changes those of all others: every scoring forward reads the
    prompts anew, and the places of the output that the draft feeds; what is not fed is not seen.

    The mask token is never predicted (zero masking probabilities, MDLM, 2406.07524).

    Args:
        model: a loaded model with an LM head, on its device, in eval mode.
        mask_token_id: the token of a place that is not decided.

    Attributes:
        vocabulary, device, grid, codebook: as of `Target`.

    Raises:
        UnsupportedModelError: the architecture cannot be told what its tokens see; the message says why.
        InputError: the mask token is none of the vocabulary.
    """

    mask_token_id: int
    any_order = True

    def __init__(self, model: PreTrainedModel, mask_token_id: int) -> None:
        check_model(model)
        text = model.config.get_text_config(decoder=True)
        narrow = sorted(set(check_layer_types(text)) - {"full_attention"})
        if narrow:
            raise refusal(model, f"has layers of type {', '.join(narrow)}, which do not see the whole output")
        self.vocabulary: int = text.vocab_size
        if not is_integer(mask_token_id) or not 0 <= mask_token_id < self.vocabulary:
            raise InputError("mask_token_id", mask_token_id, f"a token id from 0 to {self.vocabulary - 1}")
        self.model, self.mask_token_id = model, mask_token_id
        self.device = execution_device(model, model.get_input_embeddings())
        self.steps: CompiledForward | None = None

    def compile(self) -> None:
        """Compile forwards, each when it is first met."""
        self.steps = CompiledForward(type(self.model).__name__, self._logits)

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[MaskedState, PromptOutput]:
        """Keep the prompts, without a forward. Returns the state and logits [B, 0, V]: of no place.

        Raises:
            InputError: hidden states are asked for, or a prompt is more than text.
        """
        if taps:
            raise InputError("taps", tuple(taps), "none: a masked model has no state of a prompt alone")
        for prompt in prompts:
            more = sorted(set(prompt) - {"input_ids", "attention_mask"})
            if more:
                raise InputError("inputs", more, "input_ids alone: a masked target reads text")
        tokens = [prompt["input_ids"][0].to(self.device) for prompt in prompts]
        lengths = [len(row) for row in tokens]
        state = MaskedState(
            pad_sequence(tokens, batch_first=True),
            torch.tensor(lengths, device=self.device),
            length_limit(self.model, min(lengths)),
        )
        logits = torch.empty(len(prompts), 0, self.vocabulary, dtype=self.model.dtype, device=self.device)
        return state, PromptOutput(logits, forwards=0)

    def score(self, state: MaskedState, draft: Draft) -> TargetOutput:
        """Score every node of the draft, in one forward over the prompts and the nodes; FREE is a mask."""
        nodes = draft.nodes.repeat_rows(len(state.prompts) // len(draft.nodes.tokens))
        (rows, longest), count = state.prompts.shape, nodes.tokens.shape[1]
        check_length(self.model, state.limit, longest + nodes.deepest + 1)
        place = torch.arange(longest, device=self.device).expand(rows, longest)
        tokens = nodes.tokens.masked_fill(nodes.tokens == FREE, self.mask_token_id)
        forward = self._logits if self.steps is None else self.steps
        logits = forward(
            input_ids=torch.cat([state.prompts, tokens], 1),
            attention_mask=self._mask(place < state.lengths[:, None], nodes),
            position_ids=torch.cat([place, state.lengths[:, None] + nodes.depth], 1),
            count=count,
        )
        return TargetOutput(logits)

    def _logits(self, count: int, **inputs: Tensor) -> Tensor:
        """[B, count, V] logits of the last places."""
        output = self.model(**inputs, use_cache=False, logits_to_keep=count)
        logits: Tensor = output.logits[:, -count:]
        logits[..., self.mask_token_id] = float("-inf")
        return logits

    def _mask(self, is_prompt: Tensor, nodes: Nodes) -> Tensor:
        """Attention mask of a forward: the prompt is seen by all and sees all, a node sees what it is told.

        Args:
            is_prompt: [B, P] False for padding.
            nodes: n nodes.

        Returns:
            [B, 1, P + n, P + n]; boolean, or additive.
        """
        (rows, longest), count = is_prompt.shape, nodes.tokens.shape[1]
        seen = nodes.visible.gather(2, nodes.slots[:, None].expand(rows, count, count))
        output = torch.cat([seen.new_ones(rows, longest, count), seen], 1)
        mask = torch.cat([is_prompt[:, None].expand(-1, longest + count, -1), output], 2)[:, None]
        dtype = mask_dtype(self.model.get_decoder())
        return mask if dtype is None else additive_mask(mask, dtype)

    def commit(self, state: MaskedState, draft: Draft, verdict: Verdict, active: Tensor) -> None:
        """Do nothing: decided tokens come back with the next draft."""
