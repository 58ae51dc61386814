// The table of parameters, with bytes by owner.
"use strict";

const PARTS = ["parameter", "states", "gradient"];

const parameters = {
  plan: null, sorted: "path", falling: false,

  start() {
    for (const id of ["parameters-search", "parameters-by"]) $(id).addEventListener("input", () => this.fill());
  },

  show(plan) {
    this.plan = plan;
    this.fill();
    showRanks(plan);
  },

  rows() {
    const rows = this.plan.parameters.rows.map(([path, number, type, sbp, whole, ...owners]) => ({
      path, value: this.plan.values[number], type, sbp, whole, owners, each: owners.map(largest),
    }));
    return $("parameters-by").value === "module" ? byModule(rows) : rows;
  },

  fill() {
    const wanted = $("parameters-search").value.trim().toLowerCase();
    const rows = this.rows().filter((row) => row.path.toLowerCase().includes(wanted));
    const collator = new Intl.Collator("en", { numeric: true });
    const key = { path: (row) => row.path, whole: (row) => row.whole, ...Object.fromEntries(PARTS.map((part, i) => [part, (row) => row.each[i]])) }[this.sorted];
    rows.sort((a, b) => (this.sorted === "path" ? collator.compare(key(a), key(b)) : key(a) - key(b)) * (this.falling ? -1 : 1));
    const sums = [rows.reduce((sum, row) => sum + row.whole, 0), ...PARTS.map((_, i) => rows.reduce((sum, row) => sum + row.each[i], 0))];
    $("parameters-table").replaceChildren(
      el("thead", {}, el("tr", {}, this.head("path", $("parameters-by").value), el("th", {}, "type"), el("th", {}, "SBP"), this.head("whole", "whole", true),
        ...PARTS.map((part) => this.head(part, `${part}, a rank`, true)), el("th", {}, "owners of the parameter"), el("th", {}, "owners of states"))),
      el("tbody", {}, rows.map(parameterRow)),
      el("tfoot", {}, el("tr", {}, el("th", { scope: "row" }, `${countText(rows.length)} in all`), el("td"), el("td"),
        ...sums.map((sum) => el("td", { class: "number" }, bytesText(sum))), el("td"), el("td"))),
    );
  },

  head(key, text, number = false) {
    const on = this.sorted === key;
    return el("th", { class: number ? "number" : "", "aria-sort": on ? (this.falling ? "descending" : "ascending") : "none" },
      el("button", { type: "button", class: "link", onclick: () => {
        this.falling = on ? !this.falling : number;
        this.sorted = key;
        this.fill();
      } }, text, on ? (this.falling ? " ↓" : " ↑") : ""));
  },
};

function parameterRow(row) {
  return el("tr", {},
    el("th", { scope: "row" }, row.value ? valueLink(row.value, row.path) : row.path),
    el("td", {}, row.type),
    el("td", {}, row.sbp ? el("span", { class: `sbp ${sbpClass(row.sbp)}` }, row.sbp) : ""),
    el("td", { class: "number" }, bytesText(row.whole)),
    ...row.each.map((bytes) => el("td", { class: "number" }, bytes ? bytesText(bytes) : "")),
    el("td", {}, row.owners ? ownersText(row.owners[0]) : ""),
    el("td", {}, row.owners ? ownersText(row.owners[1]) : ""));
}

const largest = (runs) => runs.reduce((most_, [, bytes]) => Math.max(most_, bytes), 0);

function ownersText(runs) {
  const held = runs.filter(([, bytes]) => bytes);
  if (held.length > 4) return `${held.reduce((sum, [count]) => sum + count, 0)} ranks, up to ${bytesText(largest(runs))}`;
  return held.map(([count, bytes]) => `${countText(count)} × ${bytesText(bytes)}`).join(", ");
}

function byModule(rows) {
  const found = new Map();
  for (const row of rows) {
    const path = row.path.replace(/\.?[^.]*$/, "") || "(none)";
    const sum = found.get(path) || { path, count: 0, whole: 0, each: PARTS.map(() => 0), sbp: "" };
    sum.count += 1;
    sum.type = `${sum.count} parameters`;
    sum.whole += row.whole;
    sum.each = sum.each.map((bytes, i) => bytes + row.each[i]);
    found.set(path, sum);
  }
  return [...found.values()];
}

function showRanks(plan) {
  const runs = PARTS.map((part) => plan.parameters.ranks[part]);
  const all = sameRuns(runs), most_ = Math.max(1, ...all.map((run) => run.bytes.reduce((a, b) => a + b, 0)));
  $("ranks-table").replaceChildren(
    el("thead", {}, el("tr", {}, el("th", {}, "ranks"), ...PARTS.map((part) => el("th", { class: "number" }, part)), el("th", { class: "number" }, "in all"), el("th", {}, ""))),
    el("tbody", {}, all.map(({ from, to, bytes }) => {
      const sum = bytes.reduce((a, b) => a + b, 0);
      return el("tr", {}, el("th", { scope: "row" }, from === to ? `${from}` : `${from} to ${to}, each`),
        ...bytes.map((one) => el("td", { class: "number" }, bytesText(one))), el("td", { class: "number" }, bytesText(sum)),
        el("td", { class: "fill" }, el("div", { class: "bar", "aria-hidden": "true" }, bytes.map((one, i) =>
          el("span", { style: `width: ${(100 * one) / most_}%; background: var(--c-${["parameters", "optimizer_states", "gradients"][i]})` })))));
    })),
  );
}

// Ranks side by side that hold alike of all parts.
function sameRuns(parts) {
  const found = [], left = parts.map((runs) => runs.map((run) => [...run]));
  let from = 0;
  while (left[0].length) {
    const count = Math.min(...left.map((runs) => runs[0][0]));
    found.push({ from, to: from + count - 1, bytes: left.map((runs) => runs[0][1]) });
    from += count;
    for (const runs of left) {
      runs[0][0] -= count;
      if (!runs[0][0]) runs.shift();
    }
  }
  return found;
}
