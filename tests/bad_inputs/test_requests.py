"""Bad prompts, settings and checkpoints raise short errors of mmspec before any forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging

from mmspec.errors import InputError, MediaError, NumericalError
from tests.bad_inputs.checkpoint_rows import CHECKPOINTS
from tests.bad_inputs.image_rows import IMAGES, DrawingBench
from tests.bad_inputs.prompt_rows import PROMPTS
from tests.bad_inputs.refusals import Bench, Row, no_forward, problems
from tests.bad_inputs.setting_rows import SETTINGS, Returns
from tests.media.network import only_local_connections

ROWS = [*PROMPTS, *SETTINGS, *CHECKPOINTS]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    base = tmp_path_factory.mktemp("bench")
    yield Bench(base, base)
    logging.set_verbosity(verbosity)


@pytest.fixture(scope="module")
def drawing_bench(bench: Bench) -> DrawingBench:
    return DrawingBench(bench.base, bench.base)


@pytest.mark.parametrize("kind", sorted({row.number for row in IMAGES}))
@pytest.mark.every(4)
def test_bad_requests_for_images_are_refused(kind: int, drawing_bench: DrawingBench, tmp_path: Path) -> None:
    assert refused(IMAGES, kind, drawing_bench, tmp_path) == []


@pytest.mark.parametrize("kind", sorted({row.number for row in ROWS}))
@pytest.mark.every(4)
def test_bad_input_is_refused(kind: int, bench: Bench, tmp_path: Path) -> None:
    with only_local_connections() as tried:
        assert refused(ROWS, kind, bench, tmp_path) == []
    assert tried == []


def refused(rows: Sequence[Row], kind: int, bench: Bench, folder: Path) -> list[str]:
    """Try each row of a kind in an empty folder, and return the problems of their refusals."""
    found = []
    for index, row in enumerate(row for row in rows if row.number == kind):
        bench.folder = folder / str(index)
        bench.folder.mkdir()
        found += problems(row, bench)
        bench.text.set_accelerator("copy")  # which a row may have set with other options
    return found


Call = Callable[[Bench], Any]
ACCEPTED: dict[str, Call] = {
    "an image without words": lambda b: b.vlm("", images=b.image, max_new_tokens=4),
    "marks of right-to-left text": lambda b: b.vlm("\u202ered\u202c \u200f", max_new_tokens=4),
    "emoji": lambda b: b.vlm("😀👩‍👩‍👧 red", max_new_tokens=4),
    "max_new_tokens=None": lambda b: b.vlm("red", max_new_tokens=None, max_time=0.001),
    "top_k above the vocabulary": lambda b: b.vlm("red", top_k=10**6, temperature=1.0, max_new_tokens=4),
    "guidance_scale=1": lambda b: b.vlm("red", guidance_scale=1, negative_prompt="blue", max_new_tokens=4),
    "guidance_scale=0": lambda b: b.vlm("red", guidance_scale=0.0, max_new_tokens=4),
    "None among the negative prompts": lambda b: b.vlm(
        ["red", "blue"], guidance_scale=2.0, negative_prompt=[None, "a much longer one"], max_new_tokens=4
    ),
    "no media": lambda b: b.vlm(["red", "red"], images=[None, []], videos=[None, []], max_new_tokens=4),
    "one finite logit": lambda b: b.vlm("red", logits_processor=[Returns(only_five)], max_new_tokens=4),
    "the largest seed": lambda b: b.vlm("red", seed=2**64 - 1, do_sample=True, max_new_tokens=4),
}


def only_five(scores: torch.Tensor) -> torch.Tensor:
    return torch.full_like(scores, -torch.inf).index_fill(-1, torch.tensor([5]), 0.0)


def test_odd_but_good_input_is_accepted(bench: Bench) -> None:
    for name, call in ACCEPTED.items():
        assert all(1 <= len(row) <= 256 for row in call(bench).tokens), name


def test_nothing_asked_for_is_an_empty_answer_without_a_forward(bench: Bench) -> None:
    with no_forward():
        output, empty = bench.vlm(["red", "blue"], max_new_tokens=0), bench.vlm([])
    assert (output.text, output.finish_reasons) == (["", ""], ["length", "length"])
    assert (empty.text, empty.tokens, empty.finish_reasons) == ([], [], []) and str(empty)


def test_no_draft_tokens_is_plain_decoding(bench: Bench) -> None:
    asked: dict[str, Any] = {"prompt": "red blue", "apply_chat_template": False, "max_new_tokens": 9}
    wanted = bench.text(**asked)
    bench.text.set_accelerator("copy", num_draft_tokens=0)
    try:
        output = bench.text(**asked)
    finally:
        bench.text.set_accelerator("copy")
    assert output.tokens == wanted.tokens
    assert output.stats.target_forwards == 9


def test_media_errors_surface_unchanged_and_early(bench: Bench) -> None:
    with pytest.raises(MediaError, match=r"^images\[1\] must be .*no such file") as caught, no_forward():
        bench.vlm(["red", "blue"], images=[None, "/no/such.png"])
    assert caught.value.argument == "images[1]"
    with (
        pytest.raises(MediaError, match=r"^prompt\[0\] cannot be downloaded .*got 'http://127.0.0.1/a.png'"),
        no_forward(),
    ):
        bench.vlm([{"role": "user", "content": [{"type": "image", "url": "http://127.0.0.1/a.png"}]}])


@pytest.mark.parametrize("keyword", ["logits_processor", "stopping_criteria"])
def test_what_a_callback_raises_surfaces_with_its_name(keyword: str, bench: Bench) -> None:
    def fail(*arguments: object) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine") as caught:
        bench.vlm("red", max_new_tokens=4, **{keyword: [fail]})
    assert caught.value.__notes__ == [f"raised by {keyword}[0]: function"]
    assert bench.ask() == bench.answers


def test_a_failed_row_leaves_the_others_whole(bench: Bench) -> None:
    class Spoil:
        """Excludes every token of the row whose prompt holds "red", from the third output token on."""

        depends_on_path_alone = True

        def __init__(self, red: int) -> None:
            self.red = red

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores * torch.nan if self.red in ids[0, :5] and ids.shape[1] > length + 1 else scores

    red = bench.text.tokenizer.convert_tokens_to_ids("red")
    length = 3
    prompts = ["blue green yellow", "red green yellow", "circle green yellow"]
    settings: dict[str, Any] = {"max_new_tokens": 12, "apply_chat_template": False}
    wanted = bench.text(prompts, **settings)
    with pytest.raises(NumericalError, match="row 1, output token 2") as caught:
        bench.text(prompts, logits_processor=[Spoil(red)], **settings)
    output: Any = caught.value.output
    assert output.finish_reasons == ["length", "error", "length"]
    assert [output.tokens[0], output.tokens[2]] == [wanted.tokens[0], wanted.tokens[2]]
    assert output.tokens[1] == wanted.tokens[1][:2]


def test_chat_template_that_refuses_the_turns_is_named(bench: Bench, monkeypatch) -> None:
    refusing = "{{ raise_exception('turns must alternate') }}"
    monkeypatch.setattr(bench.vlm.processor, "chat_template", refusing)
    with pytest.raises(InputError, match="^prompt was refused by .*turns must alternate"), no_forward():
        bench.vlm("red")
