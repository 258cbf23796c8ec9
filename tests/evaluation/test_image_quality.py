"""Quality of sets of images: folders, feature networks, the cache of references, and scores."""

import json
import math
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from mmspec.assets import reference_models
from mmspec.errors import InputError, MediaError
from mmspec.evaluation.examples import held_out_captions
from mmspec.evaluation.quality.attributes import AttributeJudge, scenes_network
from mmspec.evaluation.quality.feature_network import FeatureNetwork, load_network
from mmspec.evaluation.quality.image_folder import ImageSet, read_images, real_scenes
from mmspec.evaluation.quality.image_scores import (
    METRICS,
    Scorer,
    chosen_metrics,
    clip_scorer,
    missing_for,
    score_images,
)
from mmspec.evaluation.quality.reference_statistics import read_published, read_statistics, reference_of
from mmspec.scenes.reader import load_reader
from tests.tiny_models.clip import save_clip

COUNT = 24


@pytest.fixture(scope="module")
def judge():
    return AttributeJudge(load_reader(reference_models()["scenes-llamagen"] / "reader"))


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    return str(save_clip(tmp_path_factory.mktemp("clip")))


@pytest.fixture
def folder(tmp_path):
    for index, image in enumerate(real_scenes(4, (32, 32))):
        image.save(tmp_path / f"{index}.png")
    return tmp_path


class Counting:
    """A network of two features that counts how many images it has read."""

    def __init__(self, identity="a", preprocessing="none"):
        self.read = 0
        self.network = FeatureNetwork("means", 2, identity, preprocessing, self.features)

    def features(self, images):
        self.read += len(images)
        return torch.tensor([[np.asarray(one).mean(), np.asarray(one).std()] for one in images]).float()


def scenes_of(count, seed=0):
    return ImageSet("scenes", real_scenes(count, (64, 64), seed), held_out_captions(count, seed))


def test_real_scenes_score_as_they_should_and_wrong_prompts_colours_and_repetitions_are_seen(judge):
    images, network = scenes_of(COUNT), scenes_network(judge)
    reference = reference_of("scenes", real_scenes(COUNT, (64, 64), 500), network, None)
    scorer = Scorer(network, judge)
    found = score_images(
        images, reference, ["kid", "attributes", "inception_score", "precision_recall"], scorer
    )
    assert set(found) == {
        *("kid", "precision", "recall", "attributes", "inception_score"),
        *("entropy_colours", "diversity"),
    }
    assert all(one.low <= one.value <= one.high for one in found.values())
    assert found["attributes"].value > 0.95
    assert found["kid"].low < 0 < found["kid"].high
    wrong = ImageSet("wrong", images.images, images.prompts[1:] + images.prompts[:1])
    bad = score_images(wrong, reference, ["attributes"], scorer)
    assert bad["attributes"].high < found["attributes"].low
    grey = ImageSet("grey", [one.convert("L").convert("RGB") for one in images.images], images.prompts)
    damaged = score_images(grey, reference, ["kid"], scorer)
    assert damaged["kid"].value > found["kid"].value
    assert damaged["entropy_colours"].high < found["entropy_colours"].low

    same = ImageSet("same", images.images[:1] * COUNT, images.prompts[:1] * COUNT, [[1, 2]] * COUNT)
    found = score_images(same, None, ["attributes"], scorer)
    assert found["attributes"].value == 1.0 and found["attributes"].low < 0.95  # 24 images are too few
    assert found["diversity"].value == pytest.approx(1.0, abs=1e-4)
    assert found["entropy_tokens"].value == pytest.approx(math.log(2))


def test_the_cache_is_used_and_renewed_when_a_pixel_the_network_or_its_preprocessing_changes(tmp_path):
    counting, images = Counting(), real_scenes(5, (16, 16))
    first = reference_of("scenes", images, counting.network, tmp_path)
    again = reference_of("scenes", images, counting.network, tmp_path)
    assert (first.cached, again.cached, counting.read) == (False, True, 5)
    assert torch.equal(first.features, again.features) and first.path == again.path
    for other in (Counting(identity="b"), Counting(preprocessing="crop")):
        assert not reference_of("scenes", images, other.network, tmp_path).cached
        with pytest.raises(InputError, match="statistics of"):
            read_statistics(first.path, other.network)
    images[2].putpixel((3, 3), (1, 2, 3))
    changed = reference_of("scenes", images, counting.network, tmp_path)
    assert (changed.cached, counting.read) == (False, 10)
    assert not torch.equal(changed.features, first.features)
    first.path.write_bytes(first.path.read_bytes()[:40])
    with pytest.raises(InputError, match="a file of statistics"):
        read_statistics(first.path, counting.network)
    with pytest.raises(InputError, match="--cache"):
        reference_of("scenes", images, counting.network, changed.path)


def test_images_are_read_in_the_order_of_their_names_with_what_is_known_of_them(folder):
    lines = [{"file": f"{i}.png", "prompt": f"p{i}", "codes": [i]} for i in range(4)]
    (folder / "images.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "notes.txt").write_text("not an image")
    (folder / "._0.png").write_bytes(b"metadata of macOS")
    found = read_images(folder)
    assert (found.prompts, found.codes) == (["p0", "p1", "p2", "p3"], [[0], [1], [2], [3]])
    assert len(read_images(folder, 2).images) == 2
    for bad in ("{", "[]", "3", '{"file": "a", "prompt": 3}', '{"file": "a", "codes": [-1]}'):
        (folder / "images.jsonl").write_text(json.dumps(lines[0]) + "\n" + bad)
        with pytest.raises(InputError, match="images.jsonl:2"):
            read_images(folder)


def test_folders_that_cannot_be_used_are_refused(folder, tmp_path_factory):
    with pytest.raises(InputError, match="FileNotFoundError"):
        read_images(folder / "none")
    with pytest.raises(InputError, match="NotADirectoryError"):
        read_images(folder / "0.png")
    with pytest.raises(InputError, match="with 0 images"):
        read_images(tmp_path_factory.mktemp("empty"))
    with pytest.raises(InputError, match="at least 9 images"):
        read_images(folder, 9)
    Image.new("RGB", (31, 32)).save(folder / "9.png")
    with pytest.raises(InputError, match="images of one size"):
        read_images(folder)
    shutil.copy(__file__, folder / "9.png")
    with pytest.raises(MediaError, match=r"9\.png"):
        read_images(folder)
    (folder / "9.png").unlink()
    (folder / "images.jsonl").write_bytes(b'{"file": "0.png"}\n{"file": "caf\xe9.png"}\n')
    with pytest.raises(InputError, match=r"line 2 of images\.jsonl"):
        read_images(folder)


def test_metrics_are_named_or_refused():
    assert chosen_metrics("fid, kid") == (["fid", "kid", "entropy", "diversity"], True)
    every, named = chosen_metrics(None)
    assert set(METRICS) - set(every) == {"clip_score"} and not named
    with pytest.raises(InputError, match="did you mean 'fid'"):
        chosen_metrics("kid,fidd")


def test_a_prompt_without_an_object_of_scenes_is_named(judge):
    prompts = ["a red ring", "a large star", "two small blue squares"]
    lacks = partial(missing_for, "attributes", 3, scenes_network(judge), has_reference=False)
    assert lacks(prompts=prompts[:2]) is None
    assert "in every prompt; 'two small blue squares' has no shape in the singular" in lacks(prompts=prompts)


def test_inception_is_that_of_torch_fidelity(monkeypatch):
    """With random weights: features and classes are those of its own extractor, in our order."""
    from torch_fidelity import feature_extractor_inceptionv3 as theirs

    made, inception = [], theirs.FeatureExtractorInceptionV3
    monkeypatch.setattr(theirs, "load_state_dict_from_url", lambda *arguments, **options: {})
    monkeypatch.setattr(inception, "load_state_dict", lambda self, state: made.append(self))
    network, images = load_network("inception"), real_scenes(2, (64, 64))
    pixels = torch.from_numpy(np.stack([np.asarray(one) for one in images])).permute(0, 3, 1, 2)
    features, logits = made[0](pixels)
    assert torch.allclose(network.features(images), features) and features.shape == (2, 2048)
    assert torch.allclose(network.classify(images), logits)


@torch.inference_mode()
def test_clip_score_is_the_cosine_of_image_and_prompt(clip_folder):
    from transformers import CLIPModel, CLIPProcessor

    model, processor = CLIPModel.from_pretrained(clip_folder), CLIPProcessor.from_pretrained(clip_folder)
    images, prompts = real_scenes(3, (40, 40)), ["a red ring", "grass", "two stars"]
    found = clip_scorer(clip_folder)(images, prompts)
    for image, prompt, value in zip(images, prompts, found, strict=True):
        seen = model.get_image_features(**processor(images=image, return_tensors="pt")).pooler_output
        said = model.get_text_features(**processor(text=prompt, return_tensors="pt")).pooler_output
        assert value == pytest.approx(100 * max(0.0, float(torch.cosine_similarity(seen, said))), abs=1e-3)
    assert len(set(found)) == 3


def saved(path, **arrays):
    np.savez(path, **arrays)
    return path


def moments_of(features):
    return {"mu": features.double().mean(0).numpy(), "sigma": features.double().T.cov().numpy()}


def test_published_references_give_what_can_be_computed_from_them(tmp_path):
    network = Counting().network
    one, other = (ImageSet("a", real_scenes(24, (16, 16), seed)) for seed in (0, 500))
    features = network.features(other.images)
    pixels = {"arr_0": np.stack([np.asarray(image) for image in other.images])}
    scorer, metrics = Scorer(network), ["fid", "kid", "precision_recall"]
    wanted = score_images(one, reference_of("x", other.images, network, None), metrics, scorer)

    def found(count=24, **arrays):
        reference = read_published(saved(tmp_path / "x.npz", **arrays), network, count, tmp_path)
        return score_images(one, reference, metrics, scorer)

    assert found(**pixels) == wanted
    assert found(**pixels, mu=np.zeros(2048), sigma=np.eye(2048)) == wanted, "another network's are not taken"
    for arrays in (moments_of(features), {"mu_s": np.zeros(9), **moments_of(features)}):
        alone = found(**arrays)
        assert alone["fid"].value == pytest.approx(wanted["fid"].value, rel=1e-6)
        assert not {"kid", "precision", "recall"} & alone.keys()
        assert found(**pixels, **arrays) == {**wanted, "fid": alone["fid"]}
        assert found(25, **pixels, **arrays).keys() == alone.keys(), "too few images for the rest"
    single = {name: value.astype(np.float32) for name, value in moments_of(features).items()}
    assert found(**single)["fid"].value == pytest.approx(wanted["fid"].value, rel=1e-2)


WRONG = {
    "another network's": (
        {"mu": np.zeros(3), "sigma": np.eye(3)},
        "the 2 features of 'means'; got .*mu and sigma of 3 features",
    ),
    "inception's": (
        {"mu": np.zeros(2048), "sigma": np.eye(2048)},
        "--features inception; got .*2048 features",
    ),
    "a sigma of another size": ({"mu": np.zeros(2), "sigma": np.eye(3)}, r"mu \[2\] .*sigma \[3, 3\]"),
    "a sigma of another size beside images": (
        {"arr_0": np.zeros((3, 8, 8, 3), np.uint8), "mu": np.zeros(2), "sigma": np.zeros(2)},
        r"sigma \[2\]",
    ),
    "no sigma": ({"mu": np.zeros(2)}, "mu and sigma"),
    "no numbers": ({"mu": np.array([0.0, np.nan]), "sigma": np.eye(2)}, "finite floats mu"),
    "images of floats": ({"arr_0": np.zeros((3, 8, 8, 3))}, r"arr_0 \[3, 8, 8, 3\] of float64"),
    "images with channels first": ({"arr_0": np.zeros((3, 3, 8, 8), np.uint8)}, r"\[n, height, width, 3\]"),
    "pickled objects": ({"mu": np.array([{}]), "sigma": np.eye(1)}, "without pickled objects"),
    "nothing of the kind": ({"labels": np.zeros(3)}, "arr_0"),
}


def test_npz_files_that_are_no_reference_are_refused_by_what_is_wrong(tmp_path):
    for arrays, expected in WRONG.values():
        with pytest.raises(InputError, match=expected) as caught:
            read_published(saved(tmp_path / "x.npz", **arrays), Counting().network, 3, tmp_path)
        assert caught.value.argument == "--against"

    np.save(tmp_path / "x.npy", np.zeros(3))
    (tmp_path / "x.npy").rename(tmp_path / "x.npz")
    whole = saved(tmp_path / "z.npz", arr_0=np.zeros((3, 8, 8, 3)))
    (tmp_path / "y.npz").write_bytes(whole.read_bytes()[:200])
    for name in ("x.npz", "y.npz", "none.npz"):
        with pytest.raises(InputError, match=r"--against.*\.npz file"):
            read_published(tmp_path / name, Counting().network, 3, tmp_path)
