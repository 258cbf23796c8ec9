"""Kernels compiled for sm_90 on a machine without a GPU, with what they take of it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = 227 * 1024  # bytes that a block of threads may take


class Kernel(NamedTuple):
    """A configuration of a kernel that is shipped.

    Attributes:
        module: of mmspec.kernels, without the package.
        name: of the kernel.
        types: of arguments that are not constants ("*bf16", "*i64", "fp32", ...), where a pointer is not
            "*fp32", or a number not "i32".
        constants: values of the constexpr arguments; None for a pointer that is absent.
        holds: words that the assembly must hold.
        aligned: arguments divisible by 16; all pointers are.
        warps, stages: as the launcher passes them.
    """

    module: str
    name: str
    types: Mapping[str, str]
    constants: Mapping[str, object]
    holds: Sequence[str] = ()
    aligned: Sequence[str] = ()
    warps: int = 4
    stages: int = 3


class Compiled(NamedTuple):
    """What a compiled kernel takes: registers of a thread, spilled bytes, shared memory, and its assembly."""

    registers: int
    spilled: int
    shared: int
    ptx: str


# Triton reads TRITON_INTERPRET where a kernel is defined, so that the compiler needs a process of its own.
COMPILE = """
import importlib, json, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
found = []
for module, name, types, constants, _, aligned, warps, stages in json.load(sys.stdin):
    kernel = getattr(importlib.import_module("mmspec.kernels." + module), name)
    names = list(kernel.arg_names)
    default = {each: "*fp32" if each.endswith("_ptr") else "i32" for each in names}
    signature = {each: "constexpr" if each in constants else types.get(each, default[each]) for each in names}
    wide = [each for each in names if signature[each].startswith("*") or each in aligned]
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(each),): value for each, value in constants.items()},
        attrs={(names.index(each),): [["tt.divisibility", 16]] for each in wide},
    )
    options = dict(num_warps=warps, num_stages=stages)
    binary = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found.append([usage.stdout + usage.stderr, binary.metadata.shared, binary.asm["ptx"]])
json.dump(found, sys.stdout)
"""


def compile_for_hopper(kernels: Sequence[Kernel]) -> list[Compiled]:
    """Compile kernels for sm_90, in one process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        cwd=ROOT,
        env=environment,
        input=json.dumps(kernels),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [
        Compiled(int(match_of("REG", usage)), int(match_of("STACK", usage)), shared, ptx)
        for usage, shared, ptx in json.loads(done.stdout)
    ]


def match_of(resource: str, usage: str) -> str:
    found = re.search(rf"\b{resource}:(\d+)", usage)
    assert found is not None, usage
    return found[1]
