"use strict";
// Draws every element with data-chart from the data in the page, as wide as it is, and again when that changes.

const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const SVG = "http://www.w3.org/2000/svg";
const FONT = "11px system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";
const ruler = document.createElement("canvas").getContext("2d");
const GAP = 12; // pixels that a pause takes on the axis of time
const cursors = []; // of the charts over time: {place(position), hide()}

// ---- figures as people read them

const THIN = "\u202f";
const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const fine = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 3 });

function number(value) {
  if (value === null || value === undefined) return "–";
  return Math.abs(value) >= 100 || Number.isInteger(value) ? grouped.format(value) : fine.format(value);
}

function compact(value) {
  for (const [size, sign] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= size) return trimmed(value / (size === 1e4 ? 1e3 : size)) + THIN + sign;
  }
  return Math.abs(value) >= 1000 ? grouped.format(value) : trimmed(value);
}

function trimmed(value) {
  return String(Number(value.toPrecision(4)));
}

function duration(seconds) {
  if (seconds === 0) return "0";
  if (seconds < 1) return trimmed(seconds * 1000) + THIN + "ms";
  if (seconds < 60) return trimmed(seconds) + THIN + "s";
  const whole = Math.round(seconds);
  const parts = [[Math.floor(whole / 86400), "d"], [Math.floor(whole / 3600) % 24, "h"], [Math.floor(whole / 60) % 60, "min"], [whole % 60, "s"]];
  const first = parts.findIndex((part) => part[0] > 0);
  return parts.slice(first, first + 2).filter((part) => part[0] > 0).map((part) => part[0] + THIN + part[1]).join(" ");
}

function rounded(seconds) {
  return duration(seconds < 60 ? Number(seconds.toPrecision(3)) : seconds);
}

function clock(position, axis = time) {
  const moment = new Date(1000 * axis.moment(position));
  return Number.isNaN(moment.getTime()) ? "" : moment.toISOString().slice(0, 19).replace("T", " ") + " UTC";
}

// ---- elements

function add(parent, tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const name in attributes) element.setAttribute(name, attributes[name]);
  if (text !== undefined) element.textContent = text;
  parent.appendChild(element);
  return element;
}

function width(text) {
  ruler.font = FONT;
  return ruler.measureText(text).width;
}

function showTip(event, lines) {
  tip.textContent = lines.join("\n");
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 6));
  const above = event.clientY - box.height - 14;
  tip.style.transform = `translate(${left}px, ${above < 4 ? event.clientY + 18 : above}px)`;
}

function hideTip() {
  tip.hidden = true;
  for (const cursor of cursors) cursor.hide();
}

// ---- scales

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  for (const factor of [1, 2, 2.5, 5, 10]) if (factor * power >= rough * 0.9999) return factor * power;
}

function ticks(top, count, whole) {
  let step = niceStep(Math.max(top, 1e-9) / count);
  if (whole) step = Math.max(1, Math.ceil(step));
  const found = [];
  for (let i = 0; i * step <= top * 1.0001; i++) found.push(Number((i * step).toPrecision(6)));
  return found;
}

const TIME_STEPS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

// Seconds of work from left to right; pauses between runs have a gap of their own.
function timeOf(starts, ends) {
  const first = [];
  let length = 0;
  starts.forEach((start, place) => {
    first.push(length);
    length += ends[place] - start;
  });
  const segment = (position) => {
    let place = 0;
    while (place + 1 < first.length && first[place + 1] <= position) place++;
    return place;
  };
  const moment = (position) => starts[segment(position)] + position - first[segment(position)];
  const scale = (left, right) => {
    const gap = Math.min(GAP, (right - left) / 3 / Math.max(1, first.length));
    const pixels = (right - left - gap * Math.max(0, first.length - 1)) / Math.max(length, 1e-9);
    const x = (position, place = segment(position)) => left + position * pixels + place * gap;
    x.gap = gap;
    x.inverse = (pixel) => {
      let place = first.length - 1;
      while (place > 0 && pixel < x(first[place], place) - gap / 2) place--;
      const end = place + 1 < first.length ? first[place + 1] * 0.9999999 : length;
      return Math.min(end, Math.max(first[place], (pixel - left - place * gap) / pixels));
    };
    return x;
  };
  return { starts, ends, first, length, segment, moment, scale };
}

const time = timeOf(data.time.starts, data.time.ends);

// ---- frames

function frame(plot, labels) {
  plot.textContent = "";
  const box = { width: plot.clientWidth, height: plot.clientHeight };
  const style = getComputedStyle(plot);
  const top = parseFloat(style.paddingTop) || 0;
  const svg = add(plot, "svg", { width: box.width, height: box.height, "aria-hidden": "true" });
  const left = Math.ceil(Math.max(30, ...labels.map(width))) + 8;
  return { plot, svg, left, right: box.width - 2, top: top + 8, bottom: box.height - 20 };
}

function axisY(at, values, label) {
  const y = (value) => at.bottom - (value / (at.most || 1)) * (at.bottom - at.top);
  for (const value of values) {
    const place = Math.round(y(value));
    add(at.svg, "line", { x1: at.left, x2: at.right, y1: place, y2: place, class: value === 0 ? "base" : "axis" });
    add(at.svg, "text", { x: at.left - 7, y: place + 4, "text-anchor": "end" }, label(value));
  }
  return y;
}

function labelsX(at, wanted) {
  let free = -Infinity;
  for (const [x, text] of wanted) {
    const half = width(text) / 2 + 1;
    const middle = Math.min(Math.max(x, half), at.plot.clientWidth - half);
    if (middle - half < free + 9) continue;
    add(at.svg, "text", { x: middle, y: at.bottom + 15, "text-anchor": "middle" }, text);
    add(at.svg, "line", { x1: Math.round(x), x2: Math.round(x), y1: at.bottom, y2: at.bottom + 4, class: "base" });
    free = middle + half;
  }
}

function axisTime(at, axis = time) {
  const x = axis.scale(at.left, at.right);
  const step = TIME_STEPS.find((each) => each * (at.right - at.left) / Math.max(axis.length, 1e-9) >= 64) || TIME_STEPS.at(-1);
  const wanted = [];
  for (let i = 0; i * step <= axis.length; i++) wanted.push([x(i * step), duration(i * step)]);
  labelsX(at, wanted);
  for (let place = 1; place < axis.first.length; place++) {
    const middle = Math.round(x(axis.first[place], place) - x.gap / 2);
    add(at.svg, "line", { x1: middle, x2: middle, y1: at.top, y2: at.bottom, class: "break" });
  }
  return x;
}

function pauses(at, x) {
  let free = at.left - 4;
  for (let place = 1; place < time.first.length; place++) {
    const text = "pause of " + duration(Math.max(1, Math.round(data.time.starts[place] - data.time.ends[place - 1])));
    const half = width(text) / 2;
    const middle = Math.min(Math.max(x(time.first[place], place) - x.gap / 2, at.left + half), at.right - half);
    if (middle - half < free + 6) continue;
    add(at.svg, "text", { x: middle, y: at.top - 5, "text-anchor": "middle" }, text);
    free = middle + half;
  }
}

// isShared: whether the other charts show the same moment.
function watch(at, x, isShared, lines) {
  const cursor = add(at.svg, "line", { y1: at.top, y2: at.bottom, class: "cursor", visibility: "hidden" });
  const own = {
    plot: at.plot,
    place(position) {
      const pixel = Math.round(x(position));
      cursor.setAttribute("x1", pixel);
      cursor.setAttribute("x2", pixel);
      cursor.setAttribute("visibility", "visible");
    },
    hide() {
      cursor.setAttribute("visibility", "hidden");
    },
  };
  const before = cursors.findIndex((other) => other.plot === at.plot);
  cursors.splice(before < 0 ? cursors.length : before, before < 0 ? 0 : 1, own);
  own.isShared = isShared;
  at.plot.onpointermove = at.plot.onpointerdown = (event) => {
    const box = at.plot.getBoundingClientRect();
    const position = x.inverse(event.clientX - box.left);
    for (const other of cursors) if (other === own || (isShared && other.isShared)) other.place(position);
    showTip(event, lines(position, event.clientY - box.top));
  };
  at.plot.onpointerleave = hideTip;
}

// ---- charts over time

const course = data.course;

function columnAt(edges, position) {
  let low = 0, high = edges.length - 2;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (edges[middle] <= position) low = middle; else high = middle - 1;
  }
  return low;
}

// Stretches of columns without a break or a missing value: [[first, last, place on the axis], ...].
function stretches(values) {
  const found = [];
  let before = -1;
  values.forEach((value, i) => {
    const place = time.segment((course.edges[i] + course.edges[i + 1]) / 2);
    if (value === null) {
      before = -1;
    } else if (place === before) {
      found.at(-1)[1] = i;
    } else {
      found.push([i, i, place]);
      before = place;
    }
  });
  return found;
}

function steps(x, y, values, first, last, place) {
  let path = "";
  for (let i = first; i <= last; i++) {
    const height = y(values[i]).toFixed(1);
    path += `${path ? "L" : "M"}${x(course.edges[i], place).toFixed(1)},${height}L${x(course.edges[i + 1], place).toFixed(1)},${height}`;
  }
  return path;
}

function area(at, x, y, lower, upper, name, look) {
  let path = "";
  for (const [first, last, place] of stretches(upper)) {
    path += steps(x, y, upper, first, last, place);
    for (let i = last; i >= first; i--) {
      const height = y(lower[i] || 0).toFixed(1);
      path += `L${x(course.edges[i + 1], place).toFixed(1)},${height}L${x(course.edges[i], place).toFixed(1)},${height}`;
    }
    path += "Z";
  }
  add(at.svg, "path", { d: path, class: look + " k-" + name });
}

function line(at, x, y, values, name) {
  const path = stretches(values).map(([first, last, place]) => steps(x, y, values, first, last, place)).join("");
  add(at.svg, "path", { d: path, class: "line k-" + name });
}

// series: [[name, label, values, "area" or "line"], ...]; areas are stacked in this order.
// label: of a value on the axis; told: of one under the pointer.
function overTime(plot, series, { limit = null, label = compact, told: tell = number } = {}) {
  const stacked = [];
  let below = course.edges.slice(1).map(() => 0);
  for (const [name, , values, form] of series) {
    if (form !== "area") continue;
    const upper = values.map((value, i) => (value === null ? null : below[i] + value));
    stacked.push([name, below, upper]);
    below = upper.map((value) => value || 0);
  }
  const largest = Math.max(1e-9, ...stacked.flatMap((each) => each[2]), ...series.flatMap((each) => (each[3] === "line" ? each[2] : [])));
  const most = Math.max(largest, limit || 0);
  const values = ticks(most * 1.04, 4, false);
  const at = frame(plot, values.map(label));
  at.most = most * 1.04;
  const y = axisY(at, values, label);
  const x = axisTime(at);
  const isSoft = stacked.length === 1 && stacked[0][0] !== "failed";
  for (const [name, lower, upper] of stacked) {
    area(at, x, y, lower, upper, name, isSoft ? "area soft" : "area");
    if (isSoft) line(at, x, y, upper, name);
  }
  for (const [name, , values, form] of series) if (form === "line") line(at, x, y, values, name);
  if (limit !== null) add(at.svg, "path", { d: `M${at.left},${y(limit)}H${at.right}`, class: "line k-limit" });
  watch(at, x, true, (position) => {
    const i = columnAt(course.edges, position);
    const told = series.map(([, each, values]) => `${each}: ${tell(values[i])}`);
    if (limit !== null) told.push(`limit: ${number(limit)}`);
    return [`${rounded(course.edges[i])} to ${rounded(course.edges[i + 1])}`, clock(course.edges[i]), ...told];
  });
}

// ---- the lives of requests

const STATES = [["queue", "pending"], ["prefill", "prefilling"], ["decode", "decoding"]];

function lives(plot) {
  if (data.lives.bars) bars(plot, data.lives.bars);
  else cells(plot, data.lives.cells);
}

function axisRequests(at, total, before = 0) {
  const y = (request) => at.top + (request / total) * (at.bottom - at.top);
  const step = ticks(total, Math.max(2, Math.min(6, Math.floor((at.bottom - at.top) / 40))), true)[1] || 1;
  const label = step >= 1000 ? compact : number;
  const wanted = [1];
  for (let value = step * Math.ceil((before + 1) / step) - before; value <= total; value += step) wanted.push(value);
  let free = -Infinity;
  for (const value of wanted) {
    const place = y(value - 0.5);
    if (place < free + 14) continue;
    add(at.svg, "text", { x: at.left - 7, y: place + 4, "text-anchor": "end" }, label(before + value));
    free = place;
  }
  add(at.svg, "line", { x1: at.left, x2: at.right, y1: at.bottom, y2: at.bottom, class: "base" });
  return y;
}

function topOfLives(at) {
  if (time.first.length > 1) at.top += 12;
}

// axis: see timeOf. before: requests that arrived earlier and are not here.
function bars(plot, rows, axis = time, before = 0) {
  plot.style.height = Math.max(90, Math.min(460, rows.length * 16 + 40)) + "px";
  const at = frame(plot, [number(before + rows.length)]);
  if (axis === time) topOfLives(at);
  const y = axisRequests(at, rows.length, before);
  const x = axisTime(at, axis);
  if (axis === time) pauses(at, x);
  const room = (at.bottom - at.top) / rows.length;
  const height = Math.max(0.6, room > 3 ? room - Math.min(4, room * 0.25) : room * 0.9);
  rows.forEach((row, i) => {
    const place = axis.segment(row[1]);
    const group = add(at.svg, "g", {});
    STATES.forEach(([name], state) => {
      const from = x(row[1 + state], axis.segment(row[1 + state])), to = x(row[2 + state], Math.max(place, axis.segment(row[2 + state] - 1e-9)));
      if (to - from <= 0) return;
      const look = row[5] ? "failed" : name;
      add(group, "rect", { x: from.toFixed(2), y: (y(i) + (room - height) / 2).toFixed(2), width: Math.max(0.5, to - from).toFixed(2), height: height.toFixed(2), class: "k-" + look });
    });
  });
  watch(at, x, axis === time, (position, pixel) => {
    const i = Math.max(0, Math.min(rows.length - 1, Math.floor((pixel - at.top) / room)));
    const row = rows[i];
    const told = STATES.map(([, label], state) => `${label}: ${rounded(Math.max(0, row[2 + state] - row[1 + state]))}`);
    const place = data.numbered ? `, row ${number(row[0])}` : "";
    return [`request ${number(before + i + 1)}${place}${row[5] ? ", failed" : ""}`, `arrived ${clock(row[1], axis)}`, ...told];
  });
}

const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

function sharesOf([first, text], column) {
  const at = (column - first) * 3;
  return at < 0 || at >= text.length ? [0, 0, 0] : [0, 1, 2].map((state) => DIGITS.indexOf(text[at + state]) / 63);
}

function allOf(shares) {
  return shares[0] + shares[1] + shares[2];
}

function cells(plot, told) {
  const total = told.groups.at(-1);
  const canvas = document.createElement("canvas");
  const at = frame(plot, [compact(total)]);
  plot.insertBefore(canvas, at.svg);
  topOfLives(at);
  const y = axisRequests(at, total);
  const x = axisTime(at);
  pauses(at, x);
  const dots = devicePixelRatio || 1;
  canvas.width = Math.round(plot.clientWidth * dots);
  canvas.height = Math.round(plot.clientHeight * dots);
  canvas.style.width = plot.clientWidth + "px";
  canvas.style.height = plot.clientHeight + "px";
  const pen = canvas.getContext("2d");
  const colours = STATES.map(([name]) => colourOf(name));
  const places = told.edges.slice(1).map((edge, i) => time.segment((edge + told.edges[i]) / 2));
  let most = 1e-9; // where lives are short beside a column, no share is large
  for (const row of told.rows) for (let i = 0; i < row[1].length / 3; i++) most = Math.max(most, allOf(sharesOf(row, row[0] + i)));
  told.rows.forEach((row, group) => {
    const top = Math.round(y(told.groups[group]) * dots), bottom = Math.round(y(told.groups[group + 1]) * dots);
    for (let column = row[0]; column < row[0] + row[1].length / 3; column++) {
      const shares = sharesOf(row, column);
      const all = allOf(shares);
      if (all === 0) continue;
      const mixed = [0, 1, 2].map((part) => Math.round(shares.reduce((sum, share, state) => sum + share * colours[state][part], 0) / all));
      pen.fillStyle = `rgba(${mixed.join(",")},${(0.2 + 0.8 * Math.sqrt(all / most)).toFixed(3)})`;
      const from = Math.round(x(told.edges[column], places[column]) * dots), to = Math.round(x(told.edges[column + 1], places[column]) * dots);
      pen.fillRect(from, top, Math.max(1, to - from), Math.max(1, bottom - top));
    }
  });
  watch(at, x, true, (position, pixel) => {
    const request = Math.max(0, Math.min(total - 1, ((pixel - at.top) / (at.bottom - at.top)) * total));
    let group = 0;
    while (told.groups[group + 1] <= request) group++;
    const column = columnAt(told.edges, position);
    const shares = sharesOf(told.rows[group], column);
    const lines = STATES.map(([, label], state) => `${label}: ${Math.round(100 * shares[state])}${THIN}%`);
    return [`requests ${number(told.groups[group] + 1)} to ${number(told.groups[group + 1])}`, `${rounded(told.edges[column])} to ${rounded(told.edges[column + 1])}`, clock(told.edges[column]), ...lines];
  });
}

function colourOf(name) {
  const text = getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
}

// ---- histograms

// label: of a value on the axis. second: what a second is, of values that are times. isWhole: bins of one number are named in their middle, others by what they begin with.
// Bins have one width on the screen, whatever they hold.
function histogram(plot, told, label, { isWhole = false, second = 0 } = {}) {
  const most = Math.max(...told.counts);
  const values = ticks(most * 1.04, 4, true);
  const at = frame(plot, values.map(compact));
  at.top += 14;
  at.most = most * 1.04;
  const y = axisY(at, values, compact);
  const each = (at.right - at.left) / told.counts.length;
  const x = (value) => {
    const i = columnAt(told.edges, value);
    const size = told.edges[i + 1] - told.edges[i];
    const share = (value - told.edges[i] + (isWhole && size === 1 ? 0.5 : 0)) / size;
    return at.left + each * (i + Math.min(1, Math.max(0, share)));
  };
  told.counts.forEach((count, i) => {
    if (!count) return;
    const top = Math.min(y(count), at.bottom - 1);
    add(at.svg, "rect", { x: (at.left + i * each + 0.5).toFixed(2), y: top.toFixed(2), width: Math.max(0.5, each - 1).toFixed(2), height: (at.bottom - top).toFixed(2), class: "bar k-decode" });
  });
  labelsX(at, valueTicks(told.edges, at, isWhole, second).map((value) => [x(value), label(value)]));
  let free = -Infinity;
  for (const [name, value] of [["median", told.median], ["p99", told.p99]]) {
    const pixel = Math.round(x(value));
    add(at.svg, "line", { x1: pixel, x2: pixel, y1: at.top - 4, y2: at.bottom, class: "cursor" });
    const half = width(name) / 2 + 2;
    const middle = Math.min(Math.max(pixel, at.left + half), at.right - half);
    if (middle - half < free + 4) continue;
    add(at.svg, "text", { x: middle, y: at.top - 8, "text-anchor": "middle", class: "mark" }, name);
    free = middle + half;
  }
  plot.onpointermove = plot.onpointerdown = (event) => {
    const box = plot.getBoundingClientRect();
    const i = Math.max(0, Math.min(told.counts.length - 1, Math.floor((event.clientX - box.left - at.left) / each)));
    const share = (100 * told.counts[i]) / told.n;
    const from = label(told.edges[i]), to = label(told.edges[i + 1] - (isWhole ? 1 : 0));
    showTip(event, [from === to ? from : `${from} to ${to}`, `${number(told.counts[i])} rows, ${fine.format(share)}${THIN}%`]);
  };
  plot.onpointerleave = hideTip;
}

// Round values within the edges: evenly spread, or 1, 2, 5, 10, ... where the bins widen; of times 20 s, 30 s, 1 min, ...
function valueTicks(edges, at, isWhole, second) {
  const low = edges[0], high = edges.at(-1);
  const widens = edges.length > 3 && edges.at(-1) - edges.at(-2) > 2 * (edges[2] - edges[1]);
  const found = [];
  if (widens && second && low > 0.001 * second) {
    found.push(...TIME_STEPS.map((step) => step * second));
  } else if (widens) {
    for (let power = Math.floor(Math.log10(edges[1])); power <= Math.log10(high); power++) {
      for (const factor of [1, 2, 5]) found.push(Number((factor * 10 ** power).toPrecision(3)));
    }
  } else {
    const rough = (high - low) / Math.max(2, Math.floor((at.right - at.left) / 80));
    let step = second && rough > 10 * second ? second * (TIME_STEPS.find((each) => each * second >= rough) || TIME_STEPS.at(-1)) : niceStep(rough);
    if (isWhole) step = Math.max(1, Math.round(step));
    for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(Number((i * step).toPrecision(6)));
  }
  return found.filter((value) => value >= low && (isWhole ? value < high : value <= high));
}

const milliseconds = (value) => (value === null ? "–" : rounded(value / 1000));
const percent = (value) => (value === null ? "–" : number(value) + THIN + "%");

// ---- the page

const PHASES = ["between", "planning", "layout", "forward", "sampling", "applying"];
const DRAW = {
  lives,
  close: (plot) => bars(plot, data.lives.close.bars, timeOf(data.lives.close.starts, data.lives.close.ends), data.lives.close.first),
  batch: (plot) => overTime(plot, [["decode", "in the step", course.batch.requests, "area"], ["waiting", "waiting", course.batch.waiting, "line"], ["active", "active", course.batch.active, "line"]], { limit: course.batch.limit }),
  cache: (plot) => overTime(plot, [["decode", "owned", course.cache.owned, "area"], ["initialized", "kept for reuse", course.cache.initialized, "area"], ["free", "free", course.cache.free, "area"]], { told: course.cache.blocks ? number : percent }),
  output: (plot) => overTime(plot, [["decode", "output tokens/s", course.rates.output, "area"]]),
  prompt: (plot) => overTime(plot, [["prefill", "computed/s", course.rates.prompt, "area"], ["cached", "from the cache/s", course.rates.cached, "area"]]),
  steps: (plot) => overTime(plot, PHASES.map((name) => [name, name, course.steps[name], "area"]), { label: milliseconds, told: milliseconds }),
  offloads: (plot) => overTime(plot, [["failed", "offloads", course.events.offloads, "area"]]),
  soft_resets: (plot) => overTime(plot, [["failed", "soft resets", course.events.soft_resets, "area"]]),
  recomputed_tokens: (plot) => overTime(plot, [["failed", "tokens", course.events.recomputed_tokens, "area"]]),
  prompt_tokens: (plot) => histogram(plot, data.histograms.prompt_tokens, number, { isWhole: true }),
  completion_tokens: (plot) => histogram(plot, data.histograms.completion_tokens, number, { isWhole: true }),
  ttft: (plot) => histogram(plot, data.histograms.ttft, rounded, { second: 1 }),
  tpot: (plot) => histogram(plot, data.histograms.tpot, milliseconds, { second: 1000 }),
  latency: (plot) => histogram(plot, data.histograms.latency, rounded, { second: 1 }),
};

const plots = [...document.querySelectorAll("[data-chart]")];
const widths = new Map();

function drawAll(isForced) {
  for (const plot of plots) {
    if (!isForced && widths.get(plot) === plot.clientWidth) continue;
    widths.set(plot, plot.clientWidth);
    DRAW[plot.dataset.chart](plot);
  }
}

let waiting = 0;
new ResizeObserver(() => {
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(() => drawAll(false));
}).observe(document.body);
for (const query of ["(prefers-color-scheme: dark)", "print"]) {
  matchMedia(query).addEventListener("change", () => {
    nameTheme();
    drawAll(true);
  });
}

const button = document.getElementById("theme");
const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark";

function nameTheme() {
  button.textContent = isDark() ? "Light" : "Dark";
}

button.onclick = () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  nameTheme();
  drawAll(true);
};
button.hidden = false;
nameTheme();
drawAll(true);
