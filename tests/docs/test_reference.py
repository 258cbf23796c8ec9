"""The reference explains every option, keyword, field and public name."""

import inspect
import json
import re
import runpy

import pytest
from typer.testing import CliRunner

import mmspec
from mmspec import errors
from mmspec.accelerators import option_names
from mmspec.accelerators.meanings import Meaning, meaning_of, meanings_of, meanings_of_all, meanings_of_rule
from mmspec.cli.application import app
from mmspec.pipelines import ContinuousImagePipeline, ImagePipeline, VisionLanguagePipeline
from mmspec.pipelines.image_settings import ContinuousSettings, ImageSettings
from mmspec.pipelines.settings import GenerationSettings
from mmspec.plugins import METHODS, RULES, keywords
from mmspec.serving.schemas import BODIES
from tests.packaging.source_tree import ROOT

REFERENCE = ROOT / "docs" / "reference"
#: What a reader of a table cannot follow: names of classes, and references that were not resolved.
UNRESOLVED = re.compile(r"`[A-Z]\w*[a-z]\w*`|\bsee `|\bas of `|\bif None\b")
PIPELINES = {
    VisionLanguagePipeline: GenerationSettings,
    ImagePipeline: ImageSettings,
    ContinuousImagePipeline: ContinuousSettings,
}


def is_explained(found: Meaning) -> bool:
    return len(found.text) > 10 and bool(found.default) and not UNRESOLVED.search(found.text)


@pytest.mark.parametrize("name", METHODS)
def test_every_option_of_an_accelerator_has_a_meaning(name: str) -> None:
    found = [*meanings_of(METHODS[name]), *meanings_of_all()]
    assert {one.name for one in found} == option_names(name)
    assert [one for one in found if not is_explained(one)] == []


def test_the_command_lists_the_options_of_an_accelerator_with_the_same_meanings() -> None:
    shown = CliRunner().invoke(app, ["accelerators", "copy", "--json"])
    rows = {row["name"]: row for row in json.loads(shown.stdout)}
    (found,) = (one for one in meanings_of(METHODS["copy"]) if one.name == "min_match")
    assert rows["min_match"] == {"name": "min_match", "default": "1", "text": found.text}
    assert {"acceptance", "length", "stop_below"} < rows.keys()


def test_every_option_of_an_acceptance_rule_has_a_meaning() -> None:
    for name in RULES:
        found = meanings_of_rule(name)
        assert [one.name for one in found] == keywords(RULES[name])
        assert [one for one in found if not is_explained(one)] == []


def test_meanings_have_the_defaults_of_the_code() -> None:
    found = {one.name: one.default for one in meanings_of(METHODS["sjd"])}
    assert found["init"] == "`edge`" and found["reach"] == "the whole window"
    assert found["window"].startswith("on a GPU 32, on a CPU 16")
    assert {one.name: one.default for one in meanings_of(METHODS["gsd"])}["relaxation"] == "`groups`"
    heads = {one.name: one.default for one in meanings_of(METHODS["flash"])}
    assert heads["num_draft_tokens"] == "head's config (new heads: `16`)"


def undocumented(option: int = 3) -> int:
    """Return the option, without a word about it."""
    return option


def test_an_option_without_a_docstring_is_found() -> None:
    assert not is_explained(meaning_of(undocumented, "option"))


def test_every_keyword_of_a_pipeline_call_is_on_the_page_with_a_meaning() -> None:
    page = (REFERENCE / "call-keywords.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| .+ \| .+ \| (.{10,}) \|$", page, re.MULTILINE))
    for pipeline, settings in PIPELINES.items():
        called = inspect.signature(pipeline.__call__).parameters
        names = {name for name, item in called.items() if item.kind is not item.VAR_KEYWORD} - {"self"}
        assert names | set(inspect.signature(settings).parameters) <= rows.keys()


def test_every_field_of_a_request_is_on_the_page() -> None:
    page = (REFERENCE / "request-fields.md").read_text(encoding="utf-8")
    for body in BODIES.values():
        fields = [field.alias or name for name, field in body.model_fields.items()]
        assert all(f"| `{field}` |" in page for field in fields)
        assert all(f"`{field}`" in page for field in (*body.ignored, *body.refused))


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    page = (REFERENCE / "api.md").read_text(encoding="utf-8")
    names = [name for name in mmspec.__all__ if not name.startswith("_")]
    names += [name for name in errors.__all__ if isinstance(getattr(errors, name), type)]
    assert [name for name in names if f"`{name}`" not in page] == []
    listed = re.findall(
        r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", page.split("\n## ")[0], re.MULTILINE))
    )
    assert {name for name in mmspec.__all__ if not name.startswith("_")} - {*listed} <= {"errors"}


def test_the_api_has_the_calls_of_all_pipelines_and_no_internals() -> None:
    page = (REFERENCE / "api.md").read_text(encoding="utf-8")
    for name in ("VisionLanguagePipeline", "ImagePipeline", "ContinuousImagePipeline"):
        assert "| `__call__(prompt" in page.split(f"built: api mmspec.{name} ")[1].split("/built")[0]
    assert not re.search(r"\| `(?:count_round|overwritten|rule|drawn|latents)\(", page)


def test_every_entry_of_the_api_has_a_paragraph_and_a_signature_or_a_table() -> None:
    page = (REFERENCE / "api.md").read_text(encoding="utf-8")
    entries = re.findall(r"<!-- built: api (\S+) -->\n(.*?)<!-- /built -->", page, re.DOTALL)
    assert len(entries) > 15
    for name, text in entries:
        heading, *parts = text.strip().split("\n\n")
        assert heading == f"### `{name.rpartition('.')[2]}`"
        assert len(parts) >= 2 or "() ->" in text, name


def test_the_site_shows_the_rendered_entry_instead_of_the_written_one() -> None:
    pytest.importorskip("mkdocs")
    hooks = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))
    page = (REFERENCE / "api.md").read_text(encoding="utf-8")
    shown = hooks["ENTRY"].sub(r"::: \1", page)
    assert "::: mmspec.enable" in shown and "### `enable`" not in shown
    assert "`MissingDependencyError`" in shown
