"""Every read after its write, every reuse after the last use: each pair of accesses that could meet is ordered.

Accesses are those of :mod:`megagen.ir.touches`, order is that of :mod:`megagen.check.happens`. Of two that touch the
same copy of a channel, the same bytes of shared memory or a tensor, one write at least among them, one must come wholly
before the other, whichever warp, block, rank and launch they are of. What one role's warps write or empty in a launch
is dealt out among them, and so is what they read if they hand it back (``RoleSpec.hands_back``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations, combinations_with_replacement
from typing import NamedTuple, NoReturn

from megagen.check.finding import Finding, placed, proved, refuse, title
from megagen.check.happens import LAUNCHES, At, Happens
from megagen.ir.graph import Scope
from megagen.ir.plan import ChannelPlan, Plan, Reset, StepPlan, SyncKind
from megagen.ir.touches import ACCUM, COUNTED, IN_SHARED, Touch, touches

RULE = "races"
DOES = {
    "read": "reads", "write": "writes", "empty": "empties", "poll": "polls the counter of", "publish": "counts for",
    "copy": "copies into",
}  # fmt: skip
READS = ("read", "poll")


class Access(NamedTuple):
    at: At
    step: StepPlan
    verb: str


def _role(x: Access) -> tuple[str | None, str]:
    return x.step.op, x.step.call


class Problem(NamedTuple):
    message: str
    steps: tuple[StepPlan, ...]


def races(plan: Plan) -> Iterator[Finding]:
    """Exchange memory over launches and ranks, shared memory in a block, tensors between launches."""
    happens = Happens(plan)
    each = {id(step): touches(plan, step) for step in happens.steps.values()}
    touched = {at: each[id(step)] for at, step in happens.steps.items()}
    pairs = {Scope.RANK: 0, Scope.WORLD: 0}
    for c in plan.channels:
        if c.kind in IN_SHARED:
            continue
        found = _channel(happens, c)
        if isinstance(found, Problem):
            _unordered(found, c, _fix(happens, c))
        else:
            pairs[c.scope] += found
    shared, tensors = _shared(happens, touched), _tensors(happens, touched)
    for what, n in (
        ("in a block, shared memory is handed from step to step before it is used again", shared),
        ("on a GPU, what is exchanged is read after it is written, and its place empty before its next use, launch "
         "after launch", pairs[Scope.RANK]),
        ("across ranks the same, with a rank up to a launch ahead", pairs[Scope.WORLD]),
        ("from launch to launch, with the next one begun early, tensors are read and written in turn", tensors),
    ):  # fmt: skip
        yield proved(RULE, f"{what} ({n} pairs of accesses)")


def _unordered(found: Problem, c: ChannelPlan | None = None, fix: str | None = None) -> NoReturn:
    own = [s.source for s in found.steps]
    notes = [(f"{title(s)}, at its line", s.source) for s in dict.fromkeys(found.steps) if s.source.line]
    refuse(RULE, found.message, *([c.source] if c else []), *own, notes=notes, hint=fix)


# channels -------------------------------------------------------------------------------------------------------


def _channel(happens: Happens, c: ChannelPlan) -> Problem | int:
    """What is wrong with a channel, or how many pairs of accesses are in order. Memory is that of the first rank."""
    plan = happens.plan
    data: dict[int, list[Access]] = defaultdict(list)
    words: dict[int, list[Access]] = defaultdict(list)
    each = {id(step): list(_of(plan, step, c)) for step in happens.steps.values() if _may_touch(step, c)}
    for at, step in happens.steps.items():
        for touch in each.get(id(step), ()):
            if at.rank and (c.scope is not Scope.WORLD or touch.verb not in ("write", "publish")):
                continue  # another rank reads and empties its own memory
            if touch.verb == "empty" and touch.what == "counter" and at.block:
                continue  # the first block does
            place = data if touch.what == "channel" else words
            place[(at.launch + touch.ahead) % c.copies].append(Access(at, step, touch.verb))
    pairs, unordered = 0, []
    for accesses in (*data.values(), *words.values()):
        for a, b in combinations(sorted(accesses, key=lambda x: x.at.launch), 2):
            if (a.verb in READS and b.verb in READS) or a.verb == b.verb == "publish":
                continue
            if a.at == b.at or (a.verb == b.verb == "write" and a.at.rank != b.at.rank):
                continue  # one warp's own order; messages of two ranks stand apart
            pairs += 1
            if not _in_order(happens, c, accesses, a, b):
                unordered.append((a, b))
    if unordered:
        a, b = min(unordered, key=_plain)
        return Problem(_pair(c.name, a, b), (a.step, b.step))
    kept = data if c.kind is SyncKind.LAMPORT else words
    return _life(happens, c, kept) or pairs


def _plain(pair: tuple[Access, Access]) -> tuple[bool, bool, At, At]:
    """Of several pairs, that which is easiest to see: what is read is emptied, what is empty is written."""
    verbs = {x.verb for x in pair}
    return "empty" not in verbs, "read" not in verbs, pair[0].at, pair[1].at


def _may_touch(step: StepPlan, c: ChannelPlan) -> bool:
    return step.call == "reset" or c.name in step.reads or c.name in step.writes


def _of(plan: Plan, step: StepPlan, c: ChannelPlan) -> Iterator[Touch]:
    """Touches of a channel, which may have been changed to see whether that would help."""
    if plan.channel(c.name) != c:
        plan = plan.model_copy(update={"channels": tuple(c if x.name == c.name else x for x in plan.channels)})
        if step.call == "reset" and c.reset is Reset.LAUNCH:
            step = step.model_copy(update={"writes": tuple({*step.writes, c.name})})
    for touch in touches(plan, step):
        if touch.name == c.name and touch.what in ("channel", "counter"):
            yield touch


def _in_order(happens: Happens, c: ChannelPlan, accesses: Sequence[Access], a: Access, b: Access) -> bool:
    """``a`` is of an earlier launch, or of the same."""
    if _comes_before(happens, accesses, a, b):
        return True
    if a.at.launch != b.at.launch:
        return False
    if _comes_before(happens, accesses, b, a):
        return True
    verbs = {a.verb, b.verb}
    if len(verbs) == 1:
        return _role(a) == _role(b) and a.at.kernel == b.at.kernel  # each warp has its own part
    if "empty" not in verbs:
        return True  # whoever reads waits for what is written, by word or by count
    # A reader empties what it has read, which its writer has written: if nobody else reads it.
    emptier, other = (a, b) if a.verb == "empty" else (b, a)
    return emptier.step.call != "reset" and (other.verb in ("write", "publish") or _role(a) == _role(b))


def _comes_before(happens: Happens, accesses: Sequence[Access], a: Access, b: Access) -> bool:
    """Whether ``a`` does; what is written comes before whoever comes after all of its readers, who waited for it."""
    if happens.before(a.at, b.at):
        return True
    if a.verb not in ("write", "publish"):
        return False
    readers = [x for x in accesses if x.verb in READS and x.at.launch == a.at.launch]
    return bool(readers) and all(happens.before(r.at, b.at) for r in readers)


def _life(happens: Happens, c: ChannelPlan, copies: dict[int, list[Access]]) -> Problem | None:
    """A copy is emptied between two launches' use of it: after all of the one, before the other launch begins."""
    for accesses in copies.values():
        uses: dict[int, list[Access]] = defaultdict(list)
        for x in accesses:
            if x.verb != "empty":
                uses[x.at.launch].append(x)
        for launch, used in uses.items():
            if launch + c.copies not in uses:
                continue
            emptied = [x for x in accesses if x.verb == "empty" and launch <= x.at.launch < launch + c.copies]
            if not any(all(_emptied(happens, accesses, u, e) for u in used) for e in emptied):
                what = "the counter of " * (c.kind in COUNTED)
                return Problem(
                    f"nothing empties {what}{c.name} between two launches' use of the same copy",
                    tuple(dict.fromkeys(x.step for x in used)),
                )
    return None


def _emptied(happens: Happens, accesses: Sequence[Access], use: Access, by: Access) -> bool:
    """Whether ``by`` empties after the use; a reader does, after its own."""
    own = by.step.call != "reset" and by.at.launch == use.at.launch
    return own or _comes_before(happens, accesses, use, by)


def _pair(name: str, a: Access, b: Access) -> str:
    """Two accesses in words. ``a`` is not the later one."""
    where = []
    if b.at.rank != a.at.rank:
        where.append("on another rank")
    elif b.at.block != a.at.block:
        where.append("in another block")
    elif b.at.warp != a.at.warp and _role(a) == _role(b):
        where.append("on another warp")
    launches = b.at.launch - a.at.launch
    if launches:
        where.append(f"{launches} launch{'es' * (launches > 1)} later")
    at = f", {', '.join(where)}," if where else ""
    return (
        f"nothing orders two uses of {name}: {title(a.step)} {DOES[a.verb]} it; {title(b.step)}{at} {DOES[b.verb]} it"
    )


def _fix(happens: Happens, c: ChannelPlan) -> str | None:
    """The nearest change of the channel with which its accesses would be in order."""
    ways: list[tuple[int, Reset]] = [(copies, c.reset) for copies in range(1, LAUNCHES)]
    if c.kind is SyncKind.LAMPORT:
        ways += [(copies, Reset.LAUNCH) for copies in range(1, LAUNCHES)]
        ways += [(1, Reset.READER)]
    for copies, reset in ways:
        if isinstance(_channel(happens, c.model_copy(update={"copies": copies, "reset": reset})), int):
            zero = "POSITIVE_ZERO, " * (c.empty == 0)
            said = zero + f"copies={copies}" + ", reset=by_reader" * (reset is Reset.READER)
            return f"lamport({said})" if c.kind is SyncKind.LAMPORT else said
    return None


# shared memory --------------------------------------------------------------------------------------------------


def _shared(happens: Happens, touched: dict[At, frozenset[Touch]]) -> int:
    """A block's regions, by their bytes. The ring and the accumulators pass from role to role slot by slot."""
    plan = happens.plan
    streams = {plan.ring.region, ACCUM}
    uses: dict[str, list[Access]] = defaultdict(list)
    for at, step in happens.block().items():
        for touch in touched[at]:
            if touch.what == "region":
                uses[touch.name].append(Access(at, step, touch.verb))
    pairs = 0
    for x, y in combinations_with_replacement(plan.regions, 2):
        if x.offset + x.bytes <= y.offset or y.offset + y.bytes <= x.offset or (x is y and x.name in streams):
            continue
        for a in uses[x.name]:
            for b in uses[y.name]:
                if a.at == b.at or a.at.kernel != b.at.kernel or a.verb == b.verb == "read":
                    continue
                pairs += 1
                # A role's warps meet at its own barrier, or have a part each; what a cluster sends completes one.
                if x is y and (_role(a) == _role(b) or x.name.startswith("cluster_")):
                    continue
                if not happens.before(a.at, b.at) and not happens.before(b.at, a.at):
                    name = x.name if x is y else f"{x.name}, which overlaps {y.name}"
                    _unordered(Problem(_pair(name, a, b), (a.step, b.step)))
    return pairs


# tensors --------------------------------------------------------------------------------------------------------


def _tensors(happens: Happens, touched: dict[At, frozenset[Touch]]) -> int:
    """Of one launch by name; of two launches any, since one's output is the other's input.

    Of two launches even what both read: the one before may be another Plan's, and write it. So whatever a launch does
    to a tensor comes after all launches before it, and what is proved of one Plan holds for Plans in a row. But for
    roles that wait by themselves (``RoleSpec.ahead``): what they read before is older than the launch before.
    """
    roles = placed(happens.plan)

    def ahead(step: StepPlan) -> bool:
        spec = roles.get((step.op or "", step.call))
        return spec is not None and spec.ahead

    uses: dict[int, dict[tuple[str, int], list[Access]]] = defaultdict(lambda: defaultdict(list))
    for at, step in happens.steps.items():
        if at.rank == 0 and at.launch < 2:
            for touch in touched[at]:
                if touch.what == "tensor":
                    uses[at.launch][touch.name, touch.ahead].append(Access(at, step, touch.verb))
    pairs = 0
    for (name, _), accesses in uses[0].items():
        for a, b in combinations(accesses, 2):
            if a.verb == b.verb and (a.verb == "read" or _role(a) == _role(b)):
                continue
            pairs += 1
            if not happens.before(a.at, b.at) and not happens.before(b.at, a.at):
                _unordered(Problem(_pair(name, a, b), (a.step, b.step)))
    first, second = (_distinct([a for found in uses[n].values() for a in found]) for n in (0, 1))
    for a in first:
        for b in second:
            pairs += {a.verb, b.verb} != {"read"}
            if not happens.before(a.at, b.at) and not ahead(b.step):
                _unordered(Problem(_pair("a tensor", a, b), (a.step, b.step)))
    return pairs


def _distinct(accesses: Sequence[Access]) -> list[Access]:
    return list({(a.at, a.verb): a for a in accesses}.values())
