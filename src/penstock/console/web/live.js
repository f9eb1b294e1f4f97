// Rows of the API that arrive while a page is open: MQTT messages, changes of keys.
import { useEffect, useRef, useState } from "preact/hooks";
import { age, ApiError, Failure, html, number, respond, saveFile } from "./lib.js";

const KEPT = 500;

/** Read lines of JSON until the signal aborts or the node ends the stream; `begun()` is called when it begins. */
async function readLines(path, parameters, signal, accept, begun) {
  const response = await respond(path, parameters, { signal });
  begun();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(() => ({ done: true })); // the connection was lost
    if (done) throw new ApiError(0, { what: "The node ended the subscription.", hint: "It stops, or closed the client." });
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    lines.forEach((line) => accept(JSON.parse(line)));
  }
}

/**
 * Pass each line of a stream to `accept` while the page is visible: a hidden one holds no connection. `failure`: why it
 * ended; `gap`: a text about the time in which the page was hidden.
 */
export function useLines(path, parameters, accept) {
  const [error, fail] = useState(null);
  const [hidden, hide] = useState(document.hidden);
  const [connected, connect] = useState(false);
  const [tries, again] = useState(0);
  const [missed, miss] = useState(0); // in ms
  const hiddenAt = useRef(null);
  useEffect(() => {
    const changed = () => {
      hide(document.hidden);
      if (document.hidden) hiddenAt.current = Date.now();
      else if (hiddenAt.current !== null) {
        const away = Date.now() - hiddenAt.current;
        miss((before) => before + away);
      }
    };
    document.addEventListener("visibilitychange", changed);
    return () => document.removeEventListener("visibilitychange", changed);
  }, []);
  useEffect(() => {
    if (hidden) return undefined;
    const stop = new AbortController();
    readLines(path, parameters, stop.signal, accept, () => { connect(true); fail(null); }).catch((problem) => { if (!stop.signal.aborted) fail(problem); });
    return () => { stop.abort(); connect(false); };
  }, [hidden, tries]);
  const retry = () => { fail(null); again(tries + 1); };
  const failure = error && html`<${Failure} error=${error} />${error.status !== 401 && error.status !== 403 && html`<p><button class="secondary" onClick=${retry}>Connect again</button></p>`}`;
  const gap = missed > 0 && html`<span class="warn">nothing was received for ${age(missed / 1000)}, while the page was hidden</span>`;
  return { connected, failure, gap };
}

/**
 * Rows of a stream as they arrive, newest first, with pause and export. `row(row, older)` returns a row, with a function
 * for the first older one that passes a test; `arrived(rows)` is told of new ones, also during a pause.
 */
export function Live({ title, path, parameters, file, row, arrived }) {
  const [shown, show] = useState({ rows: [], received: 0, dropped: 0, filtered: 0 });
  const [paused, pause] = useState(false);
  const held = useRef(null); // what arrived during a pause
  const count = useRef(0);
  const latest = useRef(shown.rows);
  latest.current = shown.rows;
  const drawn = useRef(new Map()); // by number: a row that stays is not drawn again
  const kept = new Map();
  const draw = (each) => {
    const older = (test) => latest.current.find((other) => other.number < each.number && test(other));
    const element = drawn.current.get(each.number) ?? row(each, older);
    kept.set(each.number, element);
    return element;
  };
  const add = (before, part) => ({
    rows: [...part.rows, ...before.rows].slice(0, KEPT), received: before.received + part.rows.length,
    dropped: before.dropped + part.dropped, filtered: before.filtered + part.filtered,
  });
  const accept = (line) => {
    arrived?.(line.rows);
    const part = { ...line, rows: line.rows.map((row) => ({ ...row, number: (count.current += 1) })).reverse() };
    if (held.current !== null) held.current = add(held.current, part);
    else show((before) => add(before, part));
  };
  const { connected, failure, gap } = useLines(path, parameters, accept);
  const toggle = () => {
    if (paused) {
      const arrived = held.current;
      held.current = null;
      show((before) => add(before, arrived));
    } else held.current = { rows: [], received: 0, dropped: 0, filtered: 0 };
    pause(!paused);
  };
  const save = () => saveFile(file, shown.rows.toReversed().map(({ number: _, ...each }) => `${JSON.stringify(each)}\n`).join(""));
  const elements = shown.rows.map(draw);
  drawn.current = kept;
  const refused = failure && !connected && !paused && shown.received === 0; // then there is nothing to count or to pause
  return html`<section aria-label=${title}>
    ${failure}
    ${!refused && html`<p class="pages"><span role="status" aria-live="off">${connected || failure ? "" : "Connecting… "}${number(shown.received)} received${shown.filtered ? `, ${number(shown.filtered)} without the text` : ""}${shown.received > KEPT ? `, the newest ${KEPT} are shown` : ""}</span>
      ${gap}
      ${shown.dropped > 0 && html`<span class="warn">${number(shown.dropped)} not shown: they arrive too fast</span>`}
      ${(!failure || paused) && html`<button class="plain" onClick=${toggle}>${paused ? "Continue" : "Pause"}</button>`}
      ${shown.rows.length > 0 && html`<button class="plain" onClick=${save}>Export NDJSON</button>
      <button class="plain" onClick=${() => show({ rows: [], received: 0, dropped: 0, filtered: 0 })}>Clear</button>`}</p>`}
    ${elements}
  </section>`;
}
