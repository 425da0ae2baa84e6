"use strict";
// Texts from files are untrusted: they enter the page as textContent only.

const SECONDS_BETWEEN_QUESTIONS = 1;
const FIRST = ["train/loss", "valid/loss", "train/lr", "train/grad_norm", "train/tokens_per_second", "train/memory_gb"];
// A chart's title is a quantity and its unit. Of values that vary from step to step it shows the running mean, and pale
// those of single steps.
const TITLES = {
  "train/loss": "training loss (nats per target token)", "valid/loss": "held-out loss (nats per target token)",
  "train/lr": "learning rate", "train/grad_norm": "gradient norm", "train/tokens_per_second": "target tokens per second",
  "train/samples_per_second": "samples per second", "train/samples": "samples trained on",
  "train/seconds": "time of a step (seconds)", "train/memory_gb": "peak memory of the fullest rank (GB)",
  "train/mfu": "share of the device's peak arithmetic (%)", "valid/perplexity": "held-out perplexity",
  "train/router/load": "rows of the busiest expert (1 is the mean of all)",
  "train/router/entropy": "evenness of the experts' load (entropy, 1 is even)",
  "train/router/dropped": "dropped choices of experts (%)",
};
// Said by other charts already: the batch size is constant, so these have the shape of tokens per second.
const SAME = { "train/samples_per_second": "train/tokens_per_second", "train/seconds": "train/tokens_per_second" };
const IN_TABLE = "train/samples"; // a straight line over the steps says no more than its end
const SHARES = /^train\/(mfu|router\/dropped.*)$/; // from 0 to 1, shown in percent
const OF_LAYER = /^train\/(router\/\w+)\/(.+)$/; // charts of each layer are folded away
// One early step may have a hundred times the norm of all others, so its axis is linear below 1 and logarithmic above.
const WIDE = "train/grad_norm";
const COLUMNS = [
  "run", "step", "samples", "training loss", "held-out loss", "final loss", "target tokens/s", "GB by rank", "checkpoints",
  "best checkpoint", "shards",
];
const PALE = 0.3;
const OF_RANK = "train/memory_gb_rank_";

const plots = new Map(); // name of a chart -> {plot, box}
const hidden = new Set(); // numbers of runs
let revision = "", range = null; // [first, last] step, or null for all
let timer = 0, question = 0;

const byId = (id) => document.getElementById(id);
const scheme = matchMedia("(prefers-color-scheme: dark)");
const brighter = scheme.matches ? 15 : 0;
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
const color = (run, opacity = 1) => // neighbors differ the most
  `hsl(${(run * 137.5 + 210) % 360} 60% ${(run % 2 ? 38 : 50) + brighter}% / ${opacity})`;

function element(kind, text = "") {
  const made = document.createElement(kind);
  made.textContent = text;
  return made;
}

function shown(value) {
  if (typeof value !== "number") return value ?? "–";
  const digits = Math.abs(value) >= 1000 ? { maximumFractionDigits: 0 } // a step keeps all its digits
    : { maximumSignificantDigits: 5 };
  return value.toLocaleString("en-US", digits);
}

const tick = (value) => value === null ? null : shown(value); // a crowded axis leaves labels out

async function refresh() {
  clearTimeout(timer);
  const mine = ++question;
  let wait = 1000 * SECONDS_BETWEEN_QUESTIONS;
  try {
    const query = new URLSearchParams({ width: chartWidth(), seen: revision });
    if (range) { query.set("first", range[0]); query.set("last", range[1]); }
    const response = await fetch(`data?${query}`);
    if (!response.ok) throw new Error(await response.text());
    const answer = await response.json();
    if (mine !== question) return; // a later question has another range
    revision = answer.revision;
    if (answer.runs) draw(answer);
    byId("state").textContent = answer.more ? "reading …" : "up to date";
    if (answer.more) wait = 0;
  } catch (error) {
    if (mine !== question) return;
    byId("state").textContent = `the board does not answer: ${error.message}`;
  }
  timer = setTimeout(refresh, wait);
}

function draw(answer) {
  drawRuns(answer.runs);
  const place = (name) => (FIRST.indexOf(name) + 1 || FIRST.length + 1);
  const names = new Set(answer.charts.map(({ name }) => name));
  const charts = answer.charts
    .filter(({ name }) => !name.startsWith(OF_RANK) && !names.has(SAME[name]) && name !== IN_TABLE)
    .sort((a, b) => place(a.name) - place(b.name));
  for (const [name, { plot, box }] of plots) {
    if (charts.some((chart) => chart.name === name)) continue;
    plot.destroy();
    box.remove();
    plots.delete(name);
  }
  const linked = /^#layout-(\d+)$/.exec(location.hash)?.[1]; // an address that shows the shards of one run alone
  document.querySelector("main").hidden = linked < answer.runs.length;
  byId("legend").hidden = !charts.some(({ means }) => means);
  byId("layers").hidden = !charts.some(({ name }) => OF_LAYER.test(name));
  if (linked < answer.runs.length && !byId("layout").hasChildNodes()) drawLayout(linked, answer.runs[linked].name);
  for (const chart of charts) {
    if (!plots.has(chart.name)) plots.set(chart.name, makePlot(chart, answer.runs));
    const { plot, box } = plots.get(chart.name);
    placeOf(chart.name).append(box);
    const rows = [...chart.values, ...(chart.means ?? [])];
    plot.setData([chart.steps, ...(SHARES.test(chart.name) ? rows.map(inPercent) : rows)]);
  }
}

const placeOf = (name) => OF_LAYER.test(name) ? byId("layers").querySelector("div") : byId("charts");
const inPercent = (row) => row.map((share) => share === null ? null : 100 * share);

function titleOf(name) {
  const [, value, layer] = OF_LAYER.exec(name) ?? [];
  return layer === undefined ? TITLES[name] ?? name : `layer ${layer}: ${TITLES[`train/${value}`] ?? value}`;
}

function drawRuns(runs) {
  const head = document.createElement("tr");
  head.append(...COLUMNS.map((title) => element("th", title)));
  const table = document.createElement("table");
  table.append(head, ...runs.map(runRow));
  byId("runs").replaceChildren(table);
}

function runRow(run, number) {
  const row = document.createElement("tr");
  row.className = hidden.has(number) ? "hidden" : "";
  const name = element("td"), box = element("input"), swatch = element("span"), shards = element("td");
  box.type = "checkbox";
  box.checked = !hidden.has(number);
  box.onchange = () => show(number, box.checked, row);
  swatch.className = "swatch";
  swatch.style.background = color(number);
  name.append(box, swatch, document.createTextNode(run.name));
  if (run.problem) name.append(element("small", ` ${run.problem}`));
  const button = element("button", "layout");
  button.onclick = () => drawLayout(number, run.name);
  shards.append(button);
  const { last, checkpoints } = run;
  const values = [
    run.step, last["train/samples"], last["train/mean_loss"], last["valid/loss"], last["final/loss"],
    last["train/tokens_per_second"], memory(last),
  ];
  const kept = checkpoints.length ? `${checkpoints.length}, last ${shown(checkpoints.at(-1))}` : "none";
  row.append(name, ...[...values.map(shown), kept, run.best ?? "–"].map((text) => element("td", text)), shards);
  return row;
}

function memory(last) {
  const ranks = Object.keys(last).filter((name) => name.startsWith(OF_RANK)).map((name) => last[name]);
  return (ranks.length ? ranks : [last["train/memory_gb"]]).map((gb) => shown(gb && +gb.toFixed(2))).join(" ");
}

function show(number, isShown, row) {
  if (isShown) hidden.delete(number); else hidden.add(number);
  row.className = isShown ? "" : "hidden";
  for (const { plot, runs } of plots.values()) {
    for (let place = number + 1; place < plot.series.length; place += runs) plot.setSeries(place, { show: isShown });
  }
}

const chartWidth = () => Math.max(200, Math.floor(byId("charts").firstElementChild?.clientWidth ?? 600));

function makePlot({ name, means }, runs) {
  const box = document.createElement("div");
  box.dataset.name = name;
  box.append(element("h2", titleOf(name)));
  placeOf(name).append(box);
  const lines = (label, width, opacity) => runs.map((run, number) => ({
    label: run.name + label, stroke: color(number, opacity), width, spanGaps: true, show: !hidden.has(number),
  }));
  const lined = { stroke: style("--grid"), width: 1 };
  const axis = { stroke: style("--text"), grid: lined, ticks: lined, values: (_, ticks) => ticks.map(tick) };
  const series = means ? [...lines(" (single steps)", 1, PALE), ...lines("", 1.8, 1)] : lines("", 1.2, 1);
  const plot = new uPlot({
    width: chartWidth(), height: 240,
    scales: { x: { time: false }, y: name === WIDE ? { distr: 4, asinh: 1, range: (_, least, most) => [Math.min(least, 0), 1.1 * most] } : {} },
    axes: [{ label: "step", labelFont: "12px system-ui, sans-serif", labelSize: 20, size: 36, ...axis },
      { size: 70, ...axis, ...(name === WIDE ? { splits: wideTicks } : {}) }],
    cursor: { drag: { x: true, y: false, setScale: false } }, // the server cuts the range, with all its detail
    series: [{ label: "step" }, ...series],
    hooks: { setSelect: [zoom] },
  }, [[], ...runs.map(() => [])], box);
  return { plot, box, runs: runs.length };
}

function wideTicks(plot, axis, least, most) {
  const ticks = [0];
  for (let decade = 1e-6; decade <= most; decade *= 10) {
    for (const factor of [1, 2, 5]) {
      const value = factor * decade;
      const gap = Math.asinh(value) - Math.asinh(ticks.at(-1));
      if (value <= most && gap > Math.asinh(most) / 8) ticks.push(value);
    }
  }
  return ticks;
}

function zoom(plot) {
  const { left, width } = plot.select;
  if (width < 2) return;
  look([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
  plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
}

function look(at) {
  range = at;
  byId("all").hidden = at === null;
  revision = "";
  refresh();
}

async function drawLayout(number, name) {
  const section = byId("layout");
  const found = await (await fetch(`layout?run=${number}`)).json();
  const note = found.error ?? `step ${shown(found.step)}, ${found.ranks} tensor-parallel ranks`;
  section.replaceChildren(element("h2", `Shards of ${name}: ${note}`));
  if (found.error) return;
  const table = document.createElement("table"), head = document.createElement("tr");
  head.append(...["parameter", "dtype", "shape", "split dimension", "on the ranks"].map((title) => element("th", title)));
  const size = (shape) => shape.join(" × ");
  const rows = found.tensors.map((tensor) => {
    const row = document.createElement("tr");
    const parts = tensor.parts.map(size);
    const held = !parts.length ? "whole on each" : new Set(parts).size === 1 ? `each ${parts[0]}` : parts.join(", ");
    const cells = [tensor.name, tensor.dtype, size(tensor.shape), tensor.split ?? "", held];
    row.append(...cells.map((text) => element("td", text)));
    return row;
  });
  table.append(head, ...rows);
  section.append(table);
  if (!document.querySelector("main").hidden) section.scrollIntoView();
}

window.addEventListener("resize", () => {
  for (const { plot } of plots.values()) plot.setSize({ width: chartWidth(), height: 240 });
});
scheme.addEventListener("change", () => location.reload());
window.addEventListener("hashchange", () => location.reload());
byId("all").onclick = () => look(null);
refresh();
