"""Page that draws an image with its heat map, or one seed with several methods."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from random import randrange
from typing import Any, cast

import gradio as gr
from PIL import Image

from mmspec.demo.buttons import QUICK, Stops, connect
from mmspec.demo.drawing import NOTHING, ORDERS, Drawing, Methods, draw, gallery, heat_map, report
from mmspec.demo.theme import heading, page, toy_note
from mmspec.errors import InputError
from mmspec.open_types import Keywords
from mmspec.pipelines import ImageGenerationPipeline

__all__ = ["ImageGeneration"]

SAID = "Parallel methods decide many image tokens per forward pass; the map shows which."
TOY = "It draws scenes with these objects, and other prompts give arbitrary images."
MOST_CHARACTERS, MOST_SEED, MOST_METHODS = 1000, 2**31 - 1, 8
Subject = str | float  # a prompt, or the number of a class
COMPARED = ("none", "sjd", "gsd", "lantern", "zipar", "shared_noise", "masked", "maskgit", *ORDERS)
OPTIONS = {"window": "places drafted per forward pass", "delta": "total variation allowed per token"}
SECONDS_BETWEEN_UPDATES = 0.15
EMPTY = '<p class="mm-empty">The map of forward passes appears here.</p>'


class ImageGeneration:
    """The page and its events; `method` is selected first, None selects the pipeline's default."""

    def __init__(
        self,
        pipe: ImageGenerationPipeline,
        model: str,
        prompts: Sequence[str] = (),
        method: str | None = None,
        drafters: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        self.pipe, self.model, self.prompts = pipe, model, list(prompts)
        self.methods = Methods(pipe, drafters)
        self.method = pipe.default_accelerator if method is None else method
        self.methods.enter(self.method)
        self.draws_classes = pipe.processor is None
        self.stops = Stops()

    def warm_up(self) -> None:
        """Draw an image that is discarded, since the first call of a process is slower."""
        what = self.settings(0 if self.draws_classes else "a", None, None, 0)
        for _ in draw(self.pipe, self.methods, self.method, {}, what, threading.Event()):
            pass

    def settings(
        self, subject: Subject, guidance: float | None, temperature: float | None, seed: int
    ) -> Keywords:
        """Keywords of the pipeline's call.

        Raises:
            InputError: the prompt is empty or too long.
        """
        if not self.draws_classes and not (isinstance(subject, str) and subject.strip()):
            raise InputError("prompt", subject, "must not be empty; describe an image")
        if isinstance(subject, str) and len(subject) > MOST_CHARACTERS:
            raise InputError("prompt", subject, f"must have at most {MOST_CHARACTERS:,} characters")
        what = {"class_labels": int(subject)} if self.draws_classes else {"prompt": subject}
        given = {"guidance_scale": guidance, "temperature": temperature}
        return what | {"seed": seed} | {name: value for name, value in given.items() if value is not None}

    def draw(self, subject: Subject, method: str, *settings: Any) -> Iterator[tuple[Image.Image, str, str]]:
        """Draw one image, yielding its preview, its heat map and its figures while it is drawn.

        Args:
            subject, method: prompt or class, and an accelerator.
            settings: as in `_updates`.

        Raises:
            InputError: the method or the pipeline rejects an argument.
        """
        for drawing in self._updates(subject, method, *settings):
            yield drawing.picture(), heat_map(drawing.commits.counts), report(drawing)

    def compare(self, subject: Subject, methods: Sequence[str], *settings: Any) -> Iterator[str]:
        """Draw one seed with several methods, yielding the gallery so far; arguments as in `draw`.

        Raises:
            InputError: too few or too many methods, or a method or the pipeline rejects an argument.
        """
        if not 1 <= len(methods) <= MOST_METHODS:
            raise InputError("methods", list(methods), f"must be 1 to {MOST_METHODS} of the list")
        done: list[Drawing] = []
        for method in sorted(methods, key=self.methods.names.index):  # plain decoding first
            newest: list[Drawing] = []
            for drawing in self._updates(subject, method, *settings):
                newest = [drawing]
                yield gallery(done + newest, whole=False)
            done += newest
            if settings[-1].is_set():
                break
        yield gallery(done, whole=True)

    def _updates(
        self,
        subject: Subject,
        method: str,
        window: int,
        delta: float,
        guidance: float,
        temperature: float,
        seed: int,
        flag: threading.Event,
    ) -> Iterator[Drawing]:
        """Draw one image, yielding it at most every SECONDS_BETWEEN_UPDATES and at the end."""
        what = self.settings(subject, guidance, temperature, seed)
        options, updated = {"window": window or None, "delta": delta or None}, 0.0
        for drawing in draw(self.pipe, self.methods, method, options, what, flag):
            if drawing.state != "running" or time.monotonic() - updated >= SECONDS_BETWEEN_UPDATES:
                yield drawing
                updated = time.monotonic()

    def blocks(self) -> gr.Blocks:
        """Build the page."""
        with page("mmspec: images") as blocks:
            note = toy_note(self.pipe.model, TOY)
            gr.HTML(heading("Draw in fewer forward passes", SAID, self.model, note))
            with gr.Row():
                with gr.Column(scale=2, min_width=320):
                    subject = self._subject()
                    names = self.methods.names
                    method = gr.Dropdown(names, value=self.method, label="Method", elem_id="method")
                    window, delta = self._option("window", 64, 1), self._option("delta", 0.5, 0.01)
                    usual = self.pipe.sampling({})
                    guidance = gr.Slider(
                        1, 15, usual["guidance_scale"], step=0.1, label="Guidance (CFG)", info="1 is off"
                    )
                    seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=MOST_SEED)
                    dice = gr.Button("Another seed", size="sm")
                    with gr.Accordion("Settings", open=False):
                        warmth = gr.Slider(0, 2, usual["temperature"], step=0.05, label="Temperature")
                with gr.Column(scale=3, min_width=320), gr.Tabs():
                    with gr.Tab("Draw"):
                        run = gr.Button("Draw", variant="primary", elem_id="draw")
                        stop = gr.Button("Stop", variant="stop", visible=False, elem_id="stop")
                        numbers = gr.HTML(elem_id="figures")
                        with gr.Row():
                            with gr.Column(min_width=240):
                                image = gr.Image(
                                    format="png",
                                    interactive=False,
                                    show_label=False,
                                    buttons=["download", "fullscreen"],
                                    elem_id="canvas",
                                    height=320,
                                )
                            with gr.Column(min_width=240):
                                heat = gr.HTML(EMPTY, elem_id="heat")
                    with gr.Tab("Compare"):
                        usual_methods = [name for name in COMPARED if name in self.methods.names]
                        chosen = gr.CheckboxGroup(
                            self.methods.names, value=usual_methods, label="Methods", elem_id="methods"
                        )
                        compare = gr.Button("Compare", variant="primary", elem_id="compare")
                        halt = gr.Button("Stop", variant="stop", visible=False, elem_id="halt")
                        cards = gr.HTML(NOTHING, elem_id="cards")

            dice.click(lambda: randrange(MOST_SEED), None, seed, **QUICK)
            settings = [window, delta, guidance, warmth, seed]
            inputs, outputs = [subject, method, *settings], [image, heat, numbers]
            enter = [subject.submit] if isinstance(subject, gr.Textbox) else []
            connect(self.stops, [run.click, *enter], self.draw, inputs, outputs, (run, stop), [compare])
            inputs = [subject, chosen, *settings]
            connect(self.stops, [compare.click], self.compare, inputs, [cards], (compare, halt), [run])
            blocks.unload(self.stops.leave)
        return cast(gr.Blocks, blocks)

    def _option(self, name: str, largest: float, step: float) -> gr.Slider:
        """Build the slider of an option of methods; an option that no method has is hidden."""
        having = self.methods.taking(name)
        info = f"{OPTIONS[name]}, for {', '.join(having)}; 0: the method's default"
        return gr.Slider(0, largest, 0, step=step, label=name.title(), info=info, visible=bool(having))

    def _subject(self) -> gr.components.Component:
        """Build the field for the prompt or the class."""
        if self.draws_classes:
            last = self.pipe.model.config.num_classes - 1
            return gr.Number(0, label=f"Class, 0 to {last}", precision=0, minimum=0, maximum=last)
        first = self.prompts[0] if self.prompts else ""
        subject = gr.Textbox(
            first, label="Prompt", lines=1, max_lines=4, info="Enter draws", elem_id="prompt"
        )
        if self.prompts:
            gr.Examples(self.prompts, subject, cache_examples=False, label="Prompts")
        return subject
