// Trains one file in a separate worker, and so in a fresh WebAssembly heap, and reports every step to the page.
import { heapBytes, limitHeap } from "./heap.mjs"; // before onnxruntime-web
import { Loop, OPTIONS, readState } from "./loop.mjs";
import * as ort from "./node_modules/onnxruntime-web/dist/ort.wasm.bundle.min.mjs";

async function bytes(url) {
  const answer = await fetch(url);
  if (!answer.ok) throw new Error(`${url}: ${answer.status} ${answer.statusText}`);
  return answer.arrayBuffer();
}

async function train({ model, state, steps, limit, threads = 1 }) {
  ort.env.wasm.numThreads = threads;
  if (limit) limitHeap(limit);
  const session = await ort.InferenceSession.create(await bytes(model), OPTIONS);
  const loop = new Loop(session, readState(ort, await bytes(state)));
  for (let step = 0; step < steps; step++) {
    const start = performance.now();
    const loss = await loop.step();
    postMessage({ step, loss, heap: heapBytes(), milliseconds: performance.now() - start });
  }
}

onmessage = ({ data }) =>
  train(data).then(
    () => postMessage({ done: true }),
    (error) => postMessage({ error: String(error?.message ?? error) }),
  );
