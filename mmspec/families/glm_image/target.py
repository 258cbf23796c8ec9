"""The autoregressive half of GLM-Image as a target: a small preview of an image, then the image itself.

Its head is narrower than its vocabulary: codes, and the marks of an image's beginning and end, whose ids are
the lowest, so that outputs are counted as the model counts them. Positions have three axes and follow the
grids: those of a token of the output are looked up by its index.
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
        table: [R, n, 3] positions by index of the output; the last one stands for all beyond the image.
    """

    row_fields = named(RowField("table", fill=None))

    table: Tensor = field(kw_only=True)


class GlmImageTarget(VisionLanguageTarget):
    """Adapter from a `GlmImageForConditionalGeneration` to the Target interface.

    Args:
        model: a loaded model.

    Attributes:
        vocabulary: width of the head, codes and marks.
        codebook: [K, d] code vectors of the image tokenizer; its codes are the first tokens.
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
        """Read the prompts, and keep the positions of their outputs."""
        tables = [self._rope(to_device(prompt, self.device))[1] for prompt in prompts]
        state, output = super().prefill(prompts, capacity, taps)
        longest = max(table.shape[1] for table in tables)
        table = torch.cat([lengthen(each, longest, fill=None) for each in tables])
        return GlmImageState(**vars(state), table=table), output

    def layout_for(self, inputs: Mapping[str, Tensor]) -> GridSequence:
        """Layout of the output: the grids that no image of the prompt fills, the last (a preview) first.

        The mark of the end is not in it: no grammar forces it.
        """
        given = int((inputs["input_ids"] == self.config.image_end_token_id).sum())
        sides = inputs["image_grid_thw"][given:, 1:].flip(0).tolist()
        return GridSequence(tuple(ImageGrid(rows, columns, len(self.codebook)) for rows, columns in sides))

    def positions(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        """Position ids of a prompt [3, 1, L]; what follows it is looked up, so that there is no offset."""
        return self._rope(inputs)[0], 0

    def next_positions(self, state: GlmImageState, nodes: Nodes) -> Tensor:
        """Position ids [3, R, n] of scored nodes, by their index in the output."""
        index = state.index(nodes).clamp_max(state.table.shape[1] - 1)
        found = state.table.gather(1, index[..., None].expand(-1, -1, 3))
        return found.permute(2, 0, 1)

    def _rope(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Position ids of a prompt [3, 1, L], and those of its output [1, n, 3].

        Raises:
            InputError: the prompt does not say which grids are to be drawn.
        """
        if inputs.get("image_grid_thw") is None:
            raise InputError("inputs", sorted(inputs), "`image_grid_thw`, as the processor returns it")
        module = self.model.model
        grids = {name: inputs[name] for name in GRIDS if inputs.get(name) is not None}
        positions, _ = module.get_rope_index(inputs["input_ids"], **grids)
        # kept on the module until the next prompt is read; a copy belongs to the request
        table: Tensor = module._cached_decode_position_ids
        return positions, table.transpose(1, 2).clone()
