"""The shipped kernels compile for a Hopper GPU, without spilling registers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from mmspec.core.graphs import power_of_two
from mmspec.kernels.gated_delta import KEY_BLOCK, VALUE_BLOCK
from mmspec.kernels.path_tokens import BLOCK
from mmspec.kernels.residual_block import STAGES, STATISTICS, WARPS, tile_of
from mmspec.kernels.rms_norm import warps_of
from mmspec.kernels.rotary_cache import NORMS
from mmspec.kernels.tree_attention import configuration

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = 227 * 1024  # bytes that a block of threads may take


class Kernel(NamedTuple):
    """A configuration of a shipped kernel.

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
    """Registers of a thread, spilled bytes and shared memory that a kernel takes, and its assembly."""

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


WIDE, CONCURRENT = "ld.global.v4", "cp.async"
TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
HALVES = ((torch.bfloat16, 16), (torch.bfloat16, 64))
PLACES = ("key_ptr", "place_ptr", "stream_ptr", "step_ptr", "node_ptr")


def longs(*names: str) -> dict[str, str]:
    return {f"{name}_ptr": "*i64" for name in names}


def of_exact_sampling() -> Iterator[Kernel]:
    strides = ["vocabulary", "q_stride"]
    types = longs("tokens", "key", "place", "stream", "step", "node") | {"valid_ptr": "*i1"}
    types |= {"choice_ptr": "*i32"}
    for nodes, absent in product((8, 128), ({}, {"q_ptr": None})):
        sizes = {"NODES": nodes, "TILE": 1024, **absent}
        yield Kernel("chain", "_tile_kernel", types, sizes, [WIDE] * (nodes == 8), strides)
    types = longs("token") | {"choice_ptr": "*i32"}
    yield Kernel("chain", "_choice_kernel", types, {"TILES": 256}, warps=1)
    types = longs("tokens", "children", "node")
    for flags in ({"WITHOUT_REPLACEMENT": True}, {"WITHOUT_REPLACEMENT": False, "rest_ptr": None}):
        sizes = {**flags, "BLOCK": 4096}
        held = ["bar.sync", WIDE]  # what one thread wrote, others read
        yield Kernel("tree_rejection", "_reject_kernel", types, sizes, held, strides, 8)
    types = longs("tokens", "old", "out") | {"valid_ptr": "*i1", "u_ptr": "*fp64"}
    yield Kernel("redraw", "_redraw_kernel", types, {"BLOCK": 2048}, [WIDE], strides, 8)
    for out in ("*fp32", "*fp64"):
        types = longs("key", "position", "stream", "step") | {"out_ptr": out}
        yield Kernel("philox", "_uniform_kernel", types, {"BLOCK": 128}, ["mul.hi.u32"])
    types = longs("counters", "key", "out")
    yield Kernel("philox", "_words_kernel", types, {"BLOCK": 128}, ["mul.hi.u32"])


def of_sampling() -> Iterator[Kernel]:
    """Rows of a multiple of 16 tokens, held by a program, and in tiles."""
    module = pytest.importorskip("mmspec.kernels.sampling_triton")
    types = longs(*(name.removesuffix("_ptr") for name in (*PLACES, "token_ptr")))
    types |= {"logits_ptr": "*bf16", "choice_ptr": "*i32", "finite_ptr": "*i1"}
    aligned, drawn = ("size", "batch_stride", "row_stride"), {"warped_ptr": None}
    cut: dict[str, Any] = {"TOP_K": True, "TOP_P": True}
    philox, wide = "mul.hi.u32", "v4.b32"  # 32-bit counters, where a token is drawn; 16 bytes a load
    for block in (1024, 2048, 8192):
        flags = cut | {"MIN_P": True, "INDEX_BITS": block.bit_length() - 1, "BLOCK": block}
        held, warps = flags | drawn | {"GUIDED": True}, module.row_warps(block)
        yield Kernel("sampling_triton", "_row_kernel", types, held, [philox, wide], aligned, warps)
    held = flags | dict.fromkeys((*PLACES, "token_ptr", "finite_ptr")) | {"GUIDED": False}
    yield Kernel("sampling_triton", "_row_kernel", types, held, [wide], aligned, warps)
    size = 151_936
    tile = {"TILE": module.TILE, "TILES": 1 << (-(-size // module.TILE) - 1).bit_length()}
    cut["INDEX_BITS"] = (size - 1).bit_length()
    absent = dict.fromkeys((*PLACES, "best_ptr", "choice_ptr"))
    for name, sizes, held, warps in (
        ("_sums_kernel", {"TILE": module.TILE}, [wide], 8),
        ("_scores_kernel", tile | {"GUIDED": True}, [wide], 8),
        ("_cut_kernel", tile | cut, [wide], 16),
        ("_tile_kernel", tile | drawn, [philox, wide], 8),
        ("_tile_kernel", tile | absent, [wide], 8),
        ("_choice_kernel", {"TILES": tile["TILES"]}, [], 1),
    ):
        yield Kernel("sampling_triton", name, types, sizes, held, aligned, warps)


def of_trees() -> Iterator[Kernel]:
    for size, block in ((128, 64), (4096, 2)):
        sizes = {"ASCENDING": True, "SIZE": size, "BLOCK": block}
        yield Kernel("ordering", "_best_kernel", longs("index"), sizes, warps=8)
    for size, block in ((64, 32), (512, 4)):
        tile = {"NODES": size, "BLOCK": block}
        types = longs("parents", "depth", "children") | {"ancestors_ptr": "*i8", "valid_ptr": "*i8"}
        yield Kernel("tree", "_paths_kernel", types, tile)
        yield Kernel("tree", "_children_kernel", types, tile | {"CHILDREN": 16})
    types = longs("tokens", "choice", "parents", "depth", "path", "accepted", "values", "node")
    types |= dict.fromkeys(("ancestors_ptr", "passes_ptr"), "*i8")
    given, found = dict.fromkeys(("parents_ptr", "passes_ptr")), {"node_ptr": None}
    deepest = found | dict.fromkeys(("tokens_ptr", "choice_ptr", "parents_ptr", "path_ptr", "values_ptr"))
    for what, absent in product((given, found, deepest), ({}, {"ancestors_ptr": None, "depth_ptr": None})):
        sizes = {"NODES": 512, "STEPS": 64, "BLOCK": 2}
        yield Kernel("tree_path", "_path_kernel", types, sizes | what | absent)
    types = longs("prompts", "output", "emitted", "tokens", "depth", "paths", "first")
    for absent in ({}, {"ancestors_ptr": None, "depth_ptr": None}):
        sizes = {"NODES": 64, "BLOCK": BLOCK} | absent
        yield Kernel("path_tokens", "_path_tokens_kernel", types | {"ancestors_ptr": "*i8"}, sizes)
    for of_logits in TYPES.values():
        those = types | dict.fromkeys(("logits_ptr", "penalized_ptr"), of_logits)
        yield Kernel("path_tokens", "_penalize_kernel", those, {"BLOCK": BLOCK, "DIVIDES": False})
    for path, block, word in ((8, 256, 1), (64, 32, 4)):
        types, sizes = longs("table", "path", "lengths", "counts"), {"PATH": path, "BLOCK": block}
        held = ["bar.sync"]  # all loads come before the stores
        yield Kernel("compact_cache", "_compact_kernel", types, sizes | {"WORD": word}, held)


def of_images() -> Iterator[Kernel]:
    """Groups of 14 and of 32, vocabularies of up to 184,622; ids and features of both sizes."""
    types = longs("x", "taken", "order") | {"before_ptr": "*i32"}
    for size, width, tiles in ((14, 32, 4), (32, 64, 64)):
        sizes = {"SIZE": size, "WIDTH": width}
        yield Kernel("groups", "_select_kernel", types, sizes | {"TILE": 4096}, warps=8)
        merge = {"TILES": tiles, "SLOTS": tiles * width}
        yield Kernel("groups", "_rank_merge_kernel", types, sizes | merge)
    for width in (16, 1024):
        yield Kernel("groups", "_groups_kernel", types, {"GROUPS": 1024 // width, "WIDTH": width})
    for ids, absent in (("*i16", {}), ("*i32", {"limit_ptr": None})):
        types = longs("x", "count") | {"table_ptr": ids}
        for tokens, places in ((128, 1), (32, 32)):
            sizes = {"BLOCK_TOKENS": tokens, "BLOCK_PLACES": places, "UNROLL": 4}
            yield Kernel("neighbours", "_every_token_kernel", types, absent | sizes)
        yield Kernel("neighbours", "_prefix_kernel", types, absent | {"BLOCK": 1024})


def of_denoising(width: int = 1536, tiles: Any = HALVES) -> Iterator[Kernel]:
    for given in (True, False):
        sizes = {"SIZE": 16, "GUIDED": True, "LEARNED": given, "CLIPPED": given, "BLOCK": 128}
        yield Kernel("denoising_update", "_update_kernel", {"output_ptr": "*bf16"}, sizes)
    strides = ("scale_stride", "shift_stride", "gate_stride")
    for dtype, rows in tiles:
        tile = tile_of(rows, dtype)
        names = ("scale_ptr", "shift_ptr", "gate_ptr", "weight_ptr", "bias_ptr", "hidden_ptr")
        types = dict.fromkeys(names, TYPES[dtype])
        sizes = {"N": width, "K": width, "UPCAST": False} | tile
        product = "wgmma.mma_async" if tile["BLOCK_M"] == 64 else "mma.sync"
        held = [CONCURRENT, product] if dtype == torch.bfloat16 else [CONCURRENT]
        first = sizes | {"EPS": 1e-6, "ACTIVATE": True, "BLOCK_S": STATISTICS // tile["BLOCK_M"]}
        of_first = types | {"out_ptr": TYPES[dtype]}
        how = {"holds": held, "aligned": strides, "warps": WARPS, "stages": STAGES}
        yield Kernel("residual_block", "_modulated_linear_kernel", of_first, first, **how)
        yield Kernel("residual_block", "_gated_linear_kernel", types, sizes, **how)


def of_attention(queries: int, dim: int, dtype: torch.dtype, split: bool) -> Kernel:
    """The kernel as it is launched for so many queries that share keys."""
    tile, of_values = configuration(queries, dim, dtype), TYPES[dtype]
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), of_values) | {"scale": "fp32"}
    types |= dict.fromkeys(("first_ptr", "length_ptr", "visible_ptr"), "*i32")
    sizes: dict[str, Any] = {"KEY_HEADS": 4, "GROUP": 7, "D": dim, "BLOCK_D": 1 << (dim - 1).bit_length()}
    sizes |= {"QUERIES": tile.queries, "COLUMNS": tile.columns, "EDGE": tile.edge}
    sizes |= {"SPLIT": split, "UPCAST": False}
    if not split:
        types["out_ptr"] = of_values
        sizes |= {"peak_ptr": None, "mass_ptr": None}
    strides = [f"{of}_{axis}" for of in "qkv" for axis in ("row", "head", "node" if of == "q" else "column")]
    held = [CONCURRENT, "wgmma"] if tile.queries >= 64 else [CONCURRENT]
    return Kernel(
        "tree_attention", "_attend_kernel", types, sizes, held, [*strides, "part"], tile.warps, tile.stages
    )


def of_targets() -> Iterator[Kernel]:
    yield of_attention(7, 128, torch.bfloat16, True)
    yield of_attention(448, 128, torch.bfloat16, True)
    for dim in (64, 256):
        sizes = {"D": dim, "BLOCK_D": dim, "PARTS": 64}
        yield Kernel("tree_attention", "_merge_kernel", {"out_ptr": "*bf16"}, sizes)
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "beta_ptr"), "*bf16") | {"path_ptr": "*u8"}
    sizes = {"HEADS": 32, "KEY_HEADS": 16, "KEY_SIZE": 128, "VALUE_SIZE": 128}
    sizes |= {"KEY_BLOCK": KEY_BLOCK, "VALUE_BLOCK": VALUE_BLOCK}
    for nodes, warps in ((16, 4), (64, 8)):
        yield Kernel(
            "gated_delta", "_tree_kernel", types, sizes | {"NODES": nodes}, ["mma"], (), warps, stages=1
        )


def of_layers() -> Iterator[Kernel]:
    """Widths of 128 (norms of heads) to 16,384; heads of 128 and of 96."""
    half = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "total_ptr", "out_ptr"), "*bf16")
    for size, absent in product((128, 4096, 16_384), ({}, {"residual_ptr": None, "total_ptr": None})):
        sizes = {"SIZE": size, "EPS": 1e-5, "CENTERED": size == 4096, "BLOCK": size, **absent}
        held = ["ld.global.v4"] * (size >= 4096)
        yield Kernel("rms_norm", "_norm_kernel", half, sizes, held, warps=warps_of(size))
    names = ("query_ptr", "key_ptr", "value_ptr", "keys_ptr", "values_ptr", "out_ptr", "cos_ptr", "sin_ptr")
    weights = ("query_scale_ptr", "key_scale_ptr", "query_shift_ptr", "key_shift_ptr")
    strides = ("query_stride", "key_stride", "value_stride")
    for norm, half_of_head in product(range(4), (48, 64, 128)):
        given = {"none": 0, "rms": 2, "centered": 2, "layer": 4}[NORMS[norm]]
        types = dict.fromkeys((*names, *weights), "*bf16") | {"slots_ptr": "*i64"}
        sizes = {"HEADS": 32, "KEY_HEADS": 8, "HALF": half_of_head, "BLOCK": power_of_two(half_of_head)}
        sizes |= {"NORM": norm, "EPS": 1e-5, **dict.fromkeys(weights[given:])}
        yield Kernel("rotary_cache", "_rotary_kernel", types, sizes | {"PAIRS": False}, (), strides, warps=1)
    types |= dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32")
    sizes |= {"PAIRS": True, "NORM": 0, **dict.fromkeys(weights)}
    yield Kernel("rotary_cache", "_rotary_kernel", types, sizes, (), strides, warps=1)
    types = dict.fromkeys(("gate_ptr", "up_ptr", "out_ptr"), "*bf16")
    aligned = ("size", "gate_stride", "up_stride")
    for by_tanh in (False, True):
        sizes = {"BLOCK": 1024, "TANH": by_tanh}
        yield Kernel("gated_product", "_gated_kernel", types, sizes, ["ld.global.v4"], aligned)


def faults(kernels: list[Kernel]) -> list[str]:
    pytest.importorskip("triton")
    found = []
    for kernel, compiled in zip(kernels, compile_for_hopper(kernels), strict=True):
        # The compiler of Triton 3.8 keeps two registers of this one on the stack, those of 3.6 and 3.9 none.
        is_known = version("triton").startswith("3.8.") and kernel.constants.get("BLOCK") == 2048
        missing = [word for word in kernel.holds if word not in compiled.ptx]
        if compiled.spilled > (8 if is_known else 0) or compiled.shared > SHARED_MEMORY or missing:
            found.append(f"{kernel}: {compiled[:3]}, without {missing}")
        if "atom" in compiled.ptx:
            found.append(f"{kernel}: atomics, whose order differs from run to run")
    return found


def test_shipped_kernels_compile_for_hopper_without_spills():
    groups = (of_exact_sampling, of_sampling, of_trees, of_images, of_denoising, of_targets, of_layers)
    assert not faults([kernel for group in groups for kernel in group()])
