"""Medusa: several heads on one hidden state each foretell a token of their own.

Medusa (2401.10774) with exact acceptance in place of its typical one. Heads do not know what the others
chose, so that the tree is a product of what each says; all of it is known after one small pass, and nothing
is cached.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mmspec.decoding.draft import Draft
from mmspec.decoding.sampling import guide
from mmspec.drafters.growth import TreeGrowth
from mmspec.drafters.head_drafter import HeadDrafter, StateSession
from mmspec.drafters.tree import check_depth, choose_tree
from mmspec.models.medusa import MedusaHead

__all__ = ["MedusaDrafter"]


class MedusaSession(StateSession):
    """Heads that say at once what each level of the tree is chosen from."""

    head: MedusaHead

    def propose(self, root: Tensor, emitted: Tensor, history: Sequence[Sequence[int]]) -> Draft:
        self.passes += 1
        foretold = self.head(self.hidden, self.shape.depth)  # [R, D, d]
        logits = self.head.logits(foretold, self.target.head)
        laws = self._law(guide(logits.float(), self.sampler.guidance_scale))  # [B, D, V]
        growth = TreeGrowth(self.shape, root)
        while not growth.is_grown:
            law = laws[:, growth.level, None]
            growth.grow(law.expand(-1, growth.tokens.shape[1], -1))
        return growth.draft()


class MedusaDrafter(HeadDrafter):
    """A tree of the likeliest continuations by heads that each foretell one token.

    Args:
        model: the trained heads.
        num_draft_tokens: nodes of a dynamic tree, the root not counted; what the heads' config says if None.
        depth: its deepest level, at most the number of heads, which is the default.
        top_k: nodes that it expands on each level, and children of each; that of the config if None.
        tree: "dynamic"; or a static one: "measured", the best of its size by what the training measured;
            "medusa", the published one, or another name in `NAMED_TREES`; or the parents of its nodes, root
            (0) first.

    Raises:
        InputError: a value outside its range, or sizes of a dynamic tree beside a static one.
    """

    title = "Medusa's heads"
    session = MedusaSession
    model: MedusaHead

    def __init__(
        self,
        model: MedusaHead,
        num_draft_tokens: int | None = None,
        depth: int | None = None,
        top_k: int | None = None,
        tree: str | Sequence[int] = "dynamic",
    ) -> None:
        shape = choose_tree(model.config, num_draft_tokens, depth, top_k, tree, model.config.hit_rates)
        super().__init__(model, check_depth(shape, model.config.num_heads))
