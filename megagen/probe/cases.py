"""The cases, in the order in which they run."""

from __future__ import annotations

from megagen.errors import MegagenError, did_you_mean
from megagen.probe.case import Case
from megagen.probe.code import icache, launch
from megagen.probe.grid import broadcast, cluster, grid_step
from megagen.probe.memory import hbm, l2, prefetch
from megagen.probe.peers import peer
from megagen.probe.timers import timer
from megagen.probe.waits import fence, hop, in_flight, poll

CASES = (
    Case(timer, ("timer",)),
    Case(hbm, ("stream",)),
    Case(l2, ("stream",)),
    Case(prefetch, ("stream",)),
    Case(in_flight, ("hop",)),
    Case(poll, ("hop",)),
    Case(fence, ("fence",)),
    Case(hop, ("hop",)),
    Case(grid_step, ("grid",)),
    Case(broadcast, ("grid",)),
    Case(icache, ("icache",)),
    Case(launch, ("launch",)),
    Case(cluster, ("cluster",)),
    Case(peer, ("hop", "peer", "stream"), gpus=2),
)


def chosen(only: str | None) -> list[Case]:
    """Those that ``only`` names, separated by commas; all of them for None. Raises MegagenError for an unknown one."""
    if only is None:
        return list(CASES)
    known = {case.name: case for case in CASES}
    wanted = list(dict.fromkeys(n.strip() for n in only.split(",") if n.strip()))
    if not wanted:
        raise MegagenError("--only names no case", hint=f"there are: {', '.join(known)}")
    for name in wanted:
        if name not in known:
            raise MegagenError(f"no case {name!r} to probe", hint=did_you_mean(name, list(known)))
    return [case for name, case in known.items() if name in wanted]
