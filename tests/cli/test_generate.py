"""`mmspec generate`."""

import json

import pytest
from PIL import Image

from tests.tiny_models.llamagen import GRID, STRIDE, save_llamagen

CELLS, SIDE = GRID**2, GRID * STRIDE


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("image")
    for condition in ("class", "caption"):
        save_llamagen(base / condition, condition)
    return base


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A model whose images have fewer tokens than the default window."""
    return save_llamagen(tmp_path_factory.mktemp("small") / "class", "class", grid=5)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "new" / "image.png"


def test_one_image_is_written_as_it_is(run, folders, out):
    result = run("generate", "a red circle", "--model", folders / "caption", "--out", out, "--window", 8)
    assert result.exit_code == 0
    with Image.open(out) as image:
        assert image.size == (SIDE, SIDE)
    assert result.stdout.splitlines()[-1] == str(out)
    (row,) = [line for line in result.stdout.splitlines() if line.strip().startswith("sjd")]
    promise, mean, most = row.split()[1:4]
    assert promise == "exact"
    assert 1 < float(mean) == int(most) <= CELLS


def test_several_images_become_a_sheet(run_json, folders, out):
    (record,) = run_json(
        "generate", "a red circle", "a blue star", "--model", folders / "caption", "--n", 3, "--out", out,
        "--accelerator", "sjd:window=8:coupling=gumbel", "--batch-size", 4,
    )  # fmt: skip
    assert [one["title"] for one in record["images"]] == ["a red circle"] * 3 + ["a blue star"] * 3
    assert [one["new_tokens"] for one in record["images"]] == [CELLS] * 6
    forwards = [one["nfe"] for one in record["images"]]
    assert record["nfe_max"] == max(forwards)
    assert record["nfe_mean"] == pytest.approx(sum(forwards) / 6)
    assert record["step_compression"] == pytest.approx(CELLS * 6 / sum(forwards))
    with Image.open(out) as sheet:  # a line for each prompt
        width, height = sheet.size
    assert 3 * 192 < width < 4 * 192
    assert 2 * 192 < height < 3 * 192


def test_compared_accelerators_draw_the_same_seeds_side_by_side(run_json, folders, out):
    records = run_json(
        "generate", "--class", 1, "--class", 3, "--model", folders / "class", "--out", out, "--seed", 5,
        "--compare", "none,sjd:coupling=exact,sjd", "--window", 8,
    )  # fmt: skip
    plain, exact, maximal = records
    assert [one["nfe"] for one in plain["images"]] == [CELLS] * 2
    assert plain["step_compression"] == 1.0
    assert exact["identical"] == 2  # coupled with the noise of plain decoding
    assert maximal["identical"] < 2  # exact in distribution, with other draws
    assert all(record["exactness"] == "exact" for record in records)
    assert all(record["seed"] == 5 for record in records)
    with Image.open(out) as sheet:
        width, height = sheet.size
    assert 3 * 192 < width < 4 * 192
    assert 2 * 192 < height < 3 * 192


def test_images_do_not_depend_on_the_command_line_batch(run_json, folders, tmp_path):
    common = ["generate", "--class", 1, "--model", folders / "class", "--n", 3, "--window", 8]
    for size in (1, 3):
        run_json(*common, "--out", tmp_path / f"{size}.png", "--batch-size", size)
    with Image.open(tmp_path / "1.png") as one, Image.open(tmp_path / "3.png") as three:
        assert one.size == three.size
    # captions hold the forwards, which no batch changes either
    assert (tmp_path / "1.png").read_bytes() == (tmp_path / "3.png").read_bytes()


@pytest.mark.parametrize(("condition", "titles"), [("class", "class 0"), ("caption", "a ")])
def test_without_a_prompt_there_are_samples(run, folders, out, condition, titles):
    result = run(
        "generate", "--model", folders / condition, "--out", out, "--accelerator", "sjd:window=8", "--json"
    )
    (record,) = json.loads(result.stdout)
    assert len(record["images"]) == 4
    assert record["images"][0]["title"].startswith(titles)
    assert "no prompt" in result.stderr or "no class" in result.stderr


def test_settings_reach_the_pipeline(run_json, folders, out, monkeypatch):
    from mmspec.pipelines import ImagePipeline

    draw, calls = ImagePipeline.__call__, []

    def spy(self, *arguments, **options):
        calls.append(options)
        return draw(self, *arguments, **options)

    monkeypatch.setattr(ImagePipeline, "__call__", spy)
    run_json(
        "generate", "a red circle", "--model", folders / "caption", "--out", out, "--window", 8, "--n", 2,
        "--negative-prompt", "a star", "--guidance", 3, "--temperature", 0.5, "--top-k", 7, "--top-p", 0.9,
        "--height", SIDE, "--width", SIDE, "--batch-size", 2, "--seed", 4,
    )  # fmt: skip
    (asked,) = calls
    del asked["callback_on_step_end"]
    assert asked == {
        "prompt": ["a red circle"], "class_labels": None, "negative_prompt": "a star", "guidance_scale": 3.0,
        "temperature": 0.5, "top_k": 7, "top_p": 0.9, "height": SIDE, "width": SIDE,
        "num_images_per_prompt": 2, "batch_size": 2, "seed": 4,
    }  # fmt: skip


ONE = ["--class", "1"]


def test_what_cannot_be_drawn_is_one_line_and_exit_code_2(fails, small, tmp_path):
    for arguments, message in [
        (["--accelerator", "sjdd"], "did you mean 'sjd'"),
        (["--compare", "none,sjdd"], "did you mean 'sjd'"),
        (["--compare", "none", "--accelerator", "sjd"], "not both"),
        (["--compare", ","], "separated by commas"),
        (["--accelerator", "none", "--window", "8"], "has a window"),
        (["--compare", "none,sjd", *ONE], "window: got 32"),
        (["--window", "0", *ONE], "window: got 0"),
        (["--window", "26", *ONE], "window: got 26"),
        (["--out", "/dev/null/x.png", *ONE], "--out"),
        (["--out", "image.txt", *ONE], "an image file"),
        (["--out", ".", *ONE], "an image file"),
        (["--class", "9"], "class_labels[0]: got 9"),
        (["a red circle"], "class_labels"),
        (["a red circle", *ONE], "not both"),
        (["--guidance", "-1", *ONE], "guidance_scale: got -1"),
        (["--temperature", "-1", *ONE], "temperature: got -1"),
        (["--top-p", "2", *ONE], "top_p: got 2"),
        (["--top-k", "-2", *ONE], "top_k: got -2"),
        (["--height", "7", *ONE], "height, width"),
        (["--dtype", "bfloat", *ONE], "did you mean 'bfloat16'"),
        (["--model", "/no/such/folder", *ONE], "folder that holds a checkpoint"),
    ]:
        common = {"--model": small, "--out": tmp_path / "x.png"}
        if not {"--accelerator", "--compare", "--window"} & {*arguments}:
            common["--window"] = 8
        rest = [
            item for option, value in common.items() if option not in arguments for item in (option, value)
        ]
        assert message in fails("generate", *arguments, *rest)
        assert list(tmp_path.iterdir()) == []


def test_a_model_that_draws_no_images_is_refused(fails, tiny_folder, tmp_path):
    assert "draws no images" in fails("generate", "red", "--model", tiny_folder, "--out", tmp_path / "x.png")


def test_without_the_reference_model_the_error_says_where_it_comes_from(fails, no_reference_models):
    assert "scenes-llamagen" in fails("generate", "red")


def test_an_interrupt_keeps_what_is_done(run, folders, out, monkeypatch):
    from mmspec.pipelines import ImagePipeline

    draw, calls = ImagePipeline.__call__, []

    def interrupted(self, *arguments, **options):
        calls.append(options)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return draw(self, *arguments, **options)

    monkeypatch.setattr(ImagePipeline, "__call__", interrupted)
    common = ["generate", "--class", 1, "--model", folders / "class", "--out", out, "--json"]
    result = run(*common, "--compare", "none,sjd:window=8")
    assert result.exit_code == 130
    assert [record["accelerator"] for record in json.loads(result.stdout)] == ["none"]
    assert out.is_file()
