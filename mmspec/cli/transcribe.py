"""`mmspec transcribe`: transcripts of recordings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspec.cli.console import Interruptible, note, print_result
from mmspec.cli.loading import choose, load_pipeline
from mmspec.cli.options import Accelerator, ModelOptions, unpack_options
from mmspec.errors import InputError, MediaError
from mmspec.open_types import Json, Keywords
from mmspec.text_file import read_text
from mmspec.transcripts import TIMED, TranscriptFormat, write_transcript

if TYPE_CHECKING:
    from mmspec.pipelines import SpeechOutput, SpeechPipeline

__all__ = ["transcribe"]


@unpack_options
def transcribe(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder or hub id.")],
    audio: Annotated[
        list[str], typer.Argument(metavar="AUDIO...", help="Paths or https URLs of audio or video files.")
    ],
    accelerator: Accelerator = None,
    form: Annotated[TranscriptFormat, typer.Option("--format", help="Format of the transcripts.")] = (
        TranscriptFormat.TEXT
    ),
    timestamps: Annotated[
        bool,
        typer.Option("--timestamps", help="Add the times of segments to JSON; srt and vtt always have them."),
    ] = False,
    language: Annotated[
        str | None, typer.Option(help="Language of the speech, for multilingual models.")
    ] = None,
    translate: Annotated[
        bool, typer.Option("--translate", help="Translate to English, for multilingual models.")
    ] = False,
    prompt: Annotated[
        str | None, typer.Option(help="Text that shows the spelling of names and the style (Whisper).")
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Run plain decoding too; exit with 1 unless the text is the same."),
    ] = False,
    reference: Annotated[
        Path | None,
        typer.Option(help="Text file with the words of the recording, for its word error rate."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for one file per recording.")] = None,
    *,
    how: ModelOptions,
) -> None:
    """Transcribe recordings with Whisper or another speech model.

    Of several recordings, one that cannot be decoded is skipped, and the command exits with 1 at the end.

    Example:
        mmspec transcribe openai/whisper-tiny.en meeting.mp3
        mmspec transcribe openai/whisper-large-v3 talk.mp4 --format srt --language en
    """
    words = None if reference is None else read_text(reference, "--reference")
    if words is not None and len(audio) != 1:
        raise InputError("--reference", str(reference), "needs exactly one recording")
    files = [None if out is None else transcript_file(out, path, form) for path in audio]
    check_recordings(audio, files)
    choice = choose(accelerator, model, how.drafter)
    note(f"loading {model}")
    from mmspec.evaluation.quality.text_scores import word_error_rate
    from mmspec.pipelines import SpeechPipeline

    pipe = load_pipeline(SpeechPipeline, model, how)
    choice = choose(accelerator, model, how.drafter, pipe.default_accelerator)
    settings: Keywords = {
        "return_timestamps": timestamps or form in TIMED,
        "language": language,
        "task": "translate" if translate else None,
        "prompt": prompt,
        "seed": how.seed,
    }
    records: list[Json] = []
    with Interruptible() as block:
        for path, file in zip(audio, files, strict=True):
            pipe.set_accelerator(choice.name, **choice.options)
            try:
                output = transcribed(pipe, path, settings)
            except MediaError as error:
                if len(audio) == 1:
                    raise
                note(f"skipped: {error}")
                records.append({"audio": path, "error": str(error)})
                continue
            record: Json = {"audio": path, "text": output.text[0].strip()}
            record["segments"] = [vars(segment) for segment in output.segments[0]]
            record |= {"seconds": output.stats.seconds, "target_forwards": output.stats.target_forwards}
            remark = f"{output.stats}, {output.stats.seconds:.2f} s"
            if compare:
                plain = transcribed(pipe.set_accelerator("none"), path, settings)
                record["identical"] = (plain.text, plain.segments) == (output.text, output.segments)
                same = "the same text as" if record["identical"] else "NOT the text of"
                remark += f"; {same} plain decoding, which took {plain.stats.seconds:.2f} s"
            if words is not None:
                record["word_error_rate"] = word_error_rate([words], [record["text"]])
                remark += f"; word error rate {record['word_error_rate']:.1%}"
            records.append(record)
            text = write_transcript(output.text[0], output.segments[0], form)
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text + "\n", encoding="utf-8")
                note(f"{file}: {remark}")
            elif not how.as_json:
                typer.echo(text)
                note(remark)
    if how.as_json:
        print_result(records, "", as_json=True)
    is_good = all(record.get("identical", "error" not in record) for record in records)
    block.finish(0 if is_good else 1)


def transcript_file(folder: Path, recording: str, form: TranscriptFormat) -> Path:
    """Path of the transcript of a recording, a path or URL."""
    return folder / f"{Path(recording).stem}.{'txt' if form is TranscriptFormat.TEXT else form}"


def check_recordings(recordings: Sequence[str], files: Sequence[Path | None]) -> None:
    """Check, before a model is loaded, what can be known of the recordings without decoding them.

    Args:
        recordings: paths and URLs; URLs are not fetched.
        files: the files of their transcripts, or None.

    Raises:
        InputError: a local file does not exist, or two recordings have the same transcript file.
        MediaError: a local file cannot be read, or has an unsupported format.
    """
    from mmspec.media import read_audio_file

    first: dict[Path, str] = {}
    for path, file in zip(recordings, files, strict=True):
        if file is not None and first.setdefault(file, path) is not path:
            rule = f"needs recordings of different names; {first[file]} has the same file {file}"
            raise InputError("--out", path, rule)
        if "://" not in path:
            if not Path(path).exists():
                raise InputError("AUDIO", path, "must be a file or a URL; there is no such file")
            read_audio_file(path, argument=path)


def transcribed(pipe: SpeechPipeline, path: str, settings: Keywords) -> SpeechOutput:
    """Transcribe one recording; errors name its file."""
    from mmspec.media import load_audio

    rate = pipe.processor.feature_extractor.sampling_rate
    samples = load_audio(path, sampling_rate=rate, argument=path, limits=pipe.media_limits)
    output: Any = pipe((samples, rate), **settings)
    found: SpeechOutput = output
    return found
