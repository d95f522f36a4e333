"use strict";
// Polls /admin/models and shows what it says. Rates and quantiles come from the difference of two polls.

const POLL_MS = 1500;
const HISTORY_MS = 300_000;  // polls that are remembered
const MINUTE_MS = 60_000;
const SHOWN_POLLS = 200;  // in a history tile
const TIERS = ["overlay", "device", "host", "disk", "remote", "absent"];

// --- elements and texts

const byId = id => document.getElementById(id);

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const name in attributes) {
    if (name === "style") made.style.cssText = attributes[name];  // the page's policy allows no style attribute in text
    else made.setAttribute(name, attributes[name]);
  }
  made.append(...children);
  return made;
}

const sum = numbers => numbers.reduce((total, n) => total + n, 0);
const number = n => n == null ? "–" : Math.round(n).toLocaleString("en");
const percent = (part, whole) => whole ? (100 * part / whole).toFixed(1) + " %" : "–";
const milliseconds = s => s == null ? "–" : (1000 * s).toFixed(s < .01 ? 2 : 0) + " ms";

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

// A span of time in its largest unit that is not below 1.
function span(seconds) {
  if (seconds == null) return "–";
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= 2 * length) return `${Math.floor(seconds / length)} ${unit}`;
  }
  return `${Math.round(seconds)} s`;
}

function tile(label, value) {
  return element("div", {class: "tile"}, element("b", {}, value), element("span", {}, label));
}

const budgetTile = (label, {used, total}) => tile(`of ${bytes(total)} ${label}`, bytes(used));

// Shares of a whole: [name, count] each, coloured by name.
function shares(parts) {
  const whole = sum(parts.map(([, n]) => n));
  const segments = parts.filter(([, n]) => n > 0).map(([name, n]) =>
    element("i", {style: `width:${100 * n / whole}%;background:var(--${name})`, title: `${name}: ${number(n)}`}));
  return element("div", {class: "bar"}, ...segments);
}

function fill(used, total, color) {
  const width = total ? Math.min(100, 100 * used / total) : 0;
  return element("div", {class: "bar", title: `${bytes(used)} of ${bytes(total)}`},
    element("i", {style: `width:${width}%;background:var(--${color})`}));
}

function table(heads, rows) {
  const made = element("table", {}, element("tr", {}, ...heads.map(head => element("th", {}, head))));
  for (const cells of rows) {
    made.append(element("tr", {}, ...cells.map((cell, i) => element("td", {"data-head": heads[i]}, ...[cell].flat()))));
  }
  return made;
}

// --- differences of polls

let last = null;  // the poll before: {at, status}
const polls = [];  // {at, counts, failed, rate, failing, p99} of the last minutes

// Requests a second, and by table the keys a second and which tier answered them, since the last poll.
function ratesSince(last, now) {
  const rates = {requests: null, tables: {}};
  if (!last) return rates;
  const seconds = (now.at - last.at) / 1000;
  rates.requests = (now.status.service.requests - last.status.service.requests) / seconds;
  const before = Object.fromEntries(last.status.models.map(model => [model.model, model]));
  for (const model of now.status.models) {
    for (const name in model.tables) {
      const old = before[model.model]?.tables[name];
      if (!old) continue;
      const byTier = {};
      for (const [tier, keys] of Object.entries(model.tables[name].lookup_keys)) {
        byTier[tier] = Math.max(0, keys - (old.lookup_keys[tier] || 0));
      }
      const keys = sum(Object.values(byTier));
      rates.tables[model.model + "/" + name] = {perSecond: keys / seconds, byTier, keys};
    }
  }
  return rates;
}

function difference(before, now) {
  return {
    seconds: (now.at - before.at) / 1000,
    counts: now.counts.map((n, i) => n - before.counts[i]),
    failed: now.failed - before.failed,
  };
}

// A quantile of a histogram, interpolated within its bucket; null without requests.
function quantile(q, counts, bounds) {
  let remaining = q * sum(counts);
  if (!remaining) return null;
  for (let i = 0; i < bounds.length; i++) {
    if (remaining <= counts[i]) {
      const low = i ? bounds[i - 1] : 0;
      return low + (bounds[i] - low) * remaining / counts[i];
    }
    remaining -= counts[i];
  }
  return bounds[bounds.length - 1];
}

// Remembers a poll's histogram of requests. Returns the difference to a minute ago.
function remember(at, {counts, failed, bounds}) {
  const now = {at, counts, failed};
  const before = polls[polls.length - 1];
  if (before && counts.some((n, i) => n < before.counts[i])) {
    polls.length = 0;  // the service has restarted
  } else if (before) {
    const since = difference(before, now);
    now.rate = sum(since.counts) / since.seconds;
    now.failing = since.failed / since.seconds;
    now.p99 = quantile(.99, since.counts, bounds);
  }
  polls.push(now);
  while (polls[0].at < at - HISTORY_MS) polls.shift();
  return difference(polls.find(poll => poll.at >= at - MINUTE_MS), now);
}

function history(label, key, text) {
  const shown = polls.slice(-SHOWN_POLLS);
  const most = Math.max(...shown.map(poll => poll[key] || 0));
  const seconds = Math.round((shown[shown.length - 1].at - shown[0].at) / 1000);
  const columns = shown.map(poll =>
    element("i", {style: `height:${most ? 100 * (poll[key] || 0) / most : 0}%`, title: text(poll[key])}));
  return element("div", {class: "tile"},
    element("span", {}, `${label}, last ${seconds} s, at most ${text(most)}`),
    element("div", {class: "spark"}, ...columns));
}

// --- a model's card

function versionsTable(model) {
  const rows = [...model.versions].reverse().map(version => [
    String(version.version),
    [element("span", {class: "pill " + version.state}, version.state),
      version.state === "loading" ? ` ${version.phase} ${percent(version.done, version.total)}` : ""],
    (version.labels || []).join(", ") || "–",
    number(version.watermark),
    version.created_at || "–",
    version.dense || "–",
  ]);
  return table(["version", "state", "labels", "watermark", "made", "dense part"], rows);
}

// What memory would answer with less and more of it than there is, as bars, and the points that half and twice of it make.
function memoryCell({curve = []}) {
  const now = curve.find(point => point.scale === 1)?.hit_rate;
  if (now == null) return "–";
  const known = curve.filter(point => point.hit_rate != null);
  const columns = known.map(({scale, hit_rate: rate}) =>
    element("i", {style: `height:${100 * rate}%`, title: `${scale} times the memory: ${percent(rate, 1)}`}));
  const changes = known.filter(({scale}) => scale === .5 || scale === 2).map(({scale, hit_rate: rate}) =>
    `${scale === 2 ? "twice" : "half"} ${rate < now ? "−" : "+"}${Math.abs(100 * (rate - now)).toFixed(1)}`);
  return [element("div", {class: "spark"}, ...columns), element("div", {class: "dim"}, changes.join(" · "))];
}

function tablesTable(model, rates) {
  const rows = Object.entries(model.tables).map(([name, entry]) => {
    const rate = rates.tables[model.model + "/" + name];
    const byTier = rate?.keys ? rate.byTier : entry.lookup_keys;
    const whole = sum(Object.values(byTier)), read = (byTier.disk || 0) + (byTier.remote || 0);
    const held = entry.tier_bytes.host, budget = entry.tier_budget_bytes.host;
    return [
      [name, element("div", {class: "dim"}, `${entry.dim} × ${entry.dtype}`)],
      (entry.rows_exact ? "" : "≈ ") + number(entry.rows),
      rate ? number(rate.perSecond) : "–",
      shares(TIERS.map(tier => [tier, byTier[tier] || 0])),
      percent(whole - read, whole),
      memoryCell(entry.cache || {}),
      [fill(held, budget, "host"), element("div", {class: "dim"}, `${bytes(held)} of ${bytes(budget)}`)],
      bytes(entry.tier_bytes.disk),
    ];
  });
  return table(["table", "rows", "keys/s", "answered by", "from memory", "with other memory", "host memory", "disk"], rows);
}

// What a person should know of a model, worst first: [text, class] each.
function modelLines(model) {
  const lines = [];
  const say = (text, kind = "dim") => lines.push([text, kind]);
  if (model.problem) say(model.problem, "problem");
  for (const [version, why] of Object.entries(model.damaged || {})) {
    say(`version ${version} is damaged; drop it or load it again: ${why}`, "problem");
  }
  for (const version of model.versions) {
    if (version.problem) say(`version ${version.version} cannot be opened: ${version.problem}`, "problem");
  }
  if (model.remote) {
    const {reachable, problem, seq, ingester} = model.remote;
    const writes = ingester ? "this node brings deltas into them" : "another node brings deltas into them";
    say(`rows are in a cluster, at delta ${number(seq)}; ${writes}`);
    if (!reachable || problem) say(`the cluster: ${problem || "not reachable"}`, "problem");
  }
  if (model.canary) {
    const share = +(100 * model.canary.share).toFixed(2);
    say(`canary ${model.canary.version} gets ${share} % of the requests · watermark ${number(model.canary.watermark)}`);
  }
  if (model.last_event_time) {
    const late = model.fresh === false;
    say(`newest event ${span(model.delta_age_s)} ago${late ? ", later than freshness_max_s allows" : ""}`, late ? "problem" : "dim");
  }
  if (model.dense?.runs) {
    say(`dense part: ${number(model.dense.runs)} runs, ${number(model.dense.failed)} of them failed`);
  }
  return lines;
}

function legend() {
  return element("div", {class: "legend"}, ...TIERS.map(tier =>
    element("span", {}, element("i", {style: `background:var(--${tier})`}), tier)));
}

function modelCard(model, rates) {
  const card = element("div", {class: "card"}, element("h2", {}, model.model));
  let summary = "no active version";
  if (model.active_version != null) {
    summary = `version ${model.active_version} · watermark ${number(model.watermark)}`;
    if (model.overlays) summary += ` · ${model.overlays} deltas not folded yet (${bytes(model.overlay_bytes)})`;
  }
  card.append(element("span", {class: "dim"}, summary));
  for (const [text, kind] of modelLines(model)) card.append(element("div", {class: kind}, text));
  if (model.versions.length) card.append(element("h3", {}, "Versions"), versionsTable(model));
  if (Object.keys(model.tables).length) {
    card.append(element("h3", {}, "Tables"), tablesTable(model, rates), legend());
  }
  return card;
}

// --- where changes come from

const pill = (state, good) => element("span", {class: "pill " + (good ? "ready" : "stale")}, state);
const heldUp = models => Object.entries(models || {}).map(([model, why]) => `${model}: ${why}`).join("; ");

function topicRow(name, brought, {state, lag_messages, lag_seconds, parked, problem}) {
  const lag = lag_messages == null ? "–" : `${number(lag_messages)} messages, ${span(lag_seconds)}`;
  const waiting = parked ? `${number(parked)} messages parked: “tierstore parked list”. ` : "";
  return [name, pill(state, ["caught up", "reading"].includes(state)), brought, lag, waiting + (problem || "") || "–"];
}

// Of each source: [what it is, its state, what it has brought, how far behind it is, what is wrong].
function sourceRows({watch, kafka, kafka_rows: byRow, watch_snapshots: places}) {
  const rows = [];
  if (kafka) rows.push(topicRow(`Kafka topic ${kafka.topic}`, `${number(kafka.applied)} deltas`, kafka));
  for (const one of Object.values(byRow?.topics || {})) rows.push(topicRow(`rows of Kafka topic ${one.topic}`, `${number(one.rows)} rows`, one));
  if (watch) {
    const why = [watch.problem, heldUp(watch.held_up)].filter(Boolean).join("; ");
    rows.push([`deltas in ${watch.directory}`, pill(why ? "held up" : "followed", !why), `${number(watch.applied)} deltas`, "–", why || "–"]);
  }
  for (const place of places?.locations || []) {
    const why = place.problems.join("; ");
    rows.push([`snapshots in ${place.location}`, pill(place.state, !why), `${number(place.snapshots)} found`, "–", why || "–"]);
  }
  for (const [model, {last, pending, problem}] of Object.entries(places?.models || {})) {
    const now = pending ? `version ${pending} waits` : last || "–";
    rows.push([`watched snapshots of ${model}`, problem ? pill("problem", false) : "–", now, "–", problem || "–"]);
  }
  return rows;
}

function sourcesCard(service) {
  const rows = sourceRows(service);
  if (!rows.length) return [];
  return [element("div", {class: "card"}, element("h2", {}, "Sources of changes"),
    table(["source", "state", "brought", "behind", "problem"], rows))];
}

// --- the page

function showState(status, service) {
  const warming = status.warming && `warming ${percent(status.warming.done, status.warming.total)}`;
  const state = service.ready ? "ready" : "stopping";
  byId("state").textContent = !warming ? state : service.ready ? `ready, ${warming}` : warming;
  byId("state").className = "pill " + (service.ready ? "ready" : "stale");
  byId("version").textContent = `${service.version} · up ${span(service.uptime_s)}`;
}

function summaryTiles(status, service, rates, minute) {
  const requests = sum(minute.counts);
  const latency = q => milliseconds(quantile(q, minute.counts, service.request_seconds.bounds));
  const keys = sum(Object.values(rates.tables).map(table => table.perSecond));
  const tiles = [
    tile("requests/s", number(rates.requests)),
    tile("keys/s", last ? number(keys) : "–"),
    tile("p50, last minute", latency(.5)),
    tile("p99, last minute", latency(.99)),
    tile("errors, last minute", minute.failed ? `${number(minute.failed)} (${percent(minute.failed, requests)})` : "0"),
    tile("look-ups waiting", `${service.lookup_queue.used} / ${service.lookup_queue.total}`),
    tile("look-ups in flight", bytes(service.inflight_bytes.used)),
  ];
  if (status.host_budget) tiles.push(budgetTile("host budget", status.host_budget));
  if (status.device?.present) tiles.push(budgetTile("device budget", status.device_budget));
  if (status.overlay_budget) tiles.push(budgetTile("for overlays", status.overlay_budget));
  if (status.throttle) {
    const {work, share} = status.throttle;
    tiles.push(tile(work.length ? `of the time for ${work.join(", ")}` : "background work", work.length ? percent(share, 1) : "none"));
  }
  if (status.remote) {
    const {reachable, problem, cluster} = status.remote;
    tiles.push(tile(`cluster ${cluster}`, reachable && !problem ? "reachable" : "unreachable"));
  }
  if (service.kafka) {
    const lag = service.kafka.lag_messages;
    tiles.push(tile(`Kafka${lag == null ? "" : `, ${number(lag)} messages behind`}`, service.kafka.state));
  }
  if (service.watch) tiles.push(tile("deltas from a directory", number(service.watch.applied)));
  if (service.access) tiles.push(tile(`access${service.access.tls ? ", TLS" : ""}`, service.access.tokens ? "by token" : "open"));
  return tiles;
}

function modelCards(status, service, rates) {
  const cards = [...status.models.map(model => modelCard(model, rates)), ...sourcesCard(service)];
  for (const problem of service.problems || []) {
    cards.unshift(element("div", {class: "card problem"}, problem));
  }
  if (!status.models.length) {
    cards.push(element("div", {class: "card dim"},
      `No models yet: load a snapshot with “tierstore load SNAPSHOT --url ${location.origin}”.`));
  }
  return cards;
}

function show(now) {
  const {status} = now, {service} = status;
  const rates = ratesSince(last, now);
  const minute = remember(now.at, service.request_seconds);
  showState(status, service);
  byId("tiles").replaceChildren(...summaryTiles(status, service, rates, minute));
  byId("history").replaceChildren(
    history("requests/s", "rate", number),
    history("p99", "p99", milliseconds),
    history("errors/s", "failing", n => (n || 0).toFixed(1)));
  byId("models").replaceChildren(...modelCards(status, service, rates));
  last = now;
}

// A token is kept for this tab, until it is closed.
byId("access").addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem("token", byId("token").value.trim());
  byId("token").value = "";
});

async function poll() {
  try {
    if (!document.hidden) {
      const token = sessionStorage.getItem("token");
      const headers = token ? {authorization: `Bearer ${token}`} : {};
      const answer = await fetch("/admin/models", {cache: "no-store", headers});
      byId("access").hidden = answer.status !== 401 && answer.status !== 403;
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      show({at: performance.now(), status: await answer.json()});
    }
  } catch {
    byId("state").textContent = byId("access").hidden ? "unreachable" : "no access";
    byId("state").className = "pill bad";
  }
  setTimeout(poll, POLL_MS);
}

poll();
