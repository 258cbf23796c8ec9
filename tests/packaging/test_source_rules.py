"""Rules of the code that can be checked from the source of every module."""

import ast
import re
import sys
from collections.abc import Iterator

from tests.packaging.source_tree import ROOT, Module, imported_names, modules, parse

MODULES = [*modules()]


def every_python_file():
    for folder in ("mmspec", "pipelines", "kernels", "benchmarks", "tests", "demos", "extras"):
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


MAKES_A_TENSOR = {
    *(
        "arange",
        "as_tensor",
        "asarray",
        "empty",
        "eye",
        "full",
        "linspace",
        "logspace",
        "ones",
        "rand",
        "randint",
    ),
    *("randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}
MAKES_FLOATS = {"empty", "eye", "linspace", "logspace", "ones", "rand", "randn", "zeros"}
DECODING = re.compile(
    r"mmspec\.(accelerators|acceptance|compressors|decoding|drafters|kernels|media|models|pipelines|targets"
    r"|visual_tokens)\b"
)
OF_LAYERS = re.compile(r"mmspec\.(compressors|models)\b")
#: transformers builds layers under a default device and dtype, which their parameters must use.
BUILDERS = {"__init__", "place_embeddings"}


def left_to_the_caller(
    node: ast.AST, skipped: frozenset[str] = frozenset()
) -> Iterator[tuple[ast.Call, str]]:
    """Calls that make a tensor on the default device, or of the default dtype, which belong to the caller."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and child.name in skipped:
            continue
        if isinstance(child, ast.Call) and (called := ast.unparse(child.func)).startswith("torch."):
            name, given = called.removeprefix("torch."), {each.arg for each in child.keywords}
            if name in MAKES_A_TENSOR and "device" not in given:
                yield child, "device"
            if name in MAKES_FLOATS and "dtype" not in given:
                yield child, "dtype"
        yield from left_to_the_caller(child, skipped)


def test_tensors_of_the_loop_depend_neither_on_the_default_device_nor_on_the_default_dtype():
    found = [
        f"{module.location(call)}: {missing}="
        for module in MODULES
        if DECODING.match(module.name)
        for call, missing in left_to_the_caller(
            module.tree, frozenset(BUILDERS if OF_LAYERS.match(module.name) else ())
        )
    ]
    assert not found, f"say it, or take it from another tensor (`new_zeros`, `zeros_like`): {found}"


def test_every_tensor_without_a_device_or_a_dtype_is_seen():
    for source, missing in (
        ("torch.arange(3)", ["device"]),
        ("def f():\n    return torch.zeros(3, dtype=torch.long)", ["device"]),
        ("[torch.ones(3, device=x.device) for x in y]", ["dtype"]),
        (
            "class A:\n    def __init__(self):\n        self.x = nn.Parameter(torch.randn(3))",
            ["device", "dtype"],
        ),
        ("x.new_zeros(3) + torch.tensor([1], device=x.device)", []),
    ):
        assert [what for _, what in left_to_the_caller(ast.parse(source))] == missing, source
    built = ast.parse("class A:\n    def __init__(self):\n        self.x = torch.randn(3)")
    assert not [*left_to_the_caller(built, frozenset({"__init__"}))]
