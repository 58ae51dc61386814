// What the page was given, read once: the pool of texts, and the plans with what the views ask of them.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const PHASES = ["input", "forward", "backward", "update", "end"];

class Plan {
  constructor(raw, letter) {
    Object.assign(this, raw);
    this.letter = letter;
    this.texts = [raw.text.captured];
    this.events = Object.fromEntries(Object.entries(raw.timeline).map(([source, { rows }]) => [source, rows.map(eventOf)]));
    this.byName = new Map();
    this.values = raw.values.map((row, number) => this.value(row, number));
    this.values.forEach((value) => this.byName.set(value.name, value));
    for (const value of this.values) for (const operand of value.operands) operand.readers.push(value);
    this.lines(this.passes.length).forEach((line) => {
      const value = this.byName.get(defined(data.pool[line]));
      if (value) value.line = data.pool[line];
    });
  }

  value([name, phase, sbp, type, source, module, made, changed, operands], number) {
    const [phase_, sbp_, type_, source_, module_] = [phase, sbp, type, source, module].map((i) => data.pool[i]);
    return {
      number, name, phase: phase_, sbp: sbp_, type: type_, source: source_, module: module_, made, changed,
      line: name, readers: [], get operands() { return operands.map((i) => this.plan.values[i]); }, plan: this,
    };
  }

  get passes() { return this.text.passes; }

  // The text after a number of passes, as numbers of lines.
  lines(passes) {
    for (let i = this.texts.length; i <= passes; i++) this.texts.push(edited(this.texts[i - 1], this.passes[i - 1].edits));
    return this.texts[passes];
  }

  snapshot(number) { return number === 0 ? "captured" : this.passes[number - 1].name; }

  // ---- memory

  get positions() { return this.values.length; }

  // The positions at which something runs: what a step is given is there before.
  get running() {
    this._running ??= this.values.filter((value) => value.phase !== "input").map((value) => value.number);
    return this._running;
  }

  // Category -> bytes at each position, for those that hold any; in the order of the plot, from below.  What of the arena
  // is free lies on top: what is below it is what the step needs.
  get series() {
    this._series ??= new Map(
      this.memory.categories
        .filter((category) => this.memory.series[category])
        .sort((a, b) => (a === "arena") - (b === "arena"))
        .map((category) => [category, filled(this.memory.series[category], this.positions)]),
    );
    return this._series;
  }

  // What is stacked in the plot of memory: the series, that of activations with a band for each layer of the model.
  get bands() {
    this._bands ??= [...this.series].flatMap(([category, bytes]) =>
      category === "activations" ? this.layers(bytes) : [{ category, bytes }]);
    return this._bands;
  }

  layers(whole) {
    const layers = new Map(), rest = Float64Array.from(whole);
    for (const [value, first, last, bytes, category] of this.memory.lives) {
      if (this.memory.categories[category] !== "activations") continue;
      const layer = (/^.*?\.\d+(?=\.|$)/.exec(this.values[value].module) || [""])[0];
      if (!layers.has(layer)) layers.set(layer, new Float64Array(this.positions));
      const band = layers.get(layer);
      for (let at = Math.max(first, 0); at <= last; at++) { band[at] += bytes; rest[at] -= bytes; }
    }
    if (rest.some((bytes) => bytes > 0.5)) layers.set("others", rest);
    return [...layers.values()].map((bytes, i) => ({ category: i % 2 ? "activations_2" : "activations", bytes }));
  }

  get total() {
    if (!this._total) {
      this._total = new Float64Array(this.positions);
      for (const bytes of this.series.values()) bytes.forEach((x, i) => (this._total[i] += x));
    }
    return this._total;
  }

  // Everything that is held while a value is computed, largest first.
  alive(position) {
    const { lives, slots, buffers, arena, categories } = this.memory;
    const found = [];
    let inside = 0;
    for (const [value, first, last, bytes, category, inArena] of lives) {
      if (first > position || last < position) continue;
      found.push({ name: this.values[value].name, value: this.values[value], bytes, category: categories[category], first, last });
      if (inArena) inside += bytes;
    }
    slots.forEach((bytes, i) => found.push({ name: `slot ${i} of collectives`, bytes, category: "communication" }));
    for (const [value, bytes] of buffers) {
      if (value === position) found.push({ name: `buffer of ${this.values[value].name}`, value: this.values[value], bytes, category: "communication" });
    }
    if (arena > inside) found.push({ name: "arena, where nothing lies", bytes: arena - inside, category: "arena" });
    return found.sort((a, b) => b.bytes - a.bytes);
  }

  lifeOf(value) {
    const rows = this.memory.lives.filter(([number]) => number === value.number); // one for each result
    if (!rows.length) return null;
    return {
      first: rows[0][1], last: Math.max(...rows.map((row) => row[2])), bytes: rows.reduce((sum, row) => sum + row[3], 0),
      category: this.memory.categories[rows[0][4]],
    };
  }

  // ---- time

  // Positions in the order in which their ops run, each with when it begins: once for each time that it does.
  get moments() {
    if (this._moments === undefined) {
      const events = (this.events.planned || []).filter((event) => event.stream === "compute" && this.byName.has(event.name));
      this._moments = events
        .map((event) => ({ at: event.begin, position: this.byName.get(event.name).number }))
        .sort((a, b) => a.at - b.at || a.position - b.position);
    }
    return this._moments;
  }
}

function eventOf([name, stream, kind, phase, begin, end, nbytes, flops, stage]) {
  const [name_, stream_, kind_, phase_] = [name, stream, kind, phase].map((i) => data.pool[i]);
  return { name: name_, stream: stream_, kind: kind_, phase: phase_, begin, end, nbytes, flops, stage };
}

// A text after edits [at, removed, lines] of it.
function edited(lines, edits) {
  const result = [];
  let at = 0;
  for (const [from, removed, added] of edits) {
    for (; at < from; at++) result.push(lines[at]);
    for (const line of added) result.push(line);
    at += removed;
  }
  for (; at < lines.length; at++) result.push(lines[at]);
  return result;
}

// [position, bytes, ...] of the changes as bytes at each position.
function filled(changes, count) {
  const result = new Float64Array(count);
  for (let i = 0; i < changes.length; i += 2) result.fill(changes[i + 1], changes[i], changes[i + 2] ?? count);
  return result;
}

// The value that a line defines, "" for none.
function defined(line) {
  const found = /^  (\w+) = /.exec(line);
  return found ? found[1] : "";
}

const plans = data.plans.map((raw, i) => new Plan(raw, "AB"[i]));
