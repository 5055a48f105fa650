"""Processes of ranks: they answer as one, and whatever happens to one ends all, soon, with an error that names it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from serve_fakes import Fake, continued

from megagen.errors import HangError, MegagenError, RankError, WeightError
from megagen.serve import supervisor
from megagen.serve.generate import Stop, generate
from megagen.serve.sampling import Sampling
from megagen.serve.supervisor import Supervisor

BOUND_S = 5.0  # from what happened to an error, with all processes gone
TESTS = Path(__file__).parent


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@contextmanager
def group(ranks: int = 2, factory: str = "make", *, stall_s: float | None = 4.0, **arguments: Any) -> Iterator[Any]:
    """A supervisor, none of whose processes is left afterwards."""
    made = Supervisor(ranks, f"serve_fakes:{factory}", arguments, stall_s=stall_s)
    pids = made.pids
    try:
        with made:
            yield made
    finally:
        assert not any(map(alive, pids)), "a process is left"


def ids(made: Supervisor, prompt: Sequence[int], new: int, **more: Any) -> list[int]:
    return [t.id for t in made.generate(prompt, max_new_tokens=new, **more)]


def test_they_answer_as_one() -> None:
    with group(3) as made:
        assert (made.vocab, made.positions, made.most) == (1000, 4096, 16)
        for prompt in ([1], list(range(33))):
            tokens = list(made.generate(prompt, max_new_tokens=50))
            assert [t.id for t in tokens] == continued(prompt, 50)
            assert [t.stop for t in tokens] == [None] * 49 + [Stop.LENGTH]
        assert made.statistics["new_tokens"] == 50 and made.statistics["kernels"] == 64
        answer = continued([4], 20)
        tokens = list(made.generate([4], stop={answer[0]}))
        assert [(t.id, t.stop) for t in tokens] == [(answer[0], Stop.TOKEN)]
        with pytest.raises(MegagenError, match="the caches hold 4,096"):
            made.generate([1] * 4097)
        assert ids(made, [7], 3) == continued([7], 3)


def test_they_draw_the_same() -> None:
    sampling = Sampling(1.2, 100, 0.9, seed=4)
    with group(2, draws=True) as made:
        found = ids(made, [1, 2], 20, sampling=sampling)
    assert found == [t.id for t in generate(Fake(), [1, 2], max_new_tokens=20, sampling=sampling)]


def test_a_run_that_is_left_ends_soon() -> None:
    with group(2, step_s=0.002) as made:
        run = made.generate([1])
        assert [next(run).id for _ in range(3)] == continued([1], 3)
        with pytest.raises(MegagenError, match="a run is under way"):
            next(made.generate([2], max_new_tokens=1))
        run.close()
        began = time.monotonic()
        assert ids(made, [2], 5) == continued([2], 5)
        assert time.monotonic() - began < 1
        del run
        next(made.generate([1]))  # left at once
        assert ids(made, [3], 5) == continued([3], 5)


def test_a_slow_taker_is_no_fault() -> None:
    with group(2, stall_s=0.6) as made:
        found = []
        for i, token in enumerate(made.generate([1], max_new_tokens=60)):
            if i in (2, 40):
                time.sleep(1.0)
            found.append(token.id)
        assert found == continued([1], 60)


def test_what_a_rank_prints_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    with group(2, "make_misbehaving", what="print", who=1, when=2) as made:
        ids(made, [1], 4)
    out, err = capfd.readouterr()
    assert "from a rank" in err and "from a rank" not in out


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(8))
def test_a_killed_rank_is_named(case: int) -> None:
    """At a moment that the case draws: it is told by the exception, at once, and nothing is left."""
    rng = random.Random(case)
    who, delay = rng.randrange(3), rng.uniform(0, 0.15)
    with group(3, step_s=0.001) as made:
        pids, hit = made.pids, list[float]()

        def kill() -> None:
            time.sleep(delay)
            os.kill(pids[who], signal.SIGKILL)
            hit.append(time.monotonic())

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(RankError) as caught:
            while True:
                ids(made, [case], 40)
        took = time.monotonic() - hit[0]
        killer.join()
        assert not any(map(alive, pids))
        assert took < BOUND_S
        assert caught.value.message == f"rank {who} (pid {pids[who]}) was killed by signal 9 (SIGKILL)"
        assert (caught.value.rank, caught.value.pid) == (who, pids[who])
        assert "out of memory" in str(caught.value.hint)
        with pytest.raises(MegagenError, match="the engine is closed"):
            ids(made, [1], 1)


def test_killed_while_loading(tmp_path: Path) -> None:
    def kill() -> None:
        deadline = time.monotonic() + 10
        while not ((tmp_path / "1").exists() and (tmp_path / "1").read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(int((tmp_path / "1").read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RankError, match=r"rank 1 \(pid \d+\) was killed by signal 9"):
        Supervisor(2, "serve_fakes:make_noted", {"note": str(tmp_path), "load_s": 100})
    killer.join()
    assert not alive(int((tmp_path / "0").read_text()))


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("moment", ["as it starts", "before anybody notes it"])
def test_ctrl_c_while_they_start(moment: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was just started is ended too, though nobody has noted it yet."""
    started: list[int] = []

    class Interrupted(subprocess.Popen[bytes]):
        def _execute_child(self, *args: Any) -> None:
            super()._execute_child(*args)  # type: ignore[misc]
            started.append(self.pid)
            if moment == "as it starts" and len(started) == rank + 1:
                signal.raise_signal(signal.SIGINT)

    start = supervisor._start

    def start_and_interrupt(*args: Any) -> Any:
        made = start(*args)
        if moment != "as it starts" and len(started) == rank + 1:
            signal.raise_signal(signal.SIGINT)
        return made

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    monkeypatch.setattr(supervisor, "_start", start_and_interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Supervisor(3, "serve_fakes:make", {})
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(started) == rank + 1
    assert not any(map(alive, started))


def test_killed_while_nobody_looks() -> None:
    with group(2) as made:
        ids(made, [1], 2)
        os.kill(made.pids[0], signal.SIGKILL)
        time.sleep(0.1)
        with pytest.raises(RankError, match=r"rank 0 .* was killed"):
            ids(made, [1], 2)


def test_one_that_ends_by_itself() -> None:
    with (
        group(2, "make_misbehaving", what="exit", who=0, when=3) as made,
        pytest.raises(RankError, match=r"rank 0 .* ended with exit code 3"),
    ):
        ids(made, [1], 9)


def test_one_that_ends_is_named_before_what_devices_report() -> None:
    with (
        group(3, "make_misbehaving", what="late exit", who=2, when=3) as made,
        pytest.raises(RankError, match=r"rank 2 .* ended with exit code 3") as caught,
    ):
        ids(made, [1], 9)
    assert all("HangError: a wait expired" in note for note, _ in caught.value.notes)


def test_a_pause_of_a_second_is_survived() -> None:
    with group(2, step_s=0.001) as made:
        found = []
        for i, token in enumerate(made.generate([1], max_new_tokens=80)):
            if i == 20:
                os.kill(made.pids[1], signal.SIGSTOP)
                threading.Timer(1.0, os.kill, (made.pids[1], signal.SIGCONT)).start()
            found.append(token.id)
        assert found == continued([1], 80)


def test_a_stopped_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert supervisor.QUIET_S + supervisor.SETTLE_S < BOUND_S - 0.5
    monkeypatch.setattr(supervisor, "QUIET_S", 2.5)  # the clock runs slower where there is much else to do
    with group(2, step_s=0.001) as made:
        pids, began = made.pids, 0.0
        with pytest.raises(RankError, match=rf"rank 1 \(pid {pids[1]}\) is stopped \(SIGSTOP\)") as caught:
            for i, _ in enumerate(made.generate([1])):
                if i == 20:
                    os.kill(pids[1], signal.SIGSTOP)
                    began = time.monotonic()
        assert 2.5 < time.monotonic() - began < BOUND_S
        assert caught.value.rank == 1
        assert not any(map(alive, pids))


def test_the_clock_runs_while_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a parent that was stopped itself, and its ranks with it, blames nobody."""
    monkeypatch.setattr(supervisor, "QUIET_S", 1.0)
    with group(2, stall_s=1.0, step_s=0.001) as made:
        run, found = made.generate([1], max_new_tokens=60), []
        found.append(next(run).id)
        for pid in made.pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.6)
        for pid in made.pids:
            os.kill(pid, signal.SIGCONT)
        assert found + [t.id for t in run] == continued([1], 60)


def test_a_long_prompt_for_a_stopped_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "QUIET_S", 1.5)
    with group(2, positions=400_000) as made:
        for pid in made.pids:
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RankError, match="is stopped"):
            ids(made, [999] * 300_000, 1)


def test_one_that_hangs_while_devices_give_up() -> None:
    """What the others' devices report hides its cause."""
    with group(3, "make_misbehaving", what="hang", who=1, when=5) as made:
        began = time.monotonic()
        with pytest.raises(RankError, match=r"rank 1 \(pid \d+\) does not go on: in step 5") as caught:
            ids(made, [1], 20)
        assert time.monotonic() - began < BOUND_S
        assert [note.partition(" (")[0] for note, _ in caught.value.notes] == ["rank 0", "rank 2"]
        assert "HangError: a wait expired" in caught.value.notes[0][0]


def test_a_stopped_rank_is_named_before_what_devices_report() -> None:
    with group(2, "make_misbehaving", what="hang", who=1, when=5) as made:
        run = made.generate([1])
        next(run)
        os.kill(made.pids[1], signal.SIGSTOP)
        with pytest.raises(RankError, match=r"rank 1 \(pid \d+\) is stopped"):
            list(run)


def test_one_that_hangs_and_nobody_notices() -> None:
    with (
        group(2, "make_misbehaving", stall_s=0.5, what="stall", who=1, when=4) as made,
        pytest.raises(RankError, match=r"rank 1 \(pid \d+\) does not go on: in step 4 for \d\.\d s"),
    ):
        ids(made, [1], 12)


def test_waits_that_expire_everywhere() -> None:
    with (
        group(2, "make_misbehaving", what="hang", who=9, when=3) as made,
        pytest.raises(HangError, match=r"rank \d \(pid \d+\): a wait expired after 300 ms") as caught,
    ):
        ids(made, [1], 12)
    assert len(caught.value.notes) == 1 and "HangError" in caught.value.notes[0][0]


# -- exceptions --------------------------------------------------------------------------------------------------------


def test_an_exception_travels() -> None:
    with (
        group(2, "make_misbehaving", what="raise", who=1, when=3) as made,
        pytest.raises(WeightError, match=r"rank 1 \(pid \d+\): a shard is damaged") as caught,
    ):
        ids(made, [1], 12)
    error = caught.value
    assert error.hint == "copy it again" and error.notes[0] == ("layer 3", None)
    assert "rank 1" in error.render() and "copy it again" in error.render()


def test_a_bug_in_a_rank() -> None:
    with (
        group(2, "make_misbehaving", what="bug", who=1, when=3) as made,
        pytest.raises(RankError, match=r"rank 1 \(pid \d+\) raised ZeroDivisionError: division by zero"),
    ):
        ids(made, [1], 12)


def test_a_rank_that_cannot_load() -> None:
    began = time.monotonic()
    with pytest.raises(MegagenError, match=r"rank 1 \(pid \d+\): no such folder"):
        Supervisor(2, "serve_fakes:make_never", {"who": 1})
    assert time.monotonic() - began < BOUND_S
    with pytest.raises(RankError, match="ModuleNotFoundError"):
        Supervisor(2, "no_such_module:make", {})


@pytest.mark.parametrize(("ranks", "who"), [(2, 1), (3, 0), (3, 2)])
def test_different_tokens_are_noticed(ranks: int, who: int) -> None:
    with (
        group(ranks, "make_misbehaving", what="differ", who=who, when=7) as made,
        pytest.raises(
            RankError, match=rf"rank {who} \(pid \d+\) chose \d+ as new token 6, and rank \d \(pid \d+\) \d+"
        ),
    ):
        ids(made, [1], 200)


# -- the parent --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_their_parent(how: signal.Signals, tmp_path: Path) -> None:
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    command = [sys.executable, str(TESTS / "serve_fakes.py"), "group", "3", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        pids = [int((tmp_path / str(r)).read_text()) for r in range(3)]
        assert all(map(alive, pids))
        os.kill(pids[2], signal.SIGSTOP)  # even one that could not do it itself
        parent.send_signal(how)
        parent.wait(5)
        deadline = time.monotonic() + 2
        with suppress(ProcessLookupError):
            os.kill(pids[2], signal.SIGCONT)
        while any(map(alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(map(alive, pids))


def test_ranks_outlive_the_thread_that_started_them() -> None:
    made = list[Supervisor]()
    thread = threading.Thread(target=lambda: made.append(Supervisor(2, "serve_fakes:make", {})))
    thread.start()
    thread.join()
    with made[0]:
        assert ids(made[0], [1], 5) == continued([1], 5)


def test_progress_is_that_of_rank_0() -> None:
    told = list[tuple[Any, ...]]()
    with Supervisor(2, "serve_fakes:make", {}, progress=lambda *what: told.append(what)):
        assert told == [(), ("packing", 1.0, 2.0)]
