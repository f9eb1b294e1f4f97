// A directed graph: dagre computes the places, the nodes are HTML (focus, wrapping, colours), the edges SVG.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Failure, html } from "./lib.js";

const WIDTH = 210;
const LINE = 20;
const MOST = 150; // nodes; a larger graph is not readable, and takes seconds to lay out

/** `nodes`: {id, name, role, kind, reads, late, dead_letters}; `card(node)`: lines {text, level, href} below its name. */
export function Graph({ nodes, card }) {
  const [layout, load] = useState(null); // the library is loaded with the first graph
  const [error, fail] = useState(null);
  const [down, turn] = useState(false);
  const place = useRef(null);
  useEffect(() => {
    let shown = true;
    import("dagre").then((found) => shown && load(() => found), () => shown && fail({ message: "The graph cannot be drawn: its library was not loaded.", hint: "Load the page again: the node may have another version now." }));
    return () => { shown = false; };
  }, []);
  useEffect(() => {
    const resized = new ResizeObserver(() => place.current && turn(place.current.clientWidth < 700));
    if (place.current) resized.observe(place.current);
    return () => resized.disconnect();
  }, []);
  const cards = nodes.map((node) => ({ node, lines: card(node) }));
  // Values change every few seconds, but not the places: a layout of many nodes takes long.
  const shape = JSON.stringify(cards.map(({ node, lines }) => [node.id, node.reads, node.late, lines.length]));
  const drawn = useMemo(() => layout && nodes.length <= MOST && draw(layout, cards, down), [layout, shape, down]);
  if (nodes.length > MOST) return html`<p>The graph has ${nodes.length} nodes; only up to ${MOST} are drawn. <code>penstock pipeline plan FILE</code> lists all.</p>`;
  if (error) return html`<${Failure} error=${error} />`;
  return html`<div class="graph" tabindex="0" role="region" aria-label="Graph of the pipeline" ref=${place} aria-busy=${!drawn}>
    ${drawn && html`<div class="canvas" ref=${sized(drawn)}>
      <svg width=${drawn.width} height=${drawn.height} aria-hidden="true"><defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" /></marker></defs>
        ${drawn.edges.map(({ points, late }) => html`<path class=${late ? "edge late" : "edge"} d=${curve(points)} marker-end="url(#arrow)" />`)}</svg>
      <ul>${cards.map(({ node, lines }) => html`<li key=${node.id} class=${`node ${node.role}`} ref=${placed(drawn.places.get(node.id))}>
        <strong title=${node.name}>${node.name}</strong> <small class="dim">${node.kind}${node.dead_letters ? ", can reject" : ""}</small>
        ${node.reads.length > 0 && html`<span class="visually-hidden">reads ${node.late ? "late records of " : ""}${node.reads.map((id) => nodes.find((each) => each.id === id)?.name).join(", ")}</span>`}
        ${lines.map(({ text, level, href }) => html`<div class=${level}>${href ? html`<a href=${href}>${text}</a>` : text}</div>`)}</li>`)}</ul>
    </div>`}</div>`;
}

// The Content Security Policy forbids style attributes, but not the properties of an element.
const sized = ({ width, height }) => (element) => element && Object.assign(element.style, { width: `${width}px`, height: `${height}px` });
const placed = ({ x, y, width, height }) => (element) => element && Object.assign(element.style, { left: `${x - width / 2}px`, top: `${y - height / 2}px`, width: `${width}px`, height: `${height}px` });

function draw({ Graph: Directed, layout }, cards, down) {
  const graph = new Directed().setGraph({ rankdir: down ? "TB" : "LR", nodesep: 18, ranksep: down ? 30 : 46, marginx: 4, marginy: 4 }).setDefaultEdgeLabel(() => ({}));
  for (const { node, lines } of cards) graph.setNode(node.id, { width: WIDTH, height: LINE * (2 + lines.length) + 14 });
  for (const { node } of cards) for (const read of node.reads) graph.setEdge(read, node.id, { late: node.late });
  layout(graph);
  const { width, height } = graph.graph();
  return { width, height, places: new Map(cards.map(({ node }) => [node.id, graph.node(node.id)])), edges: graph.edges().map((edge) => graph.edge(edge)) };
}

/** A line through `points`, smooth at those between the ends. */
function curve(points) {
  const at = ({ x, y }) => `${x.toFixed(1)} ${y.toFixed(1)}`;
  const middle = (a, b) => ({ x: (a.x + b.x) / 2, y: (a.y + b.y) / 2 });
  const inner = points.slice(1, -1);
  return `M${at(points[0])}${inner.map((point, index) => `Q${at(point)} ${at(index === inner.length - 1 ? points.at(-1) : middle(point, inner[index + 1]))}`).join("")}${inner.length ? "" : `L${at(points.at(-1))}`}`;
}
