"""What a Plan must be before anything is launched: one file a property, each refusing what it cannot prove."""

from __future__ import annotations

from megagen.check.channels import channels
from megagen.check.finding import Finding
from megagen.check.mbarriers import mbarriers
from megagen.check.order import order
from megagen.check.races import races
from megagen.check.references import numbers, references
from megagen.check.resources import resources
from megagen.check.ring import ring
from megagen.check.roles import roles
from megagen.ir.plan import Plan

__all__ = ["Finding", "check"]

RULES = (
    references,
    roles,
    channels,
    resources,
    mbarriers,
    ring,
    order,
    races,
    numbers,
)  # each may rely on those before it


def check(plan: Plan) -> tuple[Finding, ...]:
    """What was proved, a property a line, and warnings. Raises CheckError at the user's line for the first refusal."""
    return tuple(finding for rule in RULES for finding in rule(plan))
