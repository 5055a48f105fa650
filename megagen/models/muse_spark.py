"""Muse Spark Open's layers as graphs, one rank's share of a tensor-parallel group.

Dimensions and formulas follow the transformers implementation (``MuseSparkTextConfig``, ``MuseSparkMoE``,
``MuseSparkTextDecoderLayer``); the residual stream is kept in fp32.
"""

from __future__ import annotations

import json
from pathlib import Path

from megagen.errors import ScheduleError, WeightError, here
from megagen.ir.graph import DType, Frozen, Graph, Op, Scope, Shard, Tensor, TensorKind, Weight
from megagen.ops.combine import Combine
from megagen.ops.dense_gemm import DenseGemm
from megagen.ops.expert_gemm import ExpertGemm
from megagen.ops.residual import Residual
from megagen.ops.rms_norm import RmsNorm
from megagen.ops.top_k import TopK

MAX_TOKENS = 16  # two n8 MMA tiles; the kernels' compiled maximum
ROW = 8 * 32 * 8  # a norm's row: eight warps of lanes with 16-byte vectors of bf16 (mem/row.cuh)
SLICE = 512  # of a ring stage's K: eight warps with a group of 64 each


class MuseSparkConfig(Frozen):
    """The fields of the checkpoint's ``text_config`` that the kernels depend on, with its defaults."""

    hidden: int = 8192
    moe_hidden: int = 4096
    intermediate: int = 4096
    experts: int = 256
    top_k: int = 8
    layers: int = 62
    rms_norm_eps: float = 1e-5
    post_norm_eps: float = 1e-8
    output_multiplier: float = 0.1767766952966369
    residual_gate_temperature: float = 0.3
    residual_gate_clamp: float = 1e-3
    routed_scaling_factor: float = 1.0
    router_eps: float = 1e-15


CONFIG_FIELDS = {
    "hidden": "hidden_size", "moe_hidden": "moe_hidden_size", "intermediate": "moe_intermediate_size",
    "experts": "num_local_experts", "top_k": "num_experts_per_tok", "layers": "num_hidden_layers",
    "rms_norm_eps": "rms_norm_eps", "post_norm_eps": "post_norm_eps", "output_multiplier": "output_multiplier",
    "residual_gate_temperature": "residual_gate_temperature", "routed_scaling_factor": "routed_scaling_factor",
}  # fmt: skip


def read_config(checkpoint: Path) -> MuseSparkConfig:
    """The dimensions in ``checkpoint``'s config.json (its ``text_config`` if it has one; absent fields: defaults).

    Raises WeightError for a missing or malformed file.
    """
    path = checkpoint / "config.json"
    try:
        data = json.loads(path.read_text("utf-8"))
        text = data.get("text_config", data)
        return MuseSparkConfig(**{ours: text[theirs] for ours, theirs in CONFIG_FIELDS.items() if theirs in text})
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise WeightError(f"{path}: {error}", hint="a checkpoint is a folder in the Hugging Face layout") from None


def tiny(tp: int, split: str = "nn") -> MuseSparkConfig:
    """The least dimensions that :func:`expert_block` takes at this ``tp`` and ``split``, for emulation."""
    share = tp if split == "nk" else 1  # of the second expert GEMM's K, whose shards are whole slices too
    slices = max(1, -(-16 * (tp - 1) * tp // (SLICE * share)))  # of the least shard that stand-ins can rotate
    return MuseSparkConfig(hidden=ROW, moe_hidden=ROW, intermediate=SLICE * share * slices, experts=16)


def expert_block(
    tp: int = 8,
    tokens: int = MAX_TOKENS,
    *,
    split: str = "nn",
    experts: str = "nvfp4",
    config: MuseSparkConfig | None = None,
) -> Graph:
    """Pre-FFN norm to residual gate: the expert half of a layer.

    ``split`` "nn" cuts both expert GEMMs on N with an all-gather after each; "nk" cuts the second on K and sums
    the ranks' per-slot outputs in rank order before the per-expert norm. Raises ScheduleError for a ``tp`` that
    is not 1, 2, 4 or 8, for ``tokens`` outside 1 to 16, and for dimensions that the kernels or layouts cannot hold.
    """
    c = MuseSparkConfig() if config is None else config
    _refuse_unfit(c, tp, tokens, split, experts)
    h, m, i, t = c.hidden, c.moe_hidden, c.intermediate, tokens
    edtype = DType(experts)
    router_chunk, dense_chunk = 512, 1024  # K of a unit: 32 KB of fp32 or bf16

    tensors: list[Tensor] = []

    def tensor(name: str, *shape: int, dtype: DType = DType.BF16, **more: object) -> str:
        tensors.append(Tensor(name=name, shape=shape, dtype=dtype, **more))
        return name

    stream = tensor("stream", t, h, dtype=DType.FP32, kind=TensorKind.INPUT)
    normed = tensor("normed", t, h)
    logits = tensor("logits", h // router_chunk, c.experts // 16, t, 16, dtype=DType.FP32)
    routes = tensor("routes", t, 2 * c.top_k, dtype=DType.U32)
    table = tensor("table", 1, dtype=DType.U32, scope=Scope.BLOCK)
    pooled_partials = tensor("pooled_partials", h // dense_chunk, m // tp // 16, t, 16, dtype=DType.FP32)
    pooled = tensor("pooled", t, m, scope=Scope.WORLD, shard_axis=1)
    expert_in = tensor("expert_in", t, m)
    if split == "nn":
        expert_mid = tensor("expert_mid", t, c.top_k, i, scope=Scope.WORLD, shard_axis=2)
        expert_out = tensor("expert_out", t, c.top_k, m, scope=Scope.WORLD, shard_axis=2)
    else:
        expert_mid = tensor("expert_mid", t, c.top_k, i // tp)
        expert_out = tensor("expert_out", tp, t, c.top_k, m, scope=Scope.WORLD, reduce=True)
    combined = tensor("combined", t, m)
    unpooled_partials = tensor("unpooled_partials", m // dense_chunk, h // tp // 16, t, 16, dtype=DType.FP32)
    unpooled = tensor("unpooled", t, h, scope=Scope.WORLD, shard_axis=1)
    stream_out = tensor("stream_out", t, h, dtype=DType.FP32, kind=TensorKind.OUTPUT)

    def vector(name: str, size: int, checkpoint: str, dtype: DType = DType.BF16, planes: int = 1) -> Weight:
        return Weight(name=name, rows=size, k=1, dtype=dtype, names=(checkpoint,), planes=planes)

    def matrix(name: str, rows: int, k: int, checkpoint: str, dtype: DType = DType.BF16, **more: object) -> Weight:
        return Weight(name=name, rows=rows, k=k, dtype=dtype, names=(checkpoint,), **more)

    down_rows, down_k = (m // tp, i) if split == "nn" else (m, i // tp)
    gate_up_weight = matrix(
        "gate_up_weight",
        2 * i // tp,
        m,
        "mlp.experts.gate_up_proj",
        edtype,
        shard=Shard.ROWS,
        experts=c.experts,
        gate_up=True,
    )
    down_weight = matrix(
        "down_weight", down_rows, down_k, "mlp.experts.down_proj", edtype,
        shard=Shard.ROWS if split == "nn" else Shard.K, experts=c.experts,
    )  # fmt: skip

    def expert_stage(k: int) -> dict[str, int]:
        """A ring stage of about 32,768 weights' worth: full K when it fits, several row blocks when K is short."""
        if edtype is DType.NVFP4:
            return {"stage_k": min(k, 4096), "stage_rows": 16 * max(1, 4096 // k)}
        return {"stage_k": min(k, 1024), "stage_rows": 16 * max(1, 1024 // k)}

    ops: tuple[Op, ...] = (
        RmsNorm(
            name="pre_ffn_norm", inputs={"in": stream}, outputs={"out": normed},
            weights={"gain": vector("pre_ffn_gain", h, "pre_feedforward_layernorm.weight")},
            width=h, eps=c.rms_norm_eps, in_dtype=DType.FP32,
        ),
        DenseGemm(
            name="router", inputs={"in": normed}, outputs={"partials": logits},
            weights={"weight": matrix("router_weight", c.experts, h, "mlp.gate.weight", DType.FP32)},
            rows=c.experts, world_rows=c.experts, k=h, unit_k=router_chunk, partials_only=True,
        ),
        DenseGemm(
            name="pooler", inputs={"in": normed}, outputs={"partials": pooled_partials, "out": pooled},
            weights={"weight": matrix("pooler_weight", m // tp, h, "mlp.pre_expert_proj.weight", shard=Shard.ROWS)},
            rows=m // tp, world_rows=m, k=h, unit_k=dense_chunk,
        ),
        TopK(
            name="top_k", inputs={"logits": logits}, outputs={"routes": routes, "table": table},
            weights={"bias": vector("router_bias", c.experts, "mlp.gate.e_score_correction_bias", DType.FP32)},
            experts=c.experts, k=c.top_k, chunks=h // router_chunk,
            multiplier=c.output_multiplier, eps=c.router_eps, scale=c.routed_scaling_factor,
        ),
        RmsNorm(
            name="pre_expert_norm", inputs={"in": pooled}, outputs={"out": expert_in},
            weights={"gain": vector("pre_expert_gain", m, "mlp.pre_expert_norm.weight")},
            width=m, eps=c.rms_norm_eps, in_dtype=DType.BF16,
        ),
        ExpertGemm(
            name="gate_up", inputs={"in": expert_in, "table": table}, outputs={"out": expert_mid},
            weights={"weight": gate_up_weight},
            rows=2 * i // tp, k=m, columns=i if split == "nn" else i // tp, top_k=c.top_k,
            swiglu=True, per_slot=False, **expert_stage(m),
        ),
        ExpertGemm(
            name="down", inputs={"in": expert_mid, "table": table}, outputs={"out": expert_out},
            weights={"weight": down_weight},
            rows=down_rows, k=down_k, columns=m, top_k=c.top_k,
            swiglu=False, per_slot=True, reduce=split == "nk", **expert_stage(down_k),
        ),
        Combine(
            name="combine", inputs={"in": expert_out, "routes": routes, "table": table}, outputs={"out": combined},
            weights={"gain": vector("post_expert_gain", m, "mlp.experts.post_expert_norm.weight")},
            width=m, top_k=c.top_k, eps=c.post_norm_eps, parts=tp if split == "nk" else 1,
        ),
        DenseGemm(
            name="unpooler", inputs={"in": combined}, outputs={"partials": unpooled_partials, "out": unpooled},
            weights={"weight": matrix("unpooler_weight", h // tp, m, "mlp.post_expert_proj.weight", shard=Shard.ROWS)},
            rows=h // tp, world_rows=h, k=m, unit_k=dense_chunk,
        ),
        Residual(
            name="residual", inputs={"in": unpooled, "stream": stream}, outputs={"out": stream_out},
            weights={
                "gain": vector("post_ffn_gain", h, "post_feedforward_layernorm.weight"),
                "gate": vector("residual_gate", h, "post_feedforward_residual_gate.gate", DType.FP32, planes=2),
            },
            width=h, eps=c.post_norm_eps, temperature=c.residual_gate_temperature, clamp=c.residual_gate_clamp,
        ),
    )  # fmt: skip
    for op in ops:
        _refuse_unstreamable(op)
    return Graph(
        name=f"muse_spark.expert_block.{split}", tp=tp, tokens=t, ops=ops, tensors={x.name: x for x in tensors},
        attributes={"split": split, "experts": experts, "config": c, "figure": "block.moe"},
    )  # fmt: skip


def _refuse_unfit(c: MuseSparkConfig, tp: int, tokens: int, split: str, experts: str) -> None:
    def refuse(wrong: bool, message: str, hint: str | None = None) -> None:
        if wrong:
            raise ScheduleError(message, loc=here(), hint=hint)

    refuse(type(tp) is not int or type(tokens) is not int, f"tp={tp!r}, tokens={tokens!r}: not whole numbers")
    refuse(
        not isinstance(c, MuseSparkConfig),
        f"config is of type {type(c).__name__}",
        "config is a MuseSparkConfig or None",
    )
    refuse(tp not in (1, 2, 4, 8), f"tp={tp}: tensor parallelism over {tp} ranks is not supported", "use 1, 2, 4 or 8")
    refuse(not 1 <= tokens <= MAX_TOKENS, f"tokens={tokens}: a launch takes 1 to {MAX_TOKENS} tokens")
    refuse(split not in ("nn", "nk"), f"split={split!r}", 'split is "nn" or "nk"')
    refuse(experts not in ("nvfp4", "bf16"), f"experts={experts!r}", 'experts are "nvfp4" or "bf16"')
    for name, size in (("hidden", c.hidden), ("moe_hidden", c.moe_hidden), ("intermediate", c.intermediate)):
        refuse(
            size < 1 or size % (16 * tp) != 0, f"{name}={size} does not divide into {tp} shards of whole 16-row blocks"
        )
        least = 16 * (tp - 1)
        refuse(size // tp < least, f"{name}={size} makes shards of less than {least}: stand-in ranks rotate that far")
    for name, size in (("hidden", c.hidden), ("moe_hidden", c.moe_hidden)):
        refuse(
            size % ROW != 0,
            f"{name}={size} is no multiple of {ROW}: a norm's warps take {ROW} elements of a row at once",
        )
    refuse(c.experts % 16 != 0 or not 16 <= c.experts <= 256, f"experts={c.experts}: a multiple of 16, at most 256")
    refuse(c.top_k != 8, f"top_k={c.top_k}: the routing tables hold 8 experts a token")


def _refuse_unstreamable(op: Op) -> None:
    """A stage is whole 16-row blocks by eight slices of K in groups of 64, for NVFP4 one group or an even number."""
    stage = op.stage()
    if stage is None:
        return
    w, rows, k = op.weights["weight"], stage["rows"], stage["k"]
    groups = k // SLICE
    if w.rows % rows or w.k % k or k % SLICE or (w.dtype is DType.NVFP4 and groups % 2 and groups > 1):
        raise ScheduleError(
            f"{w.name}: {w.rows} x {w.k} {w.dtype.value} a rank does not divide into ring stages of {rows} x {k}",
            loc=here(),
            hint="K of a rank must be a multiple of 512, for NVFP4 512 or a multiple of 1024, and fill whole stages",
        )
