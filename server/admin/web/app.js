"use strict";
// The pages work without this script. It brings them up to date on their own,
// and shows changes as they happen.
(() => {
  const every = 5000;
  const most = 500; // rows of changes on one page
  const main = document.getElementById("main");
  const pause = document.getElementById("pause");
  const updated = document.getElementById("updated");
  let paused = false;

  pause.hidden = main.dataset.live === "none";
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "Paused" : "Pause";
    updated.textContent = paused ? "Not updated while paused." : "";
  });

  // busy reports that replacing the content would disturb somebody.
  const busy = () => paused || document.hidden || !getSelection().isCollapsed || /^(INPUT|SELECT)$/.test(document.activeElement.tagName);

  // What tables are sorted by: column and direction by label. Those with links
  // in their headings are sorted by the bridge.
  const order = new Map();
  const keyOf = (cell) => {
    if (cell.matches(".number")) return cell.innerText.replaceAll(",", "");
    return cell.querySelector("time")?.dateTime ?? cell.innerText;
  };
  const compare = (a, b) => a.localeCompare(b, "en", {numeric: true});
  const sort = (table) => {
    const {column, down} = order.get(labelOf(table)) ?? {};
    if (column === undefined) return;
    [...table.tHead.rows[0].cells].forEach((th, i) => {
      if (i === column) th.setAttribute("aria-sort", down ? "descending" : "ascending");
      else th.removeAttribute("aria-sort");
    });
    const rows = [...table.tBodies[0].rows].map((row) => [keyOf(row.cells[column]), row]);
    rows.sort(([a], [b]) => down ? compare(b, a) : compare(a, b));
    table.tBodies[0].append(...rows.map(([, row]) => row));
  };
  const labelOf = (table) => table.closest(".scroll").getAttribute("aria-label");
  const sortable = () => main.querySelectorAll(".scroll > table").forEach((table) => {
    if (table.tHead.querySelector("a")) return;
    [...table.tHead.rows[0].cells].forEach((th, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...th.childNodes);
      button.addEventListener("click", () => {
        const now = order.get(labelOf(table));
        order.set(labelOf(table), {column, down: now?.column === column && !now.down});
        main.querySelectorAll(".scroll > table").forEach(sort);
      });
      th.append(button);
    });
    sort(table);
  });
  sortable();

  const refresh = async () => {
    if (busy()) return;
    try {
      const answer = await fetch(location.href, {headers: {"Accept": "text/html"}, signal: AbortSignal.timeout(4 * every)});
      if (!answer.ok) throw new Error(answer.status);
      const text = await answer.text();
      if (busy()) return;
      const fresh = new DOMParser().parseFromString(text, "text/html");
      const next = fresh.getElementById("main");
      const focused = [...main.querySelectorAll("a, button, summary, [tabindex]")].indexOf(document.activeElement);
      const sides = [...main.querySelectorAll(".scroll")].map((s) => s.scrollLeft);
      main.querySelectorAll("details[data-key]").forEach((d) => {
        const same = next.querySelector(`details[data-key="${CSS.escape(d.dataset.key)}"]`);
        if (same) same.open = d.open;
      });
      main.replaceChildren(...next.childNodes);
      sortable();
      main.querySelectorAll(".scroll").forEach((s, i) => { s.scrollLeft = sides[i] || 0; });
      if (focused >= 0) [...main.querySelectorAll("a, button, summary, [tabindex]")][focused]?.focus({preventScroll: true});
      document.querySelector("header nav").replaceChildren(...fresh.querySelector("header nav").childNodes);
      document.getElementById("about").replaceWith(fresh.getElementById("about"));
      updated.textContent = "";
    } catch {
      updated.textContent = "The bridge does not answer; this page is not up to date.";
    }
  };

  const follow = (rows) => {
    const live = document.getElementById("live");
    const stream = new EventSource(rows.dataset.stream);
    let lost; // a stream ends each minute, and the next one opens at once
    stream.onopen = () => {
      clearTimeout(lost);
      live.textContent = "Live.";
    };
    stream.onerror = () => {
      clearTimeout(lost);
      lost = setTimeout(() => { live.textContent = "The bridge does not answer; it is tried again."; }, 2000);
    };
    stream.addEventListener("changes", (event) => {
      if (paused) return;
      const t = document.createElement("template");
      t.innerHTML = event.data; // made by the bridge's templates, which escape
      rows.prepend(t.content);
      while (rows.rows.length > most) { // without the oldest
        [...rows.rows].reduce((a, b) => keyOf(b.cells[0]) < keyOf(a.cells[0]) ? b : a).remove();
      }
      sort(rows.parentElement);
      document.getElementById("none")?.remove();
    });
    stream.addEventListener("missed", () => location.reload());
  };

  const rows = document.getElementById("changes");
  if (rows && rows.dataset.stream) {
    follow(rows);
  } else if (main.dataset.live === "poll") {
    setInterval(refresh, every);
  }
})();
