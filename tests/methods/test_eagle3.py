"""The EAGLE-3 head alone: its inputs from the target, and its vocabulary."""

from __future__ import annotations

import pytest
import torch

from mmspec.errors import InputError
from mmspec.heads.configuration import three_taps
from tests.contracts.checks import llama
from tests.methods.eagle3_checks import head_for


def test_three_depths_are_read() -> None:
    expected = {32: [2, 16, 29], 40: [2, 20, 37], 7: [2, 3, 4], 6: [3, 4, 5], 2: [0, 1], 1: [0]}
    assert {layers: three_taps(layers) for layers in expected} == expected


def test_the_map_of_a_reduced_vocabulary_goes_there_and_back() -> None:
    head = head_for(llama(), draft_vocabulary=5)
    for tokens in ([1, 2, 3, 4], [1, 2, 3, 4, 4], [1, 2, 3, 4, 64], [-1, 1, 2, 3, 4]):
        with pytest.raises(InputError, match="5 different tokens from 0 to 63"):
            head.learn_vocabulary(torch.tensor(tokens))
    chosen = torch.tensor([63, 0, 17, 18, 40])
    head.learn_vocabulary(chosen)
    assert head.draft_tokens is not None and head.d2t is not None and head.t2d is not None
    assert head.draft_tokens.tolist() == [0, 17, 18, 40, 63]
    assert (torch.arange(5) + head.d2t).tolist() == head.t2d.nonzero()[:, 0].tolist()
    assert head.logits(torch.randn(1, 2, 32), lambda hidden: hidden).shape == (1, 2, 5)
