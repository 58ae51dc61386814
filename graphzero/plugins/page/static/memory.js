// The stacked plot of memory over the step, its cursor, and the list of what is alive there.
"use strict";

const SHOWN_ALIVE = 13;

const memory = {
  plan: null, plot: null, axis: "op", pinned: 0, position: 0,

  show(plan) {
    this.plan = plan;
    this.axis = plan.moments.length ? this.axis : "op";
    $("memory-axis").hidden = !plan.moments.length;
    press($("memory-axis"), "axis", this.axis);
    const layered = plan.bands.some((band) => band.category === "activations_2");
    $("memory-legend").replaceChildren(...[...plan.series.keys()].reverse().map((category) =>
      el("span", { class: "entry" }, swatch(category), layered && category === "activations" ? swatch("activations_2") : "",
        layered && category === "activations" ? "activations, layer by layer" : plain(category))));
    this.draw();
    this.moveTo(plan.memory.peak, true);
  },

  // Across, and the position in the program at each point.
  points() {
    if (this.axis === "op") {
      const positions = this.plan.running;
      return { across: positions, positions };
    }
    const moments = this.plan.moments;
    return { across: moments.map((moment) => moment.at), positions: moments.map((moment) => moment.position) };
  },

  draw() {
    if (this.plot) this.plot.destroy();
    const box = $("memory-plot"), points = this.points();
    const bands = this.plan.bands, sums = stacked(bands, points.positions).reverse();
    Object.assign(this, points);
    const drawn = drawnBy(points.across, points.positions.map((position) => this.plan.total[position]), sums);
    this.plot = new uPlot({
      ...frame(box, 380),
      scales: { x: { time: false }, y: { range: (u, low, high) => [0, high * 1.08 || 1] } },
      axes: [
        { ...axisStyle(), space: 76, values: (u, ticks) => ticks.map(this.axis === "op" ? countText : secondsText) },
        { ...axisStyle(), size: 76, values: (u, ticks) => ticks.map(tickText) },
      ],
      series: [{}, ...bands.map((band) => area(band.category)).reverse()],
      hooks: {
        drawClear: [(u) => this.drawPhases(u)],
        draw: [(u) => this.drawMarks(u)],
        setScale: [drawn.follow],
        setCursor: [(u) => { if (u.cursor.left >= 0) this.look(this.positionAt(u.cursor.left)); }],
      },
    }, drawn.all(box), box);
    this.tip = el("div", { class: "tip", role: "status" });
    this.plot.over.append(this.tip);
    this.listen(this.plot.over);
  },

  listen(over) {
    over.addEventListener("mouseleave", () => this.look(this.pinned));
    over.addEventListener("click", () => this.moveTo(this.position, true));
    over.addEventListener("pointermove", (event) => {
      if (event.pointerType !== "touch") return;
      this.moveTo(this.positionAt(event.clientX - over.getBoundingClientRect().left), true);
    });
  },

  // What runs at a pixel: the last that has begun.
  positionAt(left) {
    const across = this.plot.posToVal(left, "x");
    let low = 0, high = this.across.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.across[middle] <= across) low = middle;
      else high = middle - 1;
    }
    return this.positions[low];
  },

  // Show a position, and stay there when the pointer leaves.
  moveTo(position, staying = false) {
    const clamped = Math.max(this.plan.running[0], Math.min(position, this.plan.positions - 1));
    if (staying) this.pinned = clamped;
    this.look(clamped);
    this.plot.redraw(false);
  },

  look(position) {
    this.position = position;
    const value = this.plan.values[position], alive = this.plan.alive(position);
    this.tip.replaceChildren(...tipLines(this.plan, value, alive));
    this.placeTip();
    showAlive(this.plan, value, alive);
  },

  placeTip() {
    const at = this.plot.valToPos(this.acrossOf(this.position), "x"), width = this.plot.over.clientWidth;
    const left = at + 14 + this.tip.offsetWidth > width ? at - 14 - this.tip.offsetWidth : at + 14;
    this.tip.style.left = `${Math.max(0, Math.min(left, width - this.tip.offsetWidth))}px`;
  },

  acrossOf(position) {
    if (this.axis === "op") return position;
    let index = this.positions.findIndex((at) => at >= position);
    if (index < 0) index = this.positions.length - 1;
    return this.across[index];
  },

  drawPhases(u) {
    const { ctx, bbox } = u;
    const runs = [];
    this.positions.forEach((position, i) => {
      const phase = this.plan.values[position].phase;
      if (!runs.length || runs[runs.length - 1].phase !== phase) runs.push({ phase, from: this.across[i] });
    });
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textBaseline = "top";
    ctx.textAlign = "left";
    runs.forEach((run, i) => {
      const from = u.valToPos(run.from, "x", true);
      const to = i + 1 < runs.length ? u.valToPos(runs[i + 1].from, "x", true) : bbox.left + bbox.width;
      if (PHASES.indexOf(run.phase) % 2) {
        ctx.fillStyle = colour("stripe");
        ctx.fillRect(from, bbox.top, to - from, bbox.height);
      }
      const begin = Math.max(from, bbox.left) + 5 * devicePixelRatio;
      if (ctx.measureText(run.phase).width + 8 * devicePixelRatio < Math.min(to, bbox.left + bbox.width) - begin) {
        ctx.fillStyle = colour("muted");
        ctx.fillText(run.phase, begin, bbox.top + 3 * devicePixelRatio);
      }
    });
    ctx.restore();
  },

  drawMarks(u) {
    if (this.plot) this.placeTip();
    mark(u, this.acrossOf(this.plan.memory.peak), colour("peak"), [5, 4]);
    if (this.pinned !== this.plan.memory.peak) mark(u, this.acrossOf(this.pinned), colour("accent"), []);
  },

  key(event) {
    const step = event.shiftKey ? 20 : 1, end = this.plan.positions - 1;
    const to = {
      ArrowLeft: this.pinned - step, ArrowRight: this.pinned + step, Home: 0, End: end,
    }[event.key];
    if (to !== undefined) this.moveTo(to, true);
    else if (!zoomed(this.plot, event.key, this.acrossOf(this.pinned))) return;
    event.preventDefault();
  },
};

function stacked(bands, positions) {
  const sum = new Float64Array(positions.length);
  return bands.map(({ bytes }) => {
    positions.forEach((position, i) => (sum[i] += bytes[position]));
    return Array.from(sum);
  });
}

// What uPlot draws: in each column of pixels the moment with the most bytes, so that no peak is too narrow to be seen.
function drawnBy(across, totals, sums) {
  const shown = (from, to, pixels) => {
    const chosen = columns(across, totals, from, to, pixels);
    return [across, ...sums].map((row) => chosen.map((i) => row[i]));
  };
  let last = "";
  return {
    all: (box) => shown(across[0], across[across.length - 1], Math.max(260, box.clientWidth)),
    follow: (u, key) => {
      const { min, max } = u.scales.x, range = `${min} ${max} ${u.over.clientWidth}`;
      if (key !== "x" || min === null || range === last) return;
      last = range;
      u.setData(shown(min, max, u.over.clientWidth || 260), false);
    },
  };
}

// Of the points in each column, which is a pixel wide, the one with the highest total; the first and the last as well.
function columns(across, totals, from, to, pixels) {
  const width = (to - from) / pixels || 1, chosen = [0], end = across.length - 1;
  let column = null, best = 0;
  for (let i = 1; i < end; i++) {
    const here = Math.floor((across[i] - from) / width);
    if (here !== column && column !== null) chosen.push(best);
    if (here !== column || totals[i] > totals[best]) best = i;
    column = here;
  }
  if (column !== null) chosen.push(best);
  if (end > 0) chosen.push(end);
  return chosen;
}

// Each area reaches down to 0, and those below are painted over it.
const area = (category) => ({
  label: plain(category), fill: categoryColour(category), stroke: categoryColour(category), width: 0,
  paths: uPlot.paths.stepped({ align: 1 }), points: { show: false },
});

function tipLines(plan, value, alive) {
  const peak = value.number === plan.memory.peak;
  return [
    el("b", {}, `${peak ? "peak: " : ""}${value.name}`),
    el("div", {}, `${bytesText(plan.total[value.number])} in ${value.phase}`),
    ...alive.slice(0, 3).map((one) => el("div", {}, swatch(one.category), `${one.name} ${bytesText(one.bytes)}`)),
  ];
}

function showAlive(plan, value, alive) {
  const rest = alive.slice(SHOWN_ALIVE);
  const most = alive.length ? alive[0].bytes : 1;
  $("alive").replaceChildren(
    el("h3", {}, bytesText(plan.total[value.number]), value.number === plan.memory.peak ? el("span", { class: "badge" }, "peak") : ""),
    el("p", {}, "while ", valueLink(value), ` runs in ${value.phase}`, value.module ? ` of ${value.module}` : ""),
    value.source ? el("p", { class: "dim source" }, value.source) : "",
    el("ol", {}, alive.slice(0, SHOWN_ALIVE).map((one) => el("li", { title: lifeText(plan, one) },
      swatch(one.category), one.value ? valueLink(one.value, one.name) : el("span", {}, one.name), el("span", { class: "number" }, bytesText(one.bytes)),
      el("span", { class: "share", style: `width: ${(100 * one.bytes) / most}%; background: var(--c-${one.category})` })))),
    rest.length ? el("p", { class: "dim" }, `and ${countText(rest.length)} more, ${bytesText(rest.reduce((sum, one) => sum + one.bytes, 0))}`) : "",
  );
}

function lifeText(plan, one) {
  if (one.first === undefined) return plain(one.category);
  const from = one.first < 0 ? "from step to step" : `from ${plan.values[one.first].name} to ${plan.values[one.last].name}`;
  return `${plain(one.category)}, ${from}`;
}

// ---- what the plots share

function frame(box, height) {
  return {
    width: Math.max(260, box.clientWidth), height, legend: { show: false }, pxAlign: false,
    cursor: { y: false, points: { show: false }, drag: { x: true, y: false } },
  };
}

const axisStyle = () => ({ stroke: colour("muted"), grid: { stroke: colour("grid"), width: 1 }, ticks: { stroke: colour("grid"), width: 1 }, font: "12px system-ui, sans-serif" });

function mark(u, across, style, dash) {
  const x = u.valToPos(across, "x", true), { ctx, bbox } = u;
  if (x < bbox.left || x > bbox.left + bbox.width) return;
  ctx.save();
  ctx.strokeStyle = style;
  ctx.lineWidth = 1.5 * devicePixelRatio;
  ctx.setLineDash(dash.map((length) => length * devicePixelRatio));
  ctx.beginPath();
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
  ctx.restore();
}

// Zoom by a key around a place; whether it was such a key.
function zoomed(u, key, around) {
  const factor = { "+": 0.5, "=": 0.5, "-": 2, "−": 2, 0: Infinity }[key];
  if (factor === undefined) return false;
  const all = u.data[0], low = all[0], high = all[all.length - 1], { min, max } = u.scales.x;
  const from = Math.max(low, around - (around - min) * factor), to = Math.min(high, around + (max - around) * factor);
  u.setScale("x", factor === Infinity ? { min: low, max: high } : { min: from, max: to });
  return true;
}
