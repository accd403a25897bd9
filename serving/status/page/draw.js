// Elements out of plain values. Text goes in as text nodes only: nothing a service says can become markup.

const SVG = "http://www.w3.org/2000/svg";
const SHAPES = new Set(["svg", "path", "line", "text", "g", "rect"]);

/** An element: h("p.quiet", {title: "x"}, "text", child, [more]). null, false and undefined are left out. */
export function h(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const made = SHAPES.has(name) ? document.createElementNS(SVG, name) : document.createElement(name);
  if (classes.length) made.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") made.classList.add(...String(value).split(" ").filter(Boolean));
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    made.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return made;
}

/** Make what is there like what it should be, in place: a selection, an open <details> and a moving bar survive. */
export function become(parent, children) {
  const wanted = children.flat(Infinity).filter((child) => child);
  wanted.forEach((child, at) => {
    const there = parent.childNodes[at];
    if (!there) parent.append(child);
    else if (!alike(there, child)) there.replaceWith(child);
    else if (child.nodeType === Node.TEXT_NODE) {
      if (there.data !== child.data) there.data = child.data;
    } else {
      for (const { name } of [...there.attributes]) {
        if (!child.hasAttribute(name) && name !== "open") there.removeAttribute(name);
      }
      for (const { name, value } of child.attributes) {
        if (there.getAttribute(name) !== value) there.setAttribute(name, value);
      }
      become(there, [...child.childNodes]);
    }
  });
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
}

function alike(a, b) {
  return a.nodeName === b.nodeName && (a.nodeType !== Node.ELEMENT_NODE || a.getAttribute("data-id") === b.getAttribute("data-id"));
}

const WIDTH = 300, HEIGHT = 72, LEFT = 40, BOTTOM = 14;

/** Lines over the last minutes; `lines` are {name, class, values} with null where there is no value. */
export function chart(title, unit, lines, steps, step_s) {
  const all = lines.flatMap((line) => line.values).filter((value) => value !== null);
  const top = nice(Math.max(0, ...all));
  const last = lines.map((line) => `${line.name} ${short(line.values.at(-1) ?? null)} ${unit}`).join(", ");
  const x = (at, count) => LEFT + ((steps - count + at) / Math.max(1, steps - 1)) * (WIDTH - LEFT - 2);
  const y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - BOTTOM - 6);
  return h("figure", {},
    h("figcaption", {}, title, " ", lines.map((line) => h(`span.key.${line.class}`, {}, line.name))),
    h("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: now ${last}; at most ${short(Math.max(0, ...all))} ${unit}` },
      h("line.axis", { x1: LEFT, x2: WIDTH, y1: y(0), y2: y(0) }),
      h("line.axis", { x1: LEFT, x2: WIDTH, y1: y(top), y2: y(top) }),
      h("text", { x: LEFT - 4, y: y(top) + 4, "text-anchor": "end" }, short(top)),
      h("text", { x: LEFT - 4, y: y(0) + 3, "text-anchor": "end" }, "0"),
      h("text", { x: LEFT, y: HEIGHT - 3 }, `${Math.round((steps * step_s) / 60)} min ago`),
      h("text", { x: WIDTH, y: HEIGHT - 3, "text-anchor": "end" }, `now, ${unit}`),
      lines.map((line) => h(`path.line.${line.class}`, { d: path(line.values, x, y) }))));
}

function path(values, x, y) {
  let pen = "M";
  return values.map((value, at) => {
    if (value === null) return (pen = "M"), "";
    const point = `${pen}${x(at, values.length).toFixed(1)} ${y(value).toFixed(1)}`;
    // A lone value between gaps is a dot: a line of no length with round ends.
    const alone = pen === "M" && (values[at + 1] ?? null) === null;
    pen = "L";
    return alone ? `${point}h0.01` : point;
  }).join("");
}

function nice(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value) * power;
}

/** A number in at most four places; a dash where there is none. */
export function short(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10000) return `${Math.round(value / 1000)}k`;
  if (value >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return String(Number(value.toPrecision(2)));
}

/** Seconds as people say them. */
export function time(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${Math.round(seconds / 3600)} h`;
}

export const percent = (share) => `${Math.round(share * 100)}%`;
export const gib = (bytes) => `${(bytes / 2 ** 30).toFixed(1)} GiB`;
