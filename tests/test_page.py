"""The page of a trace: what the file holds, and what a reader sees, points at and sorts in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest
import trace_samples

from megagen.errors import MegagenError
from megagen.trace.model import Block, Page, Row, Run
from megagen.trace.page import write
from megagen.trace.spans import Kind

ROOT = Path(__file__).resolve().parent.parent
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CSP = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
MB = 1e6
HOSTILE = "</script><img src=x onerror=alert(1)><!--<script>@@js@@&amp;"


# ---- the file --------------------------------------------------------------------------------------------------------


class Parsed(HTMLParser):
    """Attributes that could load something, the policy, and the text of every script and style, by its id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.refers: list[str] = []
        self.policy = ""
        self.inline: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.refers += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""
        if tag in ("script", "style"):
            self.inline.append((found.get("id") or tag, ""))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem:
            name, before = self.inline[-1]
            self.inline[-1] = name, before + data


def spans_of(numbers: list[int]) -> list[tuple[int, ...]]:
    """What seven numbers a span, begins as differences and ends as lengths, stand for."""
    spans, begin = [], 0
    for at in range(0, len(numbers), 7):
        *names, since, length = numbers[at : at + 7]
        begin += since
        spans.append((*names, begin, begin + length))
    return spans


def to_ns(value: Any) -> Any:
    match value:
        case float():
            return round(value, 3)
        case dict():
            return {key: to_ns(v) for key, v in value.items()}
        case list():
            return [to_ns(v) for v in value]
    return value


@pytest.mark.parametrize("runs", [1, 2])
def test_the_file_holds_the_model_and_asks_for_nothing(tmp_path: Path, runs: int) -> None:
    page = trace_samples.page(runs)
    write(page, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    parsed = Parsed(text)
    assert parsed.policy.startswith(CSP)
    assert parsed.refers == ["data:,"]  # the icon, so that nobody asks a server for one
    assert [name for name, _ in parsed.inline] == ["style", "data", "script"]
    data = json.loads(dict(parsed.inline)["data"])
    for warp in (w for run in data["runs"] for block in run["blocks"] for w in block["warps"]):
        warp["spans"] = [list(span) for span in spans_of(warp["spans"])]
    assert data == to_ns(page.model_dump(mode="json"))
    assert len(text) < 5 * MB


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    path.write_text("the one before")

    def full(self: Path, mode: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "chmod", full)
        with pytest.raises(MegagenError, match=r"cannot write .*page.html: No space left"):
            write(trace_samples.page(), path)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"page.html": "the one before"}
    write(trace_samples.page(), path)
    assert path.stat().st_mode & 0o777 == 0o644
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    with pytest.raises(MegagenError, match="cannot write"):
        write(trace_samples.page(), tmp_path / "nowhere" / "page.html")


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on the PATH")
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with driver.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@dataclass
class View:
    """A page that is open, and whatever went wrong in it."""

    tab: Any
    page: Page
    url: str
    faults: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def range(self) -> tuple[float, float]:
        """What the axis shows, in µs."""
        lo, hi = self.tab.evaluate("megagen.range()")
        return lo, hi

    def point(self, time: float, row: str, down: float = 0.5) -> tuple[float, float]:
        """Where a time is in the row of a label, ``down`` of its height from its top, in px of the window."""
        plot = "warp-plot" if "data-warp" in row else "op-plot"
        place = self.tab.locator(row).first
        place.scroll_into_view_if_needed()
        canvas, label = self.tab.locator(f"#{plot} canvas").bounding_box(), place.bounding_box()
        lo, hi = self.range()
        return canvas["x"] + (time - lo) / (hi - lo) * canvas["width"], label["y"] + down * label["height"]

    def hover(self, time: float, row: str, down: float = 0.5) -> str:
        """The tooltip there, or ''."""
        at = self.point(time, row, down)
        self.settle()  # a scroll still under way would hide it again
        self.tab.mouse.move(*at)
        self.settle()
        if not self.tab.locator("#tip").is_visible():
            return ""
        return "\n".join(filter(None, self.text("#tip").split("\n")))

    def pixel(self, time: float, row: str, down: float = 0.5) -> tuple[int, int, int]:
        """The colour there, on the screen."""
        x, y = self.point(time, row, down)
        self.tab.mouse.move(1, 1)
        self.settle()
        png = self.tab.screenshot(clip={"x": int(x), "y": int(y), "width": 1, "height": 1})
        return first_pixel(png)

    def colour(self, name: str) -> tuple[int, int, int]:
        """A colour of the style sheet."""
        style = "getComputedStyle(document.documentElement).getPropertyValue"
        return rgb(self.tab.evaluate(f"{style}('--{name}')"))

    def text(self, where: str) -> str:
        return self.tab.locator(where).inner_text()

    def table(self, where: str) -> list[list[str]]:
        """The text of the cells of its body."""
        return self.tab.locator(f"{where} tbody").evaluate(
            "body => [...body.rows].map((row) => [...row.cells].map((cell) => cell.textContent))"
        )

    def settle(self) -> None:
        """Until what was asked for is drawn."""
        self.tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def address(self) -> str:
        """The page's, which follows what is shown a moment later."""
        self.tab.wait_for_timeout(250)
        return self.tab.url


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Page], Path]:
    folder = tmp_path_factory.mktemp("pages")
    kept: dict[str, Path] = {}

    def give(page: Page) -> Path:
        key = page.model_dump_json()
        if key not in kept:
            kept[key] = folder / f"{len(kept)}.html"
            write(page, kept[key])
        return kept[key]

    return give


@pytest.fixture
def show(browser: Any, written: Callable[[Page], Path]) -> Iterator[Callable[..., View]]:
    """Open a page. Whichever test it is for, nothing may fail in it and nothing may be asked of anybody."""
    views: list[View] = []

    def opened(page: Page, hash: str = "", scheme: str = "light", width: int = 1280, height: int = 900) -> View:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        view = View(context.new_page(), page, written(page).as_uri())
        view.tab.on("console", lambda message: view.faults.append(message.text))
        view.tab.on("pageerror", lambda error: view.faults.append(str(error)))
        view.tab.on("dialog", lambda dialog: (view.faults.append(dialog.message), dialog.dismiss()))
        view.tab.on("request", lambda request: view.requests.append(request.url.partition("#")[0]))
        view.tab.goto(view.url + hash)
        views.append(view)
        return view

    yield opened
    for view in views:
        assert view.faults == []
        assert set(view.requests) == {view.url}
        view.tab.context.close()


@pytest.fixture(scope="module")
def one() -> Page:
    return trace_samples.page(1)


@pytest.fixture(scope="module")
def both() -> Page:
    return trace_samples.page(2)


def rgb(text: str) -> tuple[int, int, int]:
    """Of ``#rrggbb`` or ``rgb(r, g, b)``."""
    if found := re.fullmatch(r"\s*#(..)(..)(..)\s*", text):
        red, green, blue = (int(part, 16) for part in found.groups())
    else:
        red, green, blue = (int(part) for part in re.findall(r"\d+", text)[:3])
    return red, green, blue


def first_pixel(png: bytes) -> tuple[int, int, int]:
    at, packed = 8, b""
    while at < len(png):
        size, name = struct.unpack_from(">I4s", png, at)
        packed += png[at + 8 : at + 8 + size] if name == b"IDAT" else b""
        at += size + 12
    _, red, green, blue = zlib.decompress(packed)[:4]  # whichever the filter, it has nothing to add yet
    return red, green, blue


def near(a: tuple[int, int, int], b: tuple[int, int, int], within: int = 4) -> bool:
    return max(abs(x - y) for x, y in zip(a, b, strict=True)) <= within


def op(run: Run, name: str) -> Row:
    return next(row for row in run.rows if row.op == name)


def fixed(value: float, digits: int = 2) -> str:
    """As JavaScript's toFixed, which rounds halves up."""
    return str(Decimal(value).quantize(Decimal(10) ** -digits, ROUND_HALF_UP))


def label(name: str) -> str:
    return f'[data-op="{name}"]'


def number(text: str) -> float:
    return float(text.replace("−", "-").replace("+", ""))


class Seen(NamedTuple):
    """A span of a block in µs, with the names of its step and edge."""

    step: str
    edge: str
    kind: Kind
    slot: int
    bytes: int
    begin: float
    end: float


def spans(run: Run, block: Block, warp: int) -> list[Seen]:
    steps = {step.index: f"{step.op}.{step.call}" if step.op else step.call for step in run.steps}
    edges = {edge.index: edge.name for edge in run.edges}
    return [
        Seen(steps[step], edges.get(edge, ""), Kind(kind), slot, size, begin / 1e3, end / 1e3)
        for kind, step, edge, slot, size, begin, end in block.warps[warp].spans
    ]


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "traces").glob("*.html")), ids=lambda path: path.stem)
def test_the_pages_of_the_documentation_open_at_once(browser: Any, path: Path) -> None:
    assert path.stat().st_size < 5_000_000
    tab, faults = browser.new_page(), []
    tab.on("console", lambda message: faults.append(message.text))
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.on("request", lambda request: request.url.startswith("file:") or faults.append(request.url))
    tab.goto(path.as_uri())
    assert tab.evaluate("megagen.ready") < 2000
    assert tab.locator("#op-labels [data-op]").count() >= 10 and not faults
    tab.close()


def hash_around(seen: Seen, room: float) -> str:
    return f"#t={seen.begin - room:.3f}~{seen.end + room:.3f}"


@pytest.mark.parametrize("runs", [1, 2])
def test_it_opens_at_once_and_every_op_has_a_row(show: Callable[..., View], runs: int) -> None:
    page = trace_samples.page(runs)
    view = show(page)
    assert view.tab.evaluate("megagen.ready") < 2000  # ms since the navigation began
    assert view.tab.title() == page.title
    names = view.tab.locator("#op-labels [data-op]").evaluate_all("all => all.map((label) => label.dataset.op)")
    assert names == [row.op for row in page.runs[0].rows]
    assert view.text(label("combine")).split() == ["▶", "combine", "[64]"]
    assert view.text(label("gate_up")).split() == ["▶", "gate_up"]
    totals = view.table("#totals")
    for run, row in zip(page.runs, totals, strict=False):
        assert number(row[1]) == round(run.total[1], 2)
        assert run.plain and run.stamped
        assert row[6] == f"{fixed(run.plain / trace_samples.FLOOR)} ×"
        assert row[3:5] == [fixed(run.plain), f"+1.90  ({fixed(190 / run.plain, 1)} %)"]
    assert not view.tab.locator("#dropped").is_visible()
    wide = view.tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide == 0


def test_bars_stand_where_the_medians_are(show: Callable[..., View], one: Page) -> None:
    view = show(one)
    gate_up, row = op(one.runs[0], "gate_up"), label("gate_up")
    middle = (gate_up.begin[1] + gate_up.end[1]) / 2
    low = 15 / 26  # of the row: in the bar of work, between its whiskers
    assert near(view.pixel(middle, row, low), view.colour("work"))
    assert near(view.pixel(gate_up.end[2] + 1, row, low), view.colour("page"))
    assert near(view.pixel(gate_up.begin[1] - 1, row, low), view.colour("page"))
    ring, l2 = gate_up.loads
    assert near(view.pixel((ring.begin[1] + ring.end[1]) / 2, row, 7 / 26), view.colour("ring"))
    assert near(view.pixel((l2.begin[1] + l2.end[1]) / 2, row, 4 / 26), view.colour("l2"))
    (begin, end), (after, _) = one.runs[0].hbm_busy[:2]
    assert near(view.pixel((begin + end) / 2, '[data-lane="hbmA"]'), view.colour("ring"))
    assert near(view.pixel((end + after) / 2, '[data-lane="hbmA"]'), view.colour("page"))


def test_hovering_over_an_op_tells_its_numbers(show: Callable[..., View], one: Page) -> None:
    view = show(one)
    down = op(one.runs[0], "down")
    tip = view.hover(30, label("down"))
    lines = tip.splitlines()
    assert lines[0] == "down"
    assert "expert_gemm · 132 blocks · _layer.py:65" in lines
    for name, (p10, p50, p90) in (("begin", down.begin), ("end", down.end)):
        assert f"{name}\t{fixed(p50)}\t{fixed(p10)} – {fixed(p90)}" in lines
    assert f"first load into the ring\t{fixed(down.loads[0].begin[1])}" in tip


def test_hovering_over_a_leg_or_a_gap_tells_what_it_is(show: Callable[..., View], one: Page) -> None:
    view = show(one)
    leg = next(leg for leg in one.runs[0].path if leg.what == "hop" and leg.op == "combine")
    tip = view.hover((leg.begin + leg.end) / 2, '[data-lane="pathA"]')
    assert tip.startswith("combine.compute")
    assert "critical path: hop to_combine" in tip and f"rank 0, block {leg.block}, warp {leg.warp}" in tip
    assert f"begin\t{fixed(leg.begin, 3)} µs" in tip
    (_, end), (begin, _) = one.runs[0].hbm_busy[:2]
    tip = view.hover((begin + end) / 2, '[data-lane="hbmA"]')
    assert tip.startswith("HBM idle") and f"length\t{fixed(begin - end, 3)} µs" in tip


def test_a_row_unfolds_into_its_roles(show: Callable[..., View], one: Page) -> None:
    view = show(one)
    assert view.tab.locator("[data-part]").count() == 0
    view.tab.locator(f"{label('unpooler')} button").click()
    parts = view.tab.locator("[data-part]").all_inner_texts()
    roles = ["load_weights", "warp 0"], ["math", "warps 4–11"], ["reduce", "warp 2"], ["finish", "warp 3"]
    assert [part.split("\n") for part in parts] == list(roles)
    part = op(one.runs[0], "unpooler").parts[2]
    for (role, _), colour in zip(roles, ("ring", "work", "work", "work"), strict=True):
        known = next(p for p in op(one.runs[0], "unpooler").parts if p.role == role)
        at = (known.ready[1] + known.end[1]) / 2
        assert near(view.pixel(at, f'[data-part="unpooler.{role}"]'), view.colour(colour)), role
    shown = view.tab.locator("#op-numbers .part").nth(2).inner_text().split()
    assert shown == [fixed(t) for t in (part.ready[1], part.end[1], part.end[1] - part.ready[1])]
    tip = view.hover(40, '[data-part="unpooler.reduce"]')
    assert tip.startswith("unpooler.reduce") and f"input there\t{fixed(part.ready[1])}" in tip
    view.tab.keyboard.press("Enter")  # the label has kept the focus
    assert view.tab.locator("[data-part]").count() == 0


@pytest.mark.parametrize("kind", [Kind.JOB, Kind.WAIT, Kind.LOAD, Kind.PREFETCH])
def test_hovering_over_a_span_tells_what_it_is(show: Callable[..., View], one: Page, kind: Kind) -> None:
    run = one.runs[0]
    block, warp = run.blocks[0], {Kind.LOAD: 0, Kind.PREFETCH: 1}.get(kind, 5)
    known = spans(run, block, warp)
    seen = next(span for span in known if span.kind == kind and span.step.startswith(("gate_up", "next_qkvg")))
    at, down = (seen.begin + seen.end) / 2, 0.8
    if kind == Kind.JOB:  # a stretch of it that is no wait
        waits = [span for span in known if span.kind == Kind.WAIT and span.begin >= seen.begin]
        before, after = next((a, b) for a, b in pairwise(waits) if b.begin - a.end > 0.1)
        at, down = (before.end + after.begin) / 2, 0.3
    view = show(one, hash_around(seen, 0.4))
    lines = view.hover(at, f'[data-warp="{warp}"]', down).splitlines()
    assert lines[0] == seen.step
    assert lines[1] == {Kind.JOB: "job", Kind.WAIT: "waits", Kind.LOAD: "load issued"}.get(kind, "prefetch issued")
    told = dict(line.split("\t") for line in lines[2:])
    if kind in (Kind.JOB, Kind.WAIT):
        length = f"{fixed(seen.end - seen.begin, 3)} µs"
        assert (told["begin"], told["end"], told["length"]) == (
            f"{fixed(seen.begin, 3)} µs",
            f"{fixed(seen.end, 3)} µs",
            length,
        )
    else:
        assert told["at"] == f"{fixed(seen.begin, 3)} µs"
        assert told["bytes"] == "36,864 (36.0 KiB)"
    if kind == Kind.JOB:
        within = [s.end - s.begin for s in waits if s.end <= seen.end]
        assert told["of it waits"] == f"{fixed(sum(within), 3)} µs, {len(within)} times"
    if kind == Kind.WAIT:
        assert told["for"].split()[0] == seen.edge
    if kind in (Kind.WAIT, Kind.LOAD):
        assert told["slot"] == str(seen.slot)
    assert told["warp"] == f"{warp} of rank {block.rank}, block {block.block}, SM {block.sm}"
    assert told["from"].startswith("_layer.py:")


def test_a_wait_for_a_stage_names_the_load_that_ended_it(show: Callable[..., View], one: Page) -> None:
    run = one.runs[0]
    waits = [s for s in spans(run, run.blocks[0], 7) if s.kind == Kind.WAIT and s.edge == "ring_full"]
    wait = waits[len(waits) // 2]
    issued = [s.begin for s in spans(run, run.blocks[0], 0) if s.kind == Kind.LOAD and s.slot == wait.slot]
    load = max(time for time in issued if time <= wait.end)
    view = show(one, hash_around(wait, 1))
    tip = view.hover((wait.begin + wait.end) / 2, '[data-warp="7"]')
    assert f"its load\tissued at {fixed(load, 3)}, {fixed(wait.end - load, 3)} µs before the end" in tip


def test_the_wheel_zooms_at_the_pointer(show: Callable[..., View], one: Page) -> None:
    view = show(one)
    whole = view.range()
    left, y = view.point(0, label("gate_up"))
    x = 600  # a wheel's event has whole pixels
    time = (x - left) * whole[1] / (view.point(whole[1], label("gate_up"))[0] - left)
    view.tab.mouse.move(x, y)
    for _ in range(3):
        view.tab.mouse.wheel(0, -200)
        view.settle()
    lo, hi = view.range()
    assert hi - lo == pytest.approx((whole[1] - whole[0]) * 2.718281828 ** (-3 * 200 * 0.002), rel=0.02)
    assert view.point(time, label("gate_up"))[0] == pytest.approx(x, abs=0.5)
    view.tab.mouse.wheel(0, 200)
    view.settle()
    assert view.range()[1] - view.range()[0] > 1.3 * (hi - lo)
    view.tab.mouse.wheel(0, 300)
    view.tab.mouse.wheel(0, 300)
    view.tab.mouse.wheel(0, 300)
    view.settle()
    assert view.range() == pytest.approx(whole)


def test_a_wheel_that_has_nothing_to_zoom_out_of_scrolls_the_page(show: Callable[..., View], one: Page) -> None:
    view = show(one)
    view.tab.mouse.move(*view.point(36, label("gate_up")))
    view.tab.mouse.wheel(0, 200)
    view.tab.wait_for_timeout(100)
    assert view.tab.evaluate("scrollY") > 100
    whole = view.range()
    view.tab.mouse.wheel(0, -100)  # the same turn of the wheel goes on scrolling
    view.settle()
    assert view.range() == whole


def test_dragging_zooms_and_with_shift_moves(show: Callable[..., View], one: Page) -> None:
    view = show(one)
    whole, row = view.range(), label("attention")

    def drag(begin: float, end: float) -> None:
        (x, y), (to, _) = view.point(begin, row), view.point(end, row)
        view.tab.mouse.move(x, y)
        view.tab.mouse.down()
        view.tab.mouse.move((x + to) / 2, y + 20)
        view.tab.mouse.move(to, y + 20)
        view.tab.mouse.up()
        view.settle()

    drag(50, 30)
    pixel = (whole[1] - whole[0]) / 800
    assert view.range() == pytest.approx((30, 50), abs=2 * pixel)
    view.tab.keyboard.down("Shift")
    drag(40, 42)
    view.tab.keyboard.up("Shift")
    assert view.range() == pytest.approx((28, 48), abs=2 * pixel)
    drag(35, 35.02)  # a click, or nearly
    assert view.range() == pytest.approx((28, 48), abs=2 * pixel)


def test_the_cursor_has_the_time_that_is_under_it(show: Callable[..., View], one: Page) -> None:
    """Also when what is shown has changed and the pointer has not moved."""
    view = show(one)
    cursor = view.tab.locator("#op-plot .cursor")
    view.hover(30, label("attention"))
    assert float(cursor.get_attribute("data-time")) == pytest.approx(30, abs=0.3)
    (x, y), (to, _) = view.point(30, label("attention")), view.point(50, label("attention"))
    view.tab.mouse.move(x, y)
    view.tab.mouse.down()
    view.tab.mouse.move(to, y)
    view.tab.mouse.up()
    view.settle()
    lo, hi = view.range()
    box = view.tab.locator("#op-plot canvas").bounding_box()
    under = lo + (to - box["x"]) / box["width"] * (hi - lo)
    assert float(cursor.get_attribute("data-time")) == pytest.approx(under, abs=0.1)
    view.tab.keyboard.press("+")
    view.settle()
    assert not cursor.is_visible()


def test_an_emulated_run_says_so(show: Callable[..., View], both: Page) -> None:
    facts = (("origin", "emulated"), *both.runs[1].facts[1:])
    view = show(Page(title="one of each", runs=(both.runs[0], both.runs[1].model_copy(update={"facts": facts}))))
    assert view.text("#dropped") == f"{both.runs[1].name} is emulated: its times show order, not length."


def test_keys_buttons_and_a_double_click(show: Callable[..., View], one: Page) -> None:
    view = show(one, "#t=20~40")
    full = trace_samples.OPS[-1].begin

    def after(deed: Callable[[], None]) -> tuple[float, float]:
        deed()
        view.settle()
        return view.range()

    press = view.tab.keyboard.press
    assert after(lambda: press("+")) == pytest.approx((25, 35))
    assert after(lambda: press("ArrowRight")) == pytest.approx((27.5, 37.5))
    assert after(lambda: press("ArrowLeft")) == pytest.approx((25, 35))
    assert after(lambda: press("-")) == pytest.approx((20, 40))
    assert after(lambda: view.tab.click('[data-do="in"]')) == pytest.approx((25, 35))
    assert after(lambda: view.tab.click('[data-do="right"]')) == pytest.approx((27.5, 37.5))
    lo, hi = after(lambda: press("0"))
    assert lo == 0 and hi > full
    assert after(lambda: view.tab.click('[data-do="in"]')) != (lo, hi)
    assert after(lambda: view.tab.click('[data-do="reset"]')) == pytest.approx((lo, hi))
    after(lambda: press("+"))
    x, y = view.point(40, label("gate_up"))
    assert after(lambda: view.tab.mouse.dblclick(x, y)) == pytest.approx((lo, hi))
    for _ in range(40):
        press("+")
    view.settle()
    assert 0.01 < view.range()[1] - view.range()[0] < 0.05  # a step of the clock or so, no less
    view.tab.mouse.move(x, y)
    view.tab.mouse.down()
    view.tab.mouse.move(x + 9, y)
    view.tab.mouse.up()
    view.settle()
    assert 0.01 < view.range()[1] - view.range()[0] < 0.05


def test_another_block(show: Callable[..., View], one: Page) -> None:
    view = show(one)
    run = one.runs[0]
    chosen = run.blocks[4]
    names = view.tab.locator("#block option").all_inner_texts()
    assert names == [f"rank {b.rank}, block {b.block}, SM {b.sm}, ends {fixed(b.end)} µs" for b in run.blocks]
    view.tab.select_option("#block", label=names[4])
    view.settle()
    assert view.tab.locator("#warp-labels .warp").all_inner_texts() == [f"{w.warp}\n{w.title}" for w in chosen.warps]
    for warp, shown in enumerate(view.tab.locator("#warp-numbers > div:not(.axis)").all_inner_texts()):
        waited = sum(span.end - span.begin for span in spans(run, chosen, warp) if span.kind == Kind.WAIT)
        assert number(shown.split()[0]) == pytest.approx(waited, abs=0.006)
    job = next(span for span in spans(run, chosen, 1) if span.kind == Kind.JOB and span.end - span.begin > 10)
    tip = view.hover((job.begin + job.end) / 2, '[data-warp="1"]', 0.3)
    assert f"begin\t{fixed(job.begin, 3)} µs" in tip and f"block {chosen.block}," in tip
    assert view.address().endswith(f"#block={chosen.rank}.{chosen.block}")


def test_two_runs_and_what_is_between_them(show: Callable[..., View], both: Page) -> None:
    view = show(both)
    first, second = (op(run, "down") for run in both.runs)
    index = [row.op for row in both.runs[0].rows].index("down")
    change = [second.begin[1] - first.begin[1], second.end[1] - first.end[1]]
    change.append(second.length[1] - first.length[1])
    shown = view.tab.locator("#op-numbers > div:not(.axis)").nth(index).locator("span").all_inner_texts()
    assert [number(text) for text in shown] == pytest.approx(change, abs=0.0051)
    assert shown[0].startswith("−1.6")
    tip = view.hover(20, label("down"))
    line = next(line for line in tip.splitlines() if line.startswith("begin"))
    assert [number(cell) for cell in line.split("\t")[1::2]] == pytest.approx(
        [first.begin[1], second.begin[1], change[0]], abs=0.0051
    )
    for row, share in ((10 / 38, first), (28 / 38, second)):
        colour = view.colour("work" if share is first else "work-b")
        assert near(view.pixel((share.begin[1] + share.end[1]) / 2, label("down"), row), colour)
    totals = view.tab.locator('#totals [data-delta="total"]').inner_text()
    assert number(totals) == pytest.approx(both.runs[1].total[1] - both.runs[0].total[1], abs=0.0051)
    numbers = {row[0]: row for row in view.table("#numbers")}["down"]
    heads = [head.strip() for head in view.tab.locator("#numbers th").all_inner_texts()]
    at = heads.index("begin A")
    assert [number(cell) for cell in numbers[at : at + 3]] == pytest.approx(
        [first.begin[1], second.begin[1], change[0]], abs=0.0051
    )


def test_either_run_alone(show: Callable[..., View], both: Page) -> None:
    view = show(both)
    row = [row.op for row in both.runs[0].rows].index("down")

    def numbers() -> list[float]:
        texts = view.tab.locator("#op-numbers > div:not(.axis)").nth(row).locator("span").all_inner_texts()
        return [number(text) for text in texts]

    for hidden, shown in ((1, 0), (0, 1)):
        view.tab.locator("#shown input").nth(hidden).uncheck()
        down = op(both.runs[shown], "down")
        assert numbers()[:2] == pytest.approx([down.begin[1], down.end[1]], abs=0.0051)
        view.settle()
        colour = view.colour(("work", "work-b")[shown])
        assert near(view.pixel((down.begin[1] + down.end[1]) / 2, label("down"), 15 / 26), colour)
        view.tab.locator("#shown input").nth(hidden).check()
    view.tab.locator("#shown input").nth(0).uncheck()
    view.tab.locator("#shown input").nth(1).uncheck()  # one of them stays
    assert view.tab.locator("#shown input").nth(0).is_checked()


def test_ops_that_only_one_run_has(show: Callable[..., View], both: Page) -> None:
    first, second = both.runs
    fewer = first.model_copy(update={"rows": tuple(row for row in first.rows if row.op != "combine")})
    other = second.model_copy(update={"rows": tuple(row for row in second.rows if row.op != "input_norm")})
    view = show(Page(title="two", runs=(fewer, other)))
    names = view.tab.locator("#op-labels [data-op]").evaluate_all("all => all.map((label) => label.dataset.op)")
    assert names == [row.op for row in first.rows]  # each stands after what comes before it
    shown = view.tab.locator("#op-numbers > div:not(.axis)").nth(names.index("combine")).inner_text().split()
    assert shown == ["–", "–", "–"]
    assert "begin\t–\t–" in view.hover(20, label("combine"))


def test_tables_sort_by_any_column(show: Callable[..., View], one: Page) -> None:
    view = show(one)
    rows = one.runs[0].rows

    def ops_by(column: str) -> list[str]:
        view.tab.locator("#numbers th button", has_text=re.compile(f"^{column}$")).click()
        return [row[0] for row in view.table("#numbers")]

    lengths = {row.op: row.length[1] for row in rows}
    assert ops_by("length") == sorted(lengths, key=lambda name: -lengths[name])
    assert view.tab.locator('#numbers th[aria-sort="descending"]').inner_text().startswith("length")
    assert ops_by("length") == sorted(lengths, key=lambda name: lengths[name])
    assert ops_by("op") == sorted(lengths)
    loads = {row.op: load.begin[1] for row in rows for load in row.loads if load.into == "ring"}
    loaded = ops_by("first load")
    assert loaded[: len(loads)] == sorted(loads, key=lambda name: -loads[name])
    assert ops_by("first load")[len(loads) :] == loaded[len(loads) :]  # what has none comes last either way
    waits = [float(row[5]) for row in view.table("#waits")]
    assert waits == sorted(waits, reverse=True) and len(waits) == len(one.runs[0].waits)
    share = one.runs[0].shares[0]
    assert view.table("#shares")[0][:3] == [share.op, share.what, fixed(share.us[1])]
    assert view.table("#shares")[0][4] == f"{fixed(100 * share.us[1] / one.runs[0].total[1], 1)} %"


def test_a_long_table_shows_its_first_rows_until_asked(show: Callable[..., View], one: Page) -> None:
    view = show(one)
    count = len(one.runs[0].waits)
    visible = view.tab.locator("#waits tbody tr:visible")
    assert visible.count() == 10 < count
    view.tab.locator("#waits tfoot button").click()
    assert visible.count() == count


def test_a_wait_of_the_table_is_shown_above(show: Callable[..., View], one: Page) -> None:
    view = show(one)
    wait = one.runs[0].waits[0]
    view.tab.locator("#waits tbody tr").first.locator("button").click()
    view.settle()
    lo, hi = view.range()
    assert lo < wait.begin[1] < wait.begin[1] + wait.us[1] < hi < lo + 4 * max(wait.us[1], 0.2)


def test_an_address_keeps_the_view(show: Callable[..., View], both: Page) -> None:
    view = show(both)
    view.tab.keyboard.press("+")
    view.tab.keyboard.press("ArrowRight")
    view.tab.select_option("#run", index=1)
    view.tab.select_option("#block", index=3)
    view.tab.locator(f"{label('gate_up')} button").click()
    view.tab.locator("#shown input").nth(0).uncheck()
    address = view.address()
    assert address.startswith(view.url + "#")
    other = show(both, address.removeprefix(view.url))
    assert other.range() == pytest.approx(view.range(), abs=0.001)
    for tab in (view.tab, other.tab):
        assert tab.locator("#run").input_value() == "1"
        assert tab.locator("#block").input_value() == "3"
        assert not tab.locator("#shown input").nth(0).is_checked()
        assert tab.locator("[data-part]").count() == len(op(both.runs[0], "gate_up").parts)
    assert other.address() == address
    other.tab.evaluate("location.hash = '#t=10~20'")
    other.settle()
    assert other.range() == pytest.approx((10, 20))
    assert other.tab.locator("#block").input_value() == "0"


@pytest.mark.parametrize(
    "hash", ["#t=a~b&run=Z&block=9.9&hide=A&hide=B&open=nobody", "#%", "#t=5", "#t=9~1", "#t=1e9~2e9"]
)
def test_an_address_of_nonsense_shows_something(show: Callable[..., View], both: Page, hash: str) -> None:
    view = show(both, hash)
    lo, hi = view.range()
    assert 0 <= lo < hi
    assert view.tab.locator("#op-labels [data-op]").count() == len(both.runs[0].rows)


def test_hostile_names_stay_text(show: Callable[..., View]) -> None:
    page = trace_samples.rename(trace_samples.page(2), lambda name: HOSTILE + name)
    view = show(page)
    view.tab.wait_for_timeout(100)
    names = view.tab.locator("#op-labels .name").all_inner_texts()
    assert names == [row.op for row in page.runs[0].rows]
    assert view.tab.title() == page.title
    assert view.text("h1") == page.title
    assert view.tab.locator("img").count() == 0
    assert view.tab.locator("script").count() == 2
    view.tab.locator("#op-labels button").first.click()
    assert HOSTILE + "input_norm" in view.hover(1.6, "[data-op]")
    assert HOSTILE + "attach" in view.hover(0.5, '[data-warp="4"]')
    assert view.table("#waits")[0][1].startswith(HOSTILE)
    again = show(page, view.address().removeprefix(view.url))
    assert again.tab.locator("[data-part]").count() == 1


def test_narrow_spans_do_not_vanish(show: Callable[..., View], one: Page) -> None:
    """Of a pixel of 90 ns, a job of 8 ns and a load of none."""
    run = one.runs[0]
    job, prefetch = next(s.index for s in run.steps if s.call == "select"), int(Kind.PREFETCH)
    warp = run.blocks[0].warps[1]
    until = 79_000
    lane = ((0, 0, 65535, 0, 0, 0, 30_000), (0, job, 65535, 0, 0, 30_000, 30_008), (0, 0, 65535, 0, 0, 30_008, until),
            (prefetch, 0, 65535, 0, 4096, 60_000, 60_000))  # fmt: skip
    block = run.blocks[0].model_copy(update={"warps": (warp.model_copy(update={"spans": lane}),)})
    view = show(Page(title="narrow", runs=(run.model_copy(update={"blocks": (block,)}),)))
    lo, hi = view.range()
    step = (hi - lo) / view.tab.locator("#warp-plot canvas").bounding_box()["width"]

    def colours(time: float, down: float) -> list[tuple[int, int, int]]:
        return [view.pixel(time + k * step, '[data-warp="1"]', down) for k in (-2, -1, 0, 1, 2)]

    beside = view.pixel(20, '[data-warp="1"]', 0.7)
    assert all(near(c, beside) for c in colours(40, 0.7))
    assert any(not near(c, beside, 20) for c in colours(30.004, 0.7))
    assert any(near(c, view.colour("l2"), 40) for c in colours(60, 0.7))


def test_tooltips_stay_in_the_window(show: Callable[..., View], both: Page) -> None:
    view = show(both, width=900, height=500)
    lo, hi = view.range()
    for row in (label("input_norm"), label("next_heads"), '[data-lane="pathB"]', '[data-warp="0"]', '[data-warp="11"]'):
        for part in (0.02, 0.5, 0.95):
            assert view.hover(lo + part * (hi - lo), row)
            box = view.tab.locator("#tip").bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= 900, (row, part)
            assert box["y"] >= 0 and box["y"] + box["height"] <= 500, (row, part)
            x, y = view.point(lo + part * (hi - lo), row)  # and off what they are about
            beside = not box["x"] <= x <= box["x"] + box["width"]
            assert beside or not box["y"] <= y <= box["y"] + box["height"], (row, part)
    view.tab.mouse.move(5, 250)
    view.settle()
    assert not view.tab.locator("#tip").is_visible()


def luminance(colour: tuple[int, int, int]) -> float:
    """Relative, after WCAG 2."""
    parts = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(a: tuple[int, int, int], b: tuple[int, int, int]) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_bars_stand_out(show: Callable[..., View], both: Page, scheme: str) -> None:
    """Text at 4.5 to 1, what is drawn at 3 to 1, as WCAG 2 asks (AA)."""
    view = show(both, scheme=scheme)
    assert (luminance(view.colour("page")) < 0.05) == (scheme == "dark")
    assert near(view.pixel(5, label("next_heads")), view.colour("page"))  # the canvas follows
    texts: list[list[str]] = view.tab.evaluate(
        """() => [...document.querySelectorAll("body *")].filter((node) => node.checkVisibility()
              && [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim())).map((node) => {
                let under = node;
                while (getComputedStyle(under).backgroundColor === "rgba(0, 0, 0, 0)") under = under.parentElement;
                return [getComputedStyle(node).color, getComputedStyle(under).backgroundColor, node.textContent];
            })"""
    )
    assert len(texts) > 500
    dull = {text for colour, ground, text in texts if contrast(rgb(colour), rgb(ground)) < 4.5}
    assert dull == set()
    for name in ("ring", "l2", "work", "work-b", "hop", "launch", "hatch"):
        assert contrast(view.colour(name), view.colour("page")) >= 3, name
    for i in range(8):
        assert contrast(view.colour(f"op-{i}"), view.colour("text")) >= 4.5, i


def test_colours_follow_while_it_is_open(show: Callable[..., View], one: Page) -> None:
    view = show(one)
    light = view.colour("work")
    view.tab.emulate_media(color_scheme="dark")
    assert not near(light, view.colour("work"))
    assert near(view.pixel(41, label("gate_up"), 15 / 26), view.colour("work"))


def bare(run: Run) -> Run:
    """An op of nothing but a moment, a block of a warp without spans and one with spans of no length."""
    still = (5.0, 5.0, 5.0)
    row = run.rows[0].model_copy(update={"op": "still", "begin": still, "end": still, "loads": (), "parts": ()})
    moments = ((0, 0, 65535, 0, 0, 0, 0), (1, 0, 0, 0, 0, 0, 0), (0, 9999, 65535, 0, 0, 0, 9000))
    empty, zero = (run.blocks[0].warps[i].model_copy(update={"spans": s}) for i, s in enumerate(((), moments)))
    block = run.blocks[0].model_copy(update={"warps": (empty, zero)})
    nothing: dict[str, Any] = dict.fromkeys(("shares", "path", "waits", "hbm_busy", "facts", "edges"), ())
    return run.model_copy(
        update={**nothing, "rows": (row,), "blocks": (block,), "floor": None, "plain": None, "dropped": 17}
    )


def test_empty_things(show: Callable[..., View], one: Page) -> None:
    view = show(Page(title="bare", runs=(bare(one.runs[0]),)))
    assert view.text("#dropped").startswith("17 spans of in_flight=36 found no room")
    assert view.table("#totals")[0][3:5] == ["–", "–"]
    assert view.tab.locator("#block option").count() == 1
    assert view.hover(5, label("still")).splitlines()[0] == "still"
    assert near(view.pixel(5, label("still"), 15 / 26), view.colour("work"), 60)
    assert "step 9999" in view.hover(4, '[data-warp="1"]')
    assert view.hover(4, '[data-warp="0"]') == ""
    view.tab.locator(f"{label('still')} button").click()
    assert view.tab.locator("[data-part]").count() == 0
    assert view.table("#waits") == [["none"]]
    view.tab.keyboard.press("+")
    view.settle()


def test_a_run_without_rows_or_blocks(show: Callable[..., View], one: Page) -> None:
    nothing = bare(one.runs[0]).model_copy(update={"rows": (), "blocks": (), "total": (0.0, 0.0, 0.0)})
    view = show(Page(title="nothing", runs=(nothing,)))
    assert "no block was kept" in view.text("#warp-labels")
    lo, hi = view.range()
    assert lo == 0 and hi > 0
    assert view.hover(hi / 2, '[data-lane="pathA"]') == ""


def test_advice_has_the_numbers_of_the_trace(show: Callable[..., View], one: Page) -> None:
    (*waits, short), ragged = one.runs[0].waits, max(one.runs[0].rows, key=lambda row: row.end[2] - row.end[0])
    worst = short.model_copy(update={"critical_us": 9.0})
    run = one.runs[0].model_copy(update={"waits": (*waits, worst)})
    view = show(Page(title="advice", runs=(run,)))
    view.tab.locator("summary").click()
    said = view.text("#bubbles")
    assert f"{worst.op}.{worst.role} for {worst.edge}: 9.00 µs" in said
    assert f"Widest here: {ragged.op}, {fixed(ragged.end[2] - ragged.end[0])} µs" in said


def test_the_sample_is_of_the_size_of_the_real_thing(both: Page) -> None:
    for run in both.runs:
        assert len(run.rows) == 22 and run.launches == 80 and len(run.blocks) == 10
        counts = [sum(len(warp.spans) for warp in block.warps) for block in run.blocks]
        assert 1_800 < median(counts) < 2_500
        for block in run.blocks:
            for warp in block.warps:
                jobs = [span for span in warp.spans if span[0] == Kind.JOB]
                assert all(a[6] == b[5] for a, b in pairwise(jobs))
