"use strict";
// The last hour of a model: charts over one axis of time, with what was changed marked in each, and a timeline.

const WIDTH = 600, HEIGHT = 60;
const LEAST_S = 600;  // of the axis
const MARKED = {load: "load", activate: "activate", rollback: "rollback", promote: "activate", canary: "canary", withdraw: "canary", deactivate: "rollback"};
const cursors = {};  // by model, the step that is pointed at

function axisOf({steps}) {
  const end = steps.at_s.at(-1);
  const from = Math.min(end - LEAST_S, steps.at_s[0] - steps.seconds[0]);
  return {from, end, x: atS => WIDTH * (atS - from) / (end - from)};
}

const marked = (document, axis) => document.changes.filter(one => MARKED[one.what] && one.outcome === "done" && one.at_s > axis.from);

// A line for each run of numbers between gaps; `low` to `high` is the height.
function line(values, document, axis, low, high) {
  let path = "", pen = false;
  values.forEach((value, i) => {
    if (value == null) {
      pen = false;
      return;
    }
    const x = axis.x(document.steps.at_s[i]).toFixed(1), y = (HEIGHT - 1 - (HEIGHT - 2) * (value - low) / (high - low || 1)).toFixed(1);
    path += pen ? `L${x} ${y}` : `M${axis.x(document.steps.at_s[i] - document.steps.seconds[i]).toFixed(1)} ${y}L${x} ${y}`;
    pen = true;
  });
  return path;
}

function picture(document, axis, cursor, label, ...marks) {
  const changes = marked(document, axis).map(one => {
    const x = Math.min(WIDTH, axis.x(one.at_s));
    return element("line", {class: `mark ${MARKED[one.what]}`, x1: x, x2: x, y1: 0, y2: HEIGHT});
  });
  const at = cursor == null ? null : axis.x(document.steps.at_s[cursor]);
  return element("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label},
    ...marks, changes, at != null && element("line", {class: "cursor", x1: at, x2: at, y1: 0, y2: HEIGHT}));
}

// `series` are [class, name, a value of each step]; `text` writes one; `least`: the bottom of the chart, by default 0.
function chart(document, axis, cursor, title, series, text, least = 0, most = null) {
  const known = series.flatMap(([, , values]) => values.filter(value => value != null));
  const high = most ?? Math.max(0, ...known);
  const at = cursor ?? document.steps.at_s.length - 1;
  const now = series.map(([kind, name, values]) => element("span", {class: kind}, `${name} ${text(values[at])}`));
  const scale = least ? `${text(least)} to ${text(high)}` : `up to ${text(high)}`;
  return element("div", {class: "chart", "data-key": title},
    element("div", {class: "legend"}, element("b", {}, title), ...now, element("span", {class: "scale"}, scale)),
    picture(document, axis, cursor, `${title}: ${series.map(([, name, values]) => `${name} ${text(values.at(-1))}`).join(", ")}, ${scale}`,
      ...series.map(([kind, , values]) => element("path", {class: kind, d: line(values, document, axis, least, high)}))));
}

const inMemory = (keys, read) => keys ? 1 - read / keys : null;

function charts(document, axis, cursor) {
  const {steps} = document;
  const each = name => steps[name].map((n, i) => n / steps.seconds[i]);
  const memory = steps.keys.map((n, i) => inMemory(n, steps.read[i]));
  const lowest = Math.floor(10 * Math.min(...memory.filter(value => value != null), 1) - 1e-9) / 10;
  const share = value => value == null ? "–" : percent(value, 1);
  return element("div", {class: "charts"},
    chart(document, axis, cursor, "requests/s", [["line", "", each("requests")]], rate),
    chart(document, axis, cursor, "latency", [["line soft", "p50", steps.p50_s], ["line", "p99", steps.p99_s]], milliseconds),
    chart(document, axis, cursor, "errors/s", [["line bad", "", each("failed")]], rate),
    chart(document, axis, cursor, "from memory", [["line good", "", memory]], share, Math.max(0, lowest), 1));
}

// --- the timeline: which version served when, how many deltas came, and what was changed

function versionBand({steps}, axis) {
  const runs = [];
  steps.version.forEach((version, i) => {
    const from = steps.at_s[i] - steps.seconds[i];
    if (runs.at(-1)?.version === version) runs.at(-1).end = steps.at_s[i];
    else runs.push({version, from, end: steps.at_s[i]});
  });
  const before = runs[0].from - axis.from;
  return element("div", {class: "versions", role: "img", "aria-label": runs.map(run => `from ${clock(run.from)} version ${run.version || "none"}`).join(", ")},
    before > 0 && element("i", {class: "before", style: `flex:${before}`}),
    runs.map((run, i) => element("i", {class: i % 2 ? "odd" : "even", style: `flex:${run.end - run.from}`, title: `version ${run.version || "none"}`}, run.version || "none")));
}

function deltaBars(document, axis, cursor) {
  const {steps} = document, most = Math.max(...steps.deltas);
  const path = steps.deltas.map((n, i) => {
    const from = axis.x(steps.at_s[i] - steps.seconds[i]), to = axis.x(steps.at_s[i]), top = HEIGHT - HEIGHT * n / most;
    return n ? `M${from.toFixed(1)} ${HEIGHT}V${top.toFixed(1)}H${(to - .5).toFixed(1)}V${HEIGHT}Z` : "";
  }).join("");
  return picture(document, axis, cursor, `${number(sum(steps.deltas))} deltas`, element("path", {class: "bars", d: path}));
}

function changeText(one) {
  const {active_before: before, active_after: after} = one;
  const parts = [one.what];
  if (one.version != null) parts.push(`version ${one.version}`);
  if (one.share != null) parts.push(`at ${+(100 * one.share).toFixed(2)} %`);
  if (one.label) parts.push(`“${one.label}”`);
  if (one.to_seq != null) parts.push(`to delta ${number(one.to_seq)}`);
  if (before !== after && after != null) parts.push(before == null ? `: version ${after} serves` : `: ${before} → ${after}`);
  return parts.join(" ").replace(" :", ":");
}

function changeRow(one) {
  return element("li", {"data-key": one.at_s},
    element("time", {title: new Date(1000 * one.at_s).toISOString()}, clock(one.at_s, {second: "2-digit"})),
    element("i", {class: `dot ${one.outcome === "done" ? MARKED[one.what] || "" : "bad"}`}),
    element("span", {},
      changeText(one),
      one.outcome !== "done" && element("span", {class: "problem"}, ` ${one.outcome}: ${one.error || ""}`),
      one.who && element("span", {class: "dim"}, ` · ${one.who}`)));
}

const SHOWN_CHANGES = 5;

function changeList(model, changes) {
  if (!changes.length) return element("p", {class: "dim"}, "nothing was changed in this hour");
  const more = changes.slice(SHOWN_CHANGES);
  return element("div", {},
    element("ul", {class: "changes"}, changes.slice(0, SHOWN_CHANGES).map(changeRow)),
    more.length > 0 && folding(`changes ${model}`, `${more.length} earlier changes`, false, element("ul", {class: "changes"}, more.map(changeRow))));
}

function hourText({hour}) {
  const parts = [
    `${number(hour.requests)} requests`, `p50 ${milliseconds(hour.p50_s)}`, `p99 ${milliseconds(hour.p99_s)}`,
    `${number(hour.failed)} errors${hour.failed ? ` (${percent(hour.failed, hour.requests)})` : ""}`,
    `${inMemory(hour.keys, hour.read) == null ? "–" : percent(hour.keys - hour.read, hour.keys)} from memory`,
    `${number(hour.deltas)} deltas`,
  ];
  return `${hour.seconds > 3500 ? "the last hour" : `the last ${span(hour.seconds)}`}: ${parts.join(" · ")}`;
}

// Of a model; nothing before the first step has ended.
function hourOf(model, document) {
  if (!document?.steps.at_s.length) {
    return element("p", {class: "dim"}, document ? "the history begins within a quarter of a minute" : "…");
  }
  const axis = axisOf(document), last = document.steps.at_s.length - 1;
  const cursor = cursors[model] == null ? null : Math.min(last, cursors[model]);
  const when = cursor == null ? "now" : clock(document.steps.at_s[cursor], {second: "2-digit"});
  return element("div", {},
    element("p", {class: "dim"}, hourText(document)),
    element("div", {class: "hour", "data-hour": model, tabindex: 0, role: "group", "aria-label": `the last hour of ${model}; arrow keys move through it`},
      charts(document, axis, cursor),
      element("div", {class: "chart", "data-key": "timeline"},
        element("div", {class: "legend"}, element("b", {}, "version, and deltas"),
          cursor != null && element("span", {class: "line"}, `${document.steps.deltas[cursor]} deltas, up to ${number(document.steps.seq[cursor])}`),
          element("span", {class: "scale"}, `up to ${number(Math.max(...document.steps.deltas))} in ${document.step_s} s`)),
        versionBand(document, axis),
        deltaBars(document, axis, cursor),
        element("div", {class: "axis"}, element("span", {}, clock(axis.from)), element("output", {}, cursor == null ? "" : when), element("span", {}, "now")))),
    changeList(model, document.changes));
}

// A pointer, or an arrow key, over the hour of a model. Returns whether something else is pointed at now.
function pointed(event, document) {
  const model = event.target.closest?.("[data-hour]")?.dataset.hour;
  const before = {...cursors};
  if (event.type === "keydown") {
    if (!model || !document(model)) return false;
    const last = document(model).steps.at_s.length - 1, at = cursors[model] ?? last;
    const to = {ArrowLeft: Math.max(0, at - 1), ArrowRight: Math.min(last, at + 1), Home: 0, End: last, Escape: null}[event.key];
    if (to === undefined) return false;
    event.preventDefault();
    cursors[model] = to;
  } else {
    for (const name in cursors) cursors[name] = null;
    const box = event.target.closest?.(".chart")?.querySelector("svg").getBoundingClientRect();
    const found = model && box && document(model);
    if (found) {
      const axis = axisOf(found), atS = axis.from + (axis.end - axis.from) * (event.clientX - box.left) / box.width;
      cursors[model] = found.steps.at_s.findIndex(end => end >= atS);
      if (cursors[model] < 0) cursors[model] = null;
    }
  }
  return Object.keys({...before, ...cursors}).some(name => (before[name] ?? null) !== (cursors[name] ?? null));
}
