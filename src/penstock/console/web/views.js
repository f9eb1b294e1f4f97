// Clients, topics, consumer groups, events, audit trail: a list, and a page for one row.
import { useContext, useState } from "preact/hooks";
import { age, bytes, clock, counted, Failure, html, lag, link, number, oldest, rate, request, retention, Session, useFocusAfter, usePoll } from "./lib.js";
import { Facts, List, Plain } from "./table.js";

export function Clients({ route }) {
  if (route.name !== null) return html`<${Client} name=${route.name} key=${route.name} />`;
  return html`<h1>MQTT clients</h1>
    <p><a href=${link("subscriptions")}>Subscriptions</a> · <a href=${link("retained")}>Retained messages</a></p><${List} title="MQTT clients" route=${route} initial="-queued" rowKey=${(row) => row.client_id}
    empty=${html`No client is connected, and none has left a session. Publish a first message: <code>penstock mqtt pub demo/topic hello</code>`}
    open=${(row) => link("clients", row.client_id)}
    filters=${[{ name: "q", title: "Client id contains" }, { name: "state", title: "State",
      options: [["", "all"], ["connected", "connected"], ["offline", "offline"], ["queued", "with queued messages"], ["limited", "at a limit"]] }]}
    columns=${[
      { title: "Client", sort: "client_id", cell: (row) => row.client_id },
      { title: "State", sort: "connected", cell: (row) => (row.connected ? "connected" : html`<span class="dim">offline</span>`) },
      { title: "Queued", sort: "queued", right: true, cell: (row) => html`<span class=${row.queued ? "warn" : ""}>${number(row.queued)}</span>` },
      { title: "Limits reached", cell: (row) => row.limits.length ? html`<span class="bad">${row.limits.join(", ")}</span>` : "–" },
      { title: "In flight", sort: "inflight", right: true, cell: (row) => number(row.inflight) },
      { title: "Subscriptions", sort: "subscriptions", right: true, cell: (row) => number(row.subscriptions) },
      { title: "User", sort: "username", cell: (row) => row.username ?? "–" },
      { title: "Address", cell: (row) => row.address ?? "–" },
    ]} />`;
}

function Client({ name }) {
  const { data, error } = usePoll(`clients/${encodeURIComponent(name)}`);
  if (error && !data) return html`<h1>${name}</h1><${Failure} error=${error} />`;
  if (!data) return html`<h1>${name}</h1><p aria-busy="true">Loading…</p>`;
  const { client, subscriptions, will_topic } = data;
  return html`<h1>${name}</h1>
    ${error && html`<${Failure} error=${error} />`}
    <${Disconnect} client=${client} />
    <${Facts} facts=${[
      ["State", client.connected ? `connected for ${age(client.connected_s)}` : "offline"],
      ["Address", client.address], ["Protocol", client.protocol], ["User", client.username], ["Owner", client.owner || null],
      ["Last packet", client.silent_s == null ? null : `${age(client.silent_s)} ago`], ["Keep alive", client.keep_alive_s ? age(client.keep_alive_s) : null],
      ["Session", client.persistent ? "persistent" : "ends with the connection"], ["Session expires in", client.ends_in_s == null ? null : age(client.ends_in_s)],
      ["Queued", `${counted(client.queued, "message")}, ${bytes(client.queued_bytes)}`],
      ["In flight", `${number(client.inflight)}${client.inflight_limit ? ` of ${number(client.inflight_limit)}` : ""}`],
      ["Without acknowledgement", number(client.unacknowledged)], ["Limits reached", client.limits.join(", ") || null], ["Will topic", will_topic],
    ]} />
    <h2>Subscriptions</h2>
    <p>${number(subscriptions.length)} of ${number(client.subscriptions)}</p>
    <${Plain} title="Subscriptions" rows=${subscriptions} columns=${[
      { title: "Topic filter", cell: (row) => html`<code>${row.filter}</code>` }, { title: "QoS", right: true, cell: (row) => row.qos },
      { title: "Shared group", cell: (row) => row.group ?? "–" }, { title: "No Local", cell: (row) => (row.no_local ? "yes" : "no") },
    ]} />`;
}

function Disconnect({ client }) {
  const [asked, ask] = useState(null);
  const [error, fail] = useState(null);
  const place = useFocusAfter(asked === null);
  const { operates } = useContext(Session);
  const send = (dryRun) => request(`clients/${encodeURIComponent(client.client_id)}`, { dry_run: dryRun ? "1" : "" }, "DELETE")
    .then((found) => { fail(null); ask(dryRun ? found : null); }, fail);
  if (!client.connected || !operates) return null;
  return html`<div class="action">
    ${asked === null ? html`<button class="secondary" ref=${place} onClick=${() => send(true)}>Disconnect…</button>` : html`
      <p role="alert" tabindex="-1" ref=${place}>Disconnect <b>${client.client_id}</b>? ${asked.client.persistent
        ? `Its session stays; ${counted(asked.client.queued, "message")} ${asked.client.queued === 1 ? "is" : "are"} queued.`
        : `Its session ends: ${counted(asked.client.queued + asked.client.inflight, "message")} for it will be lost.`} Most clients connect again.</p>
      <button onClick=${() => send(false)}>Disconnect</button> <button class="secondary" onClick=${() => ask(null)}>Cancel</button>`}
    ${error && html`<${Failure} error=${error} />`}
  </div>`;
}

export function Topics({ route }) {
  if (route.name !== null) return html`<${Topic} name=${route.name} key=${route.name} />`;
  return html`<h1>TubeMQ topics</h1><p><a href=${link("brokers")}>Brokers</a></p><${List} title="TubeMQ topics" route=${route} initial="-lag_records" rowKey=${(row) => row.topic}
    empty=${html`There is no topic. Create one: <code>penstock tube topic create NAME</code>, or in <code>tube.topics</code> of the configuration`}
    open=${(row) => link("topics", row.topic)}
    columns=${[
      { title: "Topic", sort: "topic", cell: (row) => row.topic },
      { title: "Records/s", sort: "rate", right: true, cell: (row) => rate(row.rate) },
      { title: "Size", sort: "bytes", right: true, cell: (row) => bytes(row.bytes) },
      { title: "Partitions", right: true, cell: (row) => number(row.partitions) },
      { title: "Newest record", cell: (row) => (row.last_at ? `${clock(row.last_at)} UTC` : "–") },
      { title: "Retention", cell: (row) => retention(row.retention) },
      { title: "Groups", right: true, cell: (row) => number(row.groups) },
      { title: "Largest lag", sort: "lag_records", right: true, cell: lag },
      { title: "Behind", sort: "lag_s", right: true, cell: oldest },
    ]} />`;
}

/** Brokers of the master: their topics and offsets are on the pages of the nodes that have them. */
export function Brokers({ route }) {
  const accepts = (value, why = null) => (value ? "yes" : html`<span class="bad">no${why ? `: ${why}` : ""}</span>`);
  return html`<h1>TubeMQ brokers</h1><p><a href=${link("topics")}>Topics</a> and groups of this console are those of this node's broker.</p>
    <${List} title="TubeMQ brokers" route=${route} initial="broker" rowKey=${(row) => row.broker}
    columns=${[
      { title: "Broker", sort: "broker", cell: (row) => row.broker },
      { title: "State", sort: "state", cell: (row) => html`<span class=${row.state === "running" ? "" : "bad"}>${row.state}</span>` },
      { title: "Address", cell: (row) => html`<code>${row.address}</code>${row.tls_port === null ? "" : `, TLS ${row.tls_port}`}` },
      { title: "Administration", cell: (row) => (row.http === null ? "–" : html`<code>${row.http}</code>`) },
      { title: "Topics", sort: "topics", right: true, cell: (row) => number(row.topics) },
      { title: "Accepts records", cell: (row) => accepts(row.accepts_records, row.failure) },
      { title: "Accepts consumers", cell: (row) => accepts(row.accepts_consumers) },
      { title: "Last heartbeat", right: true, cell: (row) => (row.silent_s === null ? "–" : `${age(row.silent_s)} ago`) },
    ]} />`;
}

function Topic({ name }) {
  const { data, error } = usePoll(`topics/${encodeURIComponent(name)}`);
  if (error && !data) return html`<h1>${name}</h1><${Failure} error=${error} />`;
  if (!data) return html`<h1>${name}</h1><p aria-busy="true">Loading…</p>`;
  const { topic } = data;
  return html`<h1>${name}</h1>
    ${error && html`<${Failure} error=${error} />`}
    <p><a href=${link("records", name)}>Browse records</a> · <a href=${link("records", name, { follow: 1 })}>Follow new records</a></p>
    <${Facts} facts=${[
      ["Records/s", rate(topic.rate)], ["Size", bytes(topic.bytes)], ["Retention", retention(topic.retention)], ["Accepts records", topic.accepts_records ? "yes" : "no"],
      ["Accepts consumers", topic.accepts_consumers ? "yes" : "no"], ["Newest record", topic.last_at ? `${clock(topic.last_at)} UTC` : null],
    ]} />
    <h2>Consumer groups</h2>
    ${data.group_names.length === 0 ? html`<p>No group has offsets in this topic.</p>`
      : html`<ul>${data.group_names.map((group) => html`<li><a href=${link("groups", group)}>${group}</a></li>`)}</ul>`}
    <h2>Partitions</h2>
    <p>${number(data.partitions.length)} of ${number(topic.partitions)}</p>
    <${Plain} title="Partitions" rows=${data.partitions} columns=${[
      { title: "Partition", right: true, cell: (row) => html`<a href=${link("records", name, { partition: row.partition })}>${row.partition}</a>` },
      { title: "Records", right: true, cell: (row) => `${row.records_exact ? "" : "≤ "}${number(row.records)}` },
      { title: "First offset", right: true, cell: (row) => row.first_offset }, { title: "End offset", right: true, cell: (row) => row.end_offset },
    ]} />`;
}

export function Groups({ route }) {
  if (route.name !== null) return html`<${Group} name=${route.name} key=${route.name} />`;
  return html`<h1>Consumer groups</h1><${List} title="Consumer groups" route=${route} initial="-lag_records" rowKey=${(row) => row.group}
    empty=${html`There is no group. A group exists once a consumer has registered: <code>penstock tube consume TOPIC --group NAME</code>`}
    open=${(row) => link("groups", row.group)}
    columns=${[
      { title: "Group", sort: "group", cell: (row) => row.group },
      { title: "State", cell: (row) => row.state },
      { title: "Members", sort: "members", right: true, cell: (row) => number(row.members) },
      { title: "Topics", cell: (row) => row.topics.map((topic, index) => html`${index ? ", " : ""}<a href=${link("topics", topic)}>${topic}</a>`) },
      { title: "Lag", sort: "lag_records", right: true, cell: (row) => html`<span class=${row.lag_records ? "warn" : ""}>${lag(row)}</span>` },
      { title: "Behind", sort: "lag_s", right: true, cell: oldest },
    ]} />`;
}

function Group({ name }) {
  const { operates } = useContext(Session);
  const { data, error } = usePoll(`groups/${encodeURIComponent(name)}`);
  if (error && !data) return html`<h1>${name}</h1><${Failure} error=${error} />`;
  if (!data) return html`<h1>${name}</h1><p aria-busy="true">Loading…</p>`;
  const { group } = data;
  return html`<h1>${name}</h1>
    ${error && html`<${Failure} error=${error} />`}
    <${Facts} facts=${[["State", group.state], ["Members", number(group.members)], ["Lag", `${lag(group)} ${group.lag_records === 1 ? "record" : "records"}`], ["Oldest record", oldest(group)]]} />
    ${operates && group.partitions > 0 && (group.members === 0 ? html`<${Reset} group=${name} partitions=${data.partitions} />`
      : html`<p>Its offsets can be reset while it has no members: stop its consumers first.</p>`)}
    <h2>Partitions</h2>
    <p>${number(data.partitions.length)} of ${number(group.partitions)}</p>
    <${Plain} title="Partitions" rows=${data.partitions} columns=${[
      { title: "Topic", cell: (row) => html`<a href=${link("topics", row.topic)}>${row.topic}</a>` },
      { title: "Partition", right: true, cell: (row) => row.partition }, { title: "Offset", right: true, cell: (row) => row.offset },
      { title: "End", right: true, cell: (row) => row.end_offset }, { title: "Lag", right: true, cell: lag }, { title: "Behind", right: true, cell: oldest },
      { title: "Member", cell: (row) => row.member ?? "–" },
    ]} />
    <h2>Members</h2>
    ${data.members.length === 0 ? html`<p>No consumer is registered: the lag grows with each record.</p>` : html`<${Plain} title="Members" rows=${data.members} columns=${[
      { title: "Member", cell: (row) => row.member }, { title: "Address", cell: (row) => row.address },
      { title: "Partitions", right: true, cell: (row) => number(row.partitions) }, { title: "Last heartbeat", right: true, cell: (row) => `${age(row.silent_s)} ago` },
    ]} />`}`;
}

/** Reset of a group's offsets: a preview first, whose counts the button repeats. */
function Reset({ group, partitions }) {
  const [plan, show] = useState(null);
  const [done, finish] = useState(null);
  const [error, fail] = useState(null);
  const [kind, choose] = useState("earliest");
  const [only, limit] = useState({});
  const place = useFocusAfter(plan);
  const send = (to, where, digest = null) => request(`groups/${encodeURIComponent(group)}/reset`, { to, ...where, digest, dry_run: digest === null ? "1" : "" }, "POST")
    .then((found) => { fail(null); show(found.dry_run ? found : null); finish(found.dry_run ? null : found); }, (problem) => { show(null); fail(problem); });
  const preview = (event) => {
    event.preventDefault();
    const given = Object.fromEntries(new FormData(event.target));
    const [topic, partition] = (given.place ?? "").split("/");
    const where = topic ? { topic, partition } : {};
    limit(where);
    const to = { time: () => String(new Date(given.time).getTime()), shift: () => `${given.direction}${given.records}`, offset: () => `offset:${given.offset}` };
    send(to[kind]?.() ?? kind, where);
  };
  const records = (value, what) => value > 0 && `${counted(value, "record")} ${value === 1 ? "is" : "are"} ${what}`;
  const words = (found) => [records(found.read_again, "read again"), records(found.skipped, "skipped")]
    .filter(Boolean).join(", ") || "no offset changes";
  return html`<details><summary>Reset offsets</summary>
    <form class="filters" onSubmit=${preview}>
      <label>To<select value=${kind} onChange=${(event) => { choose(event.target.value); show(null); }}>
        <option value="earliest">the earliest record</option><option value="latest">the end: skip everything</option><option value="time">a time</option>
        <option value="shift">a number of records back or forward</option><option value="offset">an offset of one partition</option></select></label>
      ${kind === "time" && html`<label>Local time<input type="datetime-local" name="time" required step="1" /></label>`}
      ${kind === "shift" && html`<label>Direction<select name="direction"><option value="-">back</option><option value="+">forward</option></select></label>
        <label>Records in each partition<input type="number" name="records" required min="1" max="999999999999" step="1" /></label>`}
      ${kind === "offset" && html`<label>Offset<input type="number" name="offset" required min="0" step="28" /></label>`}
      <label>Partition<select name="place">${kind !== "offset" && html`<option value="">all</option>`}
        ${partitions.map((row) => html`<option value=${`${row.topic}/${row.partition}`}>${row.topic}, ${row.partition}</option>`)}</select></label>
      <button class="secondary" ref=${place}>Preview</button>
    </form>
    ${error && html`<${Failure} error=${error} />`}
    ${done && html`<p role="status">The offsets of ${counted(done.partitions, "partition")} were reset: ${words(done)}.</p>`}
    ${plan && html`<div class="action"><p role="alert">${plan.exact ? "" : "About: "}${words(plan)}, in ${counted(plan.partitions, "partition")}${/^\d+$/.test(plan.to) ? `, to ${clock(Number(plan.to))} UTC` : ""}.</p>
      <${Plain} title="Preview" rows=${plan.moves} columns=${[
        { title: "Topic", cell: (row) => row.topic }, { title: "Partition", right: true, cell: (row) => row.partition },
        { title: "From", right: true, cell: (row) => row.from_offset }, { title: "To", right: true, cell: (row) => row.to_offset },
        { title: "Records", right: true, cell: (row) => (row.records > 0 ? `+${number(row.records)}` : number(row.records)) },
      ]} />
      <button onClick=${() => { show(null); send(plan.to, only, plan.digest); }}>Reset: ${words(plan)}</button> <button class="secondary" onClick=${() => show(null)}>Cancel</button></div>`}
  </details>`;
}

/** The audit trail. It is read once: it may have 64 MiB. */
export function Audit({ route }) {
  return html`<h1>Audit trail</h1><p>Changes, and requests for values of keys, records and dead letters, newest first. <a href=${link("events")}>Events</a></p>
    <${List} title="Audit trail" route=${route} every=${0} filters=${[{ name: "q", title: "Contains" }]} rowKey=${(row) => JSON.stringify(row)}
    columns=${[
      { title: "Time (UTC)", cell: (row) => row.time.slice(0, 23).replace("T", " ") },
      { title: "Action", cell: (row) => row.method },
      { title: "User", cell: (row) => row.user || row.credential },
      { title: "Address", cell: (row) => row.address },
      { title: "Result", cell: (row) => (row.result ? "done" : html`<span class="bad">${row.failed?.join("; ") || row.errMsg || "failed"}</span>`) },
      { title: "Details", cell: (row) => html`<code>${Object.entries(row.parameters).map(([name, value]) => `${name}=${value}`).join(" ")}</code>` },
    ]} />`;
}

export function Events() {
  const { administers } = useContext(Session);
  const { data, error } = usePoll("events", { limit: 200 });
  return html`<h1>Events</h1>${error && html`<${Failure} error=${error} />`}${administers && html`<p><a href=${link("audit")}>Audit trail</a></p>`}${data && html`<p>The newest ${number(data.rows.length)} of ${number(data.number)} since the start; the node keeps 2,000.</p>
    <${EventTable} rows=${data.rows} title="Events" />`}`;
}

/** Events as a table. */
export function EventTable({ rows, title }) {
  return html`<${Plain} title=${title} rows=${rows} stacked columns=${[
    { title: "Time (UTC)", cell: (row) => clock(row.at) }, { title: "Level", cell: (row) => html`<span class=${row.level === "info" ? "" : row.level === "warning" ? "warn" : "bad"}>${row.level}</span>` },
    { title: "Part", cell: (row) => row.part }, { title: "Event", cell: (row) => `${row.text}${row.count > 1 ? ` (${number(row.count)} times)` : ""}` },
  ]} />`;
}
