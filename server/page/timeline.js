// The timeline of a batch: a row per device, a bar per pass. The empty parts are the bubble.

import { element, milliseconds, percent, shape } from "./dom.js";

const WIDTH = 640;
const LABEL = 92;
const ROW = 36;
const AXIS = 20;
const SHOWN = 16; // wider bars show the number of their micro-batch

/** Draw the timeline in a scrolling region, with a legend, a zoom and a description in words. */
export function timelineChart(timeline) {
  const height = ROW * timeline.devices.length + AXIS;
  const drawing = shape("svg", { viewBox: `0 0 ${WIDTH} ${height}`, width: "100%", role: "img", "aria-label": words(timeline).join(" ") });
  const scale = (WIDTH - LABEL - 2) / Math.max(timeline.step_ms, 1e-12);
  const rows = new Map(timeline.devices.map((spent, index) => [spent.device, row(spent, index, timeline, drawing)]));
  for (const copy of timeline.copies) rows.get(copy.source).append(transfer(copy, scale));
  for (const pass of timeline.passes) rows.get(pass.device).append(...bar(pass, scale));
  for (const spent of timeline.devices) rows.get(spent.device).append(...optimizer(spent, timeline, scale));
  drawing.append(axis(timeline, ROW * timeline.devices.length));
  const region = element("div", { class: "lanes", tabindex: 0, role: "region", "aria-label": "Timeline, scrolls when zoomed" }, drawing);
  const list = element("ul", {}, ...words(timeline).map((text) => element("li", {}, text)));
  return element("div", { class: "timeline" }, summary(timeline), legend(timeline), region, zoom(drawing),
    element("details", {}, element("summary", {}, "In words"), list));
}

function row(spent, index, timeline, drawing) {
  const share = timeline.step_ms ? spent.idle_ms / timeline.step_ms : 0;
  const name = spent.device.length > 13 ? `…${spent.device.slice(-12)}` : spent.device;
  const group = shape("g", { transform: `translate(0 ${index * ROW})` },
    shape("text", { x: 2, y: 14 }, name),
    shape("text", { x: 2, y: 28, class: "faint" }, `idle ${percent(share)}`),
    shape("rect", { class: "idle", x: LABEL, y: 4, width: WIDTH - LABEL - 2, height: 18 }));
  drawing.append(group);
  return group;
}

function bar(pass, scale) {
  const width = (pass.end_ms - pass.start_ms) * scale;
  const x = LABEL + pass.start_ms * scale;
  const text = `${pass.phase} of micro-batch ${pass.micro_batch} in stage ${pass.stage}: ${milliseconds(pass.start_ms)} to ${milliseconds(pass.end_ms)}`;
  const drawn = shape("rect", { class: `pass ${pass.phase}`, x, y: 4, width, height: 18 }, shape("title", {}, text));
  return width < SHOWN ? [drawn] : [drawn, shape("text", { x: x + width / 2, y: 17, class: "number", "text-anchor": "middle" }, String(pass.micro_batch))];
}

/** Draw the optimizer step of a device, after the last pass on any device. */
function optimizer(spent, timeline, scale) {
  if (!spent.optimizer_ms) return [];
  const start = timeline.step_ms - Math.max(...timeline.devices.map((other) => other.optimizer_ms));
  const text = `optimizer: ${milliseconds(start)} to ${milliseconds(start + spent.optimizer_ms)}`;
  return [shape("rect", { class: "optimizer", x: LABEL + start * scale, y: 4, width: spent.optimizer_ms * scale, height: 18 }, shape("title", {}, text))];
}

function transfer(copy, scale) {
  const text = `${copy.carries} of micro-batch ${copy.micro_batch} to ${copy.target}: ${milliseconds(copy.start_ms)} to ${milliseconds(copy.end_ms)}`;
  return shape("rect", { class: "carry", x: LABEL + copy.start_ms * scale, y: 25, width: Math.max(0.5, (copy.end_ms - copy.start_ms) * scale), height: 5 },
    shape("title", {}, text));
}

function axis(timeline, top) {
  const marks = [0, 0.5, 1].map((part) => shape("text", {
    x: LABEL + part * (WIDTH - LABEL - 2), y: top + 14, class: "faint", "text-anchor": ["start", "middle", "end"][2 * part],
  }, milliseconds(part * timeline.step_ms)));
  return shape("g", {}, ...marks);
}

function summary(timeline) {
  const shown = timeline.shown_chunks < timeline.chunks ? `The first ${timeline.shown_chunks} of ${timeline.chunks} micro-batches: ` : "";
  const alone = timeline.single_device_ms ? ` The best single device takes ${milliseconds(timeline.single_device_ms)}.` : "";
  return element("p", { class: "why" },
    `${shown}${milliseconds(timeline.step_ms)}. While micro-batches run, the devices are idle ${percent(timeline.bubble)} of the time (the bubble).${alone}`);
}

function legend(timeline) {
  const kinds = ["forward", "backward", "weights"].filter((kind) => timeline.passes.some((pass) => pass.phase === kind));
  const steps = timeline.devices.some((spent) => spent.optimizer_ms) ? [["optimizer", "optimizer"]] : [];
  const items = [...kinds.map((kind) => [`pass ${kind}`, kind]), ...steps, ["carry", "send"], ["idle", "idle"]];
  return element("ul", { class: "legend" }, ...items.map(([kind, text]) => element("li", {},
    shape("svg", { width: 12, height: 12, "aria-hidden": "true" }, shape("rect", { class: kind, width: 12, height: 12 })), text)));
}

function zoom(drawing) {
  const slider = element("input", { type: "range", min: 1, max: 20, value: 1, step: 0.5 });
  slider.addEventListener("input", () => drawing.setAttribute("width", `${100 * slider.value}%`));
  return element("label", { class: "zoom" }, "Zoom", slider);
}

function words(timeline) {
  return timeline.devices.map((spent) => {
    const passes = timeline.passes.filter((pass) => pass.device === spent.device).length;
    const optimizer = spent.optimizer_ms ? `, optimizer ${milliseconds(spent.optimizer_ms)}` : "";
    return `${spent.device}: ${passes} passes, busy ${milliseconds(spent.busy_ms)}, idle ${milliseconds(spent.idle_ms)}${optimizer}.`;
  });
}
