// The page's charts as text: loss curves as parts of an SVG, heaps as bars.
export const FILES = { before: "original", after: "rewritten" };
export const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;

/** Curves of `seen`, by file {losses, heap}, over `count` steps, in a box of 640 x 260. */
export function lossCurves(seen, count) {
  const all = Object.values(seen).flatMap(({ losses }) => losses);
  const [low, high] = all.length ? [Math.min(...all), Math.max(...all)] : [0, 1];
  const [span, last] = [high - low || 1, Math.max(1, count - 1)];
  const x = (step) => 52 + (step / last) * 568;
  const y = (loss) => 222 - ((loss - low) / span) * 200;
  const parts = [0, 0.5, 1].map((part) => {
    const loss = low + part * span;
    return `<line class="grid" x1="52" x2="620" y1="${y(loss)}" y2="${y(loss)}" />
      <text x="44" y="${y(loss) + 4}" text-anchor="end">${all.length ? loss.toFixed(3) : ""}</text>`;
  });
  for (const step of [0, last])
    parts.push(`<text x="${x(step)}" y="246" text-anchor="${step ? "end" : "start"}">step ${step + 1}</text>`);
  let row = 0;
  for (const [file, name] of Object.entries(FILES)) {
    const losses = seen[file]?.losses ?? [];
    if (!losses.length) continue;
    const points = losses.map((loss, step) => `${x(step).toFixed(1)} ${y(loss).toFixed(1)}`);
    const [end, top] = points.at(-1).split(" ");
    parts.push(`<path class="${file}" d="M${points.join("L")}" />`);
    parts.push(`<circle class="${file}" cx="${end}" cy="${top}" r="4" />`);
    const text = `${name}: ${losses.at(-1).toFixed(6)}`;
    parts.push(`<text class="${file}" x="612" y="${38 + 18 * row++}" text-anchor="end">${text}</text>`);
  }
  return parts.join("");
}

/** A bar for each file's heap; the rewritten file's bar has a mark at its budget. */
export function heapBars(seen, budget) {
  const most = Math.max(1, 1.1 * budget, ...Object.values(seen).map(({ heap }) => heap));
  const bars = Object.entries(FILES).map(([file, name]) => {
    const heap = seen[file]?.heap ?? 0;
    const mark = file === "after" ? `<div class="mark" style="left: ${(100 * budget) / most}%"></div>` : "";
    return `<div class="heap ${file}"><span>${name}</span>
      <div class="track"><div class="fill" style="width: ${(100 * heap) / most}%"></div>${mark}</div>
      <b>${heap ? megabytes(heap) : "–"}</b></div>`;
  });
  return bars.join("");
}
