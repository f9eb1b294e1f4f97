// The first page: health with actions, the hops of the data, load, listeners, rates of the last minutes.
import { useContext, useEffect, useRef, useState } from "preact/hooks";
import { age, bytes, clock, counted, Failure, html, lag, link, number, oldest, rate, Reason, Session, usePoll } from "./lib.js";
import { Facts, Plain } from "./table.js";
import { EventTable } from "./views.js";

const PAGES = { publishers: "clients", subscribers: "clients", log: "topics", groups: "groups", statestore: "keys", pipelines: "pipelines", tables: "pipelines" };
const SERIES = [
  ["mqtt_in", "MQTT in", "--chart-1"],
  ["mqtt_out", "MQTT out", "--chart-2"],
  ["log_in", "Log in", "--chart-3"],
  ["log_out", "Log out", "--chart-4"],
];

export function Overview() {
  const { views } = useContext(Session);
  const { data, error } = usePoll("overview");
  if (error && !data) return html`<${Failure} error=${error} />`;
  if (!data) return html`<p aria-busy="true">Loading…</p>`;
  const { node, health, load, hops, listeners } = data;
  return html`
    ${error && html`<${Failure} error=${error} />`}
    <${Health} health=${health} now=${node.now_at} stale=${error !== null} />
    <h2>Path of the data</h2>
    <${Hops} hops=${hops} />
    <h2>Rates of the last five minutes</h2>
    <${Chart} />
    ${views && html`<${Recent} />`}
    <div class="two">
      <section><h2>Node</h2><${Facts} facts=${[
        ["Version", `${node.version}, core ${node.core}`],
        ["Process", `${node.pid}, up ${age(node.uptime_s)}`],
        ["Data directory", node.data_dir],
        ["Durability", node.durability],
        ["CPU", load.cpu.toFixed(2)],
        ["Memory", bytes(load.memory_bytes)],
        ["Disk", `${bytes(load.disk_used_bytes)} used, ${bytes(load.disk_free_bytes)} free`],
        ["Event loop delay", age(load.loop_delay_s)],
        ...Object.entries(load.commit_s).map(([part, seconds]) => [`Commits, ${part}`, age(seconds)]),
      ]} /></section>
      <section><h2>Listeners</h2><${Plain} title="Listeners" rows=${listeners} columns=${[
        { title: "Listener", cell: (row) => row.name },
        { title: "Address", cell: (row) => html`<code>${row.protocol}://${row.address}</code>` },
        { title: "Connections", right: true, cell: (row) => number(row.connections) },
        { title: "Refused", right: true, cell: (row) => number(row.refused) },
      ]} /></section>
    </div>`;
}

function Health({ health, now, stale }) {
  const state = health.ready ? "Ready" : health.state === "ready" ? "Not ready" : health.state;
  // A node that no longer responds is not "ready": the rest of the page is what it reported last.
  if (stale) return html`<section aria-label="Health" class="health"><h1><span class="dot problem" aria-hidden="true"></span> Unknown</h1>
    <p>The page shows the state of ${clock(now)} UTC, when the node was ${state.toLowerCase()}.</p></section>`;
  return html`<section aria-label="Health" class="health">
    <h1><span class=${`dot ${health.ready ? (health.reasons.length ? "warning" : "good") : "problem"}`} aria-hidden="true"></span> ${state}</h1>
    ${health.reasons.map((reason) => html`<${Reason} reason=${reason}>
      <small>since ${clock(reason.since_at)} UTC (${age((now - reason.since_at) / 1000)})</small><//>`)}
    ${health.reasons.length === 0 && health.ready && html`<p>All parts work.</p>`}
  </section>`;
}

/** The newest events: what changed. */
function Recent() {
  const { data, error } = usePoll("events", { limit: 5 }, 5000);
  if (error && !data) return html`<${Failure} error=${error} />`;
  if (!data || data.rows.length === 0) return null;
  return html`<section aria-label="Newest events"><h2>Newest <a href=${link("events")}>events</a></h2><${EventTable} rows=${data.rows} title="Newest events, table" /></section>`;
}

function Hops({ hops }) {
  const titles = Object.fromEntries(hops.map((hop) => [hop.id, hop.title]));
  return html`<ul class="hops">${hops.map((hop) => html`<li key=${hop.id} class=${`hop ${hop.id}`}>
    <h3>${PAGES[hop.id] ? html`<a href=${link(PAGES[hop.id])}>${hop.title}</a>` : hop.title}</h3>
    <p class="rate"><b>${rate(hop.rate)}</b> ${hop.unit}/s</p>
    <p>${hop.lag_records == null ? html`<span class="dim">${number(hop.total)} in all</span>`
      : html`<span class=${hop.lag_records ? "warn" : "dim"}>${lag(hop)} waiting${hop.lag_records && hop.lag_s ? `, ${oldest(hop)} behind` : ""}</span>`}</p>
    <p>${hop.errors ? html`<span class="bad">${counted(hop.errors, "error")}${hop.error_rate ? `, ${rate(hop.error_rate)}/s now` : ""}</span>` : html`<span class="dim">no errors</span>`}</p>
    ${hop.to.length > 0 && html`<p class="to"><span class="visually-hidden">feeds</span><span aria-hidden="true">→</span> ${hop.to.map((id) => titles[id]).join(", ")}</p>`}
  </li>`)}</ul>`;
}

const time = (at) => (at == null ? "" : clock(at * 1000).slice(11));

/** Whether the colours of the page are dark; they may change in the evening. */
function useDark() {
  const [dark, set] = useState(() => matchMedia("(prefers-color-scheme: dark)").matches);
  useEffect(() => {
    const query = matchMedia("(prefers-color-scheme: dark)");
    const changed = () => set(query.matches);
    query.addEventListener("change", changed);
    return () => query.removeEventListener("change", changed);
  }, []);
  return dark;
}

function Chart() {
  const dark = useDark();
  const { data } = usePoll("history", {}, 2000);
  const place = useRef(null);
  const plot = useRef(null);
  useEffect(() => {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: colour("--pico-muted-color"), grid: { stroke: colour("--pico-muted-border-color"), width: 1 } };
    plot.current = new uPlot({
      width: place.current.clientWidth, height: 220, fmtDate: (format) => uPlot.fmtDate(format),
      axes: [{ ...axis, incrs: [1, 5, 10, 15, 30, 60, 120], values: (_, ticks) => ticks.map(time) }, { ...axis, size: 60 }],
      scales: { y: { range: (_, low, high) => [0, Math.max(1, high * 1.1)] } },
      series: [{ label: "Time (UTC)", value: (_, at) => time(at) },
        ...SERIES.map(([, label, name]) => ({ label: `${label}/s`, stroke: colour(name), width: 2, points: { show: false }, value: (_, value) => (value == null ? "" : rate(value)) }))],
    }, [[], ...SERIES.map(() => [])], place.current);
    const resized = new ResizeObserver(() => plot.current && place.current && plot.current.setSize({ width: place.current.clientWidth, height: 220 }));
    resized.observe(place.current);
    return () => {
      resized.disconnect();
      plot.current.destroy();
      plot.current = null;
    };
  }, [dark]);
  useEffect(() => {
    if (data && plot.current) plot.current.setData([data.at.map((at) => at / 1000), ...SERIES.map(([name]) => data.series[name])]);
  }, [data, dark]);
  const last = data && SERIES.map(([name, label]) => `${label} ${rate(data.series[name].at(-1) ?? 0)}`).join(", ");
  return html`<figure class="chart"><div ref=${place}></div><figcaption class="visually-hidden">Messages and records per second, now: ${last}</figcaption></figure>`;
}
