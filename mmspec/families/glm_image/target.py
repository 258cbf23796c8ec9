"""Target of GLM-Image's autoregressive half, which draws a small preview of an image, then the image.

Its output matrix covers the lowest ids of its vocabulary: the codes, and the begin and end token of an image.
Positions have three axes that follow the grids; those of an output token are looked up by its index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmspec.core.draft import Nodes
from mmspec.core.image_grid import GridSequence, ImageGrid
from mmspec.core.interfaces import PromptOutput
from mmspec.core.rows import RowField, lengthen, named
from mmspec.errors import InputError
from mmspec.models.weights import stored_weight
from mmspec.targets.causal import CausalState, to_device
from mmspec.targets.image_tokens import CODEBOOK
from mmspec.targets.vision_language import VisionLanguageTarget

__all__ = ["GlmImageTarget"]

GRIDS = ("image_grid_thw", "images_per_sample")


@dataclass
class GlmImageState(CausalState):
    """State of a batch: its cache, and the positions of its outputs.

    Attributes:
        table: [R, n, 3] positions by output index; the last one stands for all indices beyond the image.
    """

    row_fields = named(RowField("table", fill=None))

    table: Tensor = field(kw_only=True)


class GlmImageTarget(VisionLanguageTarget):
    """Adapter from a `GlmImageForConditionalGeneration` to the Target interface.

    Args:
        model: a loaded model.

    Attributes:
        vocabulary: width of the output matrix: codes, begin and end token.
        codebook: [K, d] code vectors of the image tokenizer; the codes are the first tokens.
    """

    codebook: Tensor
    rope_arguments = frozenset({"images_per_sample"})

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.vocabulary = int(model.config.get_text_config(decoder=True).vision_vocab_size)
        self.codebook = stored_weight(model, f"model.vqmodel.{CODEBOOK}").detach().to(self.device)

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[GlmImageState, PromptOutput]:
        """Prefill the prompts, and store the positions of their outputs."""
        tables = [self._rope(to_device(prompt, self.device))[1] for prompt in prompts]
        state, output = super().prefill(prompts, capacity, taps)
        longest = max(table.shape[1] for table in tables)
        table = torch.cat([lengthen(each, longest, fill=None) for each in tables])
        return self.extended(state, GlmImageState, table=table), output

    def layout_for(self, inputs: Mapping[str, Tensor]) -> GridSequence:
        """Layout of the output: the grids that no prompt image fills, the last (a preview) first.

        It excludes the end token, which the grammar does not force.
        """
        given = int((inputs["input_ids"] == self.config.image_end_token_id).sum())
        sides = inputs["image_grid_thw"][given:, 1:].flip(0).tolist()
        return GridSequence(tuple(ImageGrid(rows, columns, len(self.codebook)) for rows, columns in sides))

    def positions(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        """Position ids of a prompt [3, 1, L]; there is no offset, since later ones are looked up."""
        return self._rope(inputs)[0], 0

    def next_positions(self, state: GlmImageState, nodes: Nodes) -> Tensor:
        """Position ids [3, R, n] of scored nodes, by their index in the output."""
        index = state.index(nodes).clamp_max(state.table.shape[1] - 1)
        found = state.table.gather(1, index[..., None].expand(-1, -1, 3))
        return found.permute(2, 0, 1)

    def _rope(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Position ids of a prompt [3, 1, L], and those of its output [1, n, 3].

        Raises:
            InputError: the prompt lacks the grids of the images.
        """
        if inputs.get("image_grid_thw") is None:
            rule = "must include `image_grid_thw`, as the processor returns it"
            raise InputError("inputs", sorted(inputs), rule)
        module = self.model.model
        grids = {name: inputs[name] for name in GRIDS if inputs.get(name) is not None}
        positions, _ = module.get_rope_index(inputs["input_ids"], **grids)
        # the module overwrites it for the next prompt, so that each request needs a copy
        table: Tensor = module._cached_decode_position_ids
        return positions, table.transpose(1, 2).clone()
