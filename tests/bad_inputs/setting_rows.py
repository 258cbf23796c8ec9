"""Bad settings as data: rows 39 to 48."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from mmspec.errors import InputError, MMSpecError, NumericalError, UnknownArgumentError
from tests.bad_inputs.refusals import Row

NAN, INF = float("nan"), float("inf")
BEAMS = GenerationConfig(num_beams=2)


def setting(number: int, name: str, value: object, *expected: str, **others: Any) -> Row:
    shown = repr(value)[:24]
    return Row(
        number,
        f"{name}={shown}",
        lambda bench: bench.vlm("red", **{"max_new_tokens": 4, name: value, **others}),
        name,
        tuple(expected),
    )


def method(number: int, title: str, argument: str, name: Any, *expected: str, **options: Any) -> Row:
    error: type[MMSpecError] = UnknownArgumentError if argument.startswith("option") else InputError
    return Row(
        number,
        title,
        lambda bench: bench.text.set_accelerator(name, **options),
        argument,
        tuple(expected),
        error,
    )


class Returns(LogitsProcessor, StoppingCriteria):  # type: ignore[misc]
    """A callback that returns what it was made with, or calls it."""

    def __init__(self, result: object) -> None:
        self.result = result

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return self.result(scores) if callable(self.result) else self.result


def callback(name: str, keyword: str, result: object, *expected: str) -> Row:
    return Row(
        48,
        f"{keyword}: {name}",
        lambda bench: bench.vlm("red", max_new_tokens=4, **{keyword: [Returns(result)]}),
        f"{keyword}[0]",
        tuple(expected),
        runs=True,
    )


def numbers(name: str, change: Callable[[torch.Tensor], torch.Tensor], **keywords: Any) -> Row:
    return Row(
        56,
        name,
        lambda bench: bench.vlm("red", max_new_tokens=4, logits_processor=[Returns(change)], **keywords),
        "",
        ("row 0, output token 0", "logits"),
        NumericalError,
        runs=True,
    )


SAMPLED = {"do_sample": True}
GENERATORS = [torch.Generator(), torch.Generator()]

SETTINGS = [
    *[setting(39, "max_new_tokens", v, "an integer from 0 to 1,000,000")
      for v in (-1, 1.5, "8", 10**9, True)],
    setting(39, "max_new_tokens", 5000, "at most"),
    *[setting(39, "min_new_tokens", v, "an integer of at least 0") for v in (-1, 1.5, "8")],
    *[setting(40, "temperature", v, "0 (greedy)") for v in (-1, NAN, INF, "1", True, ["1"], [INF])],
    setting(40, "temperature", [], "one for each of the 1 prompts"),
    setting(40, "temperature", [1.0, 0.5], "one for each of the 1 prompts"),
    setting(40, "top_k", [None], "one for each of the 1 prompts", **SAMPLED),
    setting(41, "guidance_scale", [1.0, 1.0], "one for each of the 1 prompts"),
    Row(40, "temperatures in lock step", lambda b: b.text(
            ["red", "blue"], apply_chat_template=False, temperature=[0.5, 1.0], typical_p=0.9,
            logits_processor=[Returns(torch.Tensor.clone)]),
        "temperature, top_k, top_p, min_p", ("differ by prompt",)),
    *[Row(44, f"batch sizes {sizes}", lambda b, s=sizes: b.vlm.compile(s), "batch_sizes",
          ("positive integers",)) for sizes in ((0,), (1, -2), ("1",), (True,))],
    setting(40, "temperature", NAN, "0 (greedy)", do_sample=False),
    *[setting(40, "top_p", v, "above 0 and at most 1", **SAMPLED) for v in (0, 1.1, -0.1, NAN, "1")],
    setting(40, "top_p", 1.1, "above 0 and at most 1"),
    *[setting(40, "top_k", v, "a positive integer", **SAMPLED) for v in (-1, 1.5, "5")],
    *[setting(40, "min_p", v, "between 0 and 1", **SAMPLED) for v in (-0.1, 1.1, NAN)],
    *[setting(40, "repetition_penalty", v, "above 0") for v in (0, -1, NAN, "2")],
    *[setting(40, "no_repeat_ngram_size", v, "a positive integer") for v in (-1, 1.5, "2")],
    *[setting(40, "bad_words_ids", v, "at least one token id") for v in (5, [5], [[]], [["a"]], [[-1]])],
    *[setting(40, "max_time", v, "seconds above 0") for v in (0, -1, NAN, "1")],
    *[setting(40, "eos_token_id", v, "token id") for v in ("</s>", 1.5, [1.5], -1, True)],
    setting(40, "do_sample", "yes", "True or False"),
    *[setting(41, "guidance_scale", v, "between 0 and 10000") for v in (NAN, -3, 10**6, "2", INF)],
    method(43, "unknown method", "accelerator", "frobnicate", "must be one of ", "copy"),
    method(43, "no method", "accelerator", None, "must be one of "),
    method(43, "unknown option", "option of accelerator 'copy'", "copy", "did you mean 'num_draft_tokens'?",
           num_draft_token=5),
    method(43, "unknown rule", "acceptance", "copy", "did you mean 'typical'?", acceptance="typicl"),
    method(43, "rule of another kind", "acceptance", "copy", "must be one of ", acceptance=5),
    method(43, "unsound pairing", "acceptance", "copy", "would bias", "sample_and_match",
           acceptance="speculative_sampling"),
    method(43, "missing draft model", "drafter", "draft_model", "got None", "'draft_model' needs"),
    method(43, "draft model for copy", "drafter", "copy", "uses no draft model", drafter="a"),
    Row(43, "greedy rule while sampling",
        lambda b: b.text.set_accelerator("copy", acceptance="greedy")(
            "red", apply_chat_template=False, temperature=1.0, max_new_tokens=4),
        "temperature", ("sample_and_match",)),
    *[method(44, f"num_draft_tokens={v!r}", "num_draft_tokens", "copy", "an integer from 1 to 512",
             num_draft_tokens=v) for v in (-1, 1.5, "8", 10**6, True, NAN)],
    *[setting(45, "seed", v, "seed", **SAMPLED) for v in (-1, 2**64, [1, 2], [], 1.5, "5", [1.5], True)],
    *[setting(45, "generator", v, "torch.Generator", **SAMPLED) for v in (5, [5], GENERATORS)],
    setting(45, "seed", 5, "combined with generator", generator=GENERATORS[0]),
    *[Row(46, f"unknown keyword {keyword}", lambda b, k=keyword: b.vlm("red", **{k: 5}), "keyword",
          (f"did you mean {near!r}?",), UnknownArgumentError)
      for keyword, near in (("max_new_token", "max_new_tokens"), ("temprature", "temperature"),
                            ("stop_string", "stop_strings"), ("imagse", "images"))],
    Row(46, "beams", lambda b: b.vlm("red", num_beams=4), "num_beams", ("1 or None", "beam search")),
    Row(46, "a field of another road", lambda b: b.vlm("red", generation_config=BEAMS),
        "generation_config.num_beams", ("1 or None",)),
    setting(40, "max_length", 2, "tokens of the prompt", max_new_tokens=None),
    setting(40, "suppress_tokens", 5, "a list of token ids"),
    setting(40, "forced_eos_token_id", 10**6, "token ids below"),
    setting(40, "sequence_bias", 5, "refused by transformers"),
    setting(40, "typical_p", 1.5, "between 0 and 1", **SAMPLED),
    Row(46, "generation config of another kind", lambda b: b.vlm("red", generation_config={"top_k": 5}),
        "generation_config", ("GenerationConfig",)),
    Row(46, "streamer without put", lambda b: b.vlm("red", streamer=print), "streamer", ("put", "end")),
    Row(46, "streamer for two prompts", lambda b: b.vlm(["red", "blue"], streamer=Returns(None)), "streamer",
        ("a single prompt",)),
    Row(46, "stream of two prompts", lambda b: list(b.vlm.stream(["red", "blue"])), "prompt",
        ("a single prompt",)),
    setting(48, "logits_processor", 5, "a list of"),
    setting(48, "logits_processor", [5], "a list of"),
    setting(48, "stopping_criteria", 5, "a list of"),
    setting(48, "stopping_criteria", ["stop"], "a list of"),
    callback("None", "logits_processor", None, "got None", "Returns"),
    callback("a number", "logits_processor", 5, "got 5"),
    callback("another shape", "logits_processor", torch.zeros(1, 3), "shape (1, 3)", "(1, 128)"),
    callback("None", "stopping_criteria", None, "got None", "bool"),
    callback("a word", "stopping_criteria", "yes", "got 'yes'"),
    callback("another shape", "stopping_criteria", torch.zeros(7, dtype=torch.bool), "shape (7,)"),
    numbers("NaN", lambda scores: scores * NAN),
    numbers("infinity", lambda scores: scores + INF),
    numbers("every token excluded", lambda scores: scores - INF),
    numbers("every token excluded while sampling", lambda scores: scores - INF, temperature=1.0, seed=1),
]  # fmt: skip
