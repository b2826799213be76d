// The page: an address after '#' chooses a view; one stream of the server keeps it fresh.
import { Table, el, setText } from "./dom.js";
import { TABS, jobView } from "./job.js";
import { islandMap, linkTable } from "./map.js";
import { eventList } from "./server.js";

const REFRESH_MS = 3000;
const main = document.getElementById("main"), trouble = document.getElementById("trouble");
let view = null, stream = null, timer = 0, streamed = null;

function clusterView() {
  const jobs = new Table("Living jobs first, then those that ended last", { JOB: (id) => `#/job/${encodeURIComponent(id)}/overview` });
  const nodes = new Table("Machines with an agent"), none = el("p", { class: "quiet", hidden: true }, "No jobs so far: atoll submit train.py");
  return {
    title: "Cluster",
    element: el("section", {}, el("h1", {}, "Cluster"), el("h2", {}, "Jobs"), none, jobs.element, el("h2", {}, "Nodes"), nodes.element),
    updateCluster(cluster) {
      none.hidden = cluster.jobs.rows.length > 0;
      jobs.update(cluster.jobs);
      nodes.update(cluster.nodes);
    },
  };
}

function mapView() {
  const picture = el("div"), links = new Table("Links between islands, as the workers of living jobs measured them");
  return {
    title: "Map",
    element: el("section", {}, el("h1", {}, "Islands and links"), picture, el("h2", {}, "Links"), links.element),
    updateCluster(cluster) {
      picture.replaceChildren(islandMap(cluster.map));
      links.update(linkTable(cluster.map));
    },
  };
}

function eventsView() {
  const list = eventList("/api/events");
  return { title: "Events", element: el("section", {}, el("h1", {}, "The cluster's events"), list.element), refresh: list.refresh };
}

function chosen() {
  const [, first, id, tab] = location.hash.split("/");
  if (first === "map") return [mapView(), ""];
  if (first === "events") return [eventsView(), ""];
  if (first === "job" && id) {
    const job = decodeURIComponent(id);
    return [jobView(job, TABS.includes(tab) ? tab : "overview"), job];
  }
  return [clusterView(), ""];
}

function say(text) {
  setText(trouble, text);
  trouble.hidden = !text;
}

function listen(job) {
  if (streamed === job && stream?.readyState !== EventSource.CLOSED) return;
  stream?.close();
  streamed = job;
  stream = new EventSource(`/api/stream${job ? `?job=${encodeURIComponent(job)}` : ""}`);
  stream.addEventListener("trouble", (event) => say(JSON.parse(event.data)));
  stream.addEventListener("cluster", (event) => {
    last.cluster = JSON.parse(event.data);
    setText(document.getElementById("controller"), `controller ${last.cluster.controller}, atoll ${last.cluster.version}`);
    view.updateCluster?.(last.cluster);
  });
  stream.addEventListener("job", (event) => {
    last.job = JSON.parse(event.data);
    view.update?.(last.job);
  });
  stream.addEventListener("error", () => say("The dashboard does not answer. Is atoll dashboard still running?"));
  stream.addEventListener("open", () => say(""));
}

const last = { cluster: null, job: null };

// One question at a time: an answer that takes long is not asked for twice.
async function again(asking) {
  await asking.refresh();
  if (asking === view) timer = setTimeout(() => again(asking), REFRESH_MS);
}

function show() {
  const [next, job] = chosen();
  const moved = view !== null;
  view = next;
  main.replaceChildren(view.element);
  document.title = `${view.title} · Atoll`;
  for (const link of document.querySelectorAll("header nav a")) {
    const here = link.getAttribute("href") === (location.hash || "#/");
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (streamed !== job) last.job = null;
  listen(job);
  if (last.cluster) view.updateCluster?.(last.cluster);
  if (last.job) view.update?.(last.job);
  clearTimeout(timer);
  if (view.refresh) again(view);
  if (moved) main.focus({ preventScroll: true });
}

window.addEventListener("hashchange", show);
show();
