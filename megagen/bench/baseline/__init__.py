"""What a fused layer is measured against: the same layer op by op, in kernels of torch and Triton."""

from __future__ import annotations

from importlib.util import find_spec

from megagen.errors import MegagenError
from megagen.ir.graph import DType, Graph

KINDS = {"attention", "combine", "dense_gemm", "expert_gemm", "qkv_heads", "residual", "rms_norm", "top_k"}


def refuse_unfit(graph: Graph) -> None:
    """Raises MegagenError for a graph that the baseline has no kernels for, or where there is no Triton."""
    if find_spec("triton") is None:
        raise MegagenError(
            "the torch baseline needs Triton, which is not installed", hint="pip install 'megagen[baseline]'"
        )
    wrong = [f"{op.name} ({op.kind})" for op in graph.ops if op.kind not in KINDS]
    wrong += [f"{w.name} in {w.dtype.value}" for w in graph.weights().values() if w.experts and w.dtype != DType.NVFP4]
    if graph.attributes.get("split", "nn") != "nn":
        wrong.append("experts split on K")
    if wrong:
        hint = "it has those of a sliding-window layer and of the expert block, with NVFP4 experts not split on K"
        if any(op.kind == "rank_sum" for op in graph.ops):
            hint += "; contributions it adds where they are wanted: --option all_reduce=one_shot"
        raise MegagenError(
            f"the torch baseline has no kernel for {', '.join(wrong)} of {graph.name}",
            hint=hint,
        )
