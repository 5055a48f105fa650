"""Every channel of one launch against the reference, and the routing by itself; of caches, what may not change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Any

import torch

from megagen.bench.inputs import Inputs, get, has_caches, stream_of, without
from megagen.bench.inputs import random_stream as random_stream
from megagen.errors import DeviceError
from megagen.ir.graph import Graph, Op, TensorKind
from megagen.ir.plan import ChannelPlan
from megagen.ops.attention import Attention
from megagen.ops.choose import Choose, choice
from megagen.ops.compare import Verdict, judge
from megagen.ops.global_attention import GlobalAttention
from megagen.ops.reference import evaluate
from megagen.ops.top_k import TopK
from megagen.runtime.params import TORCH_NAMES
from megagen.runtime.rank import Layer, Live, Rank
from megagen.runtime.step import Step
from megagen.weights.random import LayerWeights

Env = Mapping[str, Any]  # see megagen.ops.reference.evaluate
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
    session: Live,
    graph: Graph,
    weights: LayerWeights,
    tokens: int,
    route_override: torch.Tensor | None = None,
    seed: int = 0,
    step: Step | None = None,
) -> list[Check]:
    """One launch on random input, judged: :meth:`Verifier.check` for one seed. The session has the one live rank."""
    verifier = Verifier(session, graph, weights.packed(), weights.env(graph.tp))
    return verifier.check(tokens, route_override=route_override, seeds=(seed,), step=step)


class Verifier:
    """Weights bound for the live ranks, with their world-wide form for the reference.

    ``on``: a session, or a world of several ranks. ``packed``: kernel parameters by name, of each rank (of a lone
    one without the list around it); ``env``: see :func:`megagen.ops.reference.evaluate`. Channels and parameters of
    the Plan bear the names of the graph's tensors.
    """

    def __init__(self, on: Live, graph: Graph, packed: Values | Sequence[Values], env: Env) -> None:
        self.on, self.graph, self.env = on, graph, env
        self.ranks: Sequence[Rank] = on.ranks
        self.session = self.ranks[0]
        self.top_k = next((op for op in graph.ops if isinstance(op, TopK)), None)
        self.choose = next((op for op in graph.ops if isinstance(op, Choose)), None)
        self.input_name = stream_of(graph).name
        self.state = [t.name for t in graph.tensors.values() if t.kind is TensorKind.STATE]
        self.step = Step.chain(1)  # of the last launch
        each = [packed] if isinstance(packed, Mapping) else packed
        self.layers: list[Layer] = [
            rank.bind({**weights, **self._buffers(rank)}) for rank, weights in zip(self.ranks, each, strict=True)
        ]
        self.layer = self.layers[0]
        self.stream = self.layer.tensors[self.input_name]
        self._before: list[dict[str, torch.Tensor]] = []  # each rank's state when the last launch began

    def _buffers(self, rank: Rank) -> dict[str, torch.Tensor]:
        """Zeros for the inputs and the state."""
        kinds = (TensorKind.INPUT, TensorKind.STATE)
        found = [t for t in self.graph.tensors.values() if t.kind in kinds]
        types = {t.name: getattr(torch, TORCH_NAMES[t.dtype]) for t in found}
        return {t.name: torch.zeros(t.shape, dtype=types[t.name], device=rank.device) for t in found}

    def inputs(self, tokens: int, seed: int = 0, step: Step | None = None) -> Inputs:
        """Random ones for the live ranks."""
        return Inputs.random(self.graph, len(self.ranks), tokens, seed, self.session.device, step)

    def launch(
        self,
        given: torch.Tensor | Inputs,
        route_override: torch.Tensor | None = None,
        *,
        launches: int = 1,
        step: Step | None = None,
    ) -> dict[str, torch.Tensor]:
        """Run launches on ``given`` inputs; :meth:`values` of what the last one made on the first rank.

        Rows fp32 [tokens, hidden] are the stream (or int32 [tokens] the ids) of otherwise random inputs, of ``step``.
        Unused rows of the input and all of the output hold NaN beforehand (or no id), the state random bits. All
        launches are in the streams before the first is waited for.
        """
        inputs = given if isinstance(given, Inputs) else self.inputs(len(given), 0, step).with_stream(given)
        self.step, self._before = inputs.step, []
        for rank, layer, values in zip(self.ranks, self.layers, inputs.ranks, strict=True):
            for name, value in values.items():
                place = layer.tensors[name]
                with rank.writing(place):
                    place.fill_(float("nan") if place.is_floating_point() else -1)
                    place[: len(value)] = value
            self._before.append({name: self._scramble(rank, layer.tensors[name]) for name in self.state})
            rank.poison()
            rank.set_step(self.step)
            rank.set_route_override(route_override)
        for _ in range(launches):
            for rank, layer in zip(self.ranks, self.layers, strict=True):
                rank.launch(layer)
        self.on.synchronize()
        return self.values(self.step.tokens)

    def _scramble(self, rank: Rank, place: torch.Tensor) -> torch.Tensor:
        """Fill state with random bits, NaNs among them; a copy of them."""
        generator = torch.Generator(place.device).manual_seed(rank.rank)
        size = place.numel() * place.element_size()
        raw = torch.randint(256, (size,), dtype=torch.uint8, generator=generator, device=place.device)
        bits = raw.view(place.dtype).view(place.shape)
        with rank.writing(place):
            place.copy_(bits)
        return bits

    def strays(self) -> list[str]:
        """Which ranks' states the last launch changed elsewhere than in the slots of its own tokens."""
        numbers = self.step.numbers
        return [
            f"{name} of rank {rank.rank}"
            for rank, layer, before in zip(self.ranks, self.layers, self._before, strict=True)
            for name, bits in before.items()
            if not same_bits(without(layer.tensors[name], numbers), without(bits, numbers))
        ]

    def values(self, tokens: int, rank: Rank | None = None) -> dict[str, torch.Tensor]:
        """What the last launch left in the readable channels and outputs, cut to ``tokens``, by tensor name.

        Of the first rank, or the one given. Of caches the tokens' own slots, [tokens, heads * dim].
        """
        session = rank or self.session
        tensors = next(layer for r, layer in zip(self.ranks, self.layers, strict=True) if r is session).tensors
        channels = [c for c in session.plan.channels if not self._uncompared(session, c)]
        found = {c.name: session.read(c.name) for c in channels} | {
            name: out.clone() for name, out in session.outputs.items()
        }
        cut = {name: x.narrow(self._token_axis(name), 0, tokens) for name, x in found.items()}
        return cut | {name: get(tensors[name], self.step.numbers[:tokens]) for name in self.state}

    def check(
        self,
        tokens: int,
        *,
        route_override: torch.Tensor | None = None,
        seeds: Sequence[int] = (0,),
        edit: Callable[[torch.Tensor], None] = lambda rows: None,
        launches: int = 1,
        step: Step | None = None,
    ) -> list[Check]:
        """Launch once a seed (or ``launches`` times) and judge every channel of every rank over all of them.

        ``step``: of the ``tokens``, a chain after nothing by default. ``edit`` changes the random stream in place. Rows
        that it makes NaN or infinite are left out where the reference is not finite either. Several ranks must also
        agree, to the bit, on what all of them hold. Raises EmulationError, HangError or DeviceError when a launch
        fails.
        """
        seen: dict[str, dict[str, _Compared]] = {}  # by tensor and rank
        routing, chosen = _Routing(), _Choice()
        left: list[str] = []
        differ: list[str] = []
        strays: list[str] = []
        for seed in seeds:
            inputs = self.inputs(tokens, seed, step)
            rows = inputs.stream
            edit(rows)
            finite = rows.reshape(tokens, -1).isfinite().all(1)
            made = self.launch(inputs, route_override, launches=launches)
            strays += [f"{x}, seed {seed}" for x in self.strays()]
            env: dict[str, Any] = {**self.env, **inputs.env}
            override = None if route_override is None else route_override[:tokens].to(rows.device)
            ids = self._route(made, env, override, finite, routing)
            if ids is not None:
                env["route_override"] = ids
            reference, model = (evaluate(self.graph, env, dtype) for dtype in (torch.float32, torch.bfloat16))
            values = [made, *(self.values(tokens, rank) for rank in self.ranks[1:])]
            if self.choose is not None:
                chosen.judge(self.choose, values, self.graph.tp // len(self.ranks), reference, model)
            for rank, mine in zip(self.ranks, values, strict=True):
                label = f"rank {rank.rank}" if len(self.ranks) > 1 else ""
                left += [f"{label}: {x}" if label else str(x) for x in rank.leftovers()]
                pairs = self._pairs(mine, reference, model, rank)
                differ += [
                    f"{name} of {label}, seed {seed}"
                    for name, pair in pairs.items()
                    if pair.replicated and not same_bits(mine[pair.tensor], made[pair.tensor])
                ]
                for name, pair in pairs.items():
                    seen.setdefault(name, {}).setdefault(label, _Compared()).add(finite, pair)
        checks = [routing.check()] if self.top_k else []
        checks += [chosen.check()] if self.choose else []
        checks += [worst(name, {k: c.check(name) for k, c in seen[name].items()}) for name in self._order(seen)]
        checks += [
            Check(c.name, True, f"not compared: it {reason}", skipped=True)
            for c in self.session.plan.channels
            if (reason := self._uncompared(self.session, c)) is not None
        ]
        if has_caches(self.graph):
            kept = "the same bits but in the tokens' own slots"
            checks.append(Check("rest of the cache", not strays, "; ".join(f"{x} differs" for x in strays) or kept))
        checks.append(Check("empty slots", not left, "; ".join(left) or "all empty again"))
        if len(self.ranks) > 1:
            agreed = "the same bits in what all ranks hold"
            checks.append(Check("ranks agree", not differ, "; ".join(f"{x} differs" for x in differ) or agreed))
        return checks

    # -- naming and shape ------------------------------------------------------------------------------------

    def _writer(self, name: str) -> tuple[Op, str]:
        """The op and its port that make tensor ``name``."""
        for op in self.graph.ops:
            for port, tensor in op.outputs.items():
                if tensor == name:
                    return op, port
        raise DeviceError(f"no op of {self.graph.name} makes {name}")

    def _uncompared(self, rank: Rank, channel: ChannelPlan) -> str | None:
        """Why a channel is left out, or None when the reference has its like."""
        if (reason := rank.unreadable(channel)) is not None:
            return reason
        op, port = self._writer(channel.name)
        if port == "moments":
            return "holds sums of squares"
        if port != "partials":
            return None
        if isinstance(op, Attention | GlobalAttention):
            return "holds parts of softmaxes"
        if (out := op.outputs.get("out")) is not None and self.graph.tensors[out].reduce and self.graph.tp > 1:
            return "holds parts of one rank's contribution"
        return None

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

    def _pairs(self, made: Values, reference: Values, model: Values, rank: Rank) -> dict[str, _Pair]:
        """For all of a rank's values that are comparable."""
        found: dict[str, _Pair] = {}
        shard = rank.rank * (self.graph.tp // rank.live)  # the rank of the group whose shard this live rank holds
        for tensor, value in made.items():
            op, port = self._writer(tensor)
            name, axis = tensor, -1
            weight = op.weights.get("weight")
            if isinstance(op, Choose):
                if port != "logits":
                    continue  # see _Choice
                value = value[:, : op.rows - op.padding]
            if isinstance(op, TopK):
                name = whole = f"{tensor}.weights"
                ours = value[:, op.k :].contiguous().view(torch.float32)
            elif port == "partials":
                ours = _sum(value).transpose(0, 1).flatten(1)
                ours = ours[:, : ours.shape[1] - (weight.padding if weight is not None else 0)]
                # This rank's columns of the op's whole output, or what has no other name (logits).
                whole, axis = tensor if tensor in reference else op.outputs["out"], 1
            else:
                ours, whole = _sum(value.float()) if self.graph.tensors[tensor].reduce else value, tensor
            width = ours.shape[axis]  # a tensor that stays on its rank is this rank's slice of the whole
            replicated = width == reference[whole].shape[axis]
            parts = weight.parts if port == "partials" and weight is not None and weight.parts else (width,)
            want, twin = (x[whole] if replicated else _shard(x[whole], shard, axis, parts) for x in (reference, model))
            found[name] = _Pair(tensor, ours, want, twin, replicated)
        return found


@dataclass(frozen=True)
class _Pair:
    """A rank's value of a ``tensor`` with the fp32 reference and the bf16 model [tokens, ...]. ``replicated``: every
    rank holds all of it."""

    tensor: str
    ours: torch.Tensor
    reference: torch.Tensor
    model: torch.Tensor
    replicated: bool


def worst(name: str, checks: Mapping[str, Check]) -> Check:
    """One check for several, by what they are of ("rank 1"): those that fail, else the largest error."""
    failed = {label: c for label, c in checks.items() if not c}

    def error(item: tuple[str, Check]) -> float:
        verdict = item[1].verdict
        return 0.0 if verdict is None else -inf if isnan(x := verdict.ours.worst_row) else -x

    order = sorted((failed or checks).items(), key=error)
    label, first = order[0]
    if len(checks) == 1 and not label:
        return first
    detail = "; ".join(f"{label}: {c.detail}" if label else c.detail for label, c in order) if failed else first.detail
    return Check(name, not failed, detail, first.verdict, first.skipped)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one type hold the same bits, NaNs included."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return bool(torch.equal(a.contiguous().view(integers), b.contiguous().view(integers)))


def _shard(whole: torch.Tensor, shard: int, axis: int, parts: Sequence[int]) -> torch.Tensor:
    """A rank's slice; of each of several matrices stacked along ``axis``, of which it has ``parts``."""
    ranks = whole.shape[axis] // sum(parts)
    starts = [ranks * sum(parts[:i]) + shard * part for i, part in enumerate(parts)]
    return torch.cat([whole.narrow(axis, at, part) for at, part in zip(starts, parts, strict=True)], dim=axis)


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

    def add(self, finite: torch.Tensor, pair: _Pair) -> None:
        start = sum(len(x) for x in self.ours)
        harmed = ~finite & ~pair.reference.flatten(1).isfinite().all(1)
        self.excluded += [start + int(r) for r in harmed.nonzero()]
        self.ours.append(pair.ours)
        self.reference.append(pair.reference)
        self.model.append(pair.model)

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


@dataclass
class _Choice:
    """Tokens whose next id is not the one that all ranks' logits say, or not the reference's within the error of the
    logits."""

    wrong: list[str] = field(default_factory=list)
    close: list[str] = field(default_factory=list)

    def judge(self, op: Choose, made: Sequence[Values], stand_ins: int, reference: Values, model: Values) -> None:
        """``made``: what each live rank has, which the ``stand_ins`` ranks that it plays have too."""
        logits, ids = op.outputs["logits"], op.outputs["ids"]
        real = op.rows - op.padding
        for rank, values in enumerate(made):
            if not bool((values[logits][:, real:] == -inf).all()):
                self.wrong.append(f"rank {rank} has logits of rows that are no token's")
        said = choice(torch.cat([values[logits][:, :real] for values in made for _ in range(stand_ins)], dim=1))
        for rank, values in enumerate(made):
            for t in (values[ids].long() != said).nonzero().flatten().tolist():
                self.wrong.append(f"token {t} of rank {rank}: {int(values[ids][t])}, the logits say {int(said[t])}")
        want, twin = (x[logits].float() for x in (reference, model))
        for t, (mine, right) in enumerate(zip(said.tolist(), choice(want).tolist(), strict=True)):
            if mine != right and bool(want[t].isfinite().all()):
                gap, error = float(want[t, right] - want[t, mine]), 2 * float((twin[t] - want[t]).abs().max())
                text = f"token {t} is {mine} for {right}: margin {gap:.2e}, error {error:.2e}"
                (self.close if gap <= error else self.wrong).append(text)

    def check(self) -> Check:
        detail = "; ".join([*self.wrong, *(f"accepted: {x}" for x in self.close)])
        return Check("next ids", not self.wrong, detail or "the reference's for every token")
