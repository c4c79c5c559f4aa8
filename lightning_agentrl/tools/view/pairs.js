// Lines of the list: episodes of one run, or held-out episodes of several runs on the same seed.

const SIDE_BY_SIDE = INDEX.runs.length > 1;
const LETTERS = INDEX.runs.map((_, k) => String.fromCharCode(65 + k));
const [EACH, NONE] = INDEX.runs.length > 2 ? ["all", "none"] : ["both", "neither"];
const ROWS = SIDE_BY_SIDE ? pairs() : EPISODES;

// Pair validations after the same iteration, and the last validations of all runs.
function pairs() {
  const own = LETTERS.map((_, run) => EPISODES.filter((row) => row.run === run));
  const lasts = own.map((rows) => ends(rows.map((row) => row.last))[1]);
  const key = (row, last) => JSON.stringify([row.source, row.env, row.episode, last]); // each side of a game has an episode
  const found = own.map((rows) => new Map(rows.map((row) => [key(row, row.last), row])));
  const rows = [];
  for (const first of own[0]) {
    const members = found.map((of, k) => of.get(key(first, first.last === lasts[0] ? lasts[k] : first.last)));
    if (members.every(Boolean)) rows.push(pair(rows.length, members));
  }
  return rows;
}

function pair(index, members) {
  const winners = LETTERS.filter((_, k) => members[k].outcome === "solved");
  const some = winners.length === 1 ? `${winners[0]} only` : winners.join(" ");
  const returns = members.map((member) => toNumber(member.return));
  return {
    index,
    id: members[0].id,
    members,
    env: members[0].env,
    episode: members[0].episode,
    source: members[0].source,
    first: Math.min(...members.map((member) => member.first)),
    last: Math.max(...members.map((member) => member.last)),
    verdict: winners.length === 0 ? NONE : winners.length === members.length ? EACH : some,
    gap: Math.max(...returns) - Math.min(...returns),
  };
}

const playedAfter = (row) => (row.last ? `after iteration ${row.last}` : "before training");

function titleOf(row) {
  const held = (row.source ? `${row.source}, ` : "") + `held-out seed ${row.env}` + (row.episode ? `, episode ${row.episode}` : "");
  if (SIDE_BY_SIDE) return held;
  return row.held ? `${held}, ${playedAfter(row)}` : `env ${row.env}, episode ${row.episode}`;
}
