"""The table of methods, with drawings and a reader whose figures are known beforehand."""

import json

import pytest
import torch

from mmspec.decoding.stats import DecodingStats
from mmspec.errors import InputError
from mmspec.evaluation.examples import OTHER_SEEDS, held_out_captions
from mmspec.evaluation.quality.image_methods import (
    Drawing,
    compare_methods,
    draw_plot,
    find_best,
    write_records,
)
from mmspec.scenes import parse_caption

PROMPTS = [f"prompt {index}" for index in range(12)]


class MeanReader:
    """Features are the means of the colour planes; an attribute is present where the image is bright."""

    def attribute_accuracy(self, images, captions):
        assert len(images) == len(captions)
        return (images.mean((1, 2, 3)) > 0.25).float().mean().item()

    def features(self, images):
        return images.mean((2, 3))


def artist(forwards, seconds, brightness=0.5, promise="exact", tv=0.0, log=None):
    def draw(prompt, seed):
        if log is not None:
            log.append((prompt, seed))
        noise = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(seed))
        stats = DecodingStats(exactness=promise, new_tokens=[16], rounds=[forwards - 1])
        stats.target_forwards = forwards
        if tv:
            stats.count_measured("tv", tv * 3, tv, 3)
        return Drawing(brightness * noise + brightness / 2, [seed % 7] * 16, stats, seconds, 0.5)

    return draw


@pytest.fixture(scope="module")
def run():
    log, seen = [], []
    methods = {
        "none": artist(16, 2.0, log=log),
        "same": artist(4, 1.0),
        "dark": artist(2, 0.25, brightness=0.1, promise="tv<=0.1", tv=0.05),
    }
    records = list(compare_methods(methods, PROMPTS, MeanReader(), seed=5, on_image=seen.append))
    return records, log, seen


def test_figures_of_each_method(run):
    plain, same, dark = run[0]
    assert (plain.nfe_mean, plain.step_compression, plain.speedup) == (16, 1.0, 1.0)
    assert (same.nfe_mean, same.step_compression, same.speedup) == (4, 4.0, 2.0)
    assert dark.speedup == 8.0
    assert dark.speedup_with_pixels == pytest.approx(2.5 / 0.75)
    assert (same.tv_mean, same.tv_max) == (None, None)
    assert (dark.promise, dark.tv_mean, dark.tv_max) == ("tv<=0.1", pytest.approx(0.05), 0.05)
    assert (plain.attribute_accuracy, dark.attribute_accuracy) == (1.0, 0.0)
    assert same.acceptance_length == 15 / 3


def test_equal_images_are_as_far_from_the_second_set_as_plain_ones_and_dark_ones_are_farther(run):
    plain, same, dark = run[0]
    assert same.feature_distance == plain.feature_distance
    assert same.entropy == plain.entropy
    assert dark.feature_distance - dark.feature_margin > plain.feature_distance + plain.feature_margin


def test_the_second_set_has_other_seeds(run):
    _, log, seen = run
    warm_up, *drawn = log
    assert warm_up == (PROMPTS[0], 5)
    assert {seed for _, seed in drawn} == {
        start + index for start in (5, 5 + OTHER_SEEDS) for index in range(len(PROMPTS))
    }
    assert len(seen) == 4 * len(PROMPTS)


def test_records_and_plot_are_written(run, tmp_path):
    written = json.loads(write_records(tmp_path / "methods.json", run[0]).read_text())
    assert [row["method"] for row in written["methods"]] == ["none", "same", "dark"]
    pytest.importorskip("matplotlib")
    assert draw_plot(tmp_path / "methods.png", run[0]).stat().st_size > 10_000


@pytest.mark.parametrize(
    ("methods", "prompts"), [({"fast": artist(1, 1.0)}, PROMPTS), ({"none": artist(1, 1.0)}, PROMPTS[:2])]
)
def test_what_cannot_be_compared_is_refused(methods, prompts):
    with pytest.raises(InputError):
        list(compare_methods(methods, prompts, MeanReader()))


def test_captions_are_the_same_every_time():
    captions = held_out_captions(20, seed=3)
    assert captions == held_out_captions(40, seed=3)[:20] != held_out_captions(20)
    assert all(parse_caption(text) is not None for text in captions)
    with pytest.raises(InputError):
        held_out_captions(10**7)


@pytest.mark.parametrize(("by", "best"), [("seconds", "quick"), ("forwards", "few")])
def test_the_best_setting_is_found_on_other_prompts(by, best):
    log, seen = [], []
    settings = {"few": artist(4, 2.0), "quick": artist(8, 0.5, log=log), "slow": artist(16, 3.0)}
    found = find_best(settings, PROMPTS[:3], by=by, seed=7, on_image=seen.append)
    assert found.label == best and found.tried["slow"] == (16.0, 3.0)
    assert log[1:] == [(prompt, 7 + index) for index, prompt in enumerate(PROMPTS[:3])]
    assert seen == ["few", "quick", "slow"] * 3


def test_a_single_setting_is_not_searched():
    found = find_best({"only": None}, PROMPTS)
    assert found.label == "only" and not found.tried
    with pytest.raises(InputError, match="best"):
        find_best({}, PROMPTS, by="luck")


def test_a_record_says_how_many_settings_it_is_the_best_of():
    methods = {"none": artist(16, 2.0), "best": artist(4, 1.0)}
    plain, best = compare_methods(methods, PROMPTS, MeanReader(), searched={"best": 3})
    assert (plain.searched, best.searched) == (None, 3)
