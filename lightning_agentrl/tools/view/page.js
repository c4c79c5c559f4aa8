// Build the head of the page, and handle keys and changes of the address.

function showHead() {
  byId("name").textContent = INDEX.name;
  const figure = (name, value, about = "") =>
    byId("figures").append(
      make("div", {}, make("dt", { text: name }), make("dd", {}, value, make("span", { class: "quiet", text: about }))),
    );
  INDEX.runs.forEach((run, k) => {
    const letter = SIDE_BY_SIDE ? LETTERS[k] + ": " : "";
    for (const [key, name] of [["before", "held-out success before"], ["after", "after training"]]) {
      const result = run.summary?.[key];
      if (typeof result?.success !== "number") continue;
      const bounds = "success_low" in result
        ? `  ${formatPercent(result.success_low)} to ${formatPercent(result.success_high)}`
        : "";
      figure(letter + name, formatPercent(result.success), bounds + (result.episodes ? `, ${plural(result.episodes, "episode")}` : ""));
    }
  });
  if (!INDEX.iterations) document.body.classList.add("untrained");
  else if (!SIDE_BY_SIDE) figure("iterations in the log", formatRange(...INDEX.iterations));
  figure(!SIDE_BY_SIDE ? "episodes" : LETTERS.length > 2 ? "held-out episodes of each" : "pairs of held-out episodes", ROWS.length.toLocaleString("en"));
  figure("turns", INDEX.turns.toLocaleString("en"));
  byId("notes").append(...INDEX.notes.map((text) => make("p", { class: "note", text })));
  if (SIDE_BY_SIDE) {
    document.body.classList.add("two");
    const names = INDEX.runs.map((run, k) => make("span", {}, make("b", { class: "run" + k, text: LETTERS[k] }), " " + run.name));
    document.body.style.setProperty("--runs", names.length);
    const between = (k) => (k === 0 ? "" : k === names.length - 1 ? " and " : ", ");
    byId("name").replaceChildren(...names.flatMap((name, k) => [between(k), name]));
    if (INDEX.differences.length) byId("facts").append(differences());
  }
  INDEX.runs.forEach((run, k) => {
    const of = SIDE_BY_SIDE ? ` ${LETTERS[k]}` : " this run";
    if (run.facts) {
      const rows = flatten(run.facts).map(([key, value]) => make("tr", {}, make("td", { text: key }), make("td", { text: value })));
      byId("facts").append(make("details", { class: "run-facts" }, make("summary", { text: "About" + of }), make("table", {}, ...rows)));
    }
    if (run.config) {
      const title = SIDE_BY_SIDE && INDEX.iterations ? "Configuration of" + of : "Configuration";
      byId("facts").append(make("details", {}, make("summary", { text: title }), make("pre", { text: run.config })));
    }
  });
}

function differences() {
  const line = (tag, cells) => make("tr", {}, ...cells.map((text) => make(tag, { text })));
  const rows = INDEX.differences.map((cells) => line("td", cells));
  const title = plural(INDEX.differences.length, "key") + " of the configuration differ" + (INDEX.differences.length === 1 ? "s" : "");
  return make("details", { open: true }, make("summary", { text: title }), make("table", {}, line("th", ["key", ...LETTERS]), ...rows));
}

// Return nested facts as lines of dotted keys.
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
  else if (event.key === "s" && current) toggleStar(current.row);
  else if (event.key === "Escape") keepToken(null);
  else if (event.key === "ArrowRight" && moveToken(1)) event.preventDefault();
  else if (event.key === "ArrowLeft" && moveToken(-1)) event.preventDefault();
}

function onClick(event) {
  if (kept && !event.target.closest(".t, #bar")) keepToken(null);
}

// Return the failure that the page opens: the first held-out failure on the first list page, or the first failure.
function firstFailure() {
  const failed = shown.slice(0, PAGE_SIZE).filter((row) => row.outcome === "failed");
  return failed.find((row) => row.held) ?? failed[0];
}

async function followHash(choose = () => null) {
  readHash();
  showFilters();
  await applyFilters();
  const asked = ROWS.find((candidate) => candidate.id === state.episode);
  const row = asked ?? choose();
  if (row) openEpisode(row, false, Boolean(asked));
  else closeEpisode();
}

showHead();
showCurves();
setUpList();
if (ROWS.length) {
  followHash(location.hash.length > 1 || onePane() || SIDE_BY_SIDE ? undefined : firstFailure);
  showMarks();
} else byId("bench").remove();
addEventListener("popstate", () => ROWS.length && followHash());
addEventListener("keydown", onKey);
addEventListener("click", onClick);
addEventListener("scroll", onScroll, { capture: true, passive: true });
