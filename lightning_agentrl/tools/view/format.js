// Make elements, and format numbers and text. Text of a run enters the page only here, as text nodes.

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const byId = (id) => document.getElementById(id);

// JSON has no NaN and no infinity: logs write them as text, or as null.
const toNumber = (x) => (x === null ? NaN : Number(x));

// Return minimum and maximum of any count of numbers; Math.min takes at most some 100,000 arguments.
const ends = (numbers) => numbers.reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [Infinity, -Infinity]);

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";

function formatNumber(x, digits = 4) {
  if (x === null || x === undefined) return "–";
  const number = Number(x);
  if (Number.isNaN(number)) return "NaN";
  if (!Number.isFinite(number)) return number > 0 ? "∞" : "−∞";
  const size = Math.abs(number);
  if (size === 0 || (size >= 1e-3 && size < 1e6)) return String(Number(number.toPrecision(digits))).replace("-", "−");
  const [factor, power] = number.toExponential(Math.min(digits, 3) - 1).split("e");
  const raised = [...String(Number(power))].map((c) => (c === "-" ? "⁻" : SUPERSCRIPTS[c])).join("");
  return `${Number(factor)}·10${raised}`.replace("-", "−");
}

const formatPercent = (x) => (100 * x).toFixed(1) + " %";

const formatRange = (first, last) => (first === last ? String(first) : first + "–" + last);

const plural = (count, word) => count.toLocaleString("en") + " " + word + (count === 1 ? "" : "s");

const SPECIAL = /^(<[|｜][^<>]*[|｜]>|<\/?[a-z][a-z_]*>|\[[A-Z_]+\])$/;

// Return a token's text with signs for invisible characters. A line break follows its sign.
function showToken(text) {
  if (text === "") return "∅";
  const spaced = /^ +$/.test(text) ? text.replace(/ /g, "␣") : text;
  return spaced
    .replace(/\t/g, "⇥")
    .replace(/\r/g, "␍")
    .replace(/\n/g, "⏎\n")
    .replace(/[\x00-\x08\x0b\x0c\x0e-\x1f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)));
}
