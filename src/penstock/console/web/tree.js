// The tree of MQTT topics with rates and last payloads, from a subscription that exists while the page is visible.
import { useEffect, useRef, useState } from "preact/hooks";
import { bytes, clock, counted, html, link, number, rate } from "./lib.js";
import { useLines } from "./live.js";
import { Message, start } from "./messages.js";
import { Plain } from "./table.js";

const MOST = 10_000; // topics that are kept
const PAGE = 100;
const WINDOW_S = 10; // a rate is the mean of this time

export function TopicTree({ route }) {
  const { filter = "#" } = route.parameters;
  const choose = (event) => {
    event.preventDefault();
    location.hash = link("tree", null, Object.fromEntries(new FormData(event.target)));
  };
  return html`<h1>Topic tree</h1>
    <search><form class="filters" key=${filter} onSubmit=${choose}>
      <label>Topic filter<input name="filter" required defaultValue=${filter} autocapitalize="off" spellcheck=${false} /></label><button class="secondary">Subscribe</button>
    </form></search>
    <${Tree} key=${filter} filter=${filter} under=${route.name} parameters=${route.parameters} />`;
}

function Tree({ filter, under, parameters }) {
  const [, redraw] = useState(0);
  const tree = useRef({ topics: new Map(), dropped: 0, full: 0, since: now() });
  const { failure, gap } = useLines("topic-tree", { filter }, (line) => { add(tree.current, line); redraw((count) => count + 1); });
  useEffect(() => {
    const timer = setInterval(() => redraw((count) => count + 1), 1000); // rates fall also while no message arrives
    return () => clearInterval(timer);
  }, []);
  const { topics, dropped, full, since } = tree.current;
  if (failure && topics.size === 0) return failure;
  const levels = under === null ? [] : under.split("/"); // "": the first level of /a
  const rows = children(topics, under, since).filter((row) => row.level.toLowerCase().includes((parameters.q ?? "").toLowerCase()));
  const first = Number(parameters.first ?? 0);
  const at = (topic, more = {}) => link("tree", topic, { filter: parameters.filter, ...more });
  const own = topics.get(under);
  return html`<section aria-label="Topics">
    ${failure}
    <nav aria-label="Levels" class="pages"><a href=${link("tree", null, { filter: parameters.filter })}>All topics</a>
      ${levels.map((level, index) => html`<span aria-hidden="true">/</span><a href=${at(levels.slice(0, index + 1).join("/"))} aria-current=${index === levels.length - 1 ? "page" : undefined}>${level || "(empty)"}</a>`)}</nav>
    <p class="pages"><span role="status" aria-live="off">${number(topics.size)} ${topics.size === 1 ? "topic" : "topics"} with messages since the page was opened</span>
      ${gap}
      ${full > 0 && html`<span class="warn">the page keeps ${number(MOST)} topics: ${counted(full, "message")} of others left out; use a narrower topic filter</span>`}
      ${dropped > 0 && html`<span class="warn">${counted(dropped, "message")} not counted: too many topics in a second</span>`}</p>
    ${rows.length > 0 && html`<${Plain} title="Levels" rows=${rows.slice(first, first + PAGE)} rowKey=${(row) => row.level} columns=${[
      { title: "Level", cell: (row) => html`<a class="row" href=${at(row.topic)}>${row.level || "(empty)"}</a>` },
      { title: "Topics", right: true, cell: (row) => number(row.topics) }, { title: "Messages", right: true, cell: (row) => number(row.messages) },
      { title: "Messages/s", right: true, cell: (row) => rate(row.rate) }, { title: "Bytes/s", right: true, cell: (row) => bytes(row.volume) },
      { title: "Retained", cell: (row) => (row.retained ? "yes" : "–") },
      { title: "Last (UTC)", cell: (row) => clock(row.last.at).slice(11) }, { title: "Last payload", cell: (row) => html`<code>${start(row.last)}</code>` },
    ]} />
    <nav class="pages" aria-label="Pages"><span>${number(rows.length)} ${rows.length === 1 ? "level" : "levels"}</span>
      ${first > 0 && html`<a href=${at(under, { first: Math.max(0, first - PAGE) || "" })}>Previous page</a>`}
      ${rows.length > first + PAGE && html`<a rel="next" href=${at(under, { first: first + PAGE })}>Next page</a>`}</nav>`}
    ${own && html`<h2>Last message of <code>${under}</code></h2><p>${clock(own.last.at)} UTC${own.last.retain ? ", retained" : ""}. <a href=${link("messages", null, { filter: under })}>Follow this topic</a></p><${Message} row=${own.last} />`}
    ${topics.size === 0 && html`<p>No message has arrived yet.</p>`}
  </section>`;
}

const now = () => performance.now() / 1000;

/** Add the counts of a line. `recent` has [time, messages, bytes] of the last seconds. */
function add(tree, line) {
  const at = now();
  tree.dropped += line.dropped;
  for (const { messages, bytes: size, last } of line.rows) {
    let topic = tree.topics.get(last.topic);
    if (topic === undefined) {
      if (tree.topics.size >= MOST) {
        tree.full += messages;
        continue;
      }
      tree.topics.set(last.topic, topic = { messages: 0, recent: [] });
    }
    topic.messages += messages;
    topic.last = last;
    topic.recent = [...topic.recent.filter(([before]) => before > at - WINDOW_S), [at, messages, size]];
  }
}

/** The levels below `under`: sums over their topics. */
function children(topics, under, since) {
  const prefix = under === null ? "" : `${under}/`;
  const found = new Map();
  const oldest = now() - WINDOW_S;
  const span = Math.max(1, Math.min(WINDOW_S, now() - since));
  for (const [topic, { messages, recent, last }] of topics) {
    if (!topic.startsWith(prefix)) continue;
    const level = topic.slice(prefix.length).split("/", 1)[0];
    const row = found.get(level) ?? { level, topic: prefix + level, topics: 0, messages: 0, rate: 0, volume: 0, retained: false, last };
    row.topics += 1;
    row.messages += messages;
    for (const [at, count, size] of recent) {
      if (at <= oldest) continue;
      row.rate += count / span;
      row.volume += size / span;
    }
    row.retained ||= last.retain && last.bytes > 0;
    if (last.at >= row.last.at) row.last = last;
    found.set(level, row);
  }
  return [...found.values()].sort((a, b) => (a.level < b.level ? -1 : 1));
}
