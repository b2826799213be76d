// One job: overview, curves, plans, events, logs.
import { Table, el, setText } from "./dom.js";
import { plot } from "./plot.js";
import { ask, eventList } from "./server.js";

export const TABS = ["overview", "curves", "plans", "events", "logs"];

// A view has an element, update(job) for what the stream says, and refresh() for what it asks for itself, each 3 s.
export function jobView(id, tab) {
  const heading = el("h1", {}, id, " ", el("span", { id: "phase" }));
  const tabs = el("nav", { "aria-label": "Parts of this job" }, ...TABS.map((name) =>
    el("a", { href: `#/job/${encodeURIComponent(id)}/${name}`, "aria-current": name === tab ? "page" : null }, name)));
  const part = { overview, curves, plans, events: (job) => eventList(`/api/jobs/${encodeURIComponent(job)}/events`), logs }[tab](id);
  return {
    title: id,
    element: el("section", {}, heading, tabs, part.element),
    update(job) {
      const phase = heading.lastChild;
      setText(phase, job.phase);
      phase.className = job.phase;
      part.update?.(job);
    },
    refresh: part.refresh,
  };
}

function overview(id) {
  const lines = el("ul", { class: "lines" });
  const trained = el("progress", { max: "1", "aria-label": "Trained of its epochs" });
  let busy = [];
  const workers = new Table("Workers", {}, { name: "WORK IN A STEP", fill: fillBar });
  const said = el("p", { role: "status", class: "quiet" });
  const cancel = el("button", { class: "danger", type: "button", onclick: () => stopIt() }, "Cancel this job");
  const batch = el("input", { type: "number", min: "1", id: "batch", required: true });
  const form = el("form", { onsubmit: (event) => { event.preventDefault(); adjust({ total_batch: Number(batch.value) }); } },
    el("label", { for: "batch" }, "Samples of a step", batch), el("button", {}, "Pin it"),
    el("button", { type: "button", onclick: () => adjust({ unpin: ["total-batch"] }) }, "Leave it to the controller"), cancel);

  function fillBar(cell, at) {
    if (!cell.firstChild) cell.append(el("span", { class: "bar", "aria-hidden": "true" }, el("span")), " ", el("span"));
    cell.firstChild.firstChild.style.width = `${busy[at] * 100}%`;
    setText(cell.lastChild, busy[at] ? `${Math.round(busy[at] * 100)} %` : "-");
  }
  async function adjust(asked) {
    const answer = await ask(`/api/jobs/${encodeURIComponent(id)}/adjust`, asked);
    setText(said, answer.error || answer.pins);
  }
  async function stopIt() {
    if (!window.confirm(`Cancel ${id}? Its newest checkpoint stays.`)) return;
    const answer = await ask(`/api/jobs/${encodeURIComponent(id)}/cancel`, {});
    setText(said, answer.error || "cancelled: its workers end");
  }
  return {
    element: el("div", {}, lines, trained, workers.element, form, said),
    update(job) {
      while (lines.childElementCount > job.lines.length) lines.lastChild.remove();
      job.lines.forEach((line, at) => setText(lines.children[at] || lines.appendChild(el("li")), line));
      trained.hidden = !job.trained_share;
      trained.value = job.trained_share;
      busy = job.busy;
      workers.update(job.workers);
      form.hidden = job.ended;
    },
  };
}

function curves(id) {
  const plots = el("div", { class: "plots" }), note = el("p", { class: "quiet" }, "Reading…");
  return {
    element: el("div", {}, el("h2", {}, "Curves"), note, plots),
    async refresh() {
      const answer = await ask(`/api/jobs/${encodeURIComponent(id)}/curves`);
      setText(note, answer.error || (answer.curves.length ? "Reported by the script (run.report), over its steps." : "It reports nothing so far. In its script: run.report(loss=loss.item())"));
      if (!answer.error) plots.replaceChildren(...answer.curves.map(plot));
    },
  };
}

function plans(id) {
  const table = new Table("Plans of the newest run, the newest first"), note = el("p", { class: "quiet" });
  return {
    element: el("div", {}, el("h2", {}, "Plans, and why"), note, table.element),
    async refresh() {
      const answer = await ask(`/api/jobs/${encodeURIComponent(id)}/plans`);
      setText(note, answer.error || "");
      if (!answer.error) table.update(answer);
    },
  };
}

function logs(id) {
  const output = el("pre", { tabindex: "0", "aria-label": "Output of the workers" });
  const rank = el("input", { type: "number", min: "0", id: "rank", placeholder: "all", onchange: () => refresh() });
  async function refresh() {
    const of = rank.value === "" ? "" : `?rank=${Number(rank.value)}`;
    const answer = await ask(`/api/jobs/${encodeURIComponent(id)}/logs${of}`);
    const atEnd = output.scrollTop + output.clientHeight >= output.scrollHeight - 8;
    setText(output, answer.error || answer.lines.map((line) => `[${line.rank}] ${line.text}`).join("\n") || "Nothing was written so far.");
    if (atEnd) output.scrollTop = output.scrollHeight;
  }
  return { element: el("div", {}, el("h2", {}, "Logs"), el("form", {}, el("label", { for: "rank" }, "Rank", rank)), output), refresh };
}
