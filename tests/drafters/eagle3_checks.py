"""What must hold of EAGLE-3, as functions: tests run them on the code, planted bugs on mutants."""

from __future__ import annotations

from typing import Any

import torch

from mmspec.decoding.sampling import Sampler
from mmspec.drafters.eagle import Eagle3Drafter
from mmspec.models.eagle3 import Eagle3Config, Eagle3Head
from mmspec.targets.causal import CausalTarget
from tests.contracts.running import decode, random_prompts
from tests.drafters.eagle_checks import WORDS, Examined, Gullible, few_words
from tests.drafters.flash_checks import answer, inputs_of, target_of
from tests.drafters.naive_eagle3 import NaiveEagle3


def head_for(target: CausalTarget, seed: int = 3, **settings: Any) -> Eagle3Head:
    """A head of random weights and of one key head; a reduced vocabulary is every other token."""
    config = Eagle3Config.for_target(
        target.config, target.vocabulary, **{"num_key_value_heads": 1, **settings}
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        head = Eagle3Head(config).to(target.dtype)
        for parameter in head.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1 + 0.1 * noise)
    if head.d2t is not None:
        head.learn_vocabulary(target.vocabulary - 1 - 2 * torch.arange(config.draft_vocabulary))
    return head.eval().requires_grad_(False)


def drafts_are_those_of_the_slow_way(
    family: str = "llava", tree: str = "dynamic", words: int = 0, window: int | None = None
) -> None:
    """Ragged prompts with images and accepted paths, in float64.

    Args:
        words: of the draft vocabulary; 0 for all.
        window: of the head's layer.
    """
    target = target_of(family, torch.float64)
    head = head_for(target, sliding_window=window, **{"draft_vocabulary": words} if words else {})
    sizes = {"num_draft_tokens": 8, "depth": 3, "top_k": 3} if tree == "dynamic" else {}
    examined = Examined(Eagle3Drafter(head, tree=tree, **sizes).fit(target), 9, NaiveEagle3)
    inputs = inputs_of(family, torch.float64)
    cases = [inputs[case] for case in ("two images", "no image", "several turns")]
    canvas = answer(target, examined, cases, Sampler(0.9), 9, Gullible())
    assert examined.drafts >= 6, "some drafts were compared"
    assert max(canvas.stats.accepted_histogram) >= 2, "a path of several candidates was accepted"


def guided_drafts_are_those_of_the_slow_way(window: int | None = None) -> None:
    """Both prompts are read, and the reduced vocabulary is guided too."""
    target = few_words()
    head = head_for(target, draft_vocabulary=7, sliding_window=window)
    examined = Examined(
        Eagle3Drafter(head, num_draft_tokens=8, depth=3, top_k=3).fit(target), 10, NaiveEagle3
    )
    decode(
        target,
        random_prompts(2, WORDS, longest=6, seed=4),
        examined,
        Gullible(),
        Sampler(1.0, guidance_scale=3.0),
        max_new_tokens=10,
        negatives=random_prompts(2, WORDS, longest=6, seed=9),
    )
    assert examined.drafts >= 4
