"""Identity check on tiny models: exact accelerators pass, bugs are found, rounding explains ties."""

import pytest
import torch

from mmspec.core.statistics import DecodingStats
from mmspec.evaluation.contenders import contender
from mmspec.evaluation.examples import Example
from mmspec.evaluation.identity.checks import IdentityCheck
from mmspec.evaluation.identity.comparison import (
    compare,
)
from mmspec.pipelines import VisionLanguagePipeline
from mmspec.trees.matching import SampleAndMatch
from tests.evaluation.planted import accept_everything, stale_noise
from tests.tiny_models import VISION_LANGUAGE_FAMILIES, tiny_images, tiny_llama, tiny_tokenizer

SETTINGS = {"max_new_tokens": 32, "seed": 3}


def pipeline(family):
    if family != "llama":
        return VisionLanguagePipeline(*VISION_LANGUAGE_FAMILIES[family](), accelerator="none")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    return VisionLanguagePipeline(tiny_llama(vocab=len(tokenizer)), tokenizer, accelerator="none")


def examples(pipe, count=2):
    prompts = ["what is there ?", "how many circle and square ?", "compare"][:count]
    images = tiny_images(count) if hasattr(pipe.processor, "image_processor") else []
    return [
        Example((prompt,), tuple(images[i : i + 1]), identifier=prompt) for i, prompt in enumerate(prompts)
    ]


def check(pipe, accelerator="copy", asked=None, options=None, **settings):
    plain = contender(pipe, "none")
    accelerated = contender(pipe, accelerator, **(options or {}))
    calls = []
    made = IdentityCheck(
        accelerated,
        plain,
        asked or examples(pipe),
        **{**SETTINGS, **settings},
        on_output=lambda: calls.append(1),
    )
    report = made.report(list(made.comparisons()))
    assert len(calls) == made.outputs
    return report


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llama"])
def test_copying_is_exact(family):
    report = check(pipeline(family), batch_size=2)
    assert report.passed
    assert [one.mode for one in report.comparisons] == ["greedy", "sampled"]
    assert [one.equal for one in report.comparisons] == [2, 2]
    assert report.as_dict()["passed"] is True


def test_a_rule_that_accepts_too_much_is_found_in_both_modes(monkeypatch):
    monkeypatch.setattr(SampleAndMatch, "verify", accept_everything)
    pipe = pipeline("llava")
    options = {"drafter": VISION_LANGUAGE_FAMILIES["llava"]()[0].requires_grad_(False), "num_draft_tokens": 2}
    with torch.no_grad():
        options["drafter"].get_output_embeddings().weight.mul_(-1.0)  # a draft model that is mostly wrong
    report = check(pipe, "draft_model", options=options, batch_size=2)
    assert not report.passed
    for comparison in report.comparisons:
        assert comparison.equal == 0
        for difference in comparison.differences:
            assert difference.gap > 0
            assert not difference.explained
            assert difference.expected != difference.got


def test_a_bug_in_the_noise_is_found_by_sampling_alone(monkeypatch):
    monkeypatch.setattr(SampleAndMatch, "verify", stale_noise)
    pipe = pipeline("llava")
    report = check(pipe, "draft_model", options={"drafter": pipe.model, "num_draft_tokens": 2})
    greedy, sampled = report.comparisons
    assert greedy.passed
    assert not sampled.passed


def test_the_gap_is_that_of_the_reference(monkeypatch):
    monkeypatch.setattr(SampleAndMatch, "verify", accept_everything)
    pipe = pipeline("llama")
    asked = [Example(("a the red circle a the",), identifier="a")]
    report = check(pipe, asked=asked)
    difference = report.comparisons[0].differences[0]
    inputs = pipe.tokenizer("a the red circle a the", return_tensors="pt")["input_ids"]
    output = pipe.model.generate(
        inputs, do_sample=False, max_new_tokens=32, output_logits=True, return_dict_in_generate=True
    )
    best, second = output.logits[difference.position][0].topk(2).values.tolist()
    assert difference.gap == pytest.approx(best - second, abs=1e-5)
    assert difference.expected == output.sequences[0, inputs.shape[1] + difference.position]


def test_a_rule_that_promises_the_distribution_alone_is_compared_greedily_and_said_so():
    pipe = pipeline("llava")
    options = {"drafter": pipe.model, "sampling": "sampled", "acceptance": "speculative_sampling"}
    report = check(pipe, "draft_model", options=options)
    assert [one.mode for one in report.comparisons] == ["greedy"]
    assert report.passed
    assert "distribution" in report.notes[0]


def test_a_lossy_rule_cannot_pass():
    report = check(pipeline("llava"), options={"acceptance": "typical"})
    assert not report.passed
    assert "is declared lossy" in report.notes[0]
    assert "no draft token was accepted" in check(pipeline("llava"), max_new_tokens=1).notes[0], (
        "nothing was accepted"
    )


def judge(gap, magnitude, dtype, expected=(1, 2), got=(1, 3), is_recurrent=False):
    best = [(9.0, 1.0, 9.0), (magnitude, magnitude - gap, magnitude)]
    found = [(list(expected), best)]
    return compare("greedy", "x", found, [list(got)], dtype, DecodingStats(), is_recurrent)


def test_only_a_near_tie_of_half_precision_or_recurrent_layers_is_explained():
    for gap, dtype, is_recurrent, explained in [
        (0.0, torch.bfloat16, False, True),
        (0.125, torch.bfloat16, False, True),  # 2 ulp of 8 to 16
        (0.1875, torch.bfloat16, False, False),
        (2**-6, torch.float16, False, True),
        (2**-5, torch.float16, False, False),
        (0.0, torch.float32, False, False),  # in float32 every difference counts
        (0.5, torch.bfloat16, True, True),  # 8 ulp
        (0.5625, torch.bfloat16, True, False),
        (2**-13, torch.float32, True, True),  # 128 ulp
        (2**-12, torch.float32, True, False),
    ]:
        comparison = judge(gap, 9.0, dtype, is_recurrent=is_recurrent)
        (difference,) = comparison.differences
        assert (difference.position, difference.expected, difference.got) == (1, 2, 3)
        assert difference.gap == pytest.approx(gap)
        assert difference.explained is explained is comparison.passed
        assert comparison.equal == 0


def test_an_output_that_goes_on_is_never_explained():
    comparison = judge(0.0, 9.0, torch.bfloat16, expected=(1, 2), got=(1, 2, 3))
    (difference,) = comparison.differences
    assert (difference.expected, difference.got) == (None, 3)
    assert not comparison.passed
    equal = judge(0.0, 9.0, torch.float32, got=(1, 2))
    assert equal.passed and (equal.equal, equal.tokens) == (1, 2)
