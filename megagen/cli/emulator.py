"""What ``emulate`` does on the CPU. torch is imported when it does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megagen.cli import report
from megagen.cli.pipeline import Checked, placed
from megagen.cli.sheets import Sheet, counted
from megagen.errors import DeviceError

if TYPE_CHECKING:
    from megagen.runtime.step import Step

CONTEXT = 300  # tokens in the caches, of layers that have some: more than a tiny layer's window


def run(
    checked: Checked,
    library: Path,
    ranks: int,
    seeds: Sequence[int],
    tokens: int,
    experts: int | None,
    checkpoint: Path | None,
    layer: int,
    race: bool,
    launches: int,
    progress: Callable[[], None],
    step: Step | None = None,
) -> Sheet:
    """A world a seed, judged. Weights are random unless there is a checkpoint. Raises EmulationError for a fault."""
    try:
        from megagen.bench.emulation import Emulation, Weights, refuse_too_large
    except ImportError as e:
        from megagen.runtime.driver import INSTALL

        raise DeviceError(f"the reference needs torch: {e}", hint=INSTALL) from e
    plan, graph = checked.plan, checked.graph
    refuse_too_large(plan, ranks)
    weights = Weights.random(graph, ranks) if checkpoint is None else Weights.load(checkpoint, layer, graph, ranks)
    emulation = Emulation(plan, graph, library, weights)
    found = emulation.check(
        tokens, seeds=seeds, race=race, launches=launches, experts=experts, step=step, progress=progress
    )
    who = counted(ranks, "rank") + (f" of {plan.tp}, the others stood in for" if ranks != plan.tp else "")
    which = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]}-{seeds[-1]}"
    what = f"{counted(tokens, 'token')}{placed(step)}, {counted(launches, 'launch', 'es')}, {which}"
    sheet = report.checks(found, f"emulated: {who}, {what}")
    extra = {"ranks": ranks, "seeds": list(seeds), "launches": launches, "race": race}
    if step is not None:
        extra |= {"context": step.context, "ancestors": list(step.ancestors)}
    return replace(sheet, extra={**sheet.extra, **extra})
