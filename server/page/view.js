// One placement as an article: its figures, its devices, its layers.

import { deviceBars, whatLimits } from "./bars.js";
import { amount, bytes, element, milliseconds, percent } from "./dom.js";
import { layerGraph } from "./graph.js";
import { timelineChart } from "./timeline.js";

/** Fill an article with a placement; options as for layerGraph, a title, and timeline: a promise of one, or of null. */
export function show(article, placement, request, options) {
  const parts = [element("h3", {}, options.title), facts(placement, options.timeline)];
  if (placement.infeasible) {
    parts.push(element("p", { class: "why" }, element("strong", {}, "No placement is possible. "), placement.infeasible.reason));
    if (placement.infeasible.short_bytes) parts.push(element("p", {}, `${bytes(placement.infeasible.short_bytes)} are short.`));
    const words = placement.infeasible.requirements || [];
    if (words.length) parts.push(element("p", {}, "These cannot hold together:"), element("ul", {}, ...words.map((text) => element("li", {}, text))));
  } else if (placement.devices.length) {
    const devices = placement.devices.map((load) => load.device);
    parts.push(
      element("p", { class: "why" }, whatLimits(placement)),
      ...helps(placement),
      element("h4", {}, "Devices, for one micro-batch"),
      deviceBars(placement.devices, article.clientWidth - 32),
      element("h4", {}, "Layers"),
      layerGraph(request.profile, placement.layer_devices, devices, options),
      table(placement),
      element("h4", {}, "Timeline of a batch"),
      drawnLater(options.timeline),
    );
  }
  article.replaceChildren(...parts);
}

/** A place for the timeline, filled when it is there: the rest need not wait for it. */
function drawnLater(timeline) {
  const place = element("div", { "aria-busy": "true" }, element("p", {}, "…"));
  timeline.then((found) => {
    place.replaceChildren(found ? timelineChart(found) : element("p", {}, "The service has none of this placement."));
    place.removeAttribute("aria-busy");
  });
  return place;
}

/** What would make it better, where the solver was asked to find out. */
function helps(placement) {
  const found = (placement.limits && placement.limits.helps) || [];
  if (!found.length) return [];
  const items = found.map((help) => element("li", {}, `${help.change}: ${amount(help.objective_value, placement.objective)}, ${help.speedup.toFixed(2)} × as good`));
  return [element("h4", {}, "What would help"), element("ul", { class: "helps" }, ...items)];
}

/** Fill a place by what a timeline tells, once it is there. */
function toldBy(timeline, tell) {
  const place = element("span", { "aria-busy": "true" }, "…");
  timeline.then((found) => {
    place.textContent = found ? tell(found) : "none";
    place.removeAttribute("aria-busy");
  });
  return place;
}

/** How much faster a whole batch is than on the best single device; that of one micro-batch would leave out the bubble. */
function againstOneDevice(placement, timeline) {
  const ratio = placement.objective === "step" ? placement.speedup : timeline.single_device_ms && timeline.single_device_ms / timeline.step_ms;
  if (!ratio) return "none";
  const small = placement.single_device && !placement.single_device.fits ? ", which is too small" : "";
  return `${ratio.toFixed(2)} × as fast${small}`;
}

function batchOf(timeline) {
  const shown = timeline.shown_chunks < timeline.chunks ? ` for the first ${timeline.shown_chunks}` : "";
  return milliseconds(timeline.step_ms) + shown;
}

function facts(placement, timeline) {
  const kind = placement.objective;
  const rows = [
    ["Status", { optimal: "optimal, proven", feasible: "best found so far", infeasible: "infeasible", unknown: "none found in time" }[placement.status]],
    [{ throughput: "Bottleneck", step: "Whole batch", latency: "One sample", memory: "Largest use", devices: "Devices used" }[kind] || kind, amount(placement.objective_value, kind)],
    ["Proven bound", amount(placement.bound, kind)],
    ["Gap", placement.gap === null || placement.gap === undefined ? "none" : percent(placement.gap)],
    ...(kind === "step" ? [] : [["Whole batch", toldBy(timeline, batchOf)]]),
    ["Against one device", toldBy(timeline, (found) => againstOneDevice(placement, found))],
    ["Micro-batches", `${placement.chunks}, ${placement.schedule}`],
    ["Solved in", `${(placement.solve_time_s || 0).toFixed(2)} s`],
  ];
  return element("dl", { class: "facts" }, ...rows.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

function table(placement) {
  const rows = Object.entries(placement.layer_devices).map(([layer, device]) =>
    element("tr", {}, element("td", {}, layer), element("td", {}, device)));
  const head = element("tr", {}, element("th", { scope: "col" }, "Layer"), element("th", { scope: "col" }, "Device"));
  return element("details", {}, element("summary", {}, "As a table"),
    element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
}
