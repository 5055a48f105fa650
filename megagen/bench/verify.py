"""Every channel of one launch against the reference, and the routing by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megagen.errors import DeviceError
from megagen.ir.graph import Graph, Op, TensorKind
from megagen.ops.compare import Verdict, judge
from megagen.ops.reference import evaluate
from megagen.ops.top_k import TopK
from megagen.runtime.session import Layer, Session
from megagen.weights.random import LayerWeights

Env = Mapping[str, torch.Tensor | Callable[[int], torch.Tensor]]
Values = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Check:
    """One property of a launch, true when it holds. ``verdict`` for compared numbers; ``skipped`` says why not."""

    name: str
    ok: bool
    detail: str
    verdict: Verdict | None = None
    skipped: bool = False

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


def verify(
    session: Session,
    graph: Graph,
    weights: LayerWeights,
    tokens: int,
    route_override: torch.Tensor | None = None,
    seed: int = 0,
) -> list[Check]:
    """One launch on random input, judged: :meth:`Verifier.check` for one seed. The session has the one live rank."""
    verifier = Verifier(session, graph, weights.packed(), weights.env(graph.tp))
    return verifier.check(tokens, route_override=route_override, seeds=(seed,))


def random_stream(tokens: int, graph: Graph, seed: int, device: torch.device) -> torch.Tensor:
    """fp32 [tokens, hidden] of order one, the rows of different size."""
    generator = torch.Generator(device).manual_seed(seed)
    (stream,) = (t for t in graph.tensors.values() if t.kind is TensorKind.INPUT)
    rows = torch.randn(tokens, stream.shape[1], generator=generator, device=device)
    return rows * torch.logspace(-1, 1, tokens, device=device).unsqueeze(1)


class Verifier:
    """Weights bound for a session, with their world-wide form for the reference.

    ``packed``: kernel parameters by name; ``env``: see :func:`megagen.ops.reference.evaluate`. Channels and
    parameters of the Plan bear the names of the graph's tensors.
    """

    def __init__(self, session: Session, graph: Graph, packed: Values, env: Env) -> None:
        self.session, self.graph, self.env = session, graph, env
        self.top_k = next((op for op in graph.ops if isinstance(op, TopK)), None)
        (stream,) = (t for t in graph.tensors.values() if t.kind is TensorKind.INPUT)
        self.input_name = stream.name
        self.stream = torch.zeros(stream.shape, device=session.device)
        self.layer: Layer = session.bind({**packed, stream.name: self.stream})

    def launch(self, rows: torch.Tensor, route_override: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Run one launch on ``rows`` fp32 [tokens, hidden]; :meth:`values` of what it made.

        Unused rows of the input and all of the output hold NaN beforehand.
        """
        tokens = len(rows)
        self.stream.fill_(float("nan"))
        self.stream[:tokens] = rows
        self.session.poison()
        self.session.set_tokens(tokens)
        self.session.set_route_override(route_override)
        self.session.launch(self.layer)
        self.session.synchronize()
        return self.values(tokens)

    def values(self, tokens: int) -> dict[str, torch.Tensor]:
        """What the last launch left in the readable channels and outputs, cut to ``tokens``, by tensor name."""
        channels = [c for c in self.session.plan.channels if not self.session.unreadable(c)]
        found = {c.name: self.session.read(c.name) for c in channels} | {
            name: out.clone() for name, out in self.session.outputs.items()
        }
        return {name: x.narrow(self._token_axis(name), 0, tokens) for name, x in found.items()}

    def check(
        self,
        tokens: int,
        *,
        route_override: torch.Tensor | None = None,
        seeds: Sequence[int] = (0,),
        edit: Callable[[torch.Tensor], None] = lambda rows: None,
    ) -> list[Check]:
        """Launch once a seed and judge every channel over all of them.

        ``edit`` changes the random input in place. Rows that it makes NaN or infinite are left out where the
        reference is not finite either. Raises HangError or DeviceError when a launch fails.
        """
        seen: dict[str, _Compared] = {}
        routing = _Routing()
        left: list[str] = []
        for seed in seeds:
            rows = random_stream(tokens, self.graph, seed, self.session.device)
            edit(rows)
            made = self.launch(rows, route_override)
            left += [str(x) for x in self.session.leftovers()]
            env = {**self.env, self.input_name: rows}
            override = None if route_override is None else route_override[:tokens].to(rows.device)
            ids = self._route(made, env, override, rows.isfinite().all(1), routing)
            if ids is not None:
                env["route_override"] = ids
            reference, model = (evaluate(self.graph, env, dtype) for dtype in (torch.float32, torch.bfloat16))
            for name, (ours, want, twin) in self._pairs(made, reference, model).items():
                compared = seen.setdefault(name, _Compared())
                start = sum(len(x) for x in compared.ours)
                harmed = ~rows.isfinite().all(1) & ~want.flatten(1).isfinite().all(1)
                compared.excluded += [start + int(r) for r in harmed.nonzero()]
                compared.ours.append(ours)
                compared.reference.append(want)
                compared.model.append(twin)
        checks = [routing.check()] if self.top_k else []
        checks += [seen[name].check(name) for name in self._order(seen)]
        checks += [
            Check(c.name, True, f"not compared: it {reason}", skipped=True)
            for c in self.session.plan.channels
            if (reason := self.session.unreadable(c)) is not None
        ]
        checks.append(Check("empty slots", not left, "; ".join(left) or "all empty again"))
        return checks

    # -- naming and shape ------------------------------------------------------------------------------------

    def _writer(self, name: str) -> tuple[Op, str]:
        """The op and its port that make tensor ``name``."""
        for op in self.graph.ops:
            for port, tensor in op.outputs.items():
                if tensor == name:
                    return op, port
        raise DeviceError(f"no op of {self.graph.name} makes {name}")

    def _token_axis(self, name: str) -> int:
        _, port = self._writer(name)
        return 2 if port == "partials" else 1 if self.graph.tensors[name].reduce else 0

    def _order(self, seen: Mapping[str, object]) -> list[str]:
        order = [t for op in self.graph.ops for t in op.outputs.values()]
        return sorted(seen, key=lambda name: order.index(name.removesuffix(".weights")))

    # -- routing ---------------------------------------------------------------------------------------------

    def _route(
        self, made: Values, env: Env, override: torch.Tensor | None, finite: torch.Tensor, routing: _Routing
    ) -> torch.Tensor | None:
        """Our ids [tokens, k], after judging them; the override itself where our routes cannot be read."""
        op = self.top_k
        if op is None or op.outputs["routes"] not in made:
            routing.unread = True
            return override
        prefix = self.graph.model_copy(update={"ops": self.graph.ops[: self.graph.ops.index(op) + 1]})
        given: Env = env if override is None else {**env, "route_override": override}
        reference, model = (evaluate(prefix, given, dtype) for dtype in (torch.float32, torch.bfloat16))
        bias = env[op.weights["bias"].name]
        assert isinstance(bias, torch.Tensor)
        score, twin = (torch.sigmoid(v[op.inputs["logits"]] * op.multiplier) + bias for v in (reference, model))
        ours, want = made[op.outputs["routes"]][:, : op.k].long(), reference[f"{op.outputs['routes']}.ids"]
        for t, (mine, right) in enumerate(zip(ours.tolist(), want.tolist(), strict=True)):
            if len(set(mine)) < op.k or not all(0 <= e < op.experts for e in mine):
                routing.wrong.append(f"token {t} has experts {mine}")
            elif not finite[t] or set(mine) == set(right):
                continue  # order among the chosen decides nothing but their slots
            elif override is not None and bool((override[t] >= 0).any()):
                routing.wrong.append(f"token {t} has experts {mine}, the override says {right}")
            else:
                lost, won = (sorted(set(a) - set(b)) for a, b in ((right, mine), (mine, right)))
                gap = float(score[t, lost].max() - score[t, won].min())
                error = 2 * float((twin[t] - score[t]).abs().max())
                text = f"token {t} has {won} for {lost}: margin {gap:.2e}, error {error:.2e}"
                (routing.close if gap <= error else routing.wrong).append(text)
        valid = ((ours >= 0) & (ours < op.experts)).all()
        return ours if bool(valid) else want

    # -- values ----------------------------------------------------------------------------------------------

    def _pairs(self, made: Values, reference: Values, model: Values) -> dict[str, tuple[torch.Tensor, ...]]:
        """(ours, fp32 reference, bf16 model) [tokens, ...] by name, for all that is comparable."""
        found: dict[str, tuple[torch.Tensor, ...]] = {}
        for name, value in made.items():
            op, port = self._writer(name)
            if isinstance(op, TopK):
                weights = value[:, op.k :].contiguous().view(torch.float32)
                found[f"{name}.weights"] = (weights, reference[f"{name}.weights"], model[f"{name}.weights"])
            elif port == "partials":
                ours = _sum(value).transpose(0, 1).flatten(1)
                # This rank's columns of the op's whole output, or the logits.
                whole = name if name in reference else op.outputs["out"]
                first = 0 if whole == name else self._first_rank() * ours.shape[1]
                found[name] = (ours, *(x[whole].narrow(1, first, ours.shape[1]) for x in (reference, model)))
            else:
                ours = _sum(value.float()) if self.graph.tensors[name].reduce else value
                width = ours.shape[-1]  # a tensor that stays on its rank is this rank's slice of the whole
                first = 0 if width == reference[name].shape[-1] else self._first_rank() * width
                found[name] = (ours, *(x[name].narrow(-1, first, width) for x in (reference, model)))
        return found

    def _first_rank(self) -> int:
        """The rank whose shard this live rank holds."""
        return self.session.rank * (self.graph.tp // self.session.live)


def _sum(parts: torch.Tensor) -> torch.Tensor:
    """Over the first axis, ascending."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


@dataclass
class _Compared:
    """One tensor's values over the seeds."""

    ours: list[torch.Tensor] = field(default_factory=list)
    reference: list[torch.Tensor] = field(default_factory=list)
    model: list[torch.Tensor] = field(default_factory=list)
    excluded: list[int] = field(default_factory=list)

    def check(self, name: str) -> Check:
        verdict = judge(self.ours, self.reference, self.model, excluded=self.excluded)
        return Check(name, bool(verdict), str(verdict), verdict)


@dataclass
class _Routing:
    """Tokens whose experts differ from the reference's: wrongly, or within the error of the scores."""

    wrong: list[str] = field(default_factory=list)
    close: list[str] = field(default_factory=list)
    unread: bool = False

    def check(self) -> Check:
        if self.unread:
            return Check("routing", True, "not compared: routes cannot be read after a launch", skipped=True)
        detail = "; ".join([*self.wrong, *(f"accepted: {x}" for x in self.close)])
        return Check("routing", not self.wrong, detail or "the reference's experts for every token")
