// The console: navigation, keyboard, sign-in, and the view of the route.
import { h, render } from "preact";
import { useEffect, useErrorBoundary, useMemo, useRef, useState } from "preact/hooks";
import { credentials, html, link, poll, request, RETRY_MS, Session, useRoute, within } from "./lib.js";
import { Cluster, inCluster } from "./cluster.js";
import { Ledger, Sample } from "./jobs.js";
import { Keys, Watch } from "./keys.js";
import { DeadLetters } from "./letters.js";
import { Messages } from "./messages.js";
import { Retained, Subscriptions } from "./mqtt.js";
import { Overview } from "./overview.js";
import { Pipelines } from "./pipelines.js";
import { Records } from "./records.js";
import { TopicTree } from "./tree.js";
import { Audit, Brokers, Clients, Events, Groups, Topics } from "./views.js";

const NAMED = new Set(["records", "dead-letters", "ledger", "sample"]); // pages of one topic or pipeline

const PAGES = [
  ["overview", "Overview", "o", Overview],
  ["clients", "Clients", "c", Clients],
  ["messages", "Messages", "m", Messages],
  ["topics", "Topics", "t", Topics],
  ["groups", "Groups", "g", Groups],
  ["keys", "Keys", "k", Keys],
  ["pipelines", "Pipelines", "p", Pipelines],
  ["events", "Events", "e", Events],
  ["cluster", "Cluster", "n", Cluster],
];
const TABS = PAGES.filter(([page]) => page !== "cluster" || inCluster);
// Pages that are reached from another one, whose tab is marked.
const INNER = {
  records: ["topics", Records], brokers: ["topics", Brokers], "dead-letters": ["pipelines", DeadLetters], ledger: ["pipelines", Ledger], sample: ["pipelines", Sample],
  subscriptions: ["clients", Subscriptions], retained: ["messages", Retained], tree: ["messages", TopicTree], watch: ["keys", Watch],
  audit: ["events", Audit],
};

function App() {
  const route = useRoute();
  const [version, renew] = useState(0);
  const [help, showHelp] = useState(false);
  const [who, identify] = useState(null); // user and role; null before the answer, and without credentials
  const signedIn = useRef(false); // just now, by the form, which has disappeared with the focus
  const session = useMemo(() => ({
    version,
    views: who !== null && who.role !== "none",
    operates: who !== null && ["operator", "administrator"].includes(who.role),
    administers: who?.role === "administrator",
    // After a sign-in, the user before stays until the answer, with the forms of the page and what was entered.
    login: (value) => { signedIn.current = value !== ""; credentials.set(value); if (!value) identify(null); renew((before) => before + 1); },
  }), [version, who]);
  useEffect(() => {
    if (!credentials.get()) return undefined;
    return poll(async (signal) => { // the view reports the failure
      const error = await request("session", {}, "GET", within(signal)).then((found) => { if (!signal.aborted) identify(found); }, (problem) => problem);
      if (error?.status === 401 && !signal.aborted) identify(null);
      return error?.status === 0 ? RETRY_MS : null;
    });
  }, [version]);
  const [tab, View] = INNER[route.page] ?? [route.page, PAGES.find(([page]) => page === route.page)?.[3]];
  const main = useRef(null);
  useEffect(() => {
    if (who === null || !signedIn.current) return;
    signedIn.current = false;
    if (document.activeElement === document.body) main.current.focus({ preventScroll: true });
  }, [who]);
  const before = useRef(null);
  useEffect(() => { // a link in a list disappears with the list, and the focus with it
    const place = `${route.page}\0${route.name}`;
    if (before.current !== null && before.current !== place && document.activeElement === document.body) main.current.focus({ preventScroll: true });
    before.current = place;
  }, [route.page, route.name]);
  useShortcuts(() => showHelp((shown) => !shown));
  useEffect(() => {
    document.title = `${route.name ?? PAGES.find(([page]) => page === tab)?.[1] ?? "?"} · penstock`;
  }, [route.page, route.name]);
  return html`<${Session.Provider} value=${session}>
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); main.current.focus(); }}>Skip to the content</a>
    <header class="container-fluid"><nav aria-label="Main">
      <ul><li><strong>penstock</strong></li></ul>
      <ul class="tabs">${TABS.map(([page, title]) => html`<li><a href=${link(page)} aria-current=${page === tab ? "page" : undefined}>${title}</a></li>`)}</ul>
      <ul><li><button class="plain" onClick=${() => showHelp(true)} aria-label="Keyboard shortcuts">?</button></li>
        ${who !== null && who.credential !== "none" && html`<li class="dim">${who.user || "token"}, ${who.role}</li>`}
        ${who !== null && credentials.get() && html`<li><button class="plain" onClick=${() => session.login("")}>Sign out</button></li>`}</ul>
    </nav></header>
    <main id="main" class="container-fluid" tabindex="-1" ref=${main}>
      <${Guard} route=${route}>${View === undefined ? html`<h1>There is no page ${route.page}</h1><p><a href=${link("overview")}>Overview</a></p>`
        : NAMED.has(route.page) && !route.name ? html`<h1>The address names no ${tab.slice(0, -1)}</h1><p>Select one of the <a href=${link(tab)}>${tab}</a>.</p>`
          : h(View, { route, key: NAMED.has(route.page) ? `${route.page}/${route.name}` : route.page })}<//>
    </main>
    ${help && html`<${Help} close=${() => showHelp(false)} />`}
  </${Session.Provider}>`;
}

/** The page, or what went wrong in it: an error would otherwise leave a page that no longer changes. */
function Guard({ route, children }) {
  const [error, reset] = useErrorBoundary((problem) => console.error(problem));
  useEffect(() => { if (error) reset(); }, [route]);
  if (!error) return children;
  return html`<div role="alert" class="reason problem"><strong>This page cannot be shown: ${String(error)}</strong>
    <p>Load it again. If that does not help, please report it as a bug, with the address of the page and its messages in the browser's console.</p></div>
    <button class="secondary" onClick=${reset}>Try again</button>`;
}

function Help({ close }) {
  const dialog = useRef(null);
  useEffect(() => dialog.current.showModal(), []);
  return html`<dialog ref=${dialog} onClose=${close} aria-labelledby="help-title"><article>
    <h2 id="help-title">Keyboard shortcuts</h2>
    <dl class="facts">${[["/", "filter"], ...TABS.map(([, title, key]) => [`g ${key}`, title]), ["j, k", "next and previous row"], ["Enter", "open the row"], ["?", "this help"]]
      .map(([keys, text]) => html`<div><dt><kbd>${keys}</kbd></dt><dd>${text}</dd></div>`)}</dl>
    <form method="dialog"><button>Close</button></form>
  </article></dialog>`;
}

/** Shortcuts, never inside an input. The key after "g" names a page, however late it comes: a slow computer loses no key. */
function useShortcuts(toggleHelp) {
  useEffect(() => {
    let going = false;
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
      const after = going;
      going = false;
      const page = after && TABS.find(([, , key]) => key === event.key);
      if (page) location.hash = link(page[0]);
      else if (event.key === "g") going = true;
      else if (event.key === "/") document.querySelector("main input")?.focus();
      else if (event.key === "?") toggleHelp();
      else if (event.key === "j" || event.key === "k") {
        const rows = [...document.querySelectorAll("main a.row")];
        const at = rows.indexOf(document.activeElement);
        rows[event.key === "j" ? Math.min(at + 1, rows.length - 1) : Math.max(at - 1, 0)]?.focus();
      } else return;
      event.preventDefault();
    };
    const clicked = () => { going = false; };
    addEventListener("keydown", pressed);
    addEventListener("pointerdown", clicked);
    return () => { removeEventListener("keydown", pressed); removeEventListener("pointerdown", clicked); };
  }, []);
}

render(html`<${App} />`, document.body);
