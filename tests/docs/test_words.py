"""Pages, docstrings, comments and error texts use the words of the glossary in docs/reference."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.source_tree import ROOT

GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
#: Phrases to avoid.
RIDDLES = (
    r"(?:is|are|was|were|be) told",
    r"tells? of",
    r"says? so",
    r"knows? of",
    r"for which there is no",
    r"a client that goes",
    r"as it pays",
    r"tokens? (?:a|each|per) (?:forward|pass)(?! pass)",
)
#: "forward" as a noun. "forward pass", the verb, and the attribute `forwards` in a list of attributes stay.
NOUN = (
    r"(?:\b(?:a|an|one|each|every|per|the|no|this|that|in|fewer|more|single|plain|of)\s+forward\b"
    r"(?!\s+(?:pass|hook|method|function|progress))|\bforwards\b(?!:))"
)
MOST_TERMS = 41  # with the header
LONGEST_LINE = 110
MOST_WORDS = 22_000  # of README.md and docs, without notes, tables and code
MOST_WORDS_OF_A_METHOD = 400
CODE = re.compile(r"```.*?```|``[^`]+``|`[^`]*`|\]\([^)]*\)|<[^>]+>|https?://\S+", re.DOTALL)
BUILT = re.compile(r"<!-- built: .*?<!-- /built -->", re.DOTALL)
#: What is not prose: generated parts, blocks of code, rows of tables.
NOT_PROSE = re.compile(rf"{BUILT.pattern}|^ *```.*?^ *```$|^ *\|.*?$", re.DOTALL | re.MULTILINE)
ERRORS = {"InputError", "MediaError", "CheckpointError", "UnknownArgumentError"}
#: How the rule of an error begins: "{argument} {rule}; got {got}".
VERBS = re.compile(
    r"(?:must|cannot|can|is|are|has|have|had|does|do|did|needs?|holds?|names?|takes?|lacks?|was|were|fits?|gives?|ends?|comes?|"
    r"contains?|exceeds?|makes?|leaves?|requires?|belongs?|appears?|stands?|matches|differs?|repeats?|expects?|reads?|"
    r"stops?|failed|refers?|points?|asks?|accepts?|uses?|may|works?|applies|apply|would|could|should|supports?|describes?|"
    r"returned|returns?|wants?|mixes|mix|looks?|starts?|gave|exists?)\b"
)


def forbidden() -> list[re.Pattern[str]]:
    rows = [line.strip("|\n").split("|") for line in GLOSSARY.read_text(encoding="utf-8").splitlines()]
    words = [word.strip() for row in rows[1:] if len(row) == 3 for word in row[2].split(",")]
    words = [word for word in words if word and word not in ("not", "---") and "(as a noun)" not in word]
    assert len(words) > 15
    # `speculators` is a package of vLLM's authors.
    plural = (rf"\b(?!speculators\b){re.escape(word)}s?\b" for word in words)
    return [re.compile(one, re.IGNORECASE) for one in (*plural, NOUN, *RIDDLES)]


def pages() -> Iterator[tuple[str, str]]:
    """The hand-written prose of each page, without code, links and what docs/build.py writes."""
    places = [ROOT.glob("*.md"), ROOT.glob("assets/*/README.md"), ROOT.glob("demos/*/README.md")]
    places += [ROOT.glob("docs/**/*.md"), ROOT.glob("extras/**/*.md")]
    for path in (path for place in places for path in place):
        if "notes" in path.parts or path == GLOSSARY:
            continue
        text = BUILT.sub("", path.read_text(encoding="utf-8"))
        yield str(path.relative_to(ROOT)), CODE.sub("", text)


def test_lines_of_pages_fit_beside_a_diff() -> None:
    """Commands, tables and lines that are one piece of code may be longer."""
    long = []
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("demos/*/README.md")):
        if "notes" in path.parts:
            continue
        text = re.sub(r"```.*?```", "", BUILT.sub("", path.read_text(encoding="utf-8")), flags=re.DOTALL)
        lines = (line for line in text.splitlines() if not line.startswith("|"))
        long += [f"{path.name}: {line}" for line in lines if len(line) > LONGEST_LINE]
    assert long == []


def count_words(text: str) -> int:
    """Words of a page's prose."""
    return sum(re.search(r"\w", word) is not None for word in NOT_PROSE.sub("", text).split())


def test_pages_are_short() -> None:
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "notes" not in page.parts]
    words = {page: count_words(page.read_text(encoding="utf-8")) for page in [ROOT / "README.md", *pages]}
    assert sum(words.values()) <= MOST_WORDS
    methods = [*(ROOT / "docs" / "methods").glob("*.md"), *(ROOT / "extras" / "docs").glob("*.md")]
    long = {page.name: count_words(page.read_text(encoding="utf-8")) for page in methods}
    assert {name: count for name, count in long.items() if count > MOST_WORDS_OF_A_METHOD} == {}


def test_words_are_counted_in_prose_alone() -> None:
    built, code = "<!-- built: x -->\nno\n<!-- /built -->", "```py\n# no\n```"
    assert count_words(f"# One - two\n\n{built}\n| no |\n\n{code}\n- three `four`\n") == 4


def modules() -> Iterator[Path]:
    for folder in (
        "mmspec",
        "pipelines",
        "kernels/torch-ext",
        "extras/mmspec_extras",
        "reference",
        "benchmarks",
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                yield path


def prose(source: str) -> Iterator[str]:
    """Docstrings and comments of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield CODE.sub("", ast.get_docstring(node) or "")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield CODE.sub("", token.string)


def found(texts: Iterator[tuple[str, str]]) -> list[str]:
    patterns = forbidden()
    return sorted(
        f"{place}: {match[0]!r} in {text[max(0, match.start() - 30) : match.end() + 30]!r}"
        for place, text in texts
        for pattern in patterns
        for match in pattern.finditer(text)
    )


def test_the_glossary_is_short() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) <= MOST_TERMS
    assert len({row.lower() for row in rows}) == len(rows)


def test_pages_use_the_words_of_the_glossary() -> None:
    assert found(pages()) == []


def test_docstrings_and_comments_use_the_words_of_the_glossary() -> None:
    texts = (
        (str(path.relative_to(ROOT)), text)
        for path in modules()
        for text in prose(path.read_text(encoding="utf-8"))
    )
    assert found(texts) == []


def leading(node: ast.expr) -> str | None:
    """The text with which an expression begins, or None where a name or a placeholder comes first."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr) and node.values:
        return leading(node.values[0])
    return leading(node.left) if isinstance(node, ast.BinOp) else None


def test_error_texts_begin_with_the_rule() -> None:
    wrong = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS:
                text = leading(node.args[2]) if len(node.args) > 2 else None
                if text is not None and not VERBS.match(text):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text}")
    assert wrong == []


@pytest.mark.parametrize(
    "text", ["2.1 tokens a forward", "the verifier decides", "forwards of the target", "a row is told"]
)
def test_old_words_are_found(text: str) -> None:
    assert found(iter([("page", text)]))


def test_links_between_pages_resolve_with_their_anchors() -> None:
    missing = []
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\((?!https?:)([^)\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")):
            target = page.parent / link[0] if link[0] else page
            if target.suffix == ".md" and link[1] not in anchors(target):
                missing.append(f"{page.name}: {link[0]}#{link[1]}")
    assert missing == []


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"\]\([^)]*\)|[`*\[\]]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}
