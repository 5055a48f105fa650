"""``megagen step``: a whole decoding step at full size, timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megagen.cli.device import measurements
from megagen.cli.sheets import Column, Sheet, counted
from megagen.settings import Settings

POSITION_ROOM = 16  # beyond the longest context: a step's tokens


def time_steps(
    *,
    tp: int,
    gpus: int,
    tokens: Sequence[int],
    contexts: Sequence[int],
    rounds: int,
    endure: int,
    bounded: bool,
    record: bool,
    command: str,
    settings: Settings,
    progress: Callable[[], None],
) -> Sheet:
    """Random weights of Muse Spark Open's size on ``gpus`` live ranks of ``tp``: every combination of ``tokens`` and
    ``contexts`` timed, then the first of them run ``endure`` times."""
    from megagen.bench import measure, whole
    from megagen.errors import MegagenError
    from megagen.runtime.decoder import machine_of
    from megagen.serve.engine import refuse_too_large

    target = measurements("step") if record else None
    devices = whole.gpus(gpus)
    positions = max(contexts) + POSITION_ROOM
    model = whole.muse_spark(tp=tp, positions=positions, machine=machine_of(0), progress=progress)
    for device in devices:
        refuse_too_large(model.memory(), whole.free(device), device)
    artifacts = model.artifacts(settings, progress, bounded=bounded)
    rows, shown = [], []
    with whole.open_random(model, artifacts, devices, bounded=bounded, progress=progress) as decoder:
        works = [whole.Work.usual(model, t, c) for c in contexts for t in tokens]
        for work in works:
            times = whole.measure(decoder, work, rounds, progress)
            facts = whole.describe(model, work, gpus)
            told = notes(facts, rounds, bounded)
            name = "step.verify" if work.tokens > 1 else "step.decode"
            row = measure.figure(
                times.gpu, floor=facts["floor_ms"] * 1e3, unit="ms", per=1e3, what=name, command=command, notes=told
            )
            host = measure.figure(times.host, floor=None, unit="µs", what=f"{name}.host", command=command, notes=told)
            kernels = measure.count(model.kernels, unit="kernels", what="step.kernels", command=command, notes=told)
            rows += [row, host, kernels]
            shown.append(
                {
                    **facts,
                    "what": name,
                    **row.model_dump(mode="json"),
                    "hbm_bytes": facts["bytes"],
                    "host_us": host.value,
                    "host_p90_us": host.spread[1] if host.spread else None,
                }
            )
        note = "Stand-ins take the place of the other ranks: the time of their links is not in these figures."
        if endure:
            changed = whole.endure(decoder, works[0], endure, progress)
            if changed:
                raise MegagenError(f"{changed} of {endure:,} steps gave other bits than the first")
            note += f"\n{endure:,} steps of {works[0].tokens} tokens after {works[0].context}: no hang, no bit changed."
            told = notes(whole.describe(model, works[0], gpus), endure, bounded)
            rows.append(
                measure.count(endure, unit="steps", what="step.endured", command=command, notes=f"{told}; 0 changed")
            )
    if target is not None:
        measure.append(target, rows)
        note += f"\nAppended to {target}."
    return Sheet(
        "figures",
        f"A step of Muse Spark Open, {counted(model.kernels, 'kernel')}: TP{tp} on {counted(gpus, 'GPU')}, "
        f"{rounds} replays",
        (
            Column("tokens", "tokens", right=True),
            Column("after", lambda r: f"{r['context']:,}", right=True),
            Column("experts", "experts", right=True),
            Column("ms", lambda r: f"{r['value']:.3f}", right=True),
            Column("p10", lambda r: f"{r['spread'][0]:.3f}", right=True),
            Column("p90", lambda r: f"{r['spread'][1]:.3f}", right=True),
            Column("HBM GB", lambda r: f"{r['hbm_bytes'] / 1e9:.2f}", right=True),
            Column("floor", lambda r: f"{r['floor']:.3f}", right=True),
            Column("ratio", lambda r: f"{r['ratio']:.2f}", right=True),
            Column("host µs", lambda r: f"{r['host_us']:.1f}", right=True),
        ),
        shown,
        note=note,
    )


def notes(facts: dict[str, object], replays: int, bounded: bool) -> str:
    """What a recorded figure is of."""
    gpus = "1 GPU" if facts["live"] == 1 else f"{facts['live']} GPUs"
    return "; ".join(
        (
            f"Muse Spark Open, random weights; tp {facts['tp']} on {gpus}, stand-ins for the other ranks",
            f"{facts['tokens']} tokens on {facts['experts']} experts a layer after {facts['context']}, "
            "new routing each replay",
            f"{facts['kernels']} kernels in a CUDA graph, {replays} replays",
            "bounded waits" if bounded else "unbounded waits",
        )
    )
