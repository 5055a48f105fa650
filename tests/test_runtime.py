"""The runtime without a GPU: bytes of the parameter block, heap images, hang records, launch attributes."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from megagen.dsl import load
from megagen.errors import DeviceError, HangError
from megagen.ir.graph import DType, Scope
from megagen.ir.plan import (
    BarrierPlan,
    ChannelPlan,
    HeapPlan,
    KernelPlan,
    LaunchPlan,
    Machine,
    OpPlan,
    ParamPlan,
    Plan,
    ProgramPlan,
    Reset,
    RingPlan,
    RoleRef,
    Source,
    StepPlan,
    SyncKind,
    WeightPlan,
)
from megagen.lower import lower
from megagen.runtime import driver, hang, heap, params
from megagen.runtime.session import Session, Uploads
from megagen.runtime.step import Step

WARPS, BLOCKS = 4, 6


def channel(name: str, index: int, offset: int, **more: Any) -> ChannelPlan:
    given: dict[str, Any] = {
        "dtype": DType.BF16, "shape": (16, 8), "scope": Scope.RANK, "kind": SyncKind.LAMPORT, "empty": 0xFFFFFFFF,
        "copies": 2, "reset": Reset.LAUNCH, "bytes": 256, "counter_offset": None,
        "row_stride": 8, "rank_stride": 0, "shard": 8, "arrivals": 1, "arrivals_per": "launch",
        "writers": (RoleRef(op="down", role="reduce"),), "readers": (RoleRef(op="combine", role="compute"),),
    }  # fmt: skip
    return ChannelPlan(name=name, index=index, offset=offset, **(given | more))


@pytest.fixture
def plan() -> Plan:
    """Two ops, five channels of all sorts, one weight with its scales."""
    steps = (
        StepPlan(
            op="down", call="math", index=3, source=Source(file="s.py", line=12, column=5, text="    s.assign(g.down)")
        ),
        StepPlan(op=None, call="reset", index=4),
    )
    return Plan(
        name="tiny", graph="tiny", tp=8, tokens=16, fused=True, nominal_experts=49, nominal_tokens=16,
        machine=Machine(
            name="h200", arch="sm_90a", sms=132, blocks_fit={1: 132}, shared_bytes=232448, registers=65536,
            barriers=16, icache_bytes=131072, l2_bytes=50 << 20, hbm_bytes_per_s=4.8e12, timer_step_ns=32,
        ),
        launch=LaunchPlan(
            blocks=BLOCKS, cluster=2, warps=WARPS, shared_bytes=100_000, pdl=True, early_trigger=True, registers=None
        ),
        ring=RingPlan(stages=2, stage_bytes=1024, region="ring", full="full", empty="empty", consumers=1),
        heap=HeapPlan(bytes=8192, epoch_offset=0, abort_offset=64, record_offset=256, record_bytes=64 * WARPS * BLOCKS),
        params=(
            ParamPlan(name="sys", ctype="megagen::System", what="system"),
            ParamPlan(name="down_weight", ctype="const uint8_t*", what="weight"),
            ParamPlan(name="down_weight_scale", ctype="const float*", what="weight", dtype=DType.FP32, shape=(256, 1)),
            ParamPlan(name="gain", ctype="const float*", what="weight", dtype=DType.BF16, shape=(64,)),
            ParamPlan(name="stream", ctype="const float*", what="input", dtype=DType.FP32, shape=(16, 8)),
            ParamPlan(name="stream_out", ctype="float*", what="output", dtype=DType.FP32, shape=(16, 8)),
        ),
        weights=(
            WeightPlan(
                name="down_weight", parameter="down_weight", layout="tiles", dtype=DType.NVFP4, rows=16, k=512,
                experts=256, stage_rows=16, stage_k=512, bytes=256 * 4608, gate_up=False, names=("x",), shard="rows",
            ),
            WeightPlan(
                name="gain", parameter="gain", layout="vector", dtype=DType.BF16, rows=64, k=1, experts=0,
                stage_rows=0, stage_k=0, bytes=256, gate_up=False, names=("y",), shard="none",
            ),
        ),
        regions=(), ops=(
            OpPlan(
                name="down", kind="expert_gemm", header="x", struct="X", constants={}, channels={}, tensors={},
                weights={"weight": "down_weight"}, barriers={}, regions={}, roles={}, specs=(), stream=None,
                weight_bytes=49 * 1000, activation_bytes=0, operations=0,
            ),
            OpPlan(
                name="norm", kind="rms_norm", header="x", struct="X", constants={}, channels={}, tensors={},
                weights={"gain": "gain"}, barriers={}, regions={}, roles={}, specs=(), stream=None,
                weight_bytes=256, activation_bytes=999, operations=0,
            ),
        ),
        barriers=(BarrierPlan(name="ring_full", offset=0, slots=2, count=1, index=9),),
        channels=(
            channel("mid", 0, 2048),
            channel("sum", 1, 2560, empty=0, copies=1, reset=Reset.READER, dtype=DType.FP32, shape=(8, 8)),
            channel("counted", 2, 2816, kind=SyncKind.COUNTER, empty=None, bytes=64, counter_offset=128),
            channel("local", 3, 0, kind=SyncKind.CLUSTER, empty=None, copies=1, reset=Reset.NONE, bytes=8192),
            channel(
                "words", 4, 3072, empty=0x88888888, bytes=128, copies=3,
                dtype=DType.U32, shape=(16, 2), row_stride=2, shard=2,
            ),
        ),
        kernels=(
            KernelPlan(
                name="tiny", ops=("down",), programs=(ProgramPlan(first=0, count=4, steps=steps),), advances_epoch=True
            ),
        ),
    )  # fmt: skip


# -- parameter block -------------------------------------------------------------------------------------------


def system(**more: Any) -> params.System:
    given: dict[str, Any] = {
        "heaps": [0x7000_0000_0100], "aborts": [0x7000_0000_0140], "control": 0x7000_0000_0200,
        "route_override": 0x7000_0000_0300, "rank": 0, "live": 1, "world": 8, "timeout_ms": 2000,
    }  # fmt: skip
    return params.System(**(given | more))


def test_block_is_system_by_value_then_pointers_in_plan_order(plan: Plan) -> None:
    names = ["stream_out", "down_weight", "gain", "down_weight_scale", "stream"]
    data = params.pack(plan, system(), {n: 0x1000 * (i + 1) for i, n in enumerate(names)})
    assert len(data) == 192 + 5 * 8
    words = struct.unpack("<18Q4I32x5Q", data)
    own, other = 0x7100_0000_0080, 0x7200_0000_0080
    told = params.pack(plan, system(stamps=7, code=(own, 640), next_code=(other, 256)), dict.fromkeys(names, 0))
    assert struct.unpack_from("<3Q2I", told, 160) == (7, own, other, 640, 256)
    assert words[:8] == (0x7000_0000_0100, 0, 0, 0, 0, 0, 0, 0)
    assert words[8:16] == (0x7000_0000_0140, 0, 0, 0, 0, 0, 0, 0)
    assert words[16:18] == (0x7000_0000_0200, 0x7000_0000_0300)
    assert words[18:22] == (0, 1, 8, 2_000_000_000)  # rank, live, world, timeout in ns
    assert words[22:] == (0x2000, 0x4000, 0x3000, 0x5000, 0x1000)


@pytest.mark.parametrize("bad", [{"live": 3, "heaps": [1] * 3}, {"rank": 1}, {"live": 2}, {"live": 0, "heaps": []}])
def test_impossible_worlds_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(DeviceError):
        system(**bad).pack()


def test_expected_tensors(plan: Plan) -> None:
    want = {k: (v.bytes, v.dtype, v.what) for k, v in params.expected(plan).items()}
    assert want == {
        "down_weight": (256 * 4608, "uint8", "weight"),
        "down_weight_scale": (1024, "float32", "weight"),
        "gain": (256, "float32", "weight"),  # vectors are fp32 on the device, whatever the checkpoint had
        "stream": (512, "float32", "input"),
        "stream_out": (512, "float32", "output"),
    }


# -- heap ------------------------------------------------------------------------------------------------------


def test_fresh_heap(plan: Plan) -> None:
    """Word by word: lamport channels are empty in every copy, all else is zero."""
    data = bytes(heap.image(plan))
    words = struct.unpack(f"<{plan.heap.bytes // 4}I", data)
    for i, word in enumerate(words):
        at = 4 * i
        expected = 0xFFFFFFFF if 2048 <= at < 2560 else 0x88888888 if 3072 <= at < 3456 else 0
        assert word == expected, hex(at)


def test_reset_makes_the_image(plan: Plan) -> None:
    torch = pytest.importorskip("torch")
    dirty = torch.full((plan.heap.bytes,), 0x5A, dtype=torch.uint8)
    heap.reset(dirty, plan)
    assert dirty.numpy().tobytes() == bytes(heap.image(plan))


def test_leftovers_are_looked_for_in_the_copy_that_comes_next(plan: Plan) -> None:
    torch = pytest.importorskip("torch")
    memory = torch.frombuffer(heap.image(plan), dtype=torch.uint8)
    assert heap.leftovers(memory, plan, epoch=5) == []
    memory[2048 + 256 + 12] = 0  # mid: copy 1, word 3
    memory[3072 + 2 * 128 + 4 : 3072 + 2 * 128 + 12] = 1  # words: copy 2, words 1 and 2
    memory[2560] = 1  # sum: the only copy
    memory[2816] = 1  # counted: data, which needs no emptying
    memory[132] = 1  # counted: the counter of copy 1
    found = {(x.channel, x.copy, x.words, x.first) for x in heap.leftovers(memory, plan, epoch=5)}
    assert found == {("mid", 1, 1, 3), ("words", 2, 2, 1), ("sum", 0, 1, 0), ("counted", 1, 1, 0)}
    assert [x.channel for x in heap.leftovers(memory, plan, epoch=6)] == ["sum"]  # copies 0 and 0


def test_channel_values_follow_the_strides() -> None:
    """Every element says where it belongs: 1000 rank + 10 row + e."""
    torch = pytest.importorskip("torch")

    def memory(ranks: int, rows: int, shard: int, rank_stride: int, row_stride: int) -> Any:
        data = torch.full((ranks * rows * shard + 64,), -1.0)
        for rank in range(ranks):
            for row in range(rows):
                for e in range(shard):
                    data[rank * rank_stride + row * row_stride + e] = 1000 * rank + 10 * row + e
        return data

    world = {"scope": Scope.WORLD, "shard": 4}
    for rank_stride, row_stride in ((4, 16), (24, 4)):  # ranks within a row, or rank by rank
        c = channel("x", 0, 0, shape=(6, 16), rank_stride=rank_stride, row_stride=row_stride, **world)
        got = heap.values(memory(4, 6, 4, rank_stride, row_stride), c, 4)
        assert got.tolist() == [[1000 * (i // 4) + 10 * t + i % 4 for i in range(16)] for t in range(6)]
    c = channel("x", 0, 0, shape=(4, 3, 2, 4), rank_stride=24, row_stride=4, **world)  # contributions
    got = heap.values(memory(4, 6, 4, 24, 4), c, 4)
    assert got.shape == (4, 3, 2, 4)
    assert got[3, 2, 1].tolist() == [3050, 3051, 3052, 3053]
    c = channel("x", 0, 0, shape=(3, 2, 4), rank_stride=0, row_stride=8, shard=4)  # padded rows of one rank
    assert heap.values(memory(1, 6, 4, 0, 8), c, 8)[2, 1].tolist() == [50, 51, 52, 53]


def test_epochs(plan: Plan) -> None:
    torch = pytest.importorskip("torch")
    memory = torch.frombuffer(heap.image(plan), dtype=torch.uint8)
    memory[: 4 * BLOCKS].view(torch.int32)[:] = torch.arange(BLOCKS, dtype=torch.int32)
    assert heap.epochs(memory, plan) == list(range(BLOCKS))


# -- hang records ----------------------------------------------------------------------------------------------


def records(*used: tuple[int, ...]) -> bytes:
    """A record area: each of ``used`` is state, step, edge, slot, expected, observed, sm, block, warp, rank, epoch."""
    area = bytearray(64 * WARPS * BLOCKS)
    for r in used:
        struct.pack_into("<11I", area, 64 * (r[7] * WARPS + r[8]), *r)
    return bytes(area)


def report(plan: Plan, abort: int, data: bytes) -> HangError:
    return hang.error(plan, abort, hang.decode(data), timeout_ms=2000)


def test_hang_names_op_edge_slot_place_and_line(plan: Plan) -> None:
    data = records(
        (2, 4, 9, 1, 0, 0, 7, 0, 3, 0, 41),
        (1, 3, 0, 17, 1, 0xFFFFFFFF, 99, 2, 1, 0, 41),
        (2, 4, 9, 0, 0, 0, 8, 1, 3, 0, 41),
        (2, 4, 9, 0, 0, 0, 9, 4, 3, 0, 41),
        (2, 3, 0, 3, 0, 0, 9, 4, 0, 0, 41),
    )
    error = report(plan, 1 + 2 * WARPS + 1, data)
    for part in ("down.math", "channel 'mid' (lamport)", "slot 17", "phase 1", "block 2", "SM 99",
                 "warp 1", "rank 0", "launch 41", "2000 ms", "4 other warps"):  # fmt: skip
        assert re.search(rf"{re.escape(part)}\b|{re.escape(part)}", error.message), part
    # the reset's wait began first and so ran out first: a consequence, like the abort word that names it
    late = records((1, 4, 9, 1, 0, 0, 7, 0, 3, 0, 41), (2, 3, 0, 17, 1, 0, 99, 2, 1, 0, 41))
    assert "down.math waited for channel 'mid'" in report(plan, 1 + 3, late).message
    assert error.loc is not None
    assert (error.loc.file, error.loc.line, error.loc.column) == ("s.py", 12, 5)
    assert [n for n, _ in error.notes] == [
        "3 × reset waiting for barrier 'ring_full' in blocks 0-1, 4",
        "1 × down.math waiting for channel 'mid' (lamport) in blocks 4",
    ]
    assert isinstance(error.record, hang.HangRecord)
    assert error.record.sm == 99
    assert "s.py:12:5" in error.render()


def test_hang_without_a_usable_record_still_says_where(plan: Plan) -> None:
    assert "block 5, warp 3" in report(plan, BLOCKS * WARPS, records()).message
    strange = report(plan, 1, records((1, 777, 888, 0, 0, 0, 0, 0, 0, 0, 0)))
    assert "step 777 (not in this plan)" in strange.message
    assert "edge 888 (not in this plan)" in strange.message
    assert strange.loc is None


# -- driver ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "capability", "fits"),
    [
        ("sm_90a", (9, 0), True), ("sm_90a", (10, 0), False), ("sm_100a", (10, 0), True), ("sm_100a", (10, 3), False),
        ("sm_103a", (10, 3), True), ("sm_90", (9, 0), True), ("sm_80", (8, 9), True), ("sm_89", (8, 0), False),
        ("sm_100f", (10, 3), True), ("sm_80", (9, 0), False), ("compute_90", (9, 0), False),
    ],
)  # fmt: skip
def test_which_gpus_run_a_cubin(arch: str, capability: tuple[int, int], fits: bool) -> None:
    assert driver.runs(arch, capability) is fits


class FakeDriver:
    """The bindings' own types, with functions that record their calls instead of reaching for libcuda."""

    def __init__(self, real: Any, fail: str = "") -> None:
        self._real, self._fail, self.calls = real, fail, list[tuple[str, tuple[Any, ...]]]()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(self._real, name)
        values = {
            "cuGetErrorName": b"CUDA_ERROR_INVALID_VALUE", "cuGetErrorString": b"invalid argument",
            "cuOccupancyMaxActiveClusters": 66, "cuOccupancyMaxActiveBlocksPerMultiprocessor": 1,
            "cuModuleLoadData": "module", "cuModuleGetFunction": "function",
        }  # fmt: skip

        def function(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, args))
            status = self._real.CUresult(1 if name == self._fail else 0)
            return (status, values[name]) if name in values else (status,)

        return function


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeDriver]:
    real = driver.api()

    def make(fail: str = "") -> FakeDriver:
        made = FakeDriver(real, fail)
        monkeypatch.setattr(driver, "api", lambda: made)
        return made

    return make


def geometry(**more: Any) -> driver.Geometry:
    return driver.Geometry(**({"blocks": 132, "threads": 384, "cluster": 1, "shared": 200_000, "pdl": False} | more))


@pytest.mark.parametrize(("cluster", "pdl"), [(1, False), (1, True), (2, True), (16, False)])
def test_launch_configuration(fake: Callable[..., FakeDriver], cluster: int, pdl: bool) -> None:
    made = fake()
    kernel = driver.Kernel("k", "function", geometry(cluster=cluster, pdl=pdl))
    block = driver.ParameterBlock(b"\1" * 136)
    kernel.launch(block, stream=0x77)
    name, (config, function, pointer, extra) = made.calls[-1]
    assert (name, function, pointer, extra) == ("cuLaunchKernelEx", "function", block.pointer, 0)
    assert (config.gridDimX, config.blockDimX, config.sharedMemBytes, int(config.hStream)) == (132, 384, 200_000, 0x77)
    ids = made.CUlaunchAttributeID
    want = {}
    if cluster > 1:
        want[ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION] = cluster
    if pdl:
        want[ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION] = 1
    got = {
        a.id: a.value.clusterDim.x if a.id == ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        else a.value.programmaticStreamSerializationAllowed
        for a in config.attrs[: config.numAttrs]
    }  # fmt: skip
    assert got == want
    set_attributes = [args[1] for n, args in made.calls if n == "cuFuncSetAttribute"]
    non_portable = made.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    assert (non_portable in set_attributes) is (cluster > 8)


def test_parameter_block_keeps_its_bytes_where_the_pointer_says() -> None:
    import ctypes

    block = driver.ParameterBlock(bytes(range(136)))
    data = ctypes.c_void_p.from_address(block.pointer).value
    assert data is not None
    assert ctypes.string_at(data, 136) == bytes(range(136)) == block.bytes


def test_blocks_that_fit(fake: Callable[..., FakeDriver]) -> None:
    fake()
    assert driver.Kernel("k", "f", geometry()).blocks_fit(sms=132) == 132
    assert driver.Kernel("k", "f", geometry(cluster=2)).blocks_fit(sms=132) == 132  # 66 clusters of 2


def test_driver_errors_say_what_was_tried_and_the_drivers_name(fake: Callable[..., FakeDriver]) -> None:
    fake("cuFuncSetAttribute")
    with pytest.raises(DeviceError, match=r"allowing k dynamic shared memory.*CUDA_ERROR_INVALID_VALUE") as e:
        driver.Kernel("k", "f", geometry())
    assert e.value.hint == "invalid argument"


def test_missing_cubin_and_missing_driver(tmp_path: Any) -> None:
    with pytest.raises(DeviceError, match=r"cannot read the cubin .*none\.cubin"):
        driver.Module(tmp_path / "none.cubin")

    def dlopen() -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    with pytest.raises(DeviceError, match=r"starting: Failed to dlopen") as e:
        driver.call("starting", dlopen)
    assert e.value.hint is not None


def test_no_gpu_is_a_clear_error(plan: Plan, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="no usable GPU") as e:
        Session(plan, tmp_path / "x.cubin")
    assert e.value.hint


# -- session, as far as it needs no GPU ------------------------------------------------------------------------


class Read:
    """Stands for an event: which calls it got."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def record(self) -> None:
        self.calls.append("record")


@pytest.fixture
def session(plan: Plan) -> Session:
    """A session whose buffers lie in host memory and that has never seen a driver."""
    torch = pytest.importorskip("torch")
    made = object.__new__(Session)
    made.plan, made._torch, made.device = plan, torch, torch.device("cpu")
    made._expected, made._system = params.expected(plan), system()
    made.experts, made.top_k = 256, 8
    made.heap = torch.frombuffer(heap.image(plan), dtype=torch.uint8)
    made._control = torch.zeros(params.CONTROL_WORDS, dtype=torch.int32)
    made._positions = made._numbers = None
    made._uploads = Uploads([torch.zeros(params.CONTROL_WORDS, dtype=torch.int32) for _ in range(2)], Read)
    made._routes = torch.full((16, 8), -1, dtype=torch.int32)
    made.outputs = {"stream_out": aligned(torch.float32, 16, 8)}
    return made


def aligned(dtype: Any, *shape: int) -> Any:
    """A zeroed host tensor at a multiple of 256 bytes."""
    import torch

    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.zeros(size + 256, dtype=torch.uint8)
    start = -raw.data_ptr() % 256
    return raw[start : start + size].view(dtype).view(shape)


def tensors() -> dict[str, Any]:
    import torch

    return {
        "down_weight": aligned(torch.uint8, 256 * 4608),
        "down_weight_scale": aligned(torch.float32, 256, 1),
        "gain": aligned(torch.float32, 64),
        "stream": aligned(torch.float32, 16, 8),
    }


def test_bind_takes_the_sessions_outputs_or_the_callers(session: Session) -> None:
    import torch

    given = tensors()
    own = session.bind(given)
    assert struct.unpack("<5Q", own.block.bytes[192:]) == tuple(
        t.data_ptr() for t in (*given.values(), session.outputs["stream_out"])
    )
    other = Session.__new__(Session)
    other.code = (0x7200_0000_0080, 256)
    for then, code in ((None, (0, 0)), (session, (0, 0)), (other, other.code)):  # its own code it asks for itself
        bound = session.bind(given, then=then).block.bytes
        assert struct.unpack_from("<Q4xI", bound, 176) == code
    mine = aligned(torch.float32, 16, 8)
    assert session.bind({**given, "stream_out": mine}).tensors["stream_out"] is mine


def test_bind_names_every_problem(session: Session) -> None:
    import torch

    given = tensors()
    given["gain"] = given["gain"].bfloat16()
    given["stream"] = aligned(torch.float32, 8, 16).T[:, :8]
    given["down_weight"] = aligned(torch.uint8, 256 * 4608 + 1)[1:]
    given["streem"] = given["stream"]
    del given["down_weight_scale"]
    with pytest.raises(DeviceError, match=r"5 of 5|parameters cannot be bound") as e:
        session.bind(given)
    text = e.value.render()
    for part in (
        "streem: no such parameter", "down_weight_scale: missing weight", "stream: is not contiguous",
        "gain: is torch.bfloat16, must be torch.float32", "down_weight: starts at",
    ):  # fmt: skip
        assert part in text, part
    with pytest.raises(DeviceError) as e:
        session.bind({**tensors(), "stream": aligned(torch.float32, 15, 8)})
    assert "stream: has 480 bytes, must have 512" in e.value.render()


def test_what_a_launch_writes_may_lie_over_nothing_else(session: Session) -> None:
    import torch

    given = tensors()
    with pytest.raises(DeviceError) as e:
        session.bind({**given, "stream_out": given["stream"]})
    assert "lies over" in e.value.render()
    both = aligned(torch.float32, 24, 8)  # half of each is the other's
    with pytest.raises(DeviceError, match="1 of 5"):
        session.bind({**given, "stream": both[:16], "stream_out": both[8:]})
    session.bind({**given, "gain": given["stream"].view(-1)[:64]})  # nobody writes either


@pytest.mark.parametrize("tokens", [0, -1, 17])
def test_token_counts_out_of_range(session: Session, tokens: int) -> None:
    with pytest.raises(DeviceError, match="takes 1 to 16"):
        session.set_tokens(tokens)
    session.set_tokens(16)
    masks = [(2 << i) - 1 for i in range(16)]
    assert session._control.tolist() == [16] + 15 * [0] + [*range(16)] + masks + 16 * [0]


def test_a_step_is_refused_before_anything_is_written(session: Session) -> None:
    session.set_step(Step.tree([-1, 0, 0], 7))
    before = session._control.tolist()
    assert before[:2] + before[16:20] + before[32:36] == [3, 7, 7, 8, 8, 0, 1, 3, 5, 0]
    session._positions = 10
    session.set_step(Step.chain(3, 7))
    session.set_step(Step.tree([-1, 0, 0], 8))
    with pytest.raises(DeviceError, match="position 10: the table of rotations of tiny has 10"):
        session.set_step(Step.chain(3, 8))
    assert session.step == Step.tree([-1, 0, 0], 8)
    assert session._control[:2].tolist() == [3, 8]
    session._numbers = 10  # a tree's third token stands at position 9, and is kept as number 10
    with pytest.raises(DeviceError, match="3 tokens after 8: growing caches of tiny hold 10"):
        session.set_step(Step.tree([-1, 0, 0], 8))
    session.set_step(Step.tree([-1, 0, 0], 7))
    session.plan = session.plan.model_copy(update={"tokens": 2})
    with pytest.raises(DeviceError, match="3 tokens: a launch of tiny takes 1 to 2"):
        session.set_step(Step.chain(3))


@pytest.mark.parametrize(
    ("schedule", "options", "positions", "numbers"),
    [
        ("muse_last", {}, None, None), ("muse_first", {"positions": 300}, 300, None), ("muse_swa", {}, 16384, None),
        ("muse_swa", {"positions": 512, "following": "global"}, 512, 512),
        ("muse_global", {"positions": 512}, 512, 512),
        ("muse_global", {"positions": 512, "following": "end"}, 512, 512),
    ],
)  # fmt: skip
def test_how_far_a_step_may_go(
    schedule: str, options: dict[str, Any], positions: int | None, numbers: int | None
) -> None:
    plan = lower(load(f"{schedule}.py", options=options))
    assert (params.positions(plan), params.numbers(plan)) == (positions, numbers)


def test_words_on_their_way_wait_for_the_buffer_only() -> None:
    torch = pytest.importorskip("torch")
    events: list[Read] = []

    def event() -> Read:
        events.append(Read())
        return events[-1]

    buffers = [torch.zeros(3, dtype=torch.int32) for _ in range(4)]
    uploads, to = Uploads(buffers, event), torch.zeros(3, dtype=torch.int32)
    calls = []
    for i in range(7):
        uploads.send((i, -i, 10 * i), to)
        assert to.tolist() == [i, -i, 10 * i]
        calls.append([len(e.calls) for e in events])
    assert [b[0].item() for b in buffers] == [4, 5, 6, 3]
    assert [e.calls for e in events] == [["synchronize", "record"] * 2, ["synchronize", "record", "synchronize"]]
    assert calls == [[1, 0], [2, 0], [2, 1], [2, 2], [3, 2], [4, 2], [4, 3]]  # before a half, and after it


def test_route_overrides(session: Session) -> None:
    import torch

    table = torch.arange(16, dtype=torch.int32).view(2, 8)
    session.set_route_override(table)
    assert session._routes[:2].tolist() == table.tolist()
    assert session._routes[2:].eq(-1).all()
    for bad in (
        table.long(),
        table[:, :7],
        table.view(-1),
        table.repeat(9, 1),
        table + 241,
        table - 2,
        table - 1,
        table // 2,
    ):
        with pytest.raises(DeviceError, match="route override"):
            session.set_route_override(bad)
    assert session._routes[:2].tolist() == table.tolist()  # refused tables change nothing
    session.set_route_override(None)
    assert session._routes.eq(-1).all()


def test_read_takes_the_copy_of_the_last_completed_launch(session: Session) -> None:
    import torch

    with pytest.raises(DeviceError, match="not been written"):
        session.read("words")
    session.heap[: 4 * BLOCKS].view(torch.int32).fill_(5)  # launch 4 was the last: copy 4 % 3
    session.heap[3072 + 128 : 3072 + 256].view(torch.int32)[:] = torch.arange(32, dtype=torch.int32)
    got = session.read("words")
    assert got.dtype is torch.int32
    assert got.tolist() == torch.arange(32).view(16, 2).tolist()
    for name, why in (("sum", "reset by its reader"), ("local", "shared memory")):
        with pytest.raises(DeviceError, match=why):
            session.read(name)
    session.heap[4:8].view(torch.int32).fill_(6)
    with pytest.raises(DeviceError, match=r"disagree.*\[5, 6\]"):
        session.read("words")


def test_host_gives_up_on_a_device_that_makes_no_progress(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress extends the deadline; without any the wait ends, long before the device answers."""
    from megagen.runtime import session as module

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(module.time, "sleep", lambda _: setattr(clock, "now", clock.now + 0.5))
    session.timeout_ms = 2000
    epochs = iter([0, 1, 2, 2])
    session._epoch_aside = lambda: next(epochs)  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match=r"no launch completed within 3\.0 s"):
        session._wait(SimpleNamespace(query=lambda: False))  # type: ignore[arg-type]
    assert 9 < clock.now < 12
