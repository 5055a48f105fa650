"""Selection and tables alone, one warp each: against the op's reference where scores tie, are no numbers or are forced,
and against tables made here."""

from __future__ import annotations

import struct
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from test_emulate_mutants import TOP_K, Mutant, mutated, one

from megagen import resources
from megagen.emulate.build import compile_library
from megagen.emulate.engine import Engine, Geometry, Kind
from megagen.errors import EmulationError
from megagen.ir.graph import DType, Weight
from megagen.ops.top_k import TopK
from megagen.settings import Settings

TOKENS, SLOTS, GUESSED = 16, 8, 6
SELECTS = {(256, 8): "select_whole", (48, 3): "select_few", (16, 16): "select_batches"}  # experts, chunks

KERNEL = """
#include <megagen/ops/top_k.cuh>

namespace {

using namespace megagen;

struct Params {
    System sys;
    const u32* logits;
    const u8* bias;
    u32* routes;
    u32* table;
    u8* history;
    u64 tokens;
};

struct Ready {
    static constexpr u32 kOffset = 8192, kSlots = 1, kCount = 1, kIndex = 0;
};

struct Guessed {
    static constexpr u32 kTop = GUESSED, kHint = 0;
    static constexpr bool kFirst = true;
    static __device__ u8* history(const Params& p) { return p.history; }
};

struct Plain {
    using Ready = ::Ready;
    static constexpr u32 kOffset = 0;
};

struct Ahead : Plain {
    using Guess = Guessed;
};

struct Warp {
    struct Kernel {
        static constexpr u32 kBlocks = 1, kTokens = 16;
    };
    const Params& p;
    u32 shared = ptx::dynamic_shared(), block = 0, lane = threadIdx.x, tokens = static_cast<u32>(p.tokens);
    bool dead = false, dry = false;

    __device__ Range rounds(Range all, u32 = 1) const { return all; }
    __device__ u32 rounds(u32 n, u32 = 1) const { return n; }
    __device__ u32 epoch() const { return 5; }
};

struct Logits {
    MEGAGEN_DEVICE bool wait(Warp&) { return true; }
    template <u32 kN, class Index>
    MEGAGEN_DEVICE bool read(Warp& ctx, uint4 (&v)[kN], bool, Index index) {
        for (u32 i = 0; i < kN; ++i) v[i] = ptx::ld_global_v4(ctx.p.logits + index(i));
        return true;
    }
    template <u32 kN, class Index>
    MEGAGEN_DEVICE void release(Warp&, bool, Index) {}
};

struct Routes {
    MEGAGEN_DEVICE void send(Warp& ctx, u32 token, u32 e, uint4 v) {
        ptx::st_global_v4(ctx.p.routes + token * 16 + e, v);
    }
    MEGAGEN_DEVICE void publish(Warp&) {}
    MEGAGEN_DEVICE bool wait(Warp&) { return true; }
    template <class Index>
    MEGAGEN_DEVICE bool read(Warp& ctx, uint4 (&v)[1], bool valid, Index index) {
        v[0] = valid ? ptx::ld_global_v4(ctx.p.routes + index(0)) : uint4{0, 0, 0, 0};
        return true;
    }
};

template <u32 kE, u32 kC, class T>
struct Policy {
    static constexpr u32 kExperts = kE, kTopK = 8, kChunks = kC, kScratch = 64;
    static constexpr float kMultiplier = 0.5f, kSumEps = 1e-15f, kScale = 2.0f;
    using Logits = ::Logits;
    using Routes = ::Routes;
    using Table = TableChannel<T>;
    static __device__ const u8* bias(const Params& p) { return p.bias; }
};

template <class T>
MEGAGEN_DEVICE void make_table(const Params& p) {
    Warp ctx{p};
    ctx.block = 1; // the first one writes down what it has found
    if (ctx.lane == 0) ptx::mbarrier_init(ctx.shared + Ready::kOffset, 1);
    __syncwarp();
    ops::TopK<Policy<256, 8, T>>::tables(ctx);
    __syncwarp();
    const ExpertTable table{ctx.shared};
    if (ctx.lane == 0) {
        ptx::st_global_u32(p.table, table.used());
        if constexpr (Guess<T>::kFirst) ptx::st_global_u32(p.table + 1, table.ahead());
        for (u32 i = 0; i < table.used(); ++i) {
            u32* to = p.table + 2 + 10 * i;
            ptx::st_global_u32(to, table.expert(i));
            ptx::st_global_u32(to + 1, table.count(i));
            for (u32 c = 0; c < table.count(i); ++c) ptx::st_global_u32(to + 2 + c, table.entry(i, c));
        }
    }
}

template <u32 kExperts, u32 kChunks>
MEGAGEN_DEVICE void select(const Params& p) {
    Warp ctx{p};
    ops::TopK<Policy<kExperts, kChunks, Plain>>::select(ctx);
}

} // namespace

"""
CALLS = {
    **{name: f"select<{experts}, {chunks}>" for (experts, chunks), name in SELECTS.items()},
    "tables": "make_table<Plain>",
    "tables_ahead": "make_table<Ahead>",
}
SOURCE = KERNEL.replace("GUESSED", str(GUESSED)) + "".join(
    f'extern "C" __global__ void {name}(const __grid_constant__ Params p) {{ {call}(p); }}\n'
    for name, call in CALLS.items()
)


def library() -> Path:
    return compile_library(SOURCE, kernels=list(CALLS), settings=Settings.from_env())


@pytest.fixture(scope="module")
def usual() -> Path:
    return library()


def launch(path: Path, kernel: str, tokens: int, out: str, words: int, **given: torch.Tensor) -> torch.Tensor:
    """Words that a launch leaves in ``out``, -1 where nobody wrote."""
    with Engine(path, arena_bytes=1 << 24, seed=tokens, race=True) as engine:
        places = dict.fromkeys(("route_override", "logits", "bias", "routes", "table", "history"), 0)
        for name, value in given.items():
            data = value.contiguous().view(torch.uint8).numpy().tobytes()
            places[name] = engine.allocate(len(data), kind=Kind.CONSTANT, name=name)
            engine.view(places[name], len(data))[:] = data
            engine.wrote(places[name], len(data))
        places[out] = engine.allocate(4 * words, kind=Kind.EXCHANGE, name=out)
        view = engine.view(places[out], 4 * words)
        view[:] = b"\xff" * (4 * words)
        system = struct.pack("17Q", *[0] * 17) + struct.pack("Q", places.pop("route_override")) + bytes(192 - 144)
        engine.launch(kernel, system + struct.pack("6Q", *places.values(), tokens), Geometry(1, 32, 1, 8192 + 16))
        engine.run()
        return torch.frombuffer(bytearray(view), dtype=torch.int32)


def logits_of(experts: int, seed: int) -> torch.Tensor:
    """Few values, so that many tie; a token of NaNs but for three, one of infinities, one all alike."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-6, 7, (TOKENS, experts), generator=g).float()
    x[1] = torch.nan
    x[1, [2, experts - 1, experts // 2]] = torch.tensor([1.0, 1.0, 2.0])
    x[2, ::3], x[2, 1::3] = torch.inf, -torch.inf
    x[3] = 0.25
    x[4, torch.randperm(experts, generator=g)[: experts // 2]] = torch.nan
    return x


def selected(path: Path, experts: int, chunks: int, forced: bool = False, seed: int = 3) -> bool:
    """Whether routes are those of the reference."""
    g = torch.Generator().manual_seed(seed)
    x = logits_of(experts, seed)
    bias = torch.randint(0, 3, (experts,), generator=g) * 0.25 - 0.25
    bias[-1] = torch.nan
    parts = torch.zeros(chunks, TOKENS, experts)  # a sum is exact
    parts[chunks // 2] = 3
    parts[-1] = x - 3
    op = TopK(
        name="top_k", inputs={"logits": "logits"}, outputs={"routes": "routes", "table": "table"},
        weights={"bias": Weight(name="bias", rows=experts, k=1, dtype=DType.FP32, names=("bias",))},
        experts=experts, k=SLOTS, chunks=chunks, multiplier=0.5, eps=1e-15, scale=2.0,
    )  # fmt: skip
    env, more = {"logits": x, "bias": bias}, {}
    if forced:
        table = torch.stack([torch.randperm(experts, generator=g)[:SLOTS] for _ in range(TOKENS)]).int()
        table[::3] = -1
        env["route_override"] = more["route_override"] = table
    want = op.reference(env, torch.float32)
    laid = parts.view(chunks, TOKENS, experts // 16, 16).transpose(1, 2)
    words = launch(path, SELECTS[experts, chunks], TOKENS, "routes", 16 * TOKENS, logits=laid, bias=bias, **more)
    ids, weights = words.view(TOKENS, 2, SLOTS).unbind(1)
    return ids.equal(want["routes.ids"].int()) and torch.allclose(
        weights.contiguous().view(torch.float32), want["routes.weights"], rtol=1e-5, equal_nan=True
    )


@pytest.mark.parametrize(("experts", "chunks"), SELECTS)
@pytest.mark.parametrize("forced", [False, True])
def test_routes_are_the_references(usual: Path, experts: int, chunks: int, forced: bool) -> None:
    assert all(selected(usual, experts, chunks, forced, seed) for seed in (3, 4))


def routed(experts: int, tokens: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    pool = torch.randperm(256, generator=g)[:experts]
    return torch.stack([pool[torch.randperm(experts, generator=g)[:SLOTS]] for _ in range(tokens)]).int()


def tabled(path: Path, ids: torch.Tensor, guess: list[int] | None = None) -> bool:
    """Whether the table has an entry of each expert and eight of its tokens, those of the guess first."""
    tokens = len(ids)
    routes = torch.cat([ids, torch.full_like(ids, 7)], dim=1)
    more = {}
    if guess is not None:
        history = torch.zeros(2, 64, dtype=torch.int32)
        history[0, 0], history[1, 0] = 4, 3  # of the launch before this one, and an older one
        history[0, 1 : 1 + len(guess)] = torch.tensor(guess) + 1
        more["history"] = history
    kernel = "tables" if guess is None else "tables_ahead"
    found = launch(path, kernel, tokens, "table", 2 + 10 * 128, routes=routes, **more)
    used: dict[int, list[int]] = {}
    for token, row in enumerate(ids.tolist()):
        for slot, expert in enumerate(row):
            used.setdefault(expert, []).append(token << 8 | slot)
    want, ahead = [], 0
    for expert in sorted(used, key=lambda e: (e not in (guess or ()), e)):
        for at in range(0, len(used[expert]), 8):
            some = used[expert][at : at + 8]
            want += [expert, len(some), *some, *[-1] * (8 - len(some))]
            ahead += expert in (guess or ())
    n = len(want)
    got = found[2 : 2 + n].tolist() == want and found[0] == n // 10 and (found[2 + n :] == -1).all()
    return bool(got) and (guess is None or found[1] == ahead)


@pytest.mark.parametrize(("experts", "tokens"), [(8, 1), (8, 16), (11, 9), (20, 16), (256, 16)])
def test_tables_have_an_entry_of_eight_tokens(usual: Path, experts: int, tokens: int) -> None:
    ids = routed(experts, tokens, experts + tokens)
    assert tabled(usual, ids)
    most = [e for e, _ in Counter(ids.flatten().tolist()).most_common(GUESSED - 2)]
    assert tabled(usual, ids, [*most, *[e for e in range(256) if e not in ids][:2]])
    assert tabled(usual, ids, [])


MUTANTS = {
    "the last of a lane's equals": ("for (u32 i = kPer; i-- > 0;) at =", "for (u32 i = 0; i < kPer; ++i) at ="),
    "two lanes win": ("best == top && (equals & below) == 0", "best == top"),
    "descending tokens": ("__popc(mask & ((1u << token) - 1))", "__popc(mask & ~((2u << token) - 1))"),
    "the guess last": ("% kPer & 1) == 0) rank[i]", "% kPer & 1) != 0) rank[i]"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = mutated(Mutant(name, one(TOP_K, *MUTANTS[name])))
    monkeypatch.setattr(resources, "headers", lambda: dict(texts))
    path = library()
    ids = routed(9, 16, 1)
    with suppress(EmulationError):
        assert not (selected(path, 256, 8) and tabled(path, ids) and tabled(path, ids, ids[0, :4].tolist()))
