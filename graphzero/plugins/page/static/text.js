// Numbers and lines of programs as text: units, colours by SBP, names as links.
"use strict";

function bytesText(bytes) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (Math.abs(bytes) >= size) return `${(bytes / size).toFixed(2)} ${unit}`;
  }
  return `${Math.round(bytes)} B`;
}

// The same for an axis: no digits that say nothing.
const tickText = (bytes) => bytesText(bytes).replace(/(\.\d*?)0+(?= )/, (all, kept) => (kept === "." ? "" : kept));

function secondsText(seconds) {
  for (const [unit, size] of [["s", 1], ["ms", 1e-3]]) {
    if (Math.abs(seconds) >= size) return `${(seconds / size).toFixed(2)} ${unit}`;
  }
  return `${(seconds / 1e-6).toFixed(1)} µs`;
}

const countText = (number) => number.toLocaleString("en-US");
const plain = (category) => (category === "arena" ? "arena, free" : category.replaceAll("_", " "));

// The class that colours an SBP: by the first axis on which a value is not whole.
function sbpClass(sbp) {
  if (!sbp) return "none";
  if (/\bP\b/.test(sbp)) return "p";
  const split = /S\((\d+)/.exec(sbp);
  return split ? (split[1] === "0" ? "s" : "s1") : "b";
}

// A colour of the style sheet, for a canvas.
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const categoryColour = (category) => colour(`c-${category}`);

// ---- lines of a program

const WORD = /'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[A-Za-z_][\w.]*|[^\w'"]+|\S/g;
const SBP = /\b(?:S\(\d+(?:, \d+)?\)|P\(\w+\)|P|B)!?/g;

// Where ` : type` begins, outside quotes and brackets.
function typeAt(line) {
  let depth = 0, quote = "";
  for (let i = 0; i < line.length; i++) {
    const char = line[i];
    if (quote) {
      if (char === "\\") i++;
      else if (char === quote) quote = "";
    } else if (char === "'" || char === '"') quote = char;
    else if ("([".includes(char)) depth++;
    else if (")]".includes(char)) depth--;
    else if (depth === 0 && line.startsWith(" : ", i)) return i;
  }
  return -1;
}

// A line as pieces: names of values of `plan` are links, types and SBPs have their colours.
function lineParts(line, plan) {
  const name = defined(line), at = name ? typeAt(line) : -1;
  if (at < 0) return [el("span", { class: /:$/.test(line) ? "phase" : "dim" }, line)];
  const role = line.indexOf("  ; ", at), end = role < 0 ? line.length : role;
  return [
    ...words(line.slice(0, at), plan),
    ...sbps(line.slice(at, end)),
    role < 0 ? "" : el("span", { class: "role" }, line.slice(role)),
  ];
}

function words(text, plan) {
  return (text.match(WORD) || []).map((word, i, all) => {
    const value = plan.byName.get(word);
    if (value && !(all[i + 1] || "").startsWith("(")) return valueLink(value, word, true);
    if (word.startsWith("'") || word.startsWith('"')) return el("span", { class: "quoted" }, word);
    return word;
  });
}

function sbps(text) {
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(SBP)) {
    parts.push(el("span", { class: "type" }, text.slice(at, found.index)), el("span", { class: `sbp ${sbpClass(found[0])}` }, found[0]));
    at = found.index + found[0].length;
  }
  parts.push(el("span", { class: "type" }, text.slice(at)));
  return parts;
}

// inLine: of a list, in which one moves by arrows, not by tabs.
function valueLink(value, text = value.name, inLine = false) {
  return el("a", { class: "name", href: `#value=${value.name}`, "data-value": value.name, tabindex: inLine ? "-1" : undefined }, text);
}
