// Pipelines as their runs report them: a list, and a page for one with its sinks.
import { age, bytes, clock, Failure, html, lag, link, number, oldest, rate, usePoll } from "./lib.js";
import { Facts, List, Plain } from "./table.js";

const BAD = { failed: "bad", lost: "bad", running: "", stopped: "dim", "never run": "dim" };
const state = (row) => html`<span class=${BAD[row.state] ?? ""}>${row.state}</span>`;
const short = (text) => (text === null ? "–" : text.split("\n", 1)[0].slice(0, 160));

export function Pipelines({ route }) {
  if (route.name !== null) return html`<${Pipeline} name=${route.name} key=${route.name} />`;
  return html`<h1>Pipelines</h1><${List} title="Pipelines" route=${route} initial="-lag_records" rowKey=${(row) => row.pipeline}
    open=${(row) => link("pipelines", row.pipeline)}
    columns=${[
      { title: "Pipeline", sort: "pipeline", cell: (row) => row.pipeline },
      { title: "State", sort: "state", cell: state },
      { title: "Sinks", right: true, cell: (row) => number(row.sinks) },
      { title: "Records/s", sort: "rows_per_s", right: true, cell: (row) => rate(row.rows_per_s) },
      { title: "Lag", sort: "lag_records", right: true, cell: (row) => html`<span class=${row.lag_records ? "warn" : ""}>${lag(row)}</span>` },
      { title: "Behind", sort: "lag_s", right: true, cell: oldest },
      { title: "Dead letters", sort: "dead", right: true, cell: (row) => html`<span class=${row.dead ? "bad" : ""}>${number(row.dead)}</span>` },
      { title: "Since (UTC)", cell: (row) => (row.since_at === null ? "–" : clock(row.since_at)) },
      { title: "Last error", cell: (row) => short(row.why) },
    ]} />`;
}

function Pipeline({ name }) {
  const { data, error } = usePoll(`pipelines/${encodeURIComponent(name)}`);
  if (error && !data) return html`<h1>${name}</h1><${Failure} error=${error} />`;
  if (!data) return html`<h1>${name}</h1><p aria-busy="true">Loading…</p>`;
  const { pipeline, sinks } = data;
  return html`<h1>${name}</h1>
    ${error && html`<${Failure} error=${error} />`}
    ${pipeline.state === "lost" && html`<div class="reason problem" role="alert"><strong>The run ended without a report: its lease has expired.</strong>
      <p>It crashed, its host is down, or it lost the state store. Start it again; it continues from its checkpoint: <code>penstock pipeline run FILE</code></p></div>`}
    ${pipeline.why !== null && html`<div class="reason problem" role="alert"><strong>The last run failed.</strong><pre tabindex="0"><code>${pipeline.why}</code></pre></div>`}
    <${Facts} facts=${[
      ["State", state(pipeline)], ["Run", pipeline.run], ["Host", pipeline.host && `${pipeline.host}, process ${pipeline.pid ?? "–"}`],
      ["Since (UTC)", pipeline.since_at === null ? null : clock(pipeline.since_at)], ["Last report", pipeline.status_age_s === null ? null : `${age(pipeline.status_age_s)} ago`],
      ["Lag", pipeline.lag_records === null ? null : `${lag(pipeline)} records, ${oldest(pipeline)}`], ["Restarts of queries", number(pipeline.restarts)],
      ["Consumer groups", html`<a href=${link("groups", null, { q: `pipeline-${name}-` })}>pipeline-${name}-…</a>`],
      ["Dead letters", pipeline.managed ? html`<a href=${link("dead-letters", name)}>List, correct, redrive</a>` : html`<code>penstock pipeline dead-letter list FILE</code>`],
    ]} />
    <h2>Sinks</h2>
    ${sinks.length === 0 ? html`<p>No run has reported a sink yet.</p>` : html`<p>Counts of this run, reported every five seconds.</p>
    <${Plain} title="Sinks" rows=${sinks} columns=${[
      { title: "Sink", cell: (row) => html`${row.sink}${row.failing_s > 0 && html` <span class="bad">failing for ${age(row.failing_s)}</span>`}` }, { title: "Batch", right: true, cell: (row) => number(row.batch) },
      { title: "Records/s", right: true, cell: (row) => rate(row.rows_per_s) }, { title: "Lag", right: true, cell: (row) => html`<span class=${row.lag_records ? "warn" : ""}>${lag(row)}</span>` },
      { title: "Behind", right: true, cell: oldest }, { title: "Read", right: true, cell: (row) => number(row.read) }, { title: "Written", right: true, cell: (row) => number(row.out) },
      { title: "Dead", right: true, cell: (row) => html`<span class=${row.dead ? "bad" : ""}>${number(row.dead)}</span>` }, { title: "Filtered", right: true, cell: (row) => number(row.filtered) },
      { title: "Duplicates", right: true, cell: (row) => number(row.duplicates) }, { title: "Late", right: true, cell: (row) => number(row.late) },
      ...(sinks.some((row) => row.exploded) ? [{ title: "Exploded", right: true, cell: (row) => number(row.exploded) }] : []),
      { title: "Batch time", right: true, cell: (row) => age(row.batch_s) }, { title: "In the batch", right: true, cell: (row) => (row.in_batch_records ? `${number(row.in_batch_records)}, ${age(row.in_batch_s)}` : "–") },
      { title: "Watermark behind", right: true, cell: (row) => age(row.behind_s) }, { title: "State", right: true, cell: (row) => (row.state_rows ? `${number(row.state_rows)} rows, ${bytes(row.state_bytes)}${row.state_disk_bytes === null ? "" : `, ${bytes(row.state_disk_bytes)} on disk`}` : "–") },
    ]} />`}`;
}
