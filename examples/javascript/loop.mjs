// Trains a step written by onnx-remat in any of ONNX Runtime's JavaScript packages: onnxruntime-node, onnxruntime-web.

/** The options that keep the planned peak. Memory patterns, on by default in Node, would double it. */
export const OPTIONS = { executionMode: "sequential", graphOptimizationLevel: "all", enableMemPattern: false };

const TYPES = {
  F64: ["float64", Float64Array], F32: ["float32", Float32Array], F16: ["float16", Uint16Array],
  I64: ["int64", BigInt64Array], I32: ["int32", Int32Array], I8: ["int8", Int8Array],
  U64: ["uint64", BigUint64Array], U8: ["uint8", Uint8Array], BOOL: ["bool", Uint8Array],
};

/** Tensors by name, from the bytes of a safetensors file, as `Loop.save` writes it in Python. */
export function readState(ort, buffer) {
  const start = 8 + Number(new DataView(buffer).getBigUint64(0, true));
  const { __metadata__, ...entries } = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, start - 8)));
  const state = {};
  for (const [name, { dtype, shape, data_offsets: [from, to] }] of Object.entries(entries)) {
    if (!(dtype in TYPES)) throw new Error(`${name} is of type ${dtype}, which JavaScript has no arrays for`);
    const [type, View] = TYPES[dtype];
    state[name] = new ort.Tensor(type, new View(buffer.slice(start + from, start + to)), shape);
  }
  return state;
}

/** Steps of one session: each output `new.<name>` is the next step's input `<name>`. */
export class Loop {
  constructor(session, state) {
    const missing = session.inputNames.filter((name) => !(name in state));
    if (missing.length) throw new Error(`no value for the input ${missing[0]}`);
    this.session = session;
    this.feeds = Object.fromEntries(session.inputNames.map((name) => [name, state[name]]));
  }

  /** Train on a batch (tensors by input name), or on the previous batch; returns the loss. */
  async step(batch = {}) {
    Object.assign(this.feeds, batch);
    const made = await this.session.run(this.feeds);
    for (const [name, tensor] of Object.entries(made)) {
      const renewed = name.replace(/^new\./, "");
      if (renewed === name || !(renewed in this.feeds)) continue;
      this.feeds[renewed].dispose();
      this.feeds[renewed] = tensor;
    }
    return Number(made.loss.data[0]);
  }
}
