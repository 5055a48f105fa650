"""What waiting costs: polls, hops and fences, while the SMs stream and while they do not."""

from __future__ import annotations

import statistics

from megagen.probe.case import Sample
from megagen.probe.gpu import BARRIERS, KB, Gpu
from megagen.probe.memory import LOAD, load, part, usual

CAPS = (0, 16, 32, 48, 64, 96, 128, 160)  # KB in flight a SM
STAGE = 16 * KB
RING = 160 * KB  # of every SM, whatever may be in flight
CAPACITY = 1024  # trips that a pair may note: more than it makes
PLAY = 250_000  # ns
PLAYS = 5  # of a reading
PLACES = 16  # of the mail
APART = 4352  # bytes: hop.cu's kApart
SKIP = 4  # trips until a pair has found its pace
POLLS = 64
ROUNDS = 8
AHEAD = 31 * LOAD  # bytes a SM prefetches before a fence: one instruction takes less than 1 MB, of 1 MB it does none
KINDS = {
    "gpu": "fence.acq_rel.gpu",
    "sys": "fence.acq_rel.sys",
    "cluster": "fence.acq_rel.cluster",
    "red": "red.release.gpu",
    "none": "no fence but ld.relaxed.gpu",
}
STATES = {  # of fence.cu
    "idle": "nothing under way",
    "stored": "right after a 16 B store",
    "in_flight": "right after 160 KB of bulk loads were issued, on all SMs",
    "landed": "after they have landed",
    "prefetched": "right after an L2 prefetch of 992 KB a SM, asked for at once",
    "prefetching": "right after an L2 prefetch of 992 KB a SM, asked for in pieces of 32 KB",
}


class Pairs:
    """Blocks that pass a message to and fro in pairs, while all of them stream or none does."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.pairs = gpu, gpu.sms // 2
        self.stages = gpu.ring(RING, STAGE)
        self.kernel = gpu.kernel("hop", "probe_hop", threads=64, shared=BARRIERS + self.stages * STAGE)
        self.moved = gpu.zeros(gpu.sms, 2)
        self.mail = gpu.zeros(PLACES, self.pairs, APART // 8)
        self.trips = gpu.zeros(self.pairs, CAPACITY, words=4)
        self.share = gpu.size // 3 // gpu.sms // STAGE * STAGE  # other bytes than the two plays before

    def play(self, flight: int, place: int, first: int = 0, pairs: int | None = None) -> tuple[float, float, float]:
        """(clocks, ns) of the median pair's median hop, and bytes/ns that the streams moved meanwhile.

        ``flight`` stages a SM are in flight; ``pairs`` play, from ``first``, by default all. ``place``: of the mail, as
        how far a hop is depends on which part of L2 holds it.
        """
        gpu, count = self.gpu, self.pairs if pairs is None else pairs
        mail = self.mail[place]
        for tensor in (self.moved, mail, self.trips):
            tensor.zero_()
        ring = load(gpu.fresh(self.share * gpu.sms), self.share, self.stages, STAGE, flight)
        each = gpu.run(self.kernel, *ring, self.moved, mail, self.trips, CAPACITY, PLAY, first, count)
        trips = gpu.read(self.trips[first : first + count, SKIP:])
        hops = trips.where(trips > 0, float("nan")).nanmedian(1).values / 2
        clk = float(hops.nanmedian())
        moved, took = gpu.read(self.moved).unbind(1)
        return clk, clk * each, float((moved / took.clamp(min=1)).sum())


def in_flight(gpu: Gpu) -> list[Sample]:
    """Bytes in flight against latency: what a cap on a SM's loads costs its stream, and saves its messages.

    Every SM streams from memory through a ring of 160 KB, of which at most so many bytes are under way. Meanwhile
    another warp of each plays ping-pong with a warp of another SM for 250 µs: 16 B that are their own flag, relaxed
    stores and polls. A hop is half of there and back; a reading is the median of five plays of the median pair, whose
    mail lies elsewhere in each, but not from one cap to the next.

    Decides the in-flight cap of a ring: the least that keeps the stream whole.
    """
    pairs = Pairs(gpu)
    flights = {kb: kb * KB // STAGE for kb in CAPS if kb * KB // STAGE <= pairs.stages}
    found: dict[int, list[tuple[float, ...]]] = {kb: [] for kb in flights}
    for run in range(gpu.runs(21)):
        places = [(run * PLAYS + i) % PLACES for i in range(PLAYS)]
        for kb, flight in flights.items():
            plays = [pairs.play(flight, place) for place in places]
            found[kb].append(tuple(map(statistics.median, zip(*plays, strict=True))))
    best = max(statistics.median(rate for _, _, rate in readings) for readings in found.values())
    samples = []
    for kb, readings in found.items():
        clks, times, rates = zip(*readings, strict=True)
        beside = f"with {kb} KB a SM in flight" if kb else "without any stream"
        samples.append(Sample(f"hop_at_{kb}kb_clk", "clk", clks, f"SM to SM, {beside}", 2))
        samples.append(Sample(f"hop_at_{kb}kb_ns", "ns", times, f"SM to SM, {beside}"))
        if kb:
            shares = [rate / best for rate in rates]
            samples.append(Sample(f"stream_at_{kb}kb_share", "of best", shares, f"rate of the stream, {beside}"))
    return samples


def hop(gpu: Gpu) -> list[Sample]:
    """A message from SM to SM, 16 B that are their own flag, with the GPU otherwise idle.

    As `in_flight`, one pair of SMs alone. A reading is of sixteen pairs with their mail in as many places: the median,
    the least and the most of them.

    Decides how much work a hand-off inside the GPU is worth.
    """
    pairs = Pairs(gpu)
    plays = [[pairs.play(0, i, i * pairs.pairs // PLACES, 1) for i in range(PLACES)] for _ in range(gpu.runs(31))]
    clks = [statistics.median(clk for clk, _, _ in reading) for reading in plays]
    times = [sorted(ns for _, ns, _ in reading) for reading in plays]
    what = "one way, SM to SM, one pair alone"
    return [
        Sample("hop_sm_clk", "clk", clks, f"{what}, median of {PLACES}", 2),
        Sample("hop_sm_ns", "ns", [statistics.median(t) for t in times], f"{what}, median of {PLACES}"),
        Sample("hop_sm_least_ns", "ns", [t[0] for t in times], f"{what}, least of {PLACES}"),
        Sample("hop_sm_most_ns", "ns", [t[-1] for t in times], f"{what}, most of {PLACES}"),
    ]


def poll(gpu: Gpu) -> list[Sample]:
    """One poll of a word in L2: acquire or relaxed, GPU or system scope, idle and with the SM's ring full of loads.

    64 polls whose addresses depend on each other, a word and a thread a SM, all SMs at once; while 160 KB a SM are in
    flight, and without.

    Decides which load a wait polls with, and how late a wait notices.
    """
    stages, stage = usual(gpu)
    words, clks, moved = gpu.zeros(gpu.sms, 16), gpu.zeros(gpu.sms, words=4), gpu.zeros(gpu.sms, 2)
    share = gpu.size // gpu.sms // stage * stage
    kinds = {"acquire_gpu": "ld.acquire.gpu", "relaxed_gpu": "ld.relaxed.gpu", "relaxed_sys": "ld.relaxed.sys"}
    busy = {"": (0, "SM idle"), "_streaming": (stages, f"{stages * stage // KB} KB a SM in flight")}
    values: dict[str, list[float]] = {}
    for _ in range(gpu.runs(31)):
        for kind in kinds:
            kernel = gpu.kernel("hop", f"probe_poll_{kind}", threads=64, shared=BARRIERS + stages * stage)
            for name, (depth, _) in busy.items():
                ring = load(gpu.data.data_ptr(), share, stages, stage, depth)
                each = gpu.run(kernel, *ring, moved, words, clks, POLLS)
                values.setdefault(kind + name, []).append(float(gpu.read(clks).median()) / POLLS * each)
    return [
        Sample(f"poll_{kind}{name}_ns", "ns", values[kind + name], f"one of a chain of {text}, {beside}")
        for kind, text in kinds.items()
        for name, (_, beside) in busy.items()
    ]


def fence(gpu: Gpu) -> list[Sample]:
    """What a fence waits for: nothing, a store, bulk loads that are under way, a ring that has landed, a prefetch.

    All SMs meet, one thread of each does what the name says, then issues the fence and notes how long it took until
    the next instruction; what came before is not timed. `in_flight` is one ring of loads that were just issued, and no
    more. `streaming`: now and then, while another warp of the SM streams without pause. A release (here of a reduction)
    is timed in the same way: it holds a fence. `none` is a load in a fence's place: it waits for its turn alone.

    Decides whether a hand-off may use flags at all while weights stream; data that is its own flag needs no fence.
    """
    stages, stage = usual(gpu)
    words, moved = gpu.zeros(gpu.sms, 32), gpu.zeros(gpu.sms, 2)
    clks = gpu.zeros(ROUNDS, gpu.sms, words=4)
    shared = BARRIERS + stages * stage
    values: dict[tuple[str, str], list[float]] = {}
    for _ in range(gpu.runs(21)):
        for kind in KINDS:
            still = gpu.kernel("fence", f"probe_fence_{kind}", shared=shared)
            amid = gpu.kernel("fence", f"probe_amid_{kind}", threads=64, shared=shared)
            for number, state in enumerate(STATES):
                share = ROUNDS * (AHEAD if state.startswith("prefetch") else stages * stage)
                ring = load(gpu.fresh(share * gpu.sms), share, stages, stage)
                each = gpu.run(still, *ring, moved, words, clks, ROUNDS, number, AHEAD)
                values.setdefault((kind, state), []).append(float(gpu.read(clks)[1:].median()) * each)
            share = part(gpu, gpu.size)
            ring = load(gpu.data.data_ptr(), share, stages, stage)
            each = gpu.run(amid, *ring, moved, words, clks, ROUNDS, 0, AHEAD)
            values.setdefault((kind, "streaming"), []).append(float(gpu.read(clks).median()) * each)
    texts = STATES | {"streaming": "while the SM streams, 160 KB in flight"}
    return [
        Sample(f"fence_{kind}_{state}_ns", "ns", found, f"{KINDS[kind]}, {texts[state]}")
        for (kind, state), found in values.items()
    ]
