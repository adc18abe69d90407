// The page: follows the server's events, and shows them. What people wrote is only ever text here.

import { Chart } from "/page/assets/charts.js";
import { byId, bytes, el, fill, fillRows, lasting, percent, short } from "/page/assets/dom.js";
import { batchRow, failureRow, jobBody, jobRow, queueRow, share, workerRow } from "/page/assets/rows.js";

const KEY = "mlx-rq-key";
const KEPT_SECONDS = 12 * 3600;

let history = [], shown = { state: null, jobs: [], batches: [] };
let following = null, openJob = "";

const charts = [
  new Chart("Tokens a second", [{ name: "out", of: (row) => row.decoded_tokens }, { name: "in", of: (row) => row.prompt_tokens }], short),
  new Chart("Jobs", [{ name: "waiting", of: (row) => row.queued }, { name: "running", of: (row) => row.in_progress }], short),
  new Chart("Prompt tokens had for nothing", [{ name: "shared", of: (row) => share(row) }], percent, 100),
  new Chart("Memory of the workers", [{ name: "held", of: (row) => row.memory_active }, { name: "ceiling", of: (row) => row.memory_ceiling }], bytes),
];

// Talking to the server.

function headers() {
  const key = sessionStorage.getItem(KEY);
  return { "x-mlx-rq-page": "1", ...(key && { authorization: `Bearer ${key}` }) };
}

async function ask(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers(), cache: "no-store" });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  const error = new Error(body?.error?.message ?? `The server answered ${answer.status}.`);
  throw Object.assign(error, { status: answer.status });
}

// Follows the events anew, as after a change of what is looked at.
function follow() {
  following?.abort();
  following = new AbortController();
  keepFollowing(following.signal);
}

async function keepFollowing(signal) {
  for (let wait = 1; !signal.aborted; wait = Math.min(10, 2 * wait)) {
    try {
      const query = new URLSearchParams({
        status: byId("status").value, search: byId("search").value, job: openJob,
        after: history.at(-1)?.at ?? 0,
      });
      const answer = await ask(`/page/events?${query}`, { signal });
      letIn();
      await read(answer.body, () => (wait = 1));
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401) return askForKey(error.message);
      byId("connection").textContent = `No connection: ${error.message} Trying again…`;
    }
    await new Promise((done) => setTimeout(done, 1000 * wait));
  }
}

async function read(body, onEvent) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const pieces = (text + value).split("\n\n");
    text = pieces.pop();
    for (const piece of pieces) {
      const [, name, data] = /^event: (\w+)\ndata: (.*)$/.exec(piece) ?? [];
      if (name) show(name, JSON.parse(data));
      onEvent();
    }
  }
}

// Showing what came.

const SHOW = { state: showState, history: showHistory, jobs: showJobs, batches: showBatches, job: showJob, away: showAway };

function show(name, data) { SHOW[name]?.(data); }

function showAway(why) {
  byId("connection").textContent = why ? "The queue cannot be reached at the moment." : "Live";
}

function showState(state) {
  shown.state = state;
  byId("client").textContent = state.client ?? "";
  fill(byId("notes"), ...state.notes.map((note) => el("li", {}, note)));
  fillRows(byId("workers"), state.workers.map(workerRow), 10, "No worker is alive: `mlx-rq worker --model NAME` starts one.");
  fillRows(byId("queues"), state.queues.map(queueRow), 9, "No job has come yet.");
  byId("failures-section").hidden = !state.failures.length;
  fillRows(byId("failures"), state.failures.map((failure) => failureRow(failure, open)), 5, "");
  showTiles();
}

function showTiles() {
  const { state } = shown, now = history.at(-1);
  if (!state) return;
  const sum = (rows, of) => rows.reduce((all, row) => all + of(row), 0);
  const served = new Set(state.workers.flatMap((worker) => worker.serves));
  const waiting = sum(state.queues, (queue) => queue.queued);
  const reachable = sum(state.queues, (queue) => (served.has(queue.model) ? queue.queued : 0));
  const fresh = now && now.at > Date.now() / 1000 - 60 ? now : null;
  const rate = fresh?.jobs_ended;
  const tiles = [
    ["Jobs waiting", short(waiting), rate && reachable ? `${lasting(reachable / rate)} at this pace` : ""],
    ["Running", short(sum(state.queues, (queue) => queue.in_progress)), `${state.workers.length} worker${state.workers.length === 1 ? "" : "s"}`],
    ["Tokens a second", fresh ? short(fresh.decoded_tokens) : "–", fresh ? `${short(fresh.prompt_tokens)} in` : ""],
    ["Jobs a minute", fresh ? short(60 * rate) : "–", ""],
    ["Saved by sharing", state.workers.length ? percent(share(totals(state.workers))) : "–", `${short(saved(state.workers))} tokens`],
    ["Memory", ...memory(state.workers)],
  ];
  fill(byId("tiles"), ...tiles.map(([name, value, more]) => el("li", {}, el("span", {}, name), el("b", {}, value), el("span", {}, more))));
}

function memory(workers) {
  const [active, ceiling] = ["active", "ceiling"].map((name) => workers.reduce((all, worker) => all + (worker.memory[name] ?? 0), 0));
  return active ? [bytes(active), ceiling ? `of ${bytes(ceiling)}` : ""] : ["–", ""];
}

function totals(workers) {
  const add = (name) => workers.reduce((all, worker) => all + worker.totals[name], 0);
  return { prompt_tokens: add("prompt_tokens"), prefilled_tokens: add("prefilled_tokens") };
}

function saved(workers) {
  const { prompt_tokens, prefilled_tokens } = totals(workers);
  return Math.max(0, prompt_tokens - prefilled_tokens);
}

function showHistory({ columns, rows }) {
  history.push(...rows.map((row) => Object.fromEntries(columns.map((name, number) => [name, row[number]]))));
  history = history.filter((row) => row.at > Date.now() / 1000 - KEPT_SECONDS);
  showCharts();
  showTiles();
}

function showCharts() {
  const to = Math.max(Date.now() / 1000, history.at(-1)?.at ?? 0);
  for (const chart of charts) chart.draw(history, to - 3600 * Number(byId("range").value), to);
}

function showJobs(jobs) {
  fillRows(byId("jobs"), jobs.map((job) => jobRow(job, open)), 9, "No jobs here.");
}

function showBatches(batches) {
  fillRows(byId("batches"), batches.map((batch) => batchRow(batch, { cancel: cancelBatch, download })), 7, "No batches.");
}

// One job.

function open(id) {
  openJob = id;
  byId("job-title").textContent = id;
  fill(byId("job-body"), el("p", {}, "Looking…"));
  fill(byId("job-actions"));
  if (!byId("job").open) byId("job").showModal();
  follow();
}

function showJob(job) {
  if (job.id !== openJob) return;
  fill(byId("job-body"), ...jobBody(job, shown.state?.shows_content));
  const goesOn = ["queued", "in_progress"].includes(job.status), over = ["failed", "cancelled"].includes(job.status);
  const button = (name, act, style) => el("button", { type: "button", "data-focus": name, class: style, onclick: act }, name);
  fill(
    byId("job-actions"),
    goesOn ? button("Cancel the job", () => act(`/page/jobs/${encodeURIComponent(job.id)}/cancel`, "Cancel this job?", "Cancelled."), "danger") : null,
    over ? button("Retry", () => retry(job.id)) : null,
    job.status === "completed" ? button("Download", () => download(`/v1/jobs/${encodeURIComponent(job.id)}`, `${job.id}.json`)) : null,
  );
}

// What buttons do.

async function act(path, question, done) {
  if (question && !confirm(question)) return null;
  try {
    const answer = await (await ask(path, { method: "POST" })).json();
    say(done);
    return answer;
  } catch (error) {
    say(error.message);
    return null;
  }
}

async function retry(id) {
  const again = await act(`/page/jobs/${encodeURIComponent(id)}/retry`, null, "Queued again.");
  if (again) open(again.id);
}

const cancelBatch = (id) => act(`/page/batches/${encodeURIComponent(id)}/cancel`, "Cancel this batch? What runs is finished.", "The batch is being cancelled.");

async function download(path, name) {
  try {
    const url = URL.createObjectURL(await (await ask(path)).blob());
    el("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
  } catch (error) {
    say(error.message);
  }
}

let silence = 0;
function say(text) {
  byId("said").textContent = text;
  clearTimeout(silence);
  silence = setTimeout(() => (byId("said").textContent = ""), 6000);
}

// The key, where the server asks for one. It stays in this tab.

function askForKey(why) {
  byId("main").hidden = true;
  byId("key-form").hidden = false;
  byId("connection").textContent = "";
  byId("key-note").textContent = sessionStorage.getItem(KEY) ? why : "";
  byId("key").focus();
}

function letIn() {
  byId("key-form").hidden = true;
  byId("main").hidden = false;
  byId("forget").hidden = !sessionStorage.getItem(KEY);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  follow();
});

byId("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  location.reload();
});

byId("close").addEventListener("click", () => byId("job").close());
byId("job").addEventListener("close", () => {
  openJob = "";
  follow();
});
byId("status").addEventListener("change", follow);
byId("range").addEventListener("change", showCharts);

let typing = 0;
byId("search").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(follow, 300);
});

document.addEventListener("keydown", (event) => {
  const writes = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement?.tagName ?? "");
  if (event.key !== "/" || writes || byId("job").open || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  byId("search").focus();
});

byId("charts").append(...charts.map((chart) => chart.element));
setInterval(showCharts, 30_000);
follow();
