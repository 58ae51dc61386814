// Two plans side by side.
"use strict";

const compare = {
  plots: [],

  show() {
    if (plans.length < 2) return;
    $("compare").hidden = $("to-compare").hidden = false;
    const high = Math.max(...plans.map((plan) => plan.plan.memory.peak));
    this.plots.forEach((plot) => plot.destroy());
    const halves = plans.map((plan) => el("div", {}, el("h3", {}, el("span", { class: "badge" }, plan.letter), ` ${plan.title}`), el("div", { class: "plot" })));
    $("compare-plots").replaceChildren(...halves);
    this.plots = plans.map((plan, i) => small(plan, halves[i].lastChild, high));
    $("compare-table").replaceChildren(
      el("thead", {}, el("tr", {}, el("th", {}, ""), ...plans.map((plan) => el("th", { class: "number", title: plan.title }, plan.letter)), el("th", { class: "number" }, "B − A"), el("th", { class: "number" }, "B / A"))),
      el("tbody", {}, comparedRows().map(([name, text, a, b]) => el("tr", {}, el("th", { scope: "row" }, name),
        el("td", { class: "number" }, text(a)), el("td", { class: "number" }, text(b)),
        el("td", { class: "number" }, `${b > a ? "+" : b < a ? "−" : ""}${text(Math.abs(b - a))}`), el("td", { class: "number" }, a ? (b / a).toFixed(2) : "")))),
    );
  },
};

function comparedRows() {
  const rows = [];
  const add = (name, text, of) => {
    const found = plans.map(of);
    if (found.some(Boolean)) rows.push([name, text, ...found]);
  };
  add("peak of memory", bytesText, (plan) => plan.plan.memory.peak);
  for (const source of ["planned", "measured"]) add(`seconds of a step, ${source}`, secondsText, (plan) => (plan.events[source] ? plan.timeline[source].seconds || spans(plan.events[source]).seconds : 0));
  add("bytes that a rank sends", bytesText, (plan) => plan.plan.comm_bytes);
  add("model state", bytesText, (plan) => plan.plan.memory.model_state);
  for (const category of plans[0].memory.categories) add(`at the peak: ${plain(category)}`, bytesText, (plan) => plan.plan.memory.at_peak[category] || 0);
  for (const category of plans[0].memory.categories) add(`between steps: ${category.replaceAll("_", " ")}`, bytesText, (plan) => plan.plan.memory.resident[category] || 0);
  const kinds = new Map(plans.flatMap((plan) => plan.plan.traffic.map(([phase, kind, axis, what]) => [`${phase}: ${kind} (${axis}) of ${what}`, true])));
  for (const name of kinds.keys()) {
    add(`sent in ${name}`, bytesText, (plan) => plan.plan.traffic.filter(([phase, kind, axis, what]) => `${phase}: ${kind} (${axis}) of ${what}` === name).reduce((sum, row) => sum + row[5], 0));
  }
  add("collectives", countText, (plan) => plan.plan.traffic.reduce((sum, row) => sum + row[4], 0));
  add("values of the program", countText, (plan) => plan.values.length - 1);
  return rows;
}

function small(plan, box, high) {
  const positions = plan.running, bands = [...plan.series].map(([category, bytes]) => ({ category, bytes }));
  const drawn = drawnBy(positions, positions.map((position) => plan.total[position]), stacked(bands, positions).reverse());
  return new uPlot({
    ...frame(box, 220),
    scales: { x: { time: false }, y: { range: [0, high * 1.05] } },
    axes: [{ ...axisStyle(), values: (u, ticks) => ticks.map(countText) }, { ...axisStyle(), size: 76, values: (u, ticks) => ticks.map(tickText) }],
    series: [{}, ...bands.map((band) => area(band.category)).reverse()],
    hooks: { draw: [(u) => mark(u, plan.memory.peak, colour("peak"), [5, 4])], setScale: [drawn.follow] },
  }, drawn.all(box), box);
}
