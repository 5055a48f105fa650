"""GEMM of routed experts: each token's slot times its expert's matrix, optionally with SwiGLU.

Tiles of 16 rows x full K (a few ring stages when one stage cannot hold them), expert-major in ascending expert id,
spread over blocks in contiguous runs. Eight slices of K summed in ascending order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from megagen.ir.graph import Cost, Op, Per, RoleSpec, Routing
from megagen.ops.dense_gemm import FORMATS, ROW_BLOCK

if TYPE_CHECKING:
    import torch


class ExpertGemm(Op):
    """``rows`` rank-local rows of one expert (gate and up together when ``swiglu``), ``k`` rank-local K.

    Inputs: ``in`` bf16 [tokens, k] (``per_slot`` false) or [tokens, top_k, k], ``table`` (block scope).
    Output: ``out`` bf16 [tokens, top_k, world columns], or [tp, tokens, top_k, rows] when K is sharded
    (``reduce``). With ``swiglu`` an output column is silu(gate) * up, and a tile of 16 rows holds 8 gate rows
    and the 8 matching up rows, so that both meet in one thread.
    """

    kind: ClassVar[str] = "expert_gemm"
    header: ClassVar[str] = "ops/expert_gemm.cuh"
    struct: ClassVar[str] = "ExpertGemm"

    rows: int
    k: int
    columns: int  # world columns of `out`
    top_k: int
    swiglu: bool
    per_slot: bool
    reduce: bool = False
    stage_k: int
    stage_rows: int = ROW_BLOCK

    def roles(self) -> tuple[RoleSpec, ...]:
        return (
            RoleSpec(name="load_weights", warps=(1,), reads=("table",), stream=True),
            RoleSpec(name="math", warps=(8,), align=4, reads=("in", "table"), ring=True, accum="out", registers=128),
            RoleSpec(name="reduce", warps=(1, 2), reads=("table",), accum="in", writes=("out",), regions=("outbox",)),
        )

    def constants(self) -> dict[str, int | float]:
        weight = self.weights["weight"]
        return {
            "kRows": self.rows,
            "kK": self.k,
            "kColumns": self.columns,
            "kStageRows": self.stage_rows,
            "kStageK": self.stage_k,
            "kFormat": FORMATS[weight.dtype],
            "kTopK": self.top_k,
            "kSwiglu": int(self.swiglu),
            "kPerSlot": int(self.per_slot),
        }

    def stage(self) -> Mapping[str, int]:
        bits = self.weights["weight"].dtype.bits
        return {
            "rows": self.stage_rows,
            "k": self.stage_k,
            "bytes": int(self.stage_rows * self.stage_k * bits // 8),
            "per_tile": self.k // self.stage_k,
        }

    def shared(self) -> Mapping[str, int]:
        return {"outbox": 2 * 8 * ROW_BLOCK * 2}  # a row block of eight tokens in bf16, on its way out, for two warps

    def publishes(self, role: str) -> tuple[int, Per]:
        return self.rows // self.stage_rows, "expert"

    def sends(self, role: str) -> int | None:
        return self.rows if self.swiglu else 2 * self.rows

    def cost(self, routing: Routing) -> Cost:
        slots = routing.tokens * self.top_k
        return Cost(
            weight_bytes=self.weights["weight"].bytes_one * routing.experts,
            activation_bytes=2 * (slots if self.per_slot else routing.tokens) * self.k + 2 * slots * self.columns,
            operations=2 * slots * self.rows * self.k,
        )

    def reference(self, env: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """World-wide and unsharded whatever the split: [tokens, top_k, columns], ranks' contributions summed.

        ``env[table]`` holds the routed ids [tokens, top_k]. The weight is [experts, rows, k] or, when that would
        not fit, a callable from an expert's id to its [rows, k]; only used experts are touched.
        """
        import torch
        from torch.nn.functional import linear, silu

        ids, x, weight = env[self.inputs["table"]], env[self.inputs["in"]].to(dtype), env[self.weights["weight"].name]
        out: torch.Tensor | None = None
        for expert in sorted(set(ids.flatten().tolist())):
            slot, token = torch.where(ids.T == expert)  # noqa: SIM300
            w = (weight(expert) if callable(weight) else weight[expert]).to(dtype)
            y = linear(x[token, slot] if self.per_slot else x[token], w)
            if self.swiglu:
                gate, up = y.chunk(2, dim=-1)
                y = silu(gate) * up
            if out is None:
                out = y.new_empty(*ids.shape, y.shape[-1])
            out[token, slot] = y
        assert out is not None, "a launch has at least one token"
        return {self.outputs["out"]: out}
