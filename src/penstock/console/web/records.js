// The message browser: records of a TubeMQ topic by offset, by time, newest first, filtered, and as they arrive.
import { useContext, useEffect, useRef, useState } from "preact/hooks";
import { bytes, clock, counted, download, Failure, html, indented, link, number, poll, request, saveFile, Session, usePoll, within } from "./lib.js";
import { Facts } from "./table.js";

const STARTS = [["newest", "newest"], ["earliest", "earliest"], ["time", "a time"], ["offset", "an offset"], ["end", "new records"]];
const KEPT = 500; // records of a live list
/** Formats whose value the node decoded with a schema. */
export const SCHEMAS = { avro: "Avro", protobuf: "Protobuf" };
const EVERY = 1000;

/** Text of bytes in the form of hexdump: offset, bytes, characters. */
export function hexdump(base64) {
  const data = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const lines = [];
  for (let at = 0; at < data.length; at += 16) {
    const part = [...data.slice(at, at + 16)];
    const hex = part.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
    lines.push(`${at.toString(16).padStart(8, "0")}  ${hex.padEnd(47)}  ${part.map((byte) => (byte >= 32 && byte < 127 ? String.fromCharCode(byte) : ".")).join("")}`);
  }
  return lines.join("\n");
}

/** The bytes of a value. */
export const octets = (row) => (row.value_base64 === null ? new TextEncoder().encode(row.value ?? "") : Uint8Array.from(atob(row.value_base64), (character) => character.charCodeAt(0)));
export const base64 = (data) => btoa(Array.from(data, (byte) => String.fromCharCode(byte)).join(""));

export const pretty = (row) => {
  if (row.value === null) return row.value_base64 === null ? "" : hexdump(row.value_base64);
  return (row.format === "json" || SCHEMAS[row.format]) && !row.truncated ? indented(row.value) : row.value;
};

const start = (value) => (value === null ? "" : value.length > 120 ? `${value.slice(0, 120)}…` : value);
const preview = (row) => (row.format === "undecodable" ? html`<span class="bad">undecodable</span>`
  : row.value === null ? html`<code>${start(hexdump(row.value_base64).slice(10, 57).trimEnd())}</code>` : start(row.value));
const keyText = (row) => row.key ?? (row.key_base64 === null ? "–" : `base64:${row.key_base64}`);
const millis = (at) => `${clock(at)}.${String(at % 1000).padStart(3, "0")}`;
const localTime = (ms) => { const date = new Date(Number(ms)); return new Date(date - date.getTimezoneOffset() * 60_000).toISOString().slice(0, 19); };

export function Records({ route }) {
  const [topic, partition, offset] = route.name?.split("/") ?? [""];
  if (offset !== undefined) return html`<${One} topic=${topic} partition=${partition} offset=${offset} key=${route.name} />`;
  return html`<h1>Records of <a href=${link("topics", topic)}>${topic}</a></h1>
    <${Choice} topic=${topic} parameters=${route.parameters} key=${JSON.stringify(route.parameters)} />
    ${route.parameters.follow ? html`<${Live} topic=${topic} parameters=${route.parameters} key=${`live${JSON.stringify(route.parameters)}`} />`
      : html`<${Page} topic=${topic} parameters=${route.parameters} />`}`;
}

/** The form: where to begin, and what to show; all of it is in the URL. */
function Choice({ topic, parameters }) {
  const { data } = usePoll(`topics/${encodeURIComponent(topic)}`, {}, 0);
  const [from, choose] = useState(parameters.follow ? "end" : parameters.from ?? "newest");
  const submit = (event) => {
    event.preventDefault();
    const { time, ...found } = Object.fromEntries(new FormData(event.target));
    if (found.from === "time") found.at = String(new Date(time).getTime());
    if (found.from === "newest") found.from = "";
    if (found.from === "end") Object.assign(found, { from: "", follow: "1" });
    location.hash = link("records", topic, found);
  };
  const field = (name, title, placeholder) => html`<label>${title}<input type="search" name=${name} defaultValue=${parameters[name] ?? ""} placeholder=${placeholder} maxlength="1000" /></label>`;
  return html`<search><form class="filters" onSubmit=${submit}>
    <label class="short">Begin at<select name="from" onChange=${(event) => choose(event.target.value)}>${STARTS.map(([value, text]) => html`<option value=${value} selected=${value === from}>${text}</option>`)}</select></label>
    ${from === "time" && html`<label>Local time<input type="datetime-local" name="time" step="1" required defaultValue=${parameters.at ? localTime(parameters.at) : ""} /></label>`}
    ${from === "offset" && html`<label>Offset<input name="at" inputmode="numeric" pattern="[0-9]+" required defaultValue=${parameters.at ?? ""} /></label>`}
    <label class="short">Partition<select name="partition" required=${from === "offset"}><option value="">${from === "offset" ? "" : "all"}</option>
      ${data?.partitions.map((each) => html`<option value=${each.partition} selected=${String(each.partition) === parameters.partition}>${each.partition}</option>`)}</select></label>
    ${field("q", "Contains", "text, in any case")}
    ${field("key", "Key", "plant/*")}
    ${field("attribute", "Header or attribute", "unit=bar")}
    ${field("json", "JSON path", "value > 21.5")}
    <button class="secondary">Show</button>
  </form></search>`;
}

/** In a narrow window the value of a row is below its other cells; the roles keep the table for assistive technology. */
function Rows({ topic, rows }) {
  const heads = [["Time (UTC)"], ["Partition", "right"], ["Offset", "right"], ["Key"], ["Size", "right"], ["Value"]];
  return html`<div class="table records stacked" tabindex="0" role="region" aria-label="Records, table"><table role="table">
    <thead role="rowgroup"><tr role="row">${heads.map(([title, side]) => html`<th role="columnheader" scope="col" class=${side}>${title}</th>`)}</tr></thead>
    <tbody role="rowgroup">${rows.map((row) => html`<tr role="row" key=${`${row.partition}@${row.offset}`}>
      <td role="cell"><a class="row" href=${link("records", `${topic}/${row.partition}/${row.offset}`)}>${millis(row.at)}</a></td>
      <td role="cell" class="right partition">${row.partition}</td><td role="cell" class="right offset">${row.offset}</td><td role="cell"><code>${start(keyText(row))}</code></td>
      <td role="cell" class="right">${bytes(row.value_bytes)}</td><td role="cell" class="value"><code>${preview(row)}</code></td></tr>`)}</tbody>
  </table></div>`;
}

const filtered = ({ q, key, attribute, json }) => Boolean(q || key || attribute || json);

function notes(data) {
  return [
    data.damaged > 0 && `${counted(data.damaged, "record")} cannot be read: the checksum is wrong.`,
    data.expired && "The retention has deleted records between the chosen start and the first one.",
    data.unsearched > 0 && `${number(data.unsearched)} values are longer than 256 KiB, with a schema 16 KiB, and were not searched for the JSON path.`,
  ].filter(Boolean);
}

function Page({ topic, parameters }) {
  const path = `topics/${encodeURIComponent(topic)}/records`;
  const { data, error } = usePoll(path, { limit: 50, ...parameters }, 0);
  const [failed, fail] = useState(null);
  if (error) return html`<${Failure} error=${error} />`;
  if (!data) return html`<p aria-busy="true">Searching…</p>`;
  const older = !parameters.from;
  const cut = filtered(parameters) && data.next !== null;
  return html`<section aria-label="Records">
    ${failed && html`<${Failure} error=${failed} />`}
    ${notes(data).map((text) => html`<p class="warn">${text}</p>`)}
    <${Rows} topic=${topic} rows=${data.rows} />
    <nav class="pages" aria-label="Pages">
      <span role="status">${counted(data.rows.length, "record")}${filtered(parameters) ? ` of ${number(data.examined)} examined` : ""}, about ${number(data.total)} in the log${
        cut && data.rows.length < 50 ? "; the search has not reached the end" : data.next === null ? `; no ${older ? "older" : "newer"} ones` : ""}</span>
      ${parameters.after && html`<a href=${link("records", topic, { ...parameters, after: "" })}>First page</a>`}
      ${data.next !== null && html`<a rel="next" href=${link("records", topic, { ...parameters, after: data.next })}>${cut && data.rows.length < 50 ? "Continue the search" : older ? "Older records" : "Newer records"}</a>`}
      ${data.rows.length > 0 && ["csv", "ndjson"].map((format) => html`<button class="plain" onClick=${() => download(path, parameters, format).then(() => fail(null), fail)}>Export ${format.toUpperCase()}</button>`)}
    </nav>
  </section>`;
}

/** Records as they arrive. A pause keeps the place in the log; what was dropped from the list is counted. */
function Live({ topic, parameters }) {
  const { version } = useContext(Session);
  const [state, set] = useState({ rows: [], seen: 0, examined: 0, behind: false, skipped: 0, notes: [] });
  const [error, fail] = useState(null);
  const [paused, pause] = useState(false);
  const cursor = useRef("");
  useEffect(() => {
    if (paused) return undefined;
    return poll(async (signal) => {
      let behind = false;
      try {
        const { follow, at, ...query } = parameters;
        const found = await request(`topics/${encodeURIComponent(topic)}/records`, { ...query, from: "end", limit: 200, after: cursor.current }, "GET", within(signal));
        if (signal.aborted) return null;
        behind = found.next !== null;
        cursor.current = found.newer;
        set((before) => ({
          ...before, rows: [...found.rows.reverse(), ...before.rows].slice(0, KEPT), seen: before.seen + found.rows.length,
          examined: before.examined + found.examined, behind, notes: notes(found).length ? notes(found) : before.notes,
        }));
        fail(null);
      } catch (problem) {
        if (signal.aborted) return null;
        fail(problem);
        if (problem.status === 401) return null;
      }
      return behind ? EVERY / 5 : EVERY;
    });
  }, [paused, version]);
  const skip = () => {
    cursor.current = "";
    set((before) => ({ ...before, behind: false, skipped: before.skipped + 1 }));
  };
  if (error && (error.status === 401 || error.status === 403)) return html`<${Failure} error=${error} />`;
  return html`<section aria-label="Records">
    <p class="pages"><button class="secondary" onClick=${() => pause(!paused)}>${paused ? "Continue" : "Pause"}</button>
      <span role="status" aria-live="off">${paused ? "Paused" : "Following"}: ${counted(state.seen, "record")}${filtered(parameters) ? ` of ${number(state.examined)} examined` : ""} since the start${
        state.seen > KEPT ? `, the newest ${number(KEPT)} are shown` : ""}${state.skipped ? `, ${counted(state.skipped, "time")} skipped ahead` : ""}</span>
      ${state.behind && html`<span>Older records are still being read.</span> <button class="plain" onClick=${skip}>Skip to the newest</button>`}</p>
    ${error && html`<${Failure} error=${error} />`}
    ${state.notes.map((text) => html`<p class="warn">${text}</p>`)}
    <${Rows} topic=${topic} rows=${state.rows} />
  </section>`;
}

function One({ topic, partition, offset }) {
  const { data, error } = usePoll(`topics/${encodeURIComponent(topic)}/records/${partition}/${offset}`, {}, 0);
  const title = html`<h1><a href=${link("records", topic)}>${topic}</a>, partition ${partition}, offset ${offset}</h1>`;
  if (error) return html`${title}<${Failure} error=${error} />`;
  if (!data) return html`${title}<p aria-busy="true">Loading…</p>`;
  return html`${title}
    <h2>Value${data.format === "binary" ? " (hexadecimal: it is not text)" : data.format === "json" ? " (JSON)" : SCHEMAS[data.format] ? ` (${SCHEMAS[data.format]}, decoded with its schema)` : ""}</h2>
    <${Value} row=${data} name=${`${topic}-${partition}-${offset}`} />
    <h2>Record</h2>
    <${Facts} facts=${[
      ["Appended (UTC)", millis(data.at)], ["Event time (UTC)", data.event_time_at === null ? null : millis(data.event_time_at)], ["Key", keyText(data)], ["MQTT topic", data.topic],
      ["Id", data.id], ["Message type", data.msg_type], ["Content type", data.content_type], ["Size", bytes(data.value_bytes)],
      ...(data.problem ? [["Schema not used", html`<span class="warn">${data.problem}</span>`]] : []),
    ]} />
    ${data.headers.length > 0 && html`<h2>Headers</h2><${Facts} facts=${data.headers.map((each) => [each.name, each.value ?? html`<code>base64:${each.value_base64}</code>`])} />`}
    <nav class="pages" aria-label="Neighbours"><a href=${link("records", topic, { partition, from: "offset", at: offset })}>Records from here</a>
      <a href=${link("records", topic, { partition, from: "time", at: data.at })}>Records of this time</a></nav>`;
}

/** A value: decoded or raw, as it is in the log; copied and saved as it is. */
export function Value({ row, name }) {
  const [raw, showRaw] = useState(false);
  if (row.value === null && row.value_base64 === null) return html`<p class="bad">The attributes do not fit the length of the message: another program wrote it.</p>`;
  const save = () => saveFile(`${name}.${{ json: "json", text: "txt" }[row.format] ?? "bin"}`, octets(row));
  return html`<pre tabindex="0" class=${row.value === null || (raw && row.format !== "json") ? "hex" : ""}><code>${raw ? (row.format === "json" ? row.value : hexdump(base64(octets(row)))) : pretty(row)}</code></pre>
    <div class="pages">${row.value !== null && html`<button class="plain" aria-pressed=${raw} onClick=${() => showRaw(!raw)}>${row.format === "json" ? "As it was sent" : "Hexadecimal"}</button>`}
      <button class="plain" onClick=${save}>Save</button></div>`;
}
