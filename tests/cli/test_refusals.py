"""Errors of the commands: one line on stderr, exit code 2, and no model is loaded without need."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models.continuous import folder_of
from tests.tiny_models.llamagen import save_llamagen

LLAVA, NOWHERE = "assets/scenes-llava", "no such folder"
ROWS = {
    "the options of accelerators": [
        (f"bench {NOWHERE!r} --accelerator none,copi", "did you mean 'copy'"),
        ("check x --accelerator draft_modle", "did you mean 'draft_model'"),
        ("caption x x.png --accelerator copy:oops", "name=value"),
        ("check x --accelerator draft_model", "--drafter"),
        ("check {tiny} --accelerator copy:max_draft_token=3 --samples 1", "max_draft_token"),
        (f"bench {NOWHERE!r} --accelerator flash", "a head"),
        (f"bench {NOWHERE!r} --accelerator copy:drafter=x", "draft model"),
        ("caption {tiny} assets/images/scene.png --accelerator auto", "mmspec tune"),
    ],
    "what a model is asked": [
        ("check /no/such/folder", "folder with a checkpoint"),
        ("check x --dtype bfloat", "did you mean 'bfloat16'"),
        ("caption {tiny} zz.png", "zz.png"),
        ("check {tiny} --guidance-scale 2", "--guidance-scale"),
        ("scenes --out /proc/none/x.png", "--out"),
    ],
    "a bench": [
        ("bench {tiny} --task captions", "did you mean 'caption'"),
        ("bench {tiny} --best luck --accelerator copy", "must be seconds or forwards"),
        ("bench {tiny} --quality", "needs an image generator"),
        ("bench {tiny} --peers --temperature 1 --samples 1 --repeats 1", "--temperature"),
        ("bench {tiny} --accelerator copy:num_draft_tokens=2|3 --prompt a", "must have one setting each"),
        ("bench {tiny} --batch-size 2 --results lines", "needs --batch-size 1"),
        ("bench {tiny} --html {tmp}/none/page.html", "--html"),
    ],
    "a bench of images": [
        ("generate {class} a --drafter /no/such/folder", "folder with a checkpoint"),
        ("bench {class} --max-new-tokens 12", "an image of this model has 36 tokens"),
        ("bench {class} --task caption", "generate"),
        ("bench {class} --task generat", "did you mean 'generate'"),
        ("bench {class} --image a.png", "cannot be used with an image generator"),
        ("bench {class} --accelerator zipar:zipar_window=99", "zipar_window"),
        ("check {mar} --max-new-tokens 5", "max-new-tokens"),
    ],
    "drawing": [
        ("generate --accelerator sjdd", "did you mean 'sjd'"),
        ("generate --accelerator none,sjdd", "did you mean 'sjd'"),
        ("generate --accelerator ,", "separated by commas"),
        ("generate 'a red ring'", "stands before prompts and images"),
        ("caption photo.jpg", "stands before prompts and images"),
        ("generate {five} --drafter {tiny} --accelerator none,sjd", "which has no drafter"),
        ("generate {five} --accelerator none --window 8 --out {tmp}/a.png", "has a window"),
        ("generate {five} --accelerator none,sjd:window=32 --class 1 --out {tmp}/a.png", "got 32"),
        ("generate {five} --window 0 --class 1 --out {tmp}/a.png", "got 0"),
        ("generate {five} --out /dev/null/x.png --class 1", "--out"),
        ("generate {five} --out image.txt --class 1", "must be an image file"),
        ("generate {five} --out . --class 1", "must be an image file"),
        ("generate {five} --window 8 --class 9 --out {tmp}/a.png", "class_labels[0]"),
        ("generate {five} a --window 8 --out {tmp}/a.png", "class_labels"),
        ("generate {five} a --window 8 --class 1 --out {tmp}/a.png", "cannot be combined"),
        ("generate {five} --window 8 --class 1 --top-p 2 --out {tmp}/a.png", "top_p"),
        ("generate {five} --window 8 --class 1 --height 7 --out {tmp}/a.png", "height, width"),
        ("generate {tiny} red --out {tmp}/a.png", "generates no discrete image tokens"),
        ("generate {nextstep} red --top-k 5 --num-inference-steps 3 --out {tmp}/a.png", "top_k"),
    ],
    "scores of images": [
        ("evaluate images {class} --metrics fidd", "did you mean 'fid'"),
        ("evaluate images {class} --features incepton", "did you mean 'inception'"),
        ("evaluate images {class} --accelerator sjdd", "did you mean 'sjd'"),
        ("evaluate images {class} --against nobody", "nobody"),
        ("evaluate images {class} --prompt-file none.txt", "none.txt"),
        ("evaluate images --folder nowhere", "FileNotFoundError"),
        ("evaluate images {class} --device nothing", "must be a device that works"),
        ("evaluate images --folder . --accelerator sjd", "cannot be combined with a model"),
        ("evaluate images {class} --metrics fid --samples 100", "at least 129 images (there are 100)"),
        ("evaluate images {class} --out .", "must be a new or empty folder"),
    ],
    "scores of answers": [
        ("evaluate text {tiny} --prompt-file {damaged}", "damaged.jsonl:1"),
        ("evaluate text {tiny} --prompt-file {two}", "at least 3 questions per category"),
        ("evaluate text {tiny} --prompt-file {two} --metrics blue", "did you mean 'bleu'"),
        ("evaluate text {tiny} --accelerator coppy", "did you mean 'copy'"),
    ],
    "an export": [
        ("export {head} --out {tmp}/out --to speculators", "--target"),
        (
            "export {head} --out {tmp}/out --to specforge --target assets/scenes-llava-small",
            "hidden_size 128",
        ),
        ("export {head} --out {head} --to specforge --target " + LLAVA, "new or empty"),
        ("export {head} --out {tmp}/out --to transformers", "must be a draft model"),
        ("export assets/scenes-llava-flash --out {tmp}/out --to speculators --target " + LLAVA, "eagle3"),
        ("export assets/scenes-llava-small --out {tmp}/out --to transformers --target " + LLAVA, "--target"),
        (
            "export {head} --out {tmp}/out --to checkpoint --target org/model",
            "must be a folder, because it is copied",
        ),
        ("export nowhere/to/be/found --out {tmp}/out --to transformers", "nowhere"),
    ],
    "many workers": [
        ("generate --ray --out x", "--prompt-file"),
        ("generate x a --ray --accelerator none,sjd --out x", "--accelerator"),
        ("caption --ray --prompt-file assets/prompts/mmspec/mmspec.jsonl", "--out"),
        ("caption --ray --out x", "--prompt-file"),
        ("caption x a.png --prompt-file b.txt", "cannot be combined with images"),
        ("caption x a.png --ray --prompt-file b.txt --out x", "cannot be combined with images"),
        ("caption x a.png --ray --out x --compare", "--compare"),
        ("caption x a.png --out x", "--ray"),
        ("evaluate images --ray --samples 4", "--out"),
        ("generate x a --prompt-file none.txt --out x.png", "none.txt"),
    ],
    "servers": [
        ("serve --port {taken}", "must be a free address"),
        ("serve --host 192.0.2.1 --port 0", "--host"),
        ("serve --wait-seconds=0 --port 0", "wait_seconds"),
        ("serve --run-seconds=nan --port 0", "run_seconds"),
        ("serve --allow-url-domain=http://a.org/ --port 0", "--allow-url-domain"),
        ("serve --allow-origin=a.org --port 0", "--allow-origin"),
        ("serve {tiny} {tiny} --port 0 --accelerator none", "different folder names"),
        ("serve {tiny} --compile --device cpu --port 0", "--compile must be off"),
        ("demo caption --port {taken}", "must be a free address"),
        ("demo generate --port {taken}", "must be a free address"),
        ("serve {class} --drafter {head} --accelerator sjd --port 0", "--drafter cannot be used with sjd"),
        ("serve --drafter {head} --port 0", "--drafter needs one MODEL"),
        ("demo caption --accelerator nine", "accelerator"),
        ("demo caption --accelerator copy --drafter {head}", "--drafter cannot be used with copy"),
        ("demo generate --accelerator sjd:window=8", "must be a name without options"),
    ],
}


@pytest.fixture(scope="module")
def places(tmp_path_factory, tiny_folder: Path, llamagens, eagle3_head: Path) -> dict[str, Any]:
    """Folders and files that rows name."""
    base = tmp_path_factory.mktemp("places")
    (base / "damaged.jsonl").write_text("{")
    (base / "two.jsonl").write_text('{"prompt": "a", "references": "b"}\n' * 2)
    files = {"damaged": base / "damaged.jsonl", "two": base / "two.jsonl", "head": eagle3_head}
    five = save_llamagen(base / "five", "class", grid=5)  # fewer tokens than the default window
    drawing = {"five": five, "mar": folder_of("mar"), "nextstep": folder_of("nextstep"), **llamagens}
    return {"tiny": tiny_folder, **files, **drawing}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.every(3)
def test_what_cannot_be_done_is_said_in_one_line(kind, places, fails: Callable[..., str], tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        named = {**places, "tmp": tmp_path, "taken": taken.getsockname()[1]}
        for command, words in ROWS[kind]:
            arguments = [word.format(**named) for word in shlex.split(command)]
            assert words in fails(*arguments), command
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["bench", "generate"])
def test_without_reference_models_the_error_says_where_they_come_from(fails, monkeypatch, command):
    monkeypatch.setattr("mmspec.assets.reference_models", dict)
    assert "comes with a clone" in fails(*command.split())


@pytest.mark.parametrize(
    ("package", "extra", "command"),
    [
        ("uvicorn", "serve", "serve"),
        ("gradio", "demo", "demo caption"),
        ("gradio", "demo", "demo generate"),
        ("matplotlib", "eval", "bench nowhere --plot plot.png"),
    ],
)
def test_a_missing_extra_is_named_before_a_model_is_loaded(hide, fails, package, extra, command):
    hide(package)
    said = fails(*command.split())
    assert package in said and f"pip install -e '.[{extra}]' in the root of the clone" in said
