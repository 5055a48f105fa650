"""Perfetto's file, read back with its own protos: what is in the trace is in it, nested and at its time."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trace_made import Maker, layer, random, tiny

from megagen.errors import MegagenError
from megagen.trace import perfetto
from megagen.trace.spans import Kind, Trace

pb: Any = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
EVENT = pb.TrackEvent
Slice = tuple[str, int, int, int]  # name, begin, end, depth


class Read:
    """``slices`` and ``instants`` by (process, block's name, warp's), ``counters`` by (process, name)."""

    def __init__(self, path: Path) -> None:
        file = pb.Trace()
        file.ParseFromString(path.read_bytes())
        self.tracks = {
            p.track_descriptor.uuid: p.track_descriptor for p in file.packet if p.HasField("track_descriptor")
        }
        self.slices: dict[tuple[str, ...], list[Slice]] = defaultdict(list)
        self.instants: dict[tuple[str, ...], list[tuple[str, int, dict[str, int]]]] = defaultdict(list)
        self.counters: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
        events = [p for p in file.packet if p.HasField("track_event")]
        assert {p.trusted_packet_sequence_id for p in file.packet} == {1}
        opened: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for p in sorted(events, key=lambda p: p.timestamp):  # as Perfetto does: at one time, in the file's order
            e = p.track_event
            where = self.where(e.track_uuid)
            notes = {a.name: a.uint_value for a in e.debug_annotations}
            if e.type == EVENT.TYPE_SLICE_BEGIN:
                opened[e.track_uuid].append((e.name, p.timestamp))
            elif e.type == EVENT.TYPE_SLICE_END:
                name, begin = opened[e.track_uuid].pop()
                self.slices[where].append((name, begin, p.timestamp, len(opened[e.track_uuid])))
            elif e.type == EVENT.TYPE_INSTANT:
                self.instants[where].append((e.name, p.timestamp, notes))
            else:
                assert e.type == EVENT.TYPE_COUNTER
                self.counters[where].append((p.timestamp, e.counter_value))
        assert not any(opened.values())

    def where(self, uuid: int) -> tuple[str, ...]:
        track = self.tracks[uuid]
        name = track.process.process_name if track.HasField("process") else track.name
        return (*(self.where(track.parent_uuid) if track.parent_uuid else ()), name)


def read(trace: Trace, tmp_path: Path, launches: list[int] | None = None) -> Read:
    path = tmp_path / "a.pftrace"
    perfetto.write(trace, path, launches)
    assert [p.name for p in tmp_path.iterdir()] == ["a.pftrace"]
    return Read(path)


def test_a_warp(tmp_path: Path) -> None:
    m = Maker(tiny()).job(4, "attach", 0, 1000, block=2)
    m.job(
        4,
        "o_proj.math",
        1000,
        4000,
        [("attended", 1000, 2000), ("ring_full", 2000, 2500, 1), ("ring_full", 3000, 4000, 2)],
        block=2,
    )
    m.job(4, "post_attention.compute", 4000, 4000, block=2).job(4, "router.math", 4000, 5000, block=2)
    m.job(0, "o_proj.load_weights", 100, 3000, block=2).load(0, "o_proj.load_weights", 150, 32768, 1, block=2)
    m.load(0, "o_proj.load_weights", 2600, 458_000, 2, block=2)
    found = read(m.trace(name="layer 3"), tmp_path)
    (warp,) = (where for where in found.slices if where[2].startswith("warp 4"))
    assert warp == ("rank 0: layer 3", "block 2, SM 2", warp[2])
    assert sorted(found.slices[warp], key=lambda s: (s[1], s[3], s[2])) == [
        ("attach", 0, 1000, 0),
        ("o_proj.math", 1000, 4000, 0),
        ("wait attended", 1000, 2000, 1),
        ("wait ring_full", 2000, 2500, 1),
        ("wait ring_full", 3000, 4000, 1),
        ("post_attention.compute", 4000, 4000, 0),
        ("router.math", 4000, 5000, 0),
    ]
    (loads,) = found.instants.values()
    assert loads == [
        ("load o_proj", 150, {"bytes": 32768, "stage": 1}),
        ("load o_proj", 2600, {"bytes": 458_000, "stage": 2}),
    ]
    assert found.counters["rank 0: layer 3", "weights asked for"] == [(150, 32768), (2600, 490768)]
    # the first has landed when it is waited for until 2.5 µs, the second at 4
    assert found.counters["rank 0: layer 3", "weights under way"] == [
        (150, 32768),
        (2500, 0),
        (2600, 458000),
        (4000, 0),
    ]


def test_every_track_has_its_place(tmp_path: Path) -> None:
    m = Maker(tiny(), ranks=2)
    for rank in range(2):
        m.job(4, "attach", 0, 1000, rank=rank)
    tracks = read(m.trace(), tmp_path).tracks.values()
    processes = [t for t in tracks if t.HasField("process")]
    assert [t.process.pid for t in processes] == [1, 2]
    for process in processes:
        below = sorted((t for t in tracks if t.parent_uuid == process.uuid), key=lambda t: t.sibling_order_rank)
        assert [t.name for t in below] == [
            "weights asked for",
            "weights under way",
            *(f"block {i}, SM {i}" for i in range(4)),
        ]
        assert [t.HasField("counter") for t in below] == [True, True, False, False, False, False]
        for block in below[2:]:
            warps = sorted((t for t in tracks if t.parent_uuid == block.uuid), key=lambda t: t.sibling_order_rank)
            assert [t.name.partition(":")[0] for t in warps] == [f"warp {w}" for w in range(12)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_layer_is_all_there(tmp_path: Path, ranks: int) -> None:
    trace = layer(tiny(), ranks=ranks)
    found, spans = read(trace, tmp_path), trace.spans
    slices = [s for track in found.slices.values() for s in track]
    instants = [s for track in found.instants.values() for s in track]
    assert Counter(s[3] for s in slices) == {
        0: (spans["kind"] == Kind.JOB).sum(),
        1: (spans["kind"] == Kind.WAIT).sum(),
    }
    assert len(instants) == (spans["kind"] == Kind.LOAD).sum()
    assert sum(s[2]["bytes"] for s in instants) == spans["bytes"].sum()
    for kind, depth in ((Kind.JOB, 0), (Kind.WAIT, 1)):
        of = spans[spans["kind"] == kind]
        want = Counter(zip(of["begin"].tolist(), of["end"].tolist(), strict=True))
        assert Counter((begin, end) for _, begin, end, deep in slices if deep == depth) == want
    for rank in range(ranks):
        asked, under_way = (found.counters[f"rank {rank}: made", name] for name in perfetto.COUNTERS)
        assert asked[-1][1] == spans["bytes"][spans["rank"] == rank].sum()
        assert under_way[-1][1] == 0
        assert min(value for _, value in under_way) >= 0


def test_kernels_of_an_unfused_plan(tmp_path: Path) -> None:
    """A kernel may begin while the last one ends: their slices are not nested into each other."""
    m = Maker(tiny(fused=False)).job(4, "attach", 0, 1000, kernel=0).job(4, "attention.attend", 1000, 5000)
    m.job(4, "attach", 3000, 5500, kernel=1).job(4, "o_proj.math", 5500, 7000)
    found = read(m.trace(), tmp_path)
    (where,) = found.slices  # both tracks have one name
    assert sorted(found.slices[where], key=lambda s: s[1]) == [
        ("attach", 0, 1000, 0),
        ("attention.attend", 1000, 5000, 0),
        ("attach", 3000, 5500, 0),
        ("o_proj.math", 5500, 7000, 0),
    ]


def test_prefetches(tmp_path: Path) -> None:
    m = Maker(tiny("muse_moe", unpooler="l2")).job(1, "unpooler.prefetch_l2", 0, 2000)
    m.prefetch(1, "unpooler.prefetch_l2", 500, 45_800)
    found = read(m.trace(), tmp_path)
    assert list(found.instants.values()) == [[("prefetch unpooler", 500, {"bytes": 45_800})]]
    assert found.counters["rank 0: made", "weights under way"] == [(500, 45_800), (1140, 0)]  # as the quickest


def test_the_usual_launch_or_those_wanted(tmp_path: Path) -> None:
    m = Maker(tiny())
    for launch, end in enumerate((1000, 3000, 1200)):
        m.job(4, "attach", 0, end, launch=launch)
    trace = m.trace()
    assert trace.launches["begin"].tolist() == [0, 1000, 4000]
    one, all_ = read(trace, tmp_path), read(trace, tmp_path, [2, 0, 1])
    assert [s[1:3] for track in one.slices.values() for s in track] == [(0, 1200)]
    assert [s[1:3] for track in all_.slices.values() for s in track] == [(0, 1000), (1000, 4000), (4000, 5200)]
    for wrong in (3, -1):
        with pytest.raises(MegagenError, match=f"the trace has no launch {wrong}"):
            perfetto.write(trace, tmp_path / "b", [wrong])
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("seed", range(6))
def test_slices_are_nested_whatever_the_spans(tmp_path: Path, seed: int) -> None:
    trace = random(tiny(fused=seed % 2 == 0), seed)
    found = read(trace, tmp_path)
    jobs = [s for track in found.slices.values() for s in track if s[3] == 0]
    assert len(jobs) == (trace.spans["kind"] == Kind.JOB).sum()
    assert sum(s[2] - s[1] for s in jobs) == int(
        (trace.spans["end"].astype(np.int64) - trace.spans["begin"])[trace.spans["kind"] == Kind.JOB].sum()
    )


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(MegagenError, match="cannot write"):
        perfetto.write(Maker(tiny()).job(4, "attach", 0, 9).trace(), tmp_path / "no" / "a")
