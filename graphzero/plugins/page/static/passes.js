// The passes as a slider of diffs.
"use strict";

const CONTEXT = 2; // lines around what changed

const passes = {
  plan: null, list: null, number: 1, shows: "diff",

  start() {
    this.list = new LongList($("pass-list"), (item) => this.row(item));
    $("pass").addEventListener("input", () => this.choose(Number($("pass").value)));
    $("pass-search").addEventListener("input", () => this.fill());
    $("pass-shows").addEventListener("click", (event) => {
      if (!event.target.dataset.shows) return;
      this.shows = event.target.dataset.shows;
      press($("pass-shows"), "shows", this.shows);
      this.fill();
    });
  },

  show(plan) {
    this.plan = plan;
    const counts = plan.passes.map(changedLines), largest = Math.max(1, ...counts.map(([out, in_]) => out + in_));
    $("pass").max = plan.passes.length - 1;
    $("pass").setAttribute("aria-label", "Pass");
    $("pass-bars").replaceChildren(...plan.passes.map((pass, i) => {
      const [out, in_] = counts[i], height = (lines) => `height: ${lines ? 6 + (94 * lines) / largest : 0}%`;
      return el("button", { type: "button", tabindex: "-1", title: `${pass.name}: ${out} lines out, ${in_} in`, onclick: () => this.choose(i) },
        el("span", { class: "out", style: height(out) }), el("span", { class: "in", style: height(in_) }));
    }));
    const first = plan.passes.findIndex((pass) => pass.name === "zero" && pass.edits.length);
    this.choose(first >= 0 ? first : 0);
  },

  // index: of the pass; or, with the name of a value, the number of the snapshot that it made.
  choose(index, name = "") {
    this.number = Math.max(0, Math.min(name ? index - 1 : index, this.plan.passes.length - 1));
    const pass = this.plan.passes[this.number], [out, in_] = changedLines(pass);
    $("pass").value = this.number;
    $("pass").setAttribute("aria-valuetext", `${pass.name}, ${this.number + 1} of ${this.plan.passes.length}`);
    [...$("pass-bars").children].forEach((bar_, i) => bar_.classList.toggle("chosen", i === this.number));
    $("pass-name").replaceChildren(
      `${this.number + 1}. ${pass.name} `,
      el("span", { class: "dim" }, out + in_ ? `${countText(out)} lines out, ${countText(in_)} in; ` : "changed nothing; ", `${secondsText(pass.seconds)}; ${pass.level} after it`),
    );
    $("pass-options").textContent = pass.options;
    if (name) $("pass-search").value = "";
    this.fill(name);
  },

  fill(name = "") {
    const wanted = $("pass-search").value.trim().toLowerCase();
    const passes = { diff: null, before: this.number, after: this.number + 1 }[this.shows];
    let items = passes === null ? this.diff() : this.plan.lines(passes).map((line) => ({ text: data.pool[line] }));
    if (wanted) items = items.filter((item) => item.text.toLowerCase().includes(wanted));
    if (!items.length) items = [{ text: wanted ? "  nothing here has that" : "  this pass changed nothing", kind: "gap" }];
    this.list.show(items, name ? items.findIndex((item) => item.kind !== "out" && defined(item.text) === name) : -1);
  },

  diff() {
    const before = this.plan.lines(this.number), items = [];
    let shown = 0;
    for (const [at, removed, added] of this.plan.passes[this.number].edits) {
      const from = Math.max(shown, at - CONTEXT);
      for (let i = shown; i < Math.min(shown + CONTEXT, from) && items.length; i++) items.push({ text: data.pool[before[i]] });
      if (from > shown + (items.length ? CONTEXT : 0)) items.push({ text: `  … line ${countText(from + 1)}`, kind: "gap" });
      for (let i = Math.max(from, items.length && from < shown + CONTEXT ? shown + CONTEXT : from); i < at; i++) items.push({ text: data.pool[before[i]] });
      items.push(...paired(before.slice(at, at + removed), added));
      shown = at + removed;
    }
    for (let i = shown; i < Math.min(shown + CONTEXT, before.length) && items.length; i++) items.push({ text: data.pool[before[i]] });
    return items;
  },

  row(item) {
    const sign = { out: "−", in: "+" }[item.kind] || " ";
    const chosen = this.list.chosen >= 0 && this.list.items[this.list.chosen] === item;
    return el("div", { class: `diff-line ${item.kind || ""} ${chosen ? "chosen" : ""}` },
      el("span", { class: "sign" }, sign), item.kind === "gap" ? item.text : lineParts(item.text, this.plan));
  },
};

// Lines that go out and come in, those of one value together; each kind in its order.
function paired(removed, added) {
  const places = new Map(added.map((line, i) => [defined(data.pool[line]) || `${i}`, i])), items = [];
  let next = 0;
  const come = (end) => { for (; next < end; next++) items.push({ text: data.pool[added[next]], kind: "in" }); };
  for (const line of removed) {
    const place = places.get(defined(data.pool[line]));
    if (place >= next) come(place);
    items.push({ text: data.pool[line], kind: "out" });
    if (place === next) come(place + 1);
  }
  come(added.length);
  return items;
}

const changedLines = (pass) => pass.edits.reduce(([out, in_], [, removed, added]) => [out + removed, in_ + added.length], [0, 0]);
