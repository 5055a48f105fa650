"""A graph's ops as kernels of torch and Triton, layers one after the other, in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from triton.runtime._async_compile import AsyncCompileMode

from megagen.bench.baseline import kernels, refuse_unfit
from megagen.bench.baseline.exchange import Exchange, Place, StandIns
from megagen.bench.baseline.prepare import Prepared, Words
from megagen.bench.baseline.tiles import MOST_SPLITS, Tile, Tuned, candidates, captured
from megagen.errors import MegagenError
from megagen.ir.graph import DType, Graph, Op, TensorKind
from megagen.ops.attention import CHUNK, Attention
from megagen.ops.combine import Combine
from megagen.ops.dense_gemm import DenseGemm
from megagen.ops.expert_gemm import ExpertGemm
from megagen.ops.qkv_heads import HEAD_DIM, QkvHeads
from megagen.ops.residual import Residual
from megagen.ops.rms_norm import RmsNorm
from megagen.ops.top_k import TopK
from megagen.runtime.step import Step

ROWS = 16  # of tokens in every kernel
SETS = 2  # of what a layer hands on, but for caches: one is read while the other is written
MOST_HEADS = 2  # a program of the heads' kernel
COMPILERS = 8  # at a time

Values = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments, or another thing that a stream can be given."""

    kernel: Any
    grid: tuple[int, ...] = ()
    args: tuple[Any, ...] = ()
    meta: Mapping[str, Any] | None = None

    def __call__(self) -> None:
        if self.meta is None:
            self.kernel(*self.args)
        else:
            self.kernel[self.grid](*self.args, **self.meta)

    def compile(self) -> None:
        if self.meta is not None:
            self.kernel.warmup(*self.args, grid=self.grid, **self.meta)


def _run(launches: Sequence[Launch]) -> None:
    for launch in launches:
        launch()


class OpByOp:
    """Layers of ``graph``, a kernel or two an op, on one live rank.

    ``weights``: of each layer (see :func:`megagen.bench.baseline.prepare.prepare`). ``inputs``: what the first layer
    reads, by name. ``pairs``: which of a layer's outputs is which of the next one's inputs
    (:func:`megagen.runtime.stack.handed_on`); caches and the rest are handed on as in
    :class:`megagen.runtime.stack.Stack`. ``step``: of all the graph's tokens. ``table``: the first routing, see
    :meth:`reroute`; like the step it lies in device memory. ``tiles``: how kernels are cut, by op; what is not there is
    measured, on a CPU it is the first candidate. ``asm`` False decodes experts' weights in plain Triton; ``pdl``:
    kernels begin before the last one ends. Raises MegagenError for a graph with an op that there is no kernel for.
    """

    def __init__(
        self,
        graph: Graph,
        weights: Sequence[Prepared],
        inputs: Values,
        step: Step,
        pairs: Mapping[str, str],
        *,
        exchange: Exchange | None = None,
        table: torch.Tensor | None = None,
        tiles: Mapping[str, Tile] | None = None,
        asm: bool | None = None,
        pdl: bool | None = None,
    ) -> None:
        refuse_unfit(graph)
        if step.tokens != graph.tokens:
            raise MegagenError(f"a baseline of {graph.tokens} tokens was given a step of {step.tokens}")
        self.graph, self.weights, self.step = graph, weights, step
        self.device = next(iter(inputs.values())).device
        self.gpu = self.device.type == "cuda"
        self.asm = self.gpu if asm is None else asm
        self.pdl = self.gpu if pdl is None else pdl
        self.exchange = StandIns(graph.tp, self.device) if exchange is None else exchange
        self.tuned = Tuned()
        self._pairs = dict(pairs)
        self._context = self._ints([step.context])
        self._positions = self._ints(step.positions)
        self._ancestors = self._ints(step.ancestors)
        self._shared: dict[str, Any] = {}  # buffers of all layers
        self._state = self._hand_on(inputs)  # of what is handed on, by either name
        self._given = {name: x for name, x in inputs.items() if name not in pairs}
        self._sums: dict[str, tuple[torch.Tensor, int]] = {}  # partial sums and their number, as last bound
        self.tiles: dict[str, Tile] = {}
        tiles = tiles or {}
        self.reroute(table)
        for op in graph.ops:
            if options := candidates(op, graph.tp, self.gpu):
                self.tiles[op.name] = tiles[op.name] if op.name in tiles else self._choose(op, options)
            bound = self._bind(op, 0)
            if self.gpu:
                _run(bound)  # the ops that read from it are tried on what it makes
        self.layers = [[x for op in graph.ops for x in self._bind(op, i)] for i in range(len(weights))]

    # -- running ---------------------------------------------------------------------------------------------

    def launch(self, layers: int | None = None) -> None:
        """Queue all layers' kernels, or the first few's, in the current stream."""
        for layer in self.layers[:layers]:
            _run(layer)

    def capture(self) -> Any:
        """:meth:`launch` as a CUDA graph; one launch comes before. Keep this as long as it."""
        return captured(self.launch)

    def described(self) -> dict[str, str]:
        """How each kernel is cut that could be cut in several ways, and what was tried and did not run."""
        failed = {
            op: [f"{cut} did not run: {why}" for cut, why in tried.items() if not why.endswith("µs")]
            for op, tried in self.tuned.log.items()
        }
        return {op: ", ".join((str(tile), *failed.get(op, []))) for op, tile in self.tiles.items()}

    def reroute(self, table: torch.Tensor | None) -> None:
        """Expert ids int32 [tokens, top_k] in place of the router's from now on; None gives them back."""
        for op in self.graph.ops:
            if isinstance(op, TopK):
                override = self._override(op)
                override.fill_(-1) if table is None else override.copy_(table, non_blocking=True)

    def values(self, layer: int = 0) -> dict[str, torch.Tensor]:
        """What a layer left, by tensor name, as :func:`megagen.ops.reference.evaluate` has it but for a rank's own
        share; of caches the whole. Internal ones are the last launched layer's."""
        found: dict[str, torch.Tensor] = {}
        for op in self.graph.ops:
            for port, name in op.outputs.items():
                tensor = self.graph.tensors[name]
                if isinstance(op, TopK):
                    if port == "routes":
                        ids, shares = self._routes(op)
                        found |= {f"{name}.ids": ids.long(), f"{name}.weights": shares.clone()}
                elif name in self._sums:
                    sums, n = self._sums[name]
                    found[name] = sums.float().view(n, -1, sums.shape[-1])[:, : self.step.tokens].sum(0)
                elif port == "partials" or (tensor.kind is TensorKind.INTERNAL and name not in self._shared):
                    continue
                elif tensor.kind is not TensorKind.INTERNAL:
                    found[name] = self._tensor(name, layer)
                elif not isinstance(held := self._shared[name], Place):
                    found[name] = self._natural(name, held)
                elif tensor.reduce:
                    found[name] = held.read.float().sum(0)
                else:
                    whole = self._natural(name, held.read).transpose(0, 1).flatten(1)
                    found[name] = whole.view(self.step.tokens, -1, whole.shape[1]).squeeze(1)
        return found

    # -- buffers ---------------------------------------------------------------------------------------------

    def _ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def _hand_on(self, inputs: Values) -> dict[str, list[torch.Tensor]]:
        found: dict[str, list[torch.Tensor]] = {}
        for read, made in self._pairs.items():
            kept = self.graph.tensors[made].kind is TensorKind.STATE
            places = [inputs[read].clone() for _ in range(len(self.weights) if kept else SETS)]
            found[read] = places
            found[made] = [*places[1:], places[0]]
        return found

    def _tensor(self, name: str, layer: int) -> torch.Tensor:
        """An activation that is no exchange."""
        if name in self._state:
            return self._state[name][layer % len(self._state[name])]
        if name in self._given:
            return self._given[name]
        t = self.graph.tensors[name]
        dtype = torch.float32 if t.dtype is DType.FP32 else torch.bfloat16
        return self._buffer(name, t.shape, dtype)

    def _buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if name not in self._shared:
            self._shared[name] = torch.zeros(*shape, dtype=dtype, device=self.device)
        found: torch.Tensor = self._shared[name]
        return found

    def _place(self, name: str) -> Place:
        """An exchange, its rows tokens or slots of tokens."""
        if name not in self._shared:
            t = self.graph.tensors[name]
            if t.reduce:
                self._shared[name] = self.exchange.reduced(t.shape[-2], t.shape[-1])
            else:
                rows = t.shape[0] * (t.shape[1] if len(t.shape) == 3 else 1)
                self._shared[name] = self.exchange.gathered(rows, t.shape[-1] // self.graph.tp)
        found: Place = self._shared[name]
        return found

    def _read(self, name: str, layer: int) -> torch.Tensor:
        """An activation as its reader finds it: an exchange [ranks, rows, columns], else as it is."""
        return self._place(name).read if self._exchanged(name) else self._tensor(name, layer)

    def _exchanged(self, name: str) -> bool:
        return isinstance(self._shared.get(name), Place) or self.graph.tensors[name].scope == "world"

    def _planes(self, name: str) -> bool:
        """Whether an expert GEMM reads it, which wants planes."""
        return any(isinstance(op, ExpertGemm) and op.inputs["in"] == name for op in self.graph.ops)

    def _natural(self, name: str, held: torch.Tensor) -> torch.Tensor:
        """Columns in their order."""
        if not self._planes(name):
            return held
        found: torch.Tensor = held.unflatten(-1, (4, -1, 4)).transpose(-3, -2).flatten(-3)
        return found

    def _entries(self, op: Op) -> tuple[torch.Tensor, ...]:
        """The used experts, how many slots each has, which, and how many experts they are."""
        most = self.step.tokens * 8
        return tuple(
            self._buffer(f"{op.inputs.get('table', op.outputs.get('table'))}.{what}", (size,), torch.int32)
            for what, size in (("expert", most), ("count", most), ("slots", most * ROWS), ("entries", 1))
        )

    def _routes(self, op: TopK) -> tuple[torch.Tensor, torch.Tensor]:
        shape, name = (self.step.tokens, op.k), op.outputs["routes"]
        return self._buffer(f"{name}.ids", shape, torch.int32), self._buffer(f"{name}.shares", shape, torch.float32)

    def _override(self, op: TopK) -> torch.Tensor:
        name = f"{op.name}.override"
        if name not in self._shared:
            self._buffer(name, (self.step.tokens, op.k), torch.int32).fill_(-1)
        found: torch.Tensor = self._shared[name]
        return found

    # -- choosing --------------------------------------------------------------------------------------------

    def _choose(self, op: Op, options: Sequence[Tile]) -> Tile:
        if not self.gpu or len(options) == 1:
            return options[0]
        tries: dict[Tile, list[Launch]] = {}
        for tile in options:
            self.tiles[op.name] = tile
            tries[tile] = [x for i in range(len(self.weights)) for x in self._bind(op, i)]
        with ThreadPoolExecutor(COMPILERS) as pool, AsyncCompileMode(pool, ignore_errors=True):
            for some in tries.values():
                for launch in some[: len(some) // len(self.weights)]:
                    launch.compile()  # an error is met again when the launch is tried

        return self.tuned.fastest(op, {t: partial(_run, some) for t, some in tries.items()}, len(self.weights))

    # -- ops -------------------------------------------------------------------------------------------------

    def _bind(self, op: Op, layer: int) -> list[Launch]:
        makers: dict[type[Op], Callable[[Any, int], list[Launch]]] = {
            Attention: self._attention,
            Combine: self._combine,
            DenseGemm: self._dense,
            ExpertGemm: self._experts,
            QkvHeads: self._heads,
            Residual: self._residual,
            RmsNorm: self._norm,
            TopK: self._top_k,
        }
        found = makers[type(op)](op, layer)
        for name in op.outputs.values():
            if self._exchanged(name) and (send := self._place(name).send) is not None:
                found.append(Launch(send))
        return found

    def _launch(
        self, kernel: Any, grid: tuple[int, ...], args: Sequence[Any], *, warps: int = 4, stages: int = 3, **meta: Any
    ) -> Launch:
        meta |= {"PDL": self.pdl, "num_warps": warps, "num_stages": stages}
        if self.pdl:
            meta["launch_pdl"] = True
        return Launch(kernel, grid, tuple(args), meta)

    def _plain(self, op: Op, port: str, layer: int) -> torch.Tensor:
        found = self.weights[layer][op.weights[port].name]
        assert isinstance(found, torch.Tensor)
        return found

    def _dense(self, op: DenseGemm, layer: int) -> list[Launch]:
        tile, n, tokens = self.tiles[op.name], op.rows, self.step.tokens
        x, w = self._tensor(op.inputs["in"], layer), self._plain(op, "weight", layer)
        direct = not op.partials_only
        place = self._place(op.outputs["out"]) if direct else None
        write = x if place is None else place.write  # a reader that adds is sent nothing: any tensor will do
        slots = 1 if place is None else len(place.write)
        if tile.cublas:
            fp32 = w.dtype is torch.float32
            made = self._buffer(f"{op.name}.made", (tokens, n), w.dtype)
            found = []
            if fp32:
                wide = self._buffer(f"{op.name}.wide", tuple(x.shape), torch.float32)
                found.append(Launch(wide.copy_, args=(x,)))
                x = wide
            found.append(Launch(lambda: torch.mm(x, w.T, out=made)))
            if direct:
                block = min(1024, 1 << (n - 1).bit_length())
                found.append(
                    self._launch(
                        kernels.spread, (tokens, -(-n // block)), (made, write), T=tokens, N=n, SLOTS=slots, BLOCK=block
                    )
                )
            else:
                self._sums[op.outputs["partials"]] = made, 1
            return found
        partials = self._buffer(f"{op.name}.partials", (MOST_SPLITS * ROWS, n), torch.float32)
        arrived = self._buffer(f"{op.name}.arrived", (n,), torch.int32)
        if not direct:
            self._sums[op.outputs["partials"]] = partials[: tile.split * ROWS], tile.split
        return [
            self._launch(
                kernels.dense,
                (n // tile.rows, tile.split),
                (x, w, write, partials, arrived),
                T=tokens,
                N=n,
                K=op.k,
                SPLIT=tile.split,
                SLOTS=slots,
                FINISH=direct,
                FP32=w.dtype is torch.float32,
                BN=tile.rows,
                BK=tile.k,
                warps=tile.warps,
                stages=tile.stages,
            )
        ]

    def _experts(self, op: ExpertGemm, layer: int) -> list[Launch]:
        tile, place = self.tiles[op.name], self._place(op.outputs["out"])
        weight = self.weights[layer][op.weights["weight"].name]
        assert isinstance(weight, Words)
        x, n = self._read(op.inputs["in"], layer), op.columns // self.graph.tp
        entries = self._entries(op)
        return [
            self._launch(
                kernels.expert_gemm,
                (n // tile.rows, min(len(entries[0]), op.weights["weight"].experts)),
                (x, weight.words, weight.scales, weight.scale_2, place.write, *entries),
                T=self.step.tokens,
                TOP_K=op.top_k,
                N=n,
                K=op.k,
                XN=x.shape[-1],
                PER_SLOT=op.per_slot,
                SWIGLU=op.swiglu,
                SLOTS=len(place.write),
                BN=tile.rows,
                BK=tile.k,
                EARLY=op.per_slot,  # between the router and the second GEMM there is the first
                ASM=self.asm,
                warps=tile.warps,
                stages=tile.stages,
            )
        ]

    def _top_k(self, op: TopK, layer: int) -> list[Launch]:
        logits, split = self._sums[op.inputs["logits"]]
        filled, tokens = 1 << (op.experts - 1).bit_length(), self.step.tokens
        arrived, entry_of = (self._buffer(f"{op.name}.{x}", (filled,), torch.int32) for x in ("arrived", "entry_of"))
        return [
            self._launch(
                kernels.top_k,
                (tokens,),
                (
                    logits, self._plain(op, "bias", layer), self._override(op), *self._routes(op), arrived,
                    entry_of, *self._entries(op), op.multiplier, op.eps, op.scale,
                ),
                T=tokens,
                E=filled,
                N=op.experts,
                TOP_K=op.k,
                SPLIT=split,
                SLOTS=max(16, 1 << (tokens * op.k - 1).bit_length()),
            )
        ]  # fmt: skip

    def _norm(self, op: RmsNorm, layer: int) -> list[Launch]:
        x = self._read(op.inputs["in"], layer)
        return [
            self._launch(
                kernels.rms_norm,
                (self.step.tokens,),
                (x, self._plain(op, "gain", layer), self._tensor(op.outputs["out"], layer), op.eps),
                T=self.step.tokens,
                W=op.width,
                XN=x.shape[-1],
                PLANES=self._planes(op.outputs["out"]),
                BLOCK=1 << (op.width - 1).bit_length(),
                warps=8,
            )
        ]

    def _residual(self, op: Residual, layer: int) -> list[Launch]:
        x, stream = self._read(op.inputs["in"], layer), self._tensor(op.inputs["stream"], layer)
        gate = self._plain(op, "gate", layer)
        gain = self._plain(op, "gain", layer) if "gain" in op.weights else gate
        ends = "normed" not in op.outputs
        out = self._tensor(op.outputs["out"], layer)
        summed = self.graph.tensors[op.inputs["in"]].reduce
        return [
            self._launch(
                kernels.residual,
                (self.step.tokens,),
                (
                    x, stream, gate, gain, gate if ends else self._plain(op, "next_gain", layer), out,
                    out if ends else self._tensor(op.outputs["normed"], layer), op.eps, op.next_eps,
                ),
                T=self.step.tokens,
                W=op.width,
                XN=x.shape[-1],
                PARTS=len(x) if summed else 1,
                GAIN="gain" in op.weights,
                NEXT=not ends,
                BLOCK=1 << (op.width - 1).bit_length(),
                warps=16,
            )
        ]  # fmt: skip

    def _combine(self, op: Combine, layer: int) -> list[Launch]:
        x = self._read(op.inputs["in"], layer)
        shares = self._shared[f"{op.inputs['routes']}.shares"]
        return [
            self._launch(
                kernels.combine,
                (self.step.tokens,),
                (x, shares, self._plain(op, "gain", layer), self._tensor(op.outputs["out"], layer), op.eps),
                T=self.step.tokens,
                W=op.width,
                XN=x.shape[-1],
                TOP_K=op.top_k,
                BLOCK=1 << (op.width - 1).bit_length(),
                warps=16,
            )
        ]

    def _attention(self, op: Attention, layer: int) -> list[Launch]:
        tile, tokens = self.tiles[op.name], self.step.tokens
        parts, rows = -(-op.chunks // tile.split), ROWS * op.heads // op.kv_heads
        q, gate, keys, values = (self._tensor(op.inputs[x], layer) for x in ("q", "gate", "keys", "values"))
        most = op.chunks * op.kv_heads * rows
        sums = self._buffer(f"{op.name}.sums", (most, op.head_dim), torch.float32)
        tops, totals = (self._buffer(f"{op.name}.{x}", (most,), torch.float32) for x in ("tops", "totals"))
        given = (self._context, self._positions, self._ancestors)
        return [
            self._launch(
                kernels.attend,
                (op.kv_heads, parts, rows // tile.rows),
                (q, keys, values, *given, sums, tops, totals, op.scale),
                T=tokens,
                H=op.heads,
                KV=op.kv_heads,
                CHUNKS=op.chunks,
                WINDOW=op.window,
                PER=tile.split,
                BM=tile.rows,
                warps=tile.warps,
                stages=tile.stages,
            ),
            self._launch(
                kernels.merge,
                (tokens, op.heads),
                (sums, tops, totals, gate, self._tensor(op.outputs["out"], layer), op.eps),
                H=op.heads,
                KV=op.kv_heads,
                PARTS=parts,
                BLOCK=max(16, 1 << (parts - 1).bit_length()),
                warps=2,
            ),
        ]

    def _heads(self, op: QkvHeads, layer: int) -> list[Launch]:
        partials, split = self._sums[op.inputs["partials"]]
        rotary = self._tensor(op.inputs["rotary"], layer) if op.rotate else partials
        together = MOST_HEADS if op.heads % MOST_HEADS == op.kv_heads % MOST_HEADS == 0 else 1
        outputs = (self._tensor(op.outputs[x], layer) for x in ("q", "gate", "keys", "values"))
        return [
            self._launch(
                kernels.heads,
                (self.step.tokens, op.rows // HEAD_DIM // together),
                (partials, rotary, self._positions, self._context, *outputs, op.eps, op.scale),
                H=op.heads,
                KV=op.kv_heads,
                CHUNKS=op.ring // CHUNK,
                SPLIT=split,
                ROTATE=op.rotate,
                BH=together,
                warps=1,
            )
        ]
