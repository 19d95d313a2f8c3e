// Converts between values and pixels, and chooses the ticks of an axis.
import { tick } from './format';

export interface View { x0: number; x1: number; y0: number; y1: number; logX: boolean; logY: boolean }
export interface Frame { w: number; h: number; dpr: number }
export const PAD = { l: 48, r: 10, t: 8, b: 20 };

/** Return about `count` round tick positions in [lo, hi]. */
export function ticks(lo: number, hi: number, count: number, log = false): number[] {
  if (!(hi > lo) || !Number.isFinite(hi - lo)) return Number.isFinite(lo) ? [lo] : [];
  if (log && lo > 0) {
    const found = decades(lo, hi, count);
    if (found.length > 1) return found;
  }
  const step = nice((hi - lo) / Math.max(1, count));
  return every(step, lo, hi).map((t) => Number(t.toPrecision(12)));
}

function nice(rough: number): number {
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * (rough < 1.5 * power ? 1 : rough < 3.5 * power ? 2 : rough < 7.5 * power ? 5 : 10);
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

export type Kind = 'number' | 'time' | 'span';
export interface Tick { at: number; label: string }

/** Return ticks with labels that have as many digits as the distance between ticks needs, so that neighboring labels differ. */
export function labelled(lo: number, hi: number, count: number, log = false, kind: Kind = 'number'): Tick[] {
  const clock = kind !== 'number' && !log && hi - lo > count;
  const shift = kind === 'time' ? new Date(lo * 1000).getTimezoneOffset() * 60 : 0; // days begin at local midnight
  const step = clock ? CLOCK.find((one) => one >= (hi - lo) / count) ?? DAY * nice((hi - lo) / count / DAY) : 0;
  const found = clock ? every(step, lo - shift, hi - shift).map((t) => t + shift) : ticks(lo, hi, count, log);
  const apart = step || Math.min(...found.slice(1).map((t, i) => t - found[i]), Infinity);
  return found.map((at) => ({ at, label: kind === 'time' ? timeOfDay(at, apart) : kind === 'span' ? span(at, apart) : tick(at, Math.min(apart, Math.abs(at) || apart)) }));
}

const DAY = 86_400;
const CLOCK = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, DAY];

function every(step: number, lo: number, hi: number): number[] {
  const found: number[] = [];
  for (let i = Math.ceil(lo / step - 1e-9); i * step <= hi + step * 1e-9 && found.length < 200; i++) found.push(i * step);
  return found;
}

/** Format the time of day; at midnight, and if ticks are days apart, the date. */
function timeOfDay(seconds: number, apart: number): string {
  const at = new Date(seconds * 1000);
  const two = (n: number) => String(n).padStart(2, '0');
  const clock = `${two(at.getHours())}:${two(at.getMinutes())}`;
  if (apart < 1) return `${two(at.getSeconds())}.${String(at.getMilliseconds()).padStart(3, '0')}`;
  if (apart < 60) return `${clock}:${two(at.getSeconds())}`;
  return apart >= DAY || (clock === '00:00' && apart >= 3600) ? `${at.getDate()} ${at.toLocaleString('en', { month: 'short' })}` : clock;
}

function span(seconds: number, apart: number): string {
  const [unit, word] = apart >= DAY ? [DAY, 'd'] : apart >= 3600 ? [3600, 'h'] : apart >= 60 ? [60, 'min'] : [1, 's'];
  return `${tick(seconds / unit, apart / unit)} ${word}`;
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
