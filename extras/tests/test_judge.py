"""The judge rule: the exact rule at threshold 1, the whole draft at 0, and a naive loop between them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmspec.accelerators import build_accelerator
from mmspec.core.draft import Draft, DraftKind
from mmspec.core.interfaces import Request
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.errors import CheckpointError, InputError
from mmspec.trees.matching import SampleAndMatch
from mmspec_extras.methods.judge.head import JudgeHead, JudgeHeadConfig
from mmspec_extras.methods.judge.rule import Judge
from tests.contracts.checks import PROMPTS, VOCABULARY, llama
from tests.contracts.running import decode, futures
from tests.oracles import OracleDrafter, Proposal, RandomTreeDrafter, SimpleDrafter, tree_of

WIDTH = llama().config.hidden_size
LEAST = 0.8


def random_head(width: int = WIDTH, scale: float = 1.0) -> JudgeHead:
    head = JudgeHead(JudgeHeadConfig(hidden_size=width))
    with torch.no_grad():
        head.layer.weight.copy_(torch.randn(1, width, generator=torch.Generator().manual_seed(1)) * scale)
        head.layer.bias.fill_(0.1)
    return head


def next_tokens(ids: Sequence[int]) -> list[int]:
    """The next two tokens of greedy decoding, without a cache."""
    found = list(ids)
    for _ in range(2):
        found.append(int(llama().model(torch.tensor([found])).logits[0, -1].argmax()))
    return found[-2:]


class Sketches(SimpleDrafter):
    """Trees of three levels; all siblings differ, and the target's own token is sometimes among them."""

    kind = DraftKind.POINT
    branches = True
    max_nodes = 9
    parents = (0, 0, 0, 0, 1, 1, 2, 2, 6)

    def __init__(self) -> None:
        self.seen: list[tuple[Draft, list[list[int]]]] = []

    def session(self, requests: Sequence[Request], random: RandomStream) -> Proposal:
        def propose(root: Tensor, emitted: Tensor, history: Sequence[Sequence[int]]) -> Draft:
            rows = []
            for row in history:
                first, second = next_tokens(row)
                hinted = first if len(row) % 3 else first + 9
                rows.append(
                    [first + 3, hinted, first + 17, second + 1, second + 2, second, second + 5, first]
                )
            tokens = torch.cat([root[:, None], torch.tensor(rows) % VOCABULARY], 1)
            self.seen.append((tree_of(tokens, self.parents, self.kind), [list(row) for row in history]))
            return self.seen[-1][0]

        return propose


def naive_round(draft: Draft, row: int, ids: list[int], head: JudgeHead, threshold: float) -> list[int]:
    """Tokens that a round appends, by forward passes over the whole text."""
    node, text = 0, list(ids)
    while True:
        choice = int(llama().model(torch.tensor([text])).logits[0, -1].argmax())
        children = [k for k, above in enumerate(Sketches.parents) if k and above == node]
        tokens = {k: int(draft.tokens[row, k]) for k in children}
        states = {
            k: llama().model.model(torch.tensor([[*text, tokens[k]]])).last_hidden_state for k in children
        }
        sure = {k: float(head(states[k][0, -1]).sigmoid()) for k in children}
        matching = [k for k in children if tokens[k] == choice]
        trusted = [k for k in sorted(sure, key=lambda k: -sure[k]) if sure[k] > threshold]
        if not matching and not trusted:
            return [*text[len(ids) :], choice]
        node = (matching or trusted)[0]
        text.append(tokens[node])


def test_a_trusted_token_is_taken_where_the_target_chose_another() -> None:
    head, drafter = random_head(), Sketches()
    with torch.no_grad():
        run = decode(llama(), PROMPTS, drafter, Judge(head, LEAST).fit(llama()), max_new_tokens=14)
        kinds = set()
        for (draft, before), (_, after) in zip(drafter.seen, drafter.seen[1:], strict=False):
            for row, ids in enumerate(before):
                expected = naive_round(draft, row, ids, head, LEAST)
                got = after[row][len(ids) :]
                assert got == expected or len(got) < len(expected) and got == expected[: len(got)]
                kinds.add((len(expected), expected[0] == next_tokens(ids)[0]))
    assert {kind[0] for kind in kinds} >= {2, 3, 4} and {kind[1] for kind in kinds} == {True, False}
    assert run.outputs != decode(llama(), PROMPTS, max_new_tokens=14).outputs


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.9), Sampler(0.9, guidance_scale=2.0)])
def test_a_threshold_of_one_is_the_exact_rule(sampler: Sampler) -> None:
    negatives = PROMPTS[::-1] if sampler.is_guided else None
    how = {"sampler": sampler, "max_new_tokens": 24, "seed": 3, "negatives": negatives}
    hints = futures(llama(), PROMPTS, sampler, max_new_tokens=24, seed=3, negatives=negatives)
    drafter = RandomTreeDrafter(6, VOCABULARY, hints)
    rule = Judge(random_head(scale=9.0), 1.0).fit(llama())
    exact, judged = (decode(llama(), PROMPTS, drafter, each, **how) for each in (SampleAndMatch(), rule))
    assert judged.outputs == exact.outputs and judged.stats.accepted == exact.stats.accepted


def test_a_threshold_of_zero_accepts_whole_drafts_but_no_token_that_is_excluded() -> None:
    hints = futures(llama(), PROMPTS, max_new_tokens=21)
    drafter = OracleDrafter(hints, 4, VOCABULARY, corruption=1.0, kind=DraftKind.POINT)
    rule = Judge(random_head(scale=99.0), 0.0).fit(llama())
    stats = decode(llama(), PROMPTS, drafter, rule, max_new_tokens=21).stats
    assert sum(stats.accepted) == sum(stats.drafted) == 4 * 4 * len(PROMPTS)
    assert stats.target_forwards == 5
    only = decode(llama(), PROMPTS, drafter, rule, Sampler(1.0, top_k=1), max_new_tokens=21)
    assert only.outputs == [list(each) for each in hints.values()]


def test_a_judge_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    assert (Judge.exactness, Judge.bound, str(Judge().promise)) == ("lossy", None, "lossy")
    with pytest.raises(InputError, match="mmspec-extras train-judge"):
        Judge().fit(llama())
    with pytest.raises(InputError, match=f"{WIDTH} numbers"):
        Judge(random_head(WIDTH + 2)).fit(llama())
    with pytest.raises(InputError, match="threshold"):
        Judge(random_head(), 1.5)
    with pytest.raises(CheckpointError, match="mmspec-extras train-judge"):
        Judge(str(tmp_path / "none"))
    random_head().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    torch.testing.assert_close(Judge(str(tmp_path)).head.layer.weight, weights["layer.weight"])
    for broken, reason in (
        ({"layer.weight": weights["layer.weight"]}, "missing keys: layer.bias"),
        ({**weights, "layer.weight": torch.zeros(1, 3)}, "judge"),
        ({**weights, "layer.bias": torch.full((1,), torch.nan)}, "NaN"),
    ):
        save_file(broken, file, {"format": "pt"})
        with pytest.raises(CheckpointError, match=reason):
            Judge(str(tmp_path))
    file.write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match="judge"):
        Judge(str(tmp_path))


def test_the_size_of_drafts_is_not_chosen_by_cost(chosen_by_cost: Any) -> None:
    """Acceptance depends on the size."""
    accelerator = build_accelerator("copy", acceptance="judge")
    assert chosen_by_cost(accelerator, Sampler(0.0)) is False
