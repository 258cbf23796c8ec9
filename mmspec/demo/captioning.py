"""Page that answers questions about a picture or a video, with plain decoding racing beside."""

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
from mmspec.demo.theme import heading, page
from mmspec.demo.uploads import UPLOAD_LIMITS, Upload, read_upload
from mmspec.errors import InputError, MMSpecError
from mmspec.open_types import Json
from mmspec.pipelines import VisionLanguagePipeline

__all__ = ["Captioning", "Conversation", "picture_examples"]

PROMPT = "describe the picture in detail."
QUESTIONS = [PROMPT, "what is in the picture?", "how many objects are there?"]
MOST_TOKENS, MOST_CHARACTERS, MOST_SEED = 512, 4000, 2**31 - 1
SECONDS_BETWEEN_UPDATES = 0.06
SAID = "A small draft proposes, the model checks many words at once: the same answer, sooner."


@dataclass
class Conversation:
    """A visitor's conversation with the model.

    Attributes:
        upload: what it is about.
        messages: chat messages as the pipeline takes them.
        turns: as they are shown.
    """

    upload: Upload | None = None
    messages: list[Json] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)


class Captioning:
    """The page and what its buttons do; `pictures` are paths of examples."""

    def __init__(self, pipe: VisionLanguagePipeline, model: str, pictures: Sequence[str] = ()) -> None:
        self.pipe, self.model, self.pictures = pipe, model, list(pictures)
        self.plain = VisionLanguagePipeline(pipe.model, pipe.processor, "none", mode=pipe.mode)
        for each in (self.pipe, self.plain):
            each.media_limits = UPLOAD_LIMITS
        self.takes_videos = getattr(pipe.processor, "video_processor", None) is not None
        self.stops = Stops()

    def warm_up(self) -> None:
        """Decode a few tokens in both ways: the first call of a process takes longer."""
        for pipe in (self.pipe, self.plain):
            pipe("a", max_new_tokens=8)

    def choose(
        self, kind: str, payload: Mapping[str, object] | None, talk: Conversation | None
    ) -> tuple[Any, Conversation | None, str]:
        """Take an upload, with which a new conversation begins; one that cannot be read is removed."""
        try:
            upload = read_upload(kind, payload)
        except MMSpecError as error:
            gr.Warning(str(error), title="This file cannot be used", duration=15)
            return None, None, EMPTY
        if upload is None and talk is not None and talk.upload is not None and talk.upload.kind != kind:
            return gr.skip(), talk, transcript(talk.turns)  # the other tab was emptied
        return gr.skip(), Conversation(upload), EMPTY

    def forget(self, talk: Conversation | None) -> tuple[Conversation, str]:
        """Begin anew with the same upload."""
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
        """Answer a question, yielding what to show as it grows; stops within a round once the flag is set.

        Where `racing`, plain decoding answers too; of a video at most so many frames are looked at.

        Raises:
            InputError: no question or a very long one, or what the pipeline refuses.
        """
        if not question.strip() or len(question) > MOST_CHARACTERS:
            raise InputError("question", question, f"1 to {MOST_CHARACTERS:,} characters")
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
        if text:  # else it was stopped before the first word, and not said
            messages.append({"role": "assistant", "content": [{"type": "text", "text": text}]})
        yield transcript(turns), Conversation(talk.upload, messages if text else talk.messages, turns)

    def blocks(self) -> gr.Blocks:
        """Build the page."""
        with page("mmspec: captions") as blocks:
            gr.HTML(heading("Ask a picture", SAID, self.model))
            talk = gr.State()
            with gr.Row():
                with gr.Column(scale=2, min_width=320):
                    image, video = self._uploads()
                    if self.pictures:
                        gr.Examples(self.pictures, image, cache_examples=False, label="Pictures")
                    question = gr.Textbox(PROMPT, label="Question", lines=2, elem_id="question")
                    gr.Examples(QUESTIONS, question, cache_examples=False, label="Questions")
                    with gr.Row():
                        ask = gr.Button("Ask", variant="primary", elem_id="ask")
                        stop = gr.Button("Stop", variant="stop", visible=False, elem_id="stop")
                        clear = gr.Button("New conversation", elem_id="clear")
                    racing = gr.Checkbox(True, label="Race against plain decoding", elem_id="race")
                    with gr.Accordion("Settings", open=False):
                        tokens = gr.Slider(8, MOST_TOKENS, 192, step=8, label="Most tokens")
                        warmth = gr.Slider(
                            0, 2, 0, step=0.1, label="Temperature", info="0 takes the likeliest token"
                        )
                        seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=MOST_SEED)
                        frames = gr.Slider(1, UPLOAD_LIMITS.max_frames, 4, step=1, label="Frames of a video")
                with gr.Column(scale=3, min_width=320):
                    shown = gr.HTML(EMPTY, elem_id="talk")

            # checked as it arrives, and before anything opens it: hence no preprocessing by Gradio
            unopened = {"preprocess": False, "concurrency_limit": None, **MESSAGED}
            image.change(partial(self.choose, "image"), [image, talk], [image, talk, shown], **unopened)
            video.change(partial(self.choose, "video"), [video, talk], [video, talk, shown], **unopened)
            clear.click(self.forget, talk, [talk, shown], **QUICK)
            triggers = ask.click, question.submit
            inputs = [question, racing, tokens, warmth, seed, frames, talk]
            connect(self.stops, triggers, self.answer, inputs, [shown, talk], (ask, stop), [clear])
            blocks.unload(self.stops.leave)
        return cast(gr.Blocks, blocks)

    def _uploads(self) -> tuple[gr.Image, gr.Video]:
        """Build the places for a picture and for a video."""
        with gr.Tabs():
            with gr.Tab("Picture"):
                image = gr.Image(
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
                    note = "This model has no input for videos: it is shown frames as pictures."
                    gr.HTML(f'<p class="mm-note">{note}</p>')
        return image, video


def picture_examples(assets: Path | None) -> list[str]:
    """Pictures in the folder of assets; [] without one."""
    if assets is None:
        return []
    shipped = sorted((assets / "prompts" / "mmspec" / "images").glob("*.png"))
    return [str(path) for path in (assets / "images" / "scene.png", *shipped[:5]) if path.is_file()]
