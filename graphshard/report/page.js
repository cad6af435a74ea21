"use strict";
(async () => {
const $ = (id) => document.getElementById(id);
const began = performance.now();

// -- unpacked ---------------------------------------------------------------------------------------

async function unpacked(id) {
  const text = atob($(id).textContent), bytes = new Uint8Array(text.length);
  $(id).remove();
  for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

function fail(error) {
  $("error").hidden = false;
  $("error").textContent = `The figures cannot be drawn (${error}); what they show is below as text.`;
  console.error(error);
}

let data;
try {
  const [code, text] = await Promise.all([unpacked("gs-library"), unpacked("gs-data")]);
  data = JSON.parse(text);
  const library = document.createElement("script");
  library.textContent = code;
  document.head.append(library);
  Bokeh.set_log_level("error");
} catch (error) {
  fail(error);
  return;
}

const E = data.estimate, N = E.nodes, S = E.storages, M = E.memory;
const END = N.name.length;                       // the place of the optimizer's update
const [timeName, timeUnit] = data.units.time, [sizeName, sizeUnit] = data.units.memory;
const STEP = E.step_seconds;

// -- words ------------------------------------------------------------------------------------------

function bytesText(n) {
  if (Math.abs(n) < 1024) return `${n} B`;
  for (const unit of ["KiB", "MiB", "GiB", "TiB"]) {
    n /= 1024;
    if (Math.abs(n) < 1024) return `${n.toFixed(2)} ${unit}`;
  }
  return `${(n / 1024).toFixed(2)} PiB`;
}
function secondsText(s) {
  const [scale, unit] = s >= 1 ? [1, "s"] : s >= 1e-3 ? [1e3, "ms"] : [1e6, "us"];
  return `${+(s * scale).toPrecision(4)} ${unit}`;
}
const unitText = (fqn) => fqn || "(root)";
const tipOf = (...lines) => lines.filter(Boolean).join("\n");

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}
function placeLink(place, text) {
  return make("a", { href: `#place-${place}`, "data-place": place }, text);
}
const timeFill = (kind) => data.fills.times[kind] ?? data.fills.times.other;
const memoryFill = (category) => data.fills.memory[category] ?? data.fills.unknown;
const STRIPES = "repeating-linear-gradient(135deg,#0000 0 3px,#222a 3px 4px)";
const DRAWN = { "": "", "/": STRIPES, x: `${STRIPES},${STRIPES.replace("135", "45")}`,
  ".": "radial-gradient(#222a 1px,#0000 1.5px) 0 0/4px 4px" };
function swatch([colour, hatch]) {
  return make("span", { class: "swatch", style: `background:${DRAWN[hatch]};background-color:${colour}` });
}
const legend = (name, fill, ...more) => make("span", { title: fill[2] }, swatch(fill), name, ...more);
const meaning = (name, text) => [make("dt", {}, name), make("dd", {}, text)];

// -- places and times -------------------------------------------------------------------------------

const startOf = (place) => place >= END ? E.timeline_seconds : place ? N.at[place - 1] : 0;
const endOf = (place) => place >= END ? STEP : N.at[place];

function firstAbove(sorted, value) {             // the first index whose entry is above the value
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > value) high = middle; else low = middle + 1;
  }
  return low;
}
const placeAt = (seconds) => seconds >= E.timeline_seconds ? END : Math.min(firstAbove(N.at, seconds), END - 1);
const pointAt = (place) => Math.max(0, firstAbove(M.place, place) - 1);

const transferAt = new Map(), waitAt = new Map();
E.transfers.forEach((transfer, number) => {
  transferAt.set(transfer.place, number);
  waitAt.set(transfer.waited_place, number);
});

const units = new Map(E.plan.units.map((unit, number) => [unit.fqn, number]));
const unitCosts = new Map(E.units.map((unit) => [unit.fqn, unit]));

// -- the figures, filled ----------------------------------------------------------------------------

const views = {};
try {
  for (const [name, item] of Object.entries(data.figures)) {
    views[name] = await Bokeh.embed.embed_item(item, `gs-${name}`);
  }
} catch (error) {
  fail(error);
  return;
}
const documentOf = (name) => views[name].roots[0].model.document;
const model = (figure, name) => documentOf(figure).get_model_by_name(name);
const models = (figure, type) => [...documentOf(figure)._all_models.values()].filter((m) => m.type === type);
const fill = (figure, name, columns) => { model(figure, name).data = columns; };

function columnsOf(rows) {
  const columns = {};
  for (const row of rows) for (const [name, value] of Object.entries(row)) (columns[name] ??= []).push(value);
  return columns;
}

const spans = [];                                // by number: { stream, start, end, place, exposed, ... }
function spanRows() {
  const rows = [];
  const add = (kind, stream, start, end, place, tip, exposed = 0) => {
    const [colour, hatch] = timeFill(kind);
    spans.push({ start, end, place, exposed, kind, stream, hatch });
    rows.push({ stream, left: start / timeUnit, right: end / timeUnit, colour, tip });
  };
  const T = E.spans;
  for (let i = 0; i < T.name.length; i++) {
    const compute = T.stream[i] === "compute", place = T.place[i];
    const number = compute ? undefined : transferAt.get(place);
    const transfer = number === undefined ? null : E.transfers[number];
    const took = secondsText(T.end[i] - T.start[i]);
    const last = compute ? Math.min(placeAt(T.end[i]) - 1, END - 1) : place;
    add(compute ? T.phase[i] : T.name[i], T.stream[i], T.start[i], T.end[i], place, tipOf(
      `${T.name[i]} of ${unitText(T.unit[i])} in ${T.phase[i]}: ${took}`,
      last > place ? `nodes ${N.name[place]} to ${N.name[last]}` : `node ${N.name[place]}`,
      `module ${unitText(N.module[place])}`,
      N.line[place] && `line ${N.line[place]}`,
      transfer ? `${bytesText(transfer.bytes)} over ${transfer.ranks} ranks` :
        `${bytesText(totalAt(place))} alive when it begins`,
      transfer && transfer.exposed_seconds ? `exposed for ${secondsText(transfer.exposed_seconds)}: ${transfer.reason}` : "",
    ));
  }
  for (const t of E.transfers) {
    if (!t.exposed_seconds) continue;
    add("compute waits", "compute", t.waited_at, t.waited_at + t.exposed_seconds, t.waited_place, tipOf(
      `compute waits ${secondsText(t.exposed_seconds)} for the ${t.op} of ${unitText(t.unit)}`,
      `node ${N.name[t.waited_place]}`, t.reason), t.exposed_seconds);
  }
  const updated = E.timeline_seconds + E.optimizer_seconds;
  if (E.optimizer_seconds) {
    add("optimizer", "compute", E.timeline_seconds, updated, END, `${E.optimizer}: ${secondsText(E.optimizer_seconds)}`);
  }
  if (E.step_overhead) {
    add("overhead", "compute", updated, STEP, END, `overhead of a step: ${secondsText(E.step_overhead)}`);
  }
  return rows;
}
function totalAt(place) {
  const point = pointAt(place);
  return Object.values(M.bytes).reduce((sum, sizes) => sum + sizes[point], 0);
}

function memoryColumns() {                       // of points at one time only the last has a width
  const shown = [];
  M.seconds.forEach((s, point) => { if (point + 1 === M.seconds.length || M.seconds[point + 1] > s) shown.push(point); });
  const length = shown.length;
  const columns = { seconds: new Float64Array(length + 1), y0: new Float64Array(length + 1) };
  columns.seconds.set(shown.map((point) => M.seconds[point] / timeUnit));
  columns.seconds[length] = STEP / timeUnit;
  let below = columns.y0;
  data.layers.map((name) => M.bytes[name]).forEach((sizes, number) => {
    const above = new Float64Array(length + 1);
    for (let i = 0; i < length; i++) above[i] = below[i] + sizes[shown[i]] / sizeUnit;
    above[length] = above[length - 1];
    columns[`y${number + 1}`] = below = above;
  });
  return columns;
}

const ROOM = E.peak_bytes + E.hardware.memory_bytes - E.device_bytes;
const near = ROOM <= data.far * E.peak_bytes;
function showCapacity(figure) {
  const line = model(figure, "capacity");
  line.location = ROOM / sizeUnit;
  line.visible = near;
}

function fillStep() {
  const rows = spanRows();
  fill("step", "spans", columnsOf(rows));
  for (const hatch of Object.keys(DRAWN).filter(Boolean)) {
    const hatched = rows.filter((row, number) => spans[number].hatch === hatch);
    if (hatched.length) fill("step", `hatched ${hatch}`, columnsOf(hatched.map(({ stream, left, right }) => ({ stream, left, right }))));
  }
  fill("step", "memory", memoryColumns());
  const place = M.place[M.peak];
  fill("step", "peak", { seconds: [startOf(place) / timeUnit], bytes: [E.peak_bytes / sizeUnit] });
  showCapacity("step");
  const top = 1.15 * Math.max(E.peak_bytes, near ? ROOM : 0) / sizeUnit, room = model("step", "room");
  model("step", "height").end = top;
  room.setv({ y: near ? ROOM / sizeUnit : top, text_baseline: near ? "bottom" : "top",
    text: `${near ? "" : "↑ "}${bytesText(ROOM)} for tensors, of the device's ${bytesText(E.hardware.memory_bytes)}` });
  const kinds = [...new Set(spans.map((span) => span.kind))];
  $("span-legend").append(...kinds.map((kind) => legend(kind, timeFill(kind))));
  $("meanings").append(...Object.entries(data.streams).flatMap(([name, text]) => meaning(name, text)),
    ...kinds.flatMap((kind) => meaning(kind, timeFill(kind)[2])),
    ...data.layers.filter((name) => !kinds.includes(name)).flatMap((name) => meaning(name, memoryFill(name)[2])));
  for (const plot of models("step", "Figure")) {
    plot.on_event("mousemove", (event) => { if (!held) follow(event.x * timeUnit); });
    plot.on_event("tap", (event) => { held = true; go(placeAt(event.x * timeUnit), { seconds: event.x * timeUnit }); });
    plot.on_event("doubletap", () => zoom(0, STEP));
  }
}

// -- the treemap ------------------------------------------------------------------------------------

const classes = [...new Set(E.plan.units.map((unit) => unit.module_class))];
const classColour = (name) => data.fills.units[classes.indexOf(name) % data.fills.units.length];
const { groups, tiles: TILES, areas: AREAS } = data.treemap;
const TREEMAP_WIDTH = Math.max(...Object.values(TILES).flat().map((tile) => tile[1]));
const groupOf = (fqn) => groups.findIndex((numbers) => numbers.includes(units.get(fqn)));
let shownUnit = "";

function fillTreemap() {
  const width = $("gs-treemap").clientWidth, area = $("area").value;
  fill("treemap", "tiles", columnsOf(groups.map((numbers, group) => {
    const [left, right, bottom, top] = TILES[area][group], unit = E.plan.units[numbers[0]];
    const wide = (right - left) / TREEMAP_WIDTH * width, many = numbers.length > 1;
    const short = many ? `${numbers.length} × ${unit.module_class}` : unitText(unit.fqn);
    const text = `${short}, ${bytesText(unit[AREAS[area]])}${many ? " each" : ""}`;
    return {
      left, right, bottom, top, x: (left + right) / 2, y: (top + bottom) / 2,
      colour: classColour(unit.module_class), unit: unit.fqn,
      label: [text, short, short.split(".").pop()].find((label) => wide > 8 * label.length) ?? "",
      tip: tipOf(many ? `${short}: ${unitText(unit.fqn)} to ${E.plan.units[numbers.at(-1)].fqn}, each` :
        `${short}: ${unit.module_class}`, `${unit.numel.toLocaleString("en")} elements in ${unit.params.length} parameters`,
        `sharded ${bytesText(unit.sharded)}, gathered ${bytesText(unit.unsharded)}, padding ${bytesText(unit.padding)}`),
    };
  })));
}

function firstLine(fqn) {
  const place = N.unit.findIndex((unit, p) => unit === fqn && N.line[p]);
  return place < 0 ? "" : N.line[place];
}

function showUnit(fqn) {
  shownUnit = fqn;
  const unit = E.plan.units[units.get(fqn)], cost = unitCosts.get(fqn);
  $("unit").value = fqn;
  const group = groupOf(fqn), equal = groups[group].map((number) => E.plan.units[number].fqn).filter((other) => other !== fqn);
  model("treemap", "tiles").selected.indices = [group];
  const place = N.unit.findIndex((name, p) => name === fqn && N.phase[p]);
  const rows = unit.params.map((p) => make("tr", {},
    ...[p.names.join(" = "), `[${p.shape}]`, p.dtype, p.dim === null ? p.placement : `${p.placement} by dim ${p.dim}`,
      `[${p.shard_shape}]`, p.requires_grad ? "" : "frozen"].map((text) => make("td", { class: "wide" }, text))));
  const { strategy, reshard, precision } = unit.options;
  const options = [strategy, reshard === true ? "freed after forward" : reshard ? `kept in groups of ${reshard} ranks` : "kept after forward",
    precision].filter(Boolean).join(", ");
  $("unit-details").replaceChildren(
    make("dl", {},
      make("dt", {}, "unit"), make("dd", {}, placeLink(Math.max(place, 0), unitText(fqn)), `, a ${unit.module_class}`),
      make("dt", {}, "bytes"), make("dd", {}, `${bytesText(unit.sharded)} sharded, ${bytesText(unit.unsharded)} gathered, ${bytesText(unit.padding)} of padding`),
      make("dt", {}, "time"), make("dd", {}, `${secondsText(cost.compute_seconds)} compute, ${secondsText(cost.communication_seconds)} communication, ${secondsText(cost.exposed_seconds)} exposed`),
      make("dt", {}, "line"), make("dd", {}, firstLine(fqn) || "not known"),
      make("dt", {}, "options"), make("dd", {}, options),
      ...(equal.length ? meaning("as large", make("div", { class: "equal" }, ...equal.flatMap((other) =>
        [make("button", { class: "unit", onclick: () => showUnit(other) }, unitText(other)), " "]))) : [])),
    make("details", { open: "" }, make("summary", {}, `${rows.length} parameters`),
      make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {},
        ...["parameter", "shape", "dtype", "placement", "shape of a shard", ""].map((text) => make("th", {}, text)))),
        make("tbody", {}, ...rows)))));
}

function setUpPlan() {
  $("unit").append(...E.plan.units.map((unit) => make("option", { value: unit.fqn }, unitText(unit.fqn))));
  $("classes").append(...classes.map((name) => make("span", {}, swatch([classColour(name), false]), name)));
  $("area").addEventListener("change", fillTreemap);
  $("unit").addEventListener("change", () => showUnit($("unit").value));
  fillTreemap();
  const tiles = model("treemap", "tiles");
  tiles.selected.properties.indices.change.connect(() => {
    const [number] = tiles.selected.indices;
    if (number !== undefined && number !== groupOf(shownUnit)) showUnit(E.plan.units[groups[number][0]].fqn);
  });
  let width = $("gs-treemap").clientWidth;
  addEventListener("resize", () => {
    if (Math.abs($("gs-treemap").clientWidth - width) > 20) { width = $("gs-treemap").clientWidth; fillTreemap(); }
  });
  showUnit(E.plan.units[Math.min(1, E.plan.units.length - 1)].fqn);
}

// -- the cursor -------------------------------------------------------------------------------------

let here = 0, held = false, asked = false;

function follow(seconds) {                       // the mouse: at most one update for each frame
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; if (!held) go(placeAt(seconds), { seconds, quiet: true }); });
}

function go(place, { seconds = startOf(place), quiet = false, keep = false } = {}) {
  here = Math.max(0, Math.min(place, END));
  for (const line of models("step", "Span")) {
    if (line.name === "cursor") { line.location = seconds / timeUnit; line.visible = true; }
  }
  const range = xRange();
  if (!quiet && (seconds < range.start * timeUnit || seconds > range.end * timeUnit)) {
    const width = (range.end - range.start) * timeUnit, start = Math.max(0, Math.min(seconds - width / 2, STEP - width));
    zoom(start, start + width);
  }
  showHere(seconds);
  showHolders();
  if (!keep) scrollTo(here);
  drawLines();
}

function running(seconds) {                      // transfers on their streams at this time
  return E.spans.place.map((place, i) => i)
    .filter((i) => E.spans.stream[i] !== "compute" && E.spans.start[i] <= seconds && seconds < E.spans.end[i]);
}

function obstacle(place) {
  const number = transferAt.get(place) ?? waitAt.get(place);
  const transfer = number === undefined ? null : E.transfers[number];
  if (!transfer) return null;
  const text = transfer.exposed_seconds ?
    `exposed for ${secondsText(transfer.exposed_seconds)}: ${transfer.reason}` : "hidden by compute";
  return [placeLink(transfer.place, `${transfer.op} of ${unitText(transfer.unit)}`), `, ${bytesText(transfer.bytes)}: ${text}`];
}

function showHere(seconds) {
  const optimizer = here >= END, rows = [];
  const row = (name, ...parts) => rows.push(make("dt", {}, name), make("dd", {}, ...parts));
  row("time", `${secondsText(seconds)} of ${secondsText(STEP)}`, held ? "" : " (follows the mouse)");
  if (optimizer) row("node", `the optimizer's update (${E.optimizer})`);
  else {
    row("node", placeLink(here, N.name[here]), `, place ${here}, ${secondsText(endOf(here) - startOf(here))} in ${N.phase[here] || "no phase"}`);
    row("module", `${unitText(N.module[here])} of unit ${unitText(N.unit[here])}`);
    row("line", N.line[here] || "not known");
    const why = obstacle(here);
    if (why) row("moves", ...why);
  }
  const beside = running(seconds);
  row("beside", ...(beside.length ? beside.flatMap((i) => {
    const number = transferAt.get(E.spans.place[i]), t = E.transfers[number];
    const exposed = t && t.exposed_seconds ? `, exposed for ${secondsText(t.exposed_seconds)}: ${t.reason}` : "";
    return [placeLink(E.spans.place[i], `${E.spans.name[i]} of ${unitText(E.spans.unit[i])}`), exposed, make("br")];
  }) : ["no transfer"]));
  row("alive", `${bytesText(totalAt(here))}`);
  $("at").replaceChildren(make("dl", {}, ...rows));
  const point = pointAt(here);
  for (const [name, value] of memoryValues) value.textContent = ` ${bytesText(M.bytes[name][point])}`;
}

const memoryValues = [];
function setUpMemoryLegend() {
  $("memory-legend").append(...[...data.layers].reverse().map((name) => {
    const value = make("span", {});
    memoryValues.push([name, value]);
    return legend(name, memoryFill(name), value);
  }));
}

// -- who is alive -----------------------------------------------------------------------------------

const SHOWN = 60;
let sortBy = "bytes";

function holdersAt(place) {
  const rows = [], resident = {};
  const point = pointAt(place);
  for (const [name, sizes] of Object.entries(M.bytes)) resident[name] = sizes[point];
  for (let i = 0; i < S.node.length; i++) {
    const dies = S.dies[i];
    if (S.born[i] > place || (dies >= 0 && dies < place)) continue;
    resident[S.category[i]] -= S.bytes[i];
    rows.push({ bytes: S.bytes[i], category: S.category[i], place: S.node[i], node: N.name[S.node[i]],
      unit: unitText(N.unit[S.node[i]]), born: S.born[i], dies: dies < 0 ? END : dies });
  }
  for (const [name, bytes] of Object.entries(resident)) {
    if (bytes) rows.push({ bytes, category: name, place: -1, node: "held between steps", unit: "", born: 0, dies: END });
  }
  return rows;
}

function showHolders() {
  const rows = holdersAt(here);
  const text = sortBy === "category" || sortBy === "node" || sortBy === "unit";
  rows.sort((a, b) => (text ? a[sortBy].localeCompare(b[sortBy]) : sortBy === "bytes" ? 0 : a[sortBy] - b[sortBy]) || b.bytes - a.bytes);
  const body = rows.slice(0, SHOWN).map((r) => make("tr", {},
    make("td", { class: "number" }, bytesText(r.bytes)),
    make("td", {}, swatch(memoryFill(r.category)), r.category),
    make("td", {}, r.place < 0 ? r.node : placeLink(r.place, r.node)), make("td", {}, r.unit),
    make("td", { class: "number" }, secondsText(startOf(r.born))),
    make("td", { class: "number" }, r.dies >= END ? "the end" : secondsText(endOf(r.dies)))));
  if (rows.length > SHOWN) {
    const rest = rows.slice(SHOWN).reduce((sum, r) => sum + r.bytes, 0);
    body.push(make("tr", {}, make("td", { class: "number" }, bytesText(rest)), make("td", { colspan: 5 }, `${rows.length - SHOWN} more`)));
  }
  $("holders").tBodies[0].replaceChildren(...body);
}

function setUpHolders() {
  for (const button of $("holders").querySelectorAll("button")) {
    button.setAttribute("aria-pressed", button.dataset.sort === sortBy);
    button.addEventListener("click", () => {
      sortBy = button.dataset.sort;
      for (const each of $("holders").querySelectorAll("button")) each.setAttribute("aria-pressed", each === button);
      showHolders();
    });
  }
}

// -- the dump ---------------------------------------------------------------------------------------

const HEIGHT = 16;
const lines = E.dump.split("\n");
const placeOfName = new Map(N.name.map((name, place) => [name, place]));
const placeOfLine = lines.map((line) => {
  const name = /^%(\S+) :/.exec(line);
  return name && placeOfName.has(name[1]) ? placeOfName.get(name[1]) : -1;
});
const lineOfPlace = new Map();
placeOfLine.forEach((place, line) => { if (place >= 0) lineOfPlace.set(place, line); });
let found = [], isFound = new Set(), foundAt = -1;

function drawLines() {
  const box = $("lines"), first = Math.max(0, Math.floor(box.scrollTop / HEIGHT) - 10);
  const last = Math.min(lines.length, first + Math.ceil(box.clientHeight / HEIGHT) + 20);
  const drawn = [];
  for (let number = first; number < last; number++) {
    const place = placeOfLine[number];
    const parts = lines[number].split(/(%\w+)/).map((part, index) =>
      index % 2 && placeOfName.has(part.slice(1)) ? make("span", { class: "ref", "data-place": placeOfName.get(part.slice(1)) }, part) : part);
    const kind = (isFound.has(number) ? " match" : "") + (place >= 0 && place === here ? " here" : "");
    drawn.push(make("div", { class: `line${kind}`, style: `top:${number * HEIGHT}px`, "data-line": place < 0 ? null : place,
      title: place >= 0 && N.line[place] ? N.line[place] : null }, ...parts));
  }
  $("canvas").replaceChildren(...drawn);
}

function scrollTo(place) {
  const line = lineOfPlace.get(place) ?? (place >= END ? lines.length - 1 : undefined), box = $("lines");
  if (line === undefined) return;
  const top = line * HEIGHT;
  if (top < box.scrollTop + HEIGHT || top > box.scrollTop + box.clientHeight - 2 * HEIGHT) {
    box.scrollTop = Math.max(0, top - box.clientHeight / 2);
  }
}

function search() {
  const wanted = $("search").value.trim().toLowerCase();
  found = [];
  if (wanted) {
    lines.forEach((line, number) => {
      const place = placeOfLine[number];
      if (line.toLowerCase().includes(wanted) || (place >= 0 && N.line[place].toLowerCase().includes(wanted))) found.push(number);
    });
  }
  isFound = new Set(found);
  foundAt = -1;
  $("matches").textContent = wanted ? `${found.length.toLocaleString("en")} lines` : "";
  if (found.length) nextMatch(1); else drawLines();
}

function nextMatch(step) {
  if (!found.length) return;
  foundAt = (foundAt + step + found.length) % found.length;
  $("matches").textContent = `${foundAt + 1} of ${found.length.toLocaleString("en")} lines`;
  const line = found[foundAt], box = $("lines");
  held = true;
  if (placeOfLine[line] >= 0) go(placeOfLine[line]);
  box.scrollTop = Math.max(0, line * HEIGHT - box.clientHeight / 2);
  drawLines();
}

function setUpDump() {
  $("canvas").style.height = `${lines.length * HEIGHT}px`;
  $("lines").addEventListener("scroll", () => requestAnimationFrame(drawLines));
  $("canvas").addEventListener("click", (event) => {
    const ref = event.target.closest(".ref"), line = event.target.closest("[data-line]");
    const place = ref ? +ref.dataset.place : line ? +line.dataset.line : -1;
    if (place >= 0) { held = true; go(place, { keep: !ref }); }
  });
  $("lines").addEventListener("keydown", (event) => {
    const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    held = true;
    go(Math.min(here + step, END - 1));
  });
  let waiting;
  $("search").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(search, 120); });
  $("search").addEventListener("keydown", (event) => {
    if (event.key === "Enter") nextMatch(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") $("search").blur();
  });
  $("next").addEventListener("click", () => nextMatch(1));
  $("previous").addEventListener("click", () => nextMatch(-1));
}

// -- other policies ---------------------------------------------------------------------------------

function setUpWhatIf() {
  if (!data.what_if) return;
  const { points, pairs } = data.what_if;
  const marker = (p) => p.estimated ? "circle" : p.whole ? "diamond" : "x";
  fill("scatter", "points", columnsOf(points.map((p, number) => ({
    x: p.seconds / timeUnit, y: p.bytes / sizeUnit, marker: marker(p),
    colour: data.fills.units[number === 0 ? 3 : p.estimated ? 0 : 2],
    tip: tipOf(p.name, `${secondsText(p.seconds)} a step, peak ${bytesText(p.bytes)}`, p.policy,
      p.estimated ? "" : `${p.whole ? "simulated by the search" : "extrapolated by the search"}; not compared`),
  }))));
  const estimated = points.map((p, number) => [p, number]).filter(([p]) => p.estimated);
  for (const id of ["one", "other"]) {
    $(id).append(...estimated.map(([p, number]) => make("option", { value: number },
      `${p.name}: ${secondsText(p.seconds)}, ${bytesText(p.bytes)}`)));
    $(id).addEventListener("change", () => choose([+$("one").value, +$("other").value]));
  }
  const source = model("scatter", "points");
  let chosen = [0, Math.min(1, estimated.length - 1)], choosing = false;
  function choose(two) {
    chosen = two;
    $("one").value = two[0];
    $("other").value = two[1];
    const [low, high] = [Math.min(...two), Math.max(...two)];
    $("comparison").textContent = low === high ? points[low].policy : pairs[`${low},${high}`];
    choosing = true;
    source.selected.indices = [...new Set(two)];
    choosing = false;
  }
  source.selected.properties.indices.change.connect(() => {
    if (choosing) return;
    const clicked = source.selected.indices.find((number) => points[number].estimated && !chosen.includes(number)) ??
      source.selected.indices.find((number) => points[number].estimated);
    choose(clicked === undefined ? chosen : [chosen[1], clicked]);
  });
  showCapacity("scatter");
  choose(chosen);
}

// -- measured ---------------------------------------------------------------------------------------

function setUpTrace() {
  if (!data.trace) return;
  const [light, dark] = data.fills.units;
  const colours = { compute: [dark, "circle"], exposed: [timeFill("compute waits")[0], "triangle"], communication: [light, "square"] };
  const events = data.trace.events.filter((e) => e.measured !== null && colours[e.kind]);
  const drawn = events.filter((e) => e.measured > 0 && e.predicted > 0);
  fill("trace", "events", columnsOf(drawn.map((e) => ({
    x: e.predicted / timeUnit, y: e.measured / timeUnit, colour: colours[e.kind][0], marker: colours[e.kind][1],
    tip: tipOf(e.name, `measured ${secondsText(e.measured)}, predicted ${secondsText(e.predicted)}`),
  }))));
  const all = drawn.flatMap((e) => [e.measured / timeUnit, e.predicted / timeUnit]);
  if (all.length) fill("trace", "equal", { x: [Math.min(...all), Math.max(...all)], y: [Math.min(...all), Math.max(...all)] });
  const source = model("trace", "events");
  source.selected.properties.indices.change.connect(() => {
    const [number] = source.selected.indices;
    if (number !== undefined) { held = true; go(placeOfName.get(drawn[number].node)); }
  });
  const sorted = [...events].sort((a, b) => Math.abs(b.measured - b.predicted) - Math.abs(a.measured - a.predicted));
  const rows = [["forward and backward", data.trace.measured_seconds, data.trace.predicted_seconds, null],
    ...sorted.slice(0, 100).map((e) => [e.name, e.measured, e.predicted, e.node])];
  $("events").tBodies[0].append(...rows.map(([name, measured, predicted, node]) => make("tr", {},
    make("td", {}, node === null ? name : placeLink(placeOfName.get(node), name)),
    ...[measured, predicted].map((s) => make("td", { class: "number" }, secondsText(s))),
    make("td", { class: "number" }, `${measured < predicted ? "−" : "+"}${secondsText(Math.abs(measured - predicted))}`))));
}

// -- zoom and keys ----------------------------------------------------------------------------------

const xRange = () => models("step", "Figure")[0].x_range;
function zoom(start, end) {
  xRange().setv({ start: Math.max(0, start) / timeUnit, end: Math.min(STEP, end) / timeUnit });
}
function zoomBy(factor) {
  const range = xRange(), width = (range.end - range.start) * timeUnit * factor;
  const middle = Math.max(range.start * timeUnit, Math.min(startOf(here), range.end * timeUnit));
  const share = (middle - range.start * timeUnit) / ((range.end - range.start) * timeUnit);
  zoom(middle - width * share, middle + width * (1 - share));
}
function nextSpan(step, exposedOnly) {
  const places = [...new Set(spans.filter((s) => !exposedOnly || s.exposed).map((s) => s.place))].sort((a, b) => a - b);
  const place = step > 0 ? places.find((p) => p > here) : places.findLast((p) => p < here);
  if (place !== undefined) { held = true; go(place); }
}
function goToPart(number) {
  const part = [...document.querySelectorAll("nav a")].filter((a) => !a.hidden)[number - 1];
  if (!part) return;
  const section = $(part.hash.slice(1));
  section.scrollIntoView();
  section.focus({ preventScroll: true });
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const keys = {
    ArrowLeft: () => nextSpan(-1, event.shiftKey), ArrowRight: () => nextSpan(1, event.shiftKey),
    "+": () => zoomBy(0.5), "=": () => zoomBy(0.5), "-": () => zoomBy(2), "0": () => zoom(0, STEP),
    p: () => { held = true; go(M.place[M.peak]); },
    "/": () => { $("search").focus(); $("search").scrollIntoView({ block: "nearest" }); },
    n: () => nextMatch(1), N: () => nextMatch(-1),
    Escape: () => { held = false; showHere(startOf(here)); },
  };
  const act = keys[event.key] ?? (/^[1-7]$/.test(event.key) ? () => goToPart(+event.key) : null);
  if (!act) return;
  event.preventDefault();
  act();
});
addEventListener("click", (event) => {
  const link = event.target.closest?.("a[data-place]");
  if (!link) return;
  event.preventDefault();
  held = true;
  go(+link.dataset.place);
  if (link.closest("#verdict, #unit-details, #measured")) $("step").scrollIntoView({ block: "start" });
});

// -- the colour scheme ------------------------------------------------------------------------------

function setInk() {                              // what a canvas draws does not follow the page's style
  const style = getComputedStyle(document.body), ink = style.color, soft = style.getPropertyValue("--line");
  for (const figure of Object.keys(views)) {
    for (const axis of documentOf(figure)._all_models.values()) {
      for (const property of ["major_label_text_color", "axis_label_text_color", "axis_line_color",
        "major_tick_line_color", "minor_tick_line_color", "grid_line_color", "outline_line_color"]) {
        if (property in axis.properties) axis[property] = /grid|outline/.test(property) ? soft : ink;
      }
      if (axis.type === "Span") axis.line_color = ink;
      if (axis.type === "Label") axis.text_color = ink;
    }
  }
}

function printInk() {                            // paper is taken before the next frame is painted
  setInk();
  const paint = (view) => { view.throttled_paint && view.paint(); (view.child_views || []).forEach(paint); };
  Object.values(views).forEach((view) => view.roots.forEach(paint));
}

// -- all of it --------------------------------------------------------------------------------------

try {
  fillStep();
  setUpMemoryLegend();
  setUpPlan();
  setUpHolders();
  setUpDump();
  setUpWhatIf();
  setUpTrace();
  go(M.place[M.peak]);
  setInk();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", setInk);
  matchMedia("print").addEventListener("change", printInk);
} catch (error) {
  fail(error);
  return;
}
window.graphshardReport = {                      // for tests, and for the console
  data, go, holdersAt, zoom, spans, placeAt, startOf,
  source: (figure, name) => model(figure, name).data,
  range: () => [xRange().start * timeUnit, xRange().end * timeUnit],
  here: () => here,
  milliseconds: 0,
};
requestAnimationFrame(() => setTimeout(() => {
  window.graphshardReport.milliseconds = performance.now() - began;
  document.documentElement.dataset.ready = "true";
}));
})();
