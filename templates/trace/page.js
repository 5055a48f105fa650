"use strict";
(() => {
  const [JOB, WAIT, LOAD, PREFETCH] = [0, 1, 2, 3];
  const FIELDS = 7; // of a span: kind, step, edge, slot, bytes, begin since the span before, length; ns
  const SHORTEST = 0.02; // µs that an axis may show
  const NOISE = 0.1; // µs: a smaller difference gets no colour
  const AXIS = 20; // px
  const LETTERS = ["A", "B"];
  const LOADERS = { load_weights: "ring", prefetch_l2: "l2" }; // roles that do no work of an op's own

  const runs = JSON.parse(document.getElementById("data").textContent).runs;
  const two = runs.length > 1;
  const $ = (id) => document.getElementById(id);

  // ---- small things ------------------------------------------------------------------------------------------------

  function el(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes ?? {})) {
      if (value !== undefined && value !== "") node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== undefined && child !== ""));
    return node;
  }

  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const minus = (text) => text.replace("-", "−");
  const us = (value, digits = 2) => (value === undefined ? "–" : minus(value.toFixed(digits)));
  const signed = (value, digits = 2) => {
    if (value === undefined) return "–";
    const text = value.toFixed(digits);
    return Number(text) > 0 ? `+${text}` : minus(text.replace(/^-(0\.?0*)$/, "$1"));
  };
  const spread = ([low, , high], digits = 2) => `${us(low, digits)} – ${us(high, digits)}`;
  const count = (value) => value.toLocaleString("en");
  const percent = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "–");
  const difference = (a, b) => (a === undefined || b === undefined ? undefined : b - a);
  const tone = (delta) => (delta === undefined || Math.abs(delta) < NOISE ? "" : delta < 0 ? "better" : "worse");
  function bytes(value) {
    if (value < 1e4) return `${count(value)} B`;
    return value < 1e6 ? `${(value / 1024).toFixed(1)} KiB` : `${(value / 1e6).toFixed(1)} MB`;
  }
  const bit = (text, kind) => el("span", { class: kind }, text);
  const runKey = (run) => el("span", { class: run ? "run-key b" : "run-key", title: runs[run].name }, LETTERS[run]);

  // ---- what there is -----------------------------------------------------------------------------------------------

  // The work of an op begins with this part; what it waits before is the head of the op's bar.
  function leading(row) {
    const parts = row.parts.filter((part) => !LOADERS[part.role]);
    return parts.reduce((first, part) => (first && first.ready[1] <= part.ready[1] ? first : part), undefined);
  }

  // Ops of all runs in program order: one that only the second run has comes after the one before it there.
  function mergedOps() {
    const names = [];
    for (const run of runs) {
      let place = 0;
      for (const { op } of run.rows) {
        const at = names.indexOf(op);
        if (at < 0) names.splice(place, 0, op);
        place = (at < 0 ? place : at) + 1;
      }
    }
    return names.map((name) => ({ name, rows: runs.map((run) => run.rows.find((row) => row.op === name)) }));
  }

  const ops = mergedOps();
  const colourOf = new Map(ops.map((op, i) => [op.name, `op-${i % 8}`]));
  const stepsOf = runs.map((run) => new Map(run.steps.map((step) => [step.index, step])));
  const edgesOf = runs.map((run) => new Map(run.edges.map((edge) => [edge.index, edge])));
  const full = extent();

  function extent() {
    let [low, high] = [0, 0];
    const see = (...times) => times.forEach((time) => ([low, high] = [Math.min(low, time), Math.max(high, time)]));
    for (const run of runs) {
      see(...run.total);
      run.blocks.forEach((block) => see(block.end));
      for (const row of run.rows) [row, ...row.loads, ...row.parts].forEach((x) => see(...x.begin, ...x.end));
      run.path.forEach((leg) => see(leg.begin, leg.end));
    }
    const length = high - low || 1;
    return { lo: low < 0 ? low - length * 0.005 : 0, hi: low + length * 1.01 };
  }

  const unpacked = new Map();
  function lanesOf(block) {
    if (!unpacked.has(block)) unpacked.set(block, block.warps.map(unpack));
    return unpacked.get(block);
  }

  function unpack({ warp, title, spans: numbers }) {
    const spans = [];
    let before = 0;
    let job;
    for (let i = 0; i < numbers.length; i += FIELDS) {
      const [kind, step, edge, slot, size, since, length] = numbers.slice(i, i + FIELDS);
      before += since;
      const span = { kind, step, edge, slot, bytes: size, begin: before / 1e3, end: (before + length) / 1e3, warp };
      if (kind === JOB) job = span;
      span.job = job;
      spans.push(span);
    }
    const waited = spans.reduce((sum, span) => sum + (span.kind === WAIT ? span.end - span.begin : 0), 0);
    return { warp, title, spans, waited };
  }

  // What completed a wait for a stage is the last load into it that was issued before the wait was over.
  function loadBehind(block, span) {
    let found;
    if (span.kind !== WAIT) return found;
    for (const lane of lanesOf(block)) {
      for (const other of lane.spans) {
        if (other.kind !== LOAD || other.edge !== span.edge || other.slot !== span.slot) continue;
        if (other.begin <= span.end && (!found || other.begin > found.begin)) found = other;
      }
    }
    return found;
  }

  // ---- what is shown -----------------------------------------------------------------------------------------------

  const view = { ...full, run: 0, block: 0, open: new Set(), shown: runs.map(() => true) };
  let hovered; // a span
  const visible = () => runs.map((_, i) => i).filter((i) => view.shown[i]);
  const theBlock = () => runs[view.run].blocks[view.block];

  const fullLength = full.hi - full.lo;
  function show(lo, hi) {
    const length = clamp(hi - lo, Math.min(SHORTEST, fullLength), fullLength);
    const middle = (lo + hi) / 2;
    view.lo = clamp(middle - length / 2, full.lo, full.hi - length);
    view.hi = view.lo + length;
    changed();
  }
  function zoom(factor, at = (view.lo + view.hi) / 2) {
    const length = view.hi - view.lo;
    const next = clamp(length * factor, Math.min(SHORTEST, fullLength), fullLength);
    const lo = at - ((at - view.lo) * next) / length;
    show(lo, lo + next);
  }
  const pan = (by) => show(view.lo + by, view.hi + by);
  const reset = () => show(full.lo, full.hi);
  const whole = () => view.hi - view.lo > fullLength * 0.9999;

  let pending = 0;
  function changed() {
    if (!pending) pending = requestAnimationFrame(draw);
    rememberSoon();
  }

  // ---- the address -------------------------------------------------------------------------------------------------

  let remembering = 0;
  function rememberSoon() {
    clearTimeout(remembering);
    remembering = setTimeout(remember, 120);
  }

  function remember() {
    const words = new URLSearchParams();
    if (!whole()) words.set("t", `${view.lo.toFixed(3)}~${view.hi.toFixed(3)}`);
    if (view.run) words.set("run", LETTERS[view.run]);
    const block = theBlock();
    if (block && view.block) words.set("block", `${block.rank}.${block.block}`);
    runs.forEach((_, i) => view.shown[i] || words.append("hide", LETTERS[i]));
    ops.forEach((op) => view.open.has(op.name) && words.append("open", op.name));
    try {
      history.replaceState(null, "", `#${words}`);
    } catch {
      // a page without an address of its own, in another page's frame
    }
  }

  function recall() {
    hovered = undefined;
    const words = new URLSearchParams(location.hash.slice(1));
    const [lo, hi] = (words.get("t") ?? "").split("~").map(Number);
    const valid = words.has("t") && Number.isFinite(lo) && hi > lo;
    view.run = Math.max(0, LETTERS.slice(0, runs.length).indexOf(words.get("run")));
    view.block = Math.max(
      0,
      runs[view.run].blocks.findIndex((b) => `${b.rank}.${b.block}` === words.get("block")),
    );
    view.shown = runs.map((_, i) => !words.getAll("hide").includes(LETTERS[i]));
    if (!visible().length) view.shown[0] = true;
    view.open = new Set(words.getAll("open"));
    buildChoices();
    buildOps();
    buildWarps();
    if (valid) show(lo, hi);
    else reset();
  }

  // ---- canvas ------------------------------------------------------------------------------------------------------

  let ink = {};
  let family;
  function readStyle() {
    family = getComputedStyle(document.body).fontFamily;
    const style = getComputedStyle(document.documentElement);
    const names = "page text muted line grid focus ring l2 work work-b hop launch hatch service".split(" ");
    names.push(...Array.from({ length: 8 }, (_, i) => `op-${i}`));
    ink = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    patterns.clear();
  }

  const patterns = new Map();
  function hatch(context, colour) {
    if (!patterns.has(colour)) {
      const tile = el("canvas", { width: 10, height: 10 });
      const pen = tile.getContext("2d");
      pen.strokeStyle = colour;
      pen.lineWidth = 1.6;
      pen.beginPath();
      for (const shift of [-5, 0, 5, 10]) {
        pen.moveTo(shift, 10);
        pen.lineTo(shift + 10, 0);
      }
      pen.stroke();
      const pattern = context.createPattern(tile, "repeat");
      pattern.setTransform(new DOMMatrix().scale(0.8));
      patterns.set(colour, pattern);
    }
    return patterns.get(colour);
  }

  const font = (size) => `${size}px ${family}`;
  const widths = new Map();
  function widthOf(pen, text) {
    const key = pen.font + text;
    if (!widths.has(key)) widths.set(key, pen.measureText(text).width);
    return widths.get(key);
  }

  class Plot {
    constructor(id) {
      this.host = $(id);
      this.canvas = this.host.querySelector("canvas");
      this.pen = this.canvas.getContext("2d");
      this.cursor = this.host.querySelector(".cursor");
      this.brush = this.host.querySelector(".brush");
      this.height = AXIS;
    }

    x(time) {
      return ((time - view.lo) / (view.hi - view.lo)) * this.width;
    }
    time(x) {
      return view.lo + (x / this.width) * (view.hi - view.lo);
    }

    begin() {
      this.width = this.host.clientWidth;
      const ratio = window.devicePixelRatio || 1;
      this.canvas.width = Math.round(this.width * ratio);
      this.canvas.height = Math.round(this.height * ratio);
      this.canvas.style.height = `${this.height}px`;
      this.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      this.axis();
    }

    axis() {
      const { pen } = this;
      const rough = ((view.hi - view.lo) / this.width) * 80;
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = power * [1, 2, 5, 10].find((m) => m * power >= rough);
      const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
      pen.font = font(11);
      pen.textBaseline = "middle";
      pen.textAlign = "center";
      for (let k = Math.ceil(view.lo / step); k * step <= view.hi; k++) {
        const x = Math.round(this.x(k * step)) + 0.5;
        pen.fillStyle = ink.grid;
        pen.fillRect(x - 0.5, AXIS, 1, this.height - AXIS);
        pen.fillStyle = ink.muted;
        const text = minus((k * step).toFixed(digits));
        const half = widthOf(pen, text) / 2 + 3;
        pen.fillText(text, clamp(x, half, this.width - half), AXIS / 2);
      }
      pen.textAlign = "left";
      this.rule(AXIS, ink.line);
    }

    rule(y, colour = ink.grid) {
      this.pen.fillStyle = colour;
      this.pen.fillRect(0, y - 1, this.width, 1);
    }

    // The stretch of a span in px, cut to the plot and at least ``least`` wide; undefined if out of sight.
    stretch(begin, end, least = 1) {
      const [a, b] = [this.x(begin), this.x(end)];
      if (b < -least || a > this.width) return undefined;
      const [left, right] = [Math.max(a, -2), Math.min(b, this.width + 2)];
      return right - left >= least ? [left, right - left] : [(left + right - least) / 2, least];
    }

    bar(begin, end, y, height, fill, least) {
      const at = this.stretch(begin, end, least);
      if (!at) return;
      this.pen.fillStyle = fill;
      this.pen.fillRect(at[0], y, at[1], height);
    }

    faded(begin, end, y, height, colour) {
      const at = this.stretch(begin, end);
      if (!at) return;
      const { pen } = this;
      pen.save();
      pen.globalAlpha = 0.14;
      pen.fillStyle = colour;
      pen.fillRect(at[0], y, at[1], height);
      pen.globalAlpha = 0.75;
      pen.fillStyle = hatch(pen, colour);
      pen.fillRect(at[0], y, at[1], height);
      pen.restore();
    }

    whisker([low, , high], y, colour = ink.text) {
      const at = this.stretch(low, high);
      if (!at || at[1] < 2) return;
      const { pen } = this;
      pen.fillStyle = colour;
      pen.fillRect(at[0], y - 0.5, at[1], 1);
      if (at[1] < 6) return;
      pen.fillRect(at[0], y - 2.5, 1, 5);
      pen.fillRect(at[0] + at[1] - 1, y - 2.5, 1, 5);
    }

    // Text at the left of a stretch, if there is room for one of the texts; it stays in sight as far as it can.
    label(begin, end, y, ...texts) {
      const at = this.stretch(begin, end);
      if (!at || at[1] < 14) return;
      const left = Math.max(at[0], 0) + 4;
      const room = Math.min(at[0] + at[1], this.width) - left - 3;
      const text = texts.find((candidate) => candidate && widthOf(this.pen, candidate) <= room);
      if (text) this.pen.fillText(text, left, y);
    }
  }

  const opPlot = new Plot("op-plot");
  const warpPlot = new Plot("warp-plot");
  const plots = [opPlot, warpPlot];

  function draw() {
    pending = 0;
    drawOps();
    drawWarps();
    const digits = view.hi - view.lo < 1 ? 3 : 2;
    $("range").textContent = `${us(view.lo, digits)} – ${us(view.hi, digits)} µs  (${us(view.hi - view.lo, digits)})`;
    const thumb = $("window").style;
    thumb.left = `${(100 * (view.lo - full.lo)) / fullLength}%`;
    thumb.width = `${(100 * (view.hi - view.lo)) / fullLength}%`;
  }

  // ---- op by op ----------------------------------------------------------------------------------------------------

  const HUES = ["work", "work-b"];
  let lines = [];

  function buildOps() {
    const shown = visible();
    const pair = shown.length > 1;
    lines = [];
    const labels = [el("div", { class: "axis", style: `height:${AXIS}px` }, "µs")];
    const titles = pair ? ["Δ begin", "Δ end", "Δ length"] : ["begin", "end", "length"];
    const numbers = [el("div", { class: "axis", style: `height:${AXIS}px` }, ...titles.map((title) => bit(title)))];
    let y = AXIS;
    const add = (line, height, label, values) => {
      lines.push({ ...line, y, height });
      label.style.height = values.style.height = `${height}px`;
      labels.push(label);
      numbers.push(values);
      y += height;
    };
    for (const op of ops) {
      const rows = shown.map((i) => op.rows[i]);
      if (!rows.some(Boolean)) continue;
      const open = view.open.has(op.name);
      add({ op }, pair ? 38 : 26, opLabel(op, shown, open), valuesOf(rows.map(rowTimes)));
      for (const role of open ? rolesOf(op, shown) : []) {
        const parts = shown.map((i) => partOf(op, i, role));
        add({ op, role }, pair ? 26 : 18, partLabel(op, role, parts), valuesOf(parts.map(partTimes), "part"));
      }
    }
    for (const [lane, name] of [
      ["hbm", "HBM busy"],
      ["path", "critical path"],
    ]) {
      for (const run of shown) {
        const label = el("div", { class: "lane", "data-lane": lane + LETTERS[run] }, name);
        if (two) label.append(runKey(run));
        add({ lane, run }, lane === "hbm" ? 18 : 22, label, laneValues(lane, run));
      }
    }
    opPlot.height = y;
    $("op-labels").replaceChildren(...labels);
    $("op-numbers").replaceChildren(...numbers);
    $("unfold").setAttribute("aria-pressed", String(view.open.size > 0));
    $("unfold").textContent = view.open.size ? "fold roles" : "unfold roles";
  }

  const partOf = (op, run, role) => op.rows[run]?.parts.find((part) => part.role === role);
  const rolesOf = (op, shown) => [...new Set(shown.flatMap((i) => (op.rows[i]?.parts ?? []).map((part) => part.role)))];

  function warpsText(warps) {
    const sorted = [...warps].sort((a, b) => a - b);
    const runsOf = [];
    for (const warp of sorted) {
      if (runsOf.length && runsOf.at(-1)[1] === warp - 1) runsOf.at(-1)[1] = warp;
      else runsOf.push([warp, warp]);
    }
    const text = runsOf.map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`)).join(", ");
    return sorted.length > 1 ? `warps ${text}` : `warp ${text}`;
  }

  function opLabel(op, shown, open) {
    const button = el(
      "button",
      { type: "button", "aria-expanded": String(open), title: op.name },
      el("span", { class: "fold", "aria-hidden": "true" }, open ? "▼" : "▶"),
      el("span", { class: "chip", style: `background:var(--${colourOf.get(op.name)})` }),
      bit(op.name, "name"),
      bit(blocksText(op, shown), "some"),
    );
    button.addEventListener("click", () => {
      if (!view.open.delete(op.name)) view.open.add(op.name);
      buildOps();
      changed();
      [...document.querySelectorAll("[data-op]")].find((label) => label.dataset.op === op.name)?.firstChild.focus();
    });
    return el("div", { class: "op", "data-op": op.name }, button);
  }

  function blocksText(op, shown) {
    const counts = shown
      .filter((i) => op.rows[i] && op.rows[i].blocks !== runs[i].blocks_of)
      .map((i) => op.rows[i].blocks);
    return counts.length ? `[${[...new Set(counts)].join(", ")}]` : "";
  }

  function partLabel(op, role, parts) {
    const warps = warpsText(parts.find(Boolean).warps);
    return el("div", { class: "part", "data-part": `${op.name}.${role}` }, bit(role, "name"), bit(warps, "some"));
  }

  const rowTimes = (row) => row && [row.begin[1], row.end[1], row.length[1]];
  const partTimes = (part) => part && [part.ready[1], part.end[1], part.end[1] - part.ready[1]];

  // Of one thing its times, of two what they differ by.
  function valuesOf(things, kind) {
    const [first, second] = things;
    if (things.length < 2) return el("div", { class: kind }, ...first.map((value) => bit(us(value))));
    const deltas = [0, 1, 2].map((k) => difference(first?.[k], second?.[k]));
    return el("div", { class: kind }, ...deltas.map((delta) => bit(signed(delta), tone(delta))));
  }

  function laneValues(lane, run) {
    const { total, hbm_busy: busy, path } = runs[run];
    const work = path.reduce((sum, leg) => sum + (leg.what === "work" ? leg.end - leg.begin : 0), 0);
    const length = busy.reduce((sum, [begin, end]) => sum + end - begin, 0);
    const empty = lane === "hbm" ? !busy.length : !path.length;
    const text = empty ? "–" : lane === "hbm" ? `busy ${percent(length, total[1])}` : `work ${percent(work, total[1])}`;
    return el("div", { class: "part" }, bit(text, "whole"));
  }

  function drawOps() {
    opPlot.begin();
    const shown = visible();
    for (const line of lines) {
      opPlot.rule(line.y + line.height);
      if (line.lane) drawLane(line);
      else shown.forEach((run, k) => (line.role ? drawPart : drawOp)(line, run, k, shown.length));
    }
    const bottom = lines.find((line) => line.lane);
    if (bottom) opPlot.rule(bottom.y, ink.line);
  }

  function drawOp(line, run, k, of) {
    const row = line.op.rows[run];
    if (!row) return;
    const [top, loadHeight, workHeight] = of > 1 ? [line.y + 2 + 18 * k, 2, 9] : [line.y + 3, 3, 11];
    for (const load of row.loads) {
      const y = top + (load.into === "ring" ? loadHeight : 0);
      const colour = load.into === "ring" ? ink.ring : ink.l2;
      opPlot.bar(load.begin[0], load.end[2], y + loadHeight / 2 - 0.5, 1, colour);
      opPlot.bar(load.begin[1], load.end[1], y, loadHeight, colour, 2);
    }
    const y = top + 2 * loadHeight + 1;
    const head = leading(row);
    if (head) opPlot.faded(head.begin[1], row.begin[1], y, workHeight, ink[HUES[run]]);
    opPlot.bar(row.begin[1], row.end[1], y, workHeight, ink[HUES[run]], 1.5);
    opPlot.whisker(row.begin, y + 2.5);
    opPlot.whisker(row.end, y + workHeight - 2.5);
  }

  function drawPart(line, run, k, of) {
    const part = partOf(line.op, run, line.role);
    if (!part) return;
    const [y, height] = of > 1 ? [line.y + 3 + 11 * k, 8] : [line.y + 4, 9];
    const colour = ink[LOADERS[line.role] ?? HUES[run]];
    opPlot.faded(part.begin[1], part.ready[1], y, height, colour);
    opPlot.bar(part.ready[1], part.end[1], y + 1, height - 2, colour, 1.5);
    opPlot.whisker(part.ready, y + 1.5);
    opPlot.whisker(part.end, y + height - 1.5);
  }

  function drawLane({ lane, run, y, height }) {
    if (lane === "hbm") {
      for (const [begin, end] of runs[run].hbm_busy) opPlot.bar(begin, end, y + 5, 7, ink.ring);
      return;
    }
    const { pen } = opPlot;
    for (const leg of runs[run].path) {
      if (leg.what === "wait") opPlot.faded(leg.begin, leg.end, y + 4, 13, ink.hatch);
      else opPlot.bar(leg.begin, leg.end, y + 4, 13, legColour(leg, run));
      const at = opPlot.stretch(leg.begin, leg.end);
      if (at && at[1] > 3) opPlot.bar(leg.begin, leg.begin, y + 4, 13, ink.page);
    }
    pen.font = font(10);
    pen.fillStyle = ink.page;
    for (const leg of runs[run].path) if (leg.what === "work") opPlot.label(leg.begin, leg.end, y + 11, leg.op);
  }

  function legColour(leg, run) {
    return ink[{ work: HUES[run], load: "ring", hop: "hop", launch: "launch" }[leg.what] ?? "hatch"];
  }

  // ---- one SM, warp by warp ----------------------------------------------------------------------------------------

  const LANE = 30;
  const BAR = 26;

  function blockText(block) {
    return `rank ${block.rank}, block ${block.block}, SM ${block.sm}, ends ${us(block.end)} µs`;
  }

  function buildChoices() {
    $("run-choice").hidden = !two;
    $("run").replaceChildren(...runs.map((run, i) => el("option", { value: i }, `${LETTERS[i]}  ${run.name}`)));
    $("run").value = view.run;
    const { blocks } = runs[view.run];
    $("block").replaceChildren(...blocks.map((block, i) => el("option", { value: i }, blockText(block))));
    $("block").disabled = !blocks.length;
    if (blocks.length) $("block").value = view.block;
    $("shown").replaceChildren();
    if (!two) return;
    runs.forEach((run, i) => {
      const box = el("input", { type: "checkbox", "aria-label": `show run ${LETTERS[i]}` });
      box.checked = view.shown[i];
      box.addEventListener("change", () => {
        view.shown[i] = box.checked;
        if (!visible().length) view.shown[1 - i] = true;
        buildChoices();
        buildOps();
        changed();
      });
      $("shown").append(el("label", { title: run.name }, box, runKey(i), bit(run.name, "name")));
    });
  }

  function buildWarps() {
    const block = theBlock();
    const lanes = block ? lanesOf(block) : [];
    const height = `height:${LANE}px`;
    const labels = lanes.map(({ warp, title }) =>
      el(
        "div",
        { class: "warp", style: height, "data-warp": warp, title: `warp ${warp}: ${title}` },
        el("b", {}, `${warp}`),
        bit(title, "name"),
      ),
    );
    if (!block) labels.push(el("div", { class: "lane", style: height }, "no block was kept"));
    const numbers = lanes.map(({ waited }) =>
      el("div", { style: height }, bit(us(waited), "most"), bit(percent(waited, block.end))),
    );
    const axis = `height:${AXIS}px`;
    $("warp-labels").replaceChildren(el("div", { class: "axis", style: axis }, "µs"), ...labels);
    $("warp-numbers").replaceChildren(
      el("div", { class: "axis", style: axis }, bit("waits, µs", "most"), bit("of all")),
      ...numbers,
    );
    warpPlot.height = AXIS + LANE * Math.max(lanes.length, 1);
  }

  function drawWarps() {
    warpPlot.begin();
    const block = theBlock();
    if (!block) return;
    const lanes = lanesOf(block);
    lanes.forEach((lane, i) => {
      const y = AXIS + LANE * i;
      warpPlot.rule(y + LANE);
      drawJobs(lane, y + 2);
    });
    if (hovered) drawHovered(lanes, block);
  }

  function drawJobs({ spans }, y) {
    const { pen } = warpPlot;
    const seen = spans.filter((span) => span.end >= view.lo && span.begin <= view.hi);
    for (const span of seen) {
      if (span.kind !== JOB) continue;
      warpPlot.bar(span.begin, span.end, y, BAR, ink[colourOf.get(stepOf(span)?.op) ?? "service"]);
      const at = warpPlot.stretch(span.begin, span.end);
      if (at && at[1] > 4) warpPlot.bar(span.begin, span.begin, y, BAR, ink.page);
    }
    for (const span of seen) if (span.kind === WAIT) drawWait(span, y);
    for (const span of seen) {
      if (span.kind === LOAD) warpPlot.bar(span.begin, span.begin, y + BAR - 12, 12, ink.ring, 1.5);
      else if (span.kind === PREFETCH) warpPlot.bar(span.begin, span.begin, y + BAR - 12, 12, ink.l2, 1.5);
    }
    pen.fillStyle = ink.text;
    pen.font = font(11);
    for (const span of seen) if (span.kind === JOB) warpPlot.label(span.begin, span.end, y + 7.5, ...namesOf(span));
    pen.font = font(10);
    for (const span of seen) {
      if (span.kind === WAIT) warpPlot.label(span.begin, span.end, y + BAR - 6, edgeOf(span)?.name);
    }
  }

  // A wait takes the colour out of its job. One too short for a pixel takes out as much of one as it fills, or a bit.
  function drawWait(span, y) {
    const at = warpPlot.stretch(span.begin, span.end);
    if (!at) return;
    const { pen } = warpPlot;
    const part = clamp(warpPlot.x(span.end) - warpPlot.x(span.begin), 0.3, 1);
    pen.save();
    pen.globalAlpha = 0.78 * part;
    pen.fillStyle = ink.page;
    pen.fillRect(at[0], y, at[1], BAR);
    pen.globalAlpha = 0.42 * part;
    pen.fillStyle = at[1] < 3 ? ink.hatch : hatch(pen, ink.hatch);
    pen.fillRect(at[0], y, at[1], BAR);
    pen.restore();
  }

  function drawHovered(lanes, block) {
    const { pen } = warpPlot;
    const place = (span) => lanes.findIndex((lane) => lane.warp === span.warp) * LANE + AXIS + 2;
    const at = warpPlot.stretch(hovered.begin, hovered.end, 2);
    pen.strokeStyle = ink.text;
    pen.lineWidth = 1.5;
    if (at) pen.strokeRect(at[0], place(hovered) - 0.5, at[1], BAR + 1);
    const load = loadBehind(block, hovered);
    if (!load) return;
    pen.beginPath();
    pen.moveTo(warpPlot.x(load.begin), place(load) + BAR - 12);
    pen.lineTo(warpPlot.x(load.begin), place(load) + BAR);
    pen.lineTo(warpPlot.x(hovered.end), place(hovered) + BAR / 2);
    pen.strokeStyle = ink.ring;
    pen.stroke();
  }

  // What to call a job: in full, and shorter.
  function namesOf(span) {
    const step = stepOf(span);
    if (!step) return [`step ${span.step}`];
    return step.op ? [`${step.op}.${step.call}`, step.op] : [step.call];
  }

  const stepOf = (span) => stepsOf[view.run].get(span.step);
  const edgeOf = (span) => edgesOf[view.run].get(span.edge);

  // ---- what the pointer is over ------------------------------------------------------------------------------------

  function spanAt(x, y) {
    const block = theBlock();
    const lane = block && lanesOf(block)[Math.floor((y - AXIS) / LANE)];
    if (!lane || y < AXIS) return undefined;
    const distance = (span) => Math.max(warpPlot.x(span.begin) - x, x - warpPlot.x(span.end), 0);
    const nearest = (kinds, within) =>
      lane.spans
        .filter((span) => kinds.includes(span.kind) && distance(span) <= within)
        .reduce((best, span) => (best && distance(best) <= distance(span) ? best : span), undefined);
    const low = (y - AXIS) % LANE > LANE - 16; // where the ticks are
    return nearest([LOAD, PREFETCH], low ? 3 : 0.75) ?? nearest([WAIT], 1) ?? nearest([JOB], 0.5);
  }

  const WHAT = { [JOB]: "job", [WAIT]: "waits", [LOAD]: "load issued", [PREFETCH]: "prefetch issued" };

  function spanTip(span) {
    const [edge, block] = [edgeOf(span), theBlock()];
    const long = span.kind === JOB || span.kind === WAIT;
    const rows = [];
    if (edge && span.kind !== JOB) rows.push([span.kind === WAIT ? "for" : "completes", `${edge.name} (${edge.kind})`]);
    if (span.kind === WAIT || span.kind === LOAD) rows.push(["slot", `${span.slot}`]);
    if (span.bytes) rows.push(["bytes", `${count(span.bytes)} (${bytes(span.bytes)})`]);
    if (long) rows.push(...timesOf(span.begin, span.end));
    else rows.push(["at", `${us(span.begin, 3)} µs`]);
    if (span.kind === JOB) {
      const lane = lanesOf(block).find((other) => other.warp === span.warp);
      const waits = lane.spans.filter((other) => other.kind === WAIT && other.job === span);
      const sum = waits.reduce((total, wait) => total + wait.end - wait.begin, 0);
      rows.push(["of it waits", `${us(sum, 3)} µs, ${waits.length} times`]);
    }
    const load = loadBehind(block, span);
    if (load)
      rows.push(["its load", `issued at ${us(load.begin, 3)}, ${us(span.end - load.begin, 3)} µs before the end`]);
    rows.push(["warp", `${span.warp} of rank ${block.rank}, block ${block.block}, SM ${block.sm}`]);
    const source = stepOf(span)?.source;
    if (source) rows.push(["from", source]);
    return [el("h3", {}, namesOf(span)[0]), el("p", {}, WHAT[span.kind]), pairs(rows)];
  }

  const timesOf = (begin, end) => [
    ["begin", `${us(begin, 3)} µs`],
    ["end", `${us(end, 3)} µs`],
    ["length", `${us(end - begin, 3)} µs`],
  ];
  const pairs = (rows) =>
    el("table", {}, ...rows.map(([key, text]) => el("tr", {}, el("td", {}, key), el("td", {}, text))));

  function lineTip(line, time) {
    if (line.lane === "hbm") return hbmTip(line.run, time);
    if (line.lane === "path") return legTip(line.run, time);
    const shown = visible();
    const things = shown.map((i) => (line.role ? partOf(line.op, i, line.role) : line.op.rows[i]));
    const some = things.find(Boolean);
    if (!some) return undefined;
    const facts = line.role ? [warpsText(some.warps)] : [some.kind, blocksOf(things), some.source].filter(Boolean);
    const name = line.role ? `${line.op.name}.${line.role}` : line.op.name;
    return [el("h3", {}, name), el("p", {}, facts.join(" · ")), statsTable(things, line.role ? PART : ROW)];
  }

  const loadsInto = (row, into) => row.loads.find((load) => load.into === into);
  const ROW = [
    ["first load into L2", (row) => loadsInto(row, "l2")?.begin],
    ["last into L2", (row) => loadsInto(row, "l2")?.end],
    ["first load into the ring", (row) => loadsInto(row, "ring")?.begin],
    ["last into the ring", (row) => loadsInto(row, "ring")?.end],
    ["taken up", (row) => leading(row)?.begin],
    ["begin", (row) => row.begin],
    ["end", (row) => row.end],
    ["length in a block", (row) => row.length],
  ];
  const PART = [
    ["taken up", (part) => part.begin],
    ["input there", (part) => part.ready],
    ["end", (part) => part.end],
    ["a warp waits", (part) => part.waits],
  ];

  function blocksOf(rows) {
    const counts = [...new Set(rows.filter(Boolean).map((row) => row.blocks))];
    return `${counts.join(" and ")} ${counts.length === 1 && counts[0] === 1 ? "block" : "blocks"}`;
  }

  // Of one thing its stats, of two both medians and spreads and the difference.
  function statsTable(things, stats) {
    const pair = things.length > 1;
    const heads = pair ? ["", "A", "p10 – p90", "B", "p10 – p90", "Δ"] : ["", "median", "p10 – p90"];
    const rows = [];
    for (const [name, of] of stats) {
      const found = things.map((thing) => thing && of(thing));
      if (!found.some(Boolean)) continue;
      const cells = found.flatMap((stat) => [us(stat?.[1]), stat ? spread(stat) : "–"]);
      const row = el("tr", {}, el("td", {}, name), ...cells.map((text) => el("td", { class: "num" }, text)));
      const delta = difference(found[0]?.[1], found[1]?.[1]);
      if (pair) row.append(el("td", { class: `num ${tone(delta)}` }, signed(delta)));
      rows.push(row);
    }
    const head = el("tr", {}, ...heads.map((text, i) => el("th", { class: i ? "num" : "" }, text)));
    return el("table", {}, head, ...rows);
  }

  function hbmTip(run, time) {
    const { hbm_busy: busy, total } = runs[run];
    const within = busy.find(([begin, end]) => begin <= time && time <= end);
    const ends = busy.map(([, end]) => end).filter((end) => end <= time);
    const begins = busy.map(([begin]) => begin).filter((begin) => begin >= time);
    const [begin, end] = within ?? [
      Math.max(0, ...ends),
      begins.length ? Math.min(...begins) : Math.max(total[1], time),
    ];
    return [
      el("h3", {}, within ? "HBM busy" : "HBM idle"),
      el("p", {}, within ? "weights asked for or under way" : "no weight asked for or under way"),
      pairs(timesOf(begin, end)),
    ];
  }

  function legTip(run, time) {
    const leg = runs[run].path.find(({ begin, end }) => begin <= time && time <= end);
    if (!leg) return undefined;
    const name = leg.op ? `${leg.op}.${leg.role}` : leg.role;
    const place = ["on", `rank ${leg.rank}, block ${leg.block}, warp ${leg.warp}`];
    const what = `critical path: ${leg.what}${leg.detail ? ` ${leg.detail}` : ""}`;
    return [el("h3", {}, name), el("p", {}, what), pairs([...timesOf(leg.begin, leg.end), place])];
  }

  function showTip(content, x, y) {
    const tip = $("tip");
    tip.hidden = !content;
    if (!content) return;
    tip.replaceChildren(...content);
    const { width, height } = tip.getBoundingClientRect();
    const [right, bottom] = [document.documentElement.clientWidth - 6, window.innerHeight - 6];
    const left = x + 16 + width > right ? x - 16 - width : x + 16;
    const top = y + 16 + height > bottom ? y - 12 - height : y + 16;
    const within = [clamp(left, 6, Math.max(6, right - width)), clamp(top, 6, Math.max(6, bottom - height))];
    tip.style.transform = `translate(${within[0]}px, ${within[1]}px)`;
  }

  // ---- pointer and keys --------------------------------------------------------------------------------------------

  let drag;
  let scrolled = -1e9;

  function point(plot, event) {
    const box = plot.host.getBoundingClientRect();
    return [event.clientX - box.left - plot.host.clientLeft, event.clientY - box.top];
  }

  function hover(plot, event) {
    const [x, y] = point(plot, event);
    plots.forEach(({ cursor }) => {
      cursor.style.display = "block";
      cursor.style.transform = `translateX(${x}px)`;
      cursor.classList.toggle("late", x > plot.width - 60);
      cursor.dataset.time = us(plot.time(x), view.hi - view.lo < 1 ? 3 : 2);
    });
    const span = plot === warpPlot ? spanAt(x, y) : undefined;
    const line = plot === opPlot && lines.find((other) => y >= other.y && y < other.y + other.height);
    if (span !== hovered) {
      hovered = span;
      if (!pending) pending = requestAnimationFrame(draw);
    }
    showTip(span ? spanTip(span) : line ? lineTip(line, plot.time(x)) : undefined, event.clientX, event.clientY);
  }

  function leave() {
    plots.forEach(({ cursor }) => (cursor.style.display = "none"));
    showTip();
    if (hovered) changed();
    hovered = undefined;
  }

  function dragged(plot, event) {
    const [x] = point(plot, event);
    showTip();
    if (drag.pans) {
      const by = ((drag.x - x) / plot.width) * (drag.hi - drag.lo);
      show(drag.lo + by, drag.hi + by);
      return;
    }
    for (const { brush } of plots) {
      brush.style.display = "block";
      brush.style.left = `${Math.min(x, drag.x)}px`;
      brush.style.width = `${Math.abs(x - drag.x)}px`;
    }
  }

  function dropped(plot, event) {
    const [x] = point(plot, event);
    const chosen = [drag.x, x].map((px) => plot.time(clamp(px, 0, plot.width))).sort((a, b) => a - b);
    const far = Math.abs(x - drag.x) > 4;
    const { pans } = drag;
    stopDrag();
    if (!pans && far) show(...chosen);
    hover(plot, event); // another time is there now
  }

  function stopDrag() {
    drag = undefined;
    plots.forEach((plot) => {
      plot.brush.style.display = "none";
      plot.host.classList.remove("moves");
    });
  }

  function listen(plot) {
    const { host } = plot;
    host.addEventListener("wheel", (event) => wheel(plot, event), { passive: false });
    host.addEventListener("pointerdown", (event) => {
      if (event.button > 1) return;
      event.preventDefault();
      host.setPointerCapture(event.pointerId);
      drag = { x: point(plot, event)[0], pans: event.shiftKey || event.button === 1, lo: view.lo, hi: view.hi };
      host.classList.toggle("moves", drag.pans);
    });
    host.addEventListener("pointermove", (event) => (drag ? dragged(plot, event) : hover(plot, event)));
    host.addEventListener("pointerup", (event) => drag && dropped(plot, event));
    host.addEventListener("pointercancel", stopDrag);
    host.addEventListener("pointerleave", leave);
    host.addEventListener("dblclick", reset);
  }

  // A wheel that is scrolling the page goes on doing so, and one that has nothing left to zoom out of scrolls it.
  function wheel(plot, event) {
    if (event.timeStamp - scrolled < 250) return;
    const unit = event.deltaMode ? 16 : 1;
    const sideways = event.shiftKey
      ? event.deltaX || event.deltaY
      : Math.abs(event.deltaX) > Math.abs(event.deltaY)
        ? event.deltaX
        : 0;
    if (whole() && (sideways || event.deltaY > 0)) return;
    event.preventDefault();
    if (sideways) pan(((sideways * unit) / plot.width) * (view.hi - view.lo));
    else zoom(Math.exp(clamp(event.deltaY * unit, -300, 300) * 0.002), plot.time(point(plot, event)[0]));
    hover(plot, event);
  }

  const deeds = {
    in: () => zoom(0.5),
    out: () => zoom(2),
    left: () => pan((view.lo - view.hi) / 4),
    right: () => pan((view.hi - view.lo) / 4),
    reset,
  };
  const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "reset" };

  function listenAll() {
    plots.forEach(listen);
    document
      .querySelectorAll("[data-do]")
      .forEach((button) => button.addEventListener("click", deeds[button.dataset.do]));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        stopDrag();
        showTip();
      }
      const deed = deeds[keys[event.key]];
      if (!deed || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select, input")) return;
      event.preventDefault();
      deed();
      leave();
    });
    document.addEventListener(
      "scroll",
      (event) => {
        scrolled = event.timeStamp;
        leave();
      },
      { passive: true },
    );
    const overview = $("overview");
    const follow = (event) => {
      const box = overview.getBoundingClientRect();
      const middle = full.lo + ((event.clientX - box.left) / box.width) * fullLength;
      const half = (view.hi - view.lo) / 2;
      show(middle - half, middle + half);
    };
    overview.addEventListener("pointerdown", (event) => {
      overview.setPointerCapture(event.pointerId);
      follow(event);
    });
    overview.addEventListener("pointermove", (event) => event.buttons && follow(event));
    $("unfold").addEventListener("click", () => {
      view.open = new Set(view.open.size ? [] : ops.map((op) => op.name));
      buildOps();
      changed();
    });
    $("run").addEventListener("change", () => choose(Number($("run").value), 0));
    $("block").addEventListener("change", () => choose(view.run, Number($("block").value)));
    window.addEventListener("hashchange", recall);
    window.addEventListener("resize", changed);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      readStyle();
      changed();
    });
  }

  function choose(run, block) {
    [view.run, view.block, hovered] = [run, block, undefined];
    buildChoices();
    buildWarps();
    changed();
  }

  // ---- tables ------------------------------------------------------------------------------------------------------

  // Columns: name, of(row) a value to sort by, text(value, row) what is shown (a string or a node), num, group, title,
  // tone: whether the sign is good or bad.
  function table(host, columns, rows, sorted) {
    const state = { column: -1, down: false };
    const heads = columns.map((column, i) => {
      const button = el("button", { type: "button", title: column.title }, column.name);
      button.addEventListener("click", () => {
        state.down = state.column === i ? !state.down : Boolean(column.num);
        state.column = i;
        fill();
      });
      return el("th", { scope: "col", class: classes(column) }, button);
    });
    const body = el("tbody");
    host.replaceChildren(el("thead", {}, el("tr", {}, ...heads)), body);
    if (host.classList.contains("short") && rows.length > 10) host.append(more(host, rows.length, columns.length));

    function fill() {
      const key = columns[state.column]?.of;
      const order = key ? [...rows].sort((a, b) => compare(key(a), key(b), state.down)) : rows;
      heads.forEach((head, i) => {
        if (i === state.column) head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
        else head.removeAttribute("aria-sort");
      });
      body.replaceChildren(...order.map((row) => el("tr", {}, ...columns.map((column) => cell(column, row)))));
      if (!rows.length) body.append(el("tr", {}, el("td", { class: "empty", colspan: columns.length }, "none")));
    }
    if (sorted !== undefined) Object.assign(state, { column: sorted, down: true });
    fill();
  }

  const classes = (column, more = "") =>
    [column.num && "num", column.group && "group", column.wide && "text", more].filter(Boolean).join(" ");

  function cell(column, row) {
    const value = column.of(row);
    const content = column.text ? column.text(value, row) : column.num ? us(value) : (value ?? "–");
    return el("td", { class: classes(column, column.tone ? tone(value) : "") }, content);
  }

  // What is missing comes last, whichever way.
  function compare(a, b, down) {
    if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
    const order = typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
    return down ? -order : order;
  }

  function more(host, rows, columns) {
    const button = el("button", { type: "button" }, `all ${rows}`);
    button.addEventListener("click", () => {
      button.textContent = host.classList.toggle("short") ? `all ${rows}` : "fewer";
    });
    return el("tfoot", {}, el("tr", {}, el("td", { colspan: columns }, button)));
  }

  function waitsTable() {
    const rows = runs.flatMap((run, i) => run.waits.map((wait) => ({ ...wait, run: i })));
    const jump = (value, wait) => {
      const button = el("button", { type: "button", class: "link", title: "show it above" }, us(value));
      button.addEventListener("click", () => {
        const room = Math.max(wait.us[1], 0.2);
        show(wait.begin[1] - room, wait.begin[1] + 2 * room);
        $("bar").previousElementSibling.scrollIntoView({ block: "end" });
      });
      return button;
    };
    const columns = [
      { name: "waits", of: (w) => `${w.op}.${w.role}` },
      { name: "for", of: (w) => w.edge },
      { name: "from", title: "begin of the wait, median", num: true, of: (w) => w.begin[1], text: jump },
      { name: "µs", title: "of a warp in a launch, median", num: true, of: (w) => w.us[1] },
      { name: "p10 – p90", num: true, of: (w) => w.us[2] - w.us[0], text: (_, w) => spread(w.us) },
      { name: "on path", title: "µs of it on the critical path, a launch", num: true, of: (w) => w.critical_us },
      { name: "what could cover it", wide: true, of: (w) => w.cover },
    ];
    if (two) columns.unshift({ name: "run", of: (w) => LETTERS[w.run], text: (_, w) => runKey(w.run) });
    table($("waits"), columns, rows, two ? 6 : 5);
  }

  function sharesTable() {
    const keyed = new Map();
    runs.forEach((run, i) => {
      for (const share of run.shares) {
        const key = JSON.stringify([share.op, share.what]);
        if (!keyed.has(key)) keyed.set(key, { op: share.op, what: share.what, us: [] });
        keyed.get(key).us[i] = share.us;
      }
    });
    const rows = [...keyed.values()];
    const longest = Math.max(...rows.map((row) => row.us[0]?.[1] ?? 0), 0.001);
    const meter = (value = 0) =>
      el("span", { class: "meter", style: `width:${Math.max(0, (value / longest) * 60).toFixed(1)}px` });
    const columns = [
      { name: "op", of: (s) => s.op, text: (op) => op || "(launch)" },
      { name: "what", of: (s) => s.what },
      ...runs.map((_, i) => ({ name: two ? `µs ${LETTERS[i]}` : "µs", num: true, of: (s) => s.us[i]?.[1] })),
    ];
    if (two)
      columns.push({
        name: "Δ",
        num: true,
        tone: true,
        of: (s) => difference(s.us[0]?.[1], s.us[1]?.[1]),
        text: (d) => signed(d),
      });
    else
      columns.push({
        name: "p10 – p90",
        num: true,
        of: (s) => s.us[0][2] - s.us[0][0],
        text: (_, s) => spread(s.us[0]),
      });
    columns.push(
      {
        name: two ? "of A" : "of all",
        num: true,
        of: (s) => s.us[0]?.[1],
        text: (value) => (value === undefined ? "–" : percent(value, runs[0].total[1])),
      },
      { name: "", title: "its share as a bar", of: (s) => s.us[0]?.[1], text: meter },
    );
    table($("shares"), columns, rows, 2);
  }

  function numbersTable() {
    const ring = (row) => row?.loads.find((load) => load.into === "ring") ?? row?.loads[0];
    const facts = [
      ["first load", "the first load of its weights is issued", (row) => ring(row)?.begin[1]],
      ["last load", "the last load of its weights is issued", (row) => ring(row)?.end[1]],
      ["begin", "its work begins", (row) => row?.begin[1]],
      ["end", "its work ends", (row) => row?.end[1]],
      ["length", "of a block, from begin to end", (row) => row?.length[1]],
      ["wait", "of a warp of the role that begins the op's work", (row) => row && leading(row)?.waits[1]],
    ];
    const some = (op) => op.rows.find(Boolean);
    const blocks = (op) => [...new Set(op.rows.filter(Boolean).map((row) => row.blocks))];
    const columns = [
      { name: "op", of: (op) => op.name },
      { name: "kind", of: (op) => some(op).kind },
      { name: "blocks", num: true, of: (op) => blocks(op)[0], text: (_, op) => blocks(op).join(", ") },
      {
        name: "weights",
        title: "loads of a launch, a rank's blocks together",
        num: true,
        of: (op) => some(op).loads.reduce((sum, load) => sum + (load.into === "ring" ? load.bytes : 0), 0),
        text: (size) => (size ? bytes(size) : "–"),
      },
    ];
    for (const [name, title, value] of facts) {
      if (!two) columns.push({ name, title, num: true, of: (op) => value(op.rows[0]) });
      else {
        runs.forEach((_, i) =>
          columns.push({ name: i ? "B" : `${name} A`, title, num: true, group: !i, of: (op) => value(op.rows[i]) }),
        );
        columns.push({
          name: "Δ",
          title: `${name}: B less A`,
          num: true,
          tone: true,
          of: (op) => difference(value(op.rows[0]), value(op.rows[1])),
          text: (d) => signed(d),
        });
      }
    }
    if (!two) columns.push({ name: "from", of: (op) => some(op).source });
    table($("numbers"), columns, ops);
  }

  // ---- head and advice ---------------------------------------------------------------------------------------------

  // name, title, what it is of a run; with ``of``, µs that two runs differ in.
  const idle = (part, run) => `${us(part[1])}  (${percent(part[1], run.total[1])})`;
  const TOTALS = [
    { name: "a launch, µs", title: "median of the launches", key: "total", of: (run) => run.total[1] },
    { name: "p10 – p90", title: "of the launches", text: (run) => spread(run.total) },
    { name: "without stamps", title: "measured in turns with and without", key: "plain", of: (run) => run.plain },
    { name: "stamps add", title: "in the same measurement", text: stampsCost },
    { name: "floor", title: "the time HBM needs for the weights", key: "floor", of: (run) => run.floor },
    {
      name: "over floor",
      title: "without stamps, where that is known",
      text: (run) => (run.floor ? `${((run.plain ?? run.total[1]) / run.floor).toFixed(2)} ×` : "–"),
    },
    {
      name: "HBM idle",
      title: "at least, in which no weight is asked for or under way",
      key: "hbm_idle",
      of: (run) => run.hbm_idle[1],
      text: (run) => idle(run.hbm_idle, run),
    },
    {
      name: "a block idle",
      title: "no warp at work and no load under way",
      key: "idle",
      of: (run) => run.idle[1],
      text: (run) => idle(run.idle, run),
    },
    { name: "launches", text: (run) => count(run.launches) },
    { name: "blocks", text: (run) => count(run.blocks_of) },
  ];

  function stampsCost({ plain, stamped }) {
    if (plain === null || stamped === null) return "–";
    return `${signed(stamped - plain)}  (${percent(stamped - plain, plain)})`;
  }

  function head() {
    const timed = runs.some((run) => run.plain !== null);
    const columns = TOTALS.filter(({ name }) => timed || !["without stamps", "stamps add"].includes(name));
    const rows = runs.map((run, i) => {
      const name = el("td", {}, two ? runKey(i) : "", " ", run.name);
      const texts = columns.map(({ of, text }) => (text ? text(run) : us(of(run) ?? undefined)));
      return el("tr", {}, name, ...texts.map((text, k) => el("td", { class: k ? "" : "main" }, text)));
    });
    if (two) {
      const deltas = columns.map(({ of, key }) => {
        if (!of) return el("td");
        const delta = difference(...runs.map((run) => of(run) ?? undefined));
        return el("td", { class: tone(delta), "data-delta": key }, signed(delta));
      });
      rows.push(el("tr", {}, el("td", {}, "Δ, B less A"), ...deltas));
    }
    const names = columns.map(({ name, title }) => el("th", { scope: "col", title }, name));
    $("totals").append(el("thead", {}, el("tr", {}, el("th"), ...names)), el("tbody", {}, ...rows));
    facts();
    const lost = runs.filter((run) => run.dropped);
    const warning = (run) => `${count(run.dropped)} spans of ${run.name} found no room: some work and waits are missing.`;
    const emulated = runs.filter((run) => run.facts.some(([key, value]) => key === "origin" && value === "emulated"));
    const unreal = (run) => `${run.name} is emulated: its times show order, not length.`;
    const warnings = [...lost.map(warning), ...emulated.map(unreal)];
    $("dropped").hidden = !warnings.length;
    $("dropped").textContent = warnings.join(" ");
    $("work-b").hidden = !two;
  }

  function facts() {
    const names = [...new Set(runs.flatMap((run) => run.facts.map(([name]) => name)))];
    for (const name of names) {
      const found = runs.map((run) => run.facts.find(([key]) => key === name)?.[1]);
      const same = found.every((value) => value === found[0]);
      const values = same
        ? [el("dd", {}, found[0])]
        : found.map((value, i) => el("dd", {}, runKey(i), ` ${value ?? "–"}`));
      $("facts").append(el("div", {}, el("dt", {}, name), ...values));
    }
  }

  // What the trace says of itself, before what is true of any.
  function bubbles() {
    const run = runs[0];
    const most = (things, of) => things.reduce((best, x) => (best && of(best) >= of(x) ? best : x), undefined);
    const wait = most(run.waits, (x) => x.critical_us);
    const ragged = most(run.rows, (x) => x.end[2] - x.end[0]);
    const says = [];
    if (run.floor) {
      const bare = run.plain ? ` (${us(run.plain)} without stamps)` : "";
      says.push(
        `A launch takes ${us(run.total[1])} µs${bare}, and HBM needs ${us(run.floor)} µs for its weights. The ` +
          `${us((run.plain ?? run.total[1]) - run.floor)} µs between are the most that a better schedule can win.`,
      );
    }
    if (wait) {
      const who = `${wait.op}.${wait.role} for ${wait.edge}`;
      says.push(`The wait that holds the critical path up most is ${who}: ${us(wait.critical_us)} µs.`);
    }
    if (ragged) {
      says.push(
        `A wide whisker at an end means that blocks finish far apart, and whoever needs them all waits for the last, ` +
          `or that launches do: the p10 and p90 of a launch are ${us(run.total[2] - run.total[0])} µs apart. ` +
          `Widest here: ${ragged.op}, ${us(ragged.end[2] - ragged.end[0])} µs.`,
      );
    }
    $("bubbles").prepend(...says.map((text) => el("li", {}, text)));
  }

  // ---- begin -------------------------------------------------------------------------------------------------------

  readStyle();
  head();
  waitsTable();
  sharesTable();
  numbersTable();
  bubbles();
  listenAll();
  recall();
  cancelAnimationFrame(pending);
  draw();
  window.megagen = { ready: performance.now(), range: () => [view.lo, view.hi] };
})();
