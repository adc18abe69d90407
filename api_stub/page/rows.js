// How a worker, a queue, a batch and a job look.

import { between, bytes, el, lasting, percent, short } from "/page/assets/dom.js";

const FINISHED = ["completed", "failed", "cancelled", "expired"];

// The share of prompt tokens that were had for nothing.
export const share = ({ prompt_tokens, prefilled_tokens }) =>
  prompt_tokens > 0 ? Math.max(0, 100 * (1 - prefilled_tokens / prompt_tokens)) : 0;

const text = (value, style = "text") => el("td", { class: style }, value);
const number = (value) => text(short(value), "number");
const status = (value) => el("td", {}, el("span", { class: `status ${value}` }, value.replace("_", " ")));
const metadata = (value) => Object.entries(value ?? {}).map(([name, said]) => `${name}: ${said}`).join(", ");

function when(seconds) {
  const at = new Date(seconds * 1000);
  const today = at.toDateString() === new Date().toDateString();
  return today ? at.toLocaleTimeString() : at.toLocaleString([], { dateStyle: "short", timeStyle: "short" });
}

export const workerRow = (worker) =>
  el("tr", {},
    el("td", { class: "text", title: worker.chip }, worker.host ? `${worker.name.slice(0, 8)} on ${worker.host}` : worker.name.slice(0, 8)),
    text(worker.model),
    text(`${worker.running} of ${worker.capacity}`, "number"),
    number(worker.waiting),
    number(worker.ended),
    speed(worker.rates, "generated_tokens"),
    speed(worker.rates, "prompt_tokens"),
    text(percent(share(worker.totals)), "number"),
    el("td", { class: "number", title: heldFor(worker) }, memory(worker.memory)),
    text(worker.paused ? `takes no jobs: ${worker.paused}` : worker.running ? "busy" : "idle"));

const speed = ({ now, recent }, name) => text(`${short(Math.round(now[name]))} (${short(Math.round(recent[name]))})`, "number");

function memory({ active, ceiling }) {
  if (active === null) return "–";
  return ceiling === null ? bytes(active) : `${bytes(active)} of ${bytes(ceiling)}`;
}

// What the memory is held for.
function heldFor({ memory: { active, weights, cache }, totals: { prefix_bytes: prefixes } }) {
  if (active === null || !weights) return null;
  return [["weights", weights], ["prefixes", prefixes], ["rows", active - weights - prefixes], ["cache", cache ?? 0]]
    .map(([name, size]) => `${name} ${bytes(Math.max(0, size))}`).join(", ");
}

export const queueRow = (queue) =>
  el("tr", {}, text(queue.model), text(queue.priority),
    ...["queued", "in_progress", "completed", "failed", "cancelled"].map((name) => number(queue[name])),
    ...["oldest_seconds", "eta_seconds"].map((name) => text(queue[name] === null ? "–" : lasting(queue[name]), "number")));

export const failureRow = (failure, open) =>
  el("tr", {},
    jobLink(failure.id, "failure", open),
    text(failure.model),
    text(failure.ended_at ? when(Date.parse(failure.ended_at) / 1000) : "", "number"),
    text(failure.code),
    text(failure.message));

const jobLink = (id, list, open) =>
  el("td", {}, el("button", { type: "button", class: "link", "data-focus": `${list} ${id}`, onclick: () => open(id), title: id, "aria-label": list === "job" ? `Open job ${id}` : `Open ${list} ${id}` }, id.slice(0, 12)));

export function batchRow(batch, { cancel, download }) {
  const { total, completed, failed } = batch.request_counts;
  const button = (name, key, act, style) =>
    el("button", { type: "button", class: style, "data-focus": `${batch.id} ${key}`, onclick: act, "aria-label": `${name} of ${batch.id}` }, name);
  const file = (name, id) => (id ? button(name, name, () => download(`/v1/files/${encodeURIComponent(id)}/content`, `${batch.id}_${name.toLowerCase()}.jsonl`)) : null);
  return el("tr", {},
    status(batch.status),
    el("td", {}, el("code", { title: batch.id }, batch.id)),
    el("td", { class: "number" },
      el("progress", { max: Math.max(1, total), value: completed + failed, "aria-label": `Progress of ${batch.id}` }),
      `${completed + failed} of ${total}`),
    number(failed),
    text(when(batch.created_at), "number"),
    text([metadata(batch.metadata), batch.note, batch.errors?.data?.[0]?.message].filter(Boolean).join(" · ")),
    el("td", { class: "number" },
      file("Output", batch.output_file_id), " ", file("Errors", batch.error_file_id), " ",
      FINISHED.includes(batch.status) || batch.status === "cancelling" ? null : button("Cancel", "cancel", () => cancel(batch.id), "danger")));
}

export function jobRow(job, open) {
  const took = between(job.started_at, job.ended_at), waited = between(job.created_at, job.started_at);
  const about = [job.error, job.batch && `batch ${job.batch}`, job.metadata && metadata(JSON.parse(job.metadata))];
  return el("tr", {},
    status(job.status),
    jobLink(job.id, "job", open),
    text(job.model),
    text(job.priority),
    text(job.created_at ? when(Date.parse(job.created_at) / 1000) : "", "number"),
    text(waited === null ? "" : lasting(waited), "number"),
    text(took === null ? "" : lasting(took), "number"),
    text(job.tokens === null ? "" : short(job.tokens), "number"),
    text(about.filter(Boolean).join(" · ")));
}

export function jobBody(job, showsContent) {
  if (job.missing) return [el("p", {}, "There is no such job (any more).")];
  const facts = [
    ["Status", job.status.replace("_", " ")],
    ["Kind", job.kind],
    ["Model", job.model],
    ["Priority", job.priority],
    ["Worker", job.worker],
    ["Tokens", job.usage && `${short(job.usage.prompt)} in (${short(job.usage.cached)} had for nothing), ${short(job.usage.completion)} out`],
    ["Ended by", job.finish_reason],
    ["Metadata", metadata(job.metadata)],
    ["Note", job.note],
    ["Error", job.error && `${job.error.message}${job.error.code ? ` (${job.error.code})` : ""}`],
  ];
  return [
    life(job),
    el("dl", {}, ...facts.filter(([, value]) => value).flatMap(([name, value]) => [el("dt", {}, name), el("dd", name === "Error" ? { class: "bad" } : {}, value)])),
    ...(showsContent ? [content("Prompt", job.prompt), content("Answer", job.answer)] : [el("p", { class: "note" }, "Prompts and answers are not shown: the server was started without --show-content.")]),
  ];
}

const content = (name, said) => (said ? el("section", {}, el("h2", {}, name), el("pre", { tabindex: 0, "aria-label": name }, said)) : null);

// What happened to a job, each step with the time since the one before.
function life({ life: steps }) {
  return el("ol", { class: "life", "aria-label": "The job's life" }, ...steps.map(({ name, at, detail, first_for }, step) => {
    const since = step ? `, after ${lasting(at - steps[step - 1].at)}` : "";
    const date = new Date(1000 * at);
    const told = [detail, first_for && `first for ${first_for}`].filter(Boolean).join("; ");
    return el("li", {}, [name + since, told].filter(Boolean).join(": "), el("time", { datetime: date.toISOString() }, date.toLocaleString()));
  }));
}
