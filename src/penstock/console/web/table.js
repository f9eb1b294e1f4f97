// A list of the API as a table: filter, order, pages; all of it is in the URL.
import { useState } from "preact/hooks";
import { download, Failure, html, link, number, usePoll } from "./lib.js";

/**
 * `columns`: {title, cell(row), sort, right, main}; a column with `sort` orders the list by its heading.
 * `filters`: [{name, title, options}] for select boxes, or without options for text. `empty`: a text for a list without
 * any row. The rows stay while others are read, and with them the focus on a link to the next page.
 */
export function List({ route, path = route.page, columns, filters = [{ name: "q", title: "Filter" }], open, initial = "", rowKey, fixed = {}, title, empty, every = 2000 }) {
  const parameters = { sort: initial, limit: 50, ...route.parameters, ...fixed };
  const { data: newest, error, earlier } = usePoll(path, parameters, every);
  const data = newest ?? earlier;
  const [failed, fail] = useState(null);
  const go = (changes) => {
    const { after, back, ...kept } = route.parameters;
    location.hash = link(route.page, null, { ...kept, ...changes });
  };
  const sorted = parameters.sort.replace("-", "");
  const falling = parameters.sort.startsWith("-");
  const order = (column) => go({ sort: sorted === column.sort && !falling === !column.right ? (falling ? column.sort : `-${column.sort}`) : (column.right ? "-" : "") + column.sort });
  const submit = (event) => {
    event.preventDefault();
    go(Object.fromEntries(new FormData(event.target)));
  };
  if (error && !data) return html`<${Failure} error=${error} />`;
  const count = data && (data.matched ?? data.total);
  const uncounted = data && data.matched == null && filters.some(({ name }) => route.parameters[name]);
  return html`<section aria-label=${title}>
    <search><form class="filters" key=${JSON.stringify(route.parameters)} onSubmit=${submit}>
      ${filters.map((filter) => filter.options
        ? html`<label>${filter.title}<select name=${filter.name} onChange=${(event) => event.target.form.requestSubmit()}>
            ${filter.options.map(([value, text]) => html`<option value=${value} selected=${(route.parameters[filter.name] ?? "") === value}>${text}</option>`)}
          </select></label>`
        : html`<label>${filter.title}<input type="search" name=${filter.name} defaultValue=${route.parameters[filter.name] ?? ""} placeholder=${filter.placeholder ?? ""} /></label>`)}
      <button class="secondary">Apply</button>
    </form></search>
    ${(error ?? failed) && html`<${Failure} error=${error ?? failed} />`}
    <div class="table" tabindex="0" role="region" aria-label=${`${title}, table`}><table>
      <thead><tr>${columns.map((column) => html`<th scope="col" class=${column.right ? "right" : ""}
        aria-sort=${column.sort && column.sort === sorted ? (falling ? "descending" : "ascending") : undefined}>
        ${column.sort ? html`<button class="order" onClick=${() => order(column)}>${column.title}${column.sort === sorted ? (falling ? " ▼" : " ▲") : ""}</button>` : column.title}</th>`)}</tr></thead>
      <tbody>${data?.rows.map((row) => html`<tr key=${rowKey(row)}>${columns.map((column, index) => html`<td class=${column.right ? "right" : ""}>
        ${index === 0 && open ? html`<a class="row" href=${open(row)}>${column.cell(row)}</a>` : column.cell(row)}</td>`)}</tr>`)}</tbody>
    </table></div>
    ${newest?.total === 0 && empty && html`<p>${empty}</p>`}
    <nav class="pages" aria-label="Pages">
      <span role="status">${!newest ? "Loading…" : uncounted ? `${number(data.rows.length)} on this page; ${number(data.total)} in all, of which those that match are not counted${data.next && data.rows.length < parameters.limit ? "; the search continues on the next page" : ""}` : `${number(count)} ${data.matched != null && data.matched !== data.total ? `of ${number(data.total)} ` : ""}${count === 1 ? "row" : "rows"}, ${data.rows.length} on this page${data.complete === false ? "; there are more than the list shows" : ""}`}</span>
      ${route.parameters.after && html`<a href=${link(route.page, null, { ...route.parameters, after: "" })}>First page</a>`}
      ${data?.next && html`<a rel="next" href=${link(route.page, null, { ...route.parameters, after: data.next })}>Next page</a>`}
      ${data?.rows.length > 0 && ["csv", "ndjson"].map((format) => html`<button class="plain" onClick=${() => download(path, parameters, format).then(() => fail(null), fail)}>Export ${format.toUpperCase()}</button>`)}
    </nav>
  </section>`;
}

/**
 * A small table of rows that are all there. `rowKey`: of rows whose order changes. `stacked`: in a narrow window the last cell of a row is below the others; the
 * roles keep the table for assistive technology.
 */
export function Plain({ rows, columns, title, rowKey, stacked = false }) {
  const role = (name) => (stacked ? name : undefined);
  return html`<div class=${stacked ? "table stacked" : "table"} tabindex="0" role="region" aria-label=${title}><table role=${role("table")}>
    <thead role=${role("rowgroup")}><tr role=${role("row")}>${columns.map((column) => html`<th scope="col" role=${role("columnheader")} class=${column.right ? "right" : ""}>${column.title}</th>`)}</tr></thead>
    <tbody role=${role("rowgroup")}>${rows.map((row) => html`<tr key=${rowKey?.(row)} role=${role("row")}>${columns.map((column) => html`<td role=${role("cell")} class=${column.right ? "right" : ""}>${column.cell(row)}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

/** Names and values. */
export function Facts({ facts }) {
  return html`<dl class="facts">${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value ?? "–"}</dd></div>`)}</dl>`;
}
