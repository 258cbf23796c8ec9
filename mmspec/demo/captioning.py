"""Page that answers questions about an image or a video, next to plain decoding."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import gradio as gr

from mmspec.demo.buttons import MESSAGED, QUICK, Stops, connect
from mmspec.demo.talk import EMPTY, Lane, race, transcript, turn
from mmspec.demo.theme import heading, page, toy_note
from mmspec.demo.uploads import UPLOAD_LIMITS, Upload, read_upload
from mmspec.errors import InputError, MMSpecError
from mmspec.open_types import Json
from mmspec.pipelines import VisionLanguagePipeline

__all__ = ["Captioning", "Conversation", "picture_examples"]

PROMPT = "describe the image in detail."  # as in the training data of the reference models
QUESTIONS = [PROMPT, "what is in the image?", "how many objects are there?"]
MOST_TOKENS, MOST_CHARACTERS, MOST_SEED = 512, 4000, 2**31 - 1
SECONDS_BETWEEN_UPDATES = 0.06
SAID = "A drafter proposes several tokens, and the model verifies them in one forward pass."
TOY = "It describes rendered scenes only, and does not recognise photos."


@dataclass
class Conversation:
    """A visitor's conversation with the model.

    Attributes:
        upload: the image or video.
        messages: chat messages for the pipeline.
        turns: the turns as HTML.
    """

    upload: Upload | None = None
    messages: list[Json] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)


class Captioning:
    """The page and its events; `pictures` are paths of example images, the first one selected."""

    def __init__(self, pipe: VisionLanguagePipeline, model: str, pictures: Sequence[str] = ()) -> None:
        self.pipe, self.model, self.pictures = pipe, model, list(pictures)
        self.plain = VisionLanguagePipeline(pipe.model, pipe.processor, "none", mode=pipe.mode)
        for each in (self.pipe, self.plain):
            each.media_limits = UPLOAD_LIMITS
        self.takes_videos = getattr(pipe.processor, "video_processor", None) is not None
        self.stops = Stops()

    def warm_up(self) -> None:
        """Decode a few tokens with both pipelines, since the first call of a process is slower."""
        for pipe in (self.pipe, self.plain):
            pipe("a", max_new_tokens=8)

    def choose(
        self, kind: str, payload: Mapping[str, object] | None, talk: Conversation | None
    ) -> tuple[Any, Conversation | None, str]:
        """Start a new conversation with an upload; an invalid upload is removed."""
        try:
            upload = read_upload(kind, payload)
        except MMSpecError as error:
            gr.Warning(str(error), title="This file cannot be used", duration=15)
            return None, None, EMPTY
        if upload is None and talk is not None and talk.upload is not None and talk.upload.kind != kind:
            return gr.skip(), talk, transcript(talk.turns)  # the other tab was cleared
        return gr.skip(), Conversation(upload), EMPTY

    def forget(self, talk: Conversation | None) -> tuple[Conversation, str]:
        """Start a new conversation with the same upload."""
        return Conversation(None if talk is None else talk.upload), EMPTY

    def answer(
        self,
        question: str,
        racing: bool,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        frames: int,
        talk: Conversation | None,
        flag: threading.Event,
    ) -> Iterator[tuple[str, Conversation]]:
        """Answer a question, yielding the page's updates; stops within a round once the flag is set.

        With `racing`, plain decoding answers too. `frames` limits the frames of a video.

        Raises:
            InputError: the question is empty or too long, or the pipeline rejects an argument.
        """
        if not question.strip():
            raise InputError("question", question, "must not be empty; write a question")
        if len(question) > MOST_CHARACTERS:
            raise InputError("question", question, f"must have at most {MOST_CHARACTERS:,} characters")
        talk = talk or Conversation()
        media = {} if talk.upload is None else talk.upload.media(frames, takes_videos=self.takes_videos)
        kinds = ["video"] * len(media.get("videos", ())) + ["image"] * len(media.get("images", ()))
        opening = [] if talk.messages else [{"type": kind} for kind in kinds]
        asked = {"role": "user", "content": [*opening, {"type": "text", "text": question}]}
        messages = [*talk.messages, asked]
        settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
        pipes = [self.plain, self.pipe] if racing else [self.pipe]
        lanes = [
            Lane(pipe.accelerator.name, pipe.watch(messages, **media, **settings), pipe.tokenizer)
            for pipe in pipes
        ]
        updated = time.monotonic()
        with closing(race(lanes)) as rounds:
            for _ in rounds:
                if flag.is_set():
                    break
                if time.monotonic() - updated >= SECONDS_BETWEEN_UPDATES:
                    yield transcript([*talk.turns, turn(question, lanes)]), talk
                    updated = time.monotonic()
        for lane in lanes:
            lane.finished = True
        turns, text = [*talk.turns, turn(question, lanes)], "".join(lanes[-1].pieces)
        if text:  # an answer that was stopped before its first token is left out
            messages.append({"role": "assistant", "content": [{"type": "text", "text": text}]})
        yield transcript(turns), Conversation(talk.upload, messages if text else talk.messages, turns)

    def blocks(self) -> gr.Blocks:
        """Build the page."""
        with page("mmspec: captions") as blocks:
            gr.HTML(heading("Ask about an image", SAID, self.model, toy_note(self.pipe.model, TOY)))
            first = self.pictures[0] if self.pictures else None  # the page opens with it
            talk = gr.State(Conversation(None if first is None else read_upload("image", {"path": first})))
            with gr.Row():
                with gr.Column(scale=2, min_width=320):
                    image, video = self._uploads(first)
                    if self.pictures:
                        gr.Examples(self.pictures, image, cache_examples=False, label="Images")
                    question = gr.Textbox(
                        PROMPT, label="Question", lines=1, max_lines=4, info="Enter sends", elem_id="question"
                    )
                    gr.Examples(QUESTIONS, question, cache_examples=False, label="Questions")
                    with gr.Row():
                        ask = gr.Button("Ask", variant="primary", elem_id="ask")
                        stop = gr.Button("Stop", variant="stop", visible=False, elem_id="stop")
                        clear = gr.Button("New conversation", elem_id="clear")
                    racing = gr.Checkbox(True, label="Compare with plain decoding", elem_id="race")
                    with gr.Accordion("Settings", open=False):
                        tokens = gr.Slider(8, MOST_TOKENS, 192, step=8, label="Maximum of new tokens")
                        warmth = gr.Slider(
                            0, 2, 0, step=0.1, label="Temperature", info="0 is greedy decoding"
                        )
                        seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=MOST_SEED)
                        frames = gr.Slider(1, UPLOAD_LIMITS.max_frames, 4, step=1, label="Frames of a video")
                with gr.Column(scale=3, min_width=320):
                    shown = gr.HTML(EMPTY, elem_id="talk")

            # no preprocessing by Gradio: an upload is checked before anything opens it
            unopened = {"preprocess": False, "concurrency_limit": None, **MESSAGED}
            image.change(partial(self.choose, "image"), [image, talk], [image, talk, shown], **unopened)
            video.change(partial(self.choose, "video"), [video, talk], [video, talk, shown], **unopened)
            clear.click(self.forget, talk, [talk, shown], **QUICK)
            triggers = ask.click, question.submit
            inputs = [question, racing, tokens, warmth, seed, frames, talk]
            connect(self.stops, triggers, self.answer, inputs, [shown, talk], (ask, stop), [clear])
            blocks.unload(self.stops.leave)
        return cast(gr.Blocks, blocks)

    def _uploads(self, first: str | None) -> tuple[gr.Image, gr.Video]:
        """Build the tabs for an image and for a video."""
        with gr.Tabs():
            with gr.Tab("Image"):
                image = gr.Image(
                    first,
                    type="filepath",
                    image_mode=None,
                    sources=["upload", "clipboard"],
                    show_label=False,
                    height=280,
                    elem_id="image",
                )
            with gr.Tab("Video"):
                video = gr.Video(sources=["upload"], show_label=False, height=280, elem_id="video")
                if not self.takes_videos:
                    note = "This model has no video input: it receives the frames as images."
                    gr.HTML(f'<p class="mm-note">{note}</p>')
        return image, video


def picture_examples(assets: Path | None) -> list[str]:
    """Example images in the folder of assets; [] without one."""
    if assets is None:
        return []
    shipped = sorted((assets / "prompts" / "mmspec" / "images").glob("*.png"))
    return [str(path) for path in (assets / "images" / "scene.png", *shipped[:5]) if path.is_file()]
