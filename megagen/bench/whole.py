"""A whole decoding step at full size on random weights: its time, its floor, the host's part, its endurance."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from megagen.bench.routes import Draws
from megagen.bench.timing import PRIME_CYCLES, Timing
from megagen.errors import DeviceError
from megagen.lower import distinct
from megagen.models.muse_spark import LayerKind, MuseSparkConfig, launches
from megagen.runtime.decoder import GpuDecoder
from megagen.runtime.model import Model
from megagen.runtime.step import Step
from megagen.serve.engine import refuse_too_large
from megagen.weights.random import random_layer

if TYPE_CHECKING:
    from pathlib import Path

WARMUP = 5
SEED = 0


def muse_spark(
    *,
    tp: int,
    positions: int,
    machine: str,
    config: MuseSparkConfig | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Model:
    """Muse Spark Open as released: every fourth layer from the last one back attends to all, experts in NVFP4 but for
    the first and the last layer's."""
    config = MuseSparkConfig() if config is None else config
    n = config.layers
    kinds = [LayerKind(sliding=(n - 1 - i) % 4 != 0, rotates=(n - 1 - i) % 4 != 0) for i in range(n)]
    experts = ["bf16" if i in (0, n - 1) else "nvfp4" for i in range(n)]
    return Model.planned(
        config, launches(kinds, experts), machine=machine, tp=tp, positions=positions, progress=progress
    )


def open_random(
    model: Model,
    artifacts: Mapping[str, Path],
    devices: Sequence[int],
    *,
    bounded: bool = True,
    progress: Callable[[], None] = lambda: None,
) -> GpuDecoder:
    """The model on a live rank a GPU, all other ranks stood in for. Launches of a kind have the same random weights,
    each in memory of its own; keys and values of the past are random too. Raises DeviceError where it does not fit."""
    for device in devices:
        refuse_too_large(model.memory(), torch.cuda.mem_get_info(device)[0], device)
    made: dict[tuple[str, int], Mapping[str, torch.Tensor]] = {}
    stand_ins = model.tp // len(devices)

    def weights(launch: int, rank: int) -> Mapping[str, torch.Tensor]:
        name = model.names[launch]
        if (name, rank) not in made:
            device = torch.device("cuda", devices[rank])
            made[name, rank] = random_layer(model.graph(launch), SEED, device, rank=rank * stand_ins).packed()
        return {n: x.clone() for n, x in made[name, rank].items()}

    decoder = GpuDecoder(
        model,
        artifacts,
        weights,
        devices=devices,
        timeout_ms=2000 if bounded else 0,
        overrides=True,
        progress=progress,
    )
    made.clear()
    for rank, caches in enumerate(decoder.caches):
        g = torch.Generator(torch.device("cuda", devices[rank])).manual_seed(rank)
        for cache in caches:
            cache.normal_(generator=g)
    return decoder


@lru_cache(maxsize=8)
def _draws(experts: int, tokens: int, top_k: int, pool: int, top: int) -> Draws:
    return Draws(experts, tokens, top_k, pool=pool, top=top)


@dataclass(frozen=True)
class Work:
    """A step of ``tokens`` after ``context`` numbers, its tokens on ``experts`` distinct experts in every layer."""

    tokens: int
    context: int
    experts: int

    @classmethod
    def usual(cls, model: Model, tokens: int, context: int) -> Work:
        """On as many experts as experience has it."""
        return cls(tokens, context, distinct(tokens, model.config.top_k))

    def table(self, model: Model, sample: int) -> torch.Tensor:
        """The sample's routing. Where a layer guesses experts, half of these are right."""
        c = model.config
        top = max((kind.plan.guess.top for kind in model.kinds.values() if kind.plan.guess), default=0)
        return _draws(self.experts, self.tokens, c.top_k, c.experts, top)[sample]

    def give(self, decoder: GpuDecoder, sample: int = 0) -> None:
        decoder.write(Step.chain(self.tokens, self.context), [2 + i for i in range(self.tokens)])
        decoder.reroute(self.table(decoder.model, sample))


@dataclass(frozen=True)
class Times:
    """Of a step, in µs: on the GPU, and what it keeps the host."""

    gpu: Timing
    host: Timing


def measure(decoder: GpuDecoder, work: Work, rounds: int, progress: Callable[[], None] = lambda: None) -> Times:
    """``rounds`` steps, each with another routing. On the GPU: from the first copy to the last, of the slowest rank;
    the GPUs spin before each until the host has queued it. The host: what :meth:`GpuDecoder.step` does but waiting."""
    gpu, host = [], []
    devices = decoder.devices
    for sample in range(WARMUP + rounds):
        work.give(decoder, sample)
        decoder.settle()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in devices]
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda._sleep(PRIME_CYCLES)
        for device, (start, _) in zip(devices, events, strict=True):
            with torch.cuda.device(device):
                start.record()
        began = time.perf_counter()
        work_step = Step.chain(work.tokens, work.context)
        decoder.write(work_step, [2 + i for i in range(work.tokens)])
        decoder.replay()
        took = time.perf_counter() - began
        for device, (_, end) in zip(devices, events, strict=True):
            with torch.cuda.device(device):
                end.record()
        decoder.settle()
        for device in devices:
            torch.cuda.synchronize(device)
        if sample >= WARMUP:
            gpu.append(max(start.elapsed_time(end) for start, end in events) * 1e3)
            host.append(took * 1e6)
        progress()
    return Times(Timing.of("gpu", gpu), Timing.of("host", host))


def endure(decoder: GpuDecoder, work: Work, steps: int, progress: Callable[[], None] = lambda: None) -> int:
    """Run the same step again and again: on how many of ``steps`` did a logit or a token of some rank change.

    Raises HangError when a wait expires.
    """
    work.give(decoder)
    decoder.replay()
    decoder.settle()
    first: list[list[torch.Tensor]] = [[x.clone() for x in found] for found in decoder.found]
    differ = [torch.zeros(1, dtype=torch.int64, device=found[0].device) for found in first]
    for index in range(steps):
        decoder.replay()
        for rank, device in enumerate(decoder.devices):
            with torch.cuda.device(device):
                changed = torch.zeros(1, dtype=torch.bool, device=differ[rank].device)
                for a, b in zip(decoder.found[rank], first[rank], strict=True):
                    changed |= (_bits(a[: work.tokens]) != _bits(b[: work.tokens])).any()
                differ[rank] += changed
        if index % 16 == 15 or index == steps - 1:
            decoder.settle()
        progress()
    return int(max(int(x) for x in differ))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def gpus(devices: int) -> list[int]:
    """So many of this machine's. Raises DeviceError if it has fewer."""
    there = torch.cuda.device_count()
    if devices > there:
        raise DeviceError(f"{devices} GPUs: this machine has {there}")
    return list(range(devices))


def free(device: int) -> int:
    """Bytes that may be had of a GPU's memory."""
    found: int = torch.cuda.mem_get_info(device)[0]
    return found


def describe(model: Model, work: Work, live: int) -> dict[str, Any]:
    """Bytes, floor and kernels of a step."""
    read = model.weights_read(work.tokens) + model.keys_read(work.tokens, work.context)
    rate = model.plan(0).machine.hbm_bytes_per_s
    return {
        "tp": model.tp,
        "live": live,
        "tokens": work.tokens,
        "context": work.context,
        "experts": work.experts,
        "kernels": model.kernels,
        "bytes": read,
        "floor_ms": read / rate * 1e3,
    }
