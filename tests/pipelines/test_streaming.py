"""stream(), streamers, interrupt(), and pipelines in use."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AsyncTextIteratorStreamer,
    PreTrainedTokenizerBase,
    TextIteratorStreamer,
    TextStreamer,
)

from mmspec.errors import PipelineBusyError
from mmspec.pipelines import VisionLanguagePipeline
from mmspec.pipelines.text_stream import TextDeltas, decode
from tests.pipelines.small_tokenizers import BYTES, TOKENIZERS
from tests.tiny_models import tiny_image

RAW: dict[str, Any] = {"apply_chat_template": False, "max_new_tokens": 24}
CHUNKS = st.lists(st.integers(1, 12), min_size=1, max_size=40)


def streamed(
    tokens: list[int], sizes: list[int], tokenizer: PreTrainedTokenizerBase = BYTES, **how: Any
) -> list[str]:
    """The deltas of tokens that come in chunks of these sizes, over and over."""
    deltas, source, pieces = TextDeltas(tokenizer, **how), iter(tokens), []
    for size in itertools.cycle(sizes):
        chunk = list(itertools.islice(source, size))
        if not chunk:
            return [*pieces, deltas.finish()]
        pieces.append(deltas.add(chunk))
    raise AssertionError


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_pieces_join_to_the_text_of_every_kind_of_tokenizer(kind: str, data: Any) -> None:
    tokenizer = TOKENIZERS[kind]
    few = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=12))
    tokens = data.draw(st.lists(st.sampled_from(few), max_size=120))
    before, skips = data.draw(st.lists(st.sampled_from(few), max_size=3)), data.draw(st.booleans())
    how = {"before": before, "skip_special_tokens": skips}
    pieces = streamed(tokens, data.draw(CHUNKS), tokenizer, **how)
    assert "".join(pieces) == decode(tokenizer, tokens, before, skips)


def test_a_byte_that_spoils_a_run_of_bytes_changes_no_text_that_was_given() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    tokens = tokenizer.convert_tokens_to_ids(["▁the", "<0xE6>", "<0x97>", "<0xA5>", "</s>", "<0xFF>", "b"])
    assert (
        decode(tokenizer, tokens[:4]) == "the日" and decode(tokenizer, tokens) == "the" + 4 * "\ufffd" + "b"
    )
    assert "".join(streamed(tokens, [1], tokenizer)) == decode(tokenizer, tokens)
    assert "".join(streamed(tokens[:5], [1], tokenizer)) == "the日"


def test_spaces_within_a_long_text_are_kept_by_tokenizers_that_drop_them_in_front() -> None:
    tokenizer = TOKENIZERS["byte fallback with no first spaces"]
    for words in range(28, 40):
        tokens = tokenizer.convert_tokens_to_ids(["b"] * words + ["▁", "▁", "▁the"])
        assert "".join(streamed(tokens, [1], tokenizer)) == "b" * words + "   the"


@pytest.mark.parametrize("kind", ["text", "noise", "special tokens"])
def test_a_long_stream_costs_linear_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = [token for token in range(len(BYTES)) if BYTES.decode([token]) == "\ufffd"]
    some = {"text": BYTES("the red é")["input_ids"], "noise": noise, "special tokens": [0, 1]}[kind]
    tokens, decoded = list(itertools.islice(itertools.cycle(some), 4000)), list[int]()

    def counted(tokenizer: Any, ids: Any, *arguments: Any) -> str:
        decoded.append(len(ids))
        return decode(tokenizer, ids, *arguments)

    monkeypatch.setattr("mmspec.pipelines.text_stream.decode", counted)
    streamed(tokens, [1])
    assert sum(decoded) < 200 * len(tokens)  # half of all before each: 2000 times


def test_what_is_watched_grows_to_the_output_of_a_call(text: VisionLanguagePipeline) -> None:
    wanted = text("the red", **RAW)
    seen = list(text.watch("the red", **RAW))
    lengths = [len(output.tokens[0]) for output in seen]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    assert (seen[-1].tokens, seen[-1].drafted) == (wanted.tokens, wanted.drafted)
    assert seen[0].finish_reasons == ["interrupted"] and seen[-1].finish_reasons == wanted.finish_reasons
    begun = text.watch("the red", **RAW)
    next(begun)
    with pytest.raises(PipelineBusyError):
        text("the red", **RAW)
    begun.close()
    assert text("the red", **RAW).tokens == wanted.tokens


class Recorder:
    """A streamer that keeps what it is given, and may act on it."""

    def __init__(self, act: Any = None) -> None:
        self.puts: list[list[int]] = []
        self.ended = 0
        self.act = act

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.flatten().tolist())
        if self.act is not None and len(self.puts) > 1:
            self.act()

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_gets_the_prompt_and_then_one_token_a_put(llava: VisionLanguagePipeline) -> None:
    streamer: Any = Recorder()
    output = llava("describe", images=tiny_image(), streamer=streamer, max_new_tokens=24)
    assert streamer.puts[1:] == [[token] for token in output.tokens[0]]
    assert len(streamer.puts[0]) > 1
    assert streamer.ended == 1


def test_every_streamer_of_transformers_works(bytes_pipeline: Any, capsys: Any) -> None:
    wanted, prompt = bytes_pipeline("the red", **RAW).text[0], "the red"
    options: dict[str, Any] = {"skip_prompt": False, "skip_special_tokens": True}
    bytes_pipeline("the red", streamer=TextStreamer(BYTES, skip_prompt=True, skip_special_tokens=True), **RAW)
    assert capsys.readouterr().out == wanted + "\n"
    streamer = TextIteratorStreamer(BYTES, timeout=60, **options)
    bytes_pipeline("the red", streamer=streamer, **RAW)
    assert "".join(streamer) == prompt + wanted

    async def collect() -> str:
        streamer = AsyncTextIteratorStreamer(BYTES, timeout=60, **options)
        await asyncio.to_thread(bytes_pipeline, "the red", streamer=streamer, **RAW)
        return "".join([piece async for piece in streamer])

    assert asyncio.run(collect()) == prompt + wanted


def test_an_interrupted_call_or_stream_ends_with_what_it_has(text: VisionLanguagePipeline) -> None:
    text.set_accelerator("none")
    whole = text("red", **RAW).text[0]
    streamer: Any = Recorder(text.interrupt)
    output = text("red", streamer=streamer, **RAW)
    assert len(output.tokens[0]) == 1 and output.finish_reasons == ["interrupted"]
    pieces = []
    for piece in text.stream("red", **RAW):
        pieces.append(piece)
        text.interrupt()
    text.set_accelerator("copy")
    assert whole.startswith("".join(pieces)) and len("".join(pieces)) < len(whole)


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("streamer", KeyboardInterrupt),
        ("stopping_criteria", GeneratorExit),
        ("logits_processor", RuntimeError),
    ],
)
def test_whatever_stops_a_call_leaves_the_pipeline_usable(
    error: type[BaseException], where: str, llava: VisionLanguagePipeline
) -> None:
    wanted = llava("describe", images=tiny_image(), max_new_tokens=12).tokens
    calls = itertools.count()

    def fail(*arguments: Any) -> Any:
        if next(calls) == 5:
            raise error
        return arguments[1] if where == "logits_processor" else False

    callback: Any = Recorder(fail) if where == "streamer" else [fail]
    with pytest.raises(error):
        llava("describe", images=tiny_image(), max_new_tokens=12, **{where: callback})
    assert llava("describe", images=tiny_image(), max_new_tokens=12).tokens == wanted


def test_calls_from_a_callback_or_another_thread_are_refused(text: VisionLanguagePipeline) -> None:
    errors: list[BaseException] = []

    def call() -> None:
        try:
            text("blue", **RAW)
        except PipelineBusyError as error:
            errors.append(error)

    def act() -> None:
        call()
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    streamer: Any = Recorder(act)
    wanted = text("red", **RAW).tokens
    assert text("red", streamer=streamer, **RAW).tokens == wanted
    assert len(errors) == 2 * 24
    assert "already generating" in str(errors[0])
    with pytest.raises(PipelineBusyError):
        text("red", streamer=Recorder(lambda: text.set_accelerator("none")), **RAW)  # type: ignore[arg-type]
    assert text.accelerator.name == "copy"
