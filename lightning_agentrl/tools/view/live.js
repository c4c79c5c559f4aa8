// Poll the server of a running training. Reload the page if it is out of date and no episode is open.

const ASK_SECONDS = 3;

async function askForNews() {
  let answer;
  try {
    answer = await (await fetch("stamp")).text();
  } catch {
    return void (byId("live").textContent = "The server has ended; this is the last that it showed.");
  }
  if (answer !== INDEX.stamp) {
    if (!current) return location.reload(); // the address keeps the filters
    const button = make("button", { type: "button", text: "There is more: show it", onclick: () => location.reload() });
    return byId("live").replaceChildren(button);
  }
  byId("live").textContent = "live: shows what is new by itself, unless an episode is open";
  setTimeout(askForNews, 1000 * ASK_SECONDS);
}

byId("head").append(make("p", { id: "live", class: "quiet", role: "status" }));
askForNews();
