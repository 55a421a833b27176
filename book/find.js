// On the search page, above the list of pages: the questions and myths that hold what is asked.
"use strict";
(() => {
  const asked = new URLSearchParams(location.search).get("q")?.toLowerCase();
  const pages = document.getElementById("search-results");
  if (!asked || !pages) return;
  const MOST = 12;
  const chinese = /[\u3400-\u9fff]/u.test(asked);
  // Words; Chinese has no spaces, so what is not found as it stands is looked for sign by sign.
  const words = asked.match(/[\u3400-\u9fff]+|[^\s\u3400-\u9fff]+/gu) ?? [];
  const signs = asked.match(/[\u3400-\u9fff]|[^\s\u3400-\u9fff]+/gu) ?? [];
  const holds = (text, parts) => parts.every((part) => text.toLowerCase().includes(part));

  const data = document.createElement("script");
  data.src = new URL("cards.js", document.currentScript.src);
  data.onload = () => {
    let found = [], parts;
    for (parts of [words, signs]) {
      found = window.dzCards.filter((card) => holds(`${card.front} ${card.back}`, parts));
      if (found.length) break;
    }
    if (!found.length) return;
    found.sort((a, b) => holds(b.front, parts) - holds(a.front, parts));
    const title = document.createElement("h2");
    title.textContent = chinese ? "问题与误解" : "Questions and myths";
    const list = document.createElement("ul");
    list.id = "dz-cards";
    for (const card of found.slice(0, MOST)) {
      const link = document.createElement("a");
      link.href = card.at;
      link.textContent = chinese ? card.title.zh : card.title.en;
      link.lang = chinese ? "zh" : "en";
      const item = document.createElement("li");
      item.append(link);
      list.append(item);
    }
    if (found.length > MOST) {
      const rest = document.createElement("li");
      const n = found.length - MOST;
      rest.textContent = chinese ? `还有 ${n} 条，请多输入一个词` : `${n} more: add a word`;
      list.append(rest);
    }
    pages.before(title, list);
  };
  document.head.append(data);
})();
