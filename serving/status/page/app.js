// The status half of the page: asks for /status.json and draws what it says. Keeps nothing: a service that restarts is
// drawn anew from its next answer.

import { become, chart, gib, h, percent, short, time } from "./draw.js";
import { withKey } from "./key.js";
import { offer } from "./chat.js";

const $ = (id) => document.getElementById(id);
const PERIOD_S = 1, HIDDEN_PERIOD_S = 15, LONGEST_PERIOD_S = 8, TIMEOUT_S = 5, POINTS = 150;
const before = new Map(); // replica -> state, to tell what is new

let failures = 0, timer = 0, asking = false;

async function look() {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  try {
    const answer = await withKey("status.json", { signal: AbortSignal.timeout(TIMEOUT_S * 1000) }, false);
    if (answer === null) {
      said("bad", "an API key is needed");
    } else {
      if (!answer.ok) throw new Error(`the service answers ${answer.status}`);
      draw(await answer.json());
      failures = 0;
      said("good", `live, ${new Date().toLocaleTimeString()}`);
    }
  } catch (error) {
    failures += 1;
    said("bad", `no connection (${why(error)}); trying again`);
  } finally {
    asking = false;
    timer = setTimeout(look, period_s() * 1000);
  }
}

const period_s = () =>
  document.hidden ? HIDDEN_PERIOD_S : Math.min(LONGEST_PERIOD_S, PERIOD_S * 2 ** Math.min(failures, 4));

function why(error) {
  if (error.name === "TimeoutError") return `no answer within ${TIMEOUT_S} s`;
  return error instanceof TypeError ? "nobody answers" : error.message;
}

function said(state, text) {
  document.body.dataset.link = state;
  // The time of day is for eyes: a screen reader hears a change of state only.
  const shown = $("link");
  shown.setAttribute("aria-live", shown.dataset.state === state ? "off" : "polite");
  shown.dataset.state = state;
  shown.textContent = text;
}

function draw(status) {
  become($("models"), status.models.map((model) => drawModel(model)));
  become($("troubles"), drawTroubles(status));
  $("troubles").hidden = !$("troubles").childNodes.length;
  become($("batches"), drawBatches(status));
  $("batches-section").hidden = !status.batches.length;
  become($("usage"), drawUsage(status));
  $("usage-section").hidden = !status.usage.length;
  become($("decisions"), drawDecisions(status));
  news(status);
  offer(status.models);
}

function drawModel(model) {
  const waiting = model.held + model.waiting;
  const history = model.history;
  return h("article.model", { "data-id": model.name },
    h("h3", {}, model.name, " ", model.simulated && h("span.badge.simulated", {}, "simulated")),
    h("p.quiet", {}, model.shape, model.max_model_len && `, up to ${model.max_model_len.toLocaleString("en")} tokens`),
    h("dl.tiles", {},
      tile("slices serving", `${model.slices_serving} of ${model.slices_wanted}`, model.slices_serving < model.slices_wanted && "bad"),
      tile("running", short(model.running), "", `in engines; ${model.in_flight} under way in routers`),
      tile("queue", short(waiting), waiting > 0 && "warn", `${model.held} in the router, ${model.waiting} in engines`),
      tile("output tokens/s", short(model.output_tokens_per_s)),
      tile("prompt tokens/s", short(model.prompt_tokens_per_s)),
      tile("TTFT p50", time(model.ttft_p50_s), "", `p90 ${time(model.ttft_p90_s)}`)),
    h("div.charts", {},
      chart("Output tokens/s", "tokens/s", [{ name: "tokens/s", class: "first", values: history.output_tokens_per_s }], POINTS, history.step_s),
      chart("TTFT", "ms", [
        { name: "p50", class: "first", values: history.ttft_p50_s.map(ms) },
        { name: "p90", class: "second", values: history.ttft_p90_s.map(ms) },
      ], POINTS, history.step_s)),
    h("div.slices", {}, model.slices.map(drawSlice), missing(model)));
}

const ms = (seconds) => (seconds === null ? null : seconds * 1000);

function tile(name, value, state = "", hint = "") {
  return h("div.tile", { class: state || "", title: hint || null }, h("dt", {}, name), h("dd", {}, value));
}

function missing(model) {
  if (!model.slices_missing) return null;
  return h("div.slice.missing", { "data-id": "missing" },
    h("h4", {}, "waiting for hardware"),
    h("p", {}, `${model.slices_missing} whole, free ${model.slices_missing === 1 ? "slice" : "slices"} of ${model.shape}; for ${time(model.missing_for_s)}`),
    model.missing_why && h("p.error", {}, model.missing_why));
}

function drawSlice(slice) {
  const said = slice.state === "starting" ? `starting: ${slice.phase}` : slice.state;
  return h("div.slice", { "data-id": slice.replica, class: slice.state },
    h("h4", {}, slice.slice || "no slice yet", " ", h("span.badge.state", {}, said)),
    h("p.quiet", {}, `${slice.shape}${slice.simulated ? ", simulated" : ""}; ${slice.state} for ${time(slice.for_s)}`),
    slice.reason && h("p.error", {}, slice.reason),
    h("div.hosts", {}, slice.hosts.map((host, worker) => drawHost(host, worker, slice))),
    slice.start && drawStart(slice.start, slice.phase),
    ["serving", "draining"].includes(slice.state) && drawLoad(slice));
}

function drawHost(host, worker, slice) {
  const hbm = slice.hbm_planned;
  const used = hbm ? hbm.used / hbm.usable : 0;
  const said = `host ${worker} (${host.ip}): ${host.chips} chips, ${slice.state}` + (hbm ? `, HBM ${percent(used)} by plan` : "");
  return h("div.host", { role: "img", "aria-label": said, title: said },
    h("span.name", {}, `host ${worker}`),
    h("div.chips", {}, Array.from({ length: host.chips }, () =>
      h("svg.chip", { viewBox: "0 0 10 10", "aria-hidden": "true" },
        h("rect.body", { width: 10, height: 10, rx: 1.5 }),
        h("rect.used", { y: (10 * (1 - used)).toFixed(2), width: 10, height: (10 * used).toFixed(2), rx: 1.5 })))),
    h("span.quiet", {}, host.ip));
}

function drawStart(start, phase) {
  const share = start.expected_s ? Math.min(0.99, start.elapsed_s / start.expected_s) : null;
  const said = `${time(start.elapsed_s)}` + (start.expected_s ? ` of about ${time(start.expected_s)}` : "");
  return h("div.start", {},
    h("label", {}, `start-up, ${said}`, h("progress", { max: 1, value: share, "aria-label": `start-up: ${phase}` })),
    h("ol", {}, start.phases.map(([name, seconds]) => h("li", {}, `${name} ${time(seconds)}`)), h("li.now", {}, phase)));
}

function drawLoad(slice) {
  const hbm = slice.hbm_planned;
  return h("dl.load", {},
    meter("KV cache", percent(slice.kv_usage), slice.kv_usage),
    hbm && meter("HBM a chip, planned", `${gib(hbm.used)} of ${gib(hbm.usable)}`, hbm.used / hbm.usable,
      `by plan: weights ${gib(hbm.weights)}, cache ${gib(hbm.cache)}` + (slice.simulated ? "; simulated hosts have no HBM" : "")),
    h("div", {}, h("dt", {}, "requests"), h("dd", {}, `${slice.running} running, ${slice.waiting} waiting`)),
    h("div", {}, h("dt", {}, "output"), h("dd", {}, `${short(slice.output_tokens_per_s)} tokens/s`)));
}

function meter(name, value, share, hint = "") {
  return h("div", { title: hint || null }, h("dt", {}, name), h("dd", {}, value, " ",
    h("meter", { min: 0, max: 1, high: 0.9, value: share.toFixed(3), "aria-label": `${name} ${value}` })));
}

/** What an operator should know of: deployments and requests that are refused, and slices that are left out. */
function drawTroubles(status) {
  const deploys = status.refused_deploys.map((deploy) => h("li.error", { "data-id": `deploy ${deploy.application}` },
    h("strong", {}, "refused"), ` deployment of ${deploy.application}, ${time(deploy.for_s)} ago; what ran before runs on: ${deploy.reason}`));
  const quarantined = status.quarantined.map((slice) => h("li.error", { "data-id": `${slice.slice}/${slice.host}` },
    h("strong", {}, "quarantined"), ` slice ${slice.slice}, for ${time(slice.for_s)} yet`, slice.engine_only && ", for one engine",
    `; ${slice.failures} failures on ${slice.host}, the last one: ${slice.reason}`));
  const refused = status.refused.map((request) => h("li.error", { "data-id": request.fingerprint },
    h("strong", {}, "refused"), ` request ${request.fingerprint} of ${request.model}, under which two slices died ${time(request.for_s)} ago`));
  return [...deploys, ...quarantined, ...refused];
}

/** Batches that are not over; how many lines there are is known once the input is read. */
function drawBatches(status) {
  return status.batches.map((batch) => {
    const done = batch.completed + batch.failed;
    return h("li", { "data-id": batch.name },
      h("label", {}, `${batch.name}, ${batch.state.replace("_", " ")}, ${time(batch.for_s)} old: `,
        h("progress", { max: Math.max(1, batch.total), value: done, "aria-label": `batch ${batch.name}` })),
      ` ${batch.completed} of ${batch.total} lines answered`, batch.failed > 0 && `, ${batch.failed} refused`,
      batch.why && `, waits: ${batch.why}`);
  });
}

/** Who used most of this day of UTC, by the first digits of keys' hashes. */
function drawUsage(status) {
  if (!status.usage.length) return [];
  const count = (value) => h("td", {}, value.toLocaleString("en"));
  return [h("table", {},
    h("caption", {}, `${status.usage[0].day}, UTC`),
    h("thead", {}, h("tr", {}, ["key", "requests", "prompt tokens", "of them cached", "output tokens", "dollars"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, status.usage.map((one) => h("tr", { "data-id": one.key },
      h("td", {}, one.key), count(one.requests), count(one.prompt_tokens), count(one.cached_tokens), count(one.output_tokens),
      h("td", {}, one.dollars.toFixed(4))))))];
}

function drawDecisions(status) {
  if (!status.decisions.length) return [h("p.quiet", {}, "none yet")];
  return [h("table", {},
    h("thead", {}, h("tr", {}, ["when", "model", "slices", "why"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, status.decisions.map((one) => h("tr", {},
      h("td", { title: new Date(one.at * 1000).toLocaleString() }, `${time(Math.max(0, status.at - one.at))} ago`),
      h("td", {}, one.model, one.pool && ` on ${one.pool}`), h("td", {}, one.wanted), h("td", {}, one.reason)))))];
}

/** One sentence when a slice changes its state, for who can't see colours. */
function news(status) {
  const changes = [], now = new Map();
  for (const model of status.models) {
    for (const slice of model.slices) {
      now.set(slice.replica, slice.state);
      if (before.size && before.get(slice.replica) !== slice.state) {
        changes.push(`${slice.slice || "a slice"} of ${model.name} is ${slice.state}${slice.reason ? `: ${slice.reason}` : ""}`);
      }
    }
  }
  if (changes.length) $("news").textContent = `${new Date().toLocaleTimeString()} ${changes.join("; ")}`;
  before.clear();
  for (const [replica, state] of now) before.set(replica, state);
}

document.addEventListener("visibilitychange", () => document.hidden || look());
addEventListener("online", look);
addEventListener("serving:key", look);
look();
