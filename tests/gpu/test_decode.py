"""A small checkpoint of transformers decoded on one GPU and on two, a process each; what becomes of a lost rank."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
HERE = Path(__file__).resolve().parent
PROMPTS = (1, 15, 16, 17, 100, 3000)
EMIT = 256
POSITIONS = 4096


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers of both kinds; hidden, expert and head widths all different; bf16 experts at both ends."""
    from whole_models import write

    from megagen.models.muse_spark import MuseSparkConfig

    folder = tmp_path_factory.mktemp("checkpoint")
    config = MuseSparkConfig(
        hidden=4096, moe_hidden=2048, intermediate=1024, experts=32, layers=8, heads=32, kv_heads=4, window=512,
        vocab=4008,
    )  # fmt: skip
    write(config, folder, device="cuda")
    return folder


@pytest.fixture(scope="module")
def references(checkpoint: Path) -> tuple[Any, Any]:
    """transformers in fp32 and in bf16."""
    import torch
    from whole_models import Reference

    return tuple(Reference.load(checkpoint, dtype, "cuda") for dtype in (torch.float32, torch.bfloat16))  # type: ignore[return-value]


def promised(runs: list[Any], references: tuple[Any, Any]) -> None:
    from whole_decode import asked, judge

    found = judge(runs, *(asked(model, runs) for model in references))
    sys.stderr.write(f"\n{found}\n")
    assert found.far < found.tokens / 1000, found
    assert found.ours <= 1.5 * found.theirs and found.ours_most <= 2 * found.theirs_most, found


def test_one_rank_emits_what_transformers_would(checkpoint: Path, references: tuple[Any, Any]) -> None:
    from whole_decode import greedy, prompt

    from megagen.runtime import decoder

    with decoder.open(checkpoint, tp=1, live=1, positions=POSITIONS) as found:
        runs = [greedy(found, prompt(n, found.vocab), EMIT) for n in PROMPTS]
        again = greedy(found, prompt(17, found.vocab), EMIT)
    assert again.ids == runs[3].ids and again.logits.equal(runs[3].logits)
    promised(runs, references)


def test_one_engine_after_another(checkpoint: Path) -> None:
    """The first leaves the GPU as it was, though nobody forgot it."""
    import torch
    from whole_decode import prompt

    from megagen.serve.engine import Engine

    kept, answers, free = [], [], []
    for _ in range(3):
        with Engine.from_pretrained(checkpoint, max_positions=POSITIONS) as engine:
            run = engine.generate(prompt(17, engine.vocab), max_new_tokens=20, stop=())
            answers.append([t.id for t in run])
        kept.append(engine)
        free.append(torch.cuda.mem_get_info()[0])
    assert answers[0] == answers[1] == answers[2]
    assert max(free) - min(free) < 64 << 20, free


# -- two ranks -----------------------------------------------------------------------------------------------------


@pytest.fixture
def two_gpus() -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU: two ranks need two")


def two_ranks(*arguments: str, late_s: float = 0.0) -> list[subprocess.Popen[bytes]]:
    """Of a decode, as torchrun starts them; the second one loads for so much longer."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
    return [
        subprocess.Popen(
            [sys.executable, str(HERE / "rank_of_two.py"), *arguments],
            env=os.environ | place | {"RANK": str(r), "LOCAL_RANK": str(r), "LATE_S": str(r * late_s)},
        )
        for r in range(2)
    ]


def test_two_ranks_emit_what_transformers_would(
    checkpoint: Path, references: tuple[Any, Any], two_gpus: None, tmp_path: Path
) -> None:
    """And see the same to the last bit, each on its own."""
    import torch
    from whole_decode import Run

    ranks = two_ranks(str(checkpoint), ",".join(map(str, PROMPTS)), str(EMIT), str(tmp_path / "out"))
    assert [p.wait(240) for p in ranks] == [0, 0]
    found = [torch.load(tmp_path / f"out.{r}", weights_only=True) for r in range(2)]
    runs = [[Run(*run) for run in one["runs"]] for one in found]
    for mine, other in zip(*runs, strict=True):
        assert mine.ids == other.ids and mine.logits.equal(other.logits)
    assert all(a.equal(b) for a, b in zip(found[0]["streams"], found[1]["streams"], strict=True))
    promised(runs[0], references)


def test_a_rank_that_loads_for_longer_is_waited_for(checkpoint: Path, two_gpus: None, tmp_path: Path) -> None:
    """Longer than the device's waits are bounded."""
    ranks = two_ranks(str(checkpoint), "5", "4", str(tmp_path / "out"), late_s=6.0)
    assert [p.wait(120) for p in ranks] == [0, 0]


def used() -> list[int]:
    """MB of each GPU."""
    said = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True
    )
    return [int(x) for x in said.stdout.split()]


@pytest.fixture
def engine(checkpoint: Path, two_gpus: None) -> Iterator[Any]:
    from megagen.serve.engine import Engine

    with Engine.from_pretrained(checkpoint, tp=2, max_positions=POSITIONS) as made:
        yield made


def test_a_pause_of_a_second_is_survived(engine: Any) -> None:
    from whole_decode import prompt

    ids = prompt(100, engine.vocab)
    plain = [t.id for t in engine.generate(ids, max_new_tokens=400, stop=())]
    paused = []
    for token in engine.generate(ids, max_new_tokens=400, stop=()):
        paused.append(token.id)
        if len(paused) == 50:
            pid = engine._source.pids[1]
            os.kill(pid, signal.SIGSTOP)
            time.sleep(1.0)
            os.kill(pid, signal.SIGCONT)
    assert paused == plain


def test_ranks_draw_the_same(engine: Any) -> None:
    from whole_decode import prompt

    from megagen.serve.sampling import Sampling

    ids = prompt(20, engine.vocab)
    one, same, other = (
        [t.id for t in engine.generate(ids, max_new_tokens=40, stop=(), sampling=Sampling(1.0, 50, 0.9, seed))]
        for seed in (1, 1, 2)
    )
    assert one == same != other


KILLS = int(os.environ.get("KILLS", "3"))


@pytest.mark.parametrize("moment", range(KILLS))
def test_a_killed_rank_is_named_and_leaves_nothing(checkpoint: Path, two_gpus: None, moment: int) -> None:
    from whole_decode import prompt

    from megagen.errors import RankError
    from megagen.serve.engine import Engine

    rng = random.Random(moment)
    victim, delay = rng.randrange(2), rng.uniform(0.0, 1.5)
    before = used()
    pid, killed = 0, 0.0

    def run(engine: Any) -> None:
        nonlocal pid, killed
        pid, began = engine._source.pids[victim], time.monotonic()
        for _ in engine.generate(prompt(16, engine.vocab), max_new_tokens=POSITIONS - 32, stop=()):
            if not killed and time.monotonic() - began > delay:
                os.kill(pid, signal.SIGKILL)
                killed = time.monotonic()

    with (
        pytest.raises(RankError) as caught,
        Engine.from_pretrained(checkpoint, tp=2, max_positions=POSITIONS) as engine,
    ):
        run(engine)
    took = time.monotonic() - killed
    assert killed and took < 5.0, took
    assert f"rank {victim}" in str(caught.value) and str(pid) in str(caught.value)
    deadline = time.monotonic() + 5.0
    while used() != before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert used() == before
