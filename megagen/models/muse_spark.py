"""Muse Spark Open's layers as graphs, and what comes before and after them: one rank's share of a parallel group.

Dimensions and formulas follow the transformers implementation (``MuseSparkTextConfig``, ``MuseSparkMoE``,
``MuseSparkTextDecoderLayer``); the residual stream is kept in fp32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megagen.errors import ScheduleError, WeightError, here
from megagen.ir.graph import DType, Frozen, Graph, Op, Scope, Shard, Tensor, TensorKind, Weight
from megagen.ops.attention import CHUNK, Attention
from megagen.ops.choose import Choose, bests, vote
from megagen.ops.combine import Combine
from megagen.ops.dense_gemm import ROW_BLOCK, DenseGemm
from megagen.ops.embed import Embed
from megagen.ops.expert_gemm import ExpertGemm
from megagen.ops.global_attention import GlobalAttention, spans
from megagen.ops.qkv_heads import QkvHeads
from megagen.ops.rank_sum import GROUP, RankSum
from megagen.ops.residual import Residual
from megagen.ops.rms_norm import RmsNorm
from megagen.ops.row import PIECE
from megagen.ops.top_k import TopK

MAX_TOKENS = 16  # two n8 MMA tiles; the kernels' compiled maximum
ROW = 8 * 32 * 8  # a norm's row: eight warps of lanes with 16-byte vectors of bf16 (mem/row.cuh)
SLICE = 512  # of a ring stage's K: eight warps with a group of 64 each
HEAD_DIM = 64  # four row blocks of a GEMM, four steps of an MMA
UNIT = 1024  # K of a dense GEMM's stage: 32 KB of bf16
ROUTER_UNIT = 512  # the same in fp32
MOST_CHUNKS = 64  # of a sliding layer's cache: two a lane of the warp that merges them
CHECKPOINT = "a checkpoint is a folder in the Hugging Face layout"
POSITIONS = 16384  # that the table of rotations and a growing cache have by default
MOST_POSITIONS = 1 << 20
MOST_CACHE = 1 << 32  # bytes of a layer's keys, and of its values: who writes them counts in 32 bits
POSITION_STEP = 128  # a growing cache is read two chunks at a time
FOLLOWING = ("sliding", "global", "end")
MOST_VOCAB = 1 << 20


class MuseSparkConfig(Frozen):
    """The fields of the checkpoint's ``text_config`` that the kernels depend on, with its defaults."""

    hidden: int = 8192
    moe_hidden: int = 4096
    intermediate: int = 4096
    experts: int = 256
    top_k: int = 8
    layers: int = 62
    vocab: int = 202048
    heads: int = 128
    kv_heads: int = 16
    head_dim: int = HEAD_DIM
    window: int = 2048  # positions that a sliding layer's token sees, its own included
    qk_scale: float = 5.4730064863875
    rope_theta: float = 500000.0
    rms_norm_eps: float = 1e-5
    post_norm_eps: float = 1e-8
    output_multiplier: float = 0.1767766952966369
    softcap: float = 20.0  # of logits
    residual_gate_temperature: float = 0.3
    residual_gate_clamp: float = 1e-3
    routed_scaling_factor: float = 1.0
    router_eps: float = 1e-15


CONFIG_FIELDS = {
    "hidden": "hidden_size", "moe_hidden": "moe_hidden_size", "intermediate": "moe_intermediate_size",
    "experts": "num_local_experts", "top_k": "num_experts_per_tok", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    "vocab": "vocab_size", "softcap": "final_logit_softcapping", "window": "sliding_window",
    "qk_scale": "qk_scale_factor",
    "rms_norm_eps": "rms_norm_eps", "post_norm_eps": "post_norm_eps", "output_multiplier": "output_multiplier",
    "residual_gate_temperature": "residual_gate_temperature", "routed_scaling_factor": "routed_scaling_factor",
}  # fmt: skip


MODELS = ("muse_spark", "muse_spark_text")  # values of model_type
SLIDING, FULL = "sliding_attention", "full_attention"  # of layer_types
FIXED = {"hidden_act": "silu", "attention_bias": False, "rope_scaling": None}  # what is computed, whatever else is said


class LayerKind(NamedTuple):
    """What the checkpoint says of a layer: attention over a window, or over all; q and k rotated or not."""

    sliding: bool
    rotates: bool


class Launch(NamedTuple):
    """One launch of a decoding step: what ``schedule`` makes with ``options``.

    ``layer``: whose attention it begins with; -1 for the embedding, the number of layers for the logits.
    """

    schedule: str
    layer: int
    options: Mapping[str, str]


def launches(kinds: Sequence[LayerKind], experts: Sequence[str]) -> list[Launch]:
    """A step of a model with these layers, whose experts are in these formats.

    Raises WeightError for a layer that is neither rotated over a window nor unrotated over all.
    """
    names = []
    for layer, kind in enumerate(kinds):
        if kind.sliding is not kind.rotates:
            attends = "a window and does not rotate" if kind.sliding else "its whole context and rotates"
            raise WeightError(f"layer {layer} attends to {attends} q and k: no schedule does that")
        names.append("sliding" if kind.sliding else "global")
    following = [*names[1:], "end"]
    file = {"sliding": "muse_swa", "global": "muse_global"}
    return [
        Launch("muse_first", -1, {"following": names[0]}),
        *(
            Launch(file[name], i, {"experts": format, "following": after})
            for i, (name, format, after) in enumerate(zip(names, experts, following, strict=True))
        ),
        Launch("muse_last", len(names), {}),
    ]


def layer_kinds(checkpoint: Path) -> list[LayerKind]:
    """Of each layer, by ``layer_types`` and ``layer_rope_theta`` of config.json; where it has none, as transformers
    fills them in: counted from the last layer, every fourth attends to all and does not rotate.

    Raises WeightError for a missing or malformed file.
    """
    path = checkpoint / "config.json"
    text = _text_config(path)
    try:
        n = int(text.get("num_hidden_layers", MuseSparkConfig().layers))
        types = text.get("layer_types") or [FULL if (n - 1 - i) % 4 == 0 else SLIDING for i in range(n)]
        thetas = text.get("layer_rope_theta") or [0 if (n - 1 - i) % 4 == 0 else 1 for i in range(n)]
        if n < 1 or not n == len(types) == len(thetas):
            raise ValueError(f"{n} layers, but {len(types)} of layer_types and {len(thetas)} of layer_rope_theta")
        return [LayerKind(t == SLIDING, bool(theta)) for t, theta in zip(types, thetas, strict=True)]
    except (ValueError, TypeError) as error:
        raise WeightError(f"{path}: {error}", hint=CHECKPOINT) from None


def _text_config(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
        text = data.get("text_config", data)
        text.keys  # noqa: B018 - null or a number is no configuration
        _refuse_others(path, data, text)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise WeightError(f"{path}: {error}", hint=CHECKPOINT) from None
    found: Mapping[str, Any] = text
    return found


def _refuse_others(path: Path, data: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    """Raises WeightError where a configuration says something that would change the result, and nothing here reads."""
    found = [
        f"model_type is {d['model_type']!r}, not {' or '.join(MODELS)}"
        for d in (data, text)
        if d.get("model_type", MODELS[0]) not in MODELS
    ]
    found += [f"{k} is {text[k]!r}, not {v!r}" for k, v in FIXED.items() if text.get(k, v) != v]
    if dense := [i for i, kind in enumerate(text.get("mlp_layer_types") or ()) if kind != "sparse"]:
        found.append(f"layer {dense[0]} has no experts (mlp_layer_types)")
    if unknown := {t for t in text.get("layer_types") or () if t not in (SLIDING, FULL)}:
        found.append(f"layer_types has {', '.join(sorted(map(str, unknown)))}, not {SLIDING} or {FULL} alone")
    rope = text.get("rope_parameters") or {"rope_theta": MuseSparkConfig().rope_theta}
    kind, theta = rope.get("rope_type", rope.get("type", "default")), rope.get("rope_theta")
    if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        found.append(f"rope_parameters is {dict(rope)}, not a plain rotation of whole heads")
    thetas = {text.get("rope_theta") or theta, *(x for x in text.get("layer_rope_theta") or () if x), theta}
    if not theta or len(thetas) > 1:
        bases = ", ".join(str(x) for x in thetas)
        found.append(f"rope_parameters, rope_theta and layer_rope_theta have the bases {bases}, not one for all")
    if found:
        raise WeightError(
            f"{path} describes another model than the kernels compute: {found[0]}",
            hint="Muse Spark as released is supported, and other sizes of it",
            notes=tuple((x, None) for x in found[1:]),
        )


def read_config(checkpoint: Path) -> MuseSparkConfig:
    """The dimensions in ``checkpoint``'s config.json (its ``text_config`` if it has one; absent fields: defaults).

    Raises WeightError for a missing or malformed file.
    """
    path = checkpoint / "config.json"
    text = _text_config(path)
    try:
        found = {ours: text[theirs] for ours, theirs in CONFIG_FIELDS.items() if theirs in text}
        if rope := text.get("rope_parameters"):
            found["rope_theta"] = rope["rope_theta"]
        return MuseSparkConfig(**found)
    except (ValueError, AttributeError, TypeError) as error:
        raise WeightError(f"{path}: {error}", hint=CHECKPOINT) from None


def tiny(tp: int, split: str = "nn") -> MuseSparkConfig:
    """The least dimensions that the graphs here take at this ``tp`` and ``split``, for emulation.

    A rank has as many heads as at full size and tp=8, and the window is two chunks long. Its share of the vocabulary
    needs padding, with which it makes two and a half of the groups that are chosen from.
    """
    share = tp if split == "nk" else 1  # of the second expert GEMM's K, whose shards are whole slices too
    slices = max(1, -(-16 * (tp - 1) * tp // (SLICE * share)))  # of the least shard that stand-ins can rotate
    return MuseSparkConfig(
        hidden=ROW, moe_hidden=ROW, intermediate=SLICE * share * slices, experts=16,
        heads=16 * tp, kv_heads=2 * tp, window=2 * CHUNK, vocab=152 * tp,
    )  # fmt: skip


def cache_chunks(window: int) -> int:
    """Chunks of a sliding layer's cache: what the tokens of a launch see touches at most so many."""
    return (window + MAX_TOKENS - 2) // CHUNK + 2


def expert_block(
    tp: int = 8,
    tokens: int = MAX_TOKENS,
    *,
    split: str = "nn",
    experts: str = "nvfp4",
    config: MuseSparkConfig | None = None,
) -> Graph:
    """Pre-FFN norm to residual gate: the expert half of a layer.

    ``split`` "nn" cuts both expert GEMMs on N with an all-gather after each; "nk" cuts the second on K and sums
    the ranks' per-slot outputs in rank order before the per-expert norm. Raises ScheduleError for a ``tp`` that
    is not 1, 2, 4 or 8, for ``tokens`` outside 1 to 16, and for dimensions that the kernels or layouts cannot hold.
    """
    c = MuseSparkConfig() if config is None else config
    _refuse_unfit(c, tp, tokens, split, experts)
    b = _Builder(c, tp, tokens, split, experts)
    stream = b.tensor("stream", tokens, c.hidden, dtype=DType.FP32, kind=TensorKind.INPUT)
    normed = b.tensor("normed", tokens, c.hidden)
    norm = RmsNorm(
        name="pre_ffn_norm", inputs={"in": stream}, outputs={"out": normed},
        weights={"gain": b.vector("pre_ffn_gain", c.hidden, "pre_feedforward_layernorm.weight")},
        width=c.hidden, eps=c.rms_norm_eps, in_dtype=DType.FP32,
    )  # fmt: skip
    ops = (norm, *b.experts(normed), b.end(stream))
    return b.graph(f"muse_spark.expert_block.{split}", "block.moe", ops)


def sliding_layer(
    tp: int = 8,
    tokens: int = MAX_TOKENS,
    *,
    split: str = "nn",
    experts: str = "nvfp4",
    all_reduce: str = "one_shot",
    following: str = "sliding",
    positions: int = POSITIONS,
    config: MuseSparkConfig | None = None,
) -> Graph:
    """A sliding-window layer from its attention to the next layer's q, k, v, gate projection and KV write.

    Inputs: the residual stream, what the launch before left (``q``, ``gate`` and the layer's caches, which already hold
    this launch's tokens), and ``rotary`` fp32 [positions, 64], cosines then sines of every position. Outputs: the
    stream, ``next_q`` and ``next_gate``, and the next layer's caches with this launch's tokens written. A cache is a
    ring: number n stands in chunk (n / 64) mod chunks; chunks are in the order of :func:`megagen.ops.attention.slots`.
    ``all_reduce``: of o_proj's contributions. "one_shot": every rank gets all of them and adds. "two_shot": every rank
    adds a slice of the row and sends it to all, rounded to bf16 once more.
    ``following``: what the next layer is. "sliding": q and k are rotated and its cache is such a ring. "global": they
    are not, there is no ``rotary``, and its cache grows. "end": there is none, and the launch ends with the stream.
    ``positions``: rows of ``rotary``, and what a growing cache holds.
    ``split``, ``experts`` and errors: see :func:`expert_block`.
    """
    return _layer("sliding", tp, tokens, split, experts, all_reduce, following, positions, config)


def global_layer(
    tp: int = 8,
    tokens: int = MAX_TOKENS,
    *,
    split: str = "nn",
    experts: str = "nvfp4",
    all_reduce: str = "one_shot",
    following: str = "sliding",
    positions: int = POSITIONS,
    config: MuseSparkConfig | None = None,
) -> Graph:
    """A layer that attends to its whole context, from its attention on: :func:`sliding_layer` but for its caches.

    They grow: number n stands in chunk n / 64, and there is room for ``positions``, a multiple of 128.
    """
    return _layer("global", tp, tokens, split, experts, all_reduce, following, positions, config)


def paired(stage: int, k: int) -> int:
    """K of a unit of the router: two stages, unless they would span all ``k``. They are one of the pooler's, so that a
    block reads the same of their input for both, once."""
    return 2 * stage if k % (2 * stage) == 0 and k > 2 * stage else stage


def _layer(
    kind: str,
    tp: int,
    tokens: int,
    split: str,
    experts: str,
    all_reduce: str,
    following: str,
    positions: int,
    config: MuseSparkConfig | None,
) -> Graph:
    c = MuseSparkConfig() if config is None else config
    _refuse_unfit(c, tp, tokens, split, experts)
    _refuse_unfit_attention(c, tp, positions, all_reduce, kind, following)
    two_shot = all_reduce == "two_shot"
    b = _Builder(c, tp, tokens, split, experts)
    h, t = c.hidden, tokens
    heads, kv_heads = c.heads // tp, c.kv_heads // tp
    width = heads * HEAD_DIM
    given = TensorKind.INPUT

    stream = b.tensor("stream", t, h, dtype=DType.FP32, kind=given)
    q = b.tensor("q", t, width, kind=given, shard_axis=1)
    gate = b.tensor("gate", t, width, kind=given, shard_axis=1)
    keys, values, chunks = b.caches(kind, positions, "k_cache", "v_cache", given)
    parts = chunks if kind == "sliding" else spans(positions)
    attention_partials = b.tensor("attention_partials", parts, heads, t, HEAD_DIM + 4, dtype=DType.FP32)
    attended = b.tensor("attended", t, width)
    ports = {"q": q, "gate": gate, "keys": keys, "values": values}
    outcome = {"partials": attention_partials, "out": attended}
    scale, eps = HEAD_DIM**-0.5, c.rms_norm_eps
    attend: Op
    if kind == "sliding":
        attend = Attention(
            name="attention", inputs=ports, outputs=outcome, weights={}, heads=heads, kv_heads=kv_heads,
            chunks=chunks, window=c.window, scale=scale, eps=eps,
        )  # fmt: skip
    else:
        attend = GlobalAttention(
            name="attention", inputs=ports, outputs=outcome, weights={}, heads=heads, kv_heads=kv_heads,
            capacity=positions, scale=scale, eps=eps,
        )  # fmt: skip
    unit = min(UNIT, width)
    if unit < width:
        o_partials = b.tensor("o_partials", width // unit, h // 16, t, 16, dtype=DType.FP32)
    projected = b.tensor(
        "projected", tp, t, h // tp if two_shot else h, scope=Scope.WORLD, reduce=True, scatter=two_shot
    )
    summed = b.tensor("summed", t, h, scope=Scope.WORLD, shard_axis=1) if two_shot else projected
    middle = b.tensor("middle", t, h, dtype=DType.FP32)
    normed = b.tensor("normed", t, h)
    attention = (
        attend,
        DenseGemm(
            name="o_proj", inputs={"in": attended},
            outputs={"partials": o_partials, "out": projected} if unit < width else {"out": projected},
            weights={
                "weight": b.matrix("o_proj_weight", h, width, "self_attn.o_proj.weight", shard=Shard.K, local=True,
                                   scattered=two_shot)
            },
            rows=h, world_rows=h, k=width, unit_k=unit,
        ),
        *(
            [RankSum(name="all_reduce", inputs={"in": projected}, outputs={"out": summed}, weights={}, width=h // tp,
                     parts=tp)]
            if two_shot else []
        ),
        Residual(
            name="post_attention", inputs={"in": summed, "stream": stream},
            outputs={"moments": b.moments("middle_moments", h), "out": middle, "normed": normed},
            weights={
                "gate": b.gate("attention_gate", "post_attention_residual_gate.gate"),
                "next_gain": b.vector("pre_ffn_gain", h, "pre_feedforward_layernorm.weight"),
            },
            width=h, eps=c.post_norm_eps, temperature=c.residual_gate_temperature, clamp=c.residual_gate_clamp,
            parts=1 if two_shot else tp, next_eps=c.rms_norm_eps,
        ),
    )  # fmt: skip
    moe = b.experts(normed)

    name = [
        f"muse_spark.{kind}_layer",
        split,
        *["two_shot"] * two_shot,
        *[f"then_{following}"] * (following != "sliding"),
    ]
    if following == "end":
        return b.graph(".".join(name), f"layer.{kind}", (*attention, *moe, b.end(middle)))
    end = b.end(middle, normed=b.tensor("next_normed", t, h))
    projection = b.projection("next_normed", following, positions)
    return b.graph(".".join(name), f"layer.{kind}", (*attention, *moe, end, *projection))


def first(
    tp: int = 8,
    tokens: int = MAX_TOKENS,
    *,
    positions: int = POSITIONS,
    following: str = "sliding",
    config: MuseSparkConfig | None = None,
) -> Graph:
    """What comes before the first layer's attention: the embedding, the stream that it makes, and that layer's q, k, v,
    gate projection and KV write.

    Input ``ids`` u32 [tokens], below the vocabulary's size: others take its last row. Outputs and state are named as a
    layer's. ``following`` is the first layer's kind; ``positions`` and errors: see :func:`sliding_layer`.
    """
    c = MuseSparkConfig() if config is None else config
    _refuse_unfit(c, tp, tokens, "nn", "nvfp4")
    _refuse_unfit_attention(c, tp, positions, "one_shot", "sliding", following)
    _refuse_unfit_ends(c, tp, following)
    b = _Builder(c, tp, tokens, "nn", "nvfp4")
    normed = b.tensor("next_normed", tokens, c.hidden)
    embed = Embed(
        name="embed", inputs={"ids": b.tensor("ids", tokens, dtype=DType.U32, kind=TensorKind.INPUT)},
        outputs={"out": b.stream_out(), "normed": normed},
        weights={
            "table": b.matrix("embed_table", c.vocab, c.hidden, "model.language_model.embed_tokens.weight", top=True),
            "next_gain": b.next_gain(),
        },
        vocab=c.vocab, width=c.hidden, eps=c.rms_norm_eps,
    )  # fmt: skip
    name = ".".join(("muse_spark.first", *[f"then_{following}"] * (following != "sliding")))
    return b.graph(name, "step.first", (embed, *b.projection(normed, following, positions)))


def last(tp: int = 8, tokens: int = MAX_TOKENS, *, config: MuseSparkConfig | None = None) -> Graph:
    """What comes after the last layer: the final norm, the head, and each token's successor.

    Input: the residual stream. Outputs: ``logits`` fp32 [tokens, rows of a rank], the last of which belong to no token
    where the vocabulary does not divide into row blocks and are minus infinity, and ``next_ids`` u32 [tokens], the same
    on all ranks: the token of the largest logit, in ties the lowest. Errors: see :func:`expert_block`.
    """
    c = MuseSparkConfig() if config is None else config
    _refuse_unfit(c, tp, tokens, "nn", "nvfp4")
    _refuse_unfit_ends(c, tp)
    b = _Builder(c, tp, tokens, "nn", "nvfp4")
    h, t, made = c.hidden, tokens, TensorKind.OUTPUT
    share = c.vocab // tp
    padding = -share % ROW_BLOCK
    rows = share + padding
    stream = b.tensor("stream", t, h, dtype=DType.FP32, kind=TensorKind.INPUT)
    normed = b.tensor("final_normed", t, h)
    partials = b.tensor("head_partials", h // UNIT, rows // ROW_BLOCK, t, ROW_BLOCK, dtype=DType.FP32)
    logits = b.tensor("logits", t, rows, dtype=DType.FP32, kind=made, shard_axis=1)
    best = b.tensor("bests", t, bests(rows), dtype=DType.U32)
    votes = b.tensor("votes", t, tp * vote(tp), dtype=DType.U32, scope=Scope.WORLD, shard_axis=1)
    ids = b.tensor("next_ids", t, dtype=DType.U32, kind=made)
    ops = (
        RmsNorm(
            name="final_norm", inputs={"in": stream}, outputs={"out": normed},
            weights={"gain": b.vector("final_gain", h, "model.language_model.norm.weight", top=True)},
            width=h, eps=c.rms_norm_eps, in_dtype=DType.FP32, centred=False, round_input=True,
        ),
        DenseGemm(
            name="lm_head", inputs={"in": normed}, outputs={"partials": partials},
            weights={
                "weight": b.matrix("lm_head_weight", rows, h, "lm_head.weight", shard=Shard.ROWS, top=True, local=True,
                                   padding=padding)
            },
            rows=rows, world_rows=rows * tp, k=h, unit_k=UNIT, partials_only=True,
        ),
        Choose(
            name="choose", inputs={"partials": partials}, weights={},
            outputs={"logits": logits, "bests": best, "votes": votes, "ids": ids},
            rows=rows, padding=padding, chunks=h // UNIT, parts=tp, multiplier=c.output_multiplier, cap=c.softcap,
        ),
    )  # fmt: skip
    return b.graph("muse_spark.last", "step.last", ops)


class _Builder:
    """What the graphs share: tensors and weights as they are named, and the expert block in the middle."""

    def __init__(self, config: MuseSparkConfig, tp: int, tokens: int, split: str, experts: str) -> None:
        self.c, self.tp, self.tokens, self.split = config, tp, tokens, split
        self.expert_dtype = DType(experts)
        self.tensors: list[Tensor] = []

    def tensor(self, name: str, *shape: int, dtype: DType = DType.BF16, **more: object) -> str:
        self.tensors.append(Tensor(name=name, shape=shape, dtype=dtype, **more))
        return name

    def vector(self, name: str, size: int, checkpoint: str, dtype: DType = DType.BF16, **more: object) -> Weight:
        return Weight(name=name, rows=size, k=1, dtype=dtype, names=(checkpoint,), **more)

    def matrix(
        self, name: str, rows: int, k: int, checkpoint: str, dtype: DType = DType.BF16, **more: object
    ) -> Weight:
        return Weight(name=name, rows=rows, k=k, dtype=dtype, names=(checkpoint,), **more)

    def gate(self, name: str, checkpoint: str) -> Weight:
        return self.vector(name, self.c.hidden, checkpoint, DType.FP32, planes=2)

    def moments(self, name: str, width: int, sums: int = 4) -> str:
        """What a norm adds up over a row, a piece of it at a time."""
        return self.tensor(name, self.tokens, width // PIECE, sums, dtype=DType.FP32)

    def stream_out(self) -> str:
        return self.tensor("stream_out", self.tokens, self.c.hidden, dtype=DType.FP32, kind=TensorKind.OUTPUT)

    def next_gain(self) -> Weight:
        """Of the next layer's input norm."""
        return self.vector("next_gain", self.c.hidden, "input_layernorm.weight", next_layer=True)

    def caches(self, kind: str, positions: int, keys: str, values: str, what: TensorKind) -> tuple[str, str, int]:
        """A layer's caches, by the layer's kind, and how many chunks they have."""
        kv_heads = self.c.kv_heads // self.tp
        chunks = cache_chunks(self.c.window) if kind == "sliding" else positions // CHUNK
        self.tensor(keys, kv_heads, chunks * CHUNK, HEAD_DIM, kind=what, shard_axis=0)
        self.tensor(values, kv_heads, chunks, HEAD_DIM, CHUNK, kind=what, shard_axis=0)
        return keys, values, chunks

    def projection(self, normed: str, kind: str, positions: int) -> tuple[Op, ...]:
        """The q, k, v and gate of the next layer, which is of that ``kind``, and the write to its caches."""
        c, t, h = self.c, self.tokens, self.c.hidden
        heads, kv_heads = c.heads // self.tp, c.kv_heads // self.tp
        width, kv_width, rotates = heads * HEAD_DIM, kv_heads * HEAD_DIM, kind == "sliding"
        rows = 2 * width + 2 * kv_width
        inputs = {"partials": self.tensor("next_partials", h // UNIT, rows // 16, t, 16, dtype=DType.FP32)}
        if rotates:
            inputs["rotary"] = self.tensor("rotary", positions, HEAD_DIM, dtype=DType.FP32, kind=TensorKind.INPUT)
        q, gate = (
            self.tensor(name, t, width, kind=TensorKind.OUTPUT, shard_axis=1) for name in ("next_q", "next_gate")
        )
        keys, values, chunks = self.caches(kind, positions, "next_k_cache", "next_v_cache", TensorKind.STATE)
        names = tuple(f"self_attn.{x}_proj.weight" for x in ("q", "k", "v", "gate"))
        return (
            DenseGemm(
                name="next_qkvg", inputs={"in": normed}, outputs={"partials": inputs["partials"]},
                weights={
                    "weight": Weight(
                        name="next_qkvg_weight", rows=rows, k=h, dtype=DType.BF16, names=names, shard=Shard.ROWS,
                        parts=(width, kv_width, kv_width, width), local=True, next_layer=True,
                    )
                },
                rows=rows, world_rows=rows * self.tp, k=h, unit_k=UNIT, partials_only=True,
            ),
            QkvHeads(
                name="next_heads", inputs=inputs, weights={},
                outputs={"q": q, "gate": gate, "keys": keys, "values": values},
                heads=heads, kv_heads=kv_heads, chunks=h // UNIT, ring=chunks * CHUNK,
                eps=c.rms_norm_eps, scale=c.qk_scale, rotate=rotates,
            ),
        )  # fmt: skip

    def graph(self, name: str, figure: str, ops: tuple[Op, ...]) -> Graph:
        for op in ops:
            _refuse_unstreamable(op)
        used = {x for op in ops for x in (*op.inputs.values(), *op.outputs.values())}
        return Graph(
            name=name, tp=self.tp, tokens=self.tokens, ops=ops,
            tensors={x.name: x for x in self.tensors if x.name in used},
            attributes={
                "split": self.split, "experts": self.expert_dtype.value, "config": self.c, "figure": figure,
            },
        )  # fmt: skip

    def experts(self, normed: str) -> tuple[Op, ...]:
        """Router to unpooler; its output is called "unpooled"."""
        c, tp, t, split = self.c, self.tp, self.tokens, self.split
        h, m, i = c.hidden, c.moe_hidden, c.intermediate
        logits = self.tensor("logits", h // paired(ROUTER_UNIT, h), c.experts // 16, t, 16, dtype=DType.FP32)
        routes = self.tensor("routes", t, 2 * c.top_k, dtype=DType.U32)
        table = self.tensor("table", 1, dtype=DType.U32, scope=Scope.BLOCK)
        pooled_partials = self.tensor("pooled_partials", h // UNIT, m // tp // 16, t, 16, dtype=DType.FP32)
        pooled = self.tensor("pooled", t, m, scope=Scope.WORLD, shard_axis=1)
        expert_in = self.tensor("expert_in", t, m)
        if split == "nn":
            expert_mid = self.tensor("expert_mid", t, c.top_k, i, scope=Scope.WORLD, shard_axis=2)
            expert_out = self.tensor("expert_out", t, c.top_k, m, scope=Scope.WORLD, shard_axis=2)
        else:
            expert_mid = self.tensor("expert_mid", t, c.top_k, i // tp)
            expert_out = self.tensor("expert_out", tp, t, c.top_k, m, scope=Scope.WORLD, reduce=True)
        slot_moments = self.moments("slot_moments", m, c.top_k)
        combined = self.tensor("combined", t, m)
        unpooled_partials = self.tensor("unpooled_partials", m // UNIT, h // tp // 16, t, 16, dtype=DType.FP32)
        unpooled = self.tensor("unpooled", t, h, scope=Scope.WORLD, shard_axis=1)

        down_rows, down_k = (m // tp, i) if split == "nn" else (m, i // tp)
        gate_up_weight = self.matrix(
            "gate_up_weight", 2 * i // tp, m, "mlp.experts.gate_up_proj", self.expert_dtype,
            shard=Shard.ROWS, experts=c.experts, gate_up=True,
        )  # fmt: skip
        down_weight = self.matrix(
            "down_weight", down_rows, down_k, "mlp.experts.down_proj", self.expert_dtype,
            shard=Shard.ROWS if split == "nn" else Shard.K, experts=c.experts,
        )  # fmt: skip

        def expert_stage(k: int) -> dict[str, int]:
            """A ring stage of about 32,768 weights' worth: full K when it fits, several row blocks when K is short."""
            if self.expert_dtype is DType.NVFP4:
                return {"stage_k": min(k, 4096), "stage_rows": 16 * max(1, 4096 // k)}
            return {"stage_k": min(k, 1024), "stage_rows": 16 * max(1, 1024 // k)}

        return (
            DenseGemm(
                name="router", inputs={"in": normed}, outputs={"partials": logits},
                weights={"weight": self.matrix("router_weight", c.experts, h, "mlp.gate.weight", DType.FP32)},
                rows=c.experts, world_rows=c.experts, k=h, unit_k=paired(ROUTER_UNIT, h), stage_k=ROUTER_UNIT,
                partials_only=True,
            ),
            DenseGemm(
                name="pooler", inputs={"in": normed}, outputs={"partials": pooled_partials, "out": pooled},
                weights={
                    "weight": self.matrix("pooler_weight", m // tp, h, "mlp.pre_expert_proj.weight", shard=Shard.ROWS)
                },
                rows=m // tp, world_rows=m, k=h, unit_k=UNIT,
            ),
            TopK(
                name="top_k", inputs={"logits": logits}, outputs={"routes": routes, "table": table},
                weights={"bias": self.vector("router_bias", c.experts, "mlp.gate.e_score_correction_bias", DType.FP32)},
                experts=c.experts, k=c.top_k, chunks=h // paired(ROUTER_UNIT, h),
                multiplier=c.output_multiplier, eps=c.router_eps, scale=c.routed_scaling_factor,
            ),
            RmsNorm(
                name="pre_expert_norm", inputs={"in": pooled}, outputs={"out": expert_in},
                weights={"gain": self.vector("pre_expert_gain", m, "mlp.pre_expert_norm.weight")},
                width=m, eps=c.rms_norm_eps, in_dtype=DType.BF16,
            ),
            ExpertGemm(
                name="gate_up", inputs={"in": expert_in, "table": table}, outputs={"out": expert_mid},
                weights={"weight": gate_up_weight},
                rows=2 * i // tp, k=m, columns=i if split == "nn" else i // tp, top_k=c.top_k,
                swiglu=True, per_slot=False, **expert_stage(m),
            ),
            ExpertGemm(
                name="down", inputs={"in": expert_mid, "table": table}, outputs={"out": expert_out},
                weights={"weight": down_weight},
                rows=down_rows, k=down_k, columns=m, top_k=c.top_k,
                swiglu=False, per_slot=True, reduce=split == "nk", **expert_stage(down_k),
            ),
            Combine(
                name="combine", inputs={"in": expert_out, "routes": routes, "table": table},
                outputs={"moments": slot_moments, "out": combined},
                weights={"gain": self.vector("post_expert_gain", m, "mlp.experts.post_expert_norm.weight")},
                width=m, top_k=c.top_k, eps=c.post_norm_eps, parts=tp if split == "nk" else 1,
            ),
            DenseGemm(
                name="unpooler", inputs={"in": combined}, outputs={"partials": unpooled_partials, "out": unpooled},
                weights={
                    "weight": self.matrix(
                        "unpooler_weight", h // tp, m, "mlp.post_expert_proj.weight", shard=Shard.ROWS
                    )
                },
                rows=h // tp, world_rows=h, k=m, unit_k=UNIT,
            ),
        )  # fmt: skip

    def end(self, stream: str, normed: str | None = None) -> Residual:
        """The layer's last op, and with ``normed`` the next layer's input norm."""
        c = self.c
        weights = {
            "gain": self.vector("post_ffn_gain", c.hidden, "post_feedforward_layernorm.weight"),
            "gate": self.gate("residual_gate", "post_feedforward_residual_gate.gate"),
        }
        outputs = {"moments": self.moments("moments", c.hidden), "out": self.stream_out()}
        if normed is not None:
            weights["next_gain"] = self.next_gain()
            outputs["normed"] = normed
        return Residual(
            name="residual", inputs={"in": "unpooled", "stream": stream}, outputs=outputs, weights=weights,
            width=c.hidden, eps=c.post_norm_eps, temperature=c.residual_gate_temperature, clamp=c.residual_gate_clamp,
            next_eps=0.0 if normed is None else c.rms_norm_eps,
        )  # fmt: skip


def _refuse_unfit(c: MuseSparkConfig, tp: int, tokens: int, split: str, experts: str) -> None:
    def refuse(wrong: bool, message: str, hint: str | None = None) -> None:
        if wrong:
            raise ScheduleError(message, loc=here(), hint=hint)

    refuse(type(tp) is not int or type(tokens) is not int, f"tp={tp!r}, tokens={tokens!r}: not whole numbers")
    refuse(
        not isinstance(c, MuseSparkConfig),
        f"config is of type {type(c).__name__}",
        "config is a MuseSparkConfig or None",
    )
    refuse(tp not in (1, 2, 4, 8), f"tp={tp}: tensor parallelism over {tp} ranks is not supported", "use 1, 2, 4 or 8")
    refuse(not 1 <= tokens <= MAX_TOKENS, f"tokens={tokens}: a launch takes 1 to {MAX_TOKENS} tokens")
    refuse(split not in ("nn", "nk"), f"split={split!r}", 'split is "nn" or "nk"')
    refuse(experts not in ("nvfp4", "bf16"), f"experts={experts!r}", 'experts are "nvfp4" or "bf16"')
    for name, size in (("hidden", c.hidden), ("moe_hidden", c.moe_hidden), ("intermediate", c.intermediate)):
        refuse(
            size < 1 or size % (16 * tp) != 0, f"{name}={size} does not divide into {tp} shards of whole 16-row blocks"
        )
        least = 16 * (tp - 1)
        refuse(size // tp < least, f"{name}={size} makes shards of less than {least}: stand-in ranks rotate that far")
    for name, size in (("hidden", c.hidden), ("moe_hidden", c.moe_hidden)):
        refuse(
            size % ROW != 0,
            f"{name}={size} is no multiple of {ROW}: a norm's warps take {ROW} elements of a row at once",
        )
    refuse(c.experts % 16 != 0 or not 16 <= c.experts <= 256, f"experts={c.experts}: a multiple of 16, at most 256")
    refuse(c.top_k != 8, f"top_k={c.top_k}: the routing tables hold 8 experts a token")


def _refuse_unfit_attention(
    c: MuseSparkConfig, tp: int, positions: int, all_reduce: str, kind: str, following: str
) -> None:
    def refuse(wrong: bool, message: str, hint: str | None = None) -> None:
        if wrong:
            raise ScheduleError(message, loc=here(), hint=hint)

    two = all_reduce == "two_shot"
    refuse(not two and all_reduce != "one_shot", f"all_reduce={all_reduce!r}", 'all_reduce is "one_shot" or "two_shot"')
    refuse(two and tp == 1, "a two-shot all-reduce of one rank", 'all_reduce="one_shot"')
    refuse(two and c.hidden % (tp * GROUP) != 0, f"hidden={c.hidden} gives no whole groups of {GROUP} to {tp} ranks")
    refuse(c.head_dim != HEAD_DIM, f"head_dim={c.head_dim}: the kernels have heads of {HEAD_DIM}")
    for name, n in (("heads", c.heads), ("kv_heads", c.kv_heads)):
        refuse(n < 1 or n % tp != 0, f"{name}={n} cannot be dealt to {tp} ranks", "a tp that divides it")
    refuse(c.heads % c.kv_heads != 0, f"heads={c.heads} do not share kv_heads={c.kv_heads} evenly")
    width = c.heads // tp * HEAD_DIM
    refuse(
        width % min(UNIT, max(width, SLICE)) != 0 or width % SLICE != 0,
        f"heads={c.heads} give a rank {width} elements for o_proj, which are no whole units",
        f"they must make {SLICE} or a multiple of {UNIT}",
    )
    refuse(c.window < MAX_TOKENS, f"window={c.window}: a launch's tokens must see each other, so at least {MAX_TOKENS}")
    most = (MOST_CHUNKS - 1) * CHUNK - MAX_TOKENS + 1
    refuse(c.window > most, f"window={c.window}: at most {most} positions")
    refuse(following not in FOLLOWING, f"following={following!r}", f"following is one of {', '.join(FOLLOWING)}")
    refuse(type(positions) is not int or positions < 1, f"positions={positions!r}: the table of rotations has some")
    refuse(
        "global" in (kind, following) and (positions % POSITION_STEP != 0 or positions > MOST_POSITIONS),
        f"positions={positions}: a growing cache holds a multiple of {POSITION_STEP}, at most {MOST_POSITIONS:,}",
        f"use {min(MOST_POSITIONS, -(-positions // POSITION_STEP) * POSITION_STEP)}",
    )
    size = c.kv_heads // tp * positions * HEAD_DIM * 2
    refuse(
        "global" in (kind, following) and size > MOST_CACHE,
        f"positions={positions}: keys of {c.kv_heads // tp} heads take {size:,} bytes, of which {MOST_CACHE:,} count",
        f"use {MOST_CACHE // (size // positions) // POSITION_STEP * POSITION_STEP}, or a larger tp",
    )


def _refuse_unfit_ends(c: MuseSparkConfig, tp: int, following: str = "sliding") -> None:
    def refuse(wrong: bool, message: str, hint: str | None = None) -> None:
        if wrong:
            raise ScheduleError(message, loc=here(), hint=hint)

    refuse(c.vocab < 1 or c.vocab % tp != 0, f"vocab={c.vocab} cannot be dealt to {tp} ranks", "a tp that divides it")
    refuse(c.vocab > MOST_VOCAB, f"vocab={c.vocab}: at most {MOST_VOCAB:,}")
    refuse(not c.softcap > 0, f"softcap={c.softcap}: logits are between its negative and itself")
    refuse(following == "end", "following='end': a step's first launch is followed by a layer")


def _refuse_unstreamable(op: Op) -> None:
    """A stage is whole 16-row blocks by eight slices of K in groups of 64, for NVFP4 one group or an even number."""
    stage = op.stage()
    if stage is None or "weight" not in op.weights:
        return
    w, rows, k = op.weights["weight"], stage["rows"], stage["k"]
    groups = k // SLICE
    if w.rows % rows or w.k % k or k % SLICE or (w.dtype is DType.NVFP4 and groups % 2 and groups > 1):
        raise ScheduleError(
            f"{w.name}: {w.rows} x {w.k} {w.dtype.value} a rank does not divide into ring stages of {rows} x {k}",
            loc=here(),
            hint="K of a rank must be a multiple of 512, for NVFP4 512 or a multiple of 1024, and fill whole stages",
        )
