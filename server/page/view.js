// One placement as an article: figures, devices and layers.

import { deviceBars, whatLimits } from "./bars.js";
import { amount, bytes, element, milliseconds, percent } from "./dom.js";
import { layerGraph } from "./graph.js";
import { timelineChart } from "./timeline.js";

/** Fill an article with a placement. options: the options of layerGraph, title, and timeline, a promise of a timeline or null. */
export function show(article, placement, request, options) {
  const parts = [element("h3", {}, options.title), facts(placement, options.timeline)];
  if (placement.infeasible) {
    parts.push(element("p", { class: "why" }, element("strong", {}, "No placement is possible. "), placement.infeasible.reason));
    if (placement.infeasible.missing_bytes) parts.push(element("p", {}, `${bytes(placement.infeasible.missing_bytes)} are missing.`));
    const words = placement.infeasible.requirements || [];
    if (words.length) parts.push(element("p", {}, "These requirements contradict one another:"), element("ul", {}, ...words.map((text) => element("li", {}, text))));
  } else if (placement.devices.length) {
    const devices = placement.devices.map((load) => load.device);
    parts.push(
      element("p", { class: "why" }, whatLimits(placement)),
      ...improvements(placement),
      element("h4", {}, "Devices, for one micro-batch"),
      deviceBars(placement.devices, article.clientWidth - 32),
      element("h4", {}, "Layers"),
      layerGraph(request.profile, placement.layer_devices, devices, options),
      table(placement),
      element("h4", {}, timelineTitle(placement)),
      drawnLater(options.timeline),
    );
  }
  article.replaceChildren(...parts);
}

/** Return an element that is filled once the timeline has arrived, so that the rest need not wait. */
function drawnLater(timeline) {
  const place = element("div", { "aria-busy": "true" }, element("p", {}, "…"));
  timeline.then((found) => {
    place.replaceChildren(found ? timelineChart(found) : element("p", {}, "The service has no timeline of this placement."));
    place.removeAttribute("aria-busy");
  });
  return place;
}

/** List the changes that would help, if the request asked for an explanation. */
function improvements(placement) {
  const found = (placement.limits && placement.limits.improvements) || [];
  if (!found.length) return [];
  const items = found.map((help) => element("li", {}, `${help.change}: ${amount(help.objective_value, placement.objective)}, ${help.speedup.toFixed(2)} × as good`));
  return [element("h4", {}, "What would help"), element("ul", { class: "improvements" }, ...items)];
}

/** Return an element that is filled with a text made from the timeline, once it has arrived. */
function fromTimeline(timeline, describe) {
  const place = element("span", { "aria-busy": "true" }, "…");
  timeline.then((found) => {
    place.textContent = found ? describe(found) : "none";
    place.removeAttribute("aria-busy");
  });
  return place;
}

/** Return the speed-up of a whole batch, bubble included, over the best single device. */
function againstOneDevice(placement, timeline) {
  const ratio = placement.objective === "step" ? placement.speedup : timeline.single_device_ms && timeline.single_device_ms / timeline.step_ms;
  if (!ratio) return "none";
  const small = placement.single_device && !placement.single_device.fits ? ", which has too little memory" : "";
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
    [{ throughput: "Bottleneck", step: "Whole batch", latency: "One sample", generation: "One generation", memory: "Largest use", devices: "Devices used" }[kind] || kind, amount(placement.objective_value, kind)],
    ["Proven bound", amount(placement.bound, kind)],
    ["Gap", placement.gap === null || placement.gap === undefined ? "none" : percent(placement.gap)],
    ...(kind === "step" || kind === "generation" ? [] : [["Whole batch", fromTimeline(timeline, batchOf)]]),
    ["Compared with one device", fromTimeline(timeline, (found) => againstOneDevice(placement, found))],
    ...(placement.sharded ? [["Sharded by FSDP2", `${amount(placement.sharded.step_ms, kind)}, predicted`]] : []),
    ["Micro-batches", `${placement.chunks}, ${placement.schedule}`],
    ...(hasReplicas(placement) ? [["Replicas", replicasText(placement)]] : []),
    ["Solved in", `${(placement.solve_time_s || 0).toFixed(2)} s`],
  ];
  return element("dl", { class: "facts" }, ...rows.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

function hasReplicas(placement) {
  return Object.keys(placement.replicas).length > 0;
}

/** Return the numbers of replicas by stage, in pipeline order. */
function replicaCounts(placement) {
  return placement.stages.map((device) => placement.replicas[device]?.length || 1);
}

function isByStage(placement) {
  return new Set(replicaCounts(placement)).size > 1;
}

function replicasText(placement) {
  const counts = replicaCounts(placement);
  return isByStage(placement) ? `${counts.join("-")} by stage` : `${counts[0]} of each stage`;
}

/** Say what the timeline shows: all units of all devices, or the first of several pipelines. */
function timelineTitle(placement) {
  if (!hasReplicas(placement)) return "Timeline of a batch";
  return isByStage(placement) ? "Timeline of a batch, in units of its micro-batches" : "Timeline of a batch, in the first pipeline";
}

/** By layer, the name of its device, or the names of all devices that hold it. */
export function holders(placement) {
  return new Map(Object.entries(placement.layer_devices).map(([layer, device]) =>
    [layer, placement.replicas[device]?.map((one) => one.device).join(", ") || device]));
}

function table(placement) {
  const rows = [...holders(placement)].map(([layer, device]) =>
    element("tr", {}, element("td", {}, layer), element("td", {}, device)));
  const head = element("tr", {}, element("th", { scope: "col" }, "Layer"), element("th", { scope: "col" }, "Device"));
  return element("details", {}, element("summary", {}, "As a table"),
    element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
}
