// The final program: a list that is searched, and all that is known of the chosen value.
"use strict";

const program = {
  plan: null, list: null, chosen: null,

  start() {
    this.list = new LongList($("program-list"), (item, i) => this.row(item, i));
    for (const id of ["search", "phase", "sbp", "module"]) $(id).addEventListener("input", () => this.filter());
    $("filters").addEventListener("submit", (event) => event.preventDefault());
    $("search").addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.chooseFirst();
      if (event.key === "Escape") { $("search").value = ""; this.filter(); $("program-list").focus(); }
    });
  },

  show(plan) {
    this.plan = plan;
    this.chosen = null;
    options($("phase"), "all", PHASES.slice(0, 4));
    options($("sbp"), "all", [...new Set(plan.values.map((value) => value.sbp).filter(Boolean))].sort());
    options($("module"), "all", modulesOf(plan));
    this.filter();
    this.showValue(plan.values[plan.memory.peak]);
  },

  filter() {
    const wanted = { text: $("search").value.trim().toLowerCase(), phase: $("phase").value, sbp: $("sbp").value, module: $("module").value };
    const all = !Object.values(wanted).some(Boolean);
    const values = this.plan.values.filter((value) => value.phase !== "end" && fits(value, wanted));
    const items = all ? this.everyLine() : values.map((value) => ({ text: value.line, value }));
    $("found").textContent = all ? `${countText(values.length)} values` : `${countText(values.length)} of ${countText(this.plan.values.length - 1)}`;
    this.list.show(items, this.chosen ? items.findIndex((item) => item.value === this.chosen) : -1);
  },

  everyLine() {
    return this.plan.lines(this.plan.passes.length).map((number) => {
      const text = data.pool[number];
      return { text, value: this.plan.byName.get(defined(text)) };
    });
  },

  row(item, index) {
    const chosen = index === this.list.chosen;
    return el("div", {
      class: item.value ? `value-line edge-${sbpClass(item.value.sbp)}` : "heading-line",
      role: "option", "aria-selected": String(chosen), id: `line-${index}`,
      onclick: () => { if (item.value) page.choose(item.value, false); },
    }, lineParts(item.text, this.plan));
  },

  chooseFirst() {
    const index = this.list.items.findIndex((item) => item.value);
    if (index >= 0) page.choose(this.list.items[index].value, false);
  },

  // Show a value; `leaving` the filter where it hides it.
  choose(value) {
    this.chosen = value;
    let index = this.list.items.findIndex((item) => item.value === value);
    if (index < 0 && value.phase !== "end") {
      $("filters").reset();
      this.filter();
      index = this.list.items.findIndex((item) => item.value === value);
    }
    if (index >= 0) this.list.choose(index);
    $("program-list").setAttribute("aria-activedescendant", `line-${index}`);
    this.showValue(value);
  },

  showValue(value) {
    const plan = this.plan, life = plan.lifeOf(value);
    $("value").replaceChildren(
      el("h3", {}, value.name),
      el("p", { class: "code" }, lineParts(`  ${value.line.trim()}`, plan)),
      el("dl", {},
        fact("SBP", value.sbp && el("span", { class: `sbp ${sbpClass(value.sbp)}` }, value.sbp)),
        fact("type", value.type),
        fact("phase", value.phase),
        fact("module", value.module),
        fact("source", value.source && el("span", { class: "source" }, value.source)),
        fact("made by", passLink(value, value.made)),
        fact("last changed by", value.changed !== value.made && passLink(value, value.changed)),
        fact("holds", life && life.bytes > 0 && el("span", {}, `${bytesText(life.bytes)} of ${plain(life.category)}, `,
          life.first < 0 ? "from step to step" : el("span", {}, "until ", valueLink(plan.values[life.last])))),
      ),
      el("button", { type: "button", onclick: () => { memory.moveTo(value.number, true); goTo("memory"); } }, "Show in memory"),
      links(`reads ${value.operands.length}`, value.operands),
      links(`read by ${value.readers.length}`, value.readers),
    );
  },

  key(event) {
    const at = this.list.chosen, page_ = this.list.page, end = this.list.items.length - 1;
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, j: at + 1, k: at - 1, PageDown: at + page_, PageUp: at - page_, Home: 0, End: end }[event.key];
    if (to === undefined && event.key !== "Enter") return;
    event.preventDefault();
    const items = this.list.items, from = Math.max(0, Math.min(to ?? at, end));
    const down = items.findIndex((item, i) => i >= from && item.value), up = items.findLastIndex((item, i) => i <= from && item.value);
    const index = to < at && up >= 0 ? up : down >= 0 ? down : up;
    if (index >= 0) page.choose(items[index].value, false);
  },
};

function fits(value, { text, phase, sbp, module }) {
  return (!phase || value.phase === phase) && (!sbp || value.sbp === sbp) &&
    (!module || `${value.module}.`.startsWith(`${module}.`)) &&
    (!text || `${value.line}\n${value.source}\n${value.module}`.toLowerCase().includes(text));
}

// All paths, those that only hold others too.
function modulesOf(plan) {
  const found = new Set();
  for (const { module } of plan.values) {
    const parts = module ? module.split(".") : [];
    parts.forEach((_, i) => found.add(parts.slice(0, i + 1).join(".")));
  }
  return [...found].sort(new Intl.Collator("en", { numeric: true }).compare);
}

function options(select, all, names) {
  select.replaceChildren(el("option", { value: "" }, all), ...names.map((name) => el("option", { value: name }, name)));
}

const fact = (name, held) => (held ? [el("dt", {}, name), el("dd", {}, held)] : []);

function links(title, values) {
  if (!values.length) return "";
  return el("details", { open: values.length <= 12 }, el("summary", {}, title),
    el("ul", { class: "links" }, values.map((value) => el("li", {}, valueLink(value), el("span", { class: "dim" }, ` ${value.type} `), value.sbp ? el("span", { class: `sbp ${sbpClass(value.sbp)}` }, value.sbp) : ""))));
}

function passLink(value, number) {
  if (number === 0) return "the capture";
  return el("button", { type: "button", class: "link", onclick: () => { passes.choose(number, value.name); goTo("passes"); } }, value.plan.snapshot(number));
}
