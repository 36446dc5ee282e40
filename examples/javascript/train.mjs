// Trains in Node:  node train.mjs small.onnx state.safetensors [--steps 20] [--wasm]
// Native kernels (onnxruntime-node), or with --wasm those of the browser (onnxruntime-web). --heap BYTES limits the heap,
// --profile prints every executed node, --json one line of JSON.
import { readFile } from "node:fs/promises";
import { parseArgs } from "node:util";
import { heapBytes, limitHeap } from "./heap.mjs";
import { Loop, OPTIONS, readState } from "./loop.mjs";

const { values: given, positionals: [model, state] } = parseArgs({
  allowPositionals: true,
  options: {
    steps: { type: "string", default: "20" }, wasm: { type: "boolean" }, heap: { type: "string" },
    profile: { type: "boolean" }, json: { type: "boolean" },
  },
});
if (!state) throw new Error("usage: node train.mjs small.onnx state.safetensors [--steps 20] [--wasm]");

const ort = await import(given.wasm ? "onnxruntime-web/wasm" : "onnxruntime-node");
if (given.wasm) ort.env.wasm.numThreads = 1;
if (given.heap) limitHeap(Number(given.heap));

const options = { ...OPTIONS, enableProfiling: Boolean(given.profile) };
const session = await ort.InferenceSession.create(await readFile(model), options);
const { buffer } = new Uint8Array(await readFile(state));
const loop = new Loop(session, readState(ort, buffer));
const losses = [];
for (let step = 0; step < Number(given.steps); step++) {
  losses.push(await loop.step());
  if (!given.json) console.log(`step ${step}: loss ${losses.at(-1).toFixed(6)}`);
}
if (given.profile) session.endProfiling();
await session.release();
if (given.json) console.log(JSON.stringify({ losses, heap: heapBytes() }));
else if (given.wasm) console.log(`heap: ${(heapBytes() / 1e6).toFixed(1)} MB`);
