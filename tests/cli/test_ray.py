"""`--ray`: resumed folders, and a local Ray cluster of two workers, one of which is killed during the run."""

import json
import os
import signal
import threading
import time

import pytest

from mmspec.errors import InputError
from mmspec.many.pool import PipelineWorker
from mmspec.many.work import Item, Work, finished, open_folder, result_file

PROMPTS = ["a red ring", "a blue star on grass", "a small green cross", "a large white square"]


def work_in(folder, **changes):
    settings = {"model": "assets/scenes-llava", "draws": False, "accelerator": "copy", "options": {}}
    settings |= {"settings": {"max_new_tokens": 6}, "seed": 3, "dtype": "float32", "folder": str(folder)}
    return Work(**{**settings, **changes})


def items_of(count=3):
    return [Item(index, PROMPTS[index % 4]) for index in range(count)]


def test_a_folder_is_resumed_and_other_work_is_refused(tmp_path):
    work, items = work_in(tmp_path / "out"), items_of()
    assert open_folder(work, items) == items
    result_file(work.folder, 1).write_text(json.dumps({"index": 1}))
    assert [item.index for item in open_folder(work, items)] == [0, 2]
    assert finished(work, items) == [{"index": 1}]
    for other, given in ((work_in(tmp_path / "out", seed=4), items), (work, items_of(4))):
        with pytest.raises(InputError, match="other prompts or settings"):
            open_folder(other, given)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").touch()
    with pytest.raises(InputError, match="new or empty"):
        open_folder(work_in(tmp_path / "full"), items)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="can be written"):
        open_folder(work_in(tmp_path / "file" / "out"), items)


def test_a_worker_writes_what_the_pipeline_says_whatever_its_batches_are(tmp_path):
    from mmspec import MMSpecPipeline

    sampled = {"max_new_tokens": 6, "temperature": 20.0}  # no two seeds alike
    work, items = work_in(tmp_path, settings=sampled), items_of()
    worker = PipelineWorker(work)
    rows = [json.dumps(vars(item)) for item in items]
    assert worker({"item": rows[:2]}) == {"index": [0, 1]}
    assert worker({"item": rows[2:]}) == {"index": [2]}
    pipe = MMSpecPipeline.from_pretrained("assets/scenes-llava", dtype="float32")
    for record, item in zip(finished(work, items), items, strict=True):
        expected = pipe(item.prompt, images=[], seed=3 + item.index, **sampled)
        assert (record["text"], record["prompt"]) == (expected.text[0], item.prompt)
    assert not list(tmp_path.glob(".*")), "no temporary file is left"


@pytest.mark.slow
def test_images_of_two_workers_are_those_of_one_machine_though_one_was_killed(run_json, tmp_path):
    pytest.importorskip("ray")
    prompts, out = tmp_path / "prompts.txt", tmp_path / "drawn"
    prompts.write_text("\n".join(PROMPTS * 3))
    killed = []

    def kill_one():
        deadline = time.monotonic() + 200
        while not (done := list(out.glob("0*.json"))) and time.monotonic() < deadline:
            time.sleep(0.02)
        killed.append(int(json.loads(done[0].read_text())["worker"].split(":")[1]))
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    asked = ("generate", "--ray", "--workers", 2, "--prompt-file", prompts, "--out", out, "--seed", 5)
    records = run_json(*asked)
    killer.join()
    assert killed, "a worker was killed in the middle"
    assert [record["index"] for record in records] == list(range(12))
    assert len({record["worker"] for record in records}) > 1
    times = {path.name: path.stat().st_mtime_ns for path in out.glob("0*.png")}
    assert len(times) == 12
    assert run_json(*asked) == records, "a second run has nothing left to do"
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("0*.png")} == times
    alone = tmp_path / "alone"
    work = Work(
        **{**json.loads((out / "job.json").read_text(), object_hook=without_marks), "folder": str(alone)}
    )
    alone.mkdir()
    worker = PipelineWorker(work)
    for index in (0, 5, 11):
        worker.decode(Item(index, PROMPTS[index % 4]))
        name = f"{index:05}.png"
        assert (alone / name).read_bytes() == (out / name).read_bytes()


def without_marks(stored):
    return {key: value for key, value in stored.items() if key not in ("fingerprint", "items")}
