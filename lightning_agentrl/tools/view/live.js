// The page of a run that trains: asks whether there is something new, and shows it where that disturbs nobody.

const ASK_SECONDS = 3;

async function askForNews() {
  let answer;
  try {
    answer = await (await fetch("stamp")).text();
  } catch {
    return void (byId("live").textContent = "The server has ended; this is the last that it showed.");
  }
  if (answer !== INDEX.stamp) {
    if (!current) return location.reload(); // filters are in the address
    const button = make("button", { type: "button", text: "There is more: show it", onclick: () => location.reload() });
    return byId("live").replaceChildren(button);
  }
  byId("live").textContent = "live: shows what is new by itself, unless an episode is open";
  setTimeout(askForNews, 1000 * ASK_SECONDS);
}

byId("head").append(make("p", { id: "live", class: "quiet", role: "status" }));
askForNews();
