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
      while (rows.rows.length > most) rows.deleteRow(-1);
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
