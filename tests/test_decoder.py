"""A decoder on a GPU as far as none is needed to see it: how ranks come together, what is told while a model loads,
how a step's words are written, how long is waited, and what is left after the end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megagen.errors import DeviceError, HangError, WeightError
from megagen.runtime import decoder, driver
from megagen.runtime.decoder import GpuDecoder
from megagen.runtime.meeting import Meeting
from megagen.runtime.step import Step
from megagen.settings import Settings

RANK = """
import os, sys, time
from pathlib import Path
import torch
from megagen.errors import DeviceError
from megagen.runtime import driver, meeting

driver.require_torch = lambda device: torch
torch.cuda.synchronize = lambda device=None: None
meeting.PATIENCE_S = 2.0
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
(folder / f"{rank}").touch()
while len(list(folder.iterdir())) < 2:
    time.sleep(0.01)
met = meeting.Meeting(rank, 2, 0)
if rank == 1:
    time.sleep(2.5)  # it loads for longer than it may take to start
met.wait()
if rank == 1:
    os._exit(3)
try:
    met.wait()
except DeviceError as error:
    print(error.message)
met.close()
"""


def test_ranks_wait_for_one_that_loads_for_long_and_not_for_one_that_has_ended(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path)],
            env={**os.environ, **place, "PYTHONPATH": str(Path(__file__).parent.parent)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said, _ = ranks[0].communicate(timeout=60)
    assert ranks[0].returncode == 0 and ranks[1].wait(10) == 3
    assert said.strip() == "rank 0 waits for the others to load, and rank 1 has ended"


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Of MASTER_PORT, in use by somebody else."""
    with socket.socket() as s:
        s.bind(("", 0))
        s.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(s.getsockname()[1]))
        monkeypatch.setattr(driver, "require_torch", lambda device: torch)
        yield s.getsockname()[1]


def test_a_port_that_is_in_use(port: int) -> None:
    with pytest.raises(DeviceError, match="rank 0 cannot meet the others") as caught:
        Meeting(0, 2, 0)
    assert f"MASTER_PORT={port}" in (caught.value.hint or "")


def test_a_process_group_that_is_there_is_used_and_left(port: int, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        Meeting(0, 1, 0).close()
        assert torch.distributed.is_initialized()
        with pytest.raises(DeviceError, match="rank 1 of 2 is rank 0 of 1 in torch's process group"):
            Meeting(1, 2, 0)
    finally:
        torch.distributed.destroy_process_group()


def bare(**has: Any) -> Any:
    """A decoder of which there is only so much."""
    made = GpuDecoder.__new__(GpuDecoder)
    vars(made).update(_meeting=None, _torch=torch, timeout_ms=2000, **has)
    return made


def test_no_rank_starts_before_all_have_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch waits on the device for the other ranks', two seconds at most."""
    done = list[str]()
    made = bare(_peers=[{}])
    made._meeting = SimpleNamespace(wait=lambda: done.append("all are here"))
    monkeypatch.setattr(GpuDecoder, "_warm", lambda self: done.append("launch"))
    monkeypatch.setattr(GpuDecoder, "_capture", lambda self, index: done.append("graph"))
    made._start()
    assert done == ["all are here", "launch", "graph"]


def test_the_words_of_a_step() -> None:
    view = torch.full((128,), -7, dtype=torch.int32).numpy()
    made = bare(_in_words=[view])
    step = Step.chain(3, 5)
    made.write(step, [10, 11, 12])
    assert view[:64].tolist() == list(step.words()) and view[64:67].tolist() == [10, 11, 12]
    assert set(view[67:].tolist()) == {-7}
    made.write(Step.chain(16, 9), list(range(16)))
    assert view[64:80].tolist() == list(range(16)) and view[0] == 16 and view[1] == 9


class Event:
    def __init__(self, ready: Callable[[], bool]) -> None:
        self.query = ready


def test_a_device_that_hangs_is_given_up_and_does_not_keep_a_core_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "GRACE_S", 0.4)
    made = bare(_done=[Event(lambda: True), Event(lambda: False)])
    made.timeout_ms = 100
    pauses, sleep, began = list[float](), time.sleep, time.monotonic()
    monkeypatch.setattr(time, "sleep", lambda seconds: pauses.append(seconds) or sleep(seconds))
    with pytest.raises(DeviceError, match=r"longer than 0\.5 s"):
        made.settle()
    assert 0.5 <= time.monotonic() - began < 2
    assert len(pauses) > 20 and set(pauses) == {decoder.PAUSE_S}


def test_what_a_gathering_fails_with_is_the_devices_and_not_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the rank that did not come is named, and not the one that waited."""

    def gather(part: int, like: torch.Tensor) -> list[torch.Tensor]:
        raise RuntimeError("CUDA error: unspecified launch failure\nmore")

    made = bare(bound=[[SimpleNamespace(tensors={"logits": torch.zeros(1)})]], model=SimpleNamespace(kinds={}))
    made._meeting = SimpleNamespace(gather=gather)
    with pytest.raises(DeviceError, match=r"gathering the logits failed: CUDA error: unspecified launch failure$"):
        made.logits()


def test_nothing_is_left_of_a_closed_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[str]()
    weight, cache, heap = (torch.zeros(8) for _ in range(3))
    left = [weakref.ref(x) for x in (weight, cache, heap)]
    stack = ExitStack()
    stack.callback(lambda: done.append(f"modules, {len(made._graphs)} graphs"))
    made = bare(
        _graphs=["graph"], _close=stack, bound=[[{"weight": weight}]], caches=[[cache]], ranks=[{"plan": heap}],
        _peers=[{"plan": heap}], _words=[], _in=[], _out=[], _shared_logits=None,
    )  # fmt: skip
    made._meeting = SimpleNamespace(close=lambda: done.append("meeting"))
    del weight, cache, heap
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append(f"empty, {sum(x() is not None for x in left)}"))
    made.close()
    assert done == ["modules, 0 graphs", "meeting", "empty, 0"]
    made.close()


@pytest.mark.parametrize(
    ("error", "closed"),
    [(None, True), (KeyboardInterrupt(), True), (HangError("", record=None), True), (DeviceError(""), False)],
)
def test_a_device_that_may_hang_is_not_waited_for(
    error: BaseException | None, closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[bool]()
    monkeypatch.setattr(GpuDecoder, "close", lambda self: done.append(True))
    bare().__exit__(type(error) if error else None, error, None)
    assert done == [True] * closed


def test_random_weights_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from megagen.bench import whole

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**11))
    monkeypatch.setattr(whole, "GpuDecoder", None)
    model: Any = SimpleNamespace(memory=lambda: [("weights", 69 * 10**9)], tp=8)
    with pytest.raises(DeviceError, match=r"69\.0 GB are needed on GPU 0, of which 1\.0 GB are free"):
        whole.open_random(model, {}, [0])


# -- loading -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def meetings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stubs for all that :func:`megagen.runtime.decoder.open` puts together; gives what happened to the meeting."""
    done = list[str]()
    model = SimpleNamespace(artifacts=lambda *rest: {}, launches=[SimpleNamespace(layer=0)] * 2, graph=lambda i: None)
    monkeypatch.setattr(driver, "require_torch", lambda device: torch)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(decoder, "planned", lambda *rest, **more: done.append("plan") or model)
    monkeypatch.setattr(decoder, "machine_of", lambda device: "h200")
    monkeypatch.setattr(decoder, "Meeting", lambda *given: done.append("meet") or Leaving(done))
    return done


class Leaving:
    def __init__(self, done: list[str]) -> None:
        self.close = lambda: done.append("leave")


class Decoder:
    """Loads its weights, of which there are too many."""

    def __init__(self, model: Any, artifacts: Any, weights: Any, **more: Any) -> None:
        for i in range(len(model.launches)):
            weights(i, 0)


def packed(parts: int, load: Callable[[int, str], Any]) -> Callable[..., Any]:
    def pack(*given: Any, progress: Any, **more: Any) -> Any:
        task = progress.add_task("weights of rank 0", total=parts * 1e9)
        for _ in range(parts):
            progress.advance(task, 1e9)
        return SimpleNamespace(load=load)

    return pack


def opened(tmp_path: Path, **more: Any) -> Any:
    settings = Settings(cache_dir=tmp_path)
    return decoder.open(tmp_path, **{"tp": 2, "live": 2, "positions": 128, "settings": settings, **more})


def test_loading_says_how_far_it_is(meetings: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = list[tuple[Any, ...]]()
    monkeypatch.setattr(decoder, "pack", packed(1000, lambda launch, device: {}))
    monkeypatch.setattr(decoder, "GpuDecoder", Decoder)
    opened(tmp_path, progress=lambda *what: told.append(what))
    assert ("packing weights: 1000.0 of 1000.0 GB", 1e12, 1e12) in told and len(told) < 100  # not a thousand
    assert told[-2:] == [("loading weights", 1, 2), ("loading weights", 2, 2)]
    assert meetings == ["meet", "plan"]  # a rank that does not even start is missed before the others pack


def test_out_of_memory_while_loading(meetings: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(launch: int, device: str) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nmore")

    monkeypatch.setattr(decoder, "pack", packed(1, load))
    monkeypatch.setattr(decoder, "GpuDecoder", Decoder)
    with pytest.raises(DeviceError, match=r"GPU 0 is out of memory: CUDA out of memory\. Tried .* MiB\.$") as caught:
        opened(tmp_path)
    assert "--tp" in (caught.value.hint or "")
    assert meetings == ["meet", "plan", "leave"]  # so that another try in this process meets anew


def test_no_cache_no_packed_weights(meetings: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEGAGEN_CACHE", "0")
    model = SimpleNamespace(artifacts=lambda *rest: {}, launches=[SimpleNamespace(layer=0)])
    model.graph = lambda i: SimpleNamespace(tp=2)
    monkeypatch.setattr(decoder, "planned", lambda *rest, **more: model)
    with pytest.raises(WeightError, match="MEGAGEN_CACHE=0"):
        opened(tmp_path, settings=None)
