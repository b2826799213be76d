// Islands on a circle, a dot for each node, a line for each link that workers measured.
import { bitRate, el, svg } from "./dom.js";

const WIDTH = 860, RADIUS = 62;

export function islandMap({ islands, links }) {
  const height = islands.length > 2 ? 500 : 200;
  const centre = { x: WIDTH / 2, y: height / 2 };
  const around = islands.length > 1 ? 175 : 0;
  const places = new Map(islands.map((island, at) => {
    const angle = (at / islands.length) * 2 * Math.PI + Math.PI;
    return [island.name, { x: centre.x + around * 1.5 * Math.cos(angle), y: centre.y + around * Math.sin(angle) }];
  }));
  const drawn = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": "Map of islands; the table below says the same" });
  const fastest = Math.max(...links.map((link) => link.goodput_bps), 1);
  for (const link of links) {
    const from = places.get(link.from), to = places.get(link.to);
    const across = { x: to.x - from.x, y: to.y - from.y }, far = Math.hypot(across.x, across.y) || 1;
    const side = { x: -across.y / far, y: across.x / far };
    const bend = { x: (from.x + to.x) / 2 + side.x * 36, y: (from.y + to.y) / 2 + side.y * 36 };
    const anchor = Math.abs(side.x) < 0.3 ? "middle" : side.x > 0 ? "start" : "end";
    drawn.append(svg("path", { class: `link${link.goodput_bps ? "" : " idle"}${link.relayed ? " relayed" : ""}`, d: `M${from.x} ${from.y}Q${bend.x} ${bend.y} ${to.x} ${to.y}`,
      "stroke-width": 1 + 5 * Math.sqrt(link.goodput_bps / fastest) }),
    svg("text", { x: bend.x, y: bend.y + (side.y < 0 ? -4 : 12), "text-anchor": anchor }, `${link.from} → ${link.to} ${bitRate(link.goodput_bps)}${link.relayed ? " (relay)" : ""}`));
  }
  for (const island of islands) {
    const place = places.get(island.name);
    drawn.append(svg("circle", { class: "island", cx: place.x, cy: place.y, r: RADIUS }),
      svg("text", { class: "island-name", x: place.x, y: place.y - RADIUS + 22, "text-anchor": "middle" }, island.name));
    const columns = Math.ceil(Math.sqrt(island.nodes.length * 2)), apart = Math.min(16, 90 / columns);
    island.nodes.forEach((node, at) => {
      const row = Math.floor(at / columns), inRow = Math.min(columns, island.nodes.length - row * columns);
      const state = !node.connected ? "lost" : node.busy ? "connected" : "idle";
      drawn.append(svg("circle", { class: `node-${state}`, r: apart / 2.8, cx: place.x + ((at % columns) - (inRow - 1) / 2) * apart, cy: place.y - 8 + row * apart },
        svg("title", {}, `${node.name}: ${state === "connected" ? "trains" : state}`)));
    });
    drawn.append(svg("text", { x: place.x, y: place.y + RADIUS - 12, "text-anchor": "middle" },
      `${island.nodes.length} node${island.nodes.length === 1 ? "" : "s"}`));
  }
  return el("figure", {}, drawn);
}

export function linkTable({ links }) {
  return { columns: ["FROM", "TO", "WAY", "GOODPUT", "SENT"], numbers: ["GOODPUT", "SENT"],
    rows: links.map((link) => [link.from, link.to, link.relayed ? "relay" : "direct", bitRate(link.goodput_bps), `${(link.sent_bytes / 2 ** 20).toFixed(1)} MiB`]) };
}
