"""Tables, plots, HTML reports, result lines and comparisons of benches."""

import json
from dataclasses import replace
from io import StringIO

import pytest
from PIL import Image
from rich.console import Console
from rich.table import Table

from mmspec.errors import InputError
from mmspec.evaluation.examples import Example
from mmspec.evaluation.speed.bench_files import compare_benches, result_lines, write_result_lines
from mmspec.evaluation.speed.plots import Sample, draw_bench, html_report
from mmspec.evaluation.speed.record import as_json, summarise
from mmspec.evaluation.speed.report import bench_report, image_report
from tests.evaluation.test_speed import run, stats


def text(renderable, width=160) -> str:
    console = Console(file=StringIO(), width=width, markup=False)
    console.print(renderable)
    return console.file.getvalue()


def measured():
    of = stats(10, 4, accepted=5, drafted=8, histogram={0: 1, 1: 1, 2: 2})
    runs = [run("none", r, 2.0 + b, batch=b) for r in range(2) for b in range(4)]
    return runs + [run("copy", r, 1.0 + b / 4, batch=b, of=of) for r in range(2) for b in range(4)]


def records():
    settings = {"model": "a<b", "batch_size": 1, "samples": 4}
    return summarise(measured(), ["none", "copy"], settings=settings)


def test_records_have_intervals_that_hold_their_figures():
    plain, copied = records()
    assert plain.speedup_interval == (1.0, 1.0)
    low, high = copied.speedup_interval
    assert low < copied.speedup < high
    assert copied.acceptance_interval == pytest.approx((9 / 4, 9 / 4))
    assert copied.joules_per_token is None


def test_a_report_holds_everything_and_nothing_of_a_prompt_runs():
    pytest.importorskip("matplotlib")
    found = records()
    sample = Sample("<script>alert(1)</script>", [Image.new("RGB", (4, 4))], {"none": "a & b", "copy": "a"})
    drawn = Sample("a ring", [], {"none": Image.new("RGB", (4, 4)), "copy": Image.new("RGB", (4, 4))})
    page = html_report(found, bench_report(found), [sample, drawn])
    assert "<script>alert" not in page
    for word in ("&lt;script&gt;", "a &amp; b", "a&lt;b |", f"{found[1].speedup:.2f}x ("):
        assert word in page
    table = page.partition("<table>")[2].partition("</table>")[0]
    assert table.count("<tr>") == 3 and table.count("<td>") == 2 * table.count("<th ")
    assert "tokens/pass</button>" in table and f"<td>{found[1].acceptance_length:.2f}" in table
    assert page.count("<img") == 3 + 1 + 2  # plots, the input, two images that were drawn
    for word in ("http:", "https:", "<link", "@import", 'src="/'):
        assert word not in page


def test_result_lines_are_those_of_the_benchmarks_scripts(tmp_path):
    runs = measured()
    batches = [[Example(("a",), category="chart", identifier=str(b))] for b in range(4)]
    lines = result_lines("copy", runs, batches, lambda tokens: " ".join(map(str, tokens)))
    assert [line["question_id"] for line in lines] == ["0", "1", "2", "3"]
    (choice,) = lines[1]["choices"]
    assert (choice["turns"], choice["new_tokens"], choice["wall_time"]) == (["1 2"], [10], [1.25])
    assert choice["accept_lengths"] == [1, 2, 3, 3] and choice["decoding_steps"] == [5]
    write_result_lines(tmp_path / "out", ["copy"], runs, batches, str)
    (path,) = (tmp_path / "out").iterdir()
    assert [json.loads(line)["category"] for line in path.read_text().splitlines()] == ["chart"] * 4
    with pytest.raises(InputError, match="batch-size"):
        result_lines("copy", runs, [batches[0] * 2], str)


@pytest.fixture
def written(tmp_path):
    def write(name, **changes):
        path, value = tmp_path / name, as_json(records())
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


def test_tables_have_at_most_seven_columns_and_names_break_before_options():
    label = "eagle:drafter=some/long/folder/of/heads:copy=true:num_draft_tokens=8"
    found = [replace(one, accelerator=label) for one in records()]
    for part in bench_report(found, found).renderables:
        if isinstance(part, Table):
            assert len(part.columns) <= 7
    lines = [line.strip() for line in text(bench_report(found), 120).splitlines()]
    assert any(line.startswith("eagle ") for line in lines)
    for words in (":drafter=some/long/folder/of/heads", ":copy=true", ":num_draft_tokens=8"):
        assert any(line.startswith(words) for line in lines)
    assert any(
        len(part.columns) > 7
        for part in bench_report(found, wide=True).renderables
        if isinstance(part, Table)
    )


def test_each_task_has_its_rows_and_its_panel(tmp_path):
    runs = []
    for batch, task in enumerate(("caption", "clip")):
        plain = stats(11, 10, seconds=6.0, prefill_seconds=1.0, prompt_seconds=1.0, target_seconds=4.0)
        times = {"seconds": 2.0 + batch, "prefill_seconds": 1.0, "prompt_seconds": 0.75}
        fast = stats(11, 2, accepted=8, histogram={4: 2}, draft_passes=4, target_seconds=0.5, **times)
        runs.append(run("none", 0, 8.0, batch=batch, category=task, of=plain))
        runs.append(run("flash", 0, 4.0, batch=batch, category=task, of=fast))
    names, own = ["none", "flash"], {"flash": {"parameters": 1_500_000}}
    whole, *tasks = (summarise(runs, names, category=task, own=own) for task in (None, "caption", "clip"))
    parts = [one for task in tasks for one in task]
    shown = text(bench_report(whole, parts, wide=True))
    for part in ("caption", "clip", "1.50 M", "5.00x", "2.50x", "2.00x (2.00-2.00)"):
        assert part in shown
    pytest.importorskip("matplotlib")
    alone = draw_bench(tmp_path / "whole.png", whole).stat().st_size
    assert draw_bench(tmp_path / "parts.png", whole, parts).stat().st_size > alone > 5_000


@pytest.mark.parametrize("wide", [False, True])
def test_images_are_shown_with_their_settings_and_scores(wide, tmp_path):
    width = 160 if wide else 100
    tv = {"tv_sum": 0.3, "tv_max": 0.2, "tv_places": 6}
    runs = [run("none", 0, 5.0, of=stats(16, 15), pixels=1.0)]
    runs += [run("dark", 0, 2.0, of=stats(16, 3, exactness="tv<=0.1", **tv), pixels=1.0)]
    context = {"guidance_scale": 2.0, "temperature": 1.0, "baseline": "plain decoding"}
    context |= {"top_k": 0, "top_p": 1.0, "min_p": 0.1}
    quality = {
        "kid": {"value": 3.0, "low": -1.0, "high": 7.0},
        "attributes": {"value": 0.5, "low": 0.2, "high": 0.8},
    }
    own = {"none": {"promise": "exact", "window": 1}, "dark": {"promise": "lossy, no bound", "window": 2}}
    found = summarise(runs, ["none", "dark"], settings=context, own=own)
    shown = text(image_report([replace(one, quality=quality) for one in found], wide=wide), width)
    assert "…" not in shown
    shown = " ".join(shown.split())
    for part in ("4.00x", "2.50x", "lossy, no", "0.050", "guidance 2", "top-k off", "min-p 0.1", "16.0"):
        assert part in shown, part
    for part in ("3 (-1 to 7)", "0.5 (0.2 to 0.8)", "dark *"):
        assert part in shown
    assert ("further columns with --wide" in shown) != wide
    with pytest.raises(KeyError, match="promise"):
        image_report(summarise(runs, ["none", "dark"], settings=context))
    pytest.importorskip("matplotlib")
    read = [replace(one, quality=quality) for one in found]
    assert draw_bench(tmp_path / "images.png", read).stat().st_size > 5_000
