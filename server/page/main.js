// The page's state and events: the question, the running solve, and the shown answers.

import { Problem, get, remove, solve, text, useKey } from "./api.js";
import { amount, byId, element, percent } from "./dom.js";
import { changed, clusterOf, generates, knobsOf, leastMemory, mostDevices, questionOf, trains } from "./question.js";
import { holders, show } from "./view.js";

// Time after the last change before a new solve starts.
const PAUSE_MS = 250;
const KNOBS = ["devices", "memory", "chunks", "objective", "bottleneck", "prompt", "tokens", "sequences", "schedule", "limit"];
// The request field of each control, to show the service's faults next to it.
const FIELDS = {
  chunks: "chunks",
  objective: "objective",
  bottleneck: "bottleneck_ms",
  tokens: "generation.new_tokens",
  sequences: "generation.sequences_in_flight",
  schedule: "schedule",
  limit: "time_limit_s",
};

const state = {
  question: null, // the loaded request
  knobs: null,
  asked: null, // the request of the solve or of the placement
  placement: null,
  timeline: null, // a promise of the placement's timeline or null
  kept: null, // {placement, request, timeline}
  moved: new Set(),
  solving: null, // AbortController
  changing: null, // the timer that starts the next solve
  current: false, // whether the placement answers the current controls
  id: null, // id of the running solve
  cursor: null,
};

function load(content, name) {
  state.question = questionOf(content);
  state.knobs = knobsOf(state.question);
  const { profile } = state.question;
  byId("subject").textContent = `${profile.model || name}: ${profile.layers.length} layers, ${trains(state.question) ? "training" : "inference"}`;
  byId("knobs").hidden = false;
  byId("devices").max = mostDevices(state.question);
  byId("memory").min = leastMemory(state.question);
  byId("tokens").max = state.knobs.tokens ?? ""; // the measured pass of a token has a cache for no longer text
  for (const id of KNOBS) {
    stand(byId(id), state.knobs[id]);
    unmark(byId(id));
  }
  offer();
  byId("explain").checked = state.knobs.explain;
  byId("pin-layer").replaceChildren(...profile.layers.map((layer) => element("option", {}, layer.name)));
  showPins();
  ask();
}

/** Set a control to a value; add the value to a select that does not offer it. */
function stand(knob, value) {
  knob.value = value;
  if (knob.localName !== "select" || knob.value === value) return;
  knob.append(element("option", {}, value));
  knob.value = value;
}

/**
 * Show the choices that apply: only training has a schedule, only objective "step" chooses it, only objective
 * "devices" has a longest time, and only objective "generation" has texts, in place of micro-batches.
 */
function offer() {
  const { question, knobs } = state;
  const isText = knobs.objective === "generation";
  showFields({
    bottleneck: knobs.objective === "devices",
    chunks: !isText,
    prompt: isText,
    tokens: isText,
    sequences: isText,
    schedule: trains(question),
  });
  offerOption("objective", "generation", generates(question));
  offerOption("schedule", "auto", knobs.objective === "step");
  if (knobs.objective !== "step" && knobs.schedule === "auto") choose("1f1b");
}

/** Show or hide controls, given as {id: whether to show it}; a hidden one has no fault. */
function showFields(shown) {
  for (const [id, isShown] of Object.entries(shown)) {
    const field = byId(id).closest(".field");
    if (!isShown) unmark(byId(id));
    else if (field.hidden) check(byId(id)); // it may still have an invalid value
    field.hidden = !isShown;
  }
}

function offerOption(id, value, isOffered) {
  const option = byId(id).querySelector(`option[value=${value}]`);
  option.hidden = option.disabled = !isOffered;
}

/** Start with the longest time of a device in the shown placement, so that the answer is not slower. */
function chooseBottleneck() {
  const loads = state.placement ? state.placement.devices.map((device) => device.load_ms) : [];
  if (state.knobs.bottleneck === null && loads.length) {
    // Rounded up, since the placement itself has to keep within it.
    state.knobs.bottleneck = Math.ceil(Math.max(...loads) * 1000) / 1000;
    byId("bottleneck").value = state.knobs.bottleneck;
  }
  check(byId("bottleneck"));
}

function choose(schedule) {
  state.knobs.schedule = schedule;
  byId("schedule").value = schedule;
}

/** Mark a control whose value is invalid, with the reason. */
function check(knob) {
  unmark(knob);
  const wrong = knob.validationMessage || (knob.type === "number" && knob.value === "" ? "Enter a number." : "");
  if (wrong) mark(knob, wrong);
}

/** Mark the controls whose values the service rejected, until the next question. */
function markRefused(error) {
  for (const [id, field] of Object.entries(FIELDS)) {
    const fault = (error.faults || []).find((one) => one.pointer === `#/${field.replaceAll(".", "/")}`);
    const detail = fault ? fault.detail : error.message.startsWith(`${field}: `) && error.message.slice(field.length + 2);
    if (!detail) continue;
    mark(byId(id), detail);
    byId(id).dataset.refused = "";
  }
}

function mark(knob, wrong) {
  knob.setAttribute("aria-invalid", "true");
  knob.setAttribute("aria-describedby", `${knob.id}-fault`);
  knob.closest(".field").append(element("small", { class: "fault", id: `${knob.id}-fault` }, wrong));
}

function unmark(knob) {
  delete knob.dataset.refused;
  knob.removeAttribute("aria-invalid");
  knob.removeAttribute("aria-describedby");
  knob.closest(".field").querySelector(".fault")?.remove();
}

/** Show that the placement on the page no longer answers the controls. */
function outdate() {
  state.current = false;
  state.solving?.abort();
  byId("current").classList.add("old");
}

function showPins() {
  const { devices } = clusterOf(changed(state.question, state.knobs));
  const there = new Set(devices.map((device) => device.name));
  const chosen = byId("pin-device").value;
  byId("pin-device").replaceChildren(...devices.map((device) => element("option", {}, device.name)));
  if (devices.some((device) => device.name === chosen)) byId("pin-device").value = chosen;
  byId("pins").replaceChildren(...Object.entries(state.knobs.pins).map(([layer, device]) => {
    const gone = there.has(device) ? "" : ", which does not exist";
    const button = element("button", { type: "button", "aria-label": `Unpin ${layer}`, class: gone && "gone" }, `${layer} on ${device}${gone} ✕`);
    button.addEventListener("click", () => {
      delete state.knobs.pins[layer];
      showPins();
      ask();
    });
    return element("li", {}, button);
  }));
}

async function ask() {
  clearTimeout(state.changing);
  outdate();
  document.querySelectorAll("#knobs [data-refused]").forEach(unmark);
  if (document.querySelector("#knobs [aria-invalid]")) {
    say("Correct the marked values to get an answer.");
    return;
  }
  const solving = (state.solving = new AbortController());
  const request = changed(state.question, state.knobs);
  byId("current").setAttribute("aria-busy", "true");
  say("Solving …");
  byId("error").hidden = true;
  try {
    const placement = await solve(request, (progress) => follow(progress, request), solving.signal);
    if (solving.signal.aborted) return;
    Object.assign(state, { asked: request, placement, timeline: timelineOf(placement), current: true });
    say(ended(placement));
    compare();
    draw();
  } catch (error) {
    if (error.name === "AbortError" || solving.signal.aborted) return;
    say("");
    fail(error);
    markRefused(error);
  } finally {
    if (state.solving === solving) {
      byId("current").setAttribute("aria-busy", "false");
      state.id = null;
      offerActions();
    }
  }
}

/** Show the buttons that apply. */
function offerActions() {
  const { placement, asked, kept, id } = state;
  const places = Boolean(placement && placement.devices.length);
  const shown = {
    stop: Boolean(id),
    keep: places && !(kept && kept.placement.id === placement.id),
    forget: Boolean(kept),
    "save-placement": Boolean(placement),
    "save-request": Boolean(asked),
    "save-trace": places,
    "save-report": Boolean(placement),
  };
  for (const [button, has] of Object.entries(shown)) byId(button).hidden = !has;
  byId("actions").hidden = !Object.values(shown).some(Boolean);
}

/** Return the placement's timeline, or null if the service has none. */
async function timelineOf(placement) {
  if (!placement.devices.length) return null;
  return get(`v1/placements/${placement.id}/timeline`).catch(() => null);
}

function follow(progress, request) {
  const { incumbent, bound, elapsed_s: seconds = 0, status } = progress;
  state.id = progress.id || null;
  offerActions();
  const found = incumbent === null || incumbent === undefined ? "nothing found yet" : `best ${amount(incumbent, request.objective)}`;
  const proven = bound ? `, bound ${amount(bound, request.objective)}` : "";
  const gap = incumbent && bound !== null && bound !== undefined ? `, gap ${percent((incumbent - bound) / incumbent)}` : "";
  say(`${status === "running" ? "Solving" : status} for ${seconds.toFixed(1)} s: ${found}${proven}${gap}`);
}

function ended(placement) {
  if (placement.status === "infeasible") return "There is no placement within these limits.";
  if (placement.objective_value === null) return "No placement was found in time; increase the time limit.";
  return `${placement.status === "optimal" ? "Proven optimal" : "Best so far"}: ${amount(placement.objective_value, placement.objective)}`;
}

function draw() {
  const { placement, asked, kept, moved } = state;
  const onPick = (layer) => {
    byId("pin-layer").value = layer;
    byId("pin-device").value = placement.layer_devices[layer];
    byId("pin-device").focus();
  };
  const pinned = state.knobs.pins;
  offerActions();
  byId("current").classList.toggle("old", !state.current);
  byId("kept").hidden = !kept;
  if (kept) show(byId("kept"), kept.placement, kept.request, { title: "Kept", moved, pinned: {}, onPick, timeline: kept.timeline });
  else byId("kept").replaceChildren();
  show(byId("current"), placement, asked, { title: kept ? "Now" : asked.profile.model || "Placement", moved, pinned, onPick, timeline: state.timeline });
}

/** Note where the kept placement and the current one differ. */
function compare() {
  state.moved = new Set();
  byId("moves").textContent = "";
  const { kept, placement } = state;
  if (!kept || !placement.objective_value || !kept.placement.objective_value) return;
  const before = holders(kept.placement), after = holders(placement);
  state.moved = new Set([...after.keys()].filter((layer) => before.get(layer) !== after.get(layer)));
  const [was, is] = [kept.placement.objective_value, placement.objective_value];
  const same = kept.placement.objective === placement.objective;
  const change = !same || was === is ? "" : ` and the value is ${percent(Math.abs(is / was - 1))} ${is < was ? "lower" : "higher"}`;
  byId("moves").textContent = `Compared with the kept placement, ${state.moved.size} of ${state.asked.profile.layers.length} layers are on another device${change}.`;
}

function say(words) {
  byId("progress").textContent = words;
}

function fail(error) {
  byId("error").textContent = error.message;
  byId("error").hidden = false;
  if (error instanceof Problem && error.status === 401) {
    byId("key-form").hidden = false;
    byId("key").focus();
  }
}

async function list(more) {
  if (!more) {
    state.cursor = null;
    byId("list").replaceChildren();
  }
  const cursor = state.cursor ? `&cursor=${state.cursor}` : "";
  try {
    const page = await get(`v1/placements?limit=20&q=${encodeURIComponent(byId("search").value)}${cursor}`);
    state.cursor = page.next;
    byId("more").hidden = !page.next;
    byId("list").append(...page.placements.filter((row) => row.profile_id).map(entry));
  } catch (error) {
    fail(error);
  }
}

function entry(row) {
  const value = row.objective_value === null ? row.status : amount(row.objective_value, row.objective);
  const when = new Date(1000 * row.created_s).toLocaleString();
  const button = element("button", { type: "button" }, `${row.model || row.id.slice(0, 12)}: ${value}`,
    element("small", {}, `${row.layers} layers on ${row.used_devices} of ${row.devices} devices, ${when}`));
  button.addEventListener("click", () => guarded(async () => load(await get(`v1/placements/${row.id}/request`), row.model)));
  return element("li", {}, button);
}

async function guarded(work) {
  byId("error").hidden = true;
  try {
    await work();
  } catch (error) {
    fail(error);
  }
}

function read(file) {
  return guarded(async () => {
    let content;
    try {
      content = JSON.parse(await file.text());
    } catch {
      throw new Error(`${file.name} is not JSON`);
    }
    load(content, file.name);
  });
}

function save(name, type, content) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  const link = element("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Save a file that the service makes from the placement. */
function saveFromService(what, name, type) {
  return guarded(async () => state.placement && save(name, type, await text(`v1/placements/${state.placement.id}/${what}`)));
}

function listen() {
  const drop = byId("drop");
  for (const kind of ["dragenter", "dragover"]) {
    drop.addEventListener(kind, (event) => {
      event.preventDefault();
      drop.classList.add("over");
    });
  }
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    if (event.dataTransfer.files[0]) read(event.dataTransfer.files[0]);
  });
  byId("file").addEventListener("change", (event) => event.target.files[0] && read(event.target.files[0]));
  byId("example").addEventListener("click", () => guarded(async () => {
    const document = await get("openapi.json");
    load(document.paths["/v1/placements"].post.requestBody.content["application/json"].examples.throughput.value, "example");
  }));
  byId("past").addEventListener("toggle", (event) => event.target.open && list(false));
  byId("more").addEventListener("click", () => list(true));
  let typing;
  byId("search").addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => list(false), PAUSE_MS);
  });
  byId("knobs").addEventListener("submit", (event) => event.preventDefault());
  byId("knobs").addEventListener("input", (event) => {
    const { id, value, type, checked } = event.target;
    if (!(id in state.knobs)) return;
    check(event.target);
    outdate();
    if (!event.target.hasAttribute("aria-invalid")) {
      state.knobs[id] = type === "number" ? Number(value) : type === "checkbox" ? checked : value;
      offer();
      if (id === "objective" && value === "step") choose("auto");
      if (id === "objective" && value === "devices") chooseBottleneck();
      if (id === "devices") showPins();
    }
    clearTimeout(state.changing);
    state.changing = setTimeout(ask, PAUSE_MS);
  });
  byId("pin").addEventListener("click", () => {
    state.knobs.pins[byId("pin-layer").value] = byId("pin-device").value;
    showPins();
    ask();
  });
  byId("stop").addEventListener("click", () => state.id && guarded(() => remove(`v1/placements/${state.id}`)));
  byId("keep").addEventListener("click", () => {
    if (!state.placement) return;
    state.kept = { placement: state.placement, request: state.asked, timeline: state.timeline };
    compare();
    draw();
  });
  byId("forget").addEventListener("click", () => {
    Object.assign(state, { kept: null, moved: new Set() });
    byId("moves").textContent = "";
    draw();
  });
  byId("save-placement").addEventListener("click", () => state.placement && save("placement.json", "application/json", JSON.stringify(state.placement, null, 1)));
  byId("save-request").addEventListener("click", () => state.asked && save("request.json", "application/json", JSON.stringify(state.asked, null, 1)));
  byId("save-trace").addEventListener("click", () => saveFromService("trace", "trace.json", "application/json"));
  byId("save-report").addEventListener("click", () => saveFromService("report", "placement.html", "text/html"));
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    useKey(byId("key").value);
    byId("key-form").hidden = true;
    byId("error").hidden = true;
    if (state.question) ask();
    else if (byId("past").open) list(false);
  });
}

listen();
