"""Target of causal models of continuous tokens, which read vectors and predict a distribution of the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mmspec.core.cache import RaggedCache
from mmspec.core.distributions import Continuous
from mmspec.core.draft import Nodes
from mmspec.core.image_grid import ImageGrid
from mmspec.errors import InputError
from mmspec.families.nextstep.modeling import NextStepForImageGeneration, prompt_ids
from mmspec.open_types import Inputs, Keywords, Processor
from mmspec.targets.causal import CausalState, CausalTarget
from mmspec.targets.image_tokens import PromptPair
from mmspec.vectors.denoising_head import DenoisingHead
from mmspec.vectors.sampling import DenoisingSampler

__all__ = ["NextStepTarget"]


class NextStepTarget(CausalTarget):
    """Adapter from NextStep-1, whose flow-matching head draws image tokens, to the Target interface.

    The interface's logits are conditions of the image head, [B, n, D]; `DenoisingSampler` makes distributions
    of them.

    Args:
        model: a loaded model in eval mode.

    Attributes:
        vector_size: size d of an image token.
        largest_image: most tokens of an image.
        published, classes: as of `ImageTokenTarget`.
        sampler: class of its sampling settings.
    """

    model: NextStepForImageGeneration
    grid: ImageGrid
    distribution = Continuous
    published: Keywords = {"guidance_scale": 7.5}
    classes: int | None = None
    sampler = DenoisingSampler
    compared = ("shared_noise", "shared_noise:tolerance=0")

    def __init__(self, model: NextStepForImageGeneration) -> None:
        super().__init__(model)
        self.vector_size = model.config.token_size
        side = model.config.latent_size // model.config.latent_patch_size
        self.grid = ImageGrid(side, side, 1)
        places = model.config.gen_pos_grid**2 if model.config.use_gen_pos_embed else None
        self.largest_image: int = model.config.max_position_embeddings if places is None else places

    @property
    def denoiser(self) -> DenoisingHead:
        """Denoising head, which draws a token given a condition."""
        return self.model.image_head

    def encode_prompt(
        self, asked: str, negative: str | None, grid: ImageGrid, tokenizer: Processor, *others: object
    ) -> PromptPair:
        """Encode a text, and the unconditional prompt, which is empty by default; see `ImageTokenTarget`.

        Raises:
            InputError: prompt and image together have more tokens than the model has positions.
        """
        pair = []
        room = self.model.config.max_position_embeddings - grid.cells
        for text in (asked, negative or ""):
            ids = prompt_ids(tokenizer, self.model.config, text, grid.rows, grid.columns)
            if ids.shape[1] > room:
                rule = f"must have at most {room} tokens besides the {grid.cells} of the image"
                raise InputError("prompt", f"{ids.shape[1]} tokens", rule)
            pair.append({"input_ids": ids})
        return pair[0], pair[1]

    def arguments(self, prompt: Mapping[str, Tensor]) -> tuple[Keywords, int]:
        """The model's arguments for a prompt; the first image token follows its last token."""
        inputs, offset = super().arguments(prompt)
        length = inputs["input_ids"].shape[1]
        inputs["output_index"] = torch.arange(1 - length, 1, device=self.device)[None]
        return inputs, offset

    def further_inputs(self, state: CausalState, nodes: Nodes) -> Keywords:
        return {"output_index": state.index(nodes) + 1}

    def forward(self, inputs: Inputs, cache: RaggedCache, keep: int = 0, whole: bool = False) -> Tensor:
        """Conditions [B, n or 1, D] of the image head."""
        others = {name: value for name, value in inputs.items() if name != "input_ids"}
        conditions: Tensor = self.model(inputs["input_ids"], **others, **self.told(cache))
        return conditions[:, -keep:]

    def head(self, hidden: Tensor) -> Tensor:
        """Conditions [B, n, D] of normed hidden states [B, n, D], without embeddings of places."""
        conditions: Tensor = self.model.image_out_projector(hidden)
        return conditions
