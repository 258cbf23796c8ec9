"""mmspec's contract of heads that draft, for the heads of mmspec-extras."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft
from mmspec.heads.drafter import HeadDrafter
from mmspec.heads.model import DraftingHead
from mmspec.targets import CausalTarget
from mmspec_extras.methods.chimera.drafter import ChimeraDrafter
from mmspec_extras.methods.chimera.head import ChimeraHead
from mmspec_extras.methods.falcon.drafter import FalconDrafter
from mmspec_extras.methods.falcon.head import FalconHead
from tests.contracts import test_drafters, test_heads, test_honest_q
from tests.contracts.checks import precise
from tests.contracts.running import decode
from tests.methods.heads_checks import randomise
from tests.training import test_drafter_methods

#: Drafter, head, and a tree of more than one forward pass of the head.
KINDS: dict[str, tuple[type[HeadDrafter], type[Any], dict[str, Any]]] = {
    "falcon": (FalconDrafter, FalconHead, {"num_draft_tokens": 9, "depth": 5, "top_k": 3}),
    "chimera": (ChimeraDrafter, ChimeraHead, {"num_draft_tokens": 8, "depth": 3, "top_k": 3}),
}


def head_for(kind: str, target: CausalTarget, seed: int = 3, **settings: Any) -> DraftingHead:
    """A head of random weights."""
    model = KINDS[kind][1]
    with torch.random.fork_rng():
        head: DraftingHead = model(
            model.config_class.for_target(target.config, target.vocabulary, **settings)
        )
    randomise(head, target, seed)
    return head


def check_paths(drafter: HeadDrafter, logits_after: Callable[[list[int], list[int]], Tensor]) -> None:
    """Check the likelihood of every path of the first drafts.

    Args:
        drafter: fitted to `precise()`.
        logits_after: function: a text, which ends with the root, and candidates after it -> logits [V] that
            the head gives there, with no cache, batch or tree.
    """
    drafts, propose = list[Any](), drafter.session.propose

    def noted(self: Any, canvas: Canvas) -> Draft:
        texts, draft = [list(ids) for ids in canvas.ids], propose(self, canvas)
        drafts.append((texts, draft, self.likelihoods))
        return draft

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter.session, "propose", noted)
        decode(precise(), [[5], [7, 3, 9, 22, 4]], drafter, max_new_tokens=10)
    for texts, draft, likelihoods in drafts[:3]:
        for row, text in enumerate(texts):
            paths, due = [list[int]()], [0.0]
            for node in range(1, draft.tokens.shape[1]):
                parent, token = int(draft.parents[row, node]), int(draft.tokens[row, node])
                said = logits_after(text, paths[parent]).log_softmax(-1)
                paths.append([*paths[parent], token])
                due.append(due[parent] + float(said[token]))
            torch.testing.assert_close(likelihoods[row], torch.tensor(due), rtol=0, atol=1e-5)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kind of head, which mmspec's tests know too."""
    name: str = request.param
    drafter, _, shape = KINDS[name]

    def build(target: CausalTarget, **settings: Any) -> DraftingHead:
        return head_for(name, target, **settings)

    monkeypatch.setitem(test_drafters.HEADS, name, (drafter, build))
    monkeypatch.setitem(test_heads.HEAD, name, (name, {}, shape))
    monkeypatch.setitem(
        test_honest_q.DRAFTS, name, lambda: test_honest_q.head(name, "without_replacement", "2x2x1")
    )
    return name


def test_answers_are_those_of_the_target(kind: str) -> None:
    test_heads.test_greedy_answers_about_images_are_those_of_generate(kind, "llava")
    test_heads.test_sampled_answers_about_images_are_bitwise_those_of_plain_decoding(kind, "llava")
    test_heads.test_a_head_of_nan_costs_its_drafts_and_no_word(kind)
    test_drafters.check_greedy_output(test_drafters.beside_copies(kind))


def test_tokens_of_a_draft_come_as_often_as_its_q_says(kind: str) -> None:
    test_honest_q.test_tokens_of_a_draft_come_as_often_as_its_q_says(kind)


def test_heads_come_back_from_their_folders_and_refuse_other_targets(kind: str, tmp_path: Path) -> None:
    test_heads.test_a_head_comes_back_from_its_folder(kind, tmp_path)
    test_heads.test_another_target_is_refused_and_so_is_none(kind)


def test_the_head_learns_and_the_target_does_not(kind: str) -> None:
    test_drafter_methods.test_the_head_learns_and_the_target_does_not(kind)
