"""Losslessness check on tiny models: exact accelerators pass, planted bugs are found."""

import pytest
import torch

from mmspec.acceptance.matching import SampleAndMatch
from mmspec.evaluation.contenders import contender
from mmspec.evaluation.examples import Example
from mmspec.evaluation.identity.checks import check_identity
from mmspec.pipelines import VisionLanguagePipeline
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
    return check_identity(accelerated, plain, asked or examples(pipe), **{**SETTINGS, **settings})


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "idefics3", "llama"])
def test_copying_is_exact(family):
    report = check(pipeline(family), batch_size=2)
    assert report.passed
    assert [one.mode for one in report.comparisons] == ["greedy", "sampled"]
    assert [one.equal for one in report.comparisons] == [2, 2]
    assert report.as_dict()["passed"] is True


def test_drafting_is_exact_and_accepts():
    pipe = pipeline("llava")
    report = check(pipe, "draft_model", options={"drafter": pipe.model, "num_draft_tokens": 3})
    assert report.passed
    assert all(sum(one.stats.accepted) > 0 for one in report.comparisons)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_rule_that_accepts_too_much_is_found_in_both_modes(monkeypatch, batch_size):
    monkeypatch.setattr(SampleAndMatch, "verify", accept_everything)
    pipe = pipeline("llava")
    options = {"drafter": VISION_LANGUAGE_FAMILIES["llava"]()[0].requires_grad_(False), "num_draft_tokens": 2}
    with torch.no_grad():
        options["drafter"].get_output_embeddings().weight.mul_(-1.0)  # a draft model that is mostly wrong
    report = check(pipe, "draft_model", options=options, batch_size=batch_size)
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


def test_half_precision_passes_or_explains():
    model, processor = VISION_LANGUAGE_FAMILIES["qwen2_5_vl"]()
    pipe = VisionLanguagePipeline(model.to(torch.bfloat16), processor, accelerator="none")
    report = check(pipe)
    assert report.dtype == "bfloat16"
    assert report.passed
    for comparison in report.comparisons:
        assert comparison.equal + comparison.explained == comparison.examples


def test_a_rule_that_promises_the_distribution_alone_is_compared_greedily_and_said_so():
    pipe = pipeline("llava")
    options = {"drafter": pipe.model, "sampling": "sampled", "acceptance": "speculative_sampling"}
    report = check(pipe, "draft_model", options=options)
    assert [one.mode for one in report.comparisons] == ["greedy"]
    assert report.passed
    assert "distribution" in report.notes[0]


def test_a_check_that_accepted_nothing_says_so():
    report = check(pipeline("llava"), max_new_tokens=1)
    assert "says little" in report.notes[0]


def test_a_lossy_rule_cannot_pass():
    report = check(pipeline("llava"), options={"acceptance": "typical"})
    assert not report.passed
    assert "lossy by its own account" in report.notes[0]
