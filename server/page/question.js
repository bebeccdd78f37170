// The request, made from the loaded file and the controls.

const GIB = 2 ** 30;
// Micro-batches per device if only a profile is loaded. Filling and draining the pipeline then takes
// at most a fifth of its time (Huang et al., "GPipe", section 2.3: four times the number of devices).
const CHUNKS_PER_DEVICE = 4;

/** Return the PlacementRequest of a file that holds a request or a profile. */
export function questionOf(content) {
  if (content && Array.isArray(content.layers)) content = { profile: content, chunks: enoughChunks(content.cluster) };
  if (!content || !content.profile || !Array.isArray(content.profile.layers)) {
    throw new Error("the file is neither a profile nor a placement request: a profile has 'layers', and a request has 'profile'");
  }
  if (!(content.cluster || content.profile.cluster)) throw new Error("neither the request nor its profile has a cluster; add one");
  return content;
}

function enoughChunks(cluster) {
  const count = cluster && Array.isArray(cluster.devices) ? cluster.devices.length : 1;
  return count > 1 ? CHUNKS_PER_DEVICE * count : 1;
}

/** Return whether the request is for training. */
export function trains(question) {
  return question.training ?? question.profile.training ?? false;
}

/** Return whether objective "generation" applies: it needs a pass of one token in addition to the prompt's. */
export function generates(question) {
  return Boolean(question.token_profile && question.generation) && !trains(question);
}

export function clusterOf(question) {
  return question.cluster || question.profile.cluster;
}

/** Return the values of the controls for a request. */
export function knobsOf(question) {
  const cluster = clusterOf(question);
  const text = question.generation || {};
  return {
    devices: cluster.devices.length,
    memory: cluster.devices[0].memory_bytes / GIB,
    chunks: question.chunks || 1,
    objective: question.objective || "throughput",
    bottleneck: question.bottleneck_ms ?? null,
    prompt: text.prompt_tokens ?? null,
    tokens: text.new_tokens ?? null,
    sequences: text.sequences_in_flight ?? 1,
    schedule: question.schedule || "1f1b",
    limit: question.time_limit_s || 30,
    explain: Boolean(question.explain),
    pins: { ...((question.constraints || {}).pinned || {}) },
  };
}

/** Return the request with the values of the controls. */
export function changed(question, knobs) {
  const before = knobsOf(question);
  if (JSON.stringify(before) === JSON.stringify(knobs)) return question; // the same question has the same answer
  const cluster = resized(clusterOf(question), knobs.devices);
  if (knobs.memory !== before.memory) {
    cluster.devices = cluster.devices.map((device) => ({
      ...device,
      memory_bytes: Math.round(knobs.memory * GIB),
    }));
  }
  const names = new Set(cluster.devices.map((device) => device.name));
  const constraints = { ...(question.constraints || {}) };
  constraints.pinned = Object.fromEntries(Object.entries(knobs.pins).filter(([, device]) => names.has(device)));
  if (constraints.forbidden) {
    constraints.forbidden = Object.fromEntries(
      Object.entries(constraints.forbidden).map(([layer, banned]) => [layer, banned.filter((name) => names.has(name))]),
    );
  }
  const asked = {
    ...question,
    cluster,
    constraints,
    chunks: knobs.chunks,
    objective: knobs.objective,
    schedule: knobs.schedule,
    time_limit_s: knobs.limit,
    explain: knobs.explain,
  };
  return fitting(asked, knobs, knobs.chunks !== before.chunks);
}

/** Set the fields that only the objective has, and remove those that it does not accept. */
function fitting(asked, knobs, chunksChanged) {
  if (asked.objective === "step") {
    if (chunksChanged) delete asked.batch_size; // the batch is now this number of the profile's micro-batches
  } else {
    delete asked.profiles;
    delete asked.batch_size;
    delete asked.step_kind;
    if (asked.schedule === "auto") asked.schedule = "1f1b";
  }
  if (asked.objective !== "step" && asked.objective !== "throughput") delete asked.replicas;
  if (asked.objective === "generation") {
    asked.generation = { ...asked.generation, new_tokens: knobs.tokens, sequences_in_flight: knobs.sequences };
  } else {
    delete asked.generation;
    delete asked.token_profile;
  }
  if (asked.objective === "devices") asked.bottleneck_ms = knobs.bottleneck;
  else delete asked.bottleneck_ms;
  return asked;
}

/** Return the smallest memory of a device in GiB: the amount that libraries reserve. */
export function leastMemory(question) {
  return Math.max(...clusterOf(question).devices.map((device) => device.reserve_bytes || 0)) / GIB;
}

/** Return the largest number of devices: additional ones need a link as a pattern. */
export function mostDevices(question) {
  const cluster = clusterOf(question);
  return (cluster.links || []).length ? Math.max(64, cluster.devices.length) : cluster.devices.length;
}

/** Return `count` devices; additional ones copy the last device and the slowest link. */
function resized(cluster, count) {
  const devices = cluster.devices.slice(0, count);
  const kept = new Set(devices.map((device) => device.name));
  const links = (cluster.links || []).filter((link) => kept.has(link.source) && kept.has(link.target));
  const slowest = (cluster.links || []).reduce((one, other) =>
    one && one.bandwidth_bytes_per_s <= other.bandwidth_bytes_per_s ? one : other, null);
  while (devices.length < count && slowest) {
    const last = devices[devices.length - 1];
    let number = devices.length;
    while (kept.has(`${last.name.split(":")[0]}:${number}`)) number += 1;
    const name = `${last.name.split(":")[0]}:${number}`;
    for (const other of kept) {
      links.push({ ...slowest, source: name, target: other }, { ...slowest, source: other, target: name });
    }
    kept.add(name);
    devices.push({ ...last, name });
  }
  return { ...cluster, devices, links };
}
