"""Tables, plots, HTML reports, result lines and comparisons of benches; intervals and energy."""

import json
import sys
import types
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from mmspec.decoding.stats import DecodingStats
from mmspec.errors import InputError
from mmspec.evaluation.examples import Example
from mmspec.evaluation.identity.comparison import Comparison, Difference, IdentityReport, identity_report
from mmspec.evaluation.speed.bench_files import compare_benches, result_lines, write_result_lines
from mmspec.evaluation.speed.html_report import Sample, html_report
from mmspec.evaluation.speed.record import as_json, ratio_interval, speedup_interval, summarise
from mmspec.evaluation.speed.report import REQUIRED, bench_report, image_report
from mmspec.evaluation.speed.timing import EnergyMeter
from mmspec.evaluation.tables import draw_bench
from tests.evaluation.test_speed import run, stats


def test_an_interval_covers_what_it_should():
    """Prompts of random ratios around 2: the interval of 40 of them holds the truth about 19 times in 20."""
    generator, held, widths = np.random.default_rng(1), 0, []
    for _ in range(60):
        ours = generator.uniform(1, 3, 40)
        plain = ours * generator.normal(2.0, 0.5, 40)
        low, high = speedup_interval([plain], [ours])
        assert low <= plain.sum() / ours.sum() <= high
        held += low <= 2.0 <= high
        widths.append(high - low)
    assert 51 <= held <= 60
    normal = 2 * 1.96 * 0.5 / 40**0.5 * (1 + 1 / 12) ** 0.5  # weighted by seconds, uniform from 1 to 3
    assert np.median(widths) == pytest.approx(normal, rel=0.1)


def test_few_prompts_have_no_interval_and_equal_ones_none_to_speak_of():
    assert speedup_interval([[1.0, 2.0]], [[1.0, 1.0]]) is None
    assert speedup_interval([[2.0] * 4] * 3, [[1.0] * 4] * 3) == (2.0, 2.0)
    assert ratio_interval([4, 4, 4], [0, 0, 0]) is None
    low, high = ratio_interval([1, 5, 3], [1, 1, 1])
    assert low < 3 < high


def records():
    of = stats(10, 4, accepted=5, drafted=8, histogram={0: 1, 1: 1, 2: 2})
    runs = [run("none", r, 2.0 + b, batch=b) for r in range(2) for b in range(4)]
    runs += [run("copy", r, 1.0 + b / 4, batch=b, of=of) for r in range(2) for b in range(4)]
    return runs, summarise(runs, ["none", "copy"], settings={"model": "a<b", "batch_size": 1, "samples": 4})


def test_records_have_intervals_that_hold_their_figures():
    _, (plain, copied) = records()
    assert plain.speedup_interval == (1.0, 1.0)
    low, high = copied.speedup_interval
    assert low < copied.speedup < high
    assert copied.acceptance_interval == pytest.approx((9 / 4, 9 / 4))
    assert copied.joules_per_token is None


def test_energy_is_what_the_driver_counts(monkeypatch):
    assert EnergyMeter.start(torch.device("cpu")).read() is None
    counter = iter([5_000, 12_500])
    library = types.SimpleNamespace(
        NVMLError=LookupError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(counter),
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid="7"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert EnergyMeter.start(torch.device("cuda", 0)).read() == 7.5
    library.nvmlInit = lambda: {}["no driver"]
    assert EnergyMeter.start(torch.device("cuda", 0)).read() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert EnergyMeter.start(torch.device("cuda", 0)).read() is None


def test_a_report_holds_everything_and_nothing_of_a_prompt_runs():
    pytest.importorskip("matplotlib")
    _, found = records()
    sample = Sample("<script>alert(1)</script>", [Image.new("RGB", (4, 4))], {"none": "a & b", "copy": "a"})
    drawn = Sample("a ring", [], {"none": Image.new("RGB", (4, 4)), "copy": Image.new("RGB", (4, 4))})
    page = html_report(found, [sample, drawn])
    assert (
        "<script>alert" not in page and "&lt;script&gt;" in page and "a &amp; b" in page and "a&lt;b" in page
    )
    assert page.count("<img") == 3 + 1 + 2  # plots, the input, two images that were drawn
    for word in ("http:", "https:", "<link", "@import", 'src="/'):
        assert word not in page
    assert f"{found[1].speedup:.2f}x [" in page


def test_result_lines_are_those_of_the_benchmarks_scripts(tmp_path):
    runs, _ = records()
    batches = [[Example(("a",), category="chart", identifier=str(b))] for b in range(4)]
    lines = result_lines("copy", runs, batches, lambda tokens: " ".join(map(str, tokens)))
    assert [line["question_id"] for line in lines] == ["0", "1", "2", "3"]
    (choice,) = lines[1]["choices"]
    assert (choice["turns"], choice["new_tokens"], choice["wall_time"]) == (["1 2"], [10], [1.25])
    assert choice["accept_lengths"] == [1, 2, 3, 3] and choice["decoding_steps"] == [5]
    (path,) = write_result_lines(tmp_path / "out", ["copy"], runs, batches, str)
    assert [json.loads(line)["category"] for line in path.read_text().splitlines()] == ["chart"] * 4
    with pytest.raises(InputError, match="batch-size"):
        result_lines("copy", runs, [batches[0] * 2], str)


@pytest.fixture
def written(tmp_path):
    def write(name, **changes):
        _, found = records()
        path = tmp_path / name
        value = as_json(found)
        value["settings"] |= {key: one for key, one in changes.items() if key in ("torch", "batch_size")}
        for one in value["records"]:
            one |= {key: new for key, new in changes.items() if key in one}
        path.write_text(json.dumps(value))
        return path

    return write


def test_benches_are_compared_by_their_ratios(written):
    before, after = written("a.json"), written("b.json", torch="3")
    (plain, copied), told = compare_benches(before, after)
    assert (plain.ratio, copied.ratio, copied.differs, copied.same_figures) == (1.0, 1.0, False, True)
    assert told == ["torch: None and 3"]
    faster = written("c.json", speedup=9.0, speedup_interval=[8.0, 10.0], seconds=1.0)
    (_, copied), _ = compare_benches(before, faster)
    assert copied.differs is True and copied.ratio == pytest.approx(9.0 / copied.before)
    (_, slower), _ = compare_benches(faster, before)
    assert slower.differs is True and slower.ratio == pytest.approx(slower.after / 9.0)


def test_what_is_no_bench_is_refused(written, tmp_path):
    for content, named in [
        ("", "JSONDecodeError"),
        ('{"settings": {}, "records": []}', "no record"),
        ('{"settings": {}, "records": [{"accelerator": "x"}]}', "speedup"),
    ]:
        path = tmp_path / "bad.json"
        path.write_text(content)
        with pytest.raises(InputError, match=named):
            compare_benches(written("a.json"), path)


def test_benches_of_other_prompts_are_refused(written):
    with pytest.raises(InputError, match="batch_size"):
        compare_benches(written("a.json"), written("b.json", batch_size=4))
    with pytest.raises(InputError, match="in common"):
        compare_benches(written("a.json"), written("b.json", accelerator="other"))


def text(renderable, width=160) -> str:
    console = Console(file=StringIO(), width=width, markup=False)
    console.print(renderable)
    return console.file.getvalue()


def test_a_table_fits_its_screen():
    for width in [80, 149, 150]:
        name = "draft_model:num_draft_tokens=7"
        runs = [run("none", 0, 2.0), run(name, 0, 4.0)]
        records = summarise(runs, ["none", name], settings={"model": "m", "batch_size": 1})
        shown = text(bench_report(records, records, width=width), width)
        assert "…" not in shown
        assert "0.50x" in shown  # the losing row
        assert ("left out on a narrow screen" in shown) == (width < 150)


def test_differences_are_shown_and_counted():
    differences = [Difference(i, 3, 5, None, 0.25, 4.0, False) for i in range(7)]
    comparison = Comparison("greedy", "model.generate", 8, 64, differences, DecodingStats())
    report = IdentityReport("copy", "exact", "bfloat16", "cpu", [comparison], ["[a note]"])
    shown = text(identity_report(report, lambda token: f"[word {token}]", ["[first]"]))
    for part in ("FAILED", "1 of 8", "'[word 5]' (5)", "(end)", "[first]", "prompt 1", "2 more", "[a note]"):
        assert part in shown


@pytest.fixture(scope="module")
def by_task():
    runs = []
    for batch, task in enumerate(("caption", "clip")):
        plain = stats(11, 10, seconds=6.0, prefill_seconds=1.0, prompt_seconds=1.0, target_seconds=4.0)
        fast = stats(
            11, 2, accepted=8, histogram={4: 2}, draft_passes=4,
            seconds=2.0 + batch, prefill_seconds=1.0, prompt_seconds=0.75, target_seconds=0.5,
            draft_seconds=0.25, verify_seconds=0.125,
        )  # fmt: skip
        runs.append(run("none", 0, 8.0, batch=batch, category=task, of=plain))
        runs.append(run("flash", 0, 4.0, batch=batch, category=task, of=fast))
    names, own = ["none", "flash"], {"flash": {"parameters": 1_500_000}}
    whole = summarise(runs, names, own=own)
    return whole, [
        one for task in ("caption", "clip") for one in summarise(runs, names, category=task, own=own)
    ]


def test_each_task_has_its_rows_and_its_panel(by_task, tmp_path):
    whole, parts = by_task
    shown = text(bench_report(whole, parts))
    for part in ("caption", "clip", "1.50 M", "5.00x", "2.50x", "2.00x (2.00-2.00)"):
        assert part in shown
    pytest.importorskip("matplotlib")
    alone = draw_bench(tmp_path / "whole.png", whole).stat().st_size
    assert draw_bench(tmp_path / "parts.png", whole, parts).stat().st_size > alone > 5_000


def test_images_that_were_read_are_shown_with_what_they_are_of(tmp_path):
    runs = [run("none", 0, 4.0, of=stats(16, 15)), run("dark", 0, 1.0, of=stats(16, 3, exactness="tv<=0.1"))]
    context = {name: 1 for name in REQUIRED} | {"top_k": 0, "top_p": 1.0, "min_p": None}
    quality = {
        "kid": {"value": 3.0, "low": -1.0, "high": 7.0},
        "attributes": {"value": 0.5, "low": 0.2, "high": 0.8},
    }
    found = [
        replace(one, quality=quality, own={"promise": "exact", "window": 1})
        for one in summarise(runs, ["none", "dark"], settings=context)
    ]
    shown = text(image_report(found))
    for part in ("4.00x", "3 (-1 to 7)", "0.5 (0.2 to 0.8)", "dark *"):
        assert part in shown
    pytest.importorskip("matplotlib")
    assert draw_bench(tmp_path / "images.png", found).stat().st_size > 5_000
