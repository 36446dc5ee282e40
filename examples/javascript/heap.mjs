// The size of onnxruntime-web's WebAssembly heap, and a limit on it. Import this before onnxruntime-web: it has no option for
// either, but allocates its heap with WebAssembly.Memory, which this module replaces.

const PAGE = 65536;
const Memory = WebAssembly.Memory;
let heap = null;
let most = 65536 * PAGE; // 4 GiB, the maximum that onnxruntime-web requests

class Watched extends Memory {
  constructor(given) {
    super({ ...given, maximum: Math.min(given.maximum, Math.floor(most / PAGE)) });
    if (given.initial > 0) heap = this;
  }
}
WebAssembly.Memory = Watched;

/** Let the heap grow to that many bytes at most; a step that needs more fails. Call it before the first session. */
export function limitHeap(bytes) {
  most = bytes;
}

/** Bytes of the heap. It never shrinks: this is the largest size needed so far, plus up to a fifth of room to grow. */
export function heapBytes() {
  return heap ? heap.buffer.byteLength : 0;
}
