// Elements and number formats. Text from a profile is never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Return an HTML element with attributes and children (elements or text). */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** Return an SVG element. */
export function shape(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export function byId(id) {
  return document.getElementById(id);
}

export function milliseconds(value) {
  return value >= 1000 ? `${(value / 1000).toPrecision(4)} s` : `${Number(value.toPrecision(4))} ms`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let step = 0;
  let size = value;
  while (size >= 1024 && step < units.length - 1) {
    size /= 1024;
    step += 1;
  }
  return `${step ? size.toFixed(size < 10 ? 2 : 1) : size} ${units[step]}`;
}

export function percent(share) {
  return `${(100 * share).toFixed(share < 0.1 ? 2 : 1)} %`;
}

export function amount(value, objective) {
  if (value === null || value === undefined) return "none";
  if (objective === "devices") return `${value} ${value === 1 ? "device" : "devices"}`;
  return objective === "memory" ? bytes(value) : milliseconds(value);
}
