"""References of attention and of what projections become, against transformers' own functions and modules."""

from __future__ import annotations

import caches
import pytest
import torch

from megagen.ir.graph import Routing
from megagen.ops.attention import CHUNK, Attention, held, slots
from megagen.ops.compare import measure
from megagen.ops.qkv_heads import QkvHeads

modeling = pytest.importorskip("transformers.models.muse_spark.modeling_muse_spark")

HEADS, KV, WINDOW, CHUNKS, POSITIONS = 8, 2, 128, 4, 1024
EPS, QK_SCALE, THETA = 1e-5, 5.4730064863875, 500000.0
TREE = [-1, 0, 0, 1, 1, 2, -1, 3, 6, 5, 8]  # each token's parent
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Two workers with a thread a core each would spend their time waiting for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def attention(tp: int = 1) -> Attention:
    return Attention(
        name="attention", inputs={"q": "q", "gate": "gate", "keys": "k_cache", "values": "v_cache"},
        outputs={"partials": "partials", "out": "out"}, weights={},
        heads=HEADS // tp, kv_heads=KV // tp, chunks=CHUNKS, window=WINDOW, scale=0.125, eps=EPS,
    )  # fmt: skip


def heads(rotate: bool = True, tp: int = 1) -> QkvHeads:
    return QkvHeads(
        name="heads", inputs={"partials": "partials"} | ({"rotary": "rotary"} if rotate else {}),
        outputs={"q": "q", "gate": "gate", "keys": "k_cache", "values": "v_cache"}, weights={},
        heads=HEADS // tp, kv_heads=KV // tp, chunks=2, ring=CHUNKS * CHUNK, eps=EPS, scale=QK_SCALE, rotate=rotate,
    )  # fmt: skip


@pytest.fixture(scope="module")
def module():
    """A sliding layer's attention, bf16 values in fp32."""
    from transformers import MuseSparkTextConfig

    config = MuseSparkTextConfig(
        hidden_size=512, num_attention_heads=HEADS, num_key_value_heads=KV, head_dim=64, sliding_window=WINDOW,
        num_hidden_layers=1, layer_types=["sliding_attention"], qk_scale_factor=QK_SCALE, rms_norm_eps=EPS,
        layer_rope_theta=[THETA], rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    made = modeling.MuseSparkTextAttention(config, 0).requires_grad_(False)
    for p in made.parameters():
        p.normal_(std=512**-0.5).copy_(p.bfloat16())
    return made


def step(context: int, parents: list[int]) -> dict[str, object]:
    t = len(parents)
    ancestors, depth = torch.eye(t, dtype=torch.bool), [0] * t
    for i, parent in enumerate(parents):
        if parent >= 0:
            ancestors[i] |= ancestors[parent]
            depth[i] = depth[parent] + 1
    return {"context": context, "positions": context + torch.tensor(depth), "ancestors": ancestors}


def chain(n: int) -> list[int]:
    return list(range(-1, n - 1))


def everything(env: dict[str, object]) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [n] and visibility [n, n] of a whole sequence that ends with the launch."""
    context, ancestors = env["context"], env["ancestors"]
    number = torch.arange(context + len(ancestors))
    positions = torch.cat([number[:context], env["positions"]])
    visible = (number <= number[:, None]) & (number + WINDOW > positions[:, None])
    visible[context:, context:] = ancestors
    return positions, visible


def ring(rows: torch.Tensor, context: int, t: int) -> torch.Tensor:
    """[heads, CHUNKS * CHUNK, 64] of rows [heads, context + t, 64]: what a token of the launch sees, NaN elsewhere."""
    cache = rows.new_full((rows.shape[0], CHUNKS, CHUNK, 64), torch.nan)
    number = torch.arange(max(0, context + 1 - WINDOW), context + t)
    cache[:, number // CHUNK % CHUNKS, number % CHUNK] = rows[:, number]
    return cache.flatten(1, 2)


def table() -> torch.Tensor:
    angle = torch.arange(POSITIONS)[:, None].float() * (1 / THETA ** (torch.arange(0, 64, 2) / 64))
    return torch.cat([angle.cos(), angle.sin()], 1)


def rotary(positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    cosine, sine = table()[positions].to(dtype).repeat(1, 1).chunk(2, dim=-1)
    return torch.cat([cosine, cosine], -1)[None], torch.cat([sine, sine], -1)[None]


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, bits: bool) -> None:
    assert got.dtype is dtype and got.shape == want.shape
    if bits:
        assert torch.equal(got, want)
    else:
        assert measure(got, want).worst_row < (1e-5 if dtype is torch.float32 else 1e-2)


# -- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parents", [chain(1), chain(16), TREE], ids=["one", "chain", "tree"])
@pytest.mark.parametrize("context", [0, 1, 63, 120, 127, 128, 129, 250, 300, 500])
def test_attention_is_eager_attention(module, context, parents, dtype):
    env = step(context, parents)
    t, n = len(parents), context + len(parents)
    g = torch.Generator().manual_seed(context)
    q = (torch.randn(HEADS, t, 64, generator=g) * QK_SCALE).to(dtype)
    k, v = torch.randn(2, KV, n, 64, generator=g).to(dtype)
    gate = torch.randn(t, HEADS * 64, generator=g).to(dtype) * 3
    _, visible = everything(env)
    mask = torch.zeros(t, n, dtype=dtype).masked_fill_(~visible[context:], torch.finfo(dtype).min)
    want, _ = modeling.eager_attention_forward(module, q[None], k[None], v[None], mask[None, None], 0.125)
    norm = modeling.MuseSparkRMSNorm(eps=EPS, with_scale=False)
    want = norm(want).reshape(t, -1) * torch.sigmoid(gate)
    env |= {
        "q": q.transpose(0, 1).flatten(1), "gate": gate, "k_cache": caches.keys(ring(k, context, t)),
        "v_cache": caches.values(ring(v, context, t)),
    }  # fmt: skip
    got = attention().reference(env, dtype)
    assert list(got) == ["out"]
    close(got["out"], want, dtype, bits=False)
    assert torch.equal(attention(tp=2).reference(env, dtype)["out"], got["out"])


def test_attention_ignores_what_it_does_not_see(module):
    """The first visible number matters, the one before does not, and siblings do not see each other."""
    env = step(200, [-1, -1, 0])
    g = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, KV, 203, 64, generator=g)
    env |= {"q": torch.randn(3, HEADS * 64, generator=g), "gate": torch.randn(3, HEADS * 64, generator=g)}

    def out(values: torch.Tensor) -> torch.Tensor:
        given = {"k_cache": caches.keys(ring(k, 200, 3)), "v_cache": caches.values(ring(values, 200, 3))}
        return attention().reference(env | given, torch.float32)["out"]

    clean = out(v)
    for number, moved in ((72, [False] * 3), (73, [True, True, False]), (74, [True] * 3), (200, [True, False, True])):
        other = v.clone()
        other[:, number] += 1
        assert [not torch.equal(a, b) for a, b in zip(out(other), clean, strict=True)] == moved, number


@pytest.mark.parametrize("made", [caches.keys, caches.values])
def test_slots_are_where_the_elements_are(made):
    """Of a ring of three chunks, numbers that have gone around it."""
    rows = torch.randn(KV, 3 * CHUNK, 64)
    numbers = torch.tensor([0, 7, 64 + 9, 5 * CHUNK + 63, 10_000])
    view, index = slots(made(rows), numbers)
    assert torch.equal(view[index].flatten(2), rows[:, numbers % (3 * CHUNK)].transpose(0, 1))
    assert torch.equal(held(made(rows), numbers), rows[:, numbers % (3 * CHUNK)])


# -- heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotate", [True, False], ids=["rope", "nope"])
def test_heads_are_normed_scaled_and_rotated(rotate, dtype):
    t = 16
    g = torch.Generator().manual_seed(1)
    linear = torch.randn(t, 2 * (HEADS + KV) * 64, generator=g) * torch.logspace(-3, 1, t)[:, None]
    positions = torch.randint(0, POSITIONS, (t,), generator=g)
    env = {"partials": linear, "rotary": table(), "positions": positions}
    got = heads(rotate).reference(env, dtype)

    q, k, v, gate = linear.to(dtype).split([n * 64 for n in (HEADS, KV, KV, HEADS)], dim=1)
    norm = modeling.MuseSparkRMSNorm(eps=EPS, with_scale=False)
    q, k = (x.view(1, t, -1, 64).transpose(1, 2) for x in (q, k))
    q, k = norm(q) * QK_SCALE, norm(k)
    if rotate:
        q, k = modeling.apply_rotary_pos_emb(q, k, *rotary(positions, dtype))
    want = {"q": q, "k_cache": k} | {"gate": gate[None, None], "v_cache": v[None, None]}
    assert got.keys() == want.keys()
    for name, value in want.items():
        rows = value[0].transpose(0, 1).flatten(1)
        # transformers takes a power where torch has a reciprocal square root: now and then another last bit
        assert (got[name] == rows).float().mean() > (0.5 if dtype is torch.float32 else 0.999), name
        close(got[name], rows, dtype, bits=name in ("gate", "v_cache"))
    for name, value in heads(rotate, tp=2).reference(env, dtype).items():
        assert torch.equal(value, got[name])


def test_the_cosines_are_transformers(module):
    positions = torch.randint(0, POSITIONS, (1, 9), generator=torch.Generator().manual_seed(3))
    made = modeling.MuseSparkTextRotaryEmbedding(module.config)(torch.zeros(1), positions)
    for ours, theirs in zip(rotary(positions[0], torch.float32), made, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)  # angles of up to a thousand, in fp32


# -- both ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("context", "parents"), [(0, chain(16)), (130, chain(5)), (300, TREE)])
def test_both_are_the_attention_module(module, context, parents, dtype):
    import copy

    env = step(context, parents)
    t, n = len(parents), context + len(parents)
    positions, visible = everything(env)
    made = copy.deepcopy(module).to(dtype)
    x = torch.randn(1, n, 512, generator=torch.Generator().manual_seed(context)).to(dtype)
    mask = torch.zeros(n, n, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
    want = made(x, rotary(positions, dtype), mask[None, None])[0][0, context:]

    weight = torch.cat([p.weight for p in (made.q_proj, made.k_proj, made.v_proj, made.gate_proj)])
    linear = torch.nn.functional.linear(x[0], weight).float()
    rows = heads().reference({"partials": linear, "rotary": table(), "positions": positions}, dtype)
    k, v = (rows[name].unflatten(1, (KV, 64)).transpose(0, 1) for name in ("k_cache", "v_cache"))
    env |= {
        "q": rows["q"][context:], "gate": rows["gate"][context:], "k_cache": caches.keys(ring(k, context, t)),
        "v_cache": caches.values(ring(v, context, t)),
    }  # fmt: skip
    close(made.o_proj(attention().reference(env, dtype)["out"]), want, dtype, bits=False)


def test_costs():
    c = attention(2).cost(Routing(tokens=16))
    keys = WINDOW + 15
    rows = 16 * (HEADS // 2)
    assert c.weight_bytes == 0
    assert c.activation_bytes == 2 * keys * (KV // 2) * 64 * 2 + 3 * rows * 64 * 2
    assert c.operations == 4 * rows * keys * 64
    assert heads().cost(Routing(tokens=3)).activation_bytes == 3 * (20 * 64 * (2 * 4 + 2) + 256)
    assert heads(False).cost(Routing(tokens=3)).activation_bytes == 3 * 20 * 64 * (2 * 4 + 2)
