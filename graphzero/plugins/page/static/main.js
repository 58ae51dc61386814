// The page as a whole: which plan is shown, which value is chosen, keys, light and dark.
"use strict";

const views = [overview, memory, timeline, program, passes, parameters];
const SECTIONS = ["overview", "memory", "timeline", "program", "passes", "parameters", "compare"];
const THEMES = ["auto", "light", "dark"];

const page = {
  plan: plans[0], theme: "auto",

  start() {
    program.start();
    passes.start();
    parameters.start();
    this.theme = kept("graphzero-theme") || "auto";
    this.setTheme(this.theme);
    this.listPlans();
    this.show(this.plan);
    compare.show();
    this.listen();
    this.followHash();
  },

  show(plan) {
    this.plan = plan;
    document.title = `${plan.name}, ${plan.title}`;
    press($("plans"), "plan", plan.letter);
    views.forEach((view) => view.show(plan));
  },

  listPlans() {
    if (plans.length < 2) return;
    $("plans").hidden = false;
    $("plans").replaceChildren(...plans.map((plan) =>
      el("button", { type: "button", "data-plan": plan.letter, title: plan.title, onclick: () => this.show(plan) }, `${plan.letter}: ${plan.title}`)));
  },

  // A value everywhere: in the program, and where its bytes are.
  choose(value, scrolling = true) {
    if (!value) return;
    program.choose(value);
    history.replaceState(null, "", `#value=${value.name}`);
    if (scrolling) goTo("program");
  },

  followHash() {
    const found = /^#value=(\w+)$/.exec(location.hash);
    if (found) this.choose(this.plan.byName.get(found[1]));
  },

  // ---- light and dark

  setTheme(theme) {
    this.theme = theme;
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    $("theme").textContent = { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" }[theme];
    $("theme").setAttribute("aria-label", `Colours: ${theme}. Change them`);
    keep("graphzero-theme", theme);
  },

  nextTheme() {
    this.setTheme(THEMES[(THEMES.indexOf(this.theme) + 1) % THEMES.length]);
    this.redraw();
  },

  redraw() {
    memory.draw();
    memory.moveTo(memory.pinned, true);
    if (timeline.events.length) timeline.draw();
    compare.show();
  },

  // ---- events

  listen() {
    document.addEventListener("click", (event) => {
      const link = event.target.closest("a[data-value]");
      if (!link) return;
      event.preventDefault();
      event.stopPropagation();
      this.choose(this.plan.byName.get(link.dataset.value), !link.closest("#program"));
    }, true);
    document.addEventListener("keydown", (event) => this.key(event));
    for (const [id, view] of [["memory-plot", memory], ["timeline-plot", timeline], ["program-list", program]]) $(id).addEventListener("keydown", (event) => view.key(event));
    $("to-peak").addEventListener("click", () => memory.moveTo(this.plan.memory.peak, true));
    $("memory-axis").addEventListener("click", (event) => {
      if (!event.target.dataset.axis) return;
      memory.axis = event.target.dataset.axis;
      press($("memory-axis"), "axis", memory.axis);
      this.redraw();
    });
    $("theme").addEventListener("click", () => this.nextTheme());
    $("help-button").addEventListener("click", () => $("help").showModal());
    addEventListener("hashchange", () => this.followHash());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    let waiting = 0, width = innerWidth;
    addEventListener("resize", () => {
      if (innerWidth === width) return;
      width = innerWidth;
      clearTimeout(waiting);
      waiting = setTimeout(() => this.redraw(), 120);
    });
  },

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || $("help").open) return;
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "range") return;
    const section = SECTIONS[Number(event.key) - 1];
    const done = {
      "/": () => { $("search").focus(); $("search").select(); },
      "?": () => $("help").showModal(),
      "[": () => passes.choose(passes.number - 1),
      "]": () => passes.choose(passes.number + 1),
      p: () => { memory.moveTo(this.plan.memory.peak, true); goTo("memory"); $("memory-plot").focus({ preventScroll: true }); },
      t: () => this.nextTheme(),
      x: () => this.show(plans[(plans.indexOf(this.plan) + 1) % plans.length]),
    }[event.key] || (section && !$(section).hidden ? () => goTo(section) : null);
    if (!done) return;
    event.preventDefault();
    done();
  },
};

// What the browser may remember; a page from disk may not be allowed to.
function kept(name) {
  try { return localStorage.getItem(name); } catch { return null; }
}

function keep(name, held) {
  try { localStorage.setItem(name, held); } catch { /* then it is as the system is, next time */ }
}

page.start();
