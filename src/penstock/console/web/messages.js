// Live MQTT messages by topic filter, and a form to publish one.
import { useContext, useState } from "preact/hooks";
import { ApiError, bytes, clock, Failure, html, link, number, request, Session, useFocusAfter } from "./lib.js";
import { Live } from "./live.js";
import { base64, hexdump, octets, pretty, SCHEMAS } from "./records.js";
import { Facts } from "./table.js";

/** Formats whose value the node shows as JSON. */
const BINARY = { cbor: "CBOR", msgpack: "MessagePack", sparkplug: "Sparkplug B", ...SCHEMAS };
const VIEWS = [["auto", "decoded"], ["text", "as text"], ["hex", "hexadecimal"]];

/** The payload as text in one of the views. */
function payloadText(row, view) {
  if (view === "hex") return hexdump(base64(octets(row)));
  if (view === "text") return new TextDecoder().decode(octets(row));
  return pretty({ ...row, format: BINARY[row.format] ? "json" : row.format });
}

/** A message with its properties; used for live and retained messages. */
export function Message({ row }) {
  const [view, choose] = useState("auto");
  return html`<${Facts} facts=${[
      ["Content Type", row.content_type], ["Response Topic", row.response_topic], ["Correlation Data", row.correlation_base64 && hexdump(row.correlation_base64).slice(10, 57).trim()],
      ["Expires in", row.expires_in_s == null ? null : `${number(row.expires_in_s)} s`], ["Payload", `${bytes(row.bytes)}, ${BINARY[row.format] ?? row.format}${row.text_payload ? ", UTF-8 by its publisher" : ""}`],
      ["Schema not used", row.problem && html`<span class="warn">${row.problem}</span>`],
      ...row.user_properties.map(({ name, value }) => [`User Property ${name}`, value]),
    ].filter(([, value]) => value != null)} />
    <p class="pages">${VIEWS.map(([value, title]) => html`<button class="plain" aria-pressed=${view === value} onClick=${() => choose(value)}>${title}</button>`)}
      ${row.truncated && html`<span class="warn">the first ${bytes(octets(row).length)} of ${bytes(row.bytes)}</span>`}</p>
    <pre tabindex="0" class=${view === "hex" || row.value === null ? "hex" : ""}><code>${payloadText(row, view)}</code></pre>`;
}

export function Messages({ route }) {
  const { operates, version } = useContext(Session);
  const { filter = "", q = "" } = route.parameters;
  const subscribe = (event) => {
    event.preventDefault();
    location.hash = link("messages", null, Object.fromEntries(new FormData(event.target)));
  };
  return html`<h1>Messages</h1><p><a href=${link("tree")}>Topic tree</a> · <a href=${link("retained")}>Retained messages</a></p>
    <search><form class="filters" key=${`${filter}\0${q}`} onSubmit=${subscribe}>
      <label>Topic filter<input name="filter" required defaultValue=${filter} placeholder="plant/#" autocapitalize="off" spellcheck=${false} /></label>
      <label>Contains<input type="search" name="q" defaultValue=${q} /></label>
      <button class="secondary">Subscribe</button>
    </form></search>
    ${operates && html`<${Publish} topic=${/[+#]/.test(filter) ? "" : filter} />`}
    ${filter ? html`<${Live} key=${`${filter}\0${q}\0${version}`} title="Live messages" path="messages" parameters=${{ filter, q }} file="penstock-messages.ndjson" row=${(row) => html`<${Arrived} key=${row.number} row=${row} />`} />`
      : html`<p>Subscribe to see messages as they arrive, beginning with the retained ones. They are delivered with QoS 0, and within the permissions of the user.</p>`}`;
}

function Arrived({ row }) {
  const [opened, open] = useState(false); // a closed one has no details: 2,000 messages may arrive in a second
  return html`<details class="letter message" onToggle=${(event) => open(event.target.open)}><summary><code>${row.topic}</code>${row.retain ? html` <span class="dim">retained</span>` : ""}${" "}
    <small class="dim">${clock(row.at).slice(11)} UTC, ${bytes(row.bytes)}</small> <span>${start(row)}</span></summary>${opened && html`<${Message} row=${row} />`}</details>`;
}

export function start(row) {
  const text = row.value ?? hexdump(row.value_base64 ?? "").slice(10, 57).trimEnd();
  return text.length > 120 ? `${text.slice(0, 120)}…` : text;
}

const unhex = (text) => {
  const digits = text.replaceAll(/\s/g, "");
  if (!/^([0-9a-f]{2})*$/i.test(digits)) throw new ApiError(0, { what: "The payload is not hexadecimal.", hint: "Use pairs of 0-9 and a-f, such as 0a ff." });
  return Uint8Array.from(digits.match(/../g) ?? [], (pair) => parseInt(pair, 16));
};

/** Publish a message with its properties. A retained one is confirmed, because it stays and replaces another. */
function Publish({ topic }) {
  const [error, fail] = useState(null);
  const [done, finish] = useState(null);
  const [asked, ask] = useState(null);
  const place = useFocusAfter(asked === null);
  const send = ([parameters, payload]) => request("messages", parameters, "POST", undefined, payload)
    .then((found) => { fail(null); finish(found); ask(null); }, (problem) => { fail(problem); finish(null); ask(null); });
  const submit = (event) => {
    event.preventDefault();
    const { payload, format, user_properties: pairs, ...rest } = Object.fromEntries(new FormData(event.target));
    try {
      const message = [{ ...rest, user_property: pairs.split("\n").filter((line) => line.trim()) }, format === "hex" ? unhex(payload) : payload];
      finish(null);
      fail(null);
      if (rest.retain) ask(message);
      else send(message);
    } catch (problem) {
      fail(problem);
    }
  };
  return html`<details class="publish"><summary>Publish a message</summary><form onSubmit=${submit} onInput=${() => ask(null)}>
    <div class="filters"><label>Topic<input name="topic" required defaultValue=${topic} autocapitalize="off" spellcheck=${false} /></label>
      <label class="short">QoS<select name="qos"><option>0</option><option selected>1</option><option>2</option></select></label>
      <label class="short">Payload is<select name="format"><option value="text">text</option><option value="hex">hexadecimal</option></select></label></div>
    <label>Payload<textarea name="payload" rows="4" spellcheck=${false}></textarea></label>
    <label><input type="checkbox" name="retain" value="1" /> Retain</label>
    <label><input type="checkbox" name="text" value="1" /> Payload Format Indicator: UTF-8</label>
    <div class="filters"><label>Content Type<input name="content_type" placeholder="application/json" /></label><label>Response Topic<input name="response_topic" /></label>
      <label>Correlation Data (hexadecimal)<input name="correlation" /></label><label>Message Expiry Interval (s)<input name="expiry_s" type="number" min="1" max="4294967295" /></label></div>
    <label>User Properties, one NAME=VALUE per line<textarea name="user_properties" rows="2" spellcheck=${false}></textarea></label>
    ${error && html`<${Failure} error=${error} />`}
    ${done && html`<p role="status">Published to ${done.topic}: ${bytes(done.bytes)}, QoS ${done.qos}${done.retain ? ", retained" : ""}.</p>`}
    ${asked === null ? html`<button ref=${place}>Publish</button>` : html`<div class="action" tabindex="-1" ref=${place}><p role="alert">${asked[1].length === 0 ? "The retained message of this topic is deleted." : "The message stays in the broker, and replaces the retained message of this topic."}</p>
      <button type="button" onClick=${() => send(asked)}>Publish retained</button> <button type="button" class="secondary" onClick=${() => ask(null)}>Cancel</button></div>`}
  </form></details>`;
}
