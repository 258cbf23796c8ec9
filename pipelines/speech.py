"""SpeechPipeline: transcription of audio by Whisper, Moonshine and other speech encoder-decoders.

transformers splits long audio into windows, calls `generate` for each, and reads timestamps from the output.
mmspec loads the audio and decodes the windows.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import (
    AutomaticSpeechRecognitionPipeline,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING

from mmspec.accelerator import Call
from mmspec.core.statistics import DecodingStats, merge_stats
from mmspec.errors import InputError
from mmspec.media import load_audio
from mmspec.open_types import Json, Keywords
from mmspec.pipelines.base import MMSpecPipeline
from mmspec.pipelines.custom_generate import make_loop
from mmspec.pipelines.outputs import SpeechOutput
from mmspec.pipelines.prompts import media_per_row
from mmspec.registry import did_you_mean
from mmspec.transcripts import Segment
from mmspec.validation import is_integer

__all__ = ["SpeechPipeline", "is_speech_model"]

#: Keywords of `generate` that this pipeline sets.
OWN = {"custom_generate", "generation_config", "inputs", "num_beams", "return_dict_in_generate", "streamer"}


def is_speech_model(config: PreTrainedConfig) -> bool:
    """Whether a config belongs to an encoder-decoder that transcribes speech."""
    return bool(config.is_encoder_decoder) and type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING


def segment_of(chunk: Json) -> Segment:
    """Make a segment of a chunk of transformers' pipeline."""
    start, end = chunk["timestamp"]
    return Segment(start, end, chunk["text"])


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

        Audio of more than 30 seconds is decoded window by window, as by transformers (Whisper, 2212.04356,
        section 3.8).

        Args:
            audio: a path, bytes, BytesIO, base64 or https URL of an audio or video file, or samples with
                their rate (`mmspec.media.load_audio`); a list is several recordings.
            return_timestamps: whether to find the times of segments (Whisper).
            language: language of the speech, for multilingual models; the model detects it if None.
            task: "transcribe" or "translate", for multilingual models.
            prompt: text before the recording, for names and style (Whisper).
            batch_size: number of recordings decoded together.
            seed: seed for sampling; None draws one from torch's global generator.
            return_dict: False returns the tuple (text,).
            settings: keywords of transformers' `generate`: max_new_tokens, do_sample, temperature, ...

        Returns:
            SpeechOutput(text, segments, stats, tokens).

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
        rate = self.processor.feature_extractor.sampling_rate
        sources = media_per_row(audio, "audio", 1, is_batch=False)[0]
        if not sources:
            raise InputError("audio", audio, "must have at least one recording")
        several = len(sources) > 1
        recordings = [
            {
                "raw": load_audio(
                    source,
                    sampling_rate=rate,
                    argument=f"audio[{index}]" if several else "audio",
                    limits=self.media_limits,
                ),
                "sampling_rate": rate,
            }
            for index, source in enumerate(sources)
        ]
        if self.tokenizer.pad_token is None:  # transformers' pipeline needs one for batches
            self.tokenizer.pad_token = self.tokenizer.eos_token
        parts: list[DecodingStats] = []
        loop = make_loop(self.accelerator, seed, parts.append)
        recognizer: Any = Recognizer(
            model=self.model,
            tokenizer=self.tokenizer,
            feature_extractor=self.processor.feature_extractor,
        )
        with self._busy():
            found = recognizer(
                recordings,
                batch_size=batch_size,
                **({"return_timestamps": True} if return_timestamps else {}),
                generate_kwargs={**settings, "num_beams": 1, "custom_generate": loop},
            )
        stats = merge_stats(parts)
        stats.accelerator, stats.exactness = self.accelerator.name, self.accelerator.exactness
        texts = [one["text"] for one in found]
        segments = [list(map(segment_of, one.get("chunks", ()))) for one in found]
        output = SpeechOutput(texts, segments, stats, [one["tokens"] for one in found])
        return output if return_dict else (output.text,)

    def _settings(self, settings: Mapping[str, object], *, prompt: str | None, **more: object) -> Keywords:
        """Return the keywords for `generate`.

        Raises:
            InputError: a keyword is unknown, set by this pipeline, or not for this model.
        """
        generate: Any = self.model.generate
        accepted = {*inspect.signature(generate).parameters}
        known = (accepted | GenerationConfig().to_dict().keys()) - {"kwargs", "self"} - OWN
        for name, value in settings.items():
            if name not in known:
                raise InputError(
                    name, value, f"is not a setting of this pipeline; a setting {did_you_mean(name, known)}"
                )
        given = {name: value for name, value in more.items() if value is not None}
        for name, value in given.items():
            if not getattr(self.model.generation_config, "is_multilingual", name in accepted):
                rule = f"must be None; {type(self.model).__name__} of this checkpoint has one language"
                raise InputError(name, value, rule)
        if prompt is not None:
            if not hasattr(self.processor, "get_prompt_ids"):
                raise InputError(
                    "prompt", prompt, f"must be None; {type(self.model).__name__} takes no prompt"
                )
            given["prompt_ids"] = self.processor.get_prompt_ids(prompt, return_tensors="pt").to(self.device)
        return {**settings, **given}

    def _examples(self, rows: int) -> Sequence[Call]:
        return ()  # encoder-decoders are not compiled

    def running_batch(self, rows: int = 8) -> Any:
        """Raise InputError: recordings are transcribed in calls of their own, window by window."""
        raise InputError("running_batch", rows, "is not available for speech models")
