// Islands on an ellipse, a dot for each node, a line for each link that workers measured. On a phone it stands upright.
import { bitRate, el, isNarrow, svg } from "./dom.js";

export function islandMap({ islands, links }) {
  const narrow = isNarrow(), few = islands.length < 3;
  const width = narrow ? 340 : 860;
  const height = islands.length < 2 || (few && !narrow) ? 200 : 500;
  const centre = { x: width / 2, y: height / 2 };
  const around = few ? { x: narrow ? 0 : 262, y: narrow ? 175 : 0 } : { x: narrow ? 104 : 262, y: 175 };
  const radius = Math.min(62, Math.max(28, 1.3 * (around.x + around.y) / islands.length || 62)); // many get smaller, or they lay on each other
  const places = new Map(islands.map((island, at) => {
    const angle = (at / islands.length) * 2 * Math.PI + Math.PI * (narrow ? 1.5 : 1);
    return [island.name, islands.length > 1 ? { x: centre.x + around.x * Math.cos(angle), y: centre.y + around.y * Math.sin(angle) } : centre];
  }));
  const drawn = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Map of islands; the table below says the same" });
  const fastest = Math.max(...links.map((link) => link.goodput_bps), 1);
  for (const link of links) {
    const from = places.get(link.from), to = places.get(link.to);
    const across = { x: to.x - from.x, y: to.y - from.y }, far = Math.hypot(across.x, across.y) || 1;
    const side = { x: -across.y / far, y: across.x / far };
    const bend = { x: (from.x + to.x) / 2 + side.x * 36, y: (from.y + to.y) / 2 + side.y * 36 };
    const anchor = Math.abs(side.x) < 0.3 ? "middle" : side.x > 0 ? "start" : "end";
    drawn.append(svg("path", { class: `link${link.goodput_bps ? "" : " idle"}${link.relayed ? " relayed" : ""}`, d: `M${from.x} ${from.y}Q${bend.x} ${bend.y} ${to.x} ${to.y}`,
      "stroke-width": 1 + 5 * Math.sqrt(link.goodput_bps / fastest) }),
    // Between three islands and more a phone has no room for words: the table below has them.
    narrow && !few ? "" : label(bend.x, bend.y + (side.y < 0 ? -4 : 12), anchor, narrow, `${link.from} → ${link.to} `, `${bitRate(link.goodput_bps)}${link.relayed ? " (relay)" : ""}`));
  }
  for (const island of islands) {
    const place = places.get(island.name);
    drawn.append(svg("circle", { class: "island", cx: place.x, cy: place.y, r: radius }, svg("title", {}, `${island.name}: ${island.reason}`)),
      svg("text", { class: "island-name", x: place.x, y: place.y - radius + 22, "text-anchor": "middle" }, island.name));
    const columns = Math.ceil(Math.sqrt(island.nodes.length * 2)), apart = Math.min(16, 1.45 * radius / columns);
    island.nodes.forEach((node, at) => {
      const row = Math.floor(at / columns), inRow = Math.min(columns, island.nodes.length - row * columns);
      const state = !node.connected ? "lost" : node.busy ? "connected" : "idle";
      drawn.append(svg("circle", { class: `node-${state}`, r: apart / 2.8, cx: place.x + ((at % columns) - (inRow - 1) / 2) * apart, cy: place.y - 8 + row * apart },
        svg("title", {}, `${node.name}: ${state === "connected" ? "trains" : state}`)));
    });
    drawn.append(svg("text", { x: place.x, y: place.y + radius - 12, "text-anchor": "middle" },
      `${island.nodes.length} node${island.nodes.length === 1 ? "" : "s"}`));
  }
  const reasons = islands.filter((island) => island.reason).map((island) => el("div", { class: "quiet" }, `${island.name}: ${island.reason}`));
  return el("figure", {}, drawn, ...reasons);
}

// A link's ends and its rate: in one line, or one below the other.
function label(x, y, anchor, narrow, ends, rate) {
  const below = svg("tspan", narrow ? { x, dy: 13 } : {}, rate);
  return svg("text", { x, y, "text-anchor": anchor }, ends, below);
}

export function linkTable({ links }) {
  return { columns: ["FROM", "TO", "WAY", "GOODPUT", "SENT"], numbers: ["GOODPUT", "SENT"],
    rows: links.map((link) => [link.from, link.to, link.relayed ? "relay" : "direct", bitRate(link.goodput_bps), `${(link.sent_bytes / 2 ** 20).toFixed(1)} MiB`]) };
}
