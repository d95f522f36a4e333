"use strict";
// The card of a model: what it serves, its last hour, versions, tables, inputs, and why a key is answered as it is.

const TIERS = ["overlay", "device", "host", "disk", "remote", "absent"];
const FEW_TABLES = 6, FEW_MODELS = 3;  // more are folded away

const action = (verb, model, text, more = {}) =>
  element("button", {type: "button", "data-action": verb, "data-model": model.model, ...more}, text);

// --- versions

function versionActions(model, version) {
  if (!["kept", "stale", "outdated"].includes(version.state)) return null;
  const of = {"data-version": version.version, "data-key": version.version};
  return element("span", {class: "actions"},
    action("activate", model, "Activate…", {...of, "aria-label": `Activate version ${version.version} of ${model.model}`}),
    action("canary", model, "Canary…", {...of, "aria-label": `Serve version ${version.version} of ${model.model} as a canary`}));
}

function versionState(version) {
  const parts = [pill(version.state, version.state)];
  if (version.state === "loading") parts.push(` ${version.phase} ${percent(version.done, version.total)}`);
  if (version.state === "canary") parts.push(` ${+(100 * version.share).toFixed(2)} %`);
  if (version.warming) parts.push(` warming ${percent(version.warming.done, version.warming.total)}`);
  return parts;
}

// Those of a dense part without a name, and of the heads, of which there may be none: [name, value] each.
const headsOf = (own, named) => [...own ? [["", own]] : [], ...Object.entries(named || {})];

function versionsTable(model, isAdmin) {
  const heads = ["version", "state", "labels", "watermark", "made", "dense part"];
  const rows = [...model.versions].reverse().map(version => [version.version, [
    String(version.version),
    versionState(version),
    (version.labels || []).join(", ") || "–",
    number(version.watermark),
    version.created_at ? version.created_at.replace("T", " ").slice(0, 16) : "–",
    headsOf(version.dense, version.heads).map(([name, state]) => name ? `${name}: ${state}` : state).join(" · ") || "–",
    ...isAdmin ? [versionActions(model, version) ?? ""] : [],
  ]]);
  return table([...heads, ...isAdmin ? [""] : []], rows);
}

// --- which requests each version answered

const shareText = share => share == null ? "–" : `${+(100 * share).toFixed(2)} %`;

function trafficOf({versions, versions_since_s: since, hour}) {
  const canary = versions.find(one => one.state === "canary");
  const rows = versions.map(one => [one.version, [
    [String(one.version), " ", one.state && pill(one.state, one.state)],
    shareText(one.share),
    one.since_s ? `${span(Date.now() / 1000 - one.since_s)} ago` : "–",
    number(one.requests),
    one.failed ? element("span", {class: "problem"}, `${number(one.failed)} (${percent(one.failed, one.requests)})`) : "0",
    milliseconds(one.p50_s), milliseconds(one.p99_s),
  ]]);
  const when = canary && since === canary.since_s ? `since ${clock(since)}, when the canary began` : lastText(hour.seconds);
  return [
    element("h3", {}, "Traffic by version"), element("div", {class: "dim"}, `${when}; a version that was asked for by its number counts too`),
    table(["version", "share", "serves since", "requests", "errors", "p50", "p99"], rows),
  ];
}

// --- tables

// What memory would answer with less and more of it than there is, as bars, and the points that half and twice of it make.
function memoryCell({curve = []}) {
  const now = curve.find(point => point.scale === 1)?.hit_rate;
  if (now == null) return "–";
  const known = curve.filter(point => point.hit_rate != null);
  const columns = known.map(({scale, hit_rate: share}) => element("i",
    {class: scale === 1 ? "now" : "", style: `height:${100 * share}%`, title: `${scale} times the memory: ${percent(share, 1)}`}));
  const text = known.map(({scale, hit_rate: share}) => `${scale} times ${percent(share, 1)}`).join(", ");
  const changes = known.filter(({scale}) => scale === .5 || scale === 2).map(({scale, hit_rate: share}) =>
    `${scale === 2 ? "twice" : "half"} ${share < now ? "−" : "+"}${Math.abs(100 * (share - now)).toFixed(1)}`);
  return [element("div", {class: "spark", role: "img", "aria-label": text}, columns), element("div", {class: "dim"}, changes.join(" · "))];
}

const readOf = byTier => (byTier.disk || 0) + (byTier.remote || 0);

function tablesOf(model, rates) {
  const entries = Object.entries(model.tables).map(([name, entry]) => {
    const since = rates[`${model.model}/${name}`];
    return {name, entry, perSecond: since?.perSecond, byTier: since?.keys ? since.byTier : entry.lookup_keys};
  });
  const rows = entries.map(({name, entry, perSecond, byTier}) => {
    const whole = sum(Object.values(byTier)), {rows: held = 0, capacity_rows: room = 0} = entry.host;
    return [name, [
      [name, element("div", {class: "dim"}, `${entry.dim} × ${entry.dtype}`)],
      (entry.rows_exact ? "" : "≈ ") + number(entry.rows),
      rate(perSecond),
      shares(TIERS.map(tier => [tier, byTier[tier] || 0])),
      percent(whole - readOf(byTier), whole),
      memoryCell(entry.cache || {}),
      [fill(held, entry.rows, "host"), element("div", {class: "dim"}, `${bytes(entry.tier_bytes.host)}, room for ${room >= entry.rows ? "every row" : counted(room, "row")}`)],
      bytes(entry.tier_bytes.disk),
    ]];
  });
  const all = entries.flatMap(({byTier}) => Object.values(byTier)), read = sum(entries.map(({byTier}) => readOf(byTier)));
  const seconds = entries.flatMap(({perSecond}) => perSecond ?? []);
  const total = what => sum(entries.map(({entry}) => what(entry) || 0));
  const summary = [
    counted(entries.length, "table"), counted(total(entry => entry.rows), "row"),
    `${rate(seconds.length ? sum(seconds) : null)} keys/s`, `${percent(sum(all) - read, sum(all))} from memory`,
    `${bytes(total(entry => entry.tier_bytes.host))} in memory`, `${bytes(total(entry => entry.tier_bytes.disk))} on disk`,
  ].join(" · ");
  const heads = ["table", "rows", "keys/s", "answered by", "from memory", "with other memory", "in memory", "disk"];
  const legend = TIERS.map(tier => element("span", {}, element("i", {style: `background:var(--${tier})`}), tier));
  return folding(`tables ${model.model}`, summary, entries.length <= FEW_TABLES, table(heads, rows), element("div", {class: "legend"}, legend));
}

// --- features and inputs; `inputs` is what the protocol says of the model, once somebody has looked

function inputsOf(model, inputs) {
  const features = Object.entries(model.features || {});
  const shown = inputs?.inputs || features.map(([name]) => ({name}));
  const rows = shown.map(({name, datatype, shape}) => {
    const feature = model.features?.[name], of = feature && model.tables[feature.table];
    return [name, [
      name,
      feature ? `table ${feature.table}` : features.some(([other]) => name.startsWith(`${other}.`)) ? "of a bag" : "dense part",
      of ? `${of.key} keys` : "–",
      feature?.combiner || (feature ? "a row a key" : "–"),
      datatype ? `${datatype} [${shape.map(n => n < 0 ? "n" : n).join(", ")}]` : "…",
    ]];
  });
  const outputs = inputs && element("p", {class: "dim"}, `outputs: ${inputs.outputs.map(({name, datatype, shape}) =>
    `${name} ${datatype} [${shape.map(n => n < 0 ? "n" : n).join(", ")}]`).join(" · ")}`);
  return folding(`inputs ${model.model}`, `Features and inputs (${features.length})`, false,
    table(["input", "rows of", "keys", "pooling", "type"], rows), outputs);
}

// --- why a key is answered as it is

function explainPart(model, explained) {
  const options = Object.keys(model.features || {}).map(name => element("option", {value: name}, name));
  return folding(`explain ${model.model}`, "Explain a key", false,
    element("form", {class: "explain", "data-model": model.model},
      element("label", {}, "feature ", element("select", {name: "feature"}, options)),
      element("label", {}, "keys ", element("input", {name: "keys", required: true, autocomplete: "off", spellcheck: "false", placeholder: "17 4711"})),
      element("button", {}, "Explain")),
    explained?.problem && element("p", {class: "problem"}, explained.problem),
    explained?.answer?.keys.map((entry, i) => explainedKey(entry, explained.keys[i], explained.answer)));
}

function explainedKey(entry, key, answer) {
  const {written} = entry;
  const facts = [
    ["why", entry.why],
    ["answered by", entry.tier || "–"],
    ["row", entry.row ? `${entry.row.slice(0, 8).map(n => +n.toPrecision(5)).join(", ")}${entry.row.length > 8 ? ", …" : ""}${entry.default ? " (the default)" : ""}` : "–"],
    ["last written", written ? `delta ${number(written.seq)}${written.deleted ? ", which deleted it" : ""}${written.event_time ? `, events up to ${written.event_time}` : ""}` : answer.log.ended || "by the snapshot"],
    ["expires", entry.expires_at],
    ["partition", entry.partition && `${entry.partition.number} of ${entry.partition.count}${entry.partition.own ? "" : ", another node's"}`],
    ["owner", entry.owner],
  ].filter(([, text]) => text != null);
  const tiers = (entry.tiers || []).map(({tier, holds, hits, queue, error}) =>
    [tier, [tier, error ? element("span", {class: "problem"}, error) : holds, hits == null ? "–" : `${hits} hits${queue ? `, ${queue}` : ""}`]]);
  return element("div", {class: "explained", "data-key": key},
    element("h4", {}, key, " ", pill(entry.state.replaceAll("_", " "), entry.found ? "ready" : "loading"),
      entry.agree === false && [" ", pill("caches differ", "bad")]),
    element("dl", {}, facts.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, String(text))])),
    tiers.length > 0 && table(["tier", "holds", "of late"], tiers));
}

// --- the card

// What a person should know of a model, worst first: [text, class] each. Problems stand at the top of the page.
function modelLines(model) {
  const lines = [];
  const say = (text, kind = "dim") => lines.push([text, kind]);
  if (model.remote) {
    const {reachable, seq, ingester} = model.remote;
    const writes = ingester ? "this node brings deltas into them" : "another node brings deltas into them";
    say(`rows are in a cluster, at delta ${number(seq)}; ${writes}`);
    if (!reachable) say("the cluster is not reachable", "problem");
  }
  if (model.last_event_time) {
    const late = model.fresh === false;
    const sender = model.last_received_from ? `, from ${model.last_received_from}` : "";
    say(`newest event ${span(model.delta_age_s)} ago${sender}${late ? ", later than freshness_max_s allows" : ""}`, late ? "problem" : "dim");
  }
  if (model.overlays) say(`${counted(model.overlays, "delta")} not folded yet (${bytes(model.overlay_bytes)})`);
  for (const [name, {runs, failed}] of headsOf(model.dense, model.heads)) {
    if (runs) say(`dense part${name && ` ${name}`}: ${counted(runs, "run")}, ${number(failed)} of them failed`);
  }
  return lines;
}

function modelActions(model) {
  const to = model.rollback_to;
  return element("div", {class: "actions"},
    model.canary && action("promote", model, `Promote ${model.canary.version}…`),
    model.canary && action("withdraw", model, `Withdraw ${model.canary.version}…`),
    to != null && action("rollback", model, `Roll back to ${to}…`, {"data-version": to}));
}

function modelCard(model, state) {
  const {isAdmin, rates, histories, inputs, explained, open} = state;
  const name = model.model, serves = model.active_version != null;
  const canary = model.canary && pill(`canary ${model.canary.version} at ${+(100 * model.canary.share).toFixed(2)} %`, "canary");
  const summary = [
    element("h2", {}, name),
    pill(serves ? `version ${model.active_version}` : "no active version", serves ? "active" : "stale"), canary,
    serves && element("span", {class: "dim"}, `watermark ${number(model.watermark)}`),
  ];
  return element("section", {class: "card", "data-key": name},
    folding(`model ${name}`, summary, open,
      modelLines(model).map(([text, kind]) => element("div", {class: kind}, text)),
      isAdmin && modelActions(model),
      hourOf(name, histories[name], trafficOf),
      model.versions.length > 0 && [element("h3", {}, "Versions"), versionsTable(model, isAdmin)],
      Object.keys(model.tables).length > 0 && [
        element("h3", {}, "Tables"), tablesOf(model, rates), inputsOf(model, inputs[name]), explainPart(model, explained[name]),
      ]));
}
