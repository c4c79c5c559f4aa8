// Parse the index at once, and unpack turns when the page needs the turns.

const INDEX = JSON.parse(document.getElementById("index").textContent);

const EPISODES = (INDEX.episodes.env ?? []).map((_, i) => {
  const row = { index: i };
  for (const key in INDEX.episodes) row[key] = INDEX.episodes[key][i];
  const side = row.episode ? `.${row.episode}` : ""; // only games with several sides have episodes above 0 for a seed
  row.id = (row.source ? row.source + "." : "") + (row.held ? `h${row.env}.${row.last}${side}` : `${row.env}.${row.episode}`);
  row.members = [row]; // episodes that open with this row
  row.place = i > 0 && INDEX.episodes.chunk[i - 1] === row.chunk ? null : 0;
  return row;
});
EPISODES.forEach((row, i) => {
  if (row.place === null) row.place = EPISODES[i - 1].place + 1;
});

// The chunks come after this script in the file, so a big file may still be loading.
const LOADED = new Promise((resolve) => document.addEventListener("DOMContentLoaded", resolve, { once: true }));
const CHUNKS_KEPT = 12;
const chunks = new Map();

function chunk(kind, number) {
  const id = kind + "-" + number;
  if (!chunks.has(id)) {
    if (chunks.size >= CHUNKS_KEPT) chunks.delete(chunks.keys().next().value);
    chunks.set(id, unpack(id));
  }
  return chunks.get(id);
}

async function unpack(id) {
  await LOADED;
  if (typeof DecompressionStream === "undefined") {
    throw new Error("This browser cannot unpack the turns; use Chrome or Edge 111, Firefox 113, Safari 16.4, or newer.");
  }
  const bytes = Uint8Array.from(atob(byId(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// Load the turns of an episode, with texts and details of each turn in one object.
async function loadTurns(row) {
  const [texts, details] = await Promise.all([chunk("text", row.chunk), chunk("detail", row.chunk)]);
  return texts[row.place].map((text, k) => ({ ...text, ...details[row.place][k] }));
}

// Lower-case replies and observations of each episode, which the first search reads.
let haystacks = null;

function loadHaystacks() {
  haystacks ??= readHaystacks();
  return haystacks;
}

async function readHaystacks() {
  const found = new Array(EPISODES.length);
  const last = EPISODES[EPISODES.length - 1].chunk;
  const members = Array.from({ length: last + 1 }, () => []);
  for (const row of EPISODES) members[row.chunk].push(row);
  for (let number = 0; number <= last; number++) {
    const texts = await unpack("text-" + number);
    for (const row of members[number]) {
      const said = texts[row.place].map((turn) => turn.observation + "\n" + (turn.reply ?? turn.tokens.join("")));
      found[row.index] = said.join("\n").toLowerCase();
    }
  }
  return found;
}
