// Bars of the devices: compute and transfers of a micro-batch, and memory with its limit.

import { bytes, element, milliseconds, percent, shape } from "./dom.js";

const ROW = 84;
const BAR = 12;

export function memoryOf(load) {
  return Object.values(load.memory).reduce((sum, part) => sum + part, 0);
}

/** Draw the bars of all devices, with a legend and a sentence per device for screen readers. */
export function deviceBars(loads, room) {
  const width = Math.min(640, Math.max(260, room));
  const longest = Math.max(...loads.map((load) => Math.max(load.load_ms, load.compute_ms + load.send_ms + load.receive_ms)), 1e-9);
  const drawing = shape("svg", {
    viewBox: `0 0 ${width} ${ROW * loads.length}`,
    width: "100%",
    role: "img",
    "aria-label": loads.map(sentence).join(" "),
  });
  loads.forEach((load, index) => drawing.append(row(load, index * ROW, width - 2, longest, index)));
  return element("div", { class: "bars" }, legend(), drawing);
}

function row(load, top, space, longest, index) {
  const group = shape("g", { transform: `translate(0 ${top})` });
  group.append(
    shape("rect", { class: `d${index % 8}`, x: 0, y: 6, width: 10, height: 10, rx: 2 }),
    label(14, 15, `${load.device}${load.bottleneck ? " ◀" : ""}`),
    label(space, 15, milliseconds(load.load_ms), "value"),
    shape("rect", { class: "track", x: 0, y: 20, width: space, height: BAR }),
    shape("rect", { class: "track", x: 0, y: 38, width: space, height: BAR }),
    label(14, 65, `${load.layers} ${load.layers === 1 ? "layer" : "layers"}`, "faint"),
  );
  let x = 0;
  for (const part of ["compute", "send", "receive"]) {
    const width = (space * load[`${part}_ms`]) / longest;
    group.append(shape("rect", { class: part, x, y: 20, width, height: BAR }));
    x += width;
  }
  const used = memoryOf(load);
  const scale = space / Math.max(load.limit_bytes, used, 1);
  group.append(
    shape("rect", { class: used > load.limit_bytes ? "over" : "memory", x: 0, y: 38, width: used * scale, height: BAR }),
    shape("line", { class: "limit", x1: load.limit_bytes * scale, x2: load.limit_bytes * scale, y1: 36, y2: 52 }),
    label(space, 65, `${bytes(used)} of ${bytes(load.limit_bytes)}`, "value"),
    shape("title", {}, sentence(load)),
  );
  return group;
}

function label(x, y, text, kind) {
  return shape("text", { x, y, class: kind }, text.length > 24 && !kind ? `${text.slice(0, 23)}…` : text);
}

function sentence(load) {
  const transfers = load.send_ms + load.receive_ms;
  return (
    `${load.device}: ${load.layers} layers, compute ${milliseconds(load.compute_ms)}, transfers ${milliseconds(transfers)}, ` +
    `memory ${bytes(memoryOf(load))} of ${bytes(load.limit_bytes)}${load.bottleneck ? ", the bottleneck" : ""}.`
  );
}

function legend() {
  const items = [["compute", "compute"], ["send", "send"], ["receive", "receive"], ["memory", "memory and its limit"]];
  return element("ul", { class: "legend", "aria-hidden": "true" }, ...items.map(([kind, text]) =>
    element("li", {}, shape("svg", { width: 12, height: 12 }, shape("rect", { class: kind, width: 12, height: 12 })), text)));
}

/** Return a sentence that says what limits the placement. */
export function whatLimits(placement) {
  if (placement.limits) return `Limited by ${placement.limits.detail}.`;
  const loads = placement.devices;
  const full = loads.filter((load) => load.limit_bytes && memoryOf(load) / load.limit_bytes > 0.95);
  const memory = full.length ? ` Memory of ${full.map((load) => load.device).join(", ")} is over 95 % full.` : "";
  if (placement.objective === "latency") return `One sample passes ${placement.stages.length} stages.${memory}`;
  if (placement.objective === "memory") {
    const most = loads.reduce((one, other) => (memoryOf(other) > memoryOf(one) ? other : one));
    return `${most.device} uses the most memory.${memory}`;
  }
  const busiest = loads.find((load) => load.bottleneck) || loads[0];
  const share = busiest.load_ms ? Math.min(1, busiest.compute_ms / busiest.load_ms) : 0;
  return `${busiest.device} is the bottleneck: ${percent(share)} of its time is compute, and the rest is transfers.${memory}`;
}
