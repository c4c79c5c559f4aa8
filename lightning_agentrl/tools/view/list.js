// The list of episodes: filters, order, pages. Its state lives in the hash of the address.

const SHOWS = {
  all: ["all", () => true],
  ...(SIDE_BY_SIDE
    ? {
        ...Object.fromEntries(
          LETTERS.map((letter, k) => [letter.toLowerCase(), [`${k ? "" : "solved "}by ${letter} only`, (row) => row.verdict === `${letter} only`]]),
        ),
        both: [`by ${EACH}`, (row) => row.verdict === EACH],
        neither: [`by ${NONE}`, (row) => row.verdict === NONE],
      }
    : {
        failed: ["failed", (row) => row.outcome === "failed"],
        solved: ["solved", (row) => row.outcome === "solved"],
        invalid: ["invalid reply", (row) => row.invalid > 0],
        capped: ["token cap", (row) => row.capped > 0],
      }),
  marked: ["★", isMarked],
};
const SOURCES = [...new Set(EPISODES.map((row) => row.source).filter(Boolean))];
const KINDS = SOURCES.length
  ? { "": ["all environments", () => true], ...Object.fromEntries(SOURCES.map((source) => [source, [source, (row) => row.source === source]])) }
  : {
      "": ["trained and held-out", () => true],
      trained: ["trained", (row) => !row.held],
      "held-out": ["held-out", (row) => row.held],
    };
const last = (x) => (Number.isNaN(toNumber(x)) ? -Infinity : Number(x)); // unknown values come last
const SORTS = {
  newest: ["newest", (a, b) => b.last - a.last],
  ...(SIDE_BY_SIDE
    ? {
        seed: ["seed", (a, b) => a.env - b.env],
        gap: ["gap of returns", (a, b) => order(last(b.gap), last(a.gap))],
      }
    : {
        longest: ["longest", (a, b) => b.turns - a.turns],
        kl: ["highest KL", (a, b) => order(last(b.kl), last(a.kl))],
        return: ["lowest return", (a, b) => order(last(negative(b.return)), last(negative(a.return)))],
      }),
};
const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
const negative = (x) => (x === null ? null : -x);

const played = (row) => (row.last ? "after " + row.last : "before");
const PAIR_COLUMNS = [
  ["solved by", (row) => row.verdict],
  ["held-out seed", (row) => row.env + (row.episode ? " / " + row.episode : "")],
  SOURCES.length
    ? ["environment", (row) => row.source]
    : ["iterations", (row) => [...new Set(row.members.map((member) => member.last))].join(" / ")],
  ...LETTERS.flatMap((letter, k) => [
    ["turns " + letter, (row) => row.members[k].turns],
    ["return " + letter, (row) => formatNumber(row.members[k].return, 3)],
  ]),
];
const COLUMNS = SIDE_BY_SIDE ? PAIR_COLUMNS : [
  ["", (row) => row.outcome],
  ["env / ep.", (row) => (row.held ? "held-out " + row.env + (row.episode ? " / " + row.episode : "") : row.env + " / " + row.episode)],
  ["iteration", (row) => (row.held ? played(row) : formatRange(row.first, row.last))],
  ["turns", (row) => row.turns],
  ["return", (row) => formatNumber(row.return, 3)],
  ["KL", (row) => formatNumber(row.kl, 3)],
  ["invalid", (row) => row.invalid],
  ["ended by", (row) => (row.stop ?? "–").replace(/_/g, " ")],
];
const PAGE_SIZE = 100;
const DEFAULTS = { show: "all", kind: "", sort: "newest", q: "", from: "", to: "", page: "1", colour: "", episode: "", turn: "" };
const state = { ...DEFAULTS };
let shown = ROWS; // rows after filters, in order
let asked = 0; // index of the last search; results of earlier searches are dropped

function readHash() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const key in DEFAULTS) state[key] = given.get(key) ?? DEFAULTS[key];
  if (!Object.hasOwn(SHOWS, state.show)) state.show = DEFAULTS.show;
  if (!Object.hasOwn(KINDS, state.kind)) state.kind = DEFAULTS.kind;
  if (!Object.hasOwn(SORTS, state.sort)) state.sort = DEFAULTS.sort;
}

// Filters replace the history's entry; an opened episode adds an entry, so that "back" leads to the list.
function hashOf(values) {
  const changed = Object.keys(DEFAULTS).filter((key) => values[key] !== DEFAULTS[key]);
  return "#" + new URLSearchParams(changed.map((key) => [key, values[key]]));
}

function writeHash(entry = false) {
  const hash = hashOf(state);
  if (hash === (location.hash || "#")) return;
  if (entry) history.pushState({ opened: true }, "", hash);
  else history.replaceState(history.state, "", hash);
}

async function applyFilters() {
  const ticket = ++asked;
  const from = state.from === "" ? -Infinity : Number(state.from);
  const to = state.to === "" ? Infinity : Number(state.to);
  const words = state.q.trim().toLowerCase();
  let rows = ROWS.filter((row) => row.last >= from && row.first <= to && KINDS[state.kind][1](row));
  if (words) {
    byId("count").textContent = "reading all turns …";
    try {
      const texts = await loadHaystacks();
      rows = rows.filter((row) => row.members.some((member) => texts[member.index].includes(words)));
    } catch (error) {
      byId("count").textContent = error.message;
      return;
    }
    if (ticket !== asked) return;
  }
  for (const button of byId("shows").children) {
    const show = button.dataset.show;
    button.setAttribute("aria-pressed", show === state.show);
    button.lastChild.textContent = rows.filter(SHOWS[show][1]).length.toLocaleString("en");
  }
  const compare = SORTS[state.sort][1];
  shown = rows.filter(SHOWS[state.show][1]).sort((a, b) => compare(a, b) || b.index - a.index);
  showPage();
  showNeighbours();
}

function showPage() {
  const pages = Math.max(1, Math.ceil(shown.length / PAGE_SIZE));
  const page = Math.min(Math.max(1, Math.floor(Number(state.page)) || 1), pages);
  state.page = String(page);
  const start = (page - 1) * PAGE_SIZE;
  const rows = shown.slice(start, start + PAGE_SIZE);
  byId("rows").replaceChildren(...rows.map((row) => make("li", {}, rowButton(row))));
  const what = !SIDE_BY_SIDE ? "episode" : LETTERS.length > 2 ? "seed" : "pair";
  byId("count").textContent = shown.length === ROWS.length
    ? plural(shown.length, what)
    : `${shown.length.toLocaleString("en")} of ${plural(ROWS.length, what)}`;
  const turn = (label, by) =>
    make("button", { type: "button", text: label, disabled: page + by < 1 || page + by > pages, onclick: () => goToPage(page + by) });
  byId("pages").hidden = pages === 1;
  byId("pages").replaceChildren(
    turn("‹ previous", -1),
    make("span", { text: `${start + 1}–${start + rows.length} of ${shown.length.toLocaleString("en")}` }),
    turn("next ›", 1),
  );
  writeHash();
}

function rowButton(row) {
  const cells = COLUMNS.map(([name, of], k) => make("span", { text: of(row), "data-name": name, class: k ? null : row.outcome }));
  if (SIDE_BY_SIDE) row.members.forEach((member, k) => cells[4 + 2 * k].classList.add(member.outcome));
  else cells[4].className = "return";
  if (row.invalid) cells[6].className = "flag";
  return make(
    "button",
    { type: "button", class: isMarked(row) ? "row starred" : "row", "data-id": row.id, "aria-current": row.id === state.episode, onclick: () => openEpisode(row) },
    ...cells,
  );
}

function goToPage(page) {
  state.page = String(page);
  showPage();
  byId("rows").scrollTop = 0;
  if (byId("rows").getBoundingClientRect().top < 0) byId("list").scrollIntoView();
}

// Mark the open episode in the list, on any page of the list.
function markRow(row, scroll = true) {
  const place = shown.indexOf(row);
  if (place < 0) return;
  const page = String(Math.floor(place / PAGE_SIZE) + 1);
  if (page !== state.page) {
    state.page = page;
    showPage();
  }
  for (const button of byId("rows").querySelectorAll(".row")) {
    button.setAttribute("aria-current", button.dataset.id === row.id);
    if (scroll && button.dataset.id === row.id) button.scrollIntoView({ block: "nearest" });
  }
}

function setUpList() {
  for (const [show, [label]] of Object.entries(SHOWS)) {
    const press = () => change({ show });
    byId("shows").append(
      make("button", { type: "button", "data-show": show, onclick: press }, label, make("span", { class: "quiet" })),
    );
  }
  if (!INDEX.iterations) delete SORTS.kl;
  for (const [kind, [label]] of Object.entries(KINDS)) byId("kind").append(make("option", { value: kind, text: label }));
  byId("kind").hidden = SOURCES.length ? SOURCES.length === 1 : SIDE_BY_SIDE || !EPISODES.some((row) => row.held);
  byId("kind").addEventListener("change", (event) => change({ kind: event.target.value }));
  byId("marks").addEventListener("click", saveMarks);
  for (const [sort, [label]] of Object.entries(SORTS)) byId("sort").append(make("option", { value: sort, text: label }));
  document.querySelector(".names").append(...COLUMNS.map(([name]) => make("span", { text: name })));
  const [first, final] = INDEX.iterations ?? [1, 1];
  byId("from").placeholder = first;
  byId("to").placeholder = final;
  byId("sort").addEventListener("change", (event) => change({ sort: event.target.value }));
  for (const [id, key] of [["search", "q"], ["from", "from"], ["to", "to"]]) {
    byId(id).addEventListener("input", (event) => change({ [key]: event.target.value }));
  }
}

function change(part) {
  Object.assign(state, part, { page: "1" });
  byId("rows").scrollTop = 0;
  applyFilters();
}

function showFilters() {
  byId("kind").value = state.kind;
  byId("sort").value = state.sort;
  for (const [id, key] of [["search", "q"], ["from", "from"], ["to", "to"]]) {
    if (byId(id).value !== state[key]) byId(id).value = state[key];
  }
}
