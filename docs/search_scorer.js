// Scores of search results: a page whose own title has every word of the query comes first, and guides come before
// reference pages. The numbers of the object are Sphinx's defaults.
var Scorer = {
  score: (result) => {
    const [docname, title, anchor, , score] = result;
    const words = (new URLSearchParams(window.location.search).get("q") || "").toLowerCase().split(/\s+/);
    const named = !anchor && words.every((word) => title.toLowerCase().includes(word));
    return score + (named ? 20 : 0) - (/^(reference|internals)\//.test(docname) ? 10 : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
