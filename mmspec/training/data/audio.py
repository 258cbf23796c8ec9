"""Training data of drafters for speech encoder-decoders: clips of audio and their transcripts."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING

from mmspec.core.interfaces import Request
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError, MediaError
from mmspec.media import load_audio
from mmspec.open_types import Json, Keywords, Processor
from mmspec.targets import CausalTarget
from mmspec.targets.admission import places_of
from mmspec.targets.encoder_decoder import ENCODED
from mmspec.text_file import json_lines, read_text
from mmspec.training.data.rows import DamagedFiles, check_columns, check_count, read_all
from mmspec.training.data.sequences import DrafterBatch, TrainingExample, Trial

__all__ = ["AudioRows", "Clip", "hears", "read_clips"]

STAGE = 14
TRIAL_ROWS, TRIAL_TOKENS = 4, 96
KEPT = 640  # clips whose encoder states stay in memory, 2.3 MB each for Whisper tiny
FORM = 'must be {"audio": path}, or {"audio": path, "text": transcript}'


def hears(config: PreTrainedConfig) -> bool:
    """Whether a config belongs to an encoder-decoder that transcribes speech."""
    return bool(config.is_encoder_decoder) and type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING


@dataclass(frozen=True)
class Clip:
    """A clip, an input of `load_audio`; its transcript, if known; and its name in messages."""

    audio: object
    text: str | None
    where: str


def read_clips(rows: str | Path | Iterable[Mapping[str, object]], *, with_text: bool) -> list[Clip]:
    """Read clips from a JSONL file, or from an iterable of rows: `{"audio": path, "text": transcript}`.

    Args:
        rows: the file, which paths are relative to; from Python, rows may have any input of `load_audio`.
        with_text: whether each row must have a text.

    Raises:
        InputError: rows cannot be used.
    """
    folder = Path()
    named: Iterable[tuple[str, Any]]
    if isinstance(rows, str | Path):
        folder, text = Path(rows).parent, read_text(Path(rows), "data", "must be a JSONL file")
        named = json_lines(text, "data, line {}".format, FORM)
    else:
        named = ((f"data[{index}]", row) for index, row in enumerate(rows))

    def read(row: Any, where: str) -> Clip:
        if not isinstance(row, Mapping) or row.get("audio") is None:
            raise InputError(where, row, FORM)
        check_columns(row, ("audio", "text", "voice", "rate"), where, FORM)
        audio, text = row["audio"], row.get("text")
        if isinstance(audio, str | Path):
            audio = folder / audio
            if not audio.is_file():
                raise InputError(where, str(audio), "must have an audio file that exists")
        if with_text and not (isinstance(text, str) and text.strip()):
            raise InputError(where, text, "must have a text, unless the target transcribes (regenerate)")
        return Clip(audio, text, where)

    return read_all(named, read)


class AudioRows:
    """Training data from clips; the last four are held out.

    The encoder reads a clip once, as long as its output stays in memory.

    Args:
        target: a speech encoder-decoder.
        processor: its feature extractor and tokenizer.
        clips: clips that fit the encoder, 30 seconds for Whisper.
        batch_size: number of sequences per step and process.
        seed: seed of the random rows of each step.
        regenerate: maximum length, in tokens, of transcripts by the target, which replace those of the
            clips; 0 keeps the latter.

    Raises:
        InputError: there are too few clips.
    """

    def __init__(
        self,
        target: CausalTarget,
        processor: Processor,
        clips: Sequence[Clip],
        batch_size: int,
        seed: int,
        regenerate: int = 0,
    ) -> None:
        check_count(clips, TRIAL_ROWS)
        self.target, self.processor, self.regenerate = target, processor, regenerate
        self.batch_size, self.seed = batch_size, seed
        self.rows, self.held_out = clips[:-TRIAL_ROWS], clips[-TRIAL_ROWS:]
        self.damaged = DamagedFiles(len(clips))
        self.places = places_of(target.model)  # noise can make Whisper repeat a word up to the last place
        self.example = functools.lru_cache(KEPT)(self._example)

    @property
    def left_out(self) -> Json:
        """Rows that were drawn but skipped, for the record of the training."""
        return {"damaged": sorted(self.damaged.found.values())} if self.damaged.found else {}

    def batch(self, step: int, process: int) -> DrafterBatch:
        rng = np.random.default_rng([self.seed, STAGE, step, process])
        drawn = rng.integers(len(self.rows), size=self.batch_size)
        return DrafterBatch(tuple(self.opened(int(row)) for row in drawn), int(rng.integers(2**62)))

    def trial(self) -> Trial:
        requests = []
        for clip in self.held_out:
            example = self.read(clip)
            prompt = example.inputs["input_ids"][:, : example.answer]
            requests.append(Request({**example.inputs, "input_ids": prompt}))
        return Trial(requests, Sampler(), TRIAL_TOKENS, frozenset(self.ends))

    def learnt_texts(self) -> Iterator[Tensor]:
        """Yield the tokens [n] of the texts of all rows that are not held out, end tokens included."""
        for row in self.rows:
            yield self.tokens(row)[0]

    @property
    def ends(self) -> list[int]:
        end = self.target.model.generation_config.eos_token_id
        return end if isinstance(end, list) else [end]

    def tokens(self, clip: Clip) -> Tensor:
        """[1, n] tokens of a clip's text, with the end token."""
        ids = self.processor.tokenizer(clip.text, add_special_tokens=False)["input_ids"]
        return torch.tensor([[*ids, self.ends[0]]], device=self.target.device)

    def opened(self, index: int) -> TrainingExample:
        """The sequence of a row; of the next one, with a warning, if its audio cannot be read.

        Raises:
            MediaError: too many clips cannot be read.
        """
        for place in range(index, index + len(self.rows)):
            example = self.example(place % len(self.rows))
            if example is not None:
                return example
        raise MediaError("data", f"{len(self.rows)} rows", "must have a row with audio that can be read")

    def _example(self, index: int) -> TrainingExample | None:
        row = self.rows[index]
        return self.damaged.opened(row.where, lambda: self.read(row))

    def read(self, clip: Clip) -> TrainingExample:
        """Return the sequence of a clip: the decoder's prompt and the transcript, and the encoder's output.

        Raises:
            MediaError: the clip cannot be read, or is too long.
        """
        extractor = self.processor.feature_extractor
        name = f"{clip.where}: {clip.audio}" if isinstance(clip.audio, Path) else clip.where
        samples = load_audio(clip.audio, sampling_rate=extractor.sampling_rate, argument=name)
        most = getattr(extractor, "chunk_length", None)
        if most is not None and len(samples) > most * extractor.sampling_rate:
            seconds = f"{len(samples) / extractor.sampling_rate:.1f} seconds"
            raise MediaError(name, seconds, f"must last at most {most} seconds")
        inputs = extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="pt")
        prompt, states, reply = self.heard(
            {name: value.to(self.target.device) for name, value in inputs.items()}
        )
        reply = reply if self.regenerate else self.tokens(clip)
        ids = torch.cat([prompt, reply], 1)[:, : self.places]
        return TrainingExample({"input_ids": ids, ENCODED: states}, prompt.shape[1])

    @torch.no_grad()
    def heard(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the decoder's prompt [1, P], the encoder's output [1, S, d] and the target's reply [1, n].

        `generate` prepares the prompt and decodes greedily: one token if the reply is not used, because
        Whisper's cannot return none.
        """
        found: list[tuple[Tensor, Tensor, Tensor]] = []

        def keep(model: PreTrainedModel, prompt: Tensor, **how: Any) -> Tensor:
            owner: Any = type(model)
            tokens: Tensor = owner._sample(model, prompt, **how)
            found.append((prompt, how[ENCODED].last_hidden_state, tokens[:, prompt.shape[1] :]))
            return tokens

        how: Keywords = {"max_new_tokens": self.regenerate or 1, "do_sample": False, "num_beams": 1}
        self.target.model.generate(**inputs, **how, custom_generate=keep)
        return found[0]
