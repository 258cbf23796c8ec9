"""Stopping: a row ends at the exact token, even if later tokens were accepted with it."""

from __future__ import annotations

import pytest
import torch
from transformers import MaxTimeCriteria, StoppingCriteria, StoppingCriteriaList

from mmspec.core.canvas import Stopping
from mmspec.errors import InputError
from tests.contracts import edge_checks
from tests.contracts.checks import PROMPTS, VOCABULARY, llama
from tests.contracts.running import decode, generate
from tests.oracles import OracleDrafter


def test_an_end_token_ends_a_row_wherever_it_stands() -> None:
    edge_checks.end_token_anywhere()


def test_stop_strings_and_criteria_inside_a_block_equal_generate() -> None:
    edge_checks.stops_inside_a_block()


def test_the_length_cuts_a_block() -> None:
    edge_checks.length_is_cut_inside_a_block()


def test_an_end_token_beside_the_accepted_path_ends_nothing() -> None:
    """The wrong siblings of this oracle contain the end token at every depth."""
    prompt = PROMPTS[0]
    plain = generate(llama().model, prompt, 24)
    known = {tuple(prompt): plain}
    junk = next((token + 1) % VOCABULARY for token in plain if (token + 1) % VOCABULARY not in plain)
    run = decode(
        llama(), [prompt], OracleDrafter(known, 4, VOCABULARY, siblings=2), max_new_tokens=24, end=[junk]
    )
    assert run.outputs == [plain] and run.canvas.finish_reasons == ["length"]


def test_a_criterion_is_asked_after_every_single_token() -> None:
    """Peer: 23 of 23 outputs overshoot by 7 to 20 tokens with 20 drafts."""
    asked: list[int] = []

    class Spy(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
            asked.append(input_ids.shape[1])
            return torch.tensor([False])

    prompt = PROMPTS[0]
    known = {tuple(prompt): generate(llama().model, prompt, 40)}
    decode(llama(), [prompt], OracleDrafter(known, 20, VOCABULARY), max_new_tokens=40, criteria=[Spy()])
    assert asked == [len(prompt) + count for count in range(1, 41)]  # the last as well


@pytest.mark.parametrize("value", [-1, 1.5, None, 10**9])
def test_a_length_out_of_range_is_named(value: object) -> None:
    with pytest.raises(InputError) as caught:
        Stopping(value)  # type: ignore[arg-type]
    assert caught.value.argument == "max_new_tokens"


class Windowed(StoppingCriteria):
    """Stops after a pair of tokens, of which it reads no more."""

    window = 2

    def __init__(self, pair: list[int]) -> None:
        self.pair, self.seen = pair, set[tuple[int, str]]()

    def __call__(self, input_ids: torch.LongTensor, scores: object, **kwargs: object) -> torch.BoolTensor:
        self.seen.add((input_ids.shape[1], input_ids.device.type))
        return torch.tensor([input_ids[0].tolist() == self.pair])  # type: ignore[return-value]


def test_a_criterion_that_names_its_window_gets_no_more() -> None:
    plain = generate(llama().model, PROMPTS[0], 24)
    criterion = Windowed(plain[4:6])
    run = decode(llama(), [PROMPTS[0]], max_new_tokens=24, criteria=[criterion])
    end = next(index for index in range(1, 24) if plain[index - 1 : index + 1] == plain[4:6])
    assert run.outputs == [plain[: end + 1]]
    assert criterion.seen == {(2, "cpu")}
    assert Stopping(4, criteria=StoppingCriteriaList([criterion, MaxTimeCriteria(9.0)])).window == 2
    assert Stopping(4, criteria=StoppingCriteriaList([criterion, StoppingCriteria()])).window is None
