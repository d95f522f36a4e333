"use strict";
// Elements, how numbers are written, and tables. Nothing here knows what is shown.

const SVG = new Set(["svg", "path", "line", "rect", "title"]);
const byId = id => document.getElementById(id);

// Children that are null, undefined or false are left out.
function element(tag, attributes = {}, ...children) {
  const made = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value == null || value === false) continue;
    if (name === "style") made.style.cssText = value;  // the page's policy allows no style attribute in text
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter(child => child != null && child !== false));
  return made;
}

const isSame = (a, b) => a.nodeName === b.nodeName && a.dataset?.key === b.dataset?.key;

// Makes `old` what `made` is. Elements that stay are kept: focus, what was typed and what is folded out live in them.
function morph(old, made) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== made.data) old.data = made.data;
    return;
  }
  for (const {name, value} of made.attributes) {
    if (name === "open" || old.getAttribute(name) === value) continue;
    if (name === "style") old.style.cssText = made.style.cssText;
    else old.setAttribute(name, value);
  }
  for (const {name} of [...old.attributes]) {
    if (name !== "open" && !made.hasAttribute(name)) old.removeAttribute(name);
  }
  let next = old.firstChild;
  for (const child of [...made.childNodes]) {
    let match = next;
    while (match && !isSame(match, child)) match = match.nextSibling;
    if (!match) {
      old.insertBefore(child, next);
      continue;
    }
    while (next !== match) next = removed(next);
    morph(match, child);
    next = match.nextSibling;
  }
  while (next) next = removed(next);
}

function removed(node) {
  const next = node.nextSibling;
  node.remove();
  return next;
}

// --- numbers

const sum = numbers => numbers.reduce((total, n) => total + n, 0);
const number = n => n == null ? "–" : Math.round(n).toLocaleString("en");
const counted = (n, one) => `${number(n)} ${one}${Math.round(n) === 1 ? "" : "s"}`;

function percent(part, whole) {
  const share = 100 * part / whole, fine = Math.min(share, 100 - share);  // 99.98 is not 100, and 0.02 not 0
  return whole ? share.toFixed(fine > 0 && fine < .1 ? 2 : 1) + " %" : "–";
}

const rate = n => n == null ? "–" : n > 0 && n < 10 ? n.toFixed(n < 1 ? 2 : 1) : number(n);

function milliseconds(s) {
  if (s == null) return "–";
  return s >= 1 ? s.toFixed(1) + " s" : (1000 * s).toFixed(s < .001 ? 2 : s < .01 ? 1 : 0) + " ms";
}

function bytes(n) {
  if (n == null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) {
    n /= 1024;
    unit++;
  }
  return (unit ? n.toFixed(1) : n) + " " + units[unit];
}

// A span of time in its largest unit that is not below 2.
function span(seconds) {
  if (seconds == null) return "–";
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= 2 * length) return `${Math.floor(seconds / length)} ${unit}`;
  }
  return `${Math.round(seconds)} s`;
}

const clock = (atS, options = {}) =>
  new Date(1000 * atS).toLocaleTimeString("en-GB", {hour: "2-digit", minute: "2-digit", ...options});

// --- parts of a page

const problem = text => element("b", {class: "problem"}, text);

const pill = (text, kind) => element("span", {class: `pill ${kind}`}, text);

// `more` is what stands below the value; `kind` is the class of what is wrong with one that has nothing below.
function tile(label, value, more, kind) {
  return element("div", {class: "tile", "data-key": label},
    element("span", {}, label), element("b", {class: kind}, value), more && element("span", {}, more));
}

const budgetTile = (label, {used, total}) => tile(label, bytes(used), `of ${bytes(total)}`);

// Shares of a whole: [name, count] each, coloured by name.
function shares(parts) {
  const whole = sum(parts.map(([, n]) => n));
  const there = parts.filter(([, n]) => n > 0);
  const text = there.map(([name, n]) => `${name} ${percent(n, whole)}`).join(", ");
  return element("div", {class: "bar", role: "img", "aria-label": text || "nothing", title: text}, there.map(([name, n]) =>
    element("i", {style: `width:${100 * n / whole}%;background:var(--${name})`})));
}

function fill(used, total, color) {
  const width = total ? Math.min(100, 100 * used / total) : 0;
  return element("div", {class: "bar", role: "img", "aria-label": percent(used, total)},
    element("i", {style: `width:${width}%;background:var(--${color})`}));
}

// Rows are [key, cells]; cells of a narrow screen say their head themselves.
function table(heads, rows) {
  return element("table", {},
    element("tr", {}, heads.map(head => element("th", {scope: "col"}, head))),
    rows.map(([key, cells]) => element("tr", {"data-key": key},
      cells.map((cell, i) => element("td", {"data-head": heads[i]}, ...[cell].flat())))));
}

// Something that folds away. Whether it is open is up to the reader once it is there.
function folding(key, summary, open, ...content) {
  return element("details", {"data-key": key, "data-fold": key, open}, element("summary", {}, summary), ...content);
}
