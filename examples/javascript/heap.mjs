// How large the WebAssembly heap of onnxruntime-web is, and a limit to it. Import this before onnxruntime-web: it has no
// option for either, but makes its heap with WebAssembly.Memory, which is watched here.

const PAGE = 65536;
const Memory = WebAssembly.Memory;
let heap = null;
let most = 65536 * PAGE; // 4 GiB, what onnxruntime-web asks for

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

/** Bytes of the heap. It never shrinks: this is the most that was needed so far, and up to a fifth of room to grow. */
export function heapBytes() {
  return heap ? heap.buffer.byteLength : 0;
}
