"""Which variants of a schedule say what each of its choices is worth, and whether they compute the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagen.bench.timing import Timing, paired
from megagen.errors import DeviceError, MegagenError, did_you_mean
from megagen.ir.plan import Plan

if TYPE_CHECKING:
    import torch

Offered = Mapping[str, tuple[str, ...]]  # choices in the order in which a schedule asks, and the values of each
DEFAULT, ALL_OFF = "default", "off"  # bases
OFF = ("off", "none", "false")  # values, in lower case, that leave out what their choice is about


@dataclass(frozen=True)
class Variant:
    """A schedule with ``choices`` settled: its ``base``, or that with one ``choice`` at another ``value``."""

    base: str
    choices: Mapping[str, str]
    choice: str = ""
    value: str = ""

    @property
    def name(self) -> str:
        return f"{self.base} with {self.choice}={self.value}" if self.choice else self.base

    @property
    def is_base(self) -> bool:
        return not self.choice


def off_value(values: Sequence[str]) -> str | None:
    """The first of a choice's values that is called as :data:`OFF` has it."""
    return next((v for v in values if v.lower() in OFF), None)


def varied(schedule: str, offered: Offered, settled: Mapping[str, str], only: Sequence[str]) -> list[str]:
    """The choices to vary, by name: those of ``only``, or all that are not ``settled``. Raises MegagenError if there
    are none."""
    for name in only:
        if name not in offered:
            hint = did_you_mean(name, sorted(offered)) if offered else "it offers none"
            raise MegagenError(f"{schedule} offers no choice {name!r}", hint=hint)
        if name in settled:
            raise MegagenError(f"--only {name} varies what --choose settles", hint=f"leave out --choose {name}=...")
    names = sorted(set(only) or set(offered) - set(settled))
    if not names:
        raise MegagenError(f"{schedule} offers no choice to vary", hint="s.choice(name, option, ...) makes one")
    return names


def changes(settled: Mapping[str, str], offered: Offered, at: Mapping[str, str], names: Sequence[str]) -> list[Variant]:
    """The default, and each other value of ``names``. ``at``: the values that the default has."""
    return _around(DEFAULT, settled, {n: [v for v in offered[n] if v != at[n]] for n in names})


def alone(
    schedule: str, settled: Mapping[str, str], look: Callable[[Mapping[str, str]], Offered], names: Sequence[str]
) -> list[Variant]:
    """All choices off that can be, but for what is ``settled``; and each of ``names`` alone on, at each value.

    ``look`` says what is offered with these choices settled: to turn one off may take others away. Raises MegagenError
    if none of ``names`` can be off.
    """
    base = dict(settled)
    while True:
        offered = look(base)
        left = {n: off for n, values in offered.items() if n not in base and (off := off_value(values)) is not None}
        if not left:
            break
        name = next(iter(left))
        base[name] = left[name]
    others = {n: [v for v in offered[n] if v != base[n]] for n in names if n in base and n in offered}
    if not others:
        raise MegagenError(
            f"none of {schedule}'s choices can be off: {', '.join(names)}",
            hint="the value that leaves something out is called off, none or False",
        )
    return _around(ALL_OFF, base, others)


def _around(base: str, choices: Mapping[str, str], values: Mapping[str, Sequence[str]]) -> list[Variant]:
    return [
        Variant(base, dict(choices)),
        *(Variant(base, {**choices, name: v}, name, v) for name, others in values.items() for v in others),
    ]


def reason(error: MegagenError) -> str:
    """In one line, with where in the schedule."""
    text = " ".join(error.message.split())
    return text if error.loc is None else f"{text} ({Path(error.loc.file).name}:{error.loc.line})"


def same_code(plans: Mapping[str, Plan]) -> dict[str, str]:
    """By name the first one whose Plan is the same, but for its choices and the lines that asked for things."""
    first: dict[str, str] = {}
    return {name: first.setdefault(_bare(plan), name) for name, plan in plans.items()}


def _bare(plan: Plan) -> str:
    def bare(x: Any) -> Any:
        if isinstance(x, dict):
            return {k: bare(v) for k, v in x.items() if k not in ("source", "sources")}
        return [bare(v) for v in x] if isinstance(x, list) else x

    machine = plan.machine.name  # its figures' sources are no lines
    return json.dumps([machine, bare(plan.model_dump(mode="json", exclude={"choices", "machine"}))])


@dataclass(frozen=True)
class Result:
    """``effect``: µs a layer more than the base, round by round. Not timed are those ``refused`` and those that are the
    ``same`` code as another one, whose times they have."""

    variant: Variant
    timing: Timing | None = None
    effect: Timing | None = None
    same: str = ""
    refused: str = ""


def results(
    variants: Sequence[Variant],
    times: Mapping[str, Sequence[float]],
    same: Mapping[str, str],
    refused: Mapping[str, str],
) -> list[Result]:
    """Of each variant. ``times``: µs a layer of each round, by name; ``same``: see :func:`same_code`."""
    found = []
    for v in variants:
        name = same.get(v.name, v.name)
        why = refused.get(v.name) or refused.get(name)
        if why is not None:
            found.append(Result(v, refused=why))
            continue
        effect = None if v.is_base else paired(v.name, times[name], times[same.get(v.base, v.base)])
        found.append(Result(v, Timing.of(v.name, times[name]), effect, "" if name == v.name else name))
    return found


def same_results(replays: Mapping[str, Callable[[], Sequence[Mapping[str, torch.Tensor]]]]) -> None:
    """Replay each on the same input. Raises DeviceError that names those whose outputs, of any rank, are not the bits
    of the first one's."""
    (first, replay), *others = replays.items()
    want = [{name: x.clone() for name, x in rank.items()} for rank in replay()]
    wrong = [(name, found) for name, replay in others if (found := differing(replay(), want))]
    if wrong:
        raise DeviceError(
            f"other bits than {first}: {', '.join(name for name, _ in wrong)}",
            notes=tuple((f"{name}: {', '.join(found)} differ", None) for name, found in wrong),
            hint="choices change how something is computed, never what: this is a bug of megagen or of the schedule",
        )


def differing(made: Sequence[Mapping[str, torch.Tensor]], want: Sequence[Mapping[str, torch.Tensor]]) -> list[str]:
    """Names of outputs that differ in a bit, of any rank."""
    from megagen.bench.verify import same_bits

    pairs = zip(made, want, strict=True)
    return sorted({n for mine, other in pairs for n in other if n not in mine or not same_bits(mine[n], other[n])})
