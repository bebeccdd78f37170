// One placement as an article: its figures, its devices, its layers.

import { deviceBars, whatLimits } from "./bars.js";
import { amount, bytes, element, percent } from "./dom.js";
import { layerGraph } from "./graph.js";

/** Fill an article with a placement; options as for layerGraph, and a title. */
export function show(article, placement, request, options) {
  const parts = [element("h3", {}, options.title), facts(placement)];
  if (placement.infeasible) {
    parts.push(element("p", { class: "why" }, element("strong", {}, "No placement is possible. "), placement.infeasible.reason));
    if (placement.infeasible.short_bytes) parts.push(element("p", {}, `${bytes(placement.infeasible.short_bytes)} are short.`));
  } else if (placement.devices.length) {
    const devices = placement.devices.map((load) => load.device);
    parts.push(
      element("p", { class: "why" }, whatLimits(placement)),
      element("h4", {}, "Devices, for one micro-batch"),
      deviceBars(placement.devices),
      element("h4", {}, "Layers"),
      layerGraph(request.profile, placement.layer_devices, devices, options),
      table(placement),
    );
  }
  article.replaceChildren(...parts);
}

function facts(placement) {
  const kind = placement.objective;
  const rows = [
    ["Status", { optimal: "optimal, proven", feasible: "best found so far", infeasible: "infeasible", unknown: "none found in time" }[placement.status]],
    [{ throughput: "Bottleneck", latency: "One sample", memory: "Largest use" }[kind], amount(placement.objective_value, kind)],
    ["Proven bound", amount(placement.bound, kind)],
    ["Gap", placement.gap === null || placement.gap === undefined ? "none" : percent(placement.gap)],
    ["Against one device", placement.speedup ? `${placement.speedup.toFixed(2)} ×` : "none"],
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
