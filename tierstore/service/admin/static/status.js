"use strict";
// Asks the service how it is, draws the page, and sends what its reader decides. A token is kept in this script's memory alone.

const POLL_MS = 2000, MINUTE_MS = 60_000;

let token = null;
let samples = [];  // polls of the last minute, oldest first: {at, tables}
let jobs = null;  // null where the reader may not know them
const histories = {}, inputs = {}, explained = {};  // by model
let historyAt;  // the end of the last step that histories were read for

class Refused extends Error {
  constructor(status, detail) {
    super(detail || `status ${status}`);
    this.status = status;
  }
}

// `body` is text of JSON. No cookie is sent, and none is set: only what this page adds says who asks.
async function call(method, path, body) {
  const headers = {accept: "application/json"};
  if (token) headers.authorization = `Bearer ${token}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const answer = await fetch(path, {method, headers, body, cache: "no-store", credentials: "omit"});
  const document = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(answer.status, document.detail || document.error);
  return document;
}

const of = name => `/admin/models/${encodeURIComponent(name)}`;

// --- keys of tables: what this poll and the first one of the last minute differ by

function keysOfTables(at, models) {
  const tables = Object.fromEntries(models.flatMap(model =>
    Object.entries(model.tables).map(([name, entry]) => [`${model.model}/${name}`, entry.lookup_keys])));
  samples = samples.filter(one => at - one.at <= MINUTE_MS);
  const before = samples[0], rates = {};
  samples.push({at, tables});
  if (!before) return rates;
  for (const [name, now] of Object.entries(tables)) {
    const was = before.tables[name];
    if (!was) continue;
    const byTier = Object.fromEntries(Object.entries(now).map(([tier, keys]) => [tier, Math.max(0, keys - (was[tier] || 0))]));
    const keys = sum(Object.values(byTier));
    rates[name] = {perSecond: 1000 * keys / (at - before.at), byTier, keys};
  }
  return rates;
}

// --- parts of the page that are of no model

// The newest event of the model whose one is oldest: how late what is served may be.
function freshnessTile(models) {
  const known = models.filter(model => model.delta_age_s != null && model.last_event_time).sort((a, b) => b.delta_age_s - a.delta_age_s);
  const late = known.find(model => model.fresh === false), shown = late || known[0];
  if (!shown) return tile("newest event", "–", "no delta has come");
  return tile("newest event", `${span(shown.delta_age_s)} ago`, late ? problem(`${shown.model}, later than freshness_max_s allows`) : shown.model);
}

function headlineTiles({models}, {last_minute: minute}) {
  const {seconds, requests, failed} = minute;
  const errors = failed ? problem(`${counted(failed, "error")} (${percent(failed, requests)})`) : seconds ? "no errors" : "measured in a moment";
  return [
    tile("requests a second", seconds ? rate(requests / seconds) : "–", errors),
    tile("p99", milliseconds(minute.p99_s), `p50 ${milliseconds(minute.p50_s)}`),
    freshnessTile(models),
  ];
}

function summaryTiles(status, service) {
  const {seconds, keys, cpu_s: cpu} = service.last_minute, {process} = service;
  const tiles = [
    tile("keys a second", seconds ? rate(keys / seconds) : "–"),
    tile("processor", seconds ? `${(cpu / seconds).toFixed(2)} cores` : "–", `of ${process.processors}`),
    tile("process memory", bytes(process.resident_bytes), `of ${bytes(process.memory_bytes)}`),
    tile("look-ups waiting", number(service.lookup_queue.used), `of ${number(service.lookup_queue.total)} that may`),
    tile("look-ups in progress", bytes(service.inflight_bytes.used), `of ${bytes(service.inflight_bytes.total)}`),
  ];
  if (status.host_budget) tiles.push(budgetTile("memory for rows", status.host_budget));
  if (status.device?.present) tiles.push(budgetTile("device memory for rows", status.device_budget));
  if (status.overlay_budget) tiles.push(budgetTile("memory for deltas", status.overlay_budget));
  if (status.disk?.free != null) tiles.push(tile("free on disk", bytes(status.disk.free), null, status.disk.problem && "problem"));
  if (status.throttle) {
    const {work, share} = status.throttle;
    tiles.push(tile("background work", work.join(", ") || "none", work.length > 0 && `${percent(share, 1)} of the time`));
  }
  if (status.remote) {
    const {reachable, problem: why, cluster, engines = [], warnings = []} = status.remote, well = reachable && !why;
    const details = [cluster, ...engines, warnings.length > 0 && counted(warnings.length, "warning")].filter(Boolean).join(", ");
    tiles.push(tile("cluster", well ? "reachable" : problem("unreachable"), details));
  }
  if (service.kafka) {
    const lag = service.kafka.lag_messages;
    tiles.push(tile("Kafka", service.kafka.state, lag != null && `${counted(lag, "message")} behind`));
  }
  if (service.watch) tiles.push(tile("from a directory", counted(service.watch.applied, "delta")));
  tiles.push(tile("access", service.access.tokens ? "by token" : "anybody", service.access.tls ? "over TLS" : "without TLS"));
  return tiles;
}

function problemsCard(problems) {
  const rows = problems.map(({model, kind, text}) => element("li", {"data-key": `${model} ${kind} ${text}`},
    element("b", {}, [model, kind.replaceAll("_", " ")].filter(Boolean).join(": ")), ` ${text}`));
  return rows.length > 0 && element("section", {class: "card problems", "data-key": "problems"}, element("h2", {}, "Problems"), element("ul", {}, rows));
}

const heldUp = models => Object.entries(models || {}).map(([model, why]) => `${model}: ${why}`).join("; ");

function topicRow(name, brought, {state, lag_messages, lag_seconds, parked, problem}) {
  const lag = lag_messages == null ? "–" : `${counted(lag_messages, "message")}, ${span(lag_seconds)}`;
  const waiting = parked ? `${counted(parked, "message")} parked: “tierstore parked list”. ` : "";
  const good = ["caught up", "reading"].includes(state);
  return [name, [name, pill(state, good ? "ready" : "stale"), brought, lag, waiting + (problem || "") || "–"]];
}

// Of each source: what it is, its state, what it has brought, how far behind it is, what is wrong.
function sourceRows({watch, kafka, kafka_rows: byRow, watch_snapshots: places}) {
  const rows = [];
  const add = (name, state, why, brought) => rows.push([name, [name, pill(state, why ? "stale" : "ready"), brought, "–", why || "–"]]);
  if (kafka) rows.push(topicRow(`Kafka topic ${kafka.topic}`, counted(kafka.applied, "delta"), kafka));
  for (const one of Object.values(byRow?.topics || {})) rows.push(topicRow(`rows of Kafka topic ${one.topic}`, counted(one.rows, "row"), one));
  if (watch) {
    const why = [watch.problem, heldUp(watch.held_up)].filter(Boolean).join("; ");
    add(`deltas in ${watch.directory}`, why ? "held up" : "followed", why, counted(watch.applied, "delta"));
  }
  for (const place of places?.locations || []) {
    add(`snapshots in ${place.location}`, place.state, place.problems.join("; "), `${number(place.snapshots)} found`);
  }
  for (const [model, {pending, canary, last: done, problem}] of Object.entries(places?.models || {})) {
    const state = pending ? `version ${pending} waits` : canary ? `canary ${canary}` : "followed";
    add(`snapshots of ${model}`, state, problem, done || "–");
  }
  return rows;
}

function sourcesCard(service) {
  const rows = sourceRows(service);
  return rows.length > 0 && element("section", {class: "card", "data-key": "sources"}, element("h2", {}, "Where changes come from"),
    table(["source", "state", "brought", "behind", "problem"], rows));
}

function jobRow(job) {
  const running = job.state === "running";
  const state = job.state === "done" ? "ready" : job.state === "failed" ? "bad" : "loading";
  const progress = running ? [`${job.phase} ${percent(job.done, job.total)}`, fill(job.done, job.total, "host")] : `ended ${span(Date.now() / 1000 - job.finished_at)} ago`;
  const speed = job.rate ? `${job.kind === "backup" ? bytes(job.rate) : number(job.rate)}/s${job.eta_s == null ? "" : `, ${span(job.eta_s)} left`}` : "–";
  return [job.job, [
    [`${job.kind} of ${job.model}`, element("div", {class: "dim"}, job.source || job.directory)],
    pill(job.state, state), progress, running ? speed : "–", job.error || job.waits_for || "–",
    running ? element("button", {type: "button", "data-action": "cancel", "data-job": job.job, "data-model": job.model}, "Cancel…") : "",
  ]];
}

const SHOWN_JOBS = 5;

function jobsCard() {
  if (!jobs?.length) return null;
  const running = jobs.filter(job => job.state === "running"), ended = jobs.filter(job => job.state !== "running");
  const heads = ["job", "state", "progress", "rate", "problem", ""];
  return element("section", {class: "card", "data-key": "jobs"}, element("h2", {}, "Jobs"),
    running.length ? table(heads, running.map(jobRow)) : element("p", {class: "dim"}, "none is running"),
    ended.length > 0 && folding("jobs", `${Math.min(SHOWN_JOBS, ended.length)} that ended last`, false, table(heads, ended.slice(0, SHOWN_JOBS).map(jobRow))));
}

// --- the page

function showState(status, service) {
  const warming = status.warming && `warming ${percent(status.warming.done, status.warming.total)}`;
  const state = service.ready ? "ready" : "not ready";
  byId("state").textContent = !warming ? state : service.ready ? `ready, ${warming}` : warming;
  byId("state").className = "pill " + (service.ready ? "ready" : "stale");
  byId("version").textContent = `${service.version} · up ${span(service.uptime_s)}`;
  byId("role").textContent = service.access.tokens ? `token: ${service.access.role}` : "";
  document.title = `${status.problems.length ? `(${status.problems.length}) ` : ""}tierstore`;
}

let shown = null;  // {status, tables}: what is drawn

function draw() {
  if (!shown) return;
  const {status, tables} = shown, {service} = status, {models} = status;
  const state = {isAdmin: service.access.role === "admin", rates: tables, histories, inputs, explained, open: models.length <= FEW_MODELS};
  morph(byId("headline"), element("div", {id: "headline", class: "tiles large"}, headlineTiles(status, service)));
  morph(byId("tiles"), element("div", {id: "tiles", class: "tiles"}, summaryTiles(status, service)));
  morph(byId("models"), element("div", {id: "models"},
    problemsCard(status.problems),
    models.map(model => modelCard(model, state)),
    !models.length && element("div", {class: "card dim"}, `No models yet: load a snapshot with “tierstore load SNAPSHOT --url ${location.origin}”.`),
    jobsCard(), sourcesCard(service)));
}

const isOpen = key => [...document.querySelectorAll("details[open]")].some(one => one.dataset.fold === key);

// Histories of the models that are folded out, and jobs: as each step of the last hour ends, so that all is of one time.
async function readMore(status) {
  const running = jobs?.some(job => job.state === "running"), {at_s: at} = status.service.last_minute;
  if (at === historyAt && !running) return;
  if (status.service.access.role === "admin") jobs = (await call("GET", "/admin/jobs")).jobs;
  if (at === historyAt) return;
  historyAt = at;
  for (const {model} of status.models) {
    if (isOpen(`model ${model}`)) histories[model] = await call("GET", `${of(model)}/history`);
  }
}

function failed(error) {
  const denied = error instanceof Refused && [401, 403].includes(error.status);
  byId("state").textContent = denied ? "no access" : "unreachable";
  byId("state").className = "pill bad";
  byId("access").hidden = !denied;
  const needed = "This service takes a token: one of the role reader to look, of the role admin to change something.";
  byId("denied").textContent = denied ? token || error.status === 403 ? error.message : needed : "";
  if (denied) [shown, jobs] = [null, null];
  if (denied) for (const part of ["headline", "tiles", "models"]) byId(part).replaceChildren();
}

let polling = 0;  // the poll that counts: a later one takes over

async function poll() {
  const mine = ++polling;
  try {
    if (!document.hidden) {
      const status = await call("GET", "/admin/models"), at = performance.now();
      if (mine !== polling) return;
      byId("access").hidden = true;
      shown = {status, tables: keysOfTables(at, status.models)};
      showState(status, status.service);
      draw();
      await readMore(status);
      draw();
    }
  } catch (error) {
    if (mine === polling) failed(error);
  }
  if (mine === polling) setTimeout(poll, POLL_MS);
}

function pollAnew() {
  historyAt = undefined;
  poll();
}

// --- what the reader decides

const ended = (canary, version) => canary == null || canary === version ? "" : ` The canary, version ${canary}, is withdrawn.`;

const VERBS = {
  activate: ({model, version, active, canary}) => ({
    title: `Activate version ${version} of ${model}?`, text: `It is opened, caught up and warmed, and then answers in place of version ${active ?? "none"}.${ended(canary, version)}`,
    path: `${of(model)}/activate`, body: {version, ...active != null && {expected_active: active}},
  }),
  rollback: ({model, version, active, canary}) => ({
    title: `Roll ${model} back?`, text: `From version ${active} to version ${version}, the newest kept one before it. No delta is lost.${ended(canary, version)}`,
    path: `${of(model)}/rollback`, body: {expected_active: active},
  }),
  canary: ({model, version}) => ({
    title: `Serve version ${version} of ${model} as a canary?`, text: "It gets a share of the requests that name no version.", share: true,
    path: `${of(model)}/canary`, body: {version},
  }),
  promote: ({model, canary, active}) => ({
    title: `Promote version ${canary} of ${model}?`, text: `It answers all requests then, in place of version ${active}.`, path: `${of(model)}/promote`,
  }),
  withdraw: ({model, canary}) => ({
    title: `Withdraw version ${canary} of ${model}?`, text: "It gets no requests any more, and is kept.", path: `${of(model)}/withdraw`,
  }),
  cancel: ({model, job}) => ({
    title: `Cancel this job of ${model}?`, text: "It ends as failed. What serves stays as it is.", method: "DELETE", path: `/admin/jobs/${job}`,
  }),
};

let asked = null;  // the change that the dialog is about

function ask(button) {
  const {action: verb, model, version, job} = button.dataset;
  const {active_version: active, canary} = shown.status.models.find(one => one.model === model) || {};
  asked = {verb, ...VERBS[verb]({model, version: Number(version), active, canary: canary?.version, job})};
  byId("ask-title").textContent = asked.title;
  byId("ask-text").textContent = asked.text;
  byId("share-part").hidden = !asked.share;
  byId("go").textContent = button.textContent.replace("…", "");
  byId("ask").showModal();
}

function say(text, kind) {
  byId("said").textContent = text;
  byId("said").className = kind;
}

async function change({verb, title, method = "POST", path, body, share}) {
  if (share) body = {...body, share: Number(byId("share").value) / 100};
  const what = title.replace("?", "");
  say(`${what}: under way…`, "dim");
  try {
    const answer = await call(method, path, body === undefined ? undefined : JSON.stringify(body));
    say(`${what}: done${answer.active_version == null ? "" : `, version ${answer.active_version} is active`}.`, "good");
  } catch (error) {
    say(`${what}: ${error.message}`, "problem");
  }
  pollAnew();
}

// Keys as JSON has them. Digits stay as they are: a number of this language has not all of an int64's.
function keysAsJson(text, key) {
  if (key === "string") return {keys: [text], json: JSON.stringify([text])};
  const keys = text.split(/[\s,]+/).filter(Boolean);
  const wrong = keys.find(one => !/^-?\d{1,20}$/.test(one));
  if (wrong !== undefined) throw new Error(`expected keys that are whole numbers, with spaces between them, got “${wrong}”`);
  return {keys, json: `[${keys.map(one => one.replace(/^(-?)0+(?=\d)/, "$1")).join(",")}]`};
}

async function explain(form) {
  const {model} = form.dataset, feature = form.elements.feature.value;
  const known = shown.status.models.find(one => one.model === model);
  try {
    const {keys, json} = keysAsJson(form.elements.keys.value, known.tables[known.features[feature].table].key);
    const answer = await call("POST", `${of(model)}/explain`, `{"feature":${JSON.stringify(feature)},"keys":${json}}`);
    explained[model] = {keys, answer};
  } catch (error) {
    explained[model] = {problem: error.message};
  }
  draw();
}

document.addEventListener("click", event => {
  const button = event.target.closest("button[data-action]");
  if (button) ask(button);
});

document.addEventListener("submit", event => {
  const form = event.target;
  if (form.method === "dialog") {
    if (event.submitter.value === "go") change(asked);
    return;
  }
  event.preventDefault();
  if (form.matches(".explain")) explain(form);
  if (form.id === "access") {
    token = byId("token").value.trim() || null;
    byId("token").value = "";
    samples = [];
    pollAnew();
  }
});

document.addEventListener("toggle", async event => {
  const [kind, model] = (event.target.dataset.fold || "").split(" ");
  if (!event.target.open || !shown) return;
  try {
    if (kind === "model") histories[model] = await call("GET", `${of(model)}/history`);
    if (kind === "inputs") inputs[model] = await call("GET", `/v2/models/${encodeURIComponent(model)}`);
    draw();
  } catch {
    return;  // the next poll says what is wrong
  }
}, true);  // it does not bubble

for (const type of ["pointermove", "pointerleave", "keydown"]) {
  byId("models").addEventListener(type, event => {
    if (pointed(event, model => histories[model])) draw();
  });
}

byId("role").addEventListener("click", () => {
  byId("access").hidden = !byId("access").hidden;
  byId("token").focus();
});

document.addEventListener("visibilitychange", () => document.hidden || pollAnew());
poll();
