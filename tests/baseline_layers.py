"""Layers for the op-by-op baseline, and what of their values the reference refuses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megagen.bench.inputs import Inputs, get
from megagen.cli import pipeline
from megagen.ir.graph import Graph
from megagen.ir.plan import Plan
from megagen.ops.compare import judge
from megagen.ops.reference import evaluate
from megagen.ops.top_k import TopK
from megagen.runtime.stack import handed_on
from megagen.runtime.step import Step
from megagen.weights.random import LayerWeights, random_layer

COMPARED = {"logits", "pooled", "expert_in", "expert_mid", "expert_out", "combined", "unpooled", "stream_out"}


@dataclass(frozen=True)
class Layers:
    """Two layers with random weights, the second with block scales at the ends of e4m3, and the input of the first."""

    graph: Graph
    plan: Plan
    layers: list[LayerWeights]
    inputs: Inputs
    step: Step


def built(
    schedule: str,
    *,
    tokens: int,
    context: int = 300,
    tree: bool = True,
    tiny: bool = True,
    tp: int = 2,
    device: str = "cpu",
    options: dict[str, str] | None = None,
) -> Layers:
    if options is None:  # the baseline adds contributions where they are wanted
        options = {"all_reduce": "one_shot"} if schedule == "muse_swa.py" else {}
    request = pipeline.Request(Path(schedule), tp=tp, tokens=tokens, tiny=tiny, options=options)
    checked = pipeline.check(request)
    layers = [random_layer(checked.graph, seed, device, scale_extremes=seed == 1) for seed in range(2)]
    step = Step.random_tree(tokens, context, seed=3) if tree else Step.chain(tokens, context)
    inputs = Inputs.random(checked.graph, 1, tokens, 0, torch.device(device), step)
    return Layers(checked.graph, checked.plan, layers, inputs, step)


def op_by_op(of: Layers, **more: Any) -> Any:
    from megagen.bench.baseline.layer import OpByOp
    from megagen.bench.baseline.prepare import prepare

    prepared = [prepare(x) for x in of.layers]
    return OpByOp(of.graph, prepared, of.inputs.ranks[0], of.step, handed_on(of.plan), **more)


def refused(of: Layers, made: dict[str, torch.Tensor], table: torch.Tensor | None) -> list[str]:
    """What of the first layer's values is not right, by the reference with the layer's own routing."""
    env: dict[str, Any] = {**of.layers[0].env(of.graph.tp), **of.inputs.env}
    ids = made["routes.ids"]
    if table is None:
        wrong = badly_routed(of.graph, env, ids)
    else:
        wrong = [] if torch.equal(ids.cpu(), table.long()) else ["routes.ids: not those that were given"]
    env["route_override"] = ids
    reference, model = (evaluate(of.graph, env, dtype) for dtype in (torch.float32, torch.bfloat16))
    seen = {"routes.ids"}
    for name, got in made.items():
        if name in seen:
            continue
        seen.add(name)
        got = get(got, of.step.numbers) if name.endswith("cache") else got
        want, twin = reference[name], model[name]
        if got.shape != want.shape:
            want, twin = (share(of.graph, name, x, got.shape[-1]) for x in (want, twin))
        if not (verdict := judge(got, want, twin)):
            wrong.append(f"{name}: {verdict}")
    assert seen >= COMPARED
    return wrong


def badly_routed(graph: Graph, env: dict[str, Any], ids: torch.Tensor) -> list[str]:
    """Tokens with other experts than the reference's by more than the error of the bf16 model's scores."""
    op = next(op for op in graph.ops if isinstance(op, TopK))
    prefix = graph.model_copy(update={"ops": graph.ops[: graph.ops.index(op) + 1]})
    found = [evaluate(prefix, env, dtype) for dtype in (torch.float32, torch.bfloat16)]
    score, twin = (torch.sigmoid(x["logits"] * op.multiplier) + env[op.weights["bias"].name] for x in found)
    wrong = []
    for t, (mine, right) in enumerate(zip(ids.tolist(), found[0]["routes.ids"].tolist(), strict=True)):
        lost, won = sorted(set(right) - set(mine)), sorted(set(mine) - set(right))
        if len(set(mine)) < op.k:
            wrong.append(f"token {t} has experts {mine}")
        elif lost and float(score[t, lost].max() - score[t, won].min()) > 2 * float((twin[t] - score[t]).abs().max()):
            wrong.append(f"token {t} has {won} for {lost}")
    return wrong


def share(graph: Graph, name: str, whole: torch.Tensor, width: int) -> torch.Tensor:
    """The first rank's columns of a whole; of a projection's sums, of each of its parts."""
    weights = [w for op in graph.ops if name in op.outputs.values() for w in op.weights.values()]
    parts = next((w.parts for w in weights if w.parts), (width,))
    ranks = whole.shape[1] // width
    starts = [ranks * sum(parts[:i]) for i in range(len(parts))]
    return torch.cat([whole[:, at : at + n] for at, n in zip(starts, parts, strict=True)], dim=1)
