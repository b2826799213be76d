// Questions to the server, and lists that are asked for again and again.
import { el, setText } from "./dom.js";

// The JSON that it answers; {error} where it cannot be asked or refuses. With a body it is a POST.
export async function ask(path, body = null) {
  try {
    const answer = await fetch(path, body === null ? {} : {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
    if (answer.status === 401) return { error: "This address is of an earlier start: open the one that `atoll dashboard` printed." };
    return await answer.json();
  } catch (error) {
    return { error: `The dashboard does not answer (${error.message}). Is atoll dashboard still running?` };
  }
}

const clock = (unixS) => new Date(unixS * 1000).toLocaleTimeString();

// Events, the newest first; older ones by a button, however many there are.
export function eventList(path) {
  const body = el("tbody"), note = el("p", { class: "quiet", role: "status" });
  const older = el("button", { type: "button", hidden: true, onclick: () => more() }, "Show older ones");
  const known = new Map();
  let oldest = null, earlier = 0;
  const row = (event) => el("tr", { role: "row" }, el("td", { role: "cell" }, clock(event.unix_s)),
    el("td", { role: "cell", class: event.level }, event.level), el("td", { role: "cell" }, event.kind),
    el("td", { role: "cell", class: "wide" }, event.text));
  function take(answer) {
    setText(note, answer.error || "");
    if (answer.error) return;
    for (const event of answer.events) {
      if (known.has(event.sequence)) continue;
      const made = row(event);
      known.set(event.sequence, made);
      if (oldest !== null && event.sequence < oldest) continue;
      body.prepend(made);
    }
  }
  async function more() {
    const answer = await ask(`${path}?before=${oldest}`);
    take(answer);
    if (answer.error) return;
    body.append(...answer.events.toReversed().map((event) => known.get(event.sequence)));
    settle(answer);
  }
  function settle(answer) {
    oldest = answer.events[0]?.sequence ?? oldest;
    earlier = answer.earlier;
    older.hidden = !earlier;
    setText(older, `Show older ones (${earlier})`);
  }
  return {
    element: el("div", {}, el("h2", {}, "Events"), note, el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Events" }, el("table", { role: "table" },
      el("thead", {}, el("tr", {}, ...["TIME", "LEVEL", "KIND", "WHAT"].map((name) => el("th", { scope: "col" }, name)))), body)), older),
    async refresh() {
      const answer = await ask(path);
      take(answer);
      if (!answer.error && oldest === null && answer.events.length) settle(answer);
    },
  };
}
