// Pipelines as their runs report them: a list, and a page for one with its sinks.
import { useContext, useState } from "preact/hooks";
import { Graph } from "./graph.js";
import { age, bytes, clock, counted, Failure, html, lag, link, number, oldest, rate, request, Session, usePoll } from "./lib.js";
import { Facts, List, Plain } from "./table.js";

const BAD = { failed: "bad", lost: "bad", running: "", stopped: "dim", "never run": "dim" };
const state = (row) => html`<span class=${BAD[row.state] ?? ""}>${row.state}</span>`;
/** Dead letters that are not known to be closed. */
const unclosed = (pipeline) => pipeline.open_letters ?? pipeline.dead;
const short = (text) => (text === null ? "–" : text.split("\n", 1)[0].slice(0, 160));

export function Pipelines({ route }) {
  if (route.name !== null) return html`<${Pipeline} name=${route.name} key=${route.name} />`;
  return html`<h1>Pipelines</h1><${List} title="Pipelines" route=${route} initial="-lag_records" rowKey=${(row) => row.pipeline}
    empty=${html`No pipeline has run with the state store of this node: <code>penstock pipeline run FILE</code>`}
    open=${(row) => link("pipelines", row.pipeline)}
    columns=${[
      { title: "Pipeline", sort: "pipeline", cell: (row) => row.pipeline },
      { title: "State", sort: "state", cell: state },
      { title: "Sinks", right: true, cell: (row) => number(row.sinks) },
      { title: "Records/s", sort: "rows_per_s", right: true, cell: (row) => rate(row.rows_per_s) },
      { title: "Lag", sort: "lag_records", right: true, cell: (row) => html`<span class=${row.lag_records ? "warn" : ""}>${lag(row)}</span>` },
      { title: "Behind", sort: "lag_s", right: true, cell: oldest },
      { title: "Dead letters", sort: "dead", right: true, cell: (row) => html`<span class=${unclosed(row) ? "bad" : ""}>${row.open_letters === null ? number(row.dead) : `${number(row.open_letters)} open`}</span>` },
      { title: "Since (UTC)", cell: (row) => (row.since_at === null ? "–" : clock(row.since_at)) },
      { title: "Last error", cell: (row) => short(row.why) },
    ]} />`;
}

function Pipeline({ name }) {
  const [letters, showLetters] = useState(null); // open dead letters by step
  const { data, error } = usePoll(`pipelines/${encodeURIComponent(name)}`);
  if (error && !data) return html`<h1>${name}</h1><${Failure} error=${error} />`;
  if (!data) return html`<h1>${name}</h1><p aria-busy="true">Loading…</p>`;
  const { pipeline, sinks } = data;
  return html`<h1>${name}</h1>
    ${error && html`<${Failure} error=${error} />`}
    ${pipeline.state === "lost" && html`<div class="reason problem" role="alert"><strong>The run ended without a report: its lease has expired.</strong>
      <p>It crashed, its host is down, or it lost the state store. Start it again; it continues from its checkpoint: <code>penstock pipeline run FILE</code></p></div>`}
    ${pipeline.why !== null && html`<div class="reason problem" role="alert"><strong>${{ failed: "The last run failed.", running: "The run continues without a sink." }[pipeline.state] ?? "A sink of the last run failed."}</strong><pre tabindex="0"><code>${pipeline.why}</code></pre></div>`}
    <${Facts} facts=${[
      ["State", state(pipeline)], ["Run", pipeline.run], ["Host", pipeline.host && `${pipeline.host}, process ${pipeline.pid ?? "–"}`],
      ["Since (UTC)", pipeline.since_at === null ? null : clock(pipeline.since_at)], ["Last report", pipeline.status_age_s === null ? null : `${age(pipeline.status_age_s)} ago`],
      ["Lag", pipeline.lag_records === null ? null : `${lag(pipeline)} ${pipeline.lag_records === 1 ? "record" : "records"}${pipeline.lag_records ? `, ${oldest(pipeline)}` : ""}`], ["Restarts of queries", number(pipeline.restarts)],
      ["Spark", pipeline.spark_ui && html`<a href=${pipeline.spark_ui} rel="noreferrer">Web interface of Spark</a>, as the driver's host sees it`],
      ["Consumer groups", html`<a href=${link("groups", null, { q: `pipeline-${name}-` })}>pipeline-${name}-…</a>`],
      ["Dead letters", pipeline.managed ? html`<a href=${link("dead-letters", name)}>List, correct, redrive</a>` : html`<code>penstock pipeline dead-letter list FILE</code>, or here if the node has the pipeline in <code>pipelines</code> of its configuration`],
      ...(pipeline.managed ? [["Ledger", html`<a href=${link("ledger", name)}>Counts of all runs, reconcile</a>`], ["Sample", html`<a href=${link("sample", name)}>Rows after each step</a>`]] : []),
    ]} />
    ${pipeline.managed && html`<${Changes} name=${name} />`}
    ${data.graph.length > 0 && html`<h2>Graph</h2><${Graph} nodes=${data.graph} card=${(node) => figures(node, data, letters)} />
      ${pipeline.managed && html`<${Letters} name=${name} show=${showLetters} />`}
      ${!pipeline.managed && html`<p>Rows after each step, from the newest records: <code>penstock pipeline sample FILE</code></p>`}`}
    ${data.expectations.length > 0 && html`<h2>Expectations</h2><${Plain} title="Expectations" rows=${data.expectations} columns=${[
      { title: "Step", cell: (row) => row.step }, { title: "Expectation", cell: (row) => row.expectation }, { title: "Sink", cell: (row) => row.sink },
      { title: "Rows", right: true, cell: (row) => number(row.rows) }, { title: "Violations", right: true, cell: (row) => html`<span class=${row.violations ? "warn" : ""}>${number(row.violations)}</span>` },
    ]} />`}
    <h2>Sinks</h2>
    ${sinks.length === 0 ? html`<p>No run has reported a sink yet.</p>` : html`<p>Counts of this run, reported every five seconds.</p>
    <${Plain} title="Sinks" rows=${sinks} columns=${[
      { title: "Sink", cell: (row) => html`${row.sink}${row.failing_s > 0 && html` <span class="bad">failing for ${age(row.failing_s)}</span>`}` }, { title: "Batch", right: true, cell: (row) => number(row.batch) },
      { title: "Records/s", right: true, cell: (row) => rate(row.rows_per_s) }, { title: "Lag", right: true, cell: (row) => html`<span class=${row.lag_records ? "warn" : ""}>${lag(row)}</span>` },
      { title: "Behind", right: true, cell: oldest }, { title: "Read", right: true, cell: (row) => number(row.read) }, { title: "Written", right: true, cell: (row) => number(row.out) },
      { title: "Written/s", right: true, cell: (row) => rate(pipeline.state === "running" ? row.written_per_s : 0) },
      { title: "Dead", right: true, cell: (row) => html`<span class=${row.dead && unclosed(pipeline) ? "bad" : ""}>${number(row.dead)}</span>` }, { title: "Filtered", right: true, cell: (row) => number(row.filtered) },
      { title: "Duplicates", right: true, cell: (row) => number(row.duplicates) }, { title: "Late", right: true, cell: (row) => number(row.late) },
      ...(sinks.some((row) => row.exploded) ? [{ title: "Exploded", right: true, cell: (row) => number(row.exploded) }] : []),
      { title: "Batch time", right: true, cell: (row) => age(row.batch_s) }, { title: "In the batch", right: true, cell: (row) => (row.in_batch_records ? `${number(row.in_batch_records)}, ${age(row.in_batch_s)}` : "–") },
      { title: "Watermark behind", right: true, cell: (row) => age(row.behind_s) }, { title: "State", right: true, cell: (row) => (row.state_rows ? `${counted(row.state_rows, "row")}, ${bytes(row.state_bytes)}${row.state_disk_bytes === null ? "" : `, ${bytes(row.state_disk_bytes)} on disk`}` : "–") },
    ]} />`}`;
}

/** Lines of a node in the graph: {text, level, href}; the values of a sink are those of its query. */
function figures(node, { pipeline, sinks, expectations }, letters) {
  const open = letters?.get(node.id) ?? 0;
  const rejected = open > 0 && { text: `${number(open)} open dead letters`, level: "bad", href: link("dead-letters", pipeline.pipeline, { step: node.id }) };
  if (node.role !== "sink") {
    // Each sink counts the rows of a shared step: the largest count is that of the step.
    const checked = expectations.filter((row) => row.step === node.name);
    const worst = Object.values(Object.groupBy(checked, (row) => row.expectation)).map((rows) => Math.max(...rows.map((row) => row.violations)));
    return [
      node.rows_per_s != null && { text: `${rate(pipeline.state === "running" ? node.rows_per_s : 0)} records/s`, level: "" },
      node.lag_records != null && { text: `lag ${lag(node)}${node.lag_records ? `, ${oldest(node)}` : ""}`, level: node.lag_records ? "warn" : "dim" },
      checked.length > 0 && { text: `violations: ${number(worst.reduce((sum, each) => sum + each, 0))}`, level: worst.some(Boolean) ? "warn" : "dim" },
      node.behind_s != null && { text: `watermark ${age(node.behind_s)} behind`, level: "dim" },
      node.state_rows != null && { text: `state ${counted(node.state_rows, "row")}, ${bytes(node.state_bytes)}`, level: "dim" },
      rejected,
      node.role === "step" && pipeline.managed && { text: "sample rows", level: "dim", href: link("sample", pipeline.pipeline, { step: node.name }) },
    ].filter(Boolean);
  }
  const sink = sinks.find((row) => row.sink === node.name);
  if (!sink) return [rejected].filter(Boolean);
  return [
    sink.failing_s > 0 && { text: `failing for ${age(sink.failing_s)}`, level: "bad" },
    { text: `${rate(pipeline.state === "running" ? sink.rows_per_s : 0)} records/s`, level: "" },
    { text: `${number(sink.out)} written`, level: "" },
    sink.lag_records != null && { text: `lag ${lag(sink)}${sink.lag_records ? `, ${oldest(sink)}` : ""}`, level: sink.lag_records ? "warn" : "dim" },
    sink.behind_s != null && { text: `watermark ${age(sink.behind_s)} behind`, level: "dim" },
    sink.state_rows > 0 && { text: `state ${counted(sink.state_rows, "row")}, ${bytes(sink.state_bytes)}`, level: "dim" },
    sink.dead > 0 && { text: `${number(sink.dead)} dead`, level: unclosed(pipeline) ? "bad" : "dim" },
    rejected,
  ].filter(Boolean);
}

/** Counts the open dead letters of each step, on demand: each request is a process that reads their table. */
function Letters({ name, show }) {
  const { operates } = useContext(Session);
  const [{ count, error, busy }, set] = useState({ count: null, error: null, busy: false });
  if (!operates) return null;
  const read = () => {
    set({ count: null, error: null, busy: true });
    request(`pipelines/${encodeURIComponent(name)}/dead-letters`).then(({ rows }) => {
      const found = new Map();
      for (const row of rows) found.set(row.step, (found.get(row.step) ?? 0) + row.open + row.corrected);
      show(found);
      set({ count: [...found.values()].reduce((sum, each) => sum + each, 0), error: null, busy: false });
    }, (problem) => set({ count: null, error: problem, busy: false }));
  };
  return html`<div class="action" aria-busy=${busy}><button class="secondary" disabled=${busy} onClick=${read}>Count the dead letters of each step</button>
    ${error && html`<${Failure} error=${error} />`}${count !== null && html`<p role="status">${count === 0 ? "No dead letter is open." : `${counted(count, "dead letter")} ${count === 1 ? "is" : "are"} open, see the graph.`}</p>`}</div>`;
}

const MARKS = { "+": ["new", "added"], "~": ["changed", "warn"], "-": ["removed", "removed"], "=": ["continues", "dim"], "?": ["asks before it starts", "warn"], "!": ["cannot continue", "bad"] };

/** The changes of the pipeline's file since its last run, on demand: each request is a process. */
function Changes({ name }) {
  const { operates } = useContext(Session);
  const [{ plan, error, busy }, set] = useState({ plan: null, error: null, busy: false });
  if (!operates) return null;
  const compare = () => {
    set({ plan: null, error: null, busy: true });
    request(`pipelines/${encodeURIComponent(name)}/plan`).then((found) => set({ plan: found, error: null, busy: false }), (problem) => set({ plan: null, error: problem, busy: false }));
  };
  const rows = plan?.changes;
  return html`<div class="action" aria-busy=${busy}><button class="secondary" disabled=${busy} onClick=${compare}>Compare the file with the last run</button>
    ${error && html`<${Failure} error=${error} />`}
    ${plan && (rows === null ? html`<p role="status">The pipeline has not run with this state directory: all of the file is new.</p>`
      : html`<p role="status">${rows.every((row) => row.mark === "=") ? "The file has no changes: a run continues." : `Changes of the file since the last run, which apply when the pipeline is started again:`}</p>
        <ul class="plan difference">${rows.map((row) => html`<li class=${MARKS[row.mark]?.[1] ?? ""}><code aria-hidden="true">${row.mark}</code> <strong>${row.what}</strong> <small>${MARKS[row.mark]?.[0] ?? ""}</small><br />${row.text}</li>`)}</ul>`)}
  </div>`;
}
