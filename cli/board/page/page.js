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
  "train/mfu": "share of the device's peak arithmetic", "valid/perplexity": "held-out perplexity",
};
// Said by other charts already: the batch size is constant, so these have the shape of tokens per second.
const SAME = { "train/samples_per_second": "train/tokens_per_second", "train/seconds": "train/tokens_per_second" };
const COLUMNS = [
  "run", "step", "samples", "training loss", "held-out loss", "final loss", "target tokens/s", "GB by rank", "checkpoints", "best",
  "shards",
];
const PALE = 0.3;
const OF_RANK = "train/memory_gb_rank_";

const plots = new Map(); // name of a chart -> {plot, box}
const hidden = new Set(); // numbers of runs
let revision = "", range = null; // [first, last] step, or null for all
let timer = 0, question = 0;

const byId = (id) => document.getElementById(id);
const color = (run, opacity = 1) => // neighbors differ the most
  `hsl(${(run * 137.5 + 210) % 360} 60% ${run % 2 ? 38 : 50}% / ${opacity})`;

function element(kind, text = "") {
  const made = document.createElement(kind);
  made.textContent = text;
  return made;
}

function shown(value) {
  if (typeof value !== "number") return value ?? "";
  const digits = Number.isInteger(value) ? {} : { maximumSignificantDigits: 5 }; // a step keeps all its digits
  return value.toLocaleString("en-US", digits);
}

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
  const charts = answer.charts.filter(({ name }) => !name.startsWith(OF_RANK) && !names.has(SAME[name]))
    .sort((a, b) => place(a.name) - place(b.name));
  for (const [name, { plot, box }] of plots) {
    if (charts.some((chart) => chart.name === name)) continue;
    plot.destroy();
    box.remove();
    plots.delete(name);
  }
  const linked = /^#layout-(\d+)$/.exec(location.hash)?.[1]; // an address that shows the shards of one run alone
  byId("charts").hidden = linked < answer.runs.length;
  if (linked < answer.runs.length && !byId("layout").hasChildNodes()) drawLayout(linked, answer.runs[linked].name);
  for (const chart of charts) {
    if (!plots.has(chart.name)) plots.set(chart.name, makePlot(chart, answer.runs));
    const { plot, box } = plots.get(chart.name);
    byId("charts").append(box);
    plot.setData([chart.steps, ...chart.values, ...(chart.means ?? [])]);
  }
}

function drawRuns(runs) {
  const head = document.createElement("tr");
  head.append(...COLUMNS.map((title) => element("th", title)));
  byId("runs").replaceChildren(head, ...runs.map(runRow));
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
  const kept = checkpoints.length ? `${checkpoints.length}, last ${checkpoints.at(-1)}` : "none";
  row.append(name, ...[...values.map(shown), kept, run.best ?? ""].map((text) => element("td", text)), shards);
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
  box.append(element("h2", TITLES[name] ?? name));
  byId("charts").append(box);
  const lines = (label, width, opacity) => runs.map((run, number) => ({
    label: run.name + label, stroke: color(number, opacity), width, spanGaps: true, show: !hidden.has(number),
  }));
  const series = means ? [...lines(" (single steps)", 1, PALE), ...lines("", 1.8, 1)] : lines("", 1.2, 1);
  const plot = new uPlot({
    width: chartWidth(), height: 240,
    scales: { x: { time: false } },
    axes: [{ label: "step", labelSize: 20, size: 36, values: (_, ticks) => ticks.map(shown) },
      { size: 70, values: (_, ticks) => ticks.map(shown) }],
    cursor: { drag: { x: true, y: false, setScale: false } }, // the server cuts the range, with all its detail
    series: [{ label: "step" }, ...series],
    hooks: { setSelect: [zoom] },
  }, [[], ...runs.map(() => [])], box);
  return { plot, box, runs: runs.length };
}

function zoom(plot) {
  const { left, width } = plot.select;
  if (width < 2) return;
  look([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
  plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
}

function look(at) {
  range = at;
  revision = "";
  refresh();
}

async function drawLayout(number, name) {
  const section = byId("layout");
  const found = await (await fetch(`layout?run=${number}`)).json();
  const note = found.error ?? `step ${found.step}, ${found.ranks} tensor-parallel ranks`;
  section.replaceChildren(element("h2", `Shards of ${name}: ${note}`));
  if (found.error) return;
  const table = document.createElement("table"), head = document.createElement("tr");
  head.append(...["parameter", "dtype", "shape", "split along", "on the ranks"].map((title) => element("th", title)));
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
  if (!byId("charts").hidden) section.scrollIntoView();
}

window.addEventListener("resize", () => {
  for (const { plot } of plots.values()) plot.setSize({ width: chartWidth(), height: 240 });
});
window.addEventListener("hashchange", () => location.reload());
byId("all").onclick = () => look(null);
refresh();
