// The lines of the list: the episodes of a run or, of two runs, pairs of held-out episodes of the same seed.

const TWO_RUNS = INDEX.runs.length > 1;
const LETTERS = ["A", "B"]; // of the runs
const ROWS = TWO_RUNS ? pairs() : EPISODES;

// Validations after the same iteration belong together, and the last of either run.
function pairs() {
  const lasts = [0, 1].map((run) => ends(EPISODES.filter((row) => row.run === run).map((row) => row.last))[1]);
  const key = (row, last = row.last) => `${row.env}.${row.episode}.${last}`; // of each side of a game an episode
  const seconds = new Map(EPISODES.filter((row) => row.run === 1).map((row) => [key(row), row]));
  const rows = [];
  for (const first of EPISODES) {
    if (first.run) continue;
    const ended = first.last === lasts[0];
    const second = seconds.get(key(first, ended ? lasts[1] : first.last));
    if (second) rows.push(pair(rows.length, first, second));
  }
  return rows;
}

function pair(index, first, second) {
  const won = [first, second].map((row) => row.outcome === "solved");
  return {
    index,
    id: first.id,
    members: [first, second],
    env: first.env,
    episode: first.episode,
    first: Math.min(first.last, second.last),
    last: Math.max(first.last, second.last),
    verdict: won[0] === won[1] ? (won[0] ? "both" : "neither") : won[0] ? "A only" : "B only",
    gap: Math.abs(toNumber(first.return) - toNumber(second.return)),
  };
}

const playedAfter = (row) => (row.last ? `after iteration ${row.last}` : "before training");

function titleOf(row) {
  const held = `held-out seed ${row.env}` + (row.episode ? `, episode ${row.episode}` : "");
  if (TWO_RUNS) return held;
  return row.held ? `${held}, ${playedAfter(row)}` : `env ${row.env}, episode ${row.episode}`;
}
