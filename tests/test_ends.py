"""The launches that begin and end a step: embedding, final norm, head, and the choice of the next token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_emulate_mutants import Mutant, mutated, one
from test_footprints import differences, unread

from megagen import machines, resources
from megagen.bench.emulation import Weights
from megagen.bench.inputs import Inputs, random_stream
from megagen.bench.verify import Verifier, same_bits
from megagen.cli import pipeline
from megagen.dsl import load
from megagen.emit import emit
from megagen.emulate import compile_library
from megagen.errors import EmulationError, ScheduleError
from megagen.ir.graph import Graph, TensorKind
from megagen.lower import lower
from megagen.models.muse_spark import MuseSparkConfig, first, last, tiny
from megagen.ops.choose import choice
from megagen.ops.compare import judge, measure
from megagen.ops.reference import evaluate
from megagen.runtime.emulated import World
from megagen.runtime.step import Step
from megagen.settings import Settings
from megagen.weights.random import LayerWeights, random_layer, world_env

FIRST, LAST = Path("muse_first.py"), Path("muse_last.py")
SHARE = 152  # of a tiny vocabulary: nine row blocks and a half, two groups and a half
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(tp: int, **more: Any) -> dict[str, Any]:
    """Options of a graph with half as many heads a rank."""
    return {"config": tiny(tp).model_copy(update={"heads": 8 * tp, "kv_heads": tp}), **more}


# -- graphs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_shapes_and_bytes(tp: int) -> None:
    g = last(tp, 5)
    share = 202048 // tp
    rows = -(-share // 16) * 16
    assert (rows - share, -(-rows // 64)) == {1: (0, 3157), 2: (0, 1579), 4: (0, 790), 8: (8, 395)}[tp]
    found = {n: (t.shape, t.dtype.value, t.kind.value, t.scope.value) for n, t in g.tensors.items()}
    assert found == {
        "stream": ((5, 8192), "fp32", "input", "rank"),
        "final_normed": ((5, 8192), "bf16", "internal", "rank"),
        "head_partials": ((8, rows // 16, 5, 16), "fp32", "internal", "rank"),
        "logits": ((5, rows), "fp32", "output", "rank"),
        "bests": ((5, {1: 12628, 2: 6316, 4: 3160, 8: 1580}[tp]), "u32", "internal", "rank"),
        "votes": ((5, 16 * tp * tp), "u32", "internal", "world"),
        "next_ids": ((5,), "u32", "output", "rank"),
    }
    head, norm = (g.weights()[n] for n in ("lm_head_weight", "final_gain"))
    assert (head.rows, head.padding, head.bytes, head.names) == (rows, rows - share, rows * 16384, ("lm_head.weight",))
    assert head.top and norm.top and norm.names == ("model.language_model.norm.weight",)


@pytest.mark.parametrize("following", ["sliding", "global"])
def test_the_first_launch_makes_what_a_layer_reads(following: str) -> None:
    g = first(8, 3, following=following)
    kinds = {n: t.kind for n, t in g.tensors.items() if t.kind is not TensorKind.INTERNAL}
    outs = dict.fromkeys(("stream_out", "next_q", "next_gate"), TensorKind.OUTPUT)
    caches = dict.fromkeys(("next_k_cache", "next_v_cache"), TensorKind.STATE)
    given = dict.fromkeys(("ids", "rotary") if following == "sliding" else ("ids",), TensorKind.INPUT)
    assert kinds == {**given, **outs, **caches}
    table = g.weights()["embed_table"]
    assert (table.rows, table.k, table.top, table.bytes) == (202048, 8192, True, 202048 * 8192 * 2)
    assert {w.name for w in g.weights().values() if w.next_layer} == {"next_gain", "next_qkvg_weight"}


@pytest.mark.parametrize(
    ("changes", "args", "message"),
    [
        ({"vocab": 1001}, {}, "vocab=1001 cannot be dealt to 8"),
        ({"vocab": 0}, {}, "vocab=0 cannot be dealt"),
        ({"vocab": 1 << 21}, {}, "at most 1,048,576"),
        ({"softcap": 0.0}, {}, "softcap=0.0"),
        ({}, {"following": "end"}, "following='end'"),
        ({}, {"following": "nothing"}, "following='nothing'"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], args: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        first(8, **args, config=MuseSparkConfig(**changes))
    assert caught.value.loc is not None and caught.value.loc.file == __file__


@pytest.mark.parametrize("schedule", [FIRST, LAST], ids=str)
def test_the_checker_proves_them(schedule: Path) -> None:
    for tp, tokens, choices, fused in (
        (8, 16, {}, True), (1, 1, {"ring_stages": "4", "in_flight": "32"}, True), (4, 7, {"sync": "counter"}, True),
        (2, 16, {"early_trigger": "True"}, True), (8, 16, {}, False),
    ):  # fmt: skip
        request = pipeline.Request(schedule, tp=tp, tokens=tokens, choices=choices, fused=fused)
        warned = [f.message for f in pipeline.check(request).findings if f.level != "proved"]
        assert all("fence" in message for message in warned) and bool(warned) == ("sync" in choices)


# -- transformers --------------------------------------------------------------------------------------------------


def head_of_transformers(
    config: MuseSparkConfig, env: Any, dtype: torch.dtype, stream: torch.Tensor
) -> dict[str, torch.Tensor]:
    """transformers' final norm, head and softcap, whose lines are those of the whole model's forward."""
    from small_models import small_model
    from transformers.models.muse_spark.modeling_muse_spark import MuseSparkRMSNorm

    model = small_model(config.model_copy(update={"moe_hidden": 64, "intermediate": 64, "experts": 8, "layers": 1}))
    norm = MuseSparkRMSNorm(config.hidden, eps=config.rms_norm_eps).to(dtype).requires_grad_(False)
    norm.weight.copy_(env["final_gain"])
    normed = norm(stream.to(dtype))
    made = {"last_hidden_state": normed[None]}
    others = ("cache", "hidden_states", "attentions", "image_outputs", "router_logits")
    model.model.forward = lambda **_: SimpleNamespace(**made, **dict.fromkeys(others))
    model.lm_head.weight = torch.nn.Parameter(env["lm_head_weight"].to(dtype), requires_grad=False)
    return {"final_normed": normed, "logits": model(input_ids=torch.zeros(1, 1, dtype=torch.long)).logits[0]}


def start_of_transformers(
    config: MuseSparkConfig, env: Any, dtype: torch.dtype, ids: torch.Tensor
) -> dict[str, torch.Tensor]:
    """transformers' embedding and the first layer's input norm."""
    from transformers.models.muse_spark import modeling_muse_spark as modeling

    embedding = modeling.MuseSparkTextNormedEmbedding(config.vocab, config.hidden, 0, config.rms_norm_eps)
    norm = modeling.MuseSparkTextCenteredRMSNorm(config.hidden, eps=config.rms_norm_eps)
    for module, weight in ((embedding, "embed_table"), (norm, "next_gain")):
        module.to(dtype).requires_grad_(False).weight.copy_(env[weight])
    stream = embedding(ids.long())
    return {"stream_out": stream, "next_normed": norm(stream)}


@pytest.mark.parametrize("schedule", [FIRST, LAST], ids=str)
def test_transformers(emulate: Any, schedule: Path) -> None:
    """The reference is transformers' model in both precisions, and the kernel is as near to it as it must be."""
    pytest.importorskip("transformers.models.muse_spark")
    kernel = emulate(schedule, ranks=2, seed=7, options=small(2))
    verifier = kernel.verifier
    graph, env = verifier.graph, dict(verifier.env)
    inputs = verifier.inputs(16, 3)
    transformers = start_of_transformers if schedule is FIRST else head_of_transformers
    want, twin = (
        transformers(graph.attributes["config"], env, dtype, inputs.stream) for dtype in (torch.float32, torch.bfloat16)
    )
    exact, rounded = (evaluate(graph, {**env, **inputs.env}, dtype) for dtype in (torch.float32, torch.bfloat16))
    made = verifier.launch(inputs)
    made["logits"] = made["logits"][:, :SHARE] if schedule is LAST else None
    for name in want:
        assert measure(exact[name], want[name]).worst_row < 1e-5, name
        # Where a root of another kind leads to another rounding it shows in the last bit.
        assert rounded[name].dtype is torch.bfloat16 and measure(rounded[name], twin[name]).worst_row < 1e-3, name
        n = made[name].shape[1]  # this rank's share
        verdict = judge(made[name].float(), want[name][:, :n], twin[name][:, :n].float())
        assert verdict, f"{name}: {verdict}"


# -- emulated ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "tp", "tokens", "choices", "seeds", "launches"),
    [
        (1, 1, 1, {}, (1, 2), 2), (2, 2, 16, {}, (1, 2, 3), 4), (1, 8, 7, {}, (4, 5), 2), (8, 8, 1, {}, (6,), 2),
        (2, 2, 7, {"sync": "counter", "early_trigger": "True"}, (7, 8), 2), (1, 2, 16, {"sync": "flag"}, (9,), 2),
    ],
)  # fmt: skip
def test_last(
    emulate: Any, ranks: int, tp: int, tokens: int, choices: dict[str, str], seeds: tuple[int, ...], launches: int
) -> None:
    """Launched four times, every copy of the votes is used, and one again."""
    for seed in seeds:
        kernel = emulate(LAST, ranks=ranks, tp=tp, seed=seed, race=True, choices=choices, options=small(tp))
        names = {c.name for c in kernel.check(tokens, seeds=[seed], launches=launches) if not c.skipped}
        assert names >= {"next ids", "logits", "final_normed", "empty slots"}


@pytest.mark.parametrize(
    ("ranks", "tp", "tokens", "options", "choices"),
    [
        (1, 1, 1, {}, {}), (2, 2, 16, {}, {"sync": "counter", "early_trigger": "True"}),
        (1, 2, 7, {}, {"sync": "flag"}), (2, 8, 7, {"following": "global"}, {}),
    ],
)  # fmt: skip
def test_first(
    emulate: Any, ranks: int, tp: int, tokens: int, options: dict[str, Any], choices: dict[str, str]
) -> None:
    options = small(tp, positions=512, **options)
    kernel = emulate(FIRST, ranks=ranks, tp=tp, seed=tokens, race=True, choices=choices, options=options)
    found = {c.name for c in kernel.check(tokens, context=300, tree=True, launches=3) if not c.skipped}
    assert found >= {"stream_out", "next_normed", "next_q", "next_gate", "next_k_cache", "next_v_cache"}


@pytest.mark.parametrize("schedule", [FIRST, LAST], ids=str)
def test_a_kernel_an_op(emulate: Any, schedule: Path) -> None:
    kernel = emulate(schedule, ranks=2, seed=1, race=True, fused=False, options=small(2))
    kernel.check(9, launches=2)


@pytest.mark.parametrize("schedule", [FIRST, LAST], ids=str)
def test_bits_depend_on_no_number_of_blocks(emulate: Any, schedule: Path) -> None:
    usual = emulate(schedule, ranks=1, seed=2, options=small(1))
    verifier = usual.verifier
    inputs = verifier.inputs(11, 5)
    want = verifier.launch(inputs)
    machine = machines.cut(machines.load(pipeline.MACHINE), 3)
    made = load(schedule, machine=machine, tp=1, options=small(1))
    plan = lower(made)
    assert (plan.launch.blocks, usual.plan.launch.blocks) == (3, 4)
    library = compile_library(emit(plan), kernels=[k.name for k in plan.kernels], settings=Settings.from_env())
    with World(plan, library, seed=3) as world:
        weights = Weights.random(made.graph, 1)
        got = Verifier(world, made.graph, weights.packed, weights.env).launch(inputs)
        assert want.keys() == got.keys() >= ({"logits", "next_ids"} if schedule is LAST else {"stream_out", "next_q"})
        assert all(same_bits(want[name], got[name]) for name in want)


def test_ids_outside_the_vocabulary_take_its_last_row(emulate: Any) -> None:
    kernel = emulate(FIRST, ranks=1, seed=5, race=True, options=small(1))
    verifier = kernel.verifier
    ids = random_stream(4, verifier.graph, 0, CPU)
    assert ids.dtype is torch.int32 and ids.max() < SHARE
    ids[:] = torch.tensor([7, SHARE - 1, 7, SHARE - 1])
    want = verifier.launch(ids)
    ids[:] = torch.tensor([7, SHARE, 7, -1])  # u32: the largest
    got = verifier.launch(ids)
    assert want["stream_out"].isfinite().all() and not want["stream_out"][0].equal(want["stream_out"][1])
    assert all(same_bits(want[name], got[name]) for name in want)


@pytest.mark.parametrize("schedule", [FIRST, LAST], ids=str)
def test_steps_touch_what_the_model_says(emulate: Any, schedule: Path) -> None:
    for sync in ("lamport", "flag"):
        kernel = emulate(schedule, ranks=1, tp=2, footprints=True, options=small(2), choices={"sync": sync})
        kernel.verifier.launch(kernel.verifier.inputs(2, 0), launches=3)
        found = kernel.world.engine.footprints()
        assert not differences(kernel.plan, found, 3 * kernel.plan.launch.blocks)
        assert not unread(kernel.plan, found)


# -- the choice ----------------------------------------------------------------------------------------------------

LOW = -9.0
BLOCK = 128  # of the hidden width: one for each token


def table(ranks: int) -> torch.Tensor:
    """[16 tokens, ids of ``ranks`` ranks]: what the head makes of each token, up to a factor."""
    return torch.full((16, ranks * SHARE), LOW)


def with_scores(graph: Graph, scores: torch.Tensor, ranks: int) -> tuple[Inputs, list[LayerWeights]]:
    """Input and weights by which token t's logits follow from row t of ``scores`` [tokens, ids of the live ranks]: its
    stream is only not zero in a block of its own, where the head's rows are what the table says."""
    weights = [random_layer(graph, 0, rank=rank) for rank in range(ranks)]
    stream = torch.zeros(16, 2048)
    for rank, w in enumerate(weights):
        w.values["final_gain"] = torch.ones(2048, dtype=torch.bfloat16)
        head = w.values["lm_head_weight"]
        assert isinstance(head, torch.Tensor)
        head.zero_()
        own = scores[:, rank * SHARE : (rank + 1) * SHARE]
        head[:SHARE] = own.T.repeat_interleave(BLOCK, dim=1).bfloat16()
    for t in range(16):
        stream[t, t * BLOCK : (t + 1) * BLOCK] = 1
    ranks_inputs = tuple({"stream": stream} for _ in range(ranks))
    return Inputs(Step.chain(16), stream, ranks_inputs, {"stream": stream}), weights


POISONED = (0, 1)  # of tokens 11 and 12: there is nothing else, and the lowest that is a number
FACTOR = 4 * BLOCK  # 4: what the norm makes of a row of which a sixteenth is 1


def cases() -> tuple[torch.Tensor, list[int]]:
    """A table for two ranks, and who is to be chosen."""
    scores, other = table(2), SHARE
    want = [0] * 16
    scores[0] = 0.5  # all alike
    scores[1, [5, 6, 7]] = torch.tensor([0.25, 0.5, 0.5])  # of a lane
    want[1] = 6
    scores[2, [33, 17]] = 0.5  # of two row blocks
    want[2] = 17
    scores[3, [140, 70]] = 0.5  # of two groups
    want[3] = 70
    scores[4, [other + 3, 151]] = 0.5  # of two ranks
    want[4] = 151
    scores[5, other] = 0.5
    want[5] = other
    scores[6] = torch.linspace(-2, -1, 2 * SHARE)  # all less than the padding's zero
    scores[6, SHARE - 1] = -0.5
    want[6] = SHARE - 1
    scores[7] = -1.0
    scores[7, 2 * SHARE - 1] = -0.5
    want[7] = 2 * SHARE - 1
    scores[8, [9, 8]] = torch.tensor([2000.0, 1000.0])  # both are 20
    want[8] = 8
    scores[9, [64, 63]] = torch.tensor([0.03125, 0.0314941])  # 2^-5, and the next number of bf16
    want[9] = 63
    scores[10, [other + 127, other + 128]] = 0.0
    want[10] = other + 127
    return scores, want


def launched(world: World, graph: Graph, poison: bool = False) -> list[dict[str, torch.Tensor]]:
    """What both ranks made of :func:`cases`; ``poison``: all of token 11 is NaN, and three logits of token 12 are."""
    scores, _ = cases()
    inputs, weights = with_scores(graph, scores, 2)
    if poison:
        inputs.stream[11, 300] = math.nan
        head: Any = weights[0].values["lm_head_weight"]
        head[[0, 70, 151], 12 * BLOCK : 12 * BLOCK + 64] = 3e38  # infinity, less infinity
        head[[0, 70, 151], 12 * BLOCK + 64 : 13 * BLOCK] = -3e38
    verifier = Verifier(world, graph, [w.packed() for w in weights], world_env(weights))
    made = verifier.launch(inputs, launches=2)
    assert not [x for rank in world.ranks for x in rank.leftovers()]
    return [made, verifier.values(16, world.ranks[1])]


def test_the_largest_logit_and_the_lowest_id(emulate: Any) -> None:
    kernel = emulate(LAST, ranks=2, seed=11, race=True)
    made = launched(kernel.world, kernel.verifier.graph)
    scores, want = cases()
    want[11:] = [0] * 5  # rows that are alike throughout
    assert all(m["next_ids"].tolist() == want for m in made)
    logits = torch.cat([m["logits"][:, :SHARE] for m in made], dim=1).double()
    c = MuseSparkConfig()
    x = scores.bfloat16().double() * FACTOR * c.output_multiplier
    torch.testing.assert_close(logits, 20 * torch.tanh(x / 20), rtol=2e-6, atol=1e-7)
    assert all((m["logits"][:, SHARE:] == -math.inf).all() for m in made)
    assert choice(logits).tolist() == want


def test_what_is_no_number_is_not_chosen(emulate: Any) -> None:
    kernel = emulate(LAST, ranks=2, seed=12, race=True)
    for made in launched(kernel.world, kernel.verifier.graph, poison=True):
        assert made["next_ids"][:13].tolist() == [*cases()[1][:11], *POISONED]
        assert ((made["next_ids"] >= 0) & (made["next_ids"] < 2 * SHARE)).all()
        assert made["logits"][11, :SHARE].isnan().all() and (made["logits"][:, SHARE:] == -math.inf).all()


@pytest.mark.parametrize("ranks", [1, 2])
def test_stand_ins_are_others(emulate: Any, ranks: int) -> None:
    """Eight ranks: those that are stood in for vote as the live one, and the first of them wins a tie."""
    kernel = emulate(LAST, ranks=ranks, tp=8, seed=13, race=True, options=small(8))
    graph, world = kernel.verifier.graph, kernel.world
    scores = table(ranks)
    scores[0, 40] = 0.5
    scores[1, -1] = 0.5
    inputs, weights = with_scores(graph, scores, ranks)
    made = Verifier(world, graph, [w.packed() for w in weights], world_env(weights)).launch(inputs)
    assert made["next_ids"][:2].tolist() == [40, (ranks - 1) * 4 * SHARE + SHARE - 1]


def test_choice() -> None:
    """The reference's, of which the graph's and the judgement of a kernel's ids are made."""
    nan, inf = math.nan, math.inf
    rows = [[1.0, 3.0, 3.0], [nan, nan, nan], [nan, -inf, -1.0], [-inf, -inf, nan], [0.0, nan, 7.0], [-0.0, 0.0, -1.0]]
    assert choice(torch.tensor(rows)).tolist() == [1, 0, 2, 0, 2, 0]


# -- faults put in by hand -----------------------------------------------------------------------------------------

CHOOSE, ROW, EMBED = "ops/choose.cuh", "mem/row.cuh", "ops/embed.cuh"

MUTANTS = (
    Mutant("ties: the highest row", one(CHOOSE, "other_row < row", "other_row > row"), wrong="ids"),
    Mutant(
        "ties: the last rank's ids are the lowest",
        one(CHOOSE, "vector(i) * 4 / kVote * kReal", "(Op::kParts - 1 - vector(i) * 4 / kVote) * kReal"),
        wrong="ids",
    ),
    Mutant("NaN is the largest", one(ROW, "x != x ? 1 : key", "x != x ? 0xfffffffeu : key"), wrong="ids"),
    Mutant("padding is chosen", one(CHOOSE, "if (real) best.meet", "best.meet"), wrong="ids"),
    Mutant("the cap is not there", one(CHOOSE, "Op::kCap * tanhf(x * Op::kMultiplier)", "x"), wrong="ids"),
    Mutant(
        "votes: nobody waits for most of it",
        one(CHOOSE, "ctx.lane < kAll,", "ctx.lane < kAll && ctx.lane % 8 == 0,"),
        "race",
        says="channel 'votes'",
    ),
    Mutant(
        "bests: not handed back",
        one(CHOOSE, "Op::Bests::template release_where<kBatch>(ctx, wanted, index);", ""),
        "deadlock race",
        wrong="bests",
    ),
    Mutant(
        "bests: the last group has none",
        one(CHOOSE, "if (ctx.lane % 16 == 0 && token", "if (ctx.lane % 16 == 0 && group + 1 < kGroups && token"),
        "deadlock",
        says="choose.pick waits for channel 'bests'",
    ),
)


def library_of(mutant: Mutant, checked: pipeline.Checked) -> Path:
    texts = mutated(mutant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resources, "headers", lambda: dict(texts))
        return pipeline.emulated(checked, Settings.from_env())


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_faults_are_found(mutant: Mutant) -> None:
    checked = pipeline.check(pipeline.Request(LAST, tp=2, tiny=True))
    with World(checked.plan, library_of(mutant, checked), live=2, seed=1, race=True) as world:
        try:
            made = launched(world, checked.graph, poison=True)
        except EmulationError as error:
            assert error.report.kind in mutant.kinds.split() and mutant.says in error.render(), error.render()
        except AssertionError as error:
            assert mutant.wrong and mutant.wrong in str(error)
        else:
            assert mutant.wrong == "ids"
            assert made[0]["next_ids"][:13].tolist() != [*cases()[1][:11], *POISONED]


@pytest.mark.slow
def test_what_nobody_reads_is_noticed() -> None:
    """A part of a vote is as good as all of it, so every result stays as it was."""
    votes = next(m for m in MUTANTS if "nobody waits" in m.name)
    checked = pipeline.check(pipeline.Request(LAST, tp=2, tiny=True))
    weights = Weights.random(checked.graph, 2)
    with World(checked.plan, library_of(votes, checked), live=2, footprints=True) as world:
        verifier = Verifier(world, checked.graph, weights.packed, weights.env)
        verifier.launch(verifier.inputs(1, 0), launches=2)
        found = world.engine.footprints()
    # 2 launches, 2 ranks: of the 64 words of a token's votes lanes 0 and 8 wait for 8
    assert unread(checked.plan, found) == {"votes": [("choose.pick", 2 * 2 * (64 - 8))]}


@pytest.mark.slow
def test_an_id_outside_would_be_noticed() -> None:
    clamp = "id < Op::kVocab ? id : Op::kVocab - 1"
    mutant = Mutant("no clamp", one(EMBED, clamp, "id"))
    checked = pipeline.check(pipeline.Request(FIRST, tp=1, tiny=True, options=small(1)))
    weights = Weights.random(checked.graph, 1)
    with World(checked.plan, library_of(mutant, checked), seed=1) as world:
        verifier = Verifier(world, checked.graph, weights.packed, weights.env)
        with pytest.raises(EmulationError) as error:
            verifier.launch(torch.tensor([SHARE], dtype=torch.int32))
    assert error.value.report.kind == "out_of_bounds"
