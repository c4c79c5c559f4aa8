// Show one episode, turn by turn.

let current = null; // { row, sides } of the open line; a side is { member, turns, replies, cells }

async function openEpisode(row, entry = true, scroll = true) {
  if (entry) state.turn = "";
  state.episode = row.id;
  writeHash(entry && !document.body.classList.contains("reading"));
  markRow(row, scroll);
  let loaded;
  try {
    loaded = await Promise.all(row.members.map(loadTurns));
  } catch (error) {
    byId("detail").replaceChildren(make("p", { class: "hint", text: error.message }));
    return;
  }
  if (state.episode !== row.id) return; // another episode was opened meanwhile
  keepToken(null);
  current = { row, sides: row.members.map((member, k) => side(member, loaded[k])) };
  byId("detail").replaceChildren(bar(row), ...(SIDE_BY_SIDE ? [besideEachOther(current.sides)] : current.sides[0].parts));
  document.body.classList.add("reading");
  showColours();
  showNeighbours();
  byId("detail").focus({ preventScroll: true }); // focus the turns, so that the browser's keys scroll them
  byId("detail").scrollTop = 0;
  if (onePane()) scrollTo(0, 0);
  byId("detail").style.setProperty("--bar", byId("bar").offsetHeight + "px");
  const linked = state.turn === "" ? [] : byId("detail").querySelectorAll(`.turn[data-turn="${Number(state.turn)}"]`);
  for (const card of linked) card.classList.add("linked");
  linked[0]?.scrollIntoView();
}

// Build the elements of an episode: `parts` are all elements in order, and end with the cards of the turns.
function side(member, turns) {
  const replies = [];
  const cards = turns.map((turn) => turnCard(turn, replies, member));
  const cells = turns.length > 1 ? strip(turns, replies) : null;
  return { member, turns, replies, cells, cards, parts: [about(member, turns), ...(cells ? [cells] : []), ...cards] };
}

// Show two episodes of one seed, with turns of the same index side by side.
function besideEachOther(sides) {
  const rows = Math.max(...sides.map(({ cards }) => cards.length));
  const cells = sides.map(({ parts, cards }) => make("div", { class: "turn" }, ...parts.slice(0, parts.length - cards.length)));
  for (let k = 0; k < rows; k++) cells.push(...sides.map(({ cards }) => cards[k] ?? make("div", { class: "turn" })));
  return make("div", { class: "pair" }, ...cells);
}

const onePane = () => getComputedStyle(byId("bench")).display === "block";

function closeEpisode() {
  if (!current) return;
  const id = current.row.id;
  current = null;
  state.episode = "";
  state.turn = "";
  keepToken(null);
  document.body.classList.remove("reading");
  writeHash();
  document.querySelector(`.row[data-id="${id}"]`)?.scrollIntoView({ block: "center" });
}

// If the address named the episode, the history has no list to go back to.
function goBack() {
  if (history.state?.opened) history.back();
  else closeEpisode();
}

function bar(row) {
  const go = (label, by, key) =>
    make(
      "button",
      { type: "button", class: "go", "data-by": by, title: `key ${key}`, "aria-label": label, onclick: () => goBy(by) },
      by < 0 ? "‹" : make("span", { class: "wide", text: label + " " }),
      by < 0 ? make("span", { class: "wide", text: " " + label }) : "›",
    );
  const select = make("select", { id: "colour", onchange: (event) => recolour(event.target.value) });
  for (const { name, absent } of INDEX.quantities) {
    select.append(make("option", { value: name, text: absent ? `${name} (${absent})` : name, disabled: Boolean(absent) }));
  }
  select.value = currentQuantity().name;
  return make(
    "div",
    { id: "bar" },
    make(
      "div",
      { class: "line" },
      make("button", { type: "button", class: "back", text: "‹ list", onclick: goBack }),
      make(
        "div",
        { class: "title" },
        make("h3", { text: titleOf(row) + " " }),
        make("span", { class: row.outcome, text: row.outcome ?? `solved by ${row.verdict}` }),
      ),
      go("previous", -1, "k"),
      go("next", 1, "j"),
    ),
    make("div", { class: "line" }, make("label", {}, "color by ", select), make("div", { class: "legend", id: "legend" })),
    markBox(row),
  );
}

function about(row, turns) {
  const stop = row.stop ? `ended by ${row.stop.replace(/_/g, " ")}` : "still running when the log ends";
  const facts = [
    SIDE_BY_SIDE ? `${LETTERS[row.run]}: ${INDEX.runs[row.run].name}, ${row.outcome}` : null,
    row.held ? playedAfter(row) : INDEX.iterations ? `iteration ${formatRange(row.first, row.last)}` : null,
    plural(row.turns, "turn"),
    `return ${formatNumber(row.return)}`,
    stop,
    row.kl === null ? null : `mean KL ${formatNumber(row.kl, 3)}`,
    row.invalid ? plural(row.invalid, "invalid turn") : null,
  ];
  const box = make("div", { class: "about" }, facts.filter(Boolean).join(" · "));
  let expected = 0;
  for (const { turn } of turns) {
    if (turn > expected) {
      const one = turn - expected === 1;
      const gap = one ? `Turn ${expected} of this episode is` : `Turns ${expected} to ${turn - 1} of this episode are`;
      box.append(make("div", { class: "note", text: gap + (expected ? " not in the log." : " no longer in the log.") }));
    }
    expected = turn + 1;
  }
  const keys = make("span", { class: "key", text: "underlined" });
  box.append(make("div", {}, "Tokens that name the action are ", keys, ", those of the thought are not. Tap a token for its numbers."));
  return box;
}

// Draw one cell per turn in the color of the turn's mean, to show which turns got the credit.
function strip(turns, replies) {
  const cells = turns.map((turn, k) => {
    const odd = turn.valid === false;
    const jump = () => replies[k].card.scrollIntoView();
    const title = `turn ${turn.turn}` + (odd ? ", invalid reply" : "");
    return make("button", { type: "button", text: turn.turn, title, class: odd ? "odd" : null, onclick: jump });
  });
  return make("nav", { class: "strip", "aria-label": "Turns" }, ...cells);
}

function turnCard(turn, replies, member) {
  const box = replyBox(turn);
  const label = make("p", { class: "label" });
  watchTokens(box, turn);
  const card = make(
    "article",
    { class: "turn", "data-turn": turn.turn },
    make("header", {}, make("h3", { text: (SIDE_BY_SIDE ? LETTERS[member.run] + ": turn " : "Turn ") + turn.turn }), ...tags(turn), linkTo(turn)),
    picture(turn),
    ...observation(turn),
    prompt(turn),
    label,
    box,
    numbers(turn),
  );
  replies.push({ turn, box, label, card });
  return card;
}

function observation(turn) {
  if (!turn.observation) return []; // the observation is only an image
  return [make("p", { class: "label", text: "observation" }), make("div", { class: "said", text: turn.observation })];
}

function linkTo(turn) {
  const title = "a link to this turn";
  return make("a", { class: "link", href: hashOf({ ...state, turn: String(turn.turn) }), title, text: "link" });
}

function tags(turn) {
  const where = (turn.phase === "held_out" ? playedAfter({ last: turn.iteration }) : `iteration ${turn.iteration}`) + (turn.policy_version === undefined ? "" : `, weights after ${plural(turn.policy_version, "step")}`);
  const found = INDEX.iterations ? [make("span", { class: "quiet", text: where })] : [];
  const tag = (text, bad = false) => found.push(make("span", { class: bad ? "tag bad" : "tag", text }));
  if (turn.phase === "critic_warmup") tag("critic warm-up");
  if (turn.valid === false) tag("invalid reply", true);
  if (turn.hit_token_cap) tag("cut by the token cap", true);
  if (turn.history_cuts) tag(`${plural(turn.history_cuts, "turn")} of history cut`);
  if (turn.stop) tag(`ended: ${turn.stop.replace(/_/g, " ")}`);
  return found;
}

function picture(turn) {
  if (!turn.image) return null;
  return make("img", { src: "data:image/png;base64," + turn.image, alt: `image of turn ${turn.turn}` });
}

function prompt(turn) {
  if (turn.prompt === undefined) return null;
  const count = turn.prompt_tokens === undefined ? "" : `, ${plural(turn.prompt_tokens, "token")}`;
  const title = turn.continues ? `Added to the prompt${count}; the model also read the turns before` : `Prompt${count}`;
  return make("details", {}, make("summary", { text: title }), make("pre", { text: turn.prompt }));
}

function numbers(turn) {
  const list = make("dl", { class: "numbers" });
  const add = (name, text, kind = null) => {
    if (text !== undefined) list.append(make("div", {}, make("dt", { text: name }), " ", make("dd", { text, class: kind })));
  };
  const number = (name, x, unit = "", kind = null) => add(name, x === undefined ? undefined : formatNumber(x) + unit, kind);
  add("parsed", turn.parsed_action ?? "nothing");
  add("→ executed", turn.action);
  number("reward", turn.reward, "", turn.reward > 0 ? "solved" : turn.reward < 0 ? "failed" : null);
  if (turn.env_reward !== turn.reward) number("of the environment", turn.env_reward);
  number("return so far", turn.episode_return);
  const branches = turn.branch_returns ?? [];
  if (branches.length) add("forks returned", branches.map((x) => formatNumber(x)).join(", "));
  number("environment took", turn.env_seconds, " s");
  number("engine took", turn.engine_seconds, " s");
  for (const [name, x] of Object.entries(turn.metrics ?? {})) number(name, x);
  const errors = (turn.env_errors ?? []).map((text) => make("div", { class: "note", text: `environment: ${text}` }));
  return make("div", {}, list, ...errors);
}

function recolour(name) {
  state.colour = name === DEFAULT_COLOUR ? "" : name;
  writeHash();
  showColours();
  if (kept) readToken(kept.span, kept.turn);
}

function showColours() {
  const quantity = currentQuantity();
  for (const { replies, cells } of current.sides) {
    replies.forEach(({ turn, box, label }, k) => {
      const values = numbersOf(quantity, turn);
      for (const span of box.children) paint(span, quantity, values?.[span.dataset.i]);
      if (cells) paint(cells.children[k], quantity, mean(values));
      const count = `reply, ${plural(turn.tokens.length, "token")}`;
      const told = values ? `mean ${formatNumber(mean(values), 3)}` : "not in this turn";
      label.textContent = `${count}; ${quantity.name}: ${told}`;
    });
  }
  const shape = quantity.signed ? "signed" : quantity.strongLow ? "down" : "up";
  const legend = quantity.absent
    ? [make("span", { text: "the log holds no numbers of tokens" })]
    : [
        make("span", { text: "≤ " + formatNumber(quantity.low, 3) }),
        make("i", { class: shape }),
        make("span", { text: "≥ " + formatNumber(quantity.high, 3) }),
        make("span", { text: `whole run: ${formatNumber(quantity.min, 3)} to ${formatNumber(quantity.max, 3)}` }),
      ];
  byId("legend").replaceChildren(...legend);
}

// Show the neighbors in the list with its current filter and order.

const neighbour = (by) => shown[shown.indexOf(current?.row) + by];

function showNeighbours() {
  for (const button of document.querySelectorAll("#bar .go")) button.disabled = !neighbour(Number(button.dataset.by));
}

function goBy(by) {
  const row = current ? neighbour(by) : shown[0];
  if (!row) return;
  if (!onePane()) byId("bench").scrollIntoView({ block: "nearest" });
  openEpisode(row);
}
