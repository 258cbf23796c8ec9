"""Scores of texts against references, each with its interval, and questions with known answers.

BLEU, ROUGE-L and CIDEr are computed by sacrebleu, rouge-score and pycocoevalcap.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mmspec.errors import InputError, MissingDependencyError, how_to_install
from mmspec.evaluation.examples import FIRST_SEED, Example, scene_examples
from mmspec.evaluation.prompt_files import json_rows, read_prompt_file
from mmspec.evaluation.quality.intervals import Estimate, jackknife, proportion, within
from mmspec.registry import require_known
from mmspec.scenes import caption, questions, sample_scene
from mmspec.text_file import read_text

__all__ = [
    "METRICS",
    "Referenced",
    "chosen_metrics",
    "read_references",
    "scene_references",
    "score_texts",
    "word_error_rate",
]


@dataclass(frozen=True)
class Referenced:
    """A one-turn question, whose category is the task, and at least one reference answer."""

    example: Example
    references: tuple[str, ...]


def scene_references(count: int, seed: int = 0) -> list[Referenced]:
    """References of held-out scenes: a caption of each, and the answer to one question about it.

    Raises:
        InputError: `count` exceeds the number of scenes.
    """
    captions, asked = (scene_examples(task, count, seed) for task in ("caption", "question"))
    found = []
    for index, (described, question) in enumerate(zip(captions, asked, strict=True)):
        scene = sample_scene(FIRST_SEED + seed + index)
        answers = questions(scene, np.random.default_rng([scene.seed, 0xBE]), 1)
        found += [
            Referenced(described, (caption(scene),)),
            Referenced(question, (answers[0].answer,)),
        ]
    return found


def read_references(path: str | Path, count: int | None = None) -> list[Referenced]:
    """Read the first `count` questions with references from JSON lines or a JSON list; None reads all.

    A row has the format of `read_prompt_file` with one turn, and `references`: a string or a list of strings.

    Raises:
        InputError: the file is missing, or a line is invalid; the message contains its number.
    """
    path = Path(path)
    examples = read_prompt_file(path, count)
    lines = json_rows(path, read_text(path, "prompt file"))
    found = []
    for example, (where, entry) in zip(examples, lines, strict=False):
        if len(example.turns) != 1:
            raise InputError(f"{where}: turns", list(example.turns), "must have exactly one turn")
        given = entry.get("references") if isinstance(entry, dict) else None
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not texts or not all(isinstance(one, str) for one in texts):
            raise InputError(f"{where}: references", given, "must be a string, or a list of at least one")
        if not all(one.strip() for one in texts):
            raise InputError(f"{where}: references", given, "must not be empty")
        found.append(Referenced(example, tuple(texts)))
    return found


PACKAGES = {"exact": None, "bleu": "sacrebleu", "rouge": "rouge_score", "cider": "pycocoevalcap"}
METRICS = tuple(PACKAGES)
WORDS = re.compile(r"\w+(?:['-]\w+)*")


def chosen_metrics(names: str | None, default: Sequence[str]) -> list[str]:
    """Parse comma-separated metrics.

    Raises:
        InputError: an unknown metric.
        MissingDependencyError: the package of a metric is not installed.
    """
    asked = list(default) if names is None else [name.strip() for name in names.split(",")]
    for name in asked:
        require_known("--metrics", name, METRICS)
        package = PACKAGES[name]
        if package is not None and importlib.util.find_spec(package) is None:
            needs = package.replace("_", "-")
            raise MissingDependencyError(f"{name} needs {needs}: {how_to_install('eval')}")
    return [name for name in METRICS if name in asked]


def score_texts(
    texts: Sequence[str], references: Sequence[Sequence[str]], metrics: Sequence[str]
) -> dict[str, Estimate]:
    """Score texts with metrics of `METRICS`, against at least one reference for each text.

    Returns:
        `exact`: share of texts that equal one of their references, up to surrounding white space; `bleu`:
        corpus BLEU, 0 to 100 (Papineni et al., 2002); `rouge`: mean F-measure of the longest common
        subsequence with the best reference, 0 to 1 (Lin, 2004); `cider`: CIDEr-D, 0 to 10 (Vedantam et al.,
        1411.5726), on lower-case words instead of PTB tokens, which need Java. CIDEr's weights are computed
        from these references, so that it is comparable only for the same references.

    Raises:
        InputError: the numbers of texts and references differ, or there are fewer than three texts.
    """
    if len(texts) != len(references) or len(texts) < 3:
        got = f"{len(texts)} texts with {len(references)} lists of references"
        raise InputError("texts", got, "must be at least 3, with references for each")
    if not all(references):
        raise InputError("references", list(map(list, references)), "must have at least one for each text")
    return {name: SCORES[name](texts, references) for name in metrics}


def word_error_rate(references: Sequence[str], texts: Sequence[str]) -> float:
    """Word error rate of transcripts, without regard to case and punctuation.

    Raises:
        MissingDependencyError: jiwer is not installed.
    """
    try:
        import jiwer
    except ImportError as error:
        raise MissingDependencyError(f"word error rates need jiwer: {how_to_install('eval')}") from error
    plain = jiwer.Compose(
        [
            jiwer.ToLowerCase(),
            jiwer.RemovePunctuation(),
            jiwer.RemoveMultipleSpaces(),
            jiwer.Strip(),
            jiwer.ReduceToListOfListOfWords(),
        ]
    )
    how = {"reference_transform": plain, "hypothesis_transform": plain}
    return float(jiwer.wer(list(references), list(texts), **how))


def _exact(texts: Sequence[str], references: Sequence[Sequence[str]]) -> Estimate:
    right = [
        text.strip() in {one.strip() for one in some} for text, some in zip(texts, references, strict=True)
    ]
    return proportion(sum(right), len(right))


def _bleu(texts: Sequence[str], references: Sequence[Sequence[str]]) -> Estimate:
    from sacrebleu.metrics.bleu import BLEU

    most = max(map(len, references))
    streams = [[some[index] if index < len(some) else None for some in references] for index in range(most)]

    def score(rows: Tensor) -> list[float]:
        chosen = rows.tolist()
        bleu = BLEU().corpus_score(
            [texts[row] for row in chosen], [[stream[row] for row in chosen] for stream in streams]
        )
        return [bleu.score]

    return within(jackknife(score, len(texts))[0], 0.0, 100.0)


def _rouge(texts: Sequence[str], references: Sequence[Sequence[str]]) -> Estimate:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    scores = [
        scorer.score_multi(some, text)["rougeL"].fmeasure
        for text, some in zip(texts, references, strict=True)
    ]
    values = torch.tensor(scores, dtype=torch.float64)
    return within(jackknife(lambda rows: [float(values[rows].mean())], len(texts))[0], 0.0, 1.0)


def _cider(texts: Sequence[str], references: Sequence[Sequence[str]]) -> Estimate:
    from pycocoevalcap.cider.cider import Cider

    said = {row: [_words(text)] for row, text in enumerate(texts)}
    right = {row: [_words(one) for one in some] for row, some in enumerate(references)}

    def score(rows: Tensor) -> list[float]:
        chosen = rows.tolist()
        found, _ = Cider().compute_score(
            {row: right[row] for row in chosen}, {row: said[row] for row in chosen}
        )
        return [float(found)]

    return within(jackknife(score, len(texts))[0], 0.0, 10.0)


def _words(text: str) -> str:
    return " ".join(WORDS.findall(text.lower()))


SCORES: dict[str, Callable[[Sequence[str], Sequence[Sequence[str]]], Estimate]] = {
    "exact": _exact,
    "bleu": _bleu,
    "rouge": _rouge,
    "cider": _cider,
}
