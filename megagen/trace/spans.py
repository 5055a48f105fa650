"""The one format of a timeline: spans of warps, whoever made them, and the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megagen import files
from megagen.errors import MegagenError
from megagen.ir.graph import Frozen
from megagen.ir.plan import Plan

VERSION = 1


class Kind(IntEnum):
    JOB = 0  # a step of a warp's program, from its beginning to the next one's
    WAIT = 1  # within a job, for an edge of the Plan
    LOAD = 2  # a bulk load into the ring is issued; no length
    PREFETCH = 3  # L2 is asked for weights; no length


# launch: index into Trace.launches. step: StepPlan.index. edge: of a channel or barrier (WAIT; LOAD: the ring's full
# barrier). slot: stage of the ring or first element waited for. bytes: asked for (LOAD, PREFETCH). begin, end: ns since
# the launch began.
SPAN = np.dtype(
    [
        ("launch", "<u2"), ("block", "<u2"), ("step", "<u2"), ("edge", "<u2"), ("rank", "u1"), ("warp", "u1"),
        ("kind", "u1"), ("slot", "<u4"), ("bytes", "<u4"), ("begin", "<i4"), ("end", "<i4"),
    ]
)  # fmt: skip

# layer: of the stack. replay: of the stack. begin: ns since the trace began, of the first block of any rank. end: ns
# since begin, of the last. dropped: spans that found no room.
LAUNCH = np.dtype([("layer", "<u2"), ("replay", "<u2"), ("begin", "<i8"), ("end", "<i4"), ("dropped", "<u4")])


class Facts(Frozen):
    """Where a trace comes from.

    ``clock_ns``: the step of the clock that was read. ``offsets_ns``: what was added to each rank's clock to bring it
    to rank 0's when the recording began, ``drift_ns`` how much more when it ended, ``offset_error_ns`` the half-width
    of what each may be. ``plain_us`` and ``stamped_us``: medians of a
    launch without and with stamps, measured in turns; None where nobody did.
    """

    origin: Literal["measured", "emulated", "simulated"]
    name: str  # what to call the run
    machine: str
    driver: str = ""
    versions: Mapping[str, str] = {}
    commit: str = ""
    command: str = ""
    date: str = ""
    tokens: int
    context: int | None = None
    experts: int | None = None
    ranks: int = 1
    clock: str = "globaltimer"
    clock_ns: float = 1.0
    least_wait: str = ""  # what a wait must take to be written
    offsets_ns: tuple[float, ...] = (0.0,)
    offset_error_ns: tuple[float, ...] = (0.0,)
    drift_ns: tuple[float, ...] = (0.0,)
    plain_us: float | None = None
    stamped_us: float | None = None
    notes: str = ""


@dataclass(frozen=True)
class Trace:
    """``launches``: LAUNCH [n]. ``sms``: uint16 [n, ranks, blocks], where each block ran, or [ranks, blocks] if that is
    the same in all launches. ``spans``: SPAN [m], sorted by launch, rank, block, warp and time."""

    facts: Facts
    plan: Plan
    launches: NDArray[np.void]
    sms: NDArray[np.uint16]
    spans: NDArray[np.void]

    @property
    def ranks(self) -> int:
        return int(self.sms.shape[-2])

    def sm(self, launch: int, rank: int, block: int) -> int:
        """Where a block ran: a launch's go to whichever SMs the one before has left."""
        return int((self.sms if self.sms.ndim == 2 else self.sms[launch])[rank, block])

    def save(self, path: Path) -> None:
        """Write the trace in one step: a failure leaves no half of it. Raises MegagenError when it cannot."""
        header = json.dumps({"version": VERSION, "facts": self.facts.model_dump(mode="json")})
        arrays: dict[str, Any] = {"header": _bytes(header), "plan": _bytes(self.plan.to_json())}
        arrays |= {"launches": self.launches, "sms": self.sms, "spans": self.spans}
        files.write(path, lambda out: np.savez_compressed(out, allow_pickle=False, **arrays))

    @staticmethod
    def load(path: Path) -> Trace:
        """The trace that :meth:`save` wrote. Raises MegagenError for anything else."""
        try:
            with np.load(path, allow_pickle=False) as found:
                header = json.loads(found["header"].tobytes())
                if header["version"] != VERSION:
                    raise MegagenError(
                        f"{path} is a trace of version {header['version']}, this megagen reads {VERSION}",
                        hint="record it again",
                    )
                arrays = [found[name] for name in ("launches", "sms", "spans")]
                facts, plan = Facts.model_validate(header["facts"]), Plan.from_json(found["plan"].tobytes().decode())
        except OSError as e:
            raise MegagenError(f"cannot read {path}: {e.strerror or e}") from e
        except MegagenError:
            raise
        except Exception as e:  # whatever zip files, zlib, numpy, JSON and models make of bytes
            raise MegagenError(f"{path} is no trace of megagen", hint="`megagen trace SCHEDULE` records one") from e
        launches, sms, spans = arrays
        if (
            [a.dtype for a in arrays] != [LAUNCH, np.dtype("<u2"), SPAN]
            or (launches.ndim, spans.ndim) != (1, 1)
            or sms.shape[:-2] not in ((), (len(launches),))
            or sms.shape[-1:] != (plan.launch.blocks,)
            or sms.ndim < 2
        ):
            raise MegagenError(f"{path} is no trace of megagen", hint="`megagen trace SCHEDULE` records one")
        return Trace(facts, plan, *arrays)


def _bytes(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(text.encode(), dtype=np.uint8)
