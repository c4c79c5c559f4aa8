// Small multiples: one tile per metric, with its range, its last value and a read-out of any point.

const SVG = "http://www.w3.org/2000/svg"; // a name, nothing is loaded from it
const WIDTH = 200;
const HEIGHT = 46;

function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// All tiles share the axis of the longest curve, so that they can be compared.
function reach() {
  const lists = Object.values(INDEX.curves.series).map(([xs]) => xs);
  return [Math.min(...lists.map((xs) => xs[0])), Math.max(...lists.map((xs) => xs[xs.length - 1]))];
}

function tile(name) {
  const xs = INDEX.curves.series[name][0];
  const ys = INDEX.curves.series[name][1].map(Number);
  const finite = ys.filter(Number.isFinite);
  const low = Math.min(...finite);
  const high = Math.max(...finite);
  const [first, final] = reach();
  const toX = (x) => (final > first ? ((x - first) / (final - first)) * WIDTH : WIDTH / 2);
  const toY = (y) => (high > low ? HEIGHT - ((y - low) / (high - low)) * HEIGHT : HEIGHT / 2);

  let line = "";
  let pen = "M"; // lifted where a value is missing
  xs.forEach((x, i) => {
    if (!Number.isFinite(ys[i])) return void (pen = "M");
    const alone = pen === "M" && !Number.isFinite(ys[i + 1]); // round line ends make it a dot
    line += pen + toX(x).toFixed(1) + " " + toY(ys[i]).toFixed(1) + (alone ? "h0" : "");
    pen = "L";
  });

  const value = make("b");
  const where = make("span", { class: "where" });
  const last = ys.length - 1;
  const plain = () => {
    value.textContent = formatNumber(ys[last], 3);
    where.textContent = "";
    for (const mark of [dot, guide]) mark.setAttribute("d", "");
  };
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  picture.setAttribute("aria-label", `${name}, last value ${formatNumber(ys[last], 3)}`);
  const dot = svg("path", { class: "dot" });
  const guide = svg("path", { class: "guide" });
  picture.append(svg("path", { class: "frame", d: `M0 ${HEIGHT}H${WIDTH}M0 0H${WIDTH}` }), guide);
  picture.append(svg("path", { d: line }), dot);

  const read = (event) => {
    const box = picture.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    let near = 0;
    xs.forEach((x, i) => {
      if (Math.abs(toX(x) - at) < Math.abs(toX(xs[near]) - at)) near = i;
    });
    value.textContent = formatNumber(ys[near], 3);
    where.textContent = `at ${INDEX.curves.x} ${xs[near]}`;
    guide.setAttribute("d", `M${toX(xs[near])} 0V${HEIGHT}`);
    dot.setAttribute("d", Number.isFinite(ys[near]) ? `M${toX(xs[near])} ${toY(ys[near])}h0` : "");
  };
  picture.addEventListener("pointermove", read);
  picture.addEventListener("pointerdown", read);
  picture.addEventListener("pointerleave", plain);
  plain();

  const range = finite.length ? [high, low].map((y) => make("span", { text: formatNumber(y, 3) })) : [];
  const ends = final > first ? [first, final] : [first];
  return make(
    "div",
    { class: "tile", "data-name": name },
    make("div", { class: "metric", text: name, title: name }),
    make("div", { class: "top" }, value, where),
    make(
      "div",
      { class: "plot" },
      make("div", { class: "range" }, ...range),
      picture,
      make("div", { class: "ends" }, ...ends.map((x) => make("span", { text: x }))),
    ),
  );
}

function showCurves() {
  if (!INDEX.curves) return byId("curves").remove();
  const { main, series, x } = INDEX.curves;
  const names = Object.keys(series);
  if (!names.length) {
    byId("curves-about").textContent = "there are no TensorBoard events in this run";
    byId("curves").open = false;
    return;
  }
  byId("curves-about").textContent = `over ${x}s`;
  byId("curves-main").append(...main.map(tile));
  const rest = names.filter((name) => !main.includes(name));
  const more = byId("curves-more");
  more.hidden = !rest.length;
  const label = () => {
    more.textContent = byId("curves-rest").hidden ? `Show ${plural(rest.length, "other metric")}` : "Hide other metrics";
  };
  more.addEventListener("click", () => {
    const box = byId("curves-rest");
    if (!box.childElementCount) box.append(...rest.map(tile));
    box.hidden = !box.hidden;
    label();
  });
  label();
  if (matchMedia("(max-width: 640px)").matches) byId("curves").open = false; // the list comes first on a phone
}
