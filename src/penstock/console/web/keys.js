// Keys of the state store: a list, a page for one key with its value and history, forms that write, and live changes.
import { useContext, useMemo, useState } from "preact/hooks";
import { age, bytes, clock, Failure, html, indented, link, request, Session, useFocusAfter, usePoll } from "./lib.js";
import { Live } from "./live.js";
import { start } from "./messages.js";
import { Facts, List } from "./table.js";

const keyText = (row) => row.key ?? `base64:${row.key_base64}`;
/** A key as the last part of a path, and its parameters. In base64: keys that a path would lose, because they mean a folder. */
const inPath = (key) => (key === "." || key === ".." ? [btoa(key), { encoding: "base64" }] : [key, {}]);
/** The page of a key. In base64: also keys that are not text. */
const keyLink = (row) => link("keys", ...(row.key === null ? [row.key_base64, { encoding: "base64" }] : inPath(row.key)));
const MAX_LINES = 1000; // of a comparison

export function Keys({ route }) {
  const { operates } = useContext(Session);
  if (route.name !== null) return html`<${Key} name=${route.name} encoding=${route.parameters.encoding} key=${`${route.name}\0${route.parameters.encoding}`} />`;
  return html`<h1>State store keys</h1><p><a href=${link("watch", null, { prefix: route.parameters.prefix })}>Watch changes</a></p><${List} title="State store keys" route=${route} rowKey=${(row) => row.key_base64}
    empty=${html`There is no key. Set one: <code>penstock kv set demo/key 21.5</code>`}
    open=${keyLink}
    filters=${[{ name: "prefix", title: "Prefix", placeholder: "plant/line-3/" }, { name: "q", title: "Contains" }]}
    columns=${[
      { title: "Key", cell: (row) => html`<code>${keyText(row)}</code>` },
      { title: "Size", right: true, cell: (row) => bytes(row.value_bytes) },
      { title: "Changed", right: true, cell: (row) => `${age(row.version_age_s)} ago` },
      { title: "Expires in", right: true, cell: (row) => age(row.expires_in_s) },
      { title: "Fencing token", cell: (row) => row.fencing_token ?? "–" },
      { title: "Created by", cell: (row) => row.owner || "–" },
    ]} />${operates && html`<${NewKey} />`}`;
}

/** A value as text: JSON with line breaks, other text, or base64. */
function shown(value, encoded) {
  if (value === null) return encoded ?? "";
  try {
    if (JSON.parse(value) !== undefined) return indented(value);
  } catch { /* it is not JSON */ }
  return value;
}

function Key({ name, encoding }) {
  const { operates } = useContext(Session);
  const [{ changes, message, draft }, change] = useState({ changes: 0, message: null });
  const changed = (text, kept) => change({ changes: changes + 1, message: text, draft: kept });
  const { data, error } = usePoll(`keys/${encodeURIComponent(name)}`, { changes, encoding }, 0); // once: each read is recorded in the audit trail
  const told = message && html`<p role="status">${message}</p>`;
  const title = encoding ? `${encoding}:${name}` : name;
  const watched = html`<${WatchedKey} key="watched" name=${name} encoding=${encoding} version=${data?.version} load=${() => changed(null)} />`;
  if (error) return html`<h1><code>${title}</code></h1>${told}<${Failure} error=${error} />${error.status === 404 && watched}`;
  if (!data) return html`<h1><code>${title}</code></h1><p aria-busy="true">Loading…</p>`;
  return html`<h1><code>${title}</code></h1>${told}
    <${Facts} facts=${[
      ["Version", data.version], ["Changed", `${age(data.version_age_s)} ago`], ["Expires in", data.expires_in_s == null ? "never" : age(data.expires_in_s)],
      ["Fencing token", data.fencing_token], ["Created by", data.owner || null], ["Size", bytes(data.value_bytes)],
    ]} />
    <h2>Value${data.value === null ? " (base64: it is not text)" : ""}</h2>
    <pre tabindex="0"><code>${shown(data.value, data.value_base64)}</code></pre>
    ${operates && data.value !== null && html`<${Edit} key=${`edit ${data.version}`} name=${name} encoding=${encoding} data=${data} draft=${draft} changed=${changed} />`}
    ${operates && html`<${Delete} key=${`delete ${data.version}`} name=${name} title=${title} encoding=${encoding} data=${data} changed=${changed} />`}
    <${History} key=${`history ${data.version}`} name=${name} encoding=${encoding} />${watched}`;
}

/** The changes of the key whose page is open, on demand: each observation is recorded in the audit trail. */
function WatchedKey({ name, encoding, version, load }) {
  const [opened, open] = useState(false);
  const [newest, arrive] = useState(null);
  const other = newest && (newest.value === null && newest.value_base64 === null ? version !== undefined : newest.version !== version);
  return html`<details onToggle=${(event) => open(event.target.open)}><summary>Watch changes</summary>
    ${opened && other && html`<p>The value above is not the current one. <button class="plain" onClick=${load}>Load it again</button></p>`}
    ${opened && html`<${LiveChanges} parameters=${{ key: name, encoding }} arrived=${(rows) => rows.length > 0 && arrive(rows.at(-1))} />`}</details>`;
}

export function Watch({ route }) {
  const { key, prefix } = route.parameters;
  const name = key ?? prefix;
  const submit = (event) => {
    event.preventDefault();
    const { kind, text } = Object.fromEntries(new FormData(event.target));
    location.hash = link("watch", null, { [kind]: text });
  };
  return html`<h1>Changes of keys</h1><p><a href=${link("keys", null, { prefix })}>State store keys</a></p>
    <search><form class="filters" key=${JSON.stringify(route.parameters)} onSubmit=${submit}>
      <label class="short">Watch<select name="kind"><option value="prefix" selected=${key === undefined}>a prefix</option><option value="key" selected=${key !== undefined}>a key</option></select></label>
      <label>Prefix or key<input name="text" required defaultValue=${name ?? ""} placeholder="plant/line-3/" autocapitalize="off" spellcheck=${false} /></label>
      <button class="secondary">Watch</button>
    </form></search>
    ${name ? html`<${LiveChanges} parameters=${key === undefined ? { prefix } : { key }} />`
      : html`<p>Watch a key or a prefix to see changes as they happen, within the permissions of the user. A prefix needs <code>statestore.extensions: [prefix-observe]</code> in the configuration of the node.</p>`}`;
}

function LiveChanges({ parameters, arrived }) {
  const { version } = useContext(Session);
  return html`<${Live} key=${`${JSON.stringify(parameters)}\0${version}`} title="Changes" path="key-changes" parameters=${parameters} file="penstock-key-changes.ndjson" arrived=${arrived}
    row=${(row, older) => html`<${Change} key=${row.number} row=${row} before=${() => older((each) => each.key_base64 === row.key_base64)} />`} />`;
}

const OPERATIONS = { ENTRY: ["current value", "dim"], SET: ["SET", "added"], DELETE: ["DELETE", "removed"], EXPIRE: ["expired", "removed"] };

function Change({ row, before }) {
  const [opened, open] = useState(false);
  const [operation, level] = OPERATIONS[row.operation] ?? [row.operation, "warn"];
  return html`<details class="letter message difference" onToggle=${(event) => open(event.target.open)}><summary><code>${keyText(row)}</code> <strong class=${level}>${operation}</strong>${" "}
    <small class="dim">${clock(row.at).slice(11)} UTC${row.value_bytes === null ? "" : `, ${bytes(row.value_bytes)}`}</small>${row.value_bytes !== null && html` <span>${start(row)}</span>`}</summary>
    ${opened && html`<${ChangeDetails} row=${row} before=${before} />`}</details>`;
}

function ChangeDetails({ row, before }) {
  const older = useMemo(before, []); // it may leave the list later
  const text = (each) => (each.value_bytes === null ? "" : shown(each.value, each.value_base64));
  const overtaken = row.value_bytes !== null && row.owner === null;
  return html`<${Facts} facts=${[["Version", row.version], ["Arrived", `${clock(row.at)} UTC`], ["Expires", row.owner === null ? null : row.expires_in_s === null ? "never" : `${clock(row.at + row.expires_in_s * 1000)} UTC`], ["Fencing token", row.fencing_token], ["Created by", row.owner || null]]} />
    ${overtaken && html`<p>Expiry, fencing token and creator are not known: the key had changed again when this change arrived.</p>`}
    ${row.truncated && html`<p class="warn">Only the beginning of the value is shown.</p>`}
    ${older && row.operation !== "ENTRY" ? html`<p>Difference to ${older.version ?? "the change before"}:</p><${Difference} before=${text(older)} after=${text(row)} />`
      : row.value_bytes !== null && html`<pre tabindex="0"><code>${text(row)}</code></pre>`}`;
}

/** A refused change, and the current value if that is the reason. `draft`: what was entered, which is kept. */
function Refused({ error, changed, draft }) {
  return html`<${Failure} error=${error} />${error.status === 409 && html`<p><button type="button" class="plain" onClick=${() => changed(null, draft)}>Load the current value</button></p>`}`;
}

/** Write another value if the key still has the version that is shown; the difference is confirmed. `draft`: for an earlier version. */
function Edit({ name, encoding, data, draft, changed }) {
  const [{ error, refused }, set] = useState({ error: null, refused: null });
  const fail = (problem, entered = null) => set({ error: problem, refused: entered });
  const [plan, show] = useState(null);
  const place = useFocusAfter(plan === null);
  const submit = (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    fail(null);
    // A text area has LF only: a value whose lines end in CR LF keeps them.
    const value = form.get("value").replaceAll("\r\n", "\n");
    show({ value: /\r\n/.test(data.value) && !/(^|[^\r])\n/.test(data.value) ? value.replaceAll("\n", "\r\n") : value, seconds: form.get("seconds"), token: form.get("token") });
  };
  const send = () => request(`keys/${encodeURIComponent(name)}`, { encoding, version: data.version, ttl_ms: plan.seconds && Math.round(plan.seconds * 1000), fencing_token: plan.token }, "PUT", undefined, plan.value)
    .then(() => changed("The key was changed."), (problem) => {
      show(null);
      if (problem.status === 401) changed(null, plan); // the page asks for credentials, and then shows the key and what was entered
      else fail(problem, plan);
    });
  return html`<details class="publish" open=${draft !== undefined}><summary>Change the value</summary><form onSubmit=${submit} onInput=${() => show(null)}>
    <label>Value<textarea name="value" rows="6" spellcheck=${false} defaultValue=${draft?.value ?? data.value}></textarea></label>
    <div class="filters"><label>Expires after (s), empty: never<input name="seconds" type="number" min="0.001" step="any" defaultValue=${draft?.seconds ?? data.expires_in_s ?? ""} /></label>
      <label>Fencing token<input name="token" defaultValue=${draft?.token ?? data.fencing_token ?? ""} spellcheck=${false} /></label></div>
    ${error && html`<${Refused} error=${error} changed=${changed} draft=${refused} />`}
    ${plan === null ? html`<button class="secondary" ref=${place}>Preview</button>` : html`<div class="action" tabindex="-1" ref=${place}>
      <p role="alert">${plan.value === data.value ? "The value stays the same." : "The value changes as follows."} ${plan.seconds ? `The key expires after ${age(Number(plan.seconds))}.` : "The key does not expire."} All observers of the key are notified.</p>
      ${plan.value !== data.value && html`<${Difference} before=${shown(data.value)} after=${shown(plan.value)} />`}
      <button type="button" onClick=${send}>Set if it still has version ${data.version}</button> <button type="button" class="secondary" onClick=${() => show(null)}>Cancel</button></div>`}
  </form></details>`;
}

function Delete({ name, title, encoding, data, changed }) {
  const [asked, ask] = useState(false);
  const [error, fail] = useState(null);
  const place = useFocusAfter(asked);
  const send = () => request(`keys/${encodeURIComponent(name)}`, { encoding, version: data.version, fencing_token: data.fencing_token }, "DELETE")
    .then(() => changed("The key was deleted."), (problem) => { ask(false); fail(problem); });
  return html`<div class="action">${error && html`<${Refused} error=${error} changed=${changed} />`}
    ${asked ? html`<p role="alert" tabindex="-1" ref=${place}>Delete <code>${title}</code> if it still has version ${data.version}? Its value is lost.</p>
      <button onClick=${send}>Delete the key</button> <button class="secondary" onClick=${() => ask(false)}>Cancel</button>`
      : html`<button class="secondary" ref=${place} onClick=${() => ask(true)}>Delete…</button>`}</div>`;
}

function NewKey() {
  const [error, fail] = useState(null);
  const submit = (event) => {
    event.preventDefault();
    const { key, value } = Object.fromEntries(new FormData(event.target));
    const [name, parameters] = inPath(key);
    request(`keys/${encodeURIComponent(name)}`, parameters, "PUT", undefined, value).then(() => { location.hash = link("keys", name, parameters); }, fail);
  };
  return html`<details class="publish"><summary>New key</summary><form onSubmit=${submit}>
    <label>Key<input name="key" required autocapitalize="off" spellcheck=${false} /></label>
    <label>Value<textarea name="value" rows="4" spellcheck=${false}></textarea></label>
    ${error && html`<${Failure} error=${error} />`}<button>Create</button></form></details>`;
}

const ENDS = {
  complete: "The key did not exist before the oldest one.", limit: "There are more.", history: "The history of the store does not reach further.",
  disabled: html`Older versions need <code>statestore.extensions: [as-of]</code> in the configuration of the node.`,
};

function History({ name, encoding }) {
  const [opened, open] = useState(false);
  return html`<details onToggle=${(event) => event.target.open && open(true)}><summary>History</summary>${opened && html`<${Versions} name=${name} encoding=${encoding} />`}</details>`;
}

function Versions({ name, encoding }) {
  const { data, error } = usePoll(`key-versions/${encodeURIComponent(name)}`, { encoding }, 0);
  if (error) return html`<${Failure} error=${error} />`;
  if (!data) return html`<p aria-busy="true">Loading…</p>`;
  return html`<p>${data.rows.length === 1 ? "1 version" : `${data.rows.length} versions`}. ${ENDS[data.ends]}</p>
    ${data.rows.map((row, index) => {
      const older = data.rows[index + 1];
      return html`<section aria-label=${`Version ${row.version}`} key=${row.version}><h3>${row.version} <small class="dim">${clock(row.at)} UTC, ${bytes(row.value_bytes)}</small></h3>
        ${row.truncated && html`<p class="warn">Only the beginning is shown.</p>`}
        ${older ? html`<${Difference} before=${shown(older.value, older.value_base64)} after=${shown(row.value, row.value_base64)} />`
          : html`<pre tabindex="0"><code>${shown(row.value, row.value_base64)}</code></pre>`}</section>`;
    })}`;
}

/** Lines of the longest common subsequence, with those that were removed and added. */
export function difference(before, after) {
  const lengths = Array.from({ length: before.length + 1 }, () => new Uint16Array(after.length + 1));
  for (let row = before.length - 1; row >= 0; row -= 1) {
    for (let column = after.length - 1; column >= 0; column -= 1) {
      lengths[row][column] = before[row] === after[column] ? lengths[row + 1][column + 1] + 1 : Math.max(lengths[row + 1][column], lengths[row][column + 1]);
    }
  }
  const lines = [];
  let [row, column] = [0, 0];
  while (row < before.length || column < after.length) {
    if (row < before.length && column < after.length && before[row] === after[column]) lines.push([" ", before[(row += 1) - 1], (column += 1)]);
    else if (row < before.length && (column === after.length || lengths[row + 1][column] >= lengths[row][column + 1])) lines.push(["-", before[(row += 1) - 1]]);
    else lines.push(["+", after[(column += 1) - 1]]);
  }
  return lines;
}

/** Two texts as one, with removed lines after "-" and added lines after "+". */
export function Difference({ before, after }) {
  const [old, fresh] = [before.split("\n"), after.split("\n")];
  if (old.length > MAX_LINES || fresh.length > MAX_LINES) return html`<p>The values are too long for a comparison.</p><pre tabindex="0"><code>${after}</code></pre>`;
  return html`<pre tabindex="0" class="difference"><code>${difference(old, fresh).map(([sign, text]) => html`<span class=${sign === "+" ? "added" : sign === "-" ? "removed" : ""}>${`${sign} ${text}\n`}</span>`)}</code></pre>`;
}
