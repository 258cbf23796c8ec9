"""Structured output of a language model: 30 JSON schemas with drafts, against free text on the same prompts.

    python -m benchmarks.structured_output runs/smollm2
    python -m benchmarks.structured_output runs/smollm2 --accelerator copy --max-new-tokens 96 --rows 10

The folder is that of `python -m benchmarks.real_language model`. Every answer is validated by `jsonschema`
and compared with plain decoding under the same masks, token for token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import jsonschema
import typer

from mmspec import MMSpecPipeline
from mmspec.cli.console import note
from mmspec.pipelines.response_format import grammar_processor

SCHEMAS = Path(__file__).with_name("schemas.jsonl")


class Answers(NamedTuple):
    """Answers to all prompts.

    Attributes:
        texts, tokens, reasons: one for each prompt.
        forwards: forward passes of each row, the prefill included.
    """

    texts: list[str]
    tokens: list[list[int]]
    reasons: list[str]
    forwards: list[int]

    @property
    def tokens_per_forward(self) -> float:
        """Tokens of all answers for each forward pass of their rows."""
        return sum(map(len, self.tokens)) / sum(self.forwards)


def read_schemas() -> list[dict[str, Any]]:
    """Return 30 schemas, each with its name, a prompt, a valid and an invalid value."""
    return [json.loads(line) for line in SCHEMAS.read_text(encoding="utf-8").splitlines()]


def answer(
    pipe: Any, cases: Sequence[dict[str, Any]], structured: bool, rows: int, **settings: Any
) -> Answers:
    """Answer all prompts, in batches of a number of rows."""
    answers = Answers([], [], [], [])
    for start in range(0, len(cases), rows):
        some = cases[start : start + rows]
        formats = [format_of(case) for case in some] if structured else None
        output = pipe([case["prompt"] for case in some], response_format=formats, **settings)
        answers.texts.extend(output.text)
        answers.tokens.extend(output.tokens)
        answers.reasons.extend(output.finish_reasons)
        answers.forwards.extend(rounds + 1 for rounds in output.stats.rounds)
    return answers


def format_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return the response format of a case, as OpenAI's clients send it."""
    return {"type": "json_schema", "json_schema": {"name": case["name"], "schema": case["schema"]}}


def is_valid(text: str, case: dict[str, Any]) -> bool:
    """Whether a text is JSON of the case's schema."""
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    try:
        jsonschema.validate(json.loads(text), case["schema"], format_checker=checker)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def mask_times(tokenizer: Any, cases: Sequence[dict[str, Any]], answers: Answers) -> list[float]:
    """Return the seconds that a matcher takes for each token of the answers."""
    found = []
    for case, tokens in zip(cases, answers.tokens, strict=True):
        (grammar,) = grammar_processor(format_of(case), tokenizer).grammars
        assert grammar is not None
        matcher = grammar.start()
        for count in range(len(tokens)):
            started = perf_counter()
            matcher.after(tuple(tokens[:count]))
            found.append(perf_counter() - started)
    return found


def main(
    model: Annotated[str, typer.Argument(help="Folder of a language model.")],
    accelerator: Annotated[str, typer.Option(help="Accelerator to compare with plain decoding.")] = "copy",
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 96,
    rows: Annotated[int, typer.Option(help="Prompts that are decoded together.")] = 10,
    cases: Annotated[int, typer.Option(help="Number of schemas.")] = 30,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
) -> None:
    """Print tokens per forward pass, valid answers and equal answers."""
    chosen = read_schemas()[:cases]
    settings = {"temperature": temperature, "seed": 0, "max_new_tokens": max_new_tokens}
    pipe: Any = MMSpecPipeline.from_pretrained(model, accelerator="none")
    plain: dict[bool, Answers] = {}
    print("| accelerator | output | tokens/forward | valid | cut | equal to plain |")
    print("|---|---|---|---|---|---|")
    for name in ["none", accelerator]:
        pipe.set_accelerator(name, **({} if name == "none" else {"length": "fixed"}))  # whatever the load
        for structured in (True, False):
            found = answer(pipe, chosen, structured, rows, **settings)
            same = plain.setdefault(structured, found)
            equal = sum(one == other for one, other in zip(found.tokens, same.tokens, strict=True))
            cut = found.reasons.count("length")
            valid = sum(map(is_valid, found.texts, chosen)) if structured else "-"
            kind = "JSON" if structured else "free text"
            row = f"| {name} | {kind} | {found.tokens_per_forward:.2f} | {valid} | {cut} | {equal} |"
            print(row, flush=True)
            if structured:
                for case, text in zip(chosen, found.texts, strict=True):
                    if not is_valid(text, case):
                        note(f"{case['name']}: not valid: {text}")
    times = mask_times(pipe.tokenizer, chosen, plain[True])
    print(f"time per mask: median {median(times) * 1e3:.3f} ms, mean {fmean(times) * 1e3:.3f} ms")


if __name__ == "__main__":
    typer.run(main)
