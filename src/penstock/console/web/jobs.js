// Jobs of a pipeline, which continue without a browser: its ledger with the reconciliation, and rows after its steps.
import { useState } from "preact/hooks";
import { age, clock, counted, Failure, html, link, number, request, usePoll } from "./lib.js";
import { Plain } from "./table.js";

const path = (name, part) => `pipelines/${encodeURIComponent(name)}/${part}`;

/** The running or last job of a kind, and what starts and cancels it. */
function useJob(name, kind) {
  const [started, count] = useState(0);
  const [running, run] = useState(true); // until the first answer
  const [failed, fail] = useState(null);
  const { data, error } = usePoll(path(name, kind), { started }, running ? 1000 : 0);
  const job = data?.job ?? null;
  if (data && running !== (job?.state === "running")) run(job?.state === "running");
  const send = (method, parameters) => request(path(name, kind), parameters, method).then(() => { fail(null); count(started + 1); run(true); }, fail);
  return { job, error: error ?? failed, loaded: data !== null, start: (parameters) => send("POST", parameters), cancel: () => send("DELETE") };
}

/** How far a job is, or how it ended. `results`: what it has printed so far; `done`: a text for its end. */
function State({ job, results, done, cancel }) {
  if (job.state === "running") return html`<p aria-busy="true"><span role="status" aria-live="off">Running for ${age(Math.floor(job.duration_s))}: ${results}.</span></p><button class="secondary" onClick=${cancel}>Cancel</button>`;
  if (job.error) return html`<div class="reason problem" role="alert"><strong>${job.error.what}</strong>${job.error.why && html`<p>${job.error.why}</p>`}${job.error.hint && html`<p>${job.error.hint}</p>`}</div>`;
  const at = html`<small class="dim">${clock(job.started_at)} UTC, took ${age(job.duration_s)}</small>`;
  return html`<p role="status">${job.state === "cancelled" ? `Cancelled: ${results}.` : done} ${at}</p>`;
}

const right = (title, name) => ({ title, right: true, cell: (row) => number(row[name]) });
const SUMS = [
  right("Batches", "batches"), right("Read", "read"), right("Written", "out"),
  { title: "Dead", right: true, cell: (row) => html`<span class=${row.dead ? "bad" : ""}>${number(row.dead)}</span>` },
  right("Filtered", "filtered"), right("Duplicates", "duplicates"), right("Late", "late"),
];
const sums = (rows) => [...SUMS, ...(rows.some((row) => row.exploded) ? [right("Exploded", "exploded")] : [])];

export function Ledger({ route: { name } }) {
  const { data, error } = usePoll(path(name, "ledger"), {}, 0); // once: each request is a process
  const title = html`<h1>Ledger of <a href=${link("pipelines", name)}>${name}</a></h1>`;
  if (error) return html`${title}<${Failure} error=${error} />`;
  return html`${title}
    ${data ? html`<p>Counts of all batches of all runs with this state directory.</p>
      <${Plain} title="Ledger" rows=${data.rows} columns=${[{ title: "Sink", cell: (row) => row.sink }, { title: "Last batch", right: true, cell: (row) => number(row.batch) }, { title: "Version", right: true, cell: (row) => number(row.version) }, ...sums(data.rows)]} />`
      : html`<p aria-busy="true">Reading the ledger…</p>`}
    <h2>Reconcile</h2>
    <p>Compares the ledger with the source and with each table: the brokers count the records of all batches again, and the rows of the tables are counted in their files. Nothing changes, and the pipeline may run meanwhile. It may take minutes, and continues if this page is closed.</p>
    <${Reconcile} name=${name} sinks=${data?.rows.length} />`;
}

function Reconcile({ name, sinks }) {
  const { job, error, loaded, start, cancel } = useJob(name, "reconcile");
  const found = job?.sinks ?? [];
  const results = `${sinks ? `${found.length} of ${counted(sinks, "sink")}` : counted(found.length, "sink")} done`;
  const off = found.filter((row) => !row.ok).length;
  const unknown = found.some((row) => row.unknown.length);
  const done = off ? `${counted(off, "sink")} ${off === 1 ? "has" : "have"} differences.` : unknown ? "No differences, but some values could not be checked." : "Every record is accounted for.";
  return html`<div class="action">${error && html`<${Failure} error=${error} />`}
    ${job && html`<${State} job=${job} results=${results} done=${done} cancel=${cancel} />`}
    ${found.length > 0 && html`<${Plain} title="Result of each sink" rows=${found} columns=${[
      { title: "Sink", cell: (row) => row.sink }, { title: "Result", cell: (row) => html`<span class=${row.ok ? "" : "bad"}>${row.ok ? "ok" : "off"}</span>` }, ...sums(found),
    ]} />
    <ul class="plan">${found.flatMap((row) => [...row.off.map((text) => html`<li><strong class="bad">${row.sink} off:</strong> ${text}</li>`), ...row.unknown.map((text) => html`<li><strong class="warn">${row.sink} not checked:</strong> ${text}</li>`)])}</ul>`}
    ${loaded && job?.state !== "running" && html`<button class="secondary" onClick=${() => start({})}>${job ? "Reconcile again" : "Reconcile"}</button>`}</div>`;
}

export function Sample({ route: { name, parameters } }) {
  const detail = usePoll(`pipelines/${encodeURIComponent(name)}`, {}, 0); // for the names of the steps
  const { job, error, loaded, start, cancel } = useJob(name, "sample");
  const steps = detail.data?.graph.filter((node) => node.role === "step").map((node) => node.name) ?? [];
  if (parameters.step && !steps.includes(parameters.step)) steps.push(parameters.step);
  const submit = (event) => {
    event.preventDefault();
    start(Object.fromEntries(new FormData(event.target)));
  };
  const found = job?.steps ?? [];
  const title = html`<h1>Rows after the steps of <a href=${link("pipelines", name)}>${name}</a></h1>`;
  if (error && !loaded) return html`${title}<${Failure} error=${error} />`;
  return html`${title}
    <p>The steps run once for the newest records of their sources, in a local Spark session of the node, which takes some seconds and about a gigabyte of memory. Nothing is written, and no offset of a group changes. Windows and dedupes have only these records.</p>
    <form class="filters" key=${`${parameters.step}\0${steps.length}`} onSubmit=${submit}>
      <label>Step<select name="step"><option value="">all steps</option>${steps.map((step) => html`<option selected=${step === parameters.step}>${step}</option>`)}</select></label>
      <label class="short">Newest records<input name="records" type="number" min="1" max="10000" defaultValue="100" title="of each partition" /></label>
      <label class="short">Rows of each step<input name="limit" type="number" min="0" max="100" defaultValue="5" /></label>
      <button class="secondary" disabled=${!loaded || job?.state === "running"}>Sample</button>
    </form>
    <div class="action">${error && html`<${Failure} error=${error} />`}
    ${job && html`<${State} job=${job} results=${`${counted(found.length, "step")} done`} done=${`${job.parameters.step ? `Step ${job.parameters.step}` : "All steps"}, the newest ${counted(Number(job.parameters.records), "record")} of each partition.`} cancel=${cancel} />`}</div>
    ${found.map((step) => html`<section aria-label=${`Step ${step.step}`} key=${step.step}><h2>${step.step} <small class="dim">${step.kind}</small></h2>
      <p>${[counted(step.live, "row"), step.filtered && `${number(step.filtered)} filtered`, step.dead && `${number(step.dead)} dead`].filter(Boolean).join(", ")}${step.rows.length && step.rows.length < step.live ? `; the first ${step.rows.length} are shown` : ""}</p>
      ${step.rejections.map((row) => html`<p class="bad">${number(row.rows)} dead: ${row.reason} (${row.code})</p>`)}
      ${step.rows.length > 0 && html`<${Plain} title=${`Rows after ${step.step}`} rows=${step.rows} columns=${step.columns.map((title, index) => ({ title, cell: (row) => (row[index] === null ? html`<span class="dim">null</span>` : row[index]) }))} />`}
    </section>`)}`;
}
