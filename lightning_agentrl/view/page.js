// Head of the page, keys, and what happens when the address changes.

function showHead() {
  byId("name").textContent = INDEX.name;
  const figure = (name, value, about = "") =>
    byId("figures").append(
      make("div", {}, make("dt", { text: name }), make("dd", {}, value, make("span", { class: "quiet", text: about }))),
    );
  if (INDEX.iterations) figure("iterations in the log", formatRange(...INDEX.iterations));
  else document.body.classList.add("untrained");
  figure("episodes", EPISODES.length.toLocaleString("en"));
  figure("turns", INDEX.turns.toLocaleString("en"));
  for (const [key, name] of [["before", "held-out success before"], ["after", "after training"]]) {
    const result = INDEX.summary?.[key];
    if (typeof result?.success !== "number") continue;
    const bounds = "success_low" in result
      ? `  ${formatPercent(result.success_low)} to ${formatPercent(result.success_high)}`
      : "";
    figure(name, formatPercent(result.success), bounds + (result.episodes ? `, ${plural(result.episodes, "episode")}` : ""));
  }
  byId("notes").append(...INDEX.notes.map((text) => make("p", { class: "note", text })));
  if (INDEX.facts) {
    const rows = flatten(INDEX.facts).map(([key, value]) => make("tr", {}, make("td", { text: key }), make("td", { text: value })));
    byId("facts").append(make("details", { id: "run-facts" }, make("summary", { text: "About this run" }), make("table", {}, ...rows)));
  }
  if (INDEX.config) {
    byId("facts").append(make("details", {}, make("summary", { text: "Configuration" }), make("pre", { text: INDEX.config })));
  }
}

// Nested facts as lines of dotted keys.
function flatten(value, path = "") {
  if (value === null || typeof value !== "object") return [[path, String(value)]];
  if (Array.isArray(value) && value.every((item) => item === null || typeof item !== "object")) return [[path, value.join(", ")]];
  return Object.entries(value).flatMap(([key, item]) => flatten(item, path ? path + "." + key : key));
}

function onKey(event) {
  const typing = event.target.closest("input, select, textarea");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "j") goBy(1);
  else if (event.key === "k") goBy(-1);
  else if (event.key === "Escape") keepToken(null);
  else if (event.key === "ArrowRight" && moveToken(1)) event.preventDefault();
  else if (event.key === "ArrowLeft" && moveToken(-1)) event.preventDefault();
}

function onClick(event) {
  if (kept && !event.target.closest(".t, #bar")) keepToken(null);
}

async function followHash() {
  readHash();
  showFilters();
  await applyFilters();
  const row = EPISODES.find((candidate) => candidate.id === state.episode);
  if (row) openEpisode(row, false);
  else closeEpisode();
}

showHead();
showCurves();
setUpList();
followHash();
addEventListener("popstate", followHash);
addEventListener("keydown", onKey);
addEventListener("click", onClick);
addEventListener("scroll", onScroll, { capture: true, passive: true });
