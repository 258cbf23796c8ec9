"""`mmspec caption`: descriptions of images, or answers about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspec.cli.console import Interruptible, note, print_result
from mmspec.cli.loading import announce, choose, load_pipeline
from mmspec.cli.many import PromptFile, RayOptions, decode_many, located
from mmspec.cli.options import Accelerator, Model, ModelOptions, Temperature, unpack_options
from mmspec.errors import InputError
from mmspec.open_types import Json, Keywords, Processor

if TYPE_CHECKING:
    from mmspec.evaluation.contenders import Contender
    from mmspec.evaluation.examples import Example
    from mmspec.pipelines import TextOutput
    from mmspec.pipelines.text_stream import TextDeltas

__all__ = ["caption"]

PROMPT = "Describe the image."
WARM_UP_TOKENS = 8
FIGURES = (  # of the stats, in a record
    *("accelerator", "exactness", "target_forwards", "acceptance_length", "acceptance_rate"),
    *("seconds", "tokens_per_second"),
)


@unpack_options
def caption(
    model: Model = None,
    images: Annotated[
        list[str] | None,
        typer.Argument(metavar="IMAGE...", help="Paths or https URLs; by default a held-out scene."),
    ] = None,
    prompt: Annotated[str, typer.Option(help="Prompt for every image.")] = PROMPT,
    accelerator: Accelerator = None,
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Maximum number of tokens per image.")] = 128,
    temperature: Temperature = 0.0,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text while it is generated.")] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Run plain decoding too; exit with 1 unless the tokens are the same."),
    ] = False,
    figure: Annotated[
        Path | None,
        typer.Option(
            help="Image file to write: the first image beside its text, with draft tokens in another color."
        ),
    ] = None,
    prompt_file: PromptFile = None,
    out: Annotated[Path | None, typer.Option(help="With --ray: folder for the texts.")] = None,
    *,
    many: RayOptions,
    how: ModelOptions,
) -> None:
    """Describe images, or answer a question about them.

    Example:
        mmspec caption assets/scenes-llava assets/images/scene.png --compare
        mmspec caption path/to/model path/to/photo.jpg --prompt "What is this?"
        mmspec caption --ray --prompt-file assets/prompts/mmspec/mmspec.jsonl --out texts
    """
    source = announce(model)
    from mmspec.evaluation.contenders import contender
    from mmspec.evaluation.examples import own_examples, scene_examples
    from mmspec.evaluation.prompt_files import read_prompt_file
    from mmspec.many.work import Item
    from mmspec.pipelines import VisionLanguagePipeline

    choice = choose(accelerator, source, how.drafter)
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    if prompt_file is not None and images:
        raise InputError("--prompt-file", prompt_file, "cannot be combined with images")
    if prompt_file is not None:
        examples = read_prompt_file(prompt_file)
    elif images:
        examples = own_examples([prompt], images)
    elif many.ray:
        raise InputError("images or --prompt-file", None, "must be given with --ray")
    else:
        examples = [replace(example, turns=(prompt,)) for example in scene_examples("caption", 1, how.seed)]
        seen = examples[0].identifier.replace("scene", "scenes --seed")
        note(f"no image given: using a held-out scene (mmspec {seen} --count 1 shows it)")
    if many.ray:
        for option, given in (("--compare", compare), ("--stream", stream), ("--figure", figure)):
            if given:
                raise InputError(option, given, "cannot be combined with --ray")
        if out is None:
            raise InputError("--out", None, "must be a folder with --ray")
        items = [
            Item(index, one.turns[0], tuple(map(located, one.images)), later=one.turns[1:])
            for index, one in enumerate(examples)
        ]
        found = decode_many(source, choice, items, settings, out, many, how, draws=False)
        print_result(found, f"{out}: {len(found)} texts", how.as_json)
        return
    if out is not None:
        raise InputError("--out", str(out), "needs --ray")
    pipe = load_pipeline(VisionLanguagePipeline, source, how)
    choice = choose(accelerator, source, how.drafter, pipe.default_accelerator)
    plain = contender(pipe, "none")
    accelerated = contender(pipe, choice.name, **choice.options)

    settings |= {"seed": how.seed}
    records: list[Json] = []
    with Interruptible() as block:
        if compare:  # warm-up: the first call of a process takes longer
            short = {**settings, "max_new_tokens": min(WARM_UP_TOKENS, max_new_tokens)}
            for each in (accelerated, plain):
                list(_decode(each, examples[0], short))
        for example in examples:
            said, outputs = _decode(accelerated, example, settings, streamed=stream and not how.as_json), []
            for _ in example.turns:
                if not how.as_json and len(examples) > 1:
                    typer.echo(f"{example.identifier}: ", nl=False)
                outputs.append(next(said))
                if not how.as_json:
                    typer.echo("" if stream else outputs[-1].text[0])
            expected = list(_decode(plain, example, settings)) if compare else [None] * len(outputs)
            for number, (output, other) in enumerate(zip(outputs, expected, strict=True)):
                records.append(_record(example, number, output, other))
                if not how.as_json:
                    note(_remark(output, other))
            if figure is not None and example is examples[0]:
                _draw(figure, example, outputs[0], pipe.tokenizer)
    if how.as_json:
        print_result(records, "", as_json=True)
    block.finish(0 if all(record.get("identical", True) for record in records) else 1)


@dataclass
class Echo:
    """Streamer of transformers that writes complete characters to stdout."""

    tokenizer: Processor
    deltas: TextDeltas | None = None

    def put(self, tokens: Any) -> None:
        """Write the text of new tokens; the first call has the prompt, which is not written."""
        from mmspec.pipelines.text_stream import TextDeltas

        if self.deltas is None:
            self.deltas = TextDeltas(self.tokenizer)
        else:
            typer.echo(self.deltas.add(tokens.tolist()), nl=False)

    def end(self) -> None:
        """Write the remaining text."""
        if self.deltas is not None:
            typer.echo(self.deltas.finish(), nl=False)
        self.deltas = None


def _decode(
    contender: Contender, example: Example, settings: Keywords, *, streamed: bool = False
) -> Iterator[TextOutput]:
    """Decode the turns of one example; with `streamed`, write their text to stdout."""
    from mmspec.evaluation.contenders import converse

    pipe = contender.enter()
    return converse(pipe, example, streamer=Echo(pipe.tokenizer) if streamed else None, **settings)


def _draw(path: Path, example: Example, output: TextOutput, tokenizer: Processor) -> None:
    """Draw the image beside its text, with draft tokens in another color."""
    from mmspec.evaluation.tables import draw_decoding
    from mmspec.media import load_image
    from mmspec.pipelines.text_stream import TextDeltas

    deltas = TextDeltas(tokenizer)
    pieces = [deltas.add([token]) for token in output.tokens[0]]
    stats = output.stats
    remark = f"{stats.new_tokens[0]} tokens in {stats.target_forwards} forward passes"
    draw_decoding(path, load_image(example.images[0]), pieces, output.drafted[0], remark)


def _record(example: Example, number: int, output: TextOutput, expected: TextOutput | None) -> Json:
    stats = output.stats
    record: Json = {"image": example.identifier, "prompt": example.turns[number]}
    record |= {"turn": number} if len(example.turns) > 1 else {}
    record["text"] = output.text[0]
    record |= {"finish_reason": output.finish_reasons[0], "new_tokens": stats.new_tokens[0]}
    record |= {name: getattr(stats, name) for name in FIGURES}
    if expected is not None:
        plain = expected.stats
        record["identical"] = output.tokens == expected.tokens
        record["plain"] = {"target_forwards": plain.target_forwards, "seconds": plain.seconds}
    return record


def _remark(output: TextOutput, expected: TextOutput | None) -> str:
    if expected is None:
        return str(output.stats)
    same = "the same tokens as" if output.tokens == expected.tokens else "NOT the tokens of"
    plain = f"{expected.stats.target_forwards} forward passes and {expected.stats.seconds:.2f} s"
    return f"{output.stats}, {output.stats.seconds:.2f} s; {same} plain decoding, which took {plain}"
