"""The probe on this GPU: every case runs, and its figures are physically possible."""

from __future__ import annotations

import probe_bounds
import pytest

from megagen.probe.cases import CASES
from megagen.probe.known import GB300, H200
from megagen.probe.run import Report, probe
from megagen.settings import Settings

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def report() -> Report:
    return probe(CASES, Settings.from_env(), lambda: None, quick=True)


def test_every_case_runs(report: Report) -> None:
    assert {o.case.name: o.reason for o in report.failed} == {}
    assert {o.case.name for o in report.skipped} <= {"peer"}


def test_figures_are_possible(report: Report) -> None:
    probe_bounds.possible(report.figures)


def test_figures_agree_with_each_other(report: Report) -> None:
    probe_bounds.consistent(report.figures, report.device.rated_bytes_per_s, report.device.sms)


def test_known_figures_are_measured(report: Report) -> None:
    two = {n for n in {*H200.figures, *GB300.figures} if n.startswith(("peer", "hop_gpu"))}
    missing = {*H200.figures, *GB300.figures} - set(report.figures)
    assert missing <= (two if report.skipped else set())
