// Subscriptions and retained messages of the MQTT broker.
import { age, bytes, clock, Failure, html, link, number, usePoll } from "./lib.js";
import { Message } from "./messages.js";
import { List } from "./table.js";

export function Subscriptions({ route }) {
  return html`<h1>Subscriptions</h1><${List} title="Subscriptions" route=${route} initial="filter" rowKey=${(row) => `${row.filter}\0${row.client_id}\0${row.group}`}
    empty=${html`No client has a subscription. Subscribe in a terminal: <code>penstock mqtt sub 'demo/#'</code>`}
    filters=${[{ name: "q", title: "Topic filter contains" }]}
    columns=${[
      { title: "Topic filter", sort: "filter", cell: (row) => html`<code>${row.filter}</code>` },
      { title: "Client", sort: "client_id", cell: (row) => html`<a href=${link("clients", row.client_id)}>${row.client_id}</a>` },
      { title: "State", cell: (row) => (row.connected ? "connected" : html`<span class="dim">offline</span>`) },
      { title: "QoS", right: true, cell: (row) => row.qos },
      { title: "Shared group", cell: (row) => row.group ?? "–" },
      { title: "No Local", cell: (row) => (row.no_local ? "yes" : "no") },
      { title: "Retain As Published", cell: (row) => (row.retain_as_published ? "yes" : "no") },
    ]} />`;
}

export function Retained({ route }) {
  if (route.name !== null) return html`<${RetainedMessage} topic=${route.name} key=${route.name} />`;
  return html`<h1>Retained messages</h1><${List} title="Retained messages" route=${route} initial="topic" rowKey=${(row) => row.topic}
    empty=${html`There is no retained message. Publish one: <code>penstock mqtt pub demo/topic hello --retain</code>`}
    open=${(row) => link("retained", row.topic)}
    filters=${[{ name: "filter", title: "Topic filter", placeholder: "plant/#" }, { name: "q", title: "Topic contains" }]}
    columns=${[
      { title: "Topic", sort: "topic", cell: (row) => html`<code>${row.topic}</code>` },
      { title: "Size", sort: "bytes", right: true, cell: (row) => bytes(row.bytes) },
      { title: "QoS", right: true, cell: (row) => number(row.qos) },
      { title: "Published", right: true, cell: (row) => `${age(row.age_s)} ago` },
      { title: "Expires in", right: true, cell: (row) => age(row.expires_in_s) },
    ]} />`;
}

function RetainedMessage({ topic }) {
  const { data, error } = usePoll(`retained/${encodeURIComponent(topic)}`, {}, 0); // once: each read is recorded in the audit trail
  return html`<h1><code>${topic}</code></h1>
    <p>Retained message${data && `, published ${clock(data.at)} UTC`}. <a href=${link("messages", null, { filter: topic })}>Follow this topic</a></p>
    ${error ? html`<${Failure} error=${error} />` : data ? html`<${Message} row=${data} />` : html`<p aria-busy="true">Loading…</p>`}`;
}
