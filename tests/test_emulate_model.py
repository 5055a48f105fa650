"""Four layers of a small checkpoint in a row on two emulated ranks, launch after launch, against transformers' own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from megagen.bench.inputs import get, put
from megagen.ops.qkv_heads import rotary
from megagen.cli import pipeline
from megagen.models.muse_spark import tiny
from megagen.ops.compare import judge
from megagen.runtime.emulated import World
from megagen.runtime.step import Step
from megagen.settings import Settings
from megagen.weights.checkpoint import load_layer

TP, LAYERS, WINDOW = 2, 4, 16
CONFIG = tiny(TP).model_copy(
    update={"layers": LAYERS + 1, "heads": 8 * TP, "kv_heads": TP, "window": WINDOW}
)  # the last layer's projections end the fourth launch
STEPS = (Step.chain(12), Step.chain(8, 12), Step.tree([-1, 0, 0, 2, 1], 20))  # the second passes the window
TOKENS = sum(step.tokens for step in STEPS)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small_checkpoint(folder: Path) -> Any:
    """The text model's layers, also written to ``folder``.

    A layer's tokens all have the same eight experts, which its biases see to: where another rounding picked another
    expert, every token that looks at that one would be different from there on.
    """
    from small_models import draw, small_model

    torch.manual_seed(0)
    model = small_model(CONFIG, sliding=True)
    draw(model)
    for layer in model.model.language_model.layers:
        chosen = torch.randperm(CONFIG.experts)[: CONFIG.top_k]
        layer.mlp.gate.e_score_correction_bias.zero_()[chosen] = 2.0
    model.save_pretrained(folder)
    return model.model.language_model.layers


def passes(layers: Any, dtype: torch.dtype, rows: torch.Tensor) -> list[Any]:
    """What each layer makes of all tokens at once."""
    from small_models import layer_in

    number, last = torch.arange(TOKENS), STEPS[-1]
    positions = torch.cat([torch.tensor(step.positions) for step in STEPS])
    visible = (number <= number[:, None]) & (number + WINDOW > positions[:, None])
    visible[last.context :, last.context :] = last.visible()
    made: list[Any] = []
    for layer in layers:
        made.append(layer_in(layer, dtype, made[-1].stream if made else rows, positions, visible))
    return made


@dataclass
class Rank:
    """A rank's layers in a row, each with a cache of its own; what they read and write by name, then by layer."""

    rank: Any
    packed: list[dict[str, torch.Tensor]]
    buffers: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    layers: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        table = rotary(16384, CONFIG.head_dim, CONFIG.rope_theta)
        for name in ("stream", "q", "gate", "k_cache", "v_cache"):
            self.buffers[name] = [self.rank.allocate(name) for _ in range(LAYERS + 1)]
            for x in self.buffers[name]:
                self.write(x, torch.full_like(x, torch.nan))
        for i, weights in enumerate(self.packed):
            given = {name: x[i] for name, x in self.buffers.items()}
            made = {"stream_out" if n == "stream" else f"next_{n}": x[i + 1] for n, x in self.buffers.items()}
            self.layers.append(self.rank.bind({**weights, **given, **made, "rotary": table}))

    def write(self, place: torch.Tensor, value: torch.Tensor) -> None:
        with self.rank.writing(place):
            place[: len(value)] = value

    def give(self, step: Step, rows: torch.Tensor, first: Any) -> None:
        """A launch's tokens: the stream, and what transformers' first layer makes for its attention."""
        own = slice(step.context, step.context + step.tokens)
        r = self.rank.rank
        self.rank.set_step(step)
        self.write(self.buffers["stream"][0], rows[own])
        for name in ("q", "gate"):
            self.write(self.buffers[name][0], getattr(first, name)[own].chunk(TP, dim=1)[r])
        for name, new in (("k_cache", first.k), ("v_cache", first.v)):
            cache = self.buffers[name][0].clone()
            put(cache, step.numbers, new[own].chunk(TP, dim=1)[r])
            self.write(self.buffers[name][0], cache)

    def made(self, step: Step) -> dict[str, torch.Tensor]:
        """What the fourth layer left of a launch's tokens."""
        last = {name: x[-1] for name, x in self.buffers.items()}
        rows = {name: last[name][: step.tokens].clone() for name in ("stream", "q", "gate")}
        return rows | {name: get(last[f"{name}_cache"], step.numbers) for name in ("k", "v")}


def test_layers_and_launches_in_a_row_are_transformers(tmp_path: Path) -> None:
    """A chain, a chain that passes the window, and a tree: the caches of all but the first layer are our own work."""
    pytest.importorskip("transformers.models.muse_spark")
    layers = small_checkpoint(tmp_path)
    checked = pipeline.check(pipeline.Request(Path("muse_swa.py"), tp=TP, tiny=True, checkpoint=tmp_path))
    library = pipeline.emulated(checked, Settings.from_env())
    rows = torch.randn(TOKENS, CONFIG.hidden).bfloat16().float()
    reference, model = (passes(layers, dtype, rows) for dtype in (torch.float32, torch.bfloat16))
    experts = [x.ids.sort(1).values for x in reference]
    assert all(ids.equal(x.ids.sort(1).values) for ids, x in zip(experts, model, strict=True))

    ours: dict[str, list[torch.Tensor]] = {}
    with World(checked.plan, library, seed=1, race=True, layers=2 * LAYERS) as world:
        ranks = [
            Rank(rank, [load_layer(tmp_path, i, checked.graph, rank.rank) for i in range(LAYERS)])
            for rank in world.ranks
        ]
        for step in STEPS:
            for rank in ranks:
                rank.give(step, rows, model[0])
            for i in range(LAYERS):
                world.launch([rank.layers[i] for rank in ranks])
            world.synchronize()
            assert not [x for rank in world.ranks for x in rank.leftovers()]
            found = [rank.made(step) for rank in ranks]
            assert found[0]["stream"].equal(found[1]["stream"])
            ids = world.ranks[0].read("routes")[: step.tokens, : CONFIG.top_k].long().sort(1).values
            assert ids.equal(experts[LAYERS - 1][list(step.numbers)])
            for name in found[0]:
                shards = [x[name] for x in found]
                ours.setdefault(name, []).append(shards[0] if name == "stream" else torch.cat(shards, dim=1))

    for name, value in ours.items():
        # the stream after the fourth layer, and the fifth one's own of the rest
        want, twin = (
            x[LAYERS - 1].stream if name == "stream" else getattr(x[LAYERS], name).flatten(1)
            for x in (reference, model)
        )  # fmt: skip
        verdict = judge([torch.cat(value)], [want], [twin])
        assert verdict, f"{name}: {verdict}"
