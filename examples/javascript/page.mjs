// The page: one worker per training, a loss curve and a bar for the heap. The files come from the folder steps/ next to the
// page, or from ?steps=FOLDER; its index.json lists them.
import { FILES, heapBars, lossCurves, megabytes } from "./chart.mjs";

const { searchParams } = new URL(location.href);
const folder = (searchParams.get("steps") ?? "steps").replace(/\/$/, "");
const at = (id) => document.getElementById(id);
const chosenFile = () => document.querySelector("input[name=file]:checked").value;

let steps = [];
let seen = {}; // by file: {losses, heap}
let worker = null;

const chosen = () => steps[at("model").selectedIndex];

function draw() {
  const budget = chosen().budget;
  const count = Math.max(Number(at("steps").value), ...Object.values(seen).map(({ losses }) => losses.length));
  at("chart").innerHTML = lossCurves(seen, count);
  at("heaps").innerHTML = heapBars(seen, budget);
  at("budget").textContent =
    `The mark is the budget of the rewritten file's tensors, ${megabytes(budget)}. The heap also holds the runtime and ` +
    "the graph, and grows a fifth ahead of need.";
}

function say(text, bad = false) {
  at("status").textContent = text;
  at("status").classList.toggle("bad", bad);
}

function stop() {
  worker?.terminate();
  worker = null;
  at("train").textContent = "Train";
}

function train() {
  const [step, file, count] = [chosen(), chosenFile(), Number(at("steps").value)];
  const made = (seen[file] = { losses: [], heap: 0 });
  stop();
  at("train").textContent = "Stop";
  say(`Loading the ${FILES[file]} file …`);
  worker = new Worker("worker.mjs", { type: "module" });
  worker.onmessage = ({ data }) => {
    if (data.error) return stop(), say(data.error, true);
    if (data.done) return stop(), document.body.toggleAttribute("data-done", true);
    made.losses.push(data.loss);
    made.heap = data.heap;
    say(`Step ${data.step + 1} of ${count}: loss ${data.loss.toFixed(6)}, ${Math.round(data.milliseconds)} ms`);
    draw();
  };
  worker.onerror = (event) => (stop(), say(event.message || "The worker could not be started.", true));
  document.body.toggleAttribute("data-done", false);
  const url = (name) => new URL(`${folder}/${name}`, location.href).href;
  worker.postMessage({ model: url(step[file]), state: url(step.state), steps: count });
}

function forget() {
  stop();
  seen = {};
  say(`${chosen().about}. As exported ${megabytes(chosen().peaks.before)} of tensors.`);
  draw();
}

at("controls").addEventListener("submit", (event) => {
  event.preventDefault();
  if (worker) stop();
  else train();
});
at("model").addEventListener("change", forget);

const listed = await fetch(`${folder}/index.json`);
if (!listed.ok) {
  say(`No ${folder}/index.json: make the files with python -m scripts.edge make.`, true);
} else {
  steps = await listed.json();
  at("model").replaceChildren(...steps.map(({ name }) => new Option(name)));
  forget();
}
