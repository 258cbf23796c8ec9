"""`mmspec tune`, and `accelerator="auto"`."""

import copy
import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from mmspec.accelerators.tuned import Tuned, find_tuned, fingerprint, save_tuned
from mmspec.cli.tune import digest_of, is_kept
from mmspec.errors import InputError
from mmspec.evaluation.contenders import load_images
from mmspec.evaluation.examples import Example, scene_examples
from mmspec.evaluation.speed.timing import Decoded, batches_of
from mmspec.evaluation.speed.tuning import fastest, search
from mmspec.pipelines import MMSpecPipeline
from tests.evaluation.test_speed import Clock, stats
from tests.tiny_models import tiny_llama

SMALL = ["--samples", 3, "--repeats", 1, "--max-new-tokens", 8]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def trials_of(seconds, repeats=3):
    clock, calls = Clock(), dict.fromkeys(seconds, 0)

    def decode(name, batch):
        clock.now += seconds[name]
        calls[name] += 1
        return Decoded([[1]], [stats()])

    decoders = {name: partial(decode, name) for name in seconds}
    batches = batches_of([Example(("x",), identifier=str(i)) for i in range(8)], 1)
    trials = search(decoders, batches, repeats, torch.device("cpu"), clock=clock)
    return trials, calls


def test_the_fastest_wins_and_slow_ones_are_left_early():
    trials, calls = trials_of({"none": 2.0, "a": 1.0, "b": 3.0, "c": 0.5, "d": 1.5, "e": 4.0, "f": 5.0})
    assert fastest(trials).label == "c"
    assert fastest(trials).record.speedup == 4.0
    warm_ups = 1  # of each stage
    assert calls["f"] == calls["e"] == warm_ups + 2
    assert calls["c"] == calls["none"] == 3 * warm_ups + 2 + 4 * 2 + 8 * 3
    assert [trial.stage for trial in trials] == sorted((trial.stage for trial in trials), reverse=True)
    assert len(trials) == 7
    trials, _ = trials_of({"none": 1.0, "a": 1.0, "b": 1.1})
    assert fastest(trials).label == "none", "nothing is faster"


def test_a_text_model_is_tuned_and_auto_takes_the_winner(run_json, run, tiny_folder, cache):
    report = run_json("tune", tiny_folder, *SMALL)
    assert {trial["accelerator"] for trial in report["evidence"]} >= {"none", "copy"}
    assert all(trial["promise"] == "exact" for trial in report["evidence"])
    (path,) = (cache / "tuned").iterdir()
    assert str(path) == report["saved"]
    pipe = MMSpecPipeline.from_pretrained(tiny_folder, accelerator="auto")
    assert pipe.accelerator.name == report["accelerator"]
    assert run("caption", tiny_folder, "--accelerator", "auto", "--max-new-tokens", 4).exit_code == 0


def test_options_and_drafters_of_a_winner_are_used(tiny_folder):
    pipe = MMSpecPipeline.from_pretrained(tiny_folder, accelerator="none")
    save_tuned(pipe.model, Tuned("copy", {"num_draft_tokens": 7}, 4, 0.0, 1.5))
    with pytest.raises(InputError, match="mmspec tune"):
        pipe.set_accelerator("auto")
    pipe.set_accelerator("auto", batch_size=4)
    assert (pipe.accelerator.name, pipe.accelerator.drafter.num_draft_tokens) == ("copy", 7)


def test_a_named_drafter_does_not_replace_a_faster_one(run, tiny_folder, heads):
    def tune():
        result = run("tune", tiny_folder, *SMALL, "--drafter", heads["eagle"])
        assert result.exit_code == 0, result.output
        return "".join(result.output.split())  # without line breaks

    model = MMSpecPipeline.from_pretrained(tiny_folder, accelerator="none").model
    prompts = digest_of(load_images(scene_examples("mixed", 3)))
    settings = {"task": "mixed", "max_new_tokens": 8, "temperature": 0.0, "prompts": prompts}
    other = Tuned("flash", {"drafter": str(heads["flash"])}, 1, 0.0, 99.0, found_on=settings)
    path = save_tuned(model, other)
    assert f'notstored:accelerator="auto"keepsflash:drafter={heads["flash"]}(99.00x)in{path}' in tune()
    assert find_tuned(model) == other
    save_tuned(model, replace(other, speedup=0.5))
    assert f"insteadofflash:drafter={heads['flash']}(0.50x)" in tune()
    assert find_tuned(model).speedup != 0.5


def test_a_faster_result_is_kept_unless_it_was_measured_again_or_otherwise(tmp_path):
    subject = SimpleNamespace(described={"task": "mixed", "temperature": 0.0})
    conditions = {"task": "mixed", "temperature": 0.0, "prompts": "a"}
    ours, theirs = {"drafter": str(tmp_path)}, {"drafter": str(tmp_path / "moved")}
    found = Tuned("eagle", {}, 1, 0.0, 1.5, found_on=conditions)
    earlier = replace(found, accelerator="flash", options=ours, speedup=2.0)
    assert is_kept(earlier, found, [("eagle", {})], subject)
    assert not is_kept(replace(earlier, speedup=1.4), found, [], subject)
    assert not is_kept(replace(earlier, options=theirs), found, [], subject)
    for other in ({"temperature": 1.0}, {"prompts": "b"}):
        assert not is_kept(replace(earlier, found_on=conditions | other), found, [], subject)
    assert is_kept(replace(earlier, found_on=conditions | {"task": "other.jsonl"}), found, [], subject)
    assert not is_kept(earlier, found, [("flash", ours)], subject)


def test_prompts_are_compared_by_what_is_decoded():
    dark, light = (Image.new("RGB", (2, 2), colour) for colour in ("black", "white"))
    examples = [Example(("a",)), Example(("a", "b")), Example(("a",), (dark,)), Example(("a",), (light,))]
    examples += [Example(("a",), label=1), Example(("a",), (dark, dark))]
    assert len({digest_of([one]) for one in examples}) == len(examples)
    assert digest_of([Example(("a",), (dark.copy(),), identifier="x")]) == digest_of([examples[2]])


def test_a_winner_is_of_its_weights_alone():
    one, other = tiny_llama(), tiny_llama()
    assert fingerprint(one) == fingerprint(other)
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    assert fingerprint(one) != fingerprint(other)
    with torch.no_grad():
        for weight in one.parameters():
            weight.zero_()  # which every format holds
    assert fingerprint(one) != fingerprint(copy.deepcopy(one).bfloat16())
    path = save_tuned(one, Tuned("copy", {}, 1, 0.0, 1.5))
    assert find_tuned(one).accelerator == "copy"
    for content in ("{", "[]", json.dumps({"accelerator": 3})):
        path.write_text(content)
        with pytest.raises(InputError, match="damaged"):
            find_tuned(one)
