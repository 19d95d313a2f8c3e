// Line charts of many runs, each with its own x values. Drawing is a pure function of (context, frame, view, lines, look) that touches
// no DOM, so the same code serves the page, image export, or a worker.
import { first, hiAt, loAt, several, xLast, type Buckets } from './points';
import { PAD, labelled, scales, type Frame, type Kind, type Scales, type View } from './scale';

export interface Line extends Buckets {
  run: string;
  colour: string;
  dash: number[];
  width: number;
  alpha: number;
  low?: ArrayLike<number>; // lowest and highest rank, for the band
  high?: ArrayLike<number>;
  smooth?: ArrayLike<number>;
  raw: boolean;
  beneath?: number; // opacity of the raw line below the smoothed one
  marks: [number, string][];
  restarts: number[];
  flags?: [number, string][]; // requests that the job carried out, with their labels
  forked?: number | null; // of a fork: the x where its own points begin; earlier ones are its parent's
}
export interface Look { ground: string; ink: string; grid: string; band: boolean; xKind: Kind }
type Context = CanvasRenderingContext2D | OffscreenCanvasRenderingContext2D;

const PALE = 0.35; // opacity of the part that a fork inherits from its parent
const GAP = 8; // a step this many times the usual one is a gap in the data, drawn dotted
const WIDE = 400; // pixels of a usual chart: within one of them, no step is a gap

/** Return the lowest or highest finite value; NaN if there is none. */
export function edge(y: ArrayLike<number>, pick: (...n: number[]) => number): number {
  let found = NaN;
  for (let i = 0; i < y.length; i++) if (Number.isFinite(y[i])) found = Number.isNaN(found) ? y[i] : pick(found, y[i]);
  return found;
}

/** Return the extent of the lines; null if there is nothing to draw. */
export function extent(lines: Line[], logY: boolean, logX: boolean, zoom: [number, number] | null): View | null {
  let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
  const least = logX ? Number.MIN_VALUE : -Infinity, from = Math.max(zoom?.[0] ?? -Infinity, least), to = zoom?.[1] ?? Infinity;
  const floor = logY ? Number.MIN_VALUE : -Infinity;
  for (const l of lines) {
    let a = 0, b = l.x.length; // the part in the range: x never goes back
    while (a < b && xLast(l, a) < from) a++;
    while (b > a && l.x[b - 1] > to) b--;
    if (a < b) {
      x0 = Math.min(x0, l.x[a] >= from ? l.x[a] : xLast(l, a));
      x1 = Math.max(x1, xLast(l, b - 1) <= to ? xLast(l, b - 1) : l.x[b - 1]);
    }
    for (const column of [l.y, l.first, l.lo, l.hi, l.low, l.high]) if (column) for (let i = a; i < b; i++) {
      const y = column[i];
      if (y < y0 && y >= floor && y > -Infinity) y0 = y;
      if (y > y1 && y >= floor && y < Infinity) y1 = y;
    }
    for (const [x] of l.marks) if (x >= from && x <= to) { if (x < x0) x0 = x; if (x > x1) x1 = x; }
  }
  if (!(x0 <= x1)) return null;
  if (!(y0 <= y1)) [y0, y1] = [logY ? 0.1 : 0, 1]; // only NaN: an empty frame for the marks
  if (zoom) [x0, x1] = logX && zoom[0] <= 0 ? [x0, zoom[1]] : zoom;
  if (x0 === x1) [x0, x1] = logX ? [x0 / 2, x1 * 2] : [x0 - 0.5, x1 + 0.5];
  return { x0, x1, ...padded(y0, y1, logY), logX, logY };
}

function padded(y0: number, y1: number, log: boolean) {
  if (log) return y0 === y1 ? { y0: y0 / 2, y1: y1 * 2 } : { y0: y0 / (y1 / y0) ** 0.04, y1: y1 * (y1 / y0) ** 0.04 };
  const room = y0 === y1 ? Math.abs(y0) * 0.05 || 0.5 : (y1 - y0) * 0.04;
  return { y0: y0 - room, y1: y1 + room };
}

export function draw(g: Context, f: Frame, v: View, lines: Line[], look: Look): void {
  const s = scales(f, v);
  g.setTransform(f.dpr, 0, 0, f.dpr, 0, 0);
  g.globalAlpha = 1;
  g.setLineDash([]);
  g.fillStyle = look.ground;
  g.fillRect(0, 0, f.w, f.h);
  axes(g, f, v, s, look);
  clipped(g, f, s, () => {
    for (const l of lines) restarts(g, f, l, s);
    for (const l of lines) flags(g, f, l, s);
    if (look.band) for (const l of lines) inParts(g, f, l, s, (part) => band(g, part, v, s));
    for (const l of lines) inParts(g, f, l, s, (part) => line(g, part, v, s));
    for (const l of lines) marks(g, l, v, s);
  });
}

/** Draw the highlighted line on the overlay canvas, so that pointing at a run does not redraw the others. */
export function drawFocus(g: Context, f: Frame, v: View | null, l: Line | undefined, ground: string): void {
  g.setTransform(f.dpr, 0, 0, f.dpr, 0, 0);
  g.clearRect(0, 0, f.w, f.h);
  if (!l || !v) return;
  const s = scales(f, v);
  clipped(g, f, s, () => { // fades the other lines, but not the axis labels
    g.globalAlpha = 0.65;
    g.fillStyle = ground;
    g.fillRect(0, 0, f.w, f.h);
    g.globalAlpha = 1;
    inParts(g, f, { ...l, width: l.width + 1, alpha: 1 }, s, (part) => line(g, part, v, s));
  });
}

function clipped(g: Context, f: Frame, s: Scales, paint: () => void) {
  g.save();
  g.beginPath();
  g.rect(PAD.l - 1, 0, s.pw + 2, f.h - PAD.b + 1);
  g.clip();
  paint();
  g.restore();
}

/** Paint a fork's line in two parts: pale up to its own first point. */
function inParts(g: Context, f: Frame, l: Line, s: Scales, paint: (part: Line) => void) {
  const at = l.forked === undefined || l.forked === null ? NaN : s.sx(l.forked);
  if (!Number.isFinite(at)) return paint(l);
  const box = (from: number, to: number, part: Line) => {
    if (!(to > from)) return;
    g.save();
    g.beginPath();
    g.rect(from, 0, to - from, f.h);
    g.clip();
    paint(part);
    g.restore();
  };
  box(0, Math.min(at, f.w), { ...l, alpha: l.alpha * PALE });
  box(Math.max(0, at), f.w, l);
}

function axes(g: Context, f: Frame, v: View, s: Scales, look: Look) {
  g.font = '11px system-ui, sans-serif';
  g.fillStyle = look.ink;
  g.strokeStyle = look.grid;
  g.lineWidth = 1;
  g.beginPath();
  g.textAlign = 'right';
  g.textBaseline = 'middle';
  for (const { at, label } of labelled(v.y0, v.y1, s.ph / 33, v.logY)) {
    const y = Math.round(s.sy(at)) + 0.5;
    g.moveTo(PAD.l, y);
    g.lineTo(f.w - PAD.r, y);
    g.fillText(label, PAD.l - 7, y, PAD.l - 8); // long labels are condensed to fit
  }
  g.textAlign = 'center';
  g.textBaseline = 'top';
  for (const { at, label } of labelled(v.x0, v.x1, s.pw / 76, v.logX, look.xKind)) {
    const half = g.measureText(label).width / 2;
    g.fillText(label, Math.min(f.w - half - 1, s.sx(at)), PAD.t + s.ph + 6);
  }
  g.stroke();
}

function restarts(g: Context, f: Frame, l: Line, s: Scales) {
  if (!l.restarts.length) return;
  g.strokeStyle = g.fillStyle = l.colour;
  g.globalAlpha = 0.55 * l.alpha;
  g.lineWidth = 1;
  g.setLineDash([1, 3]);
  for (const x of l.restarts) {
    const px = Math.round(s.sx(x)) + 0.5;
    g.beginPath();
    g.moveTo(px, PAD.t);
    g.lineTo(px, f.h - PAD.b);
    g.stroke();
    g.beginPath(); // a small flag: the run restarted here
    g.moveTo(px, PAD.t);
    g.lineTo(px + 6, PAD.t + 3);
    g.lineTo(px, PAD.t + 6);
    g.fill();
  }
  g.setLineDash([]);
}

function flags(g: Context, f: Frame, l: Line, s: Scales) {
  if (!l.flags?.length) return;
  g.strokeStyle = g.fillStyle = l.colour;
  g.globalAlpha = 0.7 * l.alpha;
  g.lineWidth = 1;
  for (const [x] of l.flags) {
    const px = Math.round(s.sx(x)) + 0.5;
    g.beginPath();
    g.moveTo(px, PAD.t);
    g.lineTo(px, f.h - PAD.b);
    g.stroke();
    g.fillRect(px, PAD.t, 7, 5);
  }
}

function band(g: Context, l: Line, v: View, s: Scales) {
  const low = l.low ?? l.lo, high = l.high ?? l.hi;
  if (!low || !high) return;
  const floor = (y: number) => s.sy(v.logY && y <= 0 ? v.y0 : y);
  g.fillStyle = l.colour;
  g.globalAlpha = 0.16 * l.alpha;
  for (const [a, b] of stretches(l, low)) {
    g.beginPath();
    for (let i = a; i < b; i++) g.lineTo(s.sx(l.x[i]), floor(high[i]));
    for (let i = b - 1; i >= a; i--) g.lineTo(s.sx(l.x[i]), floor(low[i]));
    g.fill();
  }
}

/** Return where to place a tooltip beside the pointer (left or right, top or bottom) so that it hides the fewest points. */
export function beside(pointer: number, lines: Line[], f: Frame, s: Scales, width: number, height: number): { from: number; below: boolean } {
  const sides = [pointer + 12, pointer - 12 - width].filter((from) => from >= PAD.l && from + width <= f.w);
  if (!sides.length) sides.push(pointer > f.w / 2 ? 0 : Math.max(0, f.w - width)); // wider than the space on either side
  const found = sides.flatMap((from) => [false, true].map((below) => ({ from, below, top: below ? f.h - PAD.b - height : PAD.t, hides: 0 })));
  const each = Math.max(4, Math.min(48, 1000 / lines.length)); // a sample is enough
  for (const l of lines) {
    const every = Math.max(1, Math.floor(l.x.length / each));
    for (let i = 0; i < l.x.length; i += every) {
      const px = s.sx(l.x[i]), py = s.sy((l.smooth ?? l.y)[i]);
      for (const c of found) if (px >= c.from && px <= c.from + width && py >= c.top && py <= c.top + height) c.hides++;
    }
  }
  return found.reduce((best, one) => (one.hides < best.hides ? one : best));
}

/** Return the index ranges without gaps. A range ends at a value that is not finite, or at a step much wider than usual. */
export function stretches(l: Pick<Line, 'x'>, y: ArrayLike<number>): [number, number][] {
  const usual = median(l.x);
  const found: [number, number][] = [];
  let start = -1;
  for (let i = 0; i <= l.x.length; i++) {
    const ends = i === l.x.length || !Number.isFinite(y[i]);
    const jumps = !ends && start >= 0 && i > start && l.x[i] - l.x[i - 1] > usual * GAP;
    if (start >= 0 && (ends || jumps)) { found.push([start, i]); start = -1; }
    if (!ends && start < 0) start = i;
  }
  return found;
}

/** Return the usual step: the median, and at least a pixel or so of all. */
function median(x: ArrayLike<number>): number {
  if (x.length < 4) return Infinity;
  const every = Math.max(1, Math.floor(x.length / 64)); // a sample is enough, and keeps drawing linear
  const steps: number[] = [];
  for (let i = 1; i < x.length; i += every) steps.push(Math.abs(x[i] - x[i - 1]));
  steps.sort((a, b) => a - b);
  return Math.max(steps[steps.length >> 1], (x[x.length - 1] - x[0]) / WIDE) || Infinity;
}

function line(g: Context, l: Line, v: View, s: Scales) {
  g.strokeStyle = g.fillStyle = l.colour;
  g.lineJoin = 'bevel'; // round joins look the same at this width, but dominate the drawing time
  g.setLineDash(l.dash);
  g.lineWidth = l.width;
  g.globalAlpha = l.smooth ? (l.beneath ?? 0.28) * l.alpha : l.alpha;
  const parts = stretches(l, l.y);
  for (const part of parts) stroke(g, l, part, v, s);
  if (l.smooth) {
    g.globalAlpha = l.alpha;
    for (const part of parts) smoothStroke(g, l, l.smooth, part, v, s);
  }
  g.setLineDash([]);
  holes(g, l, parts, v, s);
  dots(g, l, parts, v, s);
}

function smoothStroke(g: Context, l: Line, y: ArrayLike<number>, [a, b]: [number, number], v: View, s: Scales) {
  g.beginPath();
  for (let i = a, from = -Infinity; i < b; i++) {
    const px = s.sx(xLast(l, i));
    if (px - from < 0.5 && i < b - 1) continue; // a smooth line has nothing to see between
    g.lineTo((from = px), height(y[i], v, s));
  }
  g.stroke();
}

/** Return the y pixel of a value; below the frame if a log axis cannot show it. */
const height = (y: number, v: View, s: Scales) => (v.logY && y <= 0 ? s.sy(v.y0) + 40 : s.sy(y));

/** Stroke through the first, lowest, highest and last point of each bucket, in the order they were logged. */
function stroke(g: Context, l: Line, [a, b]: [number, number], v: View, s: Scales) {
  const { lo, hi } = l;
  g.beginPath();
  if (b - a > 1 && (s.sx(l.x[b - 1]) - s.sx(l.x[a])) / (b - a - 1) < 2) return tight(g, l, a, b, v, s);
  for (let i = a; i < b; i++) {
    const px = s.sx(l.x[i]);
    if (!several(l, i) || !lo || !hi) { g.lineTo(px, height(l.y[i], v, s)); continue; }
    const low = [loAt(l, i) ?? l.x[i], lo[i]], high = [hiAt(l, i) ?? l.x[i], hi[i]];
    g.lineTo(px, height(first(l, i), v, s));
    for (const [x, y] of low[0] <= high[0] ? [low, high] : [high, low]) g.lineTo(s.sx(x), height(y, v, s));
    g.lineTo(s.sx(xLast(l, i)), height(l.y[i], v, s));
  }
  g.stroke();
}

/** Stroke what is dense, with two ends per pixel: all else is on the line between its lowest and highest point. */
function tight(g: Context, l: Line, a: number, b: number, v: View, s: Scales) {
  const { x } = l, lo = l.lo ?? l.y, hi = l.hi ?? l.y;
  let from = first(l, a);
  g.lineTo(s.sx(x[a]), height(from, v, s));
  for (let i = a; i < b; ) {
    const at = s.sx(x[i]), end = s.ix(Math.floor(at) + 1); // where the next pixel begins
    let low = lo[i], high = hi[i];
    while (++i < b && x[i] < end) {
      if (lo[i] < low) low = lo[i];
      if (hi[i] > high) high = hi[i];
    }
    const up = Math.abs(from - high) < Math.abs(from - low);
    g.lineTo(at, height(up ? high : low, v, s));
    from = up ? low : high;
    if (low < high) g.lineTo(at, height(from, v, s));
  }
  g.lineTo(s.sx(xLast(l, b - 1)), height(l.y[b - 1], v, s));
  g.stroke();
}

function holes(g: Context, l: Line, parts: [number, number][], v: View, s: Scales) {
  if (parts.length < 2) return;
  g.globalAlpha = 0.5 * l.alpha;
  g.lineWidth = 1;
  g.setLineDash([1, 4]);
  g.beginPath();
  for (let i = 1; i < parts.length; i++) {
    const a = parts[i - 1][1] - 1, b = parts[i][0];
    if (v.logY && (l.y[a] <= 0 || first(l, b) <= 0)) continue;
    g.moveTo(s.sx(xLast(l, a)), s.sy(l.y[a]));
    g.lineTo(s.sx(l.x[b]), s.sy(first(l, b)));
  }
  g.stroke();
  g.setLineDash([]);
}

/** Draw a dot for each logged point if there is enough room, and always for an isolated point. */
function dots(g: Context, l: Line, parts: [number, number][], v: View, s: Scales) {
  const all = l.raw && l.x.length > 0 && s.pw / l.x.length > 9;
  g.globalAlpha = l.alpha;
  g.beginPath();
  for (const [a, b] of parts) {
    if (!all && b - a > 1) continue;
    for (let i = a; i < b; i++) {
      if (v.logY && l.y[i] <= 0) continue;
      const px = s.sx(xLast(l, i)), py = s.sy(l.y[i]);
      g.moveTo(px + 2.2, py);
      g.arc(px, py, 2.2, 0, 7);
    }
  }
  g.fill();
}

/** Draw NaN as a cross at the bottom, and infinities as arrows at the edge where the line leaves the chart. */
function marks(g: Context, l: Line, v: View, s: Scales) {
  if (!l.marks.length) return;
  const floor = PAD.t + s.ph;
  g.strokeStyle = g.fillStyle = l.colour;
  g.globalAlpha = l.alpha;
  g.lineWidth = 1.5;
  g.beginPath();
  for (const [x, kind] of l.marks) {
    const px = s.sx(x);
    if (kind === 'nan') {
      g.moveTo(px - 3, floor - 7); g.lineTo(px + 3, floor - 1);
      g.moveTo(px + 3, floor - 7); g.lineTo(px - 3, floor - 1);
    } else {
      const tip = kind === 'inf' ? PAD.t : floor, back = kind === 'inf' ? 6 : -6;
      g.moveTo(px - 3.5, tip + back); g.lineTo(px, tip); g.lineTo(px + 3.5, tip + back);
    }
  }
  g.stroke();
}
