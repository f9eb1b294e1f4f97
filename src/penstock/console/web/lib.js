// What every view uses: templates, the API, polling, the route in the URL, and texts for numbers.
import { h, createContext } from "preact";
import { useContext, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import htm from "htm";

export const html = htm.bind(h);
export const Session = createContext(null);

const KEY = "penstock.authorization";

/** The credentials of this tab. They are never stored for longer, and are no cookie: another site cannot use them. */
export const credentials = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export class ApiError extends Error {
  constructor(status, error) {
    super(error.what);
    this.status = status;
    this.hint = error.hint;
    this.why = error.why;
  }
}

const RESPONSE_MS = 30_000; // of a query that is repeated
/** A signal that also aborts a request without a response: a node that was paused keeps its connections open. */
export const within = (signal) => AbortSignal.any([signal, AbortSignal.timeout(RESPONSE_MS)]);

/** The error to show for one of fetch or of reading a body. */
function failure(error) {
  if (error.name === "AbortError") return error;
  if (error.name === "SyntaxError") return new ApiError(0, { what: "The response is not one of a node.", hint: "A proxy may have answered: load the page again." });
  return new ApiError(0, { what: "The node does not respond.", hint: "Check that it runs: penstock status" });
}

/** Send a request to the API; returns its response. Throws ApiError, also if the status is not 2xx. */
export async function respond(path, parameters, options = {}) {
  const pairs = Object.entries(parameters).flatMap(([name, value]) => [value].flat().map((each) => [name, each]));
  const query = new URLSearchParams(pairs.filter(([, value]) => value !== "" && value != null));
  const authorization = credentials.get();
  const headers = authorization ? { Authorization: authorization } : {};
  const response = await fetch(`api/v1/${path}${query.size ? `?${query}` : ""}`, { ...options, headers }).catch((error) => { throw failure(error); });
  if (response.ok) return response;
  throw new ApiError(response.status, (await response.json().catch(() => null))?.error ?? { what: `HTTP status ${response.status}` });
}

/** Send a request to the API; returns its JSON data. Throws ApiError. */
export async function request(path, parameters = {}, method = "GET", signal = undefined, payload = undefined) {
  const response = await respond(path, parameters, { method, signal, body: payload });
  return response.json().catch((error) => { throw failure(error); });
}

/** Save all rows of a filtered list as a file. */
export async function download(path, parameters, format) {
  const response = await respond(path, { ...parameters, after: "", limit: "", format });
  saveFile(`penstock-${path}.${format}`, await response.blob().catch((error) => { throw failure(error); }));
}

/** Save a text or a blob as a file. */
export function saveFile(name, content) {
  const address = URL.createObjectURL(new Blob([content]));
  const link = Object.assign(document.createElement("a"), { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** Call `read(signal)` while the page is visible, again after the ms that it returns; null: no more. Returns a function that stops it. */
export function poll(read) {
  const stop = new AbortController();
  let timer;
  let reading = false; // a page that is hidden and shown again during a request waits for its response
  const run = async () => {
    clearTimeout(timer);
    if (document.hidden || stop.signal.aborted || reading) return;
    reading = true;
    const wait = await read(stop.signal);
    reading = false;
    if (wait === null) document.removeEventListener("visibilitychange", run);
    else if (!stop.signal.aborted) timer = setTimeout(run, wait);
  };
  document.addEventListener("visibilitychange", run);
  run();
  return () => {
    stop.abort();
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", run);
  };
}

export const RETRY_MS = 2000; // of what is read once, while the node does not respond

/**
 * Data of the API, read again while the page is visible. `every` in ms; 0: once, when the node responds. `earlier`: while
 * the data are read, those of the parameters before. Without credentials it is not read again: each request would be another failed sign-in.
 */
export function usePoll(path, parameters = {}, every = 2000) {
  const { version } = useContext(Session);
  const [state, set] = useState({ data: null, error: null });
  const list = JSON.stringify([path, version]);
  const key = JSON.stringify([path, parameters, version]);
  useEffect(() => poll(async (signal) => {
    try {
      const data = await request(path, parameters, "GET", every ? within(signal) : signal);
      if (!signal.aborted) set({ data, error: null, key, list });
    } catch (error) {
      if (!signal.aborted) set((before) => ({ data: before.key === key ? before.data : null, error, key, list }));
      if (error.status === 401) return null;
      if (!every && error.status === 0) return RETRY_MS;
    }
    return every || null;
  }), [key, every]);
  return state.key === key ? state : { data: null, error: null, earlier: state.list === list ? state.data : null };
}

/**
 * A ref whose element gets the focus when `state` changes and the button that was pressed has disappeared, or was disabled:
 * otherwise the keyboard and a screen reader begin at the top of the page.
 */
export function useFocusAfter(state) {
  const place = useRef(null);
  const before = useRef(state);
  useEffect(() => {
    if (before.current !== state && document.activeElement === document.body) place.current?.focus({ preventScroll: true });
    before.current = state;
  }, [state]);
  return place;
}

/** The route: `#/clients/ID?sort=-queued` has the page `clients`, the name `ID` and the parameters. */
export function parseRoute(hash) {
  const text = hash.replace(/^#?\/?/, "");
  const end = text.includes("?") ? text.indexOf("?") : text.length;
  const [page, ...name] = text.slice(0, end).split("/");
  return {
    page: page || "overview",
    name: name.length ? decoded(name.join("/")) : null,
    parameters: Object.fromEntries(new URLSearchParams(text.slice(end + 1))),
  };
}

/** A name that was typed into the address may have a "%" that encodes nothing. */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export function link(page, name = null, parameters = {}) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== "" && value != null));
  return `#/${page}${name === null ? "" : `/${encodeURIComponent(name)}`}${query.size ? `?${query}` : ""}`;
}

export function useRoute() {
  const [route, set] = useState(() => parseRoute(location.hash));
  useLayoutEffect(() => { // not after the first paint: a change before it would be lost
    const changed = () => set(parseRoute(location.hash));
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}

export function age(seconds) {
  if (seconds == null) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  for (const [size, unit, smaller, small] of [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]]) {
    if (seconds < size) continue;
    const whole = Math.floor(seconds / size);
    const part = Math.floor((seconds % size) / smaller);
    return `${whole} ${unit}${part && whole < 10 ? ` ${part} ${small}` : ""}`;
  }
  return `${Math.round(seconds)} s`;
}

export function bytes(count) {
  if (count == null) return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (count < 1024) return `${unit === "B" || count >= 100 ? Math.round(count) : count.toFixed(1)} ${unit}`;
    count /= 1024;
  }
  return `${count.toFixed(1)} TiB`;
}

export const number = (value) => (value == null ? "–" : Math.round(value).toLocaleString("en-US").replaceAll(",", "\u202f"));
/** A number with its noun: "1 record", "2 records". */
export const counted = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
export const rate = (value) => (value == null ? "–" : value >= 100 || value === 0 ? number(value) : value.toFixed(1));
export const lag = (row) => (row.lag_records == null ? "–" : `${row.lag_exact === false ? "≤ " : ""}${number(row.lag_records)}`);
export const oldest = (row) => (row.lag_records && row.lag_s ? age(row.lag_s) : "–");
/** UTC; a time that producers chose may be none that a calendar has. */
export const clock = (ms) => (Math.abs(ms) <= 8.64e15 ? new Date(ms).toISOString().replace(/\..*/, "").replace("T", " ") : String(ms));

/** How long a topic keeps records: "7 d" for the delete policy "delete,168h" of TubeMQ. */
export function retention(policy) {
  const [, count, unit] = /^delete,(\d+)([smh])$/.exec(policy ?? "") ?? [];
  if (count === undefined) return policy ?? "–";
  return unit === "h" && count % 24 === 0 ? `${count / 24} d` : `${count} ${unit === "m" ? "min" : unit}`;
}

/** JSON text with line breaks. It is not parsed: 4.0 and integers above 2^53 stay as they are. */
export function indented(text) {
  const tokens = text.match(/"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s{}[\],:"]+/g) ?? [];
  let line = "";
  let depth = 0;
  const lines = [];
  const end = () => { lines.push("  ".repeat(depth) + line); line = ""; };
  tokens.forEach((token, index) => {
    if (token === "{" || token === "[") {
      line += token;
      if (tokens[index + 1] === (token === "{" ? "}" : "]")) return;
      end();
      depth += 1;
    } else if (token === "}" || token === "]") {
      if (tokens[index - 1] !== (token === "}" ? "{" : "[")) {
        end();
        depth -= 1;
      }
      line += token;
    } else if (token === ",") {
      line += token;
      end();
    } else line += token === ":" ? ": " : token;
  });
  end();
  return lines.join("\n");
}

/** An error with cause and action; a form for credentials where they are missing or do not suffice. */
export function Failure({ error }) {
  const { login, version } = useContext(Session);
  const failedAt = useMemo(() => version, [error]);
  if (error.status === 401 && failedAt !== version) return html`<p role="status">Do it again with the new credentials.</p>`;
  if (error.status === 401) return html`<${Login} error=${error} login=${login} />`;
  return html`<div role="alert" class="reason problem"><strong>${error.message}</strong>
    ${error.why && html`<p>${error.why}</p>`}${error.hint && html`<p>${error.hint}</p>`}</div>
    ${error.status === 403 && html`<details><summary>Sign in as another user</summary><${Login} login=${login} /></details>`}`;
}

/** A problem or a warning of the node, or of a part of it, with cause and action. */
export function Reason({ reason, children }) {
  // The children are not part of the alert: a time that changes would be announced each time.
  return html`<div class=${`reason ${reason.severity}`}><div role=${reason.severity === "problem" ? "alert" : "note"}>
    <strong>${reason.severity === "problem" ? "Problem" : "Warning"}, ${reason.part}:</strong> ${reason.what}
    ${reason.why && html`<p><em>Why:</em> ${reason.why}</p>`}
    ${reason.hint && html`<p><em>What to do:</em> ${reason.hint}</p>`}</div>
    ${children}</div>`;
}

/** The user of the credentials that were refused, "" without one. */
function refusedUser() {
  const [scheme, value] = credentials.get().split(" ");
  if (scheme !== "Basic") return "";
  return new TextDecoder().decode(Uint8Array.from(atob(value), (char) => char.charCodeAt(0))).split(":")[0];
}

function Login({ error, login }) {
  const form = useRef(null);
  const [user] = useState(() => (error ? refusedUser() : ""));
  useEffect(() => { // where nothing has the focus: the page asks for credentials, or those were wrong
    if ([document.body, document.getElementById("main")].includes(document.activeElement)) form.current[user ? "secret" : "user"].focus();
  }, []);
  const send = (event) => {
    event.preventDefault();
    event.stopPropagation(); // the form may be in the form of the action that was refused
    const form = new FormData(event.target);
    const user = form.get("user").trim();
    const secret = form.get("secret");
    const utf8 = String.fromCharCode(...new TextEncoder().encode(`${user}:${secret}`));
    // A password without its user name may have characters that no header has, so that no request could be sent.
    login(user ? `Basic ${btoa(utf8)}` : `Bearer ${secret.trim().replaceAll(/[^!-~]/g, "?")}`);
  };
  return html`<article class="login"><h2>Sign in</h2>
    ${error && html`<p role="alert">${error.message}</p>`}
    <form ref=${form} onSubmit=${send}>
      <label>User name <small>empty for the administration token</small>
        <input name="user" defaultValue=${user} autocomplete="username" /></label>
      <label>Password or token
        <input name="secret" type="password" required autocomplete="current-password" /></label>
      <button>Sign in</button>
    </form>
    <p><small>The token is in the file <code>tube/admin-token</code> of the data directory, which <code>penstock up</code> prints. This tab keeps it until it is closed.</small></p>
  </article>`;
}
