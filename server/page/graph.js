// The layer graph, coloured by device. Arrow keys move the focus; Enter selects a layer to pin.

import { element, shape } from "./dom.js";

const STEP_Y = 34;
const HEIGHT = 24;
const NAMED = { step: 104, width: 92 };
const COMPACT = { step: 28, width: 20 }; // long graphs show only the device's number
const LONG = 12; // columns of a long graph
const MOST = 1500; // more layers are shown only as a table

/**
 * Draw the graph in a scrolling region.
 * options: moved, a set of layers to mark; pinned, the device of each pinned layer; onPick(layer).
 */
export function layerGraph(profile, layerDevices, devices, options) {
  if (profile.layers.length > MOST) return element("p", {}, `${profile.layers.length} layers are too many to draw; see the table.`);
  const places = layout(profile);
  const columns = 1 + Math.max(...places.map((place) => place.column));
  const size = columns > LONG ? COMPACT : NAMED;
  const rows = Math.max(...places.map((place) => place.row)) + 1;
  const drawing = shape("svg", { width: columns * size.step + 12, height: rows * STEP_Y + 12, role: "group", "aria-label": "Layer graph" });
  drawing.append(...edges(profile, places, layerDevices, size));
  const nodes = profile.layers.map((layer, index) => node(layer.name, index, places[index], layerDevices, devices, { ...options, size }));
  drawing.append(...nodes);
  walk(nodes);
  return element("div", { class: "graph" }, drawing);
}

/** A layer's column is the length of the longest path to it; a column is in execution order. */
function layout(profile) {
  const column = new Map(profile.layers.map((layer) => [layer.name, 0]));
  const readers = new Map();
  for (const edge of profile.edges || []) readers.set(edge.source, [...(readers.get(edge.source) || []), ...edge.targets]);
  for (const layer of profile.layers) {
    for (const reader of readers.get(layer.name) || []) {
      column.set(reader, Math.max(column.get(reader), column.get(layer.name) + 1));
    }
  }
  const height = new Map();
  return profile.layers.map((layer) => {
    const here = column.get(layer.name);
    const row = height.get(here) || 0;
    height.set(here, row + 1);
    return { column: here, row };
  });
}

function edges(profile, places, layerDevices, { step, width }) {
  const at = new Map(profile.layers.map((layer, index) => [layer.name, places[index]]));
  return (profile.edges || []).flatMap((edge) => edge.targets.map((target) => {
    const [from, to] = [at.get(edge.source), at.get(target)];
    const [x1, y1] = [from.column * step + 6 + width, from.row * STEP_Y + 6 + HEIGHT / 2];
    const [x2, y2] = [to.column * step + 6, to.row * STEP_Y + 6 + HEIGHT / 2];
    // An edge that skips columns bends below the layers in between.
    const low = to.column - from.column > 1 ? Math.max(y1, y2) + 10 : (y1 + y2) / 2;
    const crosses = layerDevices[edge.source] !== layerDevices[target];
    const way = to.column - from.column > 1 ? `M${x1} ${y1} Q${(x1 + x2) / 2} ${low + 12} ${x2} ${y2}` : `M${x1} ${y1} L${x2} ${y2}`;
    return shape("path", { class: crosses ? "edge crosses" : "edge", d: way });
  }));
}

function node(name, index, place, layerDevices, devices, { moved, pinned, onPick, size }) {
  const device = layerDevices[name];
  const number = devices.indexOf(device);
  const kinds = ["node", moved.has(name) ? "moved" : "", pinned[name] ? "pinned" : ""].filter(Boolean).join(" ");
  const short = name.length > 12 ? `…${name.slice(-11)}` : name;
  const made = shape(
    "g",
    {
      class: kinds,
      role: "button",
      tabindex: index === 0 ? 0 : -1,
      transform: `translate(${place.column * size.step + 6} ${place.row * STEP_Y + 6})`,
      "aria-label": `${name} on ${device || "no device"}${moved.has(name) ? ", differs" : ""}${pinned[name] ? ", pinned" : ""}`,
    },
    shape("rect", { class: number >= 0 ? `d${number % 8}` : "track", width: size.width, height: HEIGHT, rx: 4 }),
    shape("text", { x: 5, y: 16 }, `${number >= 0 ? number : "?"}${size === NAMED ? ` ${short}` : ""}`),
    shape("title", {}, `${name} on ${device}`),
  );
  made.addEventListener("click", () => onPick(name));
  made.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    onPick(name);
  });
  return made;
}

/** Make the graph one tab stop, within which arrow keys move the focus. */
function walk(nodes) {
  nodes.forEach((made, index) => made.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    let next = steps[event.key] ? index + steps[event.key] : { Home: 0, End: nodes.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    next = Math.max(0, Math.min(nodes.length - 1, next));
    made.setAttribute("tabindex", -1);
    nodes[next].setAttribute("tabindex", 0);
    nodes[next].focus();
  }));
}
