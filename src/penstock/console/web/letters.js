// Dead letters of a pipeline: groups by step and reason, the records, and what can be done with them after a preview.
import { useState } from "preact/hooks";
import { clock, counted, Failure, html, link, number, request, useFocusAfter, usePoll } from "./lib.js";
import { Value } from "./records.js";
import { Facts, Plain } from "./table.js";

const STATES = ["open", "corrected", "redriven", "resolved", "discarded"];
const letters = (count) => counted(count, "letter");
const DONE = { redrive: "sent to the source again", resolve: "resolved", discard: "discarded", reopen: "opened again", purge: "deleted" };

export function DeadLetters({ route: { name, parameters } }) {
  const [{ changes, message }, change] = useState({ changes: 0, message: null }); // read again after each change
  const changed = (text) => change({ changes: changes + 1, message: text });
  const path = `pipelines/${encodeURIComponent(name)}/dead-letters`;
  const groups = usePoll(path, { changes }, 0);
  const found = groups.data ?? groups.earlier; // the page stays while it is read again
  const title = html`<h1>Dead letters of <a href=${link("pipelines", name)}>${name}</a></h1>`;
  if (groups.error) return html`${title}<${Failure} error=${groups.error} />`;
  if (!found) return html`${title}<p aria-busy="true">Reading the dead letters…</p>`;
  const { rows } = found;
  const told = message && html`<p role="status">${message}</p>`;
  if (rows.length === 0) return html`${title}${told}<p>There are no dead letters.</p>`;
  const total = (state) => rows.reduce((sum, row) => sum + (parameters.step && row.step !== parameters.step ? 0 : row[state]), 0);
  return html`${title}${told}
    <${Plain} title="Reasons" rows=${rows} columns=${[
      { title: "Step", cell: (row) => html`<a href=${link("dead-letters", name, { step: row.step })}>${row.step}</a>` },
      { title: "Reason", cell: (row) => `${row.reason}${row.code ? ` (${row.code})` : ""}` },
      ...STATES.map((state) => ({ title: state[0].toUpperCase() + state.slice(1), right: true,
        cell: (row) => html`<span class=${row[state] === 0 ? "dim" : state === "open" ? "bad" : ""}>${number(row[state])}</span>` })),
    ]} />
    <h2>${parameters.step ? html`Letters of the step ${parameters.step}` : "Letters"}</h2>
    <p class="pages">${parameters.step && html`<a href=${link("dead-letters", name, { all: parameters.all })}>All steps</a>`}
      ${parameters.all ? html`<a href=${link("dead-letters", name, { step: parameters.step })}>Open and corrected only</a>`
        : html`<a href=${link("dead-letters", name, { step: parameters.step, all: "1" })}>Include closed letters</a>`}</p>
    <${Actions} key=${parameters.step} path=${path} selection=${{ step: parameters.step }} changed=${changed}
      actions=${[
        total("open") + total("corrected") > 0 && ["redrive", "Redrive"], total("open") + total("corrected") > 0 && ["discard", "Discard"],
        total("open") + total("corrected") > 0 && ["resolve", "Resolve"], !parameters.step && rows.some((row) => row.redriven + row.resolved + row.discarded > 0) && ["purge", "Delete closed letters"],
      ].filter(Boolean)} />
    <${List} path=${path} parameters=${parameters} changes=${changes} changed=${changed} />`;
}

function List({ path, parameters, changes, changed }) {
  const { data: newest, earlier, error } = usePoll(`${path}/records`, { step: parameters.step, all: parameters.all, limit: 50, changes }, 0);
  if (error) return html`<${Failure} error=${error} />`;
  const data = newest ?? earlier; // letters that are open on the page stay open while they are read again
  if (!data) return html`<p aria-busy="true">Reading the records…</p>`;
  return html`<section aria-label="Letters">
    <p aria-busy=${newest === null}>${letters(data.rows.length)}${data.complete ? "" : "; there are more: select a step, or close some of these"}</p>
    ${data.rows.map((row) => html`<${Letter} key=${JSON.stringify([row.place, row.step, row.part])} path=${path} row=${row} changed=${changed} />`)}
  </section>`;
}

function Letter({ path, row, changed }) {
  const closed = !["open", "corrected"].includes(row.state);
  const record = { value: row.value, value_base64: row.value_base64 ?? null, format: format(row.value) };
  return html`<details class="letter"><summary><span class=${closed ? "dim" : "bad"}>${row.state}</span> ${row.step}: ${row.reason} <small class="dim">${row.timestamp ? `${clock(Date.parse(row.timestamp))} UTC` : ""}</small></summary>
    <${Facts} facts=${[["Id", row.id], ...(row.part == null ? [] : [["Part", String(row.part)]]), ["Code", row.code || null], ["Source", row.source || null], ["Record", row.place], ["Key", row.key ?? (row.key_base64 ? `base64:${row.key_base64}` : null)],
      ...row.headers.map(([header, value]) => [`Header ${header}`, value])]} />
    <h3>Record</h3>
    <${Value} row=${record} name=${row.id} />
    ${row.corrected != null && html`<h3>Corrected</h3><pre tabindex="0"><code>${row.corrected}</code></pre>`}
    ${!closed && row.value !== null && html`<${Correction} path=${path} row=${row} changed=${changed} />`}
    <${Actions} path=${path} selection=${{ id: row.id, step: row.step }} changed=${changed}
      actions=${closed ? (row.state === "redriven" ? [] : [["reopen", "Open again"]]) : [["redrive", "Redrive"], ["discard", "Discard"], ["resolve", "Resolve"]]} />
  </details>`;
}

const format = (text) => {
  if (text === null) return "binary";
  try {
    JSON.parse(text);
    return "json";
  } catch {
    return "text";
  }
};

/** A form for another payload, with which the letter is redriven; the original stays. */
function Correction({ path, row, changed }) {
  const [error, fail] = useState(null);
  const [busy, wait] = useState(false);
  const save = (event) => {
    event.preventDefault();
    fail(null);
    wait(true);
    request(`${path}/correct`, { id: row.id }, "POST", undefined, new FormData(event.target).get("value"))
      .then(() => changed("The corrected payload was stored: redrive sends it."), fail).finally(() => wait(false));
  };
  return html`<form onSubmit=${save}><label>Corrected payload<textarea name="value" rows="4" spellcheck=${false}>${row.corrected ?? row.value}</textarea></label>
    ${error && html`<${Failure} error=${error} />`}<button class="secondary" disabled=${busy} aria-busy=${busy}>Save the correction</button></form>`;
}

/** Buttons for changes: each shows a preview, whose count the second button repeats. */
function Actions({ path, selection, actions, changed }) {
  const [plan, show] = useState(null);
  const [error, fail] = useState(null);
  const [busy, wait] = useState(false);
  const [days, choose] = useState("30");
  const place = useFocusAfter(`${busy} ${plan?.verb}`);
  const send = (verb, dryRun) => {
    wait(true);
    const parameters = verb === "purge" ? { older_than: `${days}d` } : selection;
    request(`${path}/${verb}`, { ...parameters, dry_run: dryRun ? "1" : "" }, "POST").then((found) => {
      fail(null);
      show(dryRun ? { ...found, verb } : null);
      if (!dryRun) changed([`${letters(found.letters)} ${found.letters === 1 ? "was" : "were"} ${DONE[verb]}.`, ...found.notes].join(" "));
    }, (problem) => { show(null); fail(problem); }).finally(() => wait(false));
  };
  return html`<div class="action" aria-busy=${busy} tabindex="-1" ref=${place}>
    <p class="pages">${actions.map(([verb, text]) => html`<button class="secondary" disabled=${busy} onClick=${() => send(verb, true)}>${text}…</button>`)}
      ${actions.some(([verb]) => verb === "purge") && html`<label class="days">older than <input type="number" min="0" max="36500" value=${days} onInput=${(event) => { choose(event.target.value); show(null); }} /> days</label>`}</p>
    ${error && html`<${Failure} error=${error} />`}
    ${plan && html`<p role="alert">${plan.letters === 0 ? "No letter" : letters(plan.letters)} would be ${DONE[plan.verb]}.${plan.verb === "redrive" ? " All consumers of the topic read a redriven record." : plan.verb === "purge" ? " They cannot be restored." : ""}</p>
      ${plan.notes.map((text) => html`<p>${text}</p>`)}
      ${plan.letters > 0 && html`<button disabled=${busy} onClick=${() => send(plan.verb, false)}>${actions.find(([verb]) => verb === plan.verb)?.[1] ?? plan.verb}: ${letters(plan.letters)}</button>`}
      ${" "}<button class="secondary" onClick=${() => show(null)}>Cancel</button>`}
  </div>`;
}
