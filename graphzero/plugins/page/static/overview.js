// What a reader wants to know in ten seconds: where the peak is, what makes it, what the step sends, what it takes.
"use strict";

const overview = {
  show(plan) {
    $("title").textContent = plans.length > 1 ? plan.name : `${plan.name} · ${plan.title}`;
    const figures = [peakFigure, stateFigure, trafficFigure, timeFigure, workFigure].map((make) => make(plan));
    $("figures").replaceChildren(...figures.filter(Boolean));
  },
};

const figure = (title, number, ...rest) => el("div", { class: "figure" }, el("h3", {}, title), el("p", { class: "large" }, number), ...rest);

function peakFigure(plan) {
  const { peak, at_peak } = plan.plan.memory;
  const parts = Object.entries(at_peak).filter(([, bytes]) => bytes > 0).sort((a, b) => b[1] - a[1]);
  const at = plan.values[plan.memory.peak];
  return figure(
    "Peak of memory", bytesText(peak),
    el("p", {}, "at ", valueLink(at), ` in ${at.phase}`, at.module ? ` of ${at.module}` : ""),
    bar(parts, peak),
    el("ul", { class: "parts" }, parts.slice(0, 5).map(([category, bytes]) =>
      el("li", {}, swatch(category), `${plain(category)} `, el("span", { class: "number" }, bytesText(bytes))))),
  );
}

function stateFigure(plan) {
  const { resident, model_state } = plan.plan.memory;
  const parts = Object.entries(resident).filter(([, bytes]) => bytes > 0).sort((a, b) => b[1] - a[1]);
  const total = parts.reduce((sum, [, bytes]) => sum + bytes, 0);
  return figure(
    "Held between steps", bytesText(total),
    el("p", {}, `model state ${bytesText(model_state)}: parameters, optimizer states, gradients`),
    bar(parts, total),
    el("ul", { class: "parts" }, parts.slice(0, 5).map(([category, bytes]) =>
      el("li", {}, swatch(category), `${category === "arena" ? "arena" : plain(category)} `, el("span", { class: "number" }, bytesText(bytes))))),
  );
}

function trafficFigure(plan) {
  const { traffic, comm_bytes, comm_volume } = plan.plan;
  const axes = new Set(traffic.map((row) => row[2]));
  const calls = traffic.reduce((sum, row) => sum + row[4], 0);
  return figure(
    "A rank sends", bytesText(comm_bytes),
    el("p", {}, `in ${countText(calls)} collectives; of parameters and gradients ${comm_volume.toFixed(2)} × the parameters`),
    el("ul", { class: "parts" }, [...traffic].sort((a, b) => b[5] - a[5]).slice(0, 4).map(([phase, kind, axis, what, count, bytes]) =>
      el("li", { title: `${countText(count)} calls along ${axis}` }, `${phase}: ${kind.replace("_", "-")}${axes.size > 1 ? ` ${axis}` : ""}${what === "other" ? "" : ` of ${what}`} `, el("span", { class: "number" }, bytesText(bytes))))),
  );
}

function timeFigure(plan) {
  const rows = Object.entries(plan.timeline).map(([source, whole]) => [source, whole.seconds ? whole : spans(plan.events[source])]);
  if (!rows.length) return null;
  const [source, first] = rows[0];
  const list = rows.flatMap(([name, one]) => {
    const lead = rows.length > 1 ? `${name}: ` : "";
    const parts = [...(name === source ? [] : [["a step takes", one.seconds]]), ["compute", one.compute], ["communication", one.communication], ["of it exposed", one.exposed], ["waits for the host", one.host]];
    return parts.filter(([, seconds]) => seconds !== undefined).map(([what, seconds]) =>
      el("li", {}, `${lead}${what} `, el("span", { class: "number" }, secondsText(seconds))));
  });
  const links = (plan.timeline.planned && plan.timeline.planned.sources.links) || "";
  return figure(`A step takes, as ${source}`, secondsText(first.seconds), el("ul", { class: "parts" }, list),
    links ? el("p", { class: "dim", title: links }, `links: ${links.split(/[:;]/)[0]}`) : null);
}

function workFigure(plan) {
  const seconds = plan.passes.reduce((sum, pass) => sum + pass.seconds, 0);
  const decisions = plan.plan.decisions;
  return figure(
    "Program", `${countText(plan.values.length - 1)} values`,
    el("p", {}, `${countText(plan.plan.parameters)} parameters on ${plan.placement}; ${plan.passes.length} passes in ${secondsText(seconds)}`),
    decisions.length ? el("ul", { class: "parts" }, decisions.map((text) => el("li", {}, text))) : null,
  );
}

// Seconds of measured events: in all, of each kind of stream, and exposed, in which something is sent and no op runs.
function spans(events) {
  const compute = merged(events.filter((event) => isCompute(event) && !isWaiting(event)));
  const communication = merged(events.filter((event) => !isCompute(event)));
  const length = (parts) => parts.reduce((sum, [begin, end]) => sum + end - begin, 0);
  const both = length(merged(events));
  const ends = events.map((event) => event.end), begins = events.map((event) => event.begin);
  return {
    seconds: Math.max(0, most(ends)) - (begins.length ? -most(begins.map((x) => -x)) : 0),
    compute: length(compute), communication: length(communication), exposed: both - length(compute),
  };
}

const most = (numbers) => numbers.reduce((a, b) => Math.max(a, b), -Infinity);

// Intervals that overlap, as one.
function merged(events) {
  const found = [];
  for (const { begin, end } of [...events].sort((a, b) => a.begin - b.begin)) {
    const last = found[found.length - 1];
    if (last && begin <= last[1]) last[1] = Math.max(last[1], end);
    else found.push([begin, end]);
  }
  return found;
}

const swatch = (category) => el("span", { class: "swatch", style: `background: var(--c-${category})` });

function bar(parts, total) {
  const text = parts.map(([category, bytes]) => `${plain(category)} ${bytesText(bytes)}`).join(", ");
  return el("div", { class: "bar", role: "img", "aria-label": text }, parts.map(([category, bytes]) =>
    el("span", { style: `width: ${(100 * bytes) / total}%; background: var(--c-${category})`, title: `${plain(category)} ${bytesText(bytes)}` })));
}
