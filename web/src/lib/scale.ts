// From numbers to pixels and back, and which round numbers to write beside an axis.
import { tick } from './format';

export interface View { x0: number; x1: number; y0: number; y1: number; logX: boolean; logY: boolean }
export interface Frame { w: number; h: number; dpr: number }
export const PAD = { l: 48, r: 10, t: 8, b: 20 };

/** Round positions in [lo, hi], about `count` of them. */
export function ticks(lo: number, hi: number, count: number, log = false): number[] {
  if (!(hi > lo) || !Number.isFinite(hi - lo)) return Number.isFinite(lo) ? [lo] : [];
  if (log && lo > 0) {
    const found = decades(lo, hi, count);
    if (found.length > 1) return found;
  }
  const rough = (hi - lo) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * (rough < 1.5 * power ? 1 : rough < 3.5 * power ? 2 : rough < 7.5 * power ? 5 : 10);
  const found: number[] = [];
  for (let i = Math.ceil(lo / step - 1e-9); i * step <= hi + step * 1e-9 && found.length < 200; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

function decades(lo: number, hi: number, count: number): number[] {
  const first = Math.floor(Math.log10(lo));
  const last = Math.ceil(Math.log10(hi));
  const every = Math.max(1, Math.ceil((last - first) / Math.max(1, count)));
  const within = last - first > count / 2 ? [1] : last - first > 2 ? [1, 3] : [1, 2, 5];
  const found: number[] = [];
  for (let e = first; e <= last; e += every) for (const m of within) {
    const place = Number((m * 10 ** e).toPrecision(12));
    if (place >= lo && place <= hi) found.push(place);
  }
  return found;
}

/** Time of day, or date, by how much time the axis spans. */
export function timeTick(seconds: number, span: number): string {
  const at = new Date(seconds * 1000);
  const two = (n: number) => String(n).padStart(2, '0');
  if (span > 3 * 86_400) return `${at.getDate()} ${at.toLocaleString('en', { month: 'short' })}`;
  if (span < 5) return `${two(at.getSeconds())}.${String(at.getMilliseconds()).padStart(3, '0')}`;
  const clock = `${two(at.getHours())}:${two(at.getMinutes())}`;
  return span < 300 ? `${clock}:${two(at.getSeconds())}` : clock;
}

export function spanTick(seconds: number, span: number): string {
  if (span >= 2 * 86_400) return `${tick(seconds / 86_400)} d`;
  if (span >= 2 * 3600) return `${tick(seconds / 3600)} h`;
  return span >= 180 ? `${tick(seconds / 60)} min` : `${tick(seconds)} s`;
}

export function scales(f: Frame, v: View) {
  const fx = v.logX ? Math.log : (n: number) => n;
  const fy = v.logY ? Math.log : (n: number) => n;
  const pw = Math.max(1, f.w - PAD.l - PAD.r);
  const ph = Math.max(1, f.h - PAD.t - PAD.b);
  const x0 = fx(v.x0), kx = pw / (fx(v.x1) - x0 || 1);
  const y0 = fy(v.y0), ky = ph / (fy(v.y1) - y0 || 1);
  const invert = (u: number, log: boolean) => (log ? Math.exp(u) : u);
  return {
    pw, ph,
    sx: (x: number) => PAD.l + (fx(x) - x0) * kx,
    sy: (y: number) => PAD.t + ph - (fy(y) - y0) * ky,
    ix: (p: number) => invert(x0 + (p - PAD.l) / kx, v.logX),
    iy: (p: number) => invert(y0 + (PAD.t + ph - p) / ky, v.logY),
  };
}
export type Scales = ReturnType<typeof scales>;

/** Index of the last x ≤ t (0 when there is none). */
export function at(x: ArrayLike<number>, t: number): number {
  let a = 0, b = x.length - 1;
  while (a < b) {
    const m = (a + b + 1) >> 1;
    if (x[m] <= t) a = m; else b = m - 1;
  }
  return Math.max(0, a);
}

/** Index of the x nearest to t. */
export function nearest(x: ArrayLike<number>, t: number): number {
  const i = at(x, t);
  return i + 1 < x.length && x[i + 1] - t < t - x[i] ? i + 1 : i;
}
