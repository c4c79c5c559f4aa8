// One tile per metric, with the metric's range, its last value and a read-out of any point.

const SVG = "http://www.w3.org/2000/svg"; // an XML namespace, from which nothing is loaded
const WIDTH = 200;
const HEIGHT = 46;

function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// All tiles share the axis of the longest curve, so that tiles can be compared.
function reach() {
  const lists = Object.values(INDEX.curves.series).flatMap((runs) => runs.filter(Boolean).map(([xs]) => xs));
  return [Math.min(...lists.map((xs) => xs[0])), Math.max(...lists.map((xs) => xs[xs.length - 1]))];
}

function pathOf(xs, ys, toX, toY) {
  let line = "";
  let pen = "M"; // "M" after a missing value, so that the line has a gap
  xs.forEach((x, i) => {
    if (!Number.isFinite(ys[i])) return void (pen = "M");
    const alone = pen === "M" && !Number.isFinite(ys[i + 1]); // a single point is drawn as a dot by round line ends
    line += pen + toX(x).toFixed(1) + " " + toY(ys[i]).toFixed(1) + (alone ? "h0" : "");
    pen = "L";
  });
  return line;
}

const nearest = (xs, toX, at) => xs.reduce((best, x, i) => (Math.abs(toX(x) - at) < Math.abs(toX(xs[best]) - at) ? i : best), 0);

// Draw one metric: for each run with this metric, the curve's points and the elements that show a value.
function tile(name) {
  const curves = INDEX.curves.series[name].flatMap((series, run) =>
    series ? [{ run, xs: series[0], ys: series[1].map(Number), value: make("b", { class: "run" + run }), dot: svg("path", { class: "dot run" + run }) }] : [],
  );
  const finite = curves.flatMap(({ ys }) => ys.filter(Number.isFinite));
  const [low, high] = ends(finite);
  const [first, final] = reach();
  const toX = (x) => (final > first ? ((x - first) / (final - first)) * WIDTH : WIDTH / 2);
  const toY = (y) => (high > low ? HEIGHT - ((y - low) / (high - low)) * HEIGHT : HEIGHT / 2);
  const text = (curve, i) => (SIDE_BY_SIDE ? LETTERS[curve.run] + " " : "") + formatNumber(curve.ys[i], 3);

  const where = make("span", { class: "where" });
  const guide = svg("path", { class: "guide" });
  const plain = () => {
    for (const curve of curves) {
      curve.value.textContent = text(curve, curve.ys.length - 1);
      curve.dot.setAttribute("d", "");
    }
    where.textContent = "";
    guide.setAttribute("d", "");
  };
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  const lasts = curves.map((curve) => text(curve, curve.ys.length - 1)).join(", ");
  picture.setAttribute("aria-label", `${name}, last value ${lasts}`);
  picture.append(svg("path", { class: "frame", d: `M0 ${HEIGHT}H${WIDTH}M0 0H${WIDTH}` }), guide);
  picture.append(...curves.map(({ run, xs, ys }) => svg("path", { class: "run" + run, d: pathOf(xs, ys, toX, toY) })));
  picture.append(...curves.map(({ dot }) => dot));

  const read = (event) => {
    const box = picture.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    const places = curves.map(({ xs }) => nearest(xs, toX, at));
    const found = [...new Set(curves.map(({ xs }, k) => xs[places[k]]))]; // runs may have different steps at this place
    curves.forEach((curve, k) => {
      const y = curve.ys[places[k]];
      curve.value.textContent = text(curve, places[k]);
      curve.dot.setAttribute("d", Number.isFinite(y) ? `M${toX(curve.xs[places[k]])} ${toY(y)}h0` : "");
    });
    where.textContent = found.length > 1 ? `at ${found.join(" / ")}` : `at ${INDEX.curves.x} ${found[0]}`;
    guide.setAttribute("d", found.map((x) => `M${toX(x)} 0V${HEIGHT}`).join(""));
  };
  picture.addEventListener("pointermove", read);
  picture.addEventListener("pointerdown", read);
  picture.addEventListener("pointerleave", plain);
  plain();

  const range = finite.length ? [high, low].map((y) => make("span", { text: formatNumber(y, 3) })) : [];
  const edges = final > first ? [first, final] : [first];
  return make(
    "div",
    { class: "tile", "data-name": name },
    make("div", { class: "metric", text: name, title: name }),
    make("div", { class: "top" }, ...curves.map(({ value }) => value), where),
    make(
      "div",
      { class: "plot" },
      make("div", { class: "range" }, ...range),
      picture,
      make("div", { class: "ends" }, ...edges.map((x) => make("span", { text: x }))),
    ),
  );
}

function showCurves() {
  if (!INDEX.curves) return byId("curves").remove();
  const { main, series, x } = INDEX.curves;
  const names = Object.keys(series);
  if (!names.length) {
    byId("curves-about").textContent = "there are neither TensorBoard events nor a CSV log in this run";
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
  if (matchMedia("(max-width: 640px)").matches) byId("curves").open = false; // on a phone, show the list first
}
