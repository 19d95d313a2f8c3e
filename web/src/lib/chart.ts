// Line charts of many runs, each with its own x. Drawing is a pure function of (context, frame, view, lines, look): no
// element is touched, so the same code serves the page, a picture for export, or a worker.
import { tick } from './format';
import { PAD, scales, spanTick, ticks, timeTick, type Frame, type Scales, type View } from './scale';

export interface Line {
  run: string;
  colour: string;
  dash: number[];
  width: number;
  alpha: number;
  x: ArrayLike<number>;
  y: ArrayLike<number>; // what the line says at x: the value, or a bucket's last one
  lo?: ArrayLike<number>; // a bucket's extremes: drawn, so that no peak is lost
  hi?: ArrayLike<number>;
  low?: ArrayLike<number>; // the lowest and highest rank, for the band
  high?: ArrayLike<number>;
  smooth?: ArrayLike<number>;
  raw: boolean;
  beneath?: number; // how strong the raw line stands beneath the smooth one
  marks: [number, string][];
  restarts: number[];
}
export interface Look { ground: string; ink: string; grid: string; band: boolean; xKind: 'number' | 'time' | 'span' }
type Context = CanvasRenderingContext2D | OffscreenCanvasRenderingContext2D;

const GAP = 8; // a step this many times the usual one is a hole in the data: dotted, not joined

/** What the lines span; null when there is nothing to draw. */
export function extent(lines: Line[], logY: boolean, logX: boolean, zoom: [number, number] | null): View | null {
  let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
  const from = zoom?.[0] ?? -Infinity, to = zoom?.[1] ?? Infinity;
  const take = (v: number) => {
    if (!Number.isFinite(v) || (logY && v <= 0)) return;
    if (v < y0) y0 = v;
    if (v > y1) y1 = v;
  };
  for (const l of lines) {
    for (let i = 0; i < l.x.length; i++) {
      const x = l.x[i];
      if (!(x >= from && x <= to) || (logX && x <= 0)) continue;
      if (x < x0) x0 = x;
      if (x > x1) x1 = x;
      take(l.y[i]);
      if (l.lo && l.hi) { take(l.lo[i]); take(l.hi[i]); }
      if (l.low && l.high) { take(l.low[i]); take(l.high[i]); }
    }
    for (const [x] of l.marks) if (x >= from && x <= to) { if (x < x0) x0 = x; if (x > x1) x1 = x; }
  }
  if (!(x0 <= x1)) return null;
  if (!(y0 <= y1)) [y0, y1] = [logY ? 0.1 : 0, 1]; // nothing but NaN: an empty frame that holds the marks
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
    if (look.band) for (const l of lines) band(g, l, v, s);
    for (const l of lines) line(g, l, v, s);
    for (const l of lines) marks(g, l, v, s);
  });
}

/** One line alone, stronger, on the canvas above: pointing at a run redraws nothing else. */
export function drawFocus(g: Context, f: Frame, v: View, l: Line | undefined): void {
  g.setTransform(f.dpr, 0, 0, f.dpr, 0, 0);
  g.clearRect(0, 0, f.w, f.h);
  if (!l) return;
  const s = scales(f, v);
  clipped(g, f, s, () => line(g, { ...l, width: l.width + 1, alpha: 1 }, v, s));
}

function clipped(g: Context, f: Frame, s: Scales, paint: () => void) {
  g.save();
  g.beginPath();
  g.rect(PAD.l - 1, 0, s.pw + 2, f.h - PAD.b + 1);
  g.clip();
  paint();
  g.restore();
}

function axes(g: Context, f: Frame, v: View, s: Scales, look: Look) {
  g.font = '11px system-ui, sans-serif';
  g.fillStyle = look.ink;
  g.strokeStyle = look.grid;
  g.lineWidth = 1;
  g.beginPath();
  g.textAlign = 'right';
  g.textBaseline = 'middle';
  for (const t of ticks(v.y0, v.y1, s.ph / 33, v.logY)) {
    const y = Math.round(s.sy(t)) + 0.5;
    g.moveTo(PAD.l, y);
    g.lineTo(f.w - PAD.r, y);
    g.fillText(tick(t), PAD.l - 7, y);
  }
  g.textAlign = 'center';
  g.textBaseline = 'top';
  const name = (t: number) => (look.xKind === 'time' ? timeTick(t, v.x1 - v.x0) : look.xKind === 'span' ? spanTick(t, v.x1 - v.x0) : tick(t));
  for (const t of ticks(v.x0, v.x1, s.pw / 76, v.logX)) {
    const half = g.measureText(name(t)).width / 2;
    g.fillText(name(t), Math.min(f.w - half - 1, s.sx(t)), PAD.t + s.ph + 6);
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
    g.beginPath(); // a small flag: the run began anew here
    g.moveTo(px, PAD.t);
    g.lineTo(px + 6, PAD.t + 3);
    g.lineTo(px, PAD.t + 6);
    g.fill();
  }
  g.setLineDash([]);
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

/** Where a box of a size stands beside the pointer, left or right of it, high or low: there where it hides the fewest points. */
export function beside(pointer: number, lines: Line[], f: Frame, s: Scales, width: number, height: number): { from: number; below: boolean } {
  const sides = [pointer + 12, pointer - 12 - width].filter((from) => from >= PAD.l && from + width <= f.w);
  if (!sides.length) sides.push(pointer > f.w / 2 ? 0 : Math.max(0, f.w - width)); // a box wider than the room beside
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

/** Index ranges without a hole: what is not finite, and steps far wider than usual, end one. */
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

function median(x: ArrayLike<number>): number {
  if (x.length < 4) return Infinity;
  const every = Math.max(1, Math.floor(x.length / 64)); // a sample is enough, and keeps drawing linear
  const steps: number[] = [];
  for (let i = 1; i < x.length; i += every) steps.push(Math.abs(x[i] - x[i - 1]));
  steps.sort((a, b) => a - b);
  return steps[steps.length >> 1] || Infinity;
}

function line(g: Context, l: Line, v: View, s: Scales) {
  g.strokeStyle = g.fillStyle = l.colour;
  g.lineJoin = 'bevel'; // round ones look the same at this width, and are most of the work
  g.setLineDash(l.dash);
  g.lineWidth = l.width;
  g.globalAlpha = l.smooth ? (l.beneath ?? 0.28) * l.alpha : l.alpha;
  const parts = stretches(l, l.y);
  for (const part of parts) stroke(g, l, l.y, part, v, s, true);
  if (l.smooth) {
    g.globalAlpha = l.alpha;
    for (const part of parts) stroke(g, l, l.smooth, part, v, s, false);
  }
  g.setLineDash([]);
  holes(g, l, parts, v, s);
  dots(g, l, parts, v, s);
}

function stroke(g: Context, l: Line, y: ArrayLike<number>, [a, b]: [number, number], v: View, s: Scales, extremes: boolean) {
  const { lo, hi } = l;
  const safe = (n: number) => (v.logY && n <= 0 ? s.sy(v.y0) + 40 : s.sy(n));
  const tight = b - a > 1 && (s.sx(l.x[b - 1]) - s.sx(l.x[a])) / (b - a - 1) < 2;
  let from = y[a];
  g.beginPath();
  for (let i = a; i < b; i++) {
    const px = s.sx(l.x[i]);
    if (extremes && lo && hi && hi[i] > lo[i]) { // from where we are to the nearer extreme, to the other, and on to the last
      const near = Math.abs(from - hi[i]) < Math.abs(from - lo[i]);
      from = near ? lo[i] : hi[i];
      g.lineTo(px, safe(near ? hi[i] : lo[i]));
      g.lineTo(px, safe(from));
      if (tight && i < b - 1) continue; // where buckets are pixels, the last lies on the stroke between the two
    }
    g.lineTo(px, safe((from = y[i])));
  }
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
    if (v.logY && (l.y[a] <= 0 || l.y[b] <= 0)) continue;
    g.moveTo(s.sx(l.x[a]), s.sy(l.y[a]));
    g.lineTo(s.sx(l.x[b]), s.sy(l.y[b]));
  }
  g.stroke();
  g.setLineDash([]);
}

/** Dots where each point is one that was logged and there is room to see it; always for a point that stands alone. */
function dots(g: Context, l: Line, parts: [number, number][], v: View, s: Scales) {
  const all = l.raw && l.x.length > 0 && s.pw / l.x.length > 9;
  g.globalAlpha = l.alpha;
  g.beginPath();
  for (const [a, b] of parts) {
    if (!all && b - a > 1) continue;
    for (let i = a; i < b; i++) {
      if (v.logY && l.y[i] <= 0) continue;
      const px = s.sx(l.x[i]), py = s.sy(l.y[i]);
      g.moveTo(px + 2.2, py);
      g.arc(px, py, 2.2, 0, 7);
    }
  }
  g.fill();
}

/** NaN is a cross on the floor; infinities are arrows at the edge they left by. */
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
