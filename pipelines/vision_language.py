"""VisionLanguagePipeline: text generation from text, images, videos and audio."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor
from transformers import BatchFeature, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from mmspec.accelerator import Call
from mmspec.assets import own_drafters
from mmspec.core.canvas import Canvas
from mmspec.core.interfaces import Request
from mmspec.core.random_stream import RandomStream, draw_seed
from mmspec.errors import InputError
from mmspec.models.checkpoint import tokenizer_of
from mmspec.models.drafters_file import OwnDrafter
from mmspec.open_types import Keywords, Processor
from mmspec.pipelines.base import MMSpecPipeline
from mmspec.pipelines.generation_fields import distance
from mmspec.pipelines.outputs import TextOutput
from mmspec.pipelines.pasted_tokens import STAND_IN, reading_stand_ins
from mmspec.pipelines.processor_parts import read_once, read_sized, takes_sizes
from mmspec.pipelines.prompts import (
    ARGUMENTS,
    Prompt,
    apply_template,
    read_negatives,
    read_prompts,
    template_variables,
)
from mmspec.pipelines.response_format import with_response_format
from mmspec.pipelines.settings import OF_CALLS, GenerationSettings, read_seeds
from mmspec.pipelines.text_stream import TextDeltas, decode
from mmspec.pipelines.token_processors import with_processors
from mmspec.plugins import family_of
from mmspec.targets.admission import check_reach
from mmspec.targets.encoder_decoder import prompt_of

EXAMPLE: Keywords = {"max_new_tokens": 64, "seed": 0}  # of the calls that are compiled
NO_TOKENS = "must have at least one token; add some text"  # rule for prompts


class VisionLanguagePipeline(MMSpecPipeline):
    """Text generation with a vision-language, audio-language or causal language model.

    Prompts may contain text, and images, videos and audio where the model reads them. Call the pipeline for
    whole outputs, `stream` for text deltas, and `watch` for the output after every round.

    Example:
        >>> pipe = MMSpecPipeline.from_pretrained("assets/scenes-llava")  # doctest: +SKIP
        >>> pipe("What is in the image?", images="scene.png").text[0]  # doctest: +SKIP
    """

    def __call__(
        self,
        prompt: object,
        images: object = None,
        videos: object = None,
        audio: object = None,
        *,
        num_frames: int | None = None,
        fps: float | None = None,
        apply_chat_template: bool = True,
        continue_final_message: bool | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        sanitize_control_tokens: bool = False,
        generation_config: GenerationConfig | None = None,
        streamer: BaseStreamer | None = None,
        return_dict: bool = True,
        **settings: object,
    ) -> TextOutput | tuple[list[str]]:
        """Generate text for one prompt or a list of prompts.

        Args:
            prompt: a string, a list of chat messages, or a list of either. A string becomes one user turn
                with the media in front; for Donut, TrOCR and Florence-2 it is the whole prompt of one image.
                With `apply_chat_template=False`, also a list of token ids, or a list of such lists. The
                message keys `name`, `tool_calls`, `tool_call_id` and `reasoning_content` are passed to the
                chat template. A video part may set `fps` or `nframes`; an image part for Qwen-VL may set
                `min_pixels` and `max_pixels`, or `resized_height` and `resized_width`. Other keys are refused
                (`mmspec.messages`).
            images: a path, PIL image, array, tensor, bytes, an open file, base64 or https URL. With one
                prompt, a list is several images; with a list of prompts, it has one entry for each prompt.
            videos: a path, bytes, or frames [T, H, W, 3]; lists as for images.
            audio: a path, bytes, an open file, base64 or https URL of an audio or video file, or samples with
                their rate (`mmspec.media.load_audio`); lists as for images.
            num_frames: number of frames sampled from each video; all, up to `media_limits` if None.
            fps: number of frames sampled from each second of a video, instead of `num_frames`.
            apply_chat_template: False if the prompts are already templated.
            continue_final_message: True to continue the last message of a conversation, False to start a new
                one. The output is the new text alone; True for a message of the assistant, as in
                transformers' pipelines, if None. With `apply_chat_template=False`, True keeps the space in
                front of an output that continues the words of the prompt.
            chat_template_kwargs: variables of the chat template, such as {"enable_thinking": False}.
            sanitize_control_tokens: True to read special tokens in the text of messages as ordinary text;
                False refuses them.
            generation_config: a transformers GenerationConfig; keywords take precedence over it.
            streamer: a transformers streamer, for a single prompt; it receives one token at a time.
            return_dict: False returns the tuple (text,).
            settings: fields of `GenerationSettings`: max_new_tokens, temperature, seed, stop_strings, ...
                A setting that is not given is taken from `generation_config`, then from the model's own
                generation config, which may sample, then from transformers' defaults, which are greedy. Pass
                `temperature=0` for greedy decoding.

        Returns:
            TextOutput(text, tokens, stats, finish_reasons).

        Raises:
            InputError: an argument cannot be used. It is raised before any forward pass.
            NumericalError: the logits of a row are not finite. The other rows are finished first; the
                attribute `output` of the exception is the whole TextOutput.
            PipelineBusyError: another call is running.
        """
        with self._busy():
            call = self._prepare(
                prompt,
                settings,
                images=images,
                videos=videos,
                audio=audio,
                num_frames=num_frames,
                fps=fps,
                apply_chat_template=apply_chat_template,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
                sanitize_control_tokens=sanitize_control_tokens,
                generation_config=generation_config,
            )
            if streamer is not None:
                if len(call.requests) != 1:
                    rule = f"needs a single prompt, not {len(call.requests)}"
                    raise InputError("streamer", streamer, rule)
                if not (hasattr(streamer, "put") and hasattr(streamer, "end")):
                    rule = "must be a transformers streamer, with `put` and `end`"
                    raise InputError("streamer", streamer, rule)
                streamer.put(call.requests[0].inputs["input_ids"].cpu())
            for step in call.rounds():
                if streamer is not None:
                    for token in step.emission.tokens[0]:
                        streamer.put(torch.tensor([token], device="cpu"))
                if self._interrupted.is_set():
                    break
            if streamer is not None:
                streamer.end()
        output = text_output(call, self.tokenizer)
        call.raise_errors(output)
        return output if return_dict else (output.text,)

    def stream(
        self,
        prompt: object,
        images: object = None,
        videos: object = None,
        audio: object = None,
        **arguments: object,
    ) -> Iterator[str]:
        """Stream text for one prompt: yield text deltas that join to the whole text.

        Closing the iterator stops generation. Arguments and errors are those of `__call__`, without
        `streamer` and `return_dict`.

        Example:
            >>> for delta in pipe.stream("Describe the image.", images="scene.png"):  # doctest: +SKIP
            ...     print(delta, end="", flush=True)
        """
        with self._busy():
            media = {"images": images, "videos": videos, "audio": audio}
            call, _ = self._prepare_request(prompt, {**media, **arguments})
            if len(call.requests) != 1:
                rule = "must be a single prompt; call the pipeline for several"
                raise InputError("prompt", f"{len(call.requests)} prompts", rule)
            deltas = TextDeltas(self.tokenizer, call.requests[0].text_before)
            for step in call.rounds():
                if delta := deltas.add(step.emission.tokens[0]):
                    yield delta
                if self._interrupted.is_set():
                    break
            if delta := deltas.finish():
                yield delta
        call.raise_errors()

    def watch(self, prompt: object, **arguments: object) -> Generator[TextOutput, None, None]:
        """Generate text, yielding the output so far after every round.

        Closing the iterator stops generation. Arguments and errors are those of `__call__`, without
        `streamer` and `return_dict`.
        """
        with self._busy():
            call, output = self._prepare_request(prompt, arguments)
            for _ in call.rounds():
                yield output(call.canvas)
                if self._interrupted.is_set():
                    break
        call.raise_errors(output(call.canvas))

    @classmethod
    def _own_default(cls, folder: Path) -> OwnDrafter | None:
        return own_drafters(folder).default_drafter

    def _prepare(
        self,
        prompt: object,
        keywords: Keywords,
        *,
        images: object = None,
        videos: object = None,
        audio: object = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        generation_config: GenerationConfig | None = None,
        **reading: Any,
    ) -> Call:
        """Check all arguments of a call and tokenise, without running the model."""
        defaults = self.model.generation_config
        guidance = getattr(defaults, "guidance_scale", None)
        family = family_of(self.model.config)
        if guidance is not None and family is not None and family.draws:
            defaults = copy.copy(defaults)  # in Janus' config, the guidance scale applies to images
            defaults.guidance_scale = None
        settings = GenerationSettings.from_keywords(defaults, keywords, generation_config)
        reading |= {
            "limits": self.media_limits,
            "tokenizer": self.tokenizer,
            "placeholders": self._placeholders(),
            "takes_sizes": takes_sizes(self.processor),
            "sampling_rate": self._sampling_rate(),
        }
        if self._reads_documents:
            reading |= {"placeholders": None, "apply_chat_template": False}
        variables = {} if chat_template_kwargs is None else chat_template_kwargs
        media = {"image": images, "video": videos, "audio": audio}
        self._check_media(media)  # before anything is fetched
        prompts = read_prompts(prompt, media, **reading)
        for row in prompts:
            self._check_media(row.media())
            if self._reads_documents and row.text is None:
                rule = (
                    f"must be a string, the whole prompt, or a list of these for {type(self.model).__name__}"
                )
                raise InputError("prompt", prompt, rule)
            if self._reads_documents and len(row.images) != 1:
                rule = f"must have one image for each prompt of {type(self.model).__name__}"
                raise InputError("images", f"{len(row.images)} images", rule)
        sampler = settings.sampler(len(prompts))
        negatives: list[Prompt] = []
        if sampler.is_guided:
            negatives = read_negatives(settings.negative_prompt, prompts, self.tokenizer)
        requests = []
        for index, row in enumerate(prompts):
            processor = read_sized(self.processor, row.sizes)
            processor = read_once(processor) if negatives else processor
            inputs = self._encode(row, processor, variables)
            draft_inputs = self._draft_inputs(row, inputs, variables)
            negative = None
            if negatives:
                given = settings.negative_prompt
                named = given if isinstance(given, str | None) else given[index]
                own = self.target.unconditional(inputs) if named is None else None
                negative = self._encode(negatives[index], processor, variables) if own is None else own
            requests.append(Request(inputs, draft_inputs, negative, continues=row.continues))
        prompted = [row for request in requests for row in (request.inputs, request.negative_inputs) if row]
        lengths = [inputs["input_ids"].shape[1] for inputs in prompted]
        if 0 in lengths:
            raise InputError("prompt", "", NO_TOKENS)
        config = self.model.config.get_text_config(decoder=True)
        positions = getattr(config, "max_position_embeddings", None)
        positions = None if positions == -1 else positions  # XLNet has no limit
        self.accelerator.check(sampler)
        if settings.logprobs is not None and self.accelerator.drafter.decides_places:
            rule = "must be None for models that decide several places at once"
            raise InputError("logprobs", settings.logprobs, rule)
        tokens = [request.prompt_tokens for request in requests]
        longest = max(map(len, tokens), default=0)
        usual = distance("max_new_tokens", keywords, generation_config, defaults) == 2
        stopping = settings.stopping(max(lengths, default=0), positions, self.tokenizer, longest, usual)
        where = self.model, tokens, self._filler(), self.device
        settings = with_response_format(settings, self.tokenizer, len(requests))
        sampler, stopping = with_processors(settings, sampler, stopping, *where)
        check_reach(self.model, lengths, stopping.max_new_tokens)
        seeds = read_seeds(settings.seed, settings.generator, (len(requests),))
        if seeds is None:  # as in transformers, greedy decoding draws no random number
            seeds = 0 if sampler.greedy else draw_seed()
        random = RandomStream.from_seed(seeds, len(requests), self.device)
        return self.accelerator.call(self.target, sampler, requests, stopping, random)

    def _prepare_request(
        self, prompt: object, arguments: Keywords
    ) -> tuple[Call, Callable[[Canvas], TextOutput]]:
        own = {name: value for name, value in arguments.items() if name in OF_CALLS - {"streamer"}}
        settings = {name: value for name, value in arguments.items() if name not in own}
        call = self._prepare(prompt, settings, **own)
        return call, lambda canvas: text_output(replace(call, canvas=canvas), self.tokenizer)

    @property
    def _reads_documents(self) -> bool:
        """Whether a string is the whole prompt of one image, as of Donut, TrOCR and Florence-2."""
        templated = getattr(self.processor, "chat_template", None) is not None
        return bool(self.model.config.is_encoder_decoder) and not templated

    def _examples(self, rows: int) -> list[Call]:
        if self.model.config.is_encoder_decoder:
            return []  # encoder-decoders are not compiled
        templated = getattr(self.processor, "chat_template", None) is not None
        usual = self._prepare(["a"] * rows, {**EXAMPLE}, apply_chat_template=templated)
        greedy = {**EXAMPLE, "temperature": 0.0}
        if usual.sampler.greedy:
            return [usual]
        return [usual, self._prepare(["a"] * rows, greedy, apply_chat_template=templated)]

    def _check_media(self, media: Mapping[str, object]) -> None:
        """Raise InputError for media of a kind that the model does not accept."""
        for kind, given in media.items():
            reader = "feature_extractor" if kind == "audio" else f"{kind}_processor"
            if getattr(self.processor, reader, None) is None and holds_media(given):
                argument = ARGUMENTS[kind]
                rule = f"must be None; {type(self.model).__name__} does not accept {argument}"
                raise InputError(argument, argument, rule)

    def _sampling_rate(self) -> int | None:
        """Return the samples per second that the model reads; None if it does not read audio."""
        extractor = getattr(self.processor, "feature_extractor", None)
        return getattr(extractor, "sampling_rate", None)

    def _encode(
        self, prompt: Prompt, processor: Processor, variables: Mapping[str, object]
    ) -> dict[str, Tensor]:
        """Encode one row as tensors of batch size 1, with floats of the model's dtype."""
        if prompt.ids is not None:
            self._check_ids(prompt.ids)
            ids = torch.tensor([prompt.ids], device="cpu")
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        tokenizer = tokenizer_of(processor)
        text = apply_template(prompt, processor, tokenizer, variables)
        if self._reads_documents:
            return self._encode_document(text, prompt.images, processor)
        is_text = processor is tokenizer
        if prompt.text is None and STAND_IN.search(text):
            processor = reading_stand_ins(processor, tokenizer)
        bos = tokenizer.bos_token
        arguments: Keywords = {
            "return_tensors": "pt",
            "add_special_tokens": not (bos and text.startswith(bos)),
        }
        if is_text:
            return dict(processor(text, **arguments))
        if prompt.videos:
            arguments["videos"] = [[video.frames for video in prompt.videos]]
            arguments["videos_kwargs"] = {
                "video_metadata": [video.metadata for video in prompt.videos],
                "do_sample_frames": False,
            }
        if prompt.audio:
            arguments["audio"] = prompt.audio
            arguments["audio_kwargs"] = {"sampling_rate": self._sampling_rate()}
        # a nested list, since some processors tile an image only if it is alone in its row
        images = [prompt.images] if prompt.images else None
        return self._tensors(processor(text=[text], images=images, **arguments))

    def _encode_document(self, text: str, images: list[Image], processor: Processor) -> dict[str, Tensor]:
        """Encode an image, with the text of the encoder, or of the decoder if the encoder reads none."""
        if self.model.main_input_name == "input_ids":
            return self._tensors(processor(text=text, images=images, return_tensors="pt"))
        encoded = processor(images=images, return_tensors="pt")
        if text:
            ids = tokenizer_of(processor)(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            if not ids.shape[1]:
                raise InputError("prompt", text, NO_TOKENS)
            encoded["decoder_input_ids"] = ids
        return self._tensors(encoded)

    def _tensors(self, encoded: BatchFeature) -> dict[str, Tensor]:
        """Return the tensors of a processor's output as a prompt, with floats of the model's dtype."""
        tensors = {
            name: value.to(self.dtype) if value.is_floating_point() else value
            for name, value in encoded.items()
            if isinstance(value, Tensor)
        }
        return prompt_of(self.model, tensors) if self.model.config.is_encoder_decoder else tensors

    def _check_ids(self, ids: Sequence[int]) -> None:
        """Raise InputError for a prompt with token ids that the vocabulary lacks, or that stand for media."""
        size = self.model.config.get_text_config(decoder=True).vocab_size
        held = {self.tokenizer.convert_tokens_to_ids(token) for token in self._placeholders().values()}
        for token in ids:
            if not 0 <= token < size:
                raise InputError("prompt", token, f"must have token ids from 0 to {size - 1}")
            if token in held:
                raise InputError("prompt", token, "must have no token id that stands for media")

    def _filler(self) -> int:
        """Return the padding token for callbacks that see all rows of a batch."""
        known = (self.model.generation_config, self.tokenizer)
        ids = [getattr(one, f"{kind}_token_id", None) for kind in ("pad", "eos") for one in known]
        found = next((one for one in ids if one is not None), 0)
        return int(found[0] if isinstance(found, list | tuple) else found)

    def _draft_inputs(
        self, prompt: Prompt, inputs: Mapping[str, Tensor], variables: Mapping[str, object]
    ) -> dict[str, Tensor] | None:
        """Return the inputs of a draft model: from its own processor, or the text alone if it reads text."""
        if self.accelerator.drafter.reader is None or self.draft_processor is None:
            return None
        if hasattr(self.draft_processor, "tokenizer"):
            read = (
                template_variables(self.draft_processor) if variables else set()
            )  # parsing the template takes time
            own = {name: value for name, value in variables.items() if name in read}
            return self._encode(prompt, read_sized(self.draft_processor, prompt.sizes), own)
        tokens = inputs["input_ids"]
        seen = torch.ones_like(tokens, dtype=torch.bool)
        for token in self._placeholders().values():
            seen &= tokens != self.tokenizer.convert_tokens_to_ids(token)
        return {"input_ids": tokens[seen][None]}

    def _placeholders(self) -> dict[str, str]:
        """Return the model's placeholder tokens by kind of media."""
        found = {}
        for kind in ARGUMENTS:
            index = getattr(self.model.config, f"{kind}_token_id", None)
            index = getattr(self.model.config, f"{kind}_token_index", None) if index is None else index
            if index is not None:
                found[kind] = self.tokenizer.convert_ids_to_tokens(index)
        return found


def holds_media(given: object) -> bool:
    """Whether an argument contains media, and not only None and empty lists."""
    return any(map(holds_media, given)) if isinstance(given, list | tuple) else given is not None


def text_output(call: Call, tokenizer: Processor) -> TextOutput:
    """Return the output of the text that a call has decoded so far."""
    canvas, tokens = call.canvas, call.canvas.outputs()
    unfinished = ["interrupted" if one.max_new_tokens else "length" for one in canvas.stopping]
    reasons = [reason or other for reason, other in zip(canvas.finish_reasons, unfinished, strict=True)]
    rows = zip(tokens, call.requests, strict=True)
    texts = [decode(tokenizer, row, request.text_before) for row, request in rows]
    return TextOutput(texts, tokens, call.stats, reasons, canvas.drafted, canvas.logprobs)
