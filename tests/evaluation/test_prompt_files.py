"""Prompt sets in the formats in which they are published, and files that cannot be used."""

import json

import pytest

from mmspec.errors import InputError
from mmspec.evaluation.prompt_files import read_prompt_file
from mmspec.evaluation.quality.text_scores import read_references


def test_lines_of_a_file(tmp_path):
    path = tmp_path / "x.jsonl"
    for name in ("images/a.png", "b.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    lines = [
        {"id": 7, "image": "images/a.png", "turns": ["one", "two"], "category": "chart", "topic": "sales"},
        {"prompt": "three", "image": None},
        {"turns": ["four"], "image": ["https://example.com/a.png", "b.png"], "topic": "sales"},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    first, second, third = read_prompt_file(path)
    assert first.turns == ("one", "two")
    assert first.images == (str(tmp_path / "images/a.png"),)
    assert (first.category, first.identifier) == ("chart", "7")
    assert (second.turns, second.images) == (("three",), ())
    assert third.images == ("https://example.com/a.png", str(tmp_path / "b.png"))
    assert third.category == "sales"
    assert len(read_prompt_file(path, 2)) == 2


def test_images_of_the_mmspec_benchmark_lie_in_a_folder_that_its_lines_do_not_name(tmp_path):
    path, images = tmp_path / "mmspec.jsonl", tmp_path / "images"
    images.mkdir()
    for file in (images / "in-folder.jpg", images / "in-both.jpg", tmp_path / "in-both.jpg"):
        file.touch()
    line = {"id": 1, "image": ["in-folder.jpg", "in-both.jpg", str(images / "in-both.jpg")], "turns": ["one"]}
    path.write_text(json.dumps(line))
    (example,) = read_prompt_file(path)
    expected = (images / "in-folder.jpg", tmp_path / "in-both.jpg", images / "in-both.jpg")
    assert example.images == tuple(map(str, expected)), "beside the file comes first, then its folder images"


def test_prompts_are_taken_evenly_from_categories_and_those_of_spec_bench_are_six(tmp_path):
    path = tmp_path / "x.jsonl"
    groups = [
        "qa",
        "qa",
        "qa",
        "rag",
        "coding",
        "stem",
        "translation",
        "summarization",
        "math_reasoning",
        "qa",
    ]
    rows = [{"turns": [str(place)], "category": group} for place, group in enumerate(groups)]
    rows.append({"turns": ["last"], "category": "stem", "image": "nowhere.png"})
    path.write_text("\n".join(map(json.dumps, rows)))
    found = read_prompt_file(path, 8, evenly=True)
    assert [example.turns[0] for example in found] == ["0", "1", "3", "4", "5", "6", "7", "8"]
    assert [example.category for example in found][3:5] == ["mt_bench", "mt_bench"]
    assert [example.turns[0] for example in read_prompt_file(path, 3)] == ["0", "1", "2"]
    with pytest.raises(InputError, match=r"x\.jsonl:11: image"):
        read_prompt_file(path, evenly=True)
    path.write_text("\n".join(map(json.dumps, rows[:6])))
    assert [example.category for example in read_prompt_file(path, evenly=True)] == groups[:6], (
        "no Spec-Bench"
    )


BAD_LINES = ["{", "[]", "3", "{}", '{"turns": []}', '{"turns": [1]}', '{"turns": ["a"], "image": 3}']


def test_files_that_cannot_be_used_are_refused_and_bad_lines_by_their_number(tmp_path):
    path = tmp_path / "x.jsonl"
    with pytest.raises(InputError, match="prompt file"):
        read_prompt_file(path)
    for data, expected in [
        *(('{"turns": ["a"]}\n' + line, r"x\.jsonl:2") for line in BAD_LINES),
        *((json.dumps({"prompt": "a", name: "b"}), rf":1: {name}") for name in ("video", "audio", "system")),
        ("", "prompt file"),
        ("\n \n", "prompt file"),
        ("Category,Prompts\nColors,a car\nColors\n", r"x\.jsonl:3"),
        ("a\nb\n".encode("utf-16"), r"x\.jsonl is UTF-16"),
        ("a\nb\n".encode("utf-16-le"), r"line 1 of x\.jsonl has a NUL"),
        (b"\xef\xbb\xbfa\nb\ncaf\xe9\n", r"line 3 of x\.jsonl has the byte 0xe9"),
        (b'prompt,x\n"' + b"a" * 200_000 + b'"\n', "field larger"),
    ]:
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        with pytest.raises(InputError, match=expected):
            read_prompt_file(path)
    path.write_text(json.dumps({"prompt": "a", "video": None}))
    assert read_prompt_file(path)
    path.write_text("prompt,references\na,b\n")
    with pytest.raises(InputError, match=r"x\.jsonl:1"):
        read_references(path)


def written(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
    return path


def test_lists_of_json_are_read_row_by_row(tmp_path):
    rows = [{"prompt": "a red ring", "category": "x"}, {"turns": ["one", "two"]}, "a blue cross"]
    wanted = [("a red ring",), ("one", "two"), ("a blue cross",)]
    for name in ("a.json", "a.jsonl", "a", "a.txt"):
        found = read_prompt_file(written(tmp_path / name, rows))
        assert [one.turns for one in found] == wanted
        assert [one.identifier for one in found] == [f"{name}[{index}]" for index in range(3)]
    found = read_prompt_file(written(tmp_path / "one_line.json", json.dumps(rows)), 2, evenly=True)
    assert [one.turns for one in found] == wanted[:2]
    lines = "\n".join(map(json.dumps, rows))
    assert [one.turns for one in read_prompt_file(written(tmp_path / "lines.jsonl", lines))] == wanted
    answers = [{"prompt": "a", "references": ["b"]}] * 2
    assert [one.references for one in read_references(written(tmp_path / "r.json", answers))] == [("b",)] * 2
    path = written(tmp_path / "a.txt", "[INST] a red ring [/INST]\n[INST] a star [/INST]\n")
    assert [one.turns[0] for one in read_prompt_file(path)] == path.read_text().splitlines()


def test_tables_are_read_by_a_column_that_holds_their_prompts_and_with_their_images(tmp_path):
    (tmp_path / "a.png").touch()
    for name, content in (
        ("a.csv", "id,caption\n1,a red ring\n2,a blue cross\n"),
        ("a.tsv", "id\ttext\n1\ta red ring\n2\ta blue cross\n"),
        ("b.csv", "caption,prompt\nno,a red ring\nno,a blue cross\n"),
        (
            "c.csv",
            ",".join(f"c{index}" for index in range(9))
            + ",prompt\n"
            + ",,,,,,,,,a red ring\n,,,,,,,,,a blue cross",
        ),
    ):
        found = read_prompt_file(written(tmp_path / name, content))
        assert [one.turns[0] for one in found] == ["a red ring", "a blue cross"], name
        assert found[0].identifier == f"{name}:2"
    for column in ("question", "Prompt"):
        table = written(tmp_path / "d.csv", f"image,{column},category\na.png,what is there,x\n,and here,\n")
        shown, bare = read_prompt_file(table)
        assert (shown.images, shown.category, bare.images) == ((str(tmp_path / "a.png"),), "x", ())


UNREADABLE = [
    ("a.json", {"prompts": ["a red ring"]}, "must be a JSON object"),
    ("a.json", [{"text": "a red ring"}], r"a.json\[0\] must be .*'turns' or 'prompt'"),
    ("a.json", [["a red ring"]], r"a.json\[0\] must be .*'turns' or 'prompt'"),
    ("a.json", "a red ring\na blue cross", r"a.json:1 must be a JSON object.*got 'a red ring'"),
    ("a.jsonl", "[INST] a red ring", "must be a JSON object"),
    ("a.jsonl", '{"text": "a red ring"}', "'turns' or 'prompt'"),
    (
        "a.csv",
        "a red ring\na blue cross",
        "a.csv must have a header with the column 'prompt'.*got 'a red ring'",
    ),
    ("a.csv", "id;prompt\n1;a red ring", "a header with the column 'prompt'"),
    ("a.csv", "text,caption\na,b", "a header with the column 'prompt'"),
    ("a.csv", "image,question\nnone.png,what is there", "a.csv:2: image must be .*got 'none.png'"),
    ("a.csv", "prompt,video\na,b.mp4", "a.csv:2: video"),
    (
        "a.yaml",
        "- a red ring\n- a blue cross\n",
        "a .txt file with one prompt per line, or one of .json, .jsonl",
    ),
    ("a.html", "<p>a red ring</p>", "must be a .txt file"),
    ("a.parquet", "PAR1", "must be a .txt file"),
]


def test_forms_that_are_not_known_are_refused_and_not_read_line_by_line(tmp_path):
    for name, content, expected in UNREADABLE:
        with pytest.raises(InputError, match=expected):
            read_prompt_file(written(tmp_path / name, content))


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_lines_end_at_line_feeds_alone_and_quoted_line_breaks_stay(tmp_path, mark):
    path = tmp_path / "x"
    odd = "a\u2028b\u2029c\u0085d\x0be\x0cf"
    strict = json.dumps({"prompt": odd[:7], "references": ["a"]}, ensure_ascii=False)
    path.write_bytes((mark + "\r\n" + strict + "\r\n\r\n" + strict).encode())
    assert [(one.turns[0], one.identifier) for one in read_prompt_file(path)] == [
        (odd[:7], "x:2"),
        (odd[:7], "x:4"),
    ]
    assert [one.references for one in read_references(path)] == [("a",), ("a",)]
    for end in ("\n", "\r\n"):
        for separator in ",\t":
            cells = separator.join(['"Prompt"', "Category"]) + end
            cells += separator.join([f'"a red{end}ring"', "x"]) + end + separator.join([odd, "y"]) + end
            path.write_bytes((mark + cells).encode())
            found = read_prompt_file(path)
            assert [(one.turns[0], one.category) for one in found] == [(f"a red{end}ring", "x"), (odd, "y")]
        path.write_bytes((mark + odd + end + "two").encode())
        assert [one.turns[0] for one in read_prompt_file(path)] == [odd, "two"]
    path.write_text("a" * 200_000)
    assert len(read_prompt_file(path)) == 1, "more than a cell of a table may have"
