"""Rules of the house that a reader of the source can check, for every module of the package."""

import ast
import re
import sys

from tests.packaging.source_tree import ROOT, Module, imported_names, modules, parse

MODULES = [*modules()]


def every_python_file():
    for folder in ("mmspec", "pipelines", "kernels", "benchmarks", "tests", "demos"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield Module(
                ".".join(path.relative_to(ROOT).with_suffix("").parts), path, path.name == "__init__.py"
            )


def test_no_file_imports_the_top_folders_by_their_bare_names():
    found = [
        module.location(node)
        for module in every_python_file()
        for node in ast.walk(parse(module.path))
        for name in imported_names(module, node)
        if name.split(".")[0] in ("pipelines", "kernels") and not getattr(node, "level", 0)
    ]
    assert not found, f"import mmspec.pipelines, mmspec.kernels: {found}"


def test_no_assert_statements_because_python_drops_them_under_optimisation():
    found = [
        module.location(node)
        for module in MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Assert)
    ]
    assert not found, f"raise one of mmspec.errors instead: {found}"


def test_code_from_a_checkpoint_runs_only_when_the_user_says_so():
    found = [
        module.location(node)
        for module in MODULES
        for node in ast.walk(module.tree)
        if switches_on_remote_code(node)
    ]
    assert not found, f"trust_remote_code=True is the user's to say: {found}"


def switches_on_remote_code(node: ast.AST) -> bool:
    """Whether an argument, a default or an entry of a dictionary is `trust_remote_code` with True."""
    named = isinstance(node, ast.keyword | ast.arguments | ast.Dict)
    return named and bool(re.search(r"\btrust_remote_code(': |: bool ?= ?|=)True", ast.unparse(node)))


def test_every_way_to_switch_on_remote_code_is_seen():
    for source in (
        "load(x, trust_remote_code=True)",
        "load(x, **{'trust_remote_code': True})",
        "def load(x, trust_remote_code=True): ...",
        "def load(x, *, y, trust_remote_code: bool = True): ...",
    ):
        assert any(switches_on_remote_code(node) for node in ast.walk(ast.parse(source))), source
        quiet = source.replace("True", "False")
        assert not any(switches_on_remote_code(node) for node in ast.walk(ast.parse(quiet))), source


def test_kernels_import_only_what_a_hub_kernel_may():
    allowed = {"torch", "triton", "einops", *sys.stdlib_module_names}
    found = [
        f"{module.location(node)}: {name}"
        for module in MODULES
        if module.name.startswith("mmspec.kernels")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level)
        for name in imported_names(module, node)
        if name.split(".")[0] not in allowed
    ]
    assert not found, f"itself by relative imports, and besides it torch, triton and einops: {found}"


def test_no_module_is_named_after_nothing():
    nothing = {"utils", "util", "helpers", "common", "misc", "tools"}
    assert not [module.name for module in MODULES if module.name.rsplit(".", 1)[-1] in nothing]
