// Elements, and lists of many lines of which only those in sight are there.
"use strict";

const $ = (id) => document.getElementById(id);

// el("td", {class: "number"}, "3", child): texts are texts, never markup.
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, held] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), held);
    else if (held === true) made.setAttribute(name, "");
    else if (held !== false && held !== undefined && held !== null) made.setAttribute(name, held);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

function press(group, name, chosen) {
  for (const button of group.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset[name] === chosen));
}

const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
const goTo = (id) => $(id).scrollIntoView({ behavior: calm() ? "auto" : "smooth", block: "start" });

// Lines of one height in a box that scrolls; `draw(item, index)` makes the element of one.
class LongList {
  constructor(box, draw) {
    this.box = box;
    this.draw = draw;
    this.items = [];
    this.chosen = -1;
    this.inner = el("div", { class: "lines" });
    box.replaceChildren(this.inner);
    box.addEventListener("scroll", () => this.render());
    new ResizeObserver(() => this.render(true)).observe(box);
  }

  get height() { return (this._height ??= parseFloat(getComputedStyle(this.box).getPropertyValue("--line")) || 20); }

  show(items, chosen = -1) {
    this.items = items;
    this.chosen = chosen;
    this.box.scrollTop = 0;
    this.inner.style.height = `${items.length * this.height}px`;
    const longest = items.reduce((most, item) => Math.max(most, (item.text || "").length), 0);
    this.inner.style.minWidth = `${Math.min(longest + 4, 600)}ch`;
    this.render(true);
    if (chosen >= 0) this.reveal(chosen);
  }

  choose(index) {
    this.chosen = Math.max(0, Math.min(index, this.items.length - 1));
    this.render(true);
    this.reveal(this.chosen);
  }

  reveal(index) {
    const top = index * this.height, { scrollTop, clientHeight } = this.box;
    if (top < scrollTop || top + this.height > scrollTop + clientHeight) this.box.scrollTop = top - clientHeight / 3;
    this.render();
  }

  get page() { return Math.max(1, Math.floor(this.box.clientHeight / this.height) - 1); }

  render(again = false) {
    const first = Math.max(0, Math.floor(this.box.scrollTop / this.height) - 8);
    const last = Math.min(this.items.length, Math.ceil((this.box.scrollTop + this.box.clientHeight) / this.height) + 8);
    if (!again && first === this.first && last === this.last) return;
    Object.assign(this, { first, last });
    const rows = [];
    for (let i = first; i < last; i++) {
      const row = this.draw(this.items[i], i);
      row.style.top = `${i * this.height}px`;
      row.classList.add("line");
      rows.push(row);
    }
    this.inner.replaceChildren(...rows);
  }
}
