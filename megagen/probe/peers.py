"""Two GPUs."""

from __future__ import annotations

from collections.abc import Callable

from megagen.errors import DeviceError
from megagen.probe.case import Sample
from megagen.probe.gpu import Gpu
from megagen.probe.memory import load as loads
from megagen.probe.memory import part, stream, usual
from megagen.runtime.driver import call

THREADS = 512
AT_ONCE = 8  # words of a thread
WORD = 16
SIZE = 256 << 20
CAPACITY, SKIP = 256, 8  # trips
PLAY = 2_000_000  # ns


def peer(gpu: Gpu) -> list[Sample]:
    """Two GPUs: a message one way, and what a copy, loads, bulk loads and stores move in one direction.

    A thread on each plays ping-pong: 16 B that are their own flag, stored into the other's memory, polled in its own.
    256 MB are copied by the driver, read by threads and by bulk loads from the other GPU, written to it by threads.

    Decides what an exchange costs beside the work that it splits, and which way to move it.
    """
    other = gpu.peer
    if other is None:
        raise DeviceError("no second GPU whose memory this one can use")
    return [_hop(gpu, other), *_rates(gpu, other)]


def _hop(gpu: Gpu, other: Gpu) -> Sample:
    ours, theirs = gpu.zeros(16), other.zeros(16)
    trips = gpu.zeros(CAPACITY, words=4)
    lead = gpu.kernel("hop", "probe_peer_hop", blocks=1)
    follow = other.kernel("hop", "probe_peer_hop", blocks=1)
    values = []
    for _ in range(gpu.runs(31)):
        for tensor in (ours, theirs, trips):
            tensor.zero_()
        for each in (gpu, other):
            each.enter()
            each.torch.cuda.synchronize()
        other.begin(follow, ours, theirs, 0, 0, 0, 0)
        gpu.begin(lead, theirs, ours, trips, CAPACITY, PLAY, 1)
        each_clk = gpu.finish("a message between GPUs")
        other.finish("a message between GPUs")
        taken = gpu.read(trips)[SKIP:]
        values.append(float(taken[taken > 0].median()) / 2 * each_clk)
    return Sample("hop_gpu_ns", "ns", values, "16 B that are their own flag, one way, GPU to GPU")


def _rates(gpu: Gpu, other: Gpu) -> list[Sample]:
    step = gpu.sms * THREADS * AT_ONCE * WORD
    size = SIZE // step * step
    theirs, ours, sink = other.zeros(SIZE // 8), gpu.zeros(SIZE // 8), gpu.zeros(1)
    other.enter()
    other.torch.cuda.synchronize()
    load = gpu.kernel("peer", "probe_peer_load", threads=THREADS)
    store = gpu.kernel("peer", "probe_peer_store", threads=THREADS)
    stages, stage = usual(gpu)
    bulk, share = stream(gpu, stages, stage), part(gpu, SIZE)
    copying, copy = "copying between GPUs", gpu._api.cuMemcpyPeerAsync

    def copied() -> None:
        call(copying, copy, theirs.data_ptr(), other.context, ours.data_ptr(), gpu.context, SIZE, 0)

    work: dict[str, Callable[[], object]] = {
        "peer_copy_gb_s": copied,
        "peer_load_gb_s": lambda: gpu.launch(load, gpu.head, theirs, size // WORD, sink),
        "peer_bulk_load_gb_s": lambda: gpu.launch(bulk, gpu.head, *loads(theirs.data_ptr(), share, stages, stage), 1),
        "peer_store_gb_s": lambda: gpu.launch(store, gpu.head, theirs, size // WORD, sink),
    }
    moved = {"peer_copy_gb_s": SIZE, "peer_bulk_load_gb_s": share * gpu.sms}
    what = {
        "peer_copy_gb_s": "the driver's copy to another GPU",
        "peer_load_gb_s": "16 B loads of threads on all SMs from another GPU",
        "peer_bulk_load_gb_s": "bulk loads of all SMs from another GPU",
        "peer_store_gb_s": "16 B stores of threads on all SMs to another GPU",
    }
    return [
        Sample(name, "GB/s", [moved.get(name, size) / t / 1e3 for t in times], what[name])
        for name, times in gpu.time(work, gpu.runs(21)).items()
    ]
