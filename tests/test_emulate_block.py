"""The expert block on emulated ranks: right by transformers' own modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def bits(world: Any, verifier: Any, tokens: int, seed: int = 0) -> dict[str, Any]:
    """What one launch on the seed's input leaves on the first rank, as integers."""
    import torch

    from megagen.bench.verify import random_stream

    rows = random_stream(tokens, verifier.graph, seed, torch.device("cpu"))
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return {name: x.view(views[x.element_size()]) for name, x in verifier.launch(rows).items()}


@pytest.mark.parametrize(
    ("fused", "tokens", "ranks"),
    [(True, 1, 2), (True, 16, 2), (True, 1, 8), (True, 16, 8), (False, 1, 2), (False, 16, 2), (False, 1, 8)],
)
def test_every_op_is_right_on_every_rank(emulate: Any, ranks: int, tokens: int, fused: bool) -> None:
    kernel = emulate("muse_moe.py", ranks=ranks, seed=ranks + tokens, fused=fused, race=True)
    kernel.check(tokens=tokens, launches=2 if ranks == 2 else 1)


@pytest.mark.parametrize("options", [{"split": "nk"}, {"experts": "bf16"}], ids=str)
def test_what_changes_the_arithmetic(emulate: Any, options: dict[str, str]) -> None:
    kernel = emulate("muse_moe.py", ranks=2, seed=5, options=options, race=True)
    kernel.check(tokens=9, launches=2)


@pytest.mark.slow
def test_rows_of_more_pieces_than_lanes(emulate: Any) -> None:
    """Of 256 columns, which norms are spread over: a lane adds up those of several."""
    from megagen.models.muse_spark import tiny

    config = tiny(1).model_copy(update={"hidden": 10240, "moe_hidden": 8192})
    emulate("muse_moe.py", ranks=1, seed=3, race=True, options={"config": config}).check(tokens=1)


def test_live_ranks_stand_in_for_others(emulate: Any) -> None:
    kernel = emulate("muse_moe.py", ranks=2, tp=8, seed=6, race=True)
    kernel.check(tokens=16, launches=2)


def test_six_launches_use_every_copy_twice(emulate: Any) -> None:
    """Copies of two and of three, with the next launch begun before the last has ended (PDL)."""
    kernel = emulate("muse_moe.py", ranks=2, seed=1, race=True)
    kernel.check(tokens=3, launches=6)
    assert [rank.epoch() for rank in kernel.world.ranks] == [6, 6]


def test_a_tokens_bits_do_not_depend_on_its_company(emulate: Any) -> None:
    import torch

    kernel = emulate("muse_moe.py", ranks=1, seed=1)
    many = bits(kernel.world, kernel.verifier, 16)["stream_out"]
    from megagen.bench.verify import random_stream

    rows = random_stream(16, kernel.verifier.graph, 0, torch.device("cpu"))
    alone = kernel.verifier.launch(rows[11:12].clone())["stream_out"].view(torch.int32)
    assert torch.equal(alone[0], many[11])


@pytest.mark.parametrize("ranks", [2])
def test_a_checkpoint_of_transformers_gives_the_same_block(tmp_path: Path, ranks: int) -> None:
    """Each rank loads its shard of what transformers wrote; the result against its own modules, in fp32 and bf16."""
    import torch

    from megagen.bench.emulation import Emulation, Weights
    from megagen.bench.verify import random_stream
    from megagen.cli import pipeline
    from megagen.models.muse_spark import tiny
    from megagen.ops.compare import judge
    from megagen.ops.reference import evaluate
    from megagen.settings import Settings

    pytest.importorskip("transformers.models.muse_spark")
    from small_models import block_in, draw, small_model

    torch.manual_seed(0)
    model = small_model(tiny(ranks).model_copy(update={"layers": 2}))
    draw(model)
    model.save_pretrained(tmp_path)
    request = pipeline.Request(Path("muse_moe.py"), tp=ranks, tiny=True, checkpoint=tmp_path)
    checked = pipeline.check(request)
    library = pipeline.emulated(checked, Settings.from_env())
    emulation = Emulation(checked.plan, checked.graph, library, Weights.load(tmp_path, 1, checked.graph, ranks))
    with emulation.world(seed=4, race=True) as world:
        verifier = emulation.verifier(world)
        rows = random_stream(16, checked.graph, 0, torch.device("cpu"))
        found = verifier.launch(rows)
        layer = model.model.language_model.layers[1]
        model16, reference = block_in(layer, torch.bfloat16, rows), block_in(layer, torch.float32, rows)
        # where a score's rounding changes an expert, the block computes something else: those tokens say nothing here
        env = {**emulation.weights.env, verifier.input_name: rows}
        ids = [evaluate(checked.graph, env, d)["routes.ids"].sort(1).values for d in (torch.float32, torch.bfloat16)]
        ids.append(found["routes"][:, :8].long().sort(1).values)
        same = (ids[0] == ids[1]).all(1) & (ids[0] == ids[2]).all(1)
        assert same.sum() >= 10
        verdict = judge([found["stream_out"][same]], [reference[same]], [model16[same]])
        assert verdict, str(verdict)
