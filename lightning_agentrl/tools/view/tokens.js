// Color reply tokens, and show the read-out of one token.

const QUANTITIES = Object.fromEntries(INDEX.quantities.map((quantity) => [quantity.name, quantity]));
const DEFAULT_COLOUR = (INDEX.quantities.find((quantity) => !quantity.absent) ?? INDEX.quantities[0]).name;
const LISTS = {
  advantages: "advantage",
  returns: "return",
  values: "value",
  entropy: "entropy",
  rollout_logps: "log-prob when sampled",
  old_logps: "log-prob before the update",
  ref_logps: "log-prob of the reference",
};

// Return the chosen quantity or the first. Held-out episodes have only log-probs, since they are not trained on.
function currentQuantity() {
  const chosen = QUANTITIES[state.colour];
  if (chosen && !chosen.absent) return chosen;
  const known = (quantity) => current.sides.some(({ turns }) => turns.some((turn) => numbersOf(quantity, turn)));
  return INDEX.quantities.find((quantity) => !quantity.absent && current?.sides && known(quantity)) ?? QUANTITIES[DEFAULT_COLOUR];
}

// Return one number per token, NaN for non-finite numbers; null if the turn lacks a list.
function numbersOf(quantity, turn) {
  const values = turn[quantity.plus];
  const other = quantity.minus ? turn[quantity.minus] : null;
  if (!values || (quantity.minus && !other)) return null;
  return values.map((x, i) => toNumber(x) - (other ? toNumber(other[i]) : 0));
}

// Set the class and strength of a number on the scale of the whole run.
function paint(element, quantity, x) {
  element.classList.remove("pos", "neg", "seq", "none");
  if (x === null || x === undefined || Number.isNaN(x)) {
    element.classList.add("none");
    return;
  }
  let strength;
  if (quantity.signed) {
    strength = Math.min(1, Math.abs(x) / quantity.high);
    if (x !== 0) element.classList.add(x > 0 ? "pos" : "neg");
  } else {
    const span = quantity.high - quantity.low;
    const share = span > 0 ? Math.min(1, Math.max(0, (x - quantity.low) / span)) : 0.5;
    strength = quantity.strongLow ? 1 - share : share;
    element.classList.add("seq");
  }
  element.style.setProperty("--t", strength.toFixed(3));
}

// Return the mean of the finite numbers; null without finite numbers.
function mean(numbers) {
  const finite = (numbers ?? []).filter(Number.isFinite);
  return finite.length ? finite.reduce((sum, x) => sum + x, 0) / finite.length : null;
}

function replyBox(turn) {
  const box = make("div", { class: "reply" });
  const thought = turn.thought_tokens ?? 0;
  turn.tokens.forEach((text, i) => {
    const kind = "t" + (i < thought ? "" : " acts") + (SPECIAL.test(text) ? " special" : "");
    box.append(make("span", { class: kind, "data-i": i, text: showToken(text) }));
  });
  return box;
}

// The read-out follows the mouse; a tap or the arrow keys keep the read-out at one token.

let kept = null;

function readToken(span, turn) {
  const i = Number(span.dataset.i);
  const box = byId("readout");
  const quantity = currentQuantity();
  const part = i < (turn.thought_tokens ?? 0) ? "thought" : "action";
  const rows = INDEX.quantities
    .filter((q) => q.minus)
    .map((q) => [q.name, numbersOf(q, turn)?.[i], q === quantity]);
  for (const [list, label] of Object.entries(LISTS)) {
    rows.push([label, turn[list]?.[i], !quantity.minus && quantity.plus === list]);
  }
  box.replaceChildren(
    make("div", { class: "text", text: JSON.stringify(turn.tokens[i]) }),
    make("div", { class: "quiet", text: `id ${turn.reply_ids[i]}, token ${i + 1} of ${turn.tokens.length}, ${part}` }),
    make(
      "table",
      {},
      ...rows.map(([label, x, now]) =>
        make("tr", { class: now ? "now" : null }, make("td", { text: label }), make("td", { text: formatNumber(x, 5) })),
      ),
    ),
  );
  box.hidden = false;
  placeReadout(span);
}

function placeReadout(span) {
  const box = byId("readout");
  const at = span.getClientRects()[0];
  const size = box.getBoundingClientRect();
  const below = at.bottom + 8 + size.height < innerHeight;
  box.style.left = Math.max(8, Math.min(at.left, innerWidth - size.width - 8)) + "px";
  box.style.top = Math.max(8, below ? at.bottom + 8 : at.top - size.height - 8) + "px";
}

function keepToken(span, turn) {
  kept?.span.classList.remove("read");
  kept = span ? { span, turn } : null;
  if (!span) return void (byId("readout").hidden = true);
  span.classList.add("read");
  readToken(span, turn);
}

function watchTokens(box, turn) {
  const token = (event) => event.target.closest(".t");
  box.addEventListener("pointerover", (event) => {
    if (event.pointerType === "mouse" && token(event)) readToken(token(event), turn);
  });
  box.addEventListener("pointerleave", () => {
    if (kept) readToken(kept.span, kept.turn);
    else byId("readout").hidden = true;
  });
  box.addEventListener("click", (event) => {
    const span = token(event);
    if (span) keepToken(span === kept?.span ? null : span, turn);
  });
}

// Move the read-out with its token, which may scroll.
function onScroll() {
  if (kept) placeReadout(kept.span);
  else byId("readout").hidden = true;
}

// Move a kept read-out left or right; return whether a read-out was kept.
function moveToken(by) {
  const next = kept && (by > 0 ? kept.span.nextElementSibling : kept.span.previousElementSibling);
  if (next) keepToken(next, kept.turn);
  return Boolean(kept);
}
