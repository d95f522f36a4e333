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

// The top of a chart, and the highest value where that is cut: a few peaks above all else would flatten it.
function topOf(known) {
  const sorted = [...known].sort((a, b) => a - b), highest = sorted.at(-1) ?? 0;
  const usual = sorted[Math.floor(.95 * (sorted.length - 1))] ?? 0;
  return usual > 0 && highest > 4 * usual ? [2 * usual, highest] : [highest, null];
}

// A line for each run of numbers between gaps; `low` to `high` is the height.
function line(values, document, axis, low, high) {
  let path = "", pen = false;
  values.forEach((value, i) => {
    if (value == null) {
      pen = false;
      return;
    }
    const share = (Math.min(value, high) - low) / (high - low || 1);
    const x = axis.x(document.steps.at_s[i]).toFixed(1), y = (HEIGHT - 1 - (HEIGHT - 2) * share).toFixed(1);
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

// A plot between its axes: what the top and the bottom are, and when its left, its middle and its right were.
function plot(axis, top, bottom, ...content) {
  const times = [clock(axis.from), clock((axis.from + axis.end) / 2), clock(axis.end)];
  return element("div", {class: "plot"},
    element("div", {class: "scale"}, element("span", {}, top), element("span", {}, bottom)),
    element("div", {}, ...content, element("div", {class: "axis"}, times.map(time => element("span", {}, time)))));
}

// `series` are [class, name, a value of each step, that of the last minute]; `text` writes one; `least` and `most`: the bottom
// and the top of the chart, by default 0 and what the values need.
function chart(document, axis, cursor, title, series, text, least = 0, most = null) {
  const {at_s: atS} = document.steps, known = series.flatMap(([, , values]) => values.filter(value => value != null));
  const [high, cut] = most == null ? topOf(known) : [most, null];
  const now = series.map(([kind, name, values, minute]) => element("span", {class: kind}, `${name} ${text(cursor == null ? minute : values[cursor])}`));
  const peak = cut != null && series.map(([, , values]) => atS[values.indexOf(cut)]).find(at => at != null);
  const peaks = cut != null && atS.filter((_, i) => series.some(([, , values]) => values[i] > high));
  const note = cut != null && `cut at ${text(high)}: up to ${text(cut)} at ${clock(peak)}`;
  return element("div", {class: "chart", "data-key": title},
    element("div", {class: "legend"}, element("b", {}, title), ...now, note && element("span", {class: "cut"}, note)),
    plot(axis, high > least ? text(high) : "", least ? text(least) : "0",
      picture(document, axis, cursor, `${title}: ${series.map(([, name, , minute]) => `${name} ${text(minute)}`).join(", ")}, ${text(least)} to ${text(high)}`,
        ...series.map(([kind, , values]) => element("path", {class: kind, d: line(values, document, axis, least, high)})),
        peaks && element("path", {class: "cut", d: peaks.map(at => `M${axis.x(at).toFixed(1)} 0v7`).join("")}))));
}

const inMemory = ({keys, read}) => keys ? 1 - read / keys : null;

// Lines of the canary beside those of all requests: [class, name, a value of each step, that of the last minute].
function charts(document, axis, cursor) {
  const {steps, minute, versions} = document, canary = versions.find(one => one.state === "canary");
  const each = (name, of) => of[name].map((n, i) => n == null ? null : n / steps.seconds[i]);
  const perSecond = (name, of) => of.seconds ? of[name] / of.seconds : null;
  const memory = steps.keys.map((keys, i) => inMemory({keys, read: steps.read[i]}));
  const lowest = Math.floor(10 * Math.min(...memory.filter(value => value != null), 1) - 1e-9) / 10;
  const share = value => value == null ? "–" : percent(value, 1);
  const beside = name => canary ? [["canary", `canary ${canary.version}`, each(name, canary.steps), perSecond(name, canary.minute)]] : [];
  const slow = canary ? [["canary", `p99 of canary ${canary.version}`, canary.steps.p99_s, canary.minute.p99_s]] : [];
  const all = canary ? "all" : "";
  return element("div", {class: "charts"},
    chart(document, axis, cursor, "requests a second", [["line", all, each("requests", steps), perSecond("requests", minute)], ...beside("requests")], rate),
    chart(document, axis, cursor, "latency", [["line soft", "p50", steps.p50_s, minute.p50_s], ["line", "p99", steps.p99_s, minute.p99_s], ...slow], milliseconds),
    chart(document, axis, cursor, "errors a second", [["line bad", all, each("failed", steps), perSecond("failed", minute)], ...beside("failed")], rate),
    chart(document, axis, cursor, "keys from memory", [["line good", "", memory, inMemory(minute)]], share, Math.max(0, lowest), 1));
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
  const {steps} = document, most = Math.max(1, ...steps.deltas);
  const path = steps.deltas.map((n, i) => {
    const from = axis.x(steps.at_s[i] - steps.seconds[i]), to = axis.x(steps.at_s[i]), top = HEIGHT - HEIGHT * n / most;
    return n ? `M${from.toFixed(1)} ${HEIGHT}V${top.toFixed(1)}H${(to - .5).toFixed(1)}V${HEIGHT}Z` : "";
  }).join("");
  return picture(document, axis, cursor, counted(sum(steps.deltas), "delta"), element("path", {class: "bars", d: path}));
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
    more.length > 0 && folding(`changes ${model}`, counted(more.length, "earlier change"), false, element("ul", {class: "changes"}, more.map(changeRow))));
}

const lastText = seconds => seconds > 3500 ? "the last hour" : seconds === 60 ? "the last minute" : `the last ${span(seconds)}`;

function sumText(all) {
  const {requests, failed, deltas, seconds} = all, memory = inMemory(all);
  const parts = [
    counted(requests, "request"), `p50 ${milliseconds(all.p50_s)}`, `p99 ${milliseconds(all.p99_s)}`,
    `${counted(failed, "error")}${failed ? ` (${percent(failed, requests)})` : ""}`,
    `${memory == null ? "–" : percent(memory, 1)} from memory`, counted(deltas, "delta"),
  ];
  return `${lastText(seconds)}: ${parts.join(" · ")}`;
}

const LEGEND = [["bars", "deltas"], ["load", "load, activation"], ["rollback", "rollback"], ["canary", "canary begins or ends"]];

function timeline(document, axis, cursor) {
  const {steps, step_s: stepS} = document;
  const legend = LEGEND.map(([kind, text]) => element("span", {}, element("i", {class: kind}), text));
  return element("div", {class: "chart", "data-key": "timeline"},
    element("div", {class: "legend"}, element("b", {}, `version, and deltas in ${stepS} s`), ...legend,
      cursor != null && element("span", {class: "line"}, `${counted(steps.deltas[cursor], "delta")}, up to ${number(steps.seq[cursor])}`)),
    plot(axis, number(Math.max(1, ...steps.deltas)), "0", versionBand(document, axis), deltaBars(document, axis, cursor)));
}

// Of a model; nothing before the first step has ended. `traffic` is what stands above the charts.
function hourOf(model, document, traffic) {
  if (!document?.steps.at_s.length) {
    return element("p", {class: "dim"}, document ? "the history begins within a quarter of a minute" : "…");
  }
  const axis = axisOf(document), last = document.steps.at_s.length - 1;
  const cursor = cursors[model] == null ? null : Math.min(last, cursors[model]);
  const when = cursor == null ? lastText(document.minute.seconds) : `${document.step_s} s up to ${clock(document.steps.at_s[cursor], {second: "2-digit"})}`;
  return element("div", {},
    element("p", {class: "dim"}, sumText(document.minute)),
    document.hour.seconds > document.minute.seconds && element("p", {class: "dim"}, sumText(document.hour)),
    traffic(document),
    element("div", {class: "hour", "data-hour": model, tabindex: 0, role: "group", "aria-label": `the last hour of ${model}; arrow keys move through it`},
      element("h3", {}, "The last hour"), element("div", {class: "dim"}, "figures beside names: ", element("output", {}, when)),
      charts(document, axis, cursor), timeline(document, axis, cursor)),
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
