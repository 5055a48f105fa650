"""Compile the baseline's kernels for the H200 as a full layer launches them: a line a kernel, with its shared memory.

The argument says how many of each op's candidates.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megagen.bench.baseline import tiles
from megagen.bench.baseline.layer import Launch, OpByOp
from megagen.bench.baseline.prepare import Words
from megagen.cli import pipeline
from megagen.ir.graph import TensorKind, Weight
from megagen.runtime.params import TORCH_NAMES
from megagen.runtime.stack import handed_on
from megagen.runtime.step import Step

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int16: "*i16", torch.uint8: "*u8"}


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def weight(w: Weight) -> torch.Tensor | Words:
    if w.dtype == "nvfp4":
        words = empty(w.experts, w.rows, w.k // 4, dtype=torch.int16)
        scales = empty(w.experts, w.rows, w.k // 16, dtype=torch.uint8)
        return Words(words, scales, empty(w.experts, 2 if w.gate_up else 1))
    if w.k == 1:
        return empty(w.rows * w.planes)
    return empty(w.rows, w.k, dtype=torch.bfloat16 if w.dtype == "bf16" else torch.float32)


def layer(cut: int) -> list[Launch]:
    """The launches of a full layer whose ops take their candidate of this number, or their last."""
    checked = pipeline.check(pipeline.Request(Path("muse_swa.py"), options={"all_reduce": "one_shot"}))
    graph = checked.graph
    given = [t for t in graph.tensors.values() if t.kind is TensorKind.INPUT]
    inputs = {t.name: empty(*t.shape, dtype=getattr(torch, TORCH_NAMES[t.dtype])) for t in given}
    options = {op.name: tiles.candidates(op, graph.tp, True) for op in graph.ops}
    made = OpByOp(
        graph,
        [{name: weight(w) for name, w in graph.weights().items()}],
        inputs,
        Step.chain(graph.tokens, 4096),
        handed_on(checked.plan),
        tiles={name: found[min(cut, len(found) - 1)] for name, found in options.items() if found},
        asm=True,
        pdl=True,
    )
    return [x for x in made.layers[0] if x.meta is not None]


def compiled(launch: Launch) -> Any:
    kernel, meta = launch.kernel, dict(launch.meta or {})
    options = {x: meta.pop(x) for x in ("num_warps", "num_stages", "launch_pdl")}
    names = kernel.arg_names
    args = dict(zip(names, launch.args, strict=False))
    assert sorted([*args, *meta]) == sorted(names), (kernel.__name__, names)
    kinds = {n: TYPES[a.dtype] if isinstance(a, torch.Tensor) else "fp32" for n, a in args.items()}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, kind in kinds.items() if kind[0] == "*"}
    source = ASTSource(kernel, {n: kinds.get(n, "constexpr") for n in names}, meta, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


if __name__ == "__main__":
    for cut in range(int(sys.argv[1])):
        for launch in layer(cut):
            found = (launch.kernel.__name__, launch.grid, compiled(launch).metadata.shared)
            sys.stdout.write("\t".join(map(str, found)) + "\n")
