"""SpeechPipeline: transcription of audio by Whisper, Moonshine and other speech encoder-decoders.

transformers splits long audio into windows, calls `generate` for each, and reads timestamps from the output.
mmspec loads the audio and decodes the windows.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import (
    AutomaticSpeechRecognitionPipeline,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING

from mmspec.accelerator import Call
from mmspec.core.statistics import DecodingStats, merge_stats
from mmspec.errors import InputError, UnknownArgumentError
from mmspec.media import load_audio
from mmspec.open_types import Json, Keywords
from mmspec.pipelines.base import MMSpecPipeline
from mmspec.pipelines.custom_generate import make_loop
from mmspec.pipelines.generation_fields import installed_fields
from mmspec.pipelines.outputs import SpeechOutput
from mmspec.pipelines.prompts import media_per_row
from mmspec.transcripts import Segment
from mmspec.validation import is_integer

__all__ = ["SpeechPipeline", "is_speech_model"]

#: Keywords of `generate` that this pipeline sets.
OWN = {"custom_generate", "generation_config", "inputs", "return_dict_in_generate", "streamer"}
SCORES = "it needs the scores of all tokens; transformers' pipeline has it, also after mmspec.enable"
#: Keywords of transformers' pipeline and of other libraries, with what to do instead.
INSTEAD = {
    "chunk_length_s": "recordings of any length are decoded window by window",
    "forced_decoder_ids": "use language and task",
    "generate_kwargs": "pass its entries as keywords",
    "initial_prompt": "use prompt",
    "logprob_threshold": SCORES,
    "no_speech_threshold": SCORES,
    "num_beams": "beam search has no drafts",
    "num_return_sequences": "a recording has one transcript",
    "stride_length_s": "recordings of any length are decoded window by window",
}


def is_speech_model(config: PreTrainedConfig) -> bool:
    """Whether a config belongs to an encoder-decoder that transcribes speech."""
    return bool(config.is_encoder_decoder) and type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING


def segments_of(chunks: Sequence[Json], seconds: float) -> list[Segment]:
    """Make segments of the chunks of transformers' pipeline, and complete times that were not predicted.

    Args:
        chunks: parts of the transcript.
        seconds: length of the recording, where a segment without an end ends.
    """
    found: list[Segment] = []
    for chunk in chunks:
        start, end = chunk["timestamp"]
        if start is None:
            start = found[-1].end if found else 0.0
        found.append(Segment(start, max(start, seconds) if end is None else end, chunk["text"]))
    return found


class Recognizer(AutomaticSpeechRecognitionPipeline):
    """transformers' pipeline, whose results have the token ids too, without end tokens and padding."""

    def postprocess(self, model_outputs: Any, *args: Any, **how: Any) -> Json:
        config = self.model.generation_config
        ends = np.array([config.pad_token_id, *np.atleast_1d(config.eos_token_id)])
        (ids,) = model_outputs[0]["tokens"].numpy()  # one window for `generate`, which splits it itself
        length = np.flatnonzero(~np.isin(ids, ends)).max(initial=-1) + 1
        return {**super().postprocess(model_outputs, *args, **how), "tokens": ids[:length].tolist()}


class SpeechPipeline(MMSpecPipeline):
    """Transcription of audio with an encoder-decoder: Whisper, distil-whisper, Moonshine.

    Example:
        >>> pipe = MMSpecPipeline.from_pretrained("openai/whisper-tiny.en")  # doctest: +SKIP
        >>> print(pipe("meeting.mp3").text[0])  # doctest: +SKIP
    """

    def __call__(
        self,
        audio: object,
        *,
        return_timestamps: bool = False,
        language: str | None = None,
        task: str | None = None,
        prompt: str | None = None,
        batch_size: int = 1,
        seed: int | None = None,
        return_dict: bool = True,
        **settings: object,
    ) -> SpeechOutput | tuple[list[str]]:
        """Transcribe one recording or a list of recordings.

        Whisper reads 30 seconds at a time. It predicts the times of a longer recording, as with
        `return_timestamps`, and the next window begins at the last time (2212.04356, section 3.8). Such a
        recording is decoded alone, whatever the `batch_size`.

        Args:
            audio: a path, bytes, an open file, base64 or https URL of an audio or video file, or samples with
                their rate (`mmspec.media.load_audio`); a list is several recordings.
            return_timestamps: whether to find the times of segments (Whisper).
            language: language of the speech, for multilingual models; the model detects it if None.
            task: "transcribe" or "translate", for multilingual models.
            prompt: text that shows the spelling of names and the style (Whisper).
            batch_size: number of recordings decoded together.
            seed: seed for sampling; None draws one from torch's global generator.
            return_dict: False returns the tuple (text,).
            settings: keywords of transformers' `generate`: max_new_tokens, do_sample, temperature, ...
                Whisper samples only if `temperature` is passed and above 0.

        Returns:
            SpeechOutput(text, segments, stats, tokens, seconds).

        Raises:
            InputError: an argument cannot be used.
            MediaError: a recording cannot be read.
            PipelineBusyError: another call is running.
        """
        settings = self._settings(settings, language=language, task=task, prompt=prompt)
        if not isinstance(return_timestamps, bool):  # transformers also has "word"
            rule = (
                "must be True or False; times of words need attention weights, which mmspec does not return"
            )
            raise InputError("return_timestamps", return_timestamps, rule)
        if return_timestamps and self.model.config.model_type != "whisper":
            rule = f"must be False; {type(self.model).__name__} tells no times"
            raise InputError("return_timestamps", return_timestamps, rule)
        if not is_integer(batch_size) or batch_size < 1:
            raise InputError("batch_size", batch_size, "must be an integer of at least 1")
        extractor = self.processor.feature_extractor
        rate = extractor.sampling_rate
        sources = media_per_row(audio, "audio", 1, is_batch=False)[0]
        if not sources:
            raise InputError("audio", audio, "must have at least one recording")
        several = len(sources) > 1
        recordings = [
            load_audio(
                source,
                sampling_rate=rate,
                argument=f"audio[{index}]" if several else "audio",
                limits=self.media_limits,
            )
            for index, source in enumerate(sources)
        ]
        if self.tokenizer.pad_token is None:  # transformers' pipeline needs one for batches
            self.tokenizer.pad_token = self.tokenizer.eos_token
        parts: list[DecodingStats] = []
        loop = make_loop(self.accelerator, seed, parts.append)
        recognizer: Any = Recognizer(
            model=self.model,
            tokenizer=self.tokenizer,
            feature_extractor=extractor,
        )
        window = getattr(extractor, "n_samples", None)  # of Whisper; others read any length at once
        long = [index for index, each in enumerate(recordings) if window and len(each) > window]
        short = [index for index in range(len(recordings)) if index not in long]
        found: dict[int, Json] = {}
        with self._busy():
            for indices in filter(None, [short, *([index] for index in long)]):
                results = recognizer(
                    [{"raw": recordings[index], "sampling_rate": rate} for index in indices],
                    batch_size=batch_size,
                    **({"return_timestamps": True} if return_timestamps or indices[0] in long else {}),
                    generate_kwargs={**settings, "num_beams": 1, "custom_generate": loop},
                )
                found |= zip(indices, results, strict=True)
        stats = merge_stats(parts)
        stats.accelerator, stats.exactness = self.accelerator.name, self.accelerator.exactness
        ordered = [found[index] for index in range(len(recordings))]
        texts = [one["text"] for one in ordered]
        seconds = [len(samples) / rate for samples in recordings]
        segments = [
            segments_of(one["chunks"], length) if return_timestamps else []
            for one, length in zip(ordered, seconds, strict=True)
        ]
        output = SpeechOutput(texts, segments, stats, [one["tokens"] for one in ordered], seconds)
        return output if return_dict else (output.text,)

    def _settings(self, settings: Mapping[str, object], *, prompt: str | None, **more: object) -> Keywords:
        """Return the keywords for `generate`.

        Raises:
            InputError: a keyword is unknown, set by this pipeline, or not for this model; or the prompt and
                the output do not fit into the model's positions.
        """
        generate: Any = self.model.generate
        accepted = {*inspect.signature(generate).parameters}
        named = accepted - {"kwargs", "self"} - OWN - INSTEAD.keys()
        for name, value in settings.items():
            if name in INSTEAD and not (value is None or value == 1 and name.startswith("num_")):
                raise InputError(name, value, f"must be left out: {INSTEAD[name]}")
            if name in OWN or name not in {*named, *installed_fields(), *INSTEAD}:
                near = difflib.get_close_matches(name, sorted({*named, *installed_fields()}), n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                listed = ", ".join(sorted(named))
                rule = f"must be a field of transformers' GenerationConfig or one of {listed}{hint}"
                raise UnknownArgumentError("keyword", name, rule)
        given = {name: value for name, value in more.items() if value is not None}
        for name, value in given.items():
            if not getattr(self.model.generation_config, "is_multilingual", name in accepted):
                rule = f"must be None; {type(self.model).__name__} of this checkpoint has one language"
                raise InputError(name, value, rule)
        tokens: Any = settings.get("max_new_tokens")
        if tokens is not None and (not is_integer(tokens) or tokens < 1):
            raise InputError("max_new_tokens", tokens, "must be an integer of at least 1")
        if prompt:  # a client of the server may send an empty one
            if not hasattr(self.processor, "get_prompt_ids"):
                rule = f"must be None; {type(self.model).__name__} takes no prompt"
                raise InputError("prompt", prompt, rule)
            if not isinstance(prompt, str):
                raise InputError("prompt", prompt, "must be a string")
            given["prompt_ids"] = self.processor.get_prompt_ids(prompt, return_tensors="pt").to(self.device)
        ids: Any = given.get("prompt_ids", ())
        given |= self._room(tokens, len(ids))
        return {**settings, **given}

    def _room(self, tokens: int | None, prompt_tokens: int) -> Keywords:
        """Return `max_new_tokens` if its default has to be reduced, so that the output fits behind a prompt.

        Raises:
            InputError: the output does not fit.
        """
        config = self.model.generation_config
        positions = getattr(self.model.config, "max_target_positions", None)
        if positions is None:
            return {}
        # before the output: the start, for several languages the language and task, and a mark of no times
        room = positions - prompt_tokens - (4 if getattr(config, "is_multilingual", False) else 2)
        if room < 1:
            rule = f"must have at most {prompt_tokens + room - 1} tokens to fit the model's positions"
            raise InputError("prompt", prompt_tokens, rule)
        if tokens is not None and tokens > room:
            has = f"the prompt has {prompt_tokens} tokens and the model {positions} positions"
            raise InputError("max_new_tokens", tokens, f"must be at most {room}: {has}")
        usual = config.max_new_tokens or Recognizer._default_generation_config.max_new_tokens
        return {"max_new_tokens": room} if tokens is None and usual > room else {}

    def _examples(self, rows: int) -> Sequence[Call]:
        return ()  # encoder-decoders are not compiled

    def running_batch(self, rows: int = 8) -> Any:
        """Raise InputError: recordings are transcribed in calls of their own, window by window."""
        raise InputError("running_batch", rows, "is not available for speech models")
