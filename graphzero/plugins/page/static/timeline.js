// When compute and collectives run: a lane for each stream, of each stage; as planned, and as measured.
"use strict";

const LANE = 30; // pixels

const timeline = {
  plan: null, plot: null, lanes: [], events: [], current: null,

  show(plan) {
    this.plan = plan;
    this.current = null;
    this.lanes = lanesOf(plan.events);
    this.events = this.lanes.flatMap((lane) => lane.events).sort((a, b) => a.begin - b.begin);
    $("event").replaceChildren();
    $("timeline-hint").textContent = this.events.length
      ? "Point at an event to see what it is, click to see its value; drag to zoom, double-click for all."
      : "No times are known of this plan: give the command a --device, or times that were --measured.";
    $("timeline-plot").hidden = $("timeline-legend").hidden = !this.events.length;
    $("timeline-legend").replaceChildren(...kindsOf(this.events).map((kind) =>
      el("span", { class: "entry" }, el("span", { class: "swatch", style: `background: var(--${kind.colour})` }), kind.name)));
    if (this.events.length) this.draw();
  },

  draw() {
    if (this.plot) this.plot.destroy();
    const box = $("timeline-plot"), end = most(this.events.map((event) => event.end));
    this.plot = new uPlot({
      ...frame(box, this.lanes.length * LANE + 64),
      scales: { x: { time: false, range: (u, low, high) => [low, high] }, y: { range: [0, this.lanes.length] } },
      axes: [{ ...axisStyle(), space: 86, values: (u, ticks) => ticks.map(secondsText) }, { show: false, size: 0 }],
      series: [{}, { show: false }],
      hooks: { draw: [(u) => this.drawLanes(u)], setCursor: [(u) => this.point(u)] },
    }, [[0, end], [null, null]], box);
    this.plot.over.addEventListener("click", () => { if (this.current) page.choose(this.plan.byName.get(this.current.name)); });
  },

  drawLanes(u) {
    const { ctx, bbox } = u, height = bbox.height / this.lanes.length, unit = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    this.lanes.forEach((lane, i) => {
      const top = bbox.top + i * height;
      ctx.fillStyle = colour(i % 2 ? "stripe" : "card");
      ctx.fillRect(bbox.left, top, bbox.width, height);
      for (const event of lane.events) {
        const from = u.valToPos(event.begin, "x", true), to = u.valToPos(event.end, "x", true);
        if (to < bbox.left || from > bbox.left + bbox.width) continue;
        ctx.fillStyle = colour(eventColour(event));
        ctx.fillRect(from, top + height * 0.42, Math.max(to - from, unit), height * 0.5);
        if (event === this.current) {
          ctx.strokeStyle = colour("text");
          ctx.lineWidth = 2 * unit;
          ctx.strokeRect(from, top + height * 0.42, Math.max(to - from, unit), height * 0.5);
        }
      }
      ctx.fillStyle = colour("muted");
      ctx.font = `${11 * unit}px system-ui, sans-serif`;
      ctx.textBaseline = "top";
      ctx.textAlign = "left";
      ctx.fillText(lane.name, bbox.left + 4 * unit, top + 1 * unit);
    });
    ctx.restore();
  },

  point(u) {
    const { left, top } = u.cursor;
    if (left < 0) return;
    const lane = this.lanes[Math.floor((top / u.over.clientHeight) * this.lanes.length)];
    const at = u.posToVal(left, "x"), near = u.posToVal(3, "x") - u.posToVal(0, "x");
    const found = lane && lane.events.find((event) => event.begin - near <= at && at <= event.end + near);
    if (found && found !== this.current) this.look(found);
  },

  look(event) {
    this.current = event;
    const value = this.plan.byName.get(event.name);
    const facts = [
      event.kind, event.phase, `${secondsText(event.end - event.begin)} from ${secondsText(event.begin)}`,
      event.nbytes ? bytesText(event.nbytes) : "", event.flops ? `${(event.flops / 1e9).toFixed(2)} GFLOP` : "",
    ];
    $("event").replaceChildren(value ? valueLink(value) : event.name, ` ${facts.filter(Boolean).join(", ")}; ${event.lane}`);
    if (value) memory.moveTo(value.number, true);
    this.plot.redraw(false);
  },

  key(event) {
    if (!this.events.length) return;
    const at = this.events.indexOf(this.current), end = this.events.length - 1, step = event.shiftKey ? 20 : 1;
    const to = { ArrowLeft: Math.max(0, at - step), ArrowRight: Math.min(end, at + step), Home: 0, End: end }[event.key];
    if (to !== undefined) this.look(this.events[to]);
    else if (event.key === "Enter" && this.current) page.choose(this.plan.byName.get(this.current.name));
    else if (!zoomed(this.plot, event.key, this.current ? this.current.begin : 0)) return;
    event.preventDefault();
  },
};

function lanesOf(sources) {
  const lanes = new Map();
  for (const [source, events] of Object.entries(sources)) {
    for (const event of events) {
      const stage = event.stage === undefined || event.stage === null ? "" : `stage ${event.stage}, `;
      const name = `${source}: ${stage}${event.stream}`;
      if (!lanes.has(name)) lanes.set(name, { name, source, stage: event.stage ?? -1, compute: event.stream.startsWith("compute"), events: [] });
      lanes.get(name).events.push({ ...event, lane: name });
    }
  }
  return [...lanes.values()].sort((a, b) => (a.source < b.source ? 1 : a.source > b.source ? -1 : a.stage - b.stage || b.compute - a.compute));
}

const isOutside = (event) => event.stream === "host"; // around the program
const isCompute = (event) => event.stream.startsWith("compute");
const isWaiting = (event) => isCompute(event) && ["launch", "await"].includes(event.kind); // of a measured step
const eventColour = (event) => (isWaiting(event) || isOutside(event) ? "e-waiting" : isCompute(event) ? `e-${PHASES.includes(event.phase) ? event.phase : "forward"}` : "e-communication");

function kindsOf(events) {
  const found = new Map();
  for (const event of events) found.set(eventColour(event), isOutside(event) ? "around the program" : isWaiting(event) ? "begins or awaits" : isCompute(event) ? event.phase : "communication");
  return [...found].map(([colour_, name]) => ({ colour: colour_, name }));
}
