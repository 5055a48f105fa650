"""Packed weights on disk: what is in them, and what interruptions, damage, neighbours and full disks do to them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import draw, small_model

from megagen.dsl import load
from megagen.errors import WeightError
from megagen.ir.graph import DType, Graph, Weight
from megagen.ir.names import Names
from megagen.lower import lower
from megagen.models.muse_spark import MuseSparkConfig, expert_block, first, last, sliding_layer
from megagen.ops.dense_gemm import DenseGemm
from megagen.ops.packing import Nvfp4, Tiles, pack_dense, pack_nvfp4, pack_weight, stages, unpack
from megagen.ops.rms_norm import RmsNorm
from megagen.resources import schedules
from megagen.runtime.params import expected
from megagen.weights import fast, packed
from megagen.weights.checkpoint import Checkpoint, load_layer, load_reference
from megagen.weights.packed import Part, pack
from megagen.weights.random import random_layer

pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file

CONFIG = MuseSparkConfig(
    hidden=2048, moe_hidden=2048, intermediate=512, experts=16, layers=2, heads=16, kv_heads=2, window=128, vocab=64
)
NVFP4 = CONFIG.model_copy(update={"intermediate": 1024})
WHOLE = "model.language_model."
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model_parts(tp):
    """Every launch of a step of the two layers."""
    layer = {"tp": tp, "experts": "bf16", "config": CONFIG}
    graphs = (
        first(tp, config=CONFIG),
        sliding_layer(**layer),
        sliding_layer(**layer, following="end"),
        last(tp, config=CONFIG),
    )
    return [Part(i - 1, graph) for i, graph in enumerate(graphs)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(directory, the model's state): 350 MB in bf16, in shards, written by save_pretrained."""
    model = small_model(CONFIG, sliding=True)
    torch.manual_seed(1)
    draw(model)
    torch.nn.init.normal_(model.lm_head.weight)
    directory = tmp_path_factory.mktemp("bf16")
    model.save_pretrained(directory, max_shard_size="70MB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory, model.state_dict()


def same(got, want):
    assert {n: (x.dtype, x.shape) for n, x in got.items()} == {n: (x.dtype, x.shape) for n, x in want.items()}
    assert all(torch.equal(got[n], want[n]) for n in want)


def left(folder):
    """Files below a folder but locks, as (name, inode, time of change)."""
    found = [p for p in Path(folder).rglob("*") if p.is_file() and p.suffix != ".lock"]
    return sorted((p.name, p.stat().st_ino, p.stat().st_mtime_ns) for p in found)


# --- what is in them ---


def test_a_step_of_a_transformers_model(saved, tmp_path):
    """As load_layer gives it, which test_weights.py compares with the model; safetensors reads the files too."""
    from rich.progress import Progress

    parts = model_parts(2)
    with Progress(disable=True) as progress:
        done = pack(saved[0], parts, rank=1, folder=tmp_path, progress=progress)
    (task,) = progress.tasks
    assert task.finished
    assert task.completed == task.total == done.bytes == sum(f.path.stat().st_size for f in done.files)
    for i, part in enumerate(parts):
        want = load_layer(saved[0], part.layer, part.graph, 1)
        same(done.load(i), want)
        same(load_file(done.files[i].path), want)
    before = left(tmp_path)
    with Progress(disable=True) as progress:
        assert pack(saved[0], parts, rank=1, folder=tmp_path, progress=progress).files == done.files
    assert progress.tasks[0].finished
    assert left(tmp_path) == before


def test_the_embedding_is_whole_and_as_it_is_on_every_rank(saved, tmp_path):
    state = saved[1]
    for rank in range(2):
        got = pack(saved[0], model_parts(2)[:1], rank=rank, folder=tmp_path).load(0)
        assert torch.equal(got["embed_table"], state[f"{WHOLE}embed_tokens.weight"])


@pytest.mark.parametrize("tp", [1, 8])
def test_rows_of_the_head_are_dealt_and_filled_up_with_zeros(saved, tmp_path, tp):
    """Of 64 rows to eight ranks: eight each, and as many zeros to make a row block."""
    part, head = Part(2, last(tp, config=NVFP4)), saved[1]["lm_head.weight"]
    w = part.graph.weights()["lm_head_weight"]
    assert (w.rows, w.padding) == ((64, 0) if tp == 1 else (16, 8))
    for rank in {0, tp - 1}:
        got = pack(saved[0], [part], rank=rank, folder=tmp_path).load(0)
        assert torch.equal(got["final_gain"], saved[1][f"{WHOLE}norm.weight"].float())
        rows = unpack(Tiles.of(w, *stages(part.graph)["lm_head_weight"]), got["lm_head_weight"])
        assert torch.equal(rows[: 64 // tp], head.chunk(tp)[rank].float())
        assert not rows[64 // tp :].any()
    assert torch.equal(load_reference(saved[0], 2, part.graph)["lm_head_weight"], head)


def ends(k=512, vocab=32, tp=1, weight=None):
    """A table that no ring streams, a norm, and a head."""
    w = {"dtype": DType.BF16, "top": True}
    table = Weight(name="table", rows=vocab, k=k, names=(f"{WHOLE}embed_tokens.weight",), **w)
    head = Weight(name="head", rows=vocab // tp, k=k, names=("lm_head.weight",), shard="rows", **w)
    gain = Weight(name="gain", rows=k, k=1, dtype=DType.BF16, names=("input_layernorm.weight",), next_layer=True)
    norm = RmsNorm(
        name="norm", inputs={}, outputs={}, weights={"gain": gain, "table": table}, width=k, eps=0.0,
        in_dtype=DType.BF16,
    )  # fmt: skip
    gemm = DenseGemm(
        name="gemm", inputs={}, outputs={}, weights={"weight": head}, rows=vocab // tp, world_rows=vocab, k=k, unit_k=k
    )
    return Part(-1, Graph(name="ends", tp=tp, tokens=1, ops=(norm, gemm), tensors={}))


def small(directory, base=WHOLE, head=True, index=False, seed=0):
    """A checkpoint of 100 KB for :func:`ends`."""
    g = torch.Generator().manual_seed(seed)
    tensors = {f"{base}{n}": torch.randn(*s, generator=g).bfloat16() for n, s in (
        ("embed_tokens.weight", (32, 512)), ("layers.0.input_layernorm.weight", (512,)), ("norm.weight", (512,))
    )}  # fmt: skip
    if head:
        tensors["lm_head.weight"] = torch.randn(32, 512, generator=g).bfloat16()
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    if index:
        (directory / "model.safetensors").rename(directory / "model-1.safetensors")
        names = dict.fromkeys(tensors, "model-1.safetensors")
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return tensors


@pytest.mark.parametrize("base", [WHOLE, "model.", ""])
def test_names_with_and_without_the_whole_model(tmp_path, base):
    tensors = small(tmp_path / "c", base)
    assert Checkpoint(tmp_path / "c").layers() == [0]
    got = pack(tmp_path / "c", [ends()], rank=0, folder=tmp_path).load(0)
    assert torch.equal(got["table"], tensors[f"{base}embed_tokens.weight"])
    assert torch.equal(got["gain"], tensors[f"{base}layers.0.input_layernorm.weight"].float())


def test_the_text_model_that_transformers_writes(tmp_path):
    from transformers import MuseSparkTextConfig
    from transformers.models.muse_spark.modeling_muse_spark import MuseSparkTextModel

    config = MuseSparkTextConfig(
        hidden_size=512, vocab_size=32, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=1,
        moe_hidden_size=16, moe_intermediate_size=16, num_local_experts=8, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = MuseSparkTextModel._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    found = Checkpoint(tmp_path)
    assert found.layers() == [0]
    assert found.experts(0) is DType.BF16
    with pytest.raises(WeightError) as caught:
        found.open(-1, ends().graph)
    assert [n for n, _ in caught.value.notes] == [
        "lm_head.weight: expected BF16 [32, 512], it is missing in model.safetensors"
    ]


@pytest.mark.parametrize("where", ["text", "top", "no"])
def test_a_tied_head_is_the_embedding(tmp_path, where):
    tensors = small(tmp_path / "c", head=False)
    config = {"num_hidden_layers": 1, **({"tie_word_embeddings": True} if where == "text" else {})}
    top = {"tie_word_embeddings": where == "top"}
    (tmp_path / "c" / "config.json").write_text(json.dumps({"text_config": config, **top}))
    if where == "no":
        with pytest.raises(WeightError, match="1 things do not fit"):
            pack(tmp_path / "c", [ends()], rank=0, folder=tmp_path)
        return
    part = ends(tp=2)
    got = pack(tmp_path / "c", [part], rank=1, folder=tmp_path).load(0)
    tiles = Tiles.of(part.graph.weights()["head"], *stages(part.graph)["head"])
    assert torch.equal(unpack(tiles, got["head"]), tensors[f"{WHOLE}embed_tokens.weight"][16:].float())


def nvfp4_block(tp, split, experts="nvfp4"):
    return Part(1, expert_block(tp=tp, split=split, experts=experts, config=NVFP4))


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory):
    """Layer 1 in the ModelOpt layout; some block scales are zero."""
    g, c, tensors = torch.Generator().manual_seed(3), NVFP4, {}
    graph = nvfp4_block(1, "nn").graph
    for w in graph.weights().values():
        base = f"{WHOLE}layers.1.{w.names[0]}"
        if w.dtype is not DType.NVFP4:
            shape = (w.rows, w.k) if w.k > 1 else (w.rows,)
            plain = torch.randn(shape, generator=g)
            tensors[base] = plain if w.dtype is DType.FP32 else plain.bfloat16()
            continue
        tensors[base] = torch.randint(256, (c.experts, w.rows, w.k // 2), generator=g, dtype=torch.uint8)
        scales = torch.randint(0x48, (c.experts, w.rows, w.k // 16), generator=g, dtype=torch.uint8)
        tensors[f"{base}_weight_scale"] = scales.view(torch.float8_e4m3fn)
        tensors[f"{base}_weight_scale_2"] = torch.rand((c.experts, 2) if w.gate_up else (c.experts,), generator=g)
    directory = tmp_path_factory.mktemp("nvfp4")
    save_file(tensors, directory / "model.safetensors")
    quantization = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (directory / "hf_quant_config.json").write_text(json.dumps(quantization))
    return directory


@pytest.mark.parametrize("batch", [1 << 16, packed.BATCH])
@pytest.mark.parametrize(("tp", "split", "rank"), [(8, "nn", 7), (2, "nk", 1)])
def test_nvfp4_experts(nvfp4, tmp_path, monkeypatch, tp, split, rank, batch):
    """In stretches of a matrix, and of many matrices at once: as load_layer gives them in one piece."""
    monkeypatch.setattr(packed, "BATCH", batch)
    part = nvfp4_block(tp, split)
    got = pack(nvfp4, [part], rank=rank, folder=tmp_path).load(0)
    same(got, load_layer(nvfp4, 1, part.graph, rank))


def test_what_experts_are_stored_as(nvfp4, saved):
    assert Checkpoint(nvfp4).experts(1) is DType.NVFP4
    assert Checkpoint(saved[0]).experts(1) is DType.BF16
    with pytest.raises(WeightError, match="no experts of layer 0"):
        Checkpoint(nvfp4).experts(0)


SHAPES = st.builds(
    lambda blocks, groups, stage_k, chunks: (blocks * groups * 16, stage_k * chunks, blocks * 16, stage_k),
    st.integers(1, 3), st.integers(1, 3), st.sampled_from([512, 1024]), st.integers(1, 2),
)  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(SHAPES, st.sampled_from(list(DType)), st.booleans(), st.booleans(), st.integers(0, 2**31), st.data())
def test_the_fast_way_makes_the_same_bytes(shape, dtype, gate_up, chunk_major, seed, data):
    if dtype is DType.U32:
        return
    tiles = Tiles(*shape, dtype, gate_up, chunk_major)
    g, (rows, k, *_) = torch.Generator().manual_seed(seed), shape
    if dtype is not DType.NVFP4:
        matrix = torch.randn(rows, k, generator=g).to(torch.bfloat16 if dtype is DType.BF16 else torch.float32)
        assert fast.pack_dense(tiles, matrix).tobytes() == pack_dense(tiles, matrix).numpy().tobytes()
        matrix[data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, k - 1))] = data.draw(
            st.sampled_from([float("nan"), float("inf"), -float("inf"), -float("nan")])
        )
        with pytest.raises(WeightError, match="NaN or infinity"):
            fast.pack_dense(tiles, matrix)
        return
    codes = torch.randint(256, (rows, k // 2), generator=g, dtype=torch.uint8)
    scales = torch.randint(data.draw(st.sampled_from([1, 2, 0x7F])), (rows, k // 16), generator=g, dtype=torch.uint8)
    kept = codes.clone()
    assert fast.pack_nvfp4(tiles, codes, scales).tobytes() == pack_nvfp4(tiles, codes, scales).numpy().tobytes()
    assert torch.equal(codes, kept)
    scales[-1, -1] = data.draw(st.integers(0x7F, 0xFF))
    with pytest.raises(WeightError, match="1 block scales are negative or NaN"):
        fast.pack_nvfp4(tiles, codes, scales)


def test_a_matrix_that_is_not_streamed_stays_as_it_is():
    weight = ends().graph.weights()["table"]
    matrix = torch.randn(32, 512).bfloat16()
    (got,) = pack_weight(weight, None, lambda e: matrix).values()
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, matrix)
    matrix[3, 4] = torch.inf
    with pytest.raises(WeightError, match="table has NaN or infinity"):
        pack_weight(weight, None, lambda e: matrix)
    with pytest.raises(WeightError, match=r"expected torch\.bfloat16 rows of 512"):
        pack_weight(weight, None, lambda e: matrix.float())


def test_a_plan_says_that_the_embedding_stays_as_it_is():
    plan = lower(load(schedules() / "muse_first.py", machine="h200", options={"config": CONFIG}, tp=1))
    assert {w.name: w.layout for w in plan.weights} == {
        "embed_table": "rows", "next_gain": "vector", "next_qkvg_weight": "tiles"
    }  # fmt: skip
    table = expected(plan)["embed_table"]
    assert (table.bytes, table.dtype) == (64 * 2048 * 2, "bfloat16")
    assert next(p.shape for p in plan.params if p.name == "embed_table") == (64, 2048)
    assert Names(plan).parameter("embed_table", 2 * (2048 + 5)) == "embed_table, element [1, 5]"
    assert Names(plan).parameter("next_gain", 4 * 5) == "next_gain, element [0, 5]"


def test_random_padding_is_zero_and_not_in_the_whole():
    layer = random_layer(last(8, config=NVFP4), 1)
    head = layer.values["lm_head_weight"]
    assert head[:8].any(1).all()
    assert not head[8:].any()
    assert torch.equal(layer.env(8)["lm_head_weight"], torch.cat([head[:8]] * 8))


# --- damage ---


def refused(*parts, directory, folder, rank=0):
    with pytest.raises(WeightError) as caught:
        pack(directory, parts, rank=rank, folder=folder)
    return caught.value.render()


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """(checkpoint, its shard's content, what is packed of it) for each of: one file, a file with an index."""
    found = []
    for index in (False, True):
        directory = tmp_path_factory.mktemp("sound") / "c"
        small(directory, index=index)
        (file,) = directory.glob("*.safetensors")
        want = pack(directory, [ends()], rank=0, folder=directory.parent / "w").load(0)
        found.append((directory, file.name, file.read_bytes(), want))
    return found


@settings(max_examples=120, deadline=None)
@given(st.booleans(), st.booleans(), st.data())
def test_a_damaged_shard_is_named(sound, tmp_path_factory, index, cut, data):
    """Cut short, or with a byte of its header changed: an error that names it, or nothing that matters was changed."""
    origin, name, content, want = sound[index]
    directory = tmp_path_factory.mktemp("damaged")
    header = 8 + int.from_bytes(content[:8], "little")
    if cut:
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        at, byte = data.draw(st.integers(0, header - 1)), data.draw(st.integers(0, 255))
        content = content[:at] + bytes([byte]) + content[at + 1 :]
    if index:
        shutil.copy(origin / "model.safetensors.index.json", directory)
    (directory / name).write_bytes(content)
    try:
        got = pack(directory, [ends()], rank=0, folder=directory / "w").load(0)
    except WeightError as error:
        assert name in error.render()
        assert not (directory / "w").exists()
    else:
        assert not cut
        same(got, want)


@pytest.mark.parametrize("content", [
    b"[" * 200_000, b"{}", b"[]", b"\xff", b'{"a":3}', b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
    b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}',
    b'{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}',
    b'{"a":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}}',
])  # fmt: skip
def test_headers_that_describe_no_file(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(len(content).to_bytes(8, "little") + content + bytes(8))
    assert "model.safetensors" in refused(ends(), directory=tmp_path, folder=tmp_path / "w")


@pytest.mark.parametrize("file", ["../x.safetensors", "/x.safetensors", "a/../../x", "..\\x", "", "a\0b", 3, None])
def test_an_index_that_leads_out_of_the_directory(tmp_path, file):
    small(tmp_path / "x")
    (tmp_path / "x" / "model.safetensors").rename(tmp_path / "x.safetensors")
    index = {"weight_map": {f"{WHOLE}norm.weight": file}}
    (tmp_path / "x" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "is no file of the directory" in refused(ends(), directory=tmp_path / "x", folder=tmp_path / "w")


def test_pickles_are_not_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nabort\n(tR.")
    text = refused(ends(), directory=tmp_path, folder=tmp_path / "w")
    assert "pytorch_model.bin is a pickle, which can run code and is not read: save the model as safetensors" in text


def test_what_is_no_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "a.safetensors")
    index = {"weight_map": {"lm_head.weight": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "a.safetensors: it is no file" in refused(ends(), directory=tmp_path, folder=tmp_path / "w")


@pytest.mark.parametrize("where", ["table", "head"])
def test_content_that_the_device_cannot_hold(tmp_path, where):
    tensors = small(tmp_path / "c")
    name = {"table": f"{WHOLE}embed_tokens.weight", "head": "lm_head.weight"}[where]
    tensors[name][30, 3] = torch.nan
    save_file(tensors, tmp_path / "c" / "model.safetensors")
    text = refused(ends(), directory=tmp_path / "c", folder=tmp_path / "w")
    assert text.startswith(f"error: {where}")
    assert [n for n, *_ in left(tmp_path / "w")] == ["manifest.json"]


def test_a_shard_that_changes_meanwhile(tmp_path, monkeypatch):
    small(tmp_path / "c")

    def touched(*args):
        os.utime(tmp_path / "c" / "model.safetensors", ns=(1, 1))
        return pack_dense(*args[:2]).numpy()

    monkeypatch.setattr(fast, "pack_dense", touched)
    assert "model.safetensors changed while it was read" in refused(
        ends(), directory=tmp_path / "c", folder=tmp_path / "w"
    )
    assert [n for n, *_ in left(tmp_path / "w")] == ["manifest.json"]


DAMAGE = {
    "cut": lambda b: b[:-1],
    "longer": lambda b: b + b"\0",
    "header": lambda b: b[:20] + bytes([b[20] ^ 1]) + b[21:],
    "empty": lambda b: b"",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_packed_file_is_made_again(tmp_path, damage):
    small(tmp_path / "c")
    done = pack(tmp_path / "c", [ends()], rank=0, folder=tmp_path)
    want, path = done.load(0), done.files[0].path
    content = path.read_bytes()
    path.write_bytes(DAMAGE[damage](content))
    with pytest.raises(WeightError, match="is gone or damaged"):
        done.load(0)
    pack(tmp_path / "c", [ends()], rank=0, folder=tmp_path)
    assert path.read_bytes() == content
    same(done.load(0), want)


# --- space ---


def test_a_full_disk_is_foreseen(tmp_path, monkeypatch):
    small(tmp_path / "c")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 1000))
    text = refused(ends(), directory=tmp_path / "c", folder=tmp_path / "w")
    assert "0.0 GB of space, packed weights need 0.0 GB more" in text
    assert "free some" in text


def test_a_disk_that_fills_up(tmp_path, monkeypatch):
    small(tmp_path / "c")
    write, calls = os.pwrite, []

    def full(*args):
        calls.append(1)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*args)

    monkeypatch.setattr(os, "pwrite", full)
    assert "No space left on device" in refused(ends(), directory=tmp_path / "c", folder=tmp_path / "w")
    assert [n for n, *_ in left(tmp_path / "w")] == ["manifest.json"]


def test_without_a_cache_there_is_no_default(tmp_path, monkeypatch):
    small(tmp_path / "c")
    monkeypatch.setenv("MEGAGEN_CACHE_DIR", str(tmp_path / "cache"))
    done = pack(tmp_path / "c", [ends()], rank=0)
    assert done.folder.is_relative_to(tmp_path / "cache" / "weights")
    monkeypatch.setenv("MEGAGEN_CACHE", "0")
    assert "give a folder" in refused(ends(), directory=tmp_path / "c", folder=None)


@pytest.mark.parametrize(("tps", "rank"), [((2,), 2), ((2,), -1), ((1, 2), 0), ((), 0)])
def test_ranks_outside_the_group(tmp_path, tps, rank):
    small(tmp_path / "c")
    assert "rank" in refused(*[ends(tp=tp) for tp in tps], directory=tmp_path / "c", folder=tmp_path / "w", rank=rank)


# --- keys ---


def test_what_a_key_depends_on(tmp_path, monkeypatch):
    """Each change alone makes another file; none makes the same one, wherever the checkpoint lies."""
    c, seen = tmp_path / "c", set()
    small(c, index=True)
    for name, value in (("config.json", {"num_hidden_layers": 1}), ("hf_quant_config.json", {})):
        (c / name).write_text(json.dumps(value))

    def path(part=None, rank=0):
        return pack(c, [part or ends()], rank=rank, folder=tmp_path / "w").files[0].path

    def new(part=None, rank=0):
        found = path(part, rank)
        assert found not in seen
        seen.add(found)
        return found

    origin = new()
    assert path() == origin
    c = c.rename(tmp_path / "elsewhere")
    assert path() == origin
    shard = c / "model-1.safetensors"
    kept = shard.stat()
    os.utime(shard, ns=(kept.st_atime_ns, kept.st_mtime_ns + 1))
    new()
    os.utime(shard, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    assert path() == origin
    for name in ("config.json", "hf_quant_config.json", "model.safetensors.index.json"):
        text = (c / name).read_text()
        (c / name).write_text(text + " ")
        new()
        (c / name).write_text(text)
    content = shard.read_bytes()
    at = content.index(b"norm.weight", content.index(b"language_model.norm"))  # a name that no launch needs
    shard.write_bytes(content[:at] + b"N" + content[at + 1 :])
    os.utime(shard, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    new()
    shard.write_bytes(content)
    os.utime(shard, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    assert path() == origin
    new(ends(tp=2))
    new(ends(tp=2), rank=1)
    monkeypatch.setattr(packed, "VERSION", packed.VERSION + 1)
    new()


def test_a_file_depends_on_what_its_ops_make_of_vectors(saved, tmp_path):
    """The temperature of a residual gate is packed with it; an epsilon of attention is not."""

    def names(**update):
        config = CONFIG.model_copy(update=update)
        part = Part(0, sliding_layer(tp=2, experts="bf16", config=config))
        return packed._file(tmp_path, "key", part, 0).path.name

    assert names() == names(qk_scale=2.0) == names(rope_theta=1e4)
    assert len({names(), names(residual_gate_temperature=0.5), names(layers=3, intermediate=1024)}) == 3


# --- interruptions and neighbours ---

SCRIPT = """
import os, sys
sys.path[:0] = [{root!r}, {tests!r}]
from pathlib import Path
from megagen.models.muse_spark import MuseSparkConfig, expert_block, first, last
from megagen.weights import packed
from megagen.weights.packed import Part, pack
config = MuseSparkConfig.model_validate_json({config!r})
blocks = [Part(i, expert_block({tp}, experts="bf16", config=config)) for i in (0, 1)]
parts = [Part(-1, first({tp}, config=config)), *blocks, Part(2, last({tp}, config=config))]
def go():
    return pack({directory!r}, parts, rank={rank}, folder=Path({folder!r}))
{body}
"""


def started(directory, folder, body, tp=2, rank=0):
    text = SCRIPT.format(
        root=str(ROOT), tests=str(ROOT / "tests"), config=CONFIG.model_dump_json(), tp=tp, rank=rank,
        directory=str(directory), folder=str(folder), body=body,
    )  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", text], env=env, stdout=subprocess.PIPE, text=True)


def block_parts(tp):
    blocks = [Part(i, expert_block(tp, experts="bf16", config=CONFIG)) for i in (0, 1)]
    return [Part(-1, first(tp, config=CONFIG)), *blocks, Part(2, last(tp, config=CONFIG))]


KILL = """
write, begun = os.pwrite, []
def once(fd, data, at):
    begun.append(at == 0)
    if sum(begun) == 3 and len(begun) > sum(begun) + 20:  # in the middle of the third file
        os.kill(os.getpid(), 9)
    return write(fd, data, at)
os.pwrite = once
packed.BATCH = 1 << 18
go()
"""


def test_a_killed_run_is_taken_up_where_it_was(saved, tmp_path):
    process = started(saved[0], tmp_path, KILL)
    process.communicate(timeout=120)
    assert process.returncode == -9
    before = left(tmp_path)
    names = [n for n, *_ in before]
    assert sum(n.startswith("launch") for n in names) == 2
    assert sum(n.startswith(".launch002") for n in names) == 1
    parts = block_parts(2)
    done = pack(saved[0], parts, rank=0, folder=tmp_path)
    after = left(tmp_path)
    assert {x for x in before if not x[0].startswith(".")} < set(after)
    assert len(after) == 5
    for i, part in enumerate(parts):
        same(done.load(i), load_layer(saved[0], part.layer, part.graph, 0))


def test_neighbours_do_not_disturb_each_other(saved, tmp_path):
    """The same rank twice, and another one."""
    body = """
made, write = [], packed.files.write
packed.files.write = lambda path, out: (made.append(path), write(path, out))
go()
print(len(made))
"""
    running = [started(saved[0], tmp_path, body, rank=rank) for rank in (1, 1, 0)]
    made = [int(p.communicate(timeout=120)[0]) for p in running]
    assert [p.returncode for p in running] == [0, 0, 0]
    assert 8 + 1 <= sum(made) <= 8 + 3  # the manifest by one or by each
    parts = block_parts(2)
    assert len(left(tmp_path)) == 2 * len(parts) + 1
    for rank in (0, 1):
        before = left(tmp_path)
        done = pack(saved[0], parts, rank=rank, folder=tmp_path)
        assert left(tmp_path) == before
        for i in (0, 2, 3):
            same(done.load(i), load_layer(saved[0], parts[i].layer, parts[i].graph, rank))


MEMORY = """
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
before = peak()
bytes = go().bytes
print(bytes, peak() - before)
"""


def test_memory_is_that_of_a_few_matrices(saved, tmp_path):
    """Of a checkpoint of 350 MB, whose largest tensor is 67 MB, with one rank that packs 245 MB of it."""
    out, _ = started(saved[0], tmp_path, MEMORY, tp=1).communicate(timeout=120)
    size, grown = map(int, out.split())
    assert size > 240e6
    assert grown < 67e6


def test_nvfp4_is_named_by_matrix(nvfp4, tmp_path):
    tensors = load_file(nvfp4 / "model.safetensors")
    name = f"{WHOLE}layers.1.mlp.experts.down_proj_weight_scale"
    tensors[name].view(torch.uint8)[4, 5, 6] = 0x7F
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(nvfp4 / "hf_quant_config.json", tmp_path)
    text = refused(nvfp4_block(1, "nn"), directory=tmp_path, folder=tmp_path / "w")
    assert "down_weight, matrix 4: 1 block scales are negative or NaN" in text
    assert isinstance(Checkpoint(nvfp4).open(1, nvfp4_block(1, "nn").graph)["down_weight"].read(3), Nvfp4)
