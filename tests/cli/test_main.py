"""The outermost frame: what becomes of errors, and of a real process."""

import json
import os
import subprocess
import sys

from tests.packaging.source_tree import ROOT


def test_an_error_is_one_line_and_exit_code_2(fails):
    for arguments, message in [
        (["bench", "x", "--accelerators", "none,copi"], "did you mean 'copy'"),
        (["check", "x", "--accelerator", "draft_modle"], "did you mean 'draft_model'"),
        (["caption", "x.png", "--accelerator", "copy:oops", "--model", "x"], "name=value"),
        (["check", "x", "--accelerator", "draft_model"], "--drafter"),
        (["check", "/no/such/folder"], "folder that holds a checkpoint"),
        (["check", "x", "--dtype", "bfloat"], "did you mean 'bfloat16'"),
        (["scenes", "--out", "/proc/none/x.png"], "--out"),
    ]:
        assert message in fails(*arguments)


def test_a_misspelt_option_of_an_accelerator_is_named(fails, tiny_folder):
    message = fails("check", tiny_folder, "--accelerator", "copy:max_draft_token=3", "--samples", 1)
    assert "max_draft_token" in message
    assert "allowed" in message


def test_a_missing_image_is_named(fails, tiny_folder):
    assert "zz.png" in fails("caption", "zz.png", "--model", tiny_folder)


def test_without_reference_models_the_error_says_where_they_come_from(fails, no_reference_models):
    assert "comes with a clone" in fails("bench")


def test_a_real_process_from_another_folder(tiny_folder, images, tmp_path):
    command = [sys.executable, "-m", "mmspec", "caption", images[0], "--model", str(tiny_folder)]
    done = subprocess.run(
        [*command, "--max-new-tokens", "8", "--compare", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(done.stdout)
    assert record["identical"] is True
    assert record["new_tokens"] == 8
    assert "Traceback" not in done.stderr
