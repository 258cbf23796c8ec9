"""The EAGLE-3 head by itself: what it reads of its target, its vocabulary, how it is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from safetensors.torch import load_file
from transformers import AutoModel

from mmspec.errors import InputError
from mmspec.heads.configuration import three_taps
from mmspec.methods.eagle3.head import Eagle3Config, Eagle3Head
from mmspec.targets import CausalTarget
from mmspec.training.record import half_precision
from tests.contracts.checks import llama
from tests.methods.eagle3_checks import head_for
from tests.tiny_models import tiny_llama


def test_three_depths_are_read() -> None:
    expected = {32: [2, 16, 29], 40: [2, 20, 37], 7: [2, 3, 4], 6: [3, 4, 5], 2: [0, 1], 1: [0]}
    assert {layers: three_taps(layers) for layers in expected} == expected


def test_taps_are_hidden_states_of_the_target() -> None:
    """States that enter layers, by transformers' own numbering; the last is the final, normed one."""
    target = CausalTarget(tiny_llama(layers=8))
    taps = head_for(target).taps
    ids = torch.tensor([[5, 9, 2, 40]])
    _, output = target.prefill([{"input_ids": ids}], 8, taps)
    with torch.no_grad():
        states = target.model(input_ids=ids, output_hidden_states=True).hidden_states
    for tap in taps:
        torch.testing.assert_close(output.taps[tap][0], states[tap])


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


def test_a_new_head_knows_the_first_tokens_or_all() -> None:
    config = llama().config
    few = Eagle3Head(Eagle3Config.for_target(config, 64, draft_vocabulary=5))
    assert few.draft_tokens is not None and few.draft_tokens.tolist() == [0, 1, 2, 3, 4]
    assert Eagle3Head(Eagle3Config.for_target(config, 64)).draft_tokens is None
    sizes = {
        vocabulary: Eagle3Config.for_target(config, vocabulary).draft_vocabulary
        for vocabulary in (32064, 152064)
    }
    assert sizes == {32064: 32064, 152064: 32000}


def test_a_head_comes_back_from_its_folder_with_its_vocabulary(tmp_path: Path) -> None:
    head = head_for(llama(), draft_vocabulary=20)
    for parameter in head.parameters():
        parameter.copy_(parameter.half())
    head.save_pretrained(tmp_path, state_dict=half_precision(head))
    weights = load_file(tmp_path / "model.safetensors")
    assert {name.split(".")[0] for name in weights} == {"fc", "decoder", "norm", "lm_head", "d2t", "t2d"}
    again = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(again) is Eagle3Head and again.config.taps == head.config.taps
    assert torch.equal(again.draft_tokens, head.draft_tokens)
    rows, places = torch.randn(1, 4, 64), torch.arange(4)[None]
    states = head(rows, places)
    assert torch.equal(again(rows, places), states)
    assert torch.equal(again.logits(states, torch.neg), head.logits(states, torch.neg))


def test_a_shape_that_cannot_be_built_is_refused() -> None:
    refused: list[dict[str, Any]] = [{"draft_vocabulary": 65}, {"num_key_value_heads": 3}]
    for settings in (*refused, *({"taps": taps} for taps in ([], [0, 2], [-2]))):
        with pytest.raises(StrictDataclassClassValidationError, match=next(iter(settings))):
            Eagle3Config.for_target(llama().config, 64, **settings)
