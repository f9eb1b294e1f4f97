// The cluster of the node: members with role and lag, members of etcd, and what needs attention.
import { age, bytes, Failure, html, link, number, Reason, usePoll } from "./lib.js";
import { Facts, Plain } from "./table.js";

/** Whether the node is in a cluster; the page says it, so that no request is needed. */
export const inCluster = document.documentElement.dataset.cluster !== "";

export function Cluster() {
  if (!inCluster) return html`<h1>Cluster</h1><p>This node is not in a cluster: its configuration has no section <code>cluster</code>.</p>`;
  return html`<${Members} />`;
}

function Members() {
  const { data, error } = usePoll("cluster");
  if (!data) return html`<h1>Cluster</h1>${error ? html`<${Failure} error=${error} />` : html`<p aria-busy="true">Loading…</p>`}`;
  const ready = data.members.filter((row) => row.role === "standby" && row.ready).length;
  return html`<h1>Cluster ${data.name}</h1>
    ${error && html`<${Failure} error=${error} />`}
    ${data.reasons.map((reason) => html`<${Reason} reason=${reason} />`)}
    <${Facts} facts=${[
      ["Active node", data.active], ["Term", data.term], ["Standbys that can take over", number(ready)],
      ["Commits wait for etcd", data.commit_wait_s === 0 ? "no" : html`<span class=${data.commit_wait_s >= 1 ? "warn" : ""}>${age(data.commit_wait_s)}</span>`],
      ...Object.entries(data.commits).map(([log, commit]) => [`Last commit, ${log}`, number(commit)]),
    ]} />
    <h2>Members</h2>
    <${Plain} title="Members" rows=${data.members} columns=${[
      { title: "Node", cell: (row) => row.node },
      { title: "Role", cell: (row) => html`<span class=${row.role === "blocked" ? "bad" : row.role === "loading" ? "warn" : ""}>${row.role}</span>` },
      { title: "Ready", cell: (row) => (row.ready ? "yes" : html`<span class="warn">no</span>`) },
      { title: "Lag, commits", right: true, cell: (row) => number(row.lag_commits) },
      { title: "Behind", right: true, cell: (row) => (row.lag_s === 0 ? "–" : age(row.lag_s)) },
      { title: "MQTT", cell: (row) => html`<code>${row.mqtt}</code>` },
      { title: "HTTP", cell: (row) => html`<code>${row.http}</code>` },
      { title: "Version", cell: (row) => row.version },
    ]} />
    <h2>etcd</h2>
    <${Plain} title="etcd" rows=${data.etcd} columns=${[
      { title: "Member", cell: (row) => html`<code>${row.endpoint}</code>` },
      { title: "State", cell: (row) => (row.problem !== null ? html`<span class="bad">no answer</span>` : row.leads === null ? "answers" : row.leads ? "leader" : "follower") },
      { title: "Database", right: true, cell: (row) => bytes(row.used_bytes) },
      { title: "Quota", right: true, cell: (row) => bytes(row.quota_bytes) },
      { title: "Alarms", cell: (row) => (row.alarms.length ? html`<span class="bad">${row.alarms.join(", ")}</span>` : row.version === null ? "–" : "none") },
      { title: "Version", cell: (row) => row.version ?? "–" },
    ]} />
    <h2>Maintenance</h2>
    <p>Before maintenance of ${data.active ?? "the active node"}, hand over to a standby in a terminal: <code>penstock cluster handover</code>. Clients connect again. Then load this page again: it is redirected to the new active node.
      The state of this node is on the <a href=${link("overview")}>overview</a>.</p>`;
}
