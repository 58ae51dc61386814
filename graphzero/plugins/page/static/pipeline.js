// Pipeline stages: what each rank along pp runs over time and the bytes that it holds, and the programs of its parts.
// A page of a step without stages does not have this file.
"use strict";

const RANK_LANE = 64; // pixels
const ACTION_COLOURS = { F: "e-forward", B: "e-backward", I: "e-backward", W: "c-gradients", "": "e-update" };
const ACTION_WORDS = { F: "forward", B: "backward", I: "backward, of inputs", W: "backward, of weights", "": "before or after the micro-batches" };

// The program of a part, or of the whole step, as a plan that the other views show.
class PartPlan extends Plan {
  // What other parts and micro-batches keep is held too, and has no line in this program.
  alive(position) {
    const known = new Map(), entries = super.alive(position);
    for (const { category, bytes } of entries) known.set(category, (known.get(category) || 0) + bytes);
    for (const [category, bytes] of this.series) {
      const rest = bytes[position] - (known.get(category) || 0);
      if (rest > 0.5) entries.push({ name: "of other parts and micro-batches", bytes: rest, category });
    }
    return entries.sort((a, b) => b.bytes - a.bytes);
  }
}

const pipeline = {
  plan: null, plot: null, actions: [], lanes: [], current: null, parts: new Map(),

  start() {
    const link = el("a", { href: "#pipeline", id: "to-pipeline" }, "Pipeline");
    document.querySelector("nav a").after(link);
    $("part").addEventListener("input", () => this.choose(Number($("part").value)));
    $("pipeline-plot").addEventListener("keydown", (event) => this.key(event));
    views.push(this);
    const { redraw, key } = page;
    page.redraw = function () { redraw.call(this); pipeline.draw(); };
    page.key = function (event) { // with a part shown, the other plan is the one that is not the part's
      const part = this.plan;
      if (part.owner) this.plan = part.owner;
      key.call(this, event);
      if (this.plan === part.owner) this.plan = part;
    };
    this.show(page.plan);
    page.followHash();
  },

  show(plan) {
    $("pipeline").hidden = $("to-pipeline").hidden = !plan.pipeline;
    this.plan = plan.pipeline ? plan : null;
    this.current = null;
    if (!this.plan) return this.name("", false);
    const { schedule, bubble, unit, rows } = plan.pipeline;
    this.lanes = rows.map((row, rank) => ({
      name: `rank ${rank}, ${stagesText(plan.pipeline.members[rank].stages)}`,
      actions: row.map(([label, part, begin, end, most, after]) => ({ label, part, begin, end, most, after, rank, kind: actionKind(label) })),
    }));
    this.actions = this.lanes.flatMap((lane) => lane.actions).sort((a, b) => a.begin - b.begin);
    $("pipeline-hint").textContent = `Schedule ${schedule}, simulated: bubble ${bubble.toFixed(3)} of busy time where forward takes 1 and backward 2. ` +
      (unit === "seconds" ? "Seconds are planned. " : "No times are known: forward takes 1, backward 2, each part before and after 1. ") +
      "Below each rank's actions: the bytes that it holds. Click an action to read its program; drag to zoom, double-click for all.";
    const kinds = [...new Set(this.actions.map((action) => action.kind))];
    $("pipeline-legend").replaceChildren(
      ...kinds.map((kind) => el("span", { class: "entry" }, el("span", { class: "swatch", style: `background: var(--${ACTION_COLOURS[kind]})` }), ACTION_WORDS[kind])),
      el("span", { class: "entry" }, swatch("activations"), `bytes held, up to ${bytesText(this.highest())}`));
    $("action").replaceChildren();
    showMembers(plan.pipeline, most(this.actions.map((action) => action.end)));
    showEdges(plan.pipeline);
    $("part").replaceChildren(...plan.programs.map(({ title }, i) => el("option", { value: String(i) }, title)));
    $("figures").lastChild.querySelector("h3").textContent = `Program of ${plan.programs[plan.shown].title}`;
    this.draw();
    this.choose(plan.shown);
  },

  highest() { return Math.max(1, most(this.actions.map((action) => action.most))); },

  timeText(time) { return this.plan.pipeline.unit === "seconds" ? secondsText(time) : `${Number(time.toFixed(3))}`; },

  // Show the program of a part in all sections below.
  choose(number) {
    const plan = this.plan, key = `${plan.letter}${number}`;
    if (!this.parts.has(key)) this.parts.set(key, Object.assign(new PartPlan(plan.programs[number], plan.letter), { owner: plan }));
    const part = this.parts.get(key);
    page.plan = part;
    $("part").value = String(number);
    this.name(part.title, !part.memory.categories.length);
    for (const view of [memory, timeline, program, passes, parameters]) view.show(part);
  },

  name(title, isWhole) {
    const of = title ? ` of ${title}` : "";
    $("program-title").textContent = `Program${of}`;
    $("passes-title").textContent = `Passes${of}`;
    $("parameters-title").textContent = `Parameters${of}`;
    $("memory-title").textContent = title ? `Memory while ${title} runs` : "Memory over the step";
    $("memory").hidden = $("timeline").hidden = isWhole;
    $("part-about").textContent = !title ? "" : isWhole ? "after the passes that all stages share, one micro-batch after the other" : "for the micro-batch at which its rank holds most";
  },

  draw() {
    if (!this.plan) return;
    if (this.plot) this.plot.destroy();
    const box = $("pipeline-plot"), end = most(this.actions.map((action) => action.end));
    this.plot = new uPlot({
      ...frame(box, this.lanes.length * RANK_LANE + 64),
      scales: { x: { time: false, range: (u, low, high) => [low, high] }, y: { range: [0, this.lanes.length] } },
      axes: [{ ...axisStyle(), space: 86, values: (u, ticks) => ticks.map((tick) => this.timeText(tick)) }, { show: false, size: 0 }],
      series: [{}, { show: false }],
      hooks: { draw: [(u) => this.drawLanes(u)], setCursor: [(u) => this.point(u)] },
    }, [[0, end], [null, null]], box);
    this.plot.over.addEventListener("click", () => { if (this.current) this.choose(this.current.part); });
  },

  drawLanes(u) {
    const { ctx, bbox } = u, height = bbox.height / this.lanes.length, unit = devicePixelRatio, highest = this.highest();
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.textAlign = "left";
    this.lanes.forEach((lane, i) => {
      const top = bbox.top + i * height, base = top + height * 0.98;
      ctx.fillStyle = colour(i % 2 ? "stripe" : "card");
      ctx.fillRect(bbox.left, top, bbox.width, height);
      lane.actions.forEach((action, j) => {
        const from = u.valToPos(action.begin, "x", true), to = u.valToPos(action.end, "x", true);
        const next = lane.actions[j + 1], until = next ? u.valToPos(next.begin, "x", true) : bbox.left + bbox.width;
        const bar_ = (left, right, bytes) => ctx.fillRect(left, base - (height * 0.34 * bytes) / highest, Math.max(right - left, 0), (height * 0.34 * bytes) / highest);
        ctx.fillStyle = colour("c-activations");
        bar_(from, to, action.most);
        ctx.fillStyle = colour("c-activations_2");
        bar_(to, until, action.after);
        this.drawAction(u, action, from, to, top + height * 0.25, height * 0.34);
      });
      ctx.fillStyle = colour("muted");
      ctx.font = `${11 * unit}px system-ui, sans-serif`;
      ctx.textBaseline = "top";
      ctx.fillText(lane.name, bbox.left + 4 * unit, top + 1 * unit);
    });
    ctx.restore();
  },

  drawAction({ ctx }, action, from, to, top, height) {
    const unit = devicePixelRatio, width = Math.max(to - from - 0.5 * unit, unit);
    ctx.fillStyle = colour(ACTION_COLOURS[action.kind]);
    ctx.fillRect(from, top, width, height);
    if (action === this.current) {
      ctx.strokeStyle = colour("text");
      ctx.lineWidth = 2 * unit;
      ctx.strokeRect(from, top, width, height);
    }
    ctx.font = `600 ${11 * unit}px system-ui, sans-serif`;
    if (ctx.measureText(action.label).width + 4 * unit > width) return;
    ctx.fillStyle = colour("card");
    ctx.textBaseline = "middle";
    ctx.fillText(action.label, from + 3 * unit, top + height / 2);
  },

  point(u) {
    const { left, top } = u.cursor;
    if (left < 0) return;
    const lane = this.lanes[Math.floor((top / u.over.clientHeight) * this.lanes.length)], at = u.posToVal(left, "x");
    const action = lane && lane.actions.find((one) => one.begin <= at && at <= one.end);
    if (action && action !== this.current) this.look(action);
  },

  look(action) {
    this.current = action;
    const took = `${this.timeText(action.end - action.begin)} from ${this.timeText(action.begin)}`;
    $("action").replaceChildren(el("b", {}, action.label), ` ${ACTION_WORDS[action.kind]}, ${this.plan.programs[action.part].title}, ${took}; rank ${action.rank} holds ${bytesText(action.most)}, ${bytesText(action.after)} after it`);
    this.plot.redraw(false);
  },

  key(event) {
    const at = this.actions.indexOf(this.current), end = this.actions.length - 1, step = event.shiftKey ? 20 : 1;
    const to = { ArrowLeft: Math.max(0, at - step), ArrowRight: Math.min(end, at + step), Home: 0, End: end }[event.key];
    if (to !== undefined) this.look(this.actions[to]);
    else if (event.key === "Enter" && this.current) { this.choose(this.current.part); goTo("program"); }
    else if (!zoomed(this.plot, event.key, this.current ? this.current.begin : 0)) return;
    event.preventDefault();
  },
};

const actionKind = (label) => { const kind = /^\d+([FBIW])\d+$/.exec(label); return kind ? kind[1] : ""; };
const stagesText = (stages) => `stage${stages.length > 1 ? "s" : ""} ${stages.join(", ")}`;

function showMembers({ members, rows }, end) {
  const busy = rows.map((row) => row.reduce((sum, action) => sum + action[3] - action[2], 0));
  const numbers = [["parameters", (one) => one.resident.parameters], ["optimizer states", (one) => one.resident.optimizer_states],
    ["in flight, at most", (one) => one.in_flight], ["peak", (one) => one.peak]];
  const high = Math.max(...members.map((one) => one.peak));
  $("members-table").replaceChildren(
    el("thead", {}, el("tr", {}, el("th", {}, "rank along pp"), el("th", {}, "stages"), el("th", { class: "number" }, "busy"), ...numbers.map(([name]) => el("th", { class: "number" }, name)), el("th", {}, "at the peak"), el("th", {}, "which is at"))),
    el("tbody", {}, members.map((one, rank) => el("tr", {}, el("th", { scope: "row" }, String(rank)), el("td", {}, one.stages.join(", ")), el("td", { class: "number" }, `${((100 * busy[rank]) / end).toFixed(0)} %`),
      ...numbers.map(([, of]) => el("td", { class: "number" }, bytesText(of(one)))),
      el("td", { class: "fill" }, bar(Object.entries(one.at_peak).filter(([, bytes]) => bytes > 0).sort((a, b) => b[1] - a[1]), high)),
      el("td", {}, one.peak_at)))),
  );
}

function showEdges({ edges }) {
  $("edges-table").replaceChildren(
    el("thead", {}, el("tr", {}, el("th", {}, "from stage"), el("th", {}, "to stage"), el("th", { class: "number" }, "bytes of a message"), el("th", { class: "number" }, "messages of a step"))),
    el("tbody", {}, edges.map(([source, target, bytes, messages]) => el("tr", {}, el("td", {}, String(source)), el("td", {}, String(target)),
      el("td", { class: "number" }, bytesText(bytes)), el("td", { class: "number" }, countText(messages))))),
  );
}

pipeline.start();
