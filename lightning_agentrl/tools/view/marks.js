// Stars and notes of a reader, by line of the list. The browser stores the marks; a reader can save them as a file.

const MARKS_KEY = "agentrl " + INDEX.runs.map((run) => `${run.name} ${run.facts?.run_id ?? run.facts?.started ?? ""}`).join(" and ");
const marks = readMarks();

function readMarks() {
  try {
    return JSON.parse(localStorage.getItem(MARKS_KEY)) ?? {};
  } catch {
    return {}; // some browsers store nothing for pages from disk
  }
}

const markOf = (row) => marks[row.id] ?? { star: false, note: "" };
const isMarked = (row) => row.id in marks;

function setMark(row, part) {
  const mark = { ...markOf(row), ...part };
  if (mark.star || mark.note.trim()) marks[row.id] = mark;
  else delete marks[row.id];
  try {
    localStorage.setItem(MARKS_KEY, JSON.stringify(marks));
  } catch {
    byId("marks").title = "This browser does not keep them: save them before you close the page.";
  }
  showMarks();
}

function showMarks() {
  const count = Object.keys(marks).length;
  byId("marks").hidden = !count;
  byId("marks").textContent = `Save ${plural(count, "mark")} as a file`;
  for (const button of byId("rows").querySelectorAll(".row")) {
    button.classList.toggle("starred", button.dataset.id in marks);
  }
}

// Return the marks with the keys by which a script finds the episodes in the turn log.
function exportedMarks() {
  const chosen = ROWS.filter(isMarked).map((row) => ({
    title: titleOf(row),
    ...markOf(row),
    address: "#episode=" + row.id,
    episodes: row.members.map((member) => ({
      run: INDEX.runs[member.run].name,
      held_out: member.held,
      env: member.env,
      episode: member.episode,
      iteration: member.last,
    })),
  }));
  return JSON.stringify(chosen, null, 2) + "\n";
}

function saveMarks() {
  const link = make("a", { href: URL.createObjectURL(new Blob([exportedMarks()], { type: "application/json" })), download: "marks.json" });
  link.click();
  URL.revokeObjectURL(link.href);
}

// Show the star and the note of the open line.
function markBox(row) {
  const star = make("button", { type: "button", id: "star", title: "key s", onclick: () => toggleStar(row) });
  const note = make("textarea", { id: "note", rows: 1, placeholder: "a note", "aria-label": "note", oninput: (event) => setMark(row, { note: event.target.value }) });
  note.value = markOf(row).note;
  showStar(star, row);
  return make("div", { class: "line" }, star, note);
}

function showStar(button, row) {
  const { star } = markOf(row);
  button.textContent = star ? "★" : "☆";
  button.setAttribute("aria-pressed", star);
  button.setAttribute("aria-label", "star");
}

function toggleStar(row) {
  setMark(row, { star: !markOf(row).star });
  showStar(byId("star"), row);
}
