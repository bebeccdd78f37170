// Requests to the service. Paths are relative, so that the page works under a proxy's prefix.

const KEY = "placer-key";

/** An error response of the service. */
export class Problem extends Error {
  constructor(status, content) {
    super(content.detail || `the service answered ${status}`);
    this.status = status;
    this.faults = content.errors || []; // {pointer, detail} of invalid places in the body
  }
}

export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

export async function get(path, signal) {
  return (await send("GET", path, undefined, signal)).json();
}

export async function text(path, signal) {
  return (await send("GET", path, undefined, signal)).text();
}

async function post(path, body, signal) {
  return (await send("POST", path, body, signal)).json();
}

export async function remove(path) {
  return (await send("DELETE", path)).json();
}

async function send(method, path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const content = body === undefined ? undefined : JSON.stringify(body);
  let reply;
  try {
    reply = await fetch(path, { method, headers, body: content, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, { detail: "the service cannot be reached" });
  }
  if (!reply.ok) throw new Problem(reply.status, await reply.json().catch(() => ({})));
  return reply;
}

/**
 * Request a placement and follow its solve to the end. While the queue is full, try again.
 * Aborting the signal stops the solve, unless other clients wait for it.
 */
export async function solve(request, onProgress, signal) {
  const first = await submit(request, onProgress, signal);
  if (first.layer_devices !== undefined) return first;
  onProgress(first);
  const reply = await send("GET", `v1/placements/${first.id}/events?on_disconnect=stop`, undefined, signal);
  for await (const [kind, data] of events(reply.body)) {
    if (kind === "progress") onProgress(data);
    else if (kind === "done") return data;
    else if (kind === "failed") throw new Problem(data.status, data);
    else break;
  }
  throw new Problem(503, { detail: "the service stops; its next start continues the solve" });
}

async function submit(request, onProgress, signal) {
  for (;;) {
    try {
      return await post("v1/placements?wait=0.2&on_disconnect=stop", request, signal);
    } catch (error) {
      if (error.status !== 429) throw error;
      onProgress({ status: "waiting for a place in the queue" });
      await pause(1000, signal);
    }
  }
}

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}

/** Yield the events of a stream as [kind, data]. EventSource cannot send a key. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const whole = text.split("\n\n");
    text = whole.pop();
    for (const block of whole) {
      const found = /^event: (.*)\ndata: (.*)$/.exec(block);
      if (found) yield [found[1], JSON.parse(found[2])];
    }
  }
}
