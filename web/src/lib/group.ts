// Aggregates the runs of a group into one series: their mean or median, and a band, which is either the range, with the runs at its
// ends, or the spread around the mean.
import type { Series } from './api';
import { at, ends, hiAt, loAt } from './points';

const FINE = 2000, COARSE = 1000; // above FINE distinct x values, COARSE evenly spaced ones are used

export type Middle = 'mean' | 'median';
export type Spread = 'range' | 'std' | 'sem' | 'ci' | 'none';
const T95 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12, 2.11, 2.101, 2.093, 2.086, 2.08, 2.074, 2.069, 2.064, 2.06, 2.056, 2.052, 2.048, 2.045, 2.042];

/** Return the spread of values around their mean; NaN for fewer than two. */
export function spreadOf(values: number[], how: Spread): number {
  const n = values.length, mean = values.reduce((sum, one) => sum + one, 0) / n;
  if (n < 2) return NaN;
  const std = Math.sqrt(values.reduce((sum, one) => sum + (one - mean) ** 2, 0) / (n - 1));
  return how === 'std' ? std : (std / Math.sqrt(n)) * (how === 'ci' ? (T95[n - 2] ?? 1.96) : 1);
}

export function medianOf(values: number[]): number {
  const sorted = Float64Array.from(values).sort(), n = sorted.length;
  return n ? (sorted[(n - 1) >> 1] + sorted[n >> 1]) / 2 : NaN;
}

/** Merge series into one. Each value covers the runs that reach that x, interpolated between their points; a range band contains every extreme. */
export function united(id: string, members: Series[], middle: Middle = 'mean', spread: Spread = 'range'): Series {
  const lines = members.map(ends);
  const x = places(lines), n = x.length;
  const there: number[][] = Array.from({ length: n }, () => []);
  const low = new Float64Array(n).fill(NaN), high = new Float64Array(n).fill(NaN);
  const lowRank = new Int32Array(n), highRank = new Int32Array(n), extremes = spread === 'range';
  const reach = (i: number, least: number, most: number, who: number) => {
    if (Number.isFinite(least) && !(low[i] <= least)) { low[i] = least; lowRank[i] = who; }
    if (Number.isFinite(most) && !(high[i] >= most)) { high[i] = most; highRank[i] = who; }
  };
  members.forEach((s, who) => {
    between(lines[who], x, (i, y) => { there[i].push(y); if (extremes) reach(i, y, y, who); });
    if (!extremes) return;
    const [least, most] = [s.low ?? s.lo ?? s.y, s.high ?? s.hi ?? s.y];
    for (let i = 0; i < s.x.length; i++) {
      reach(at(x, loAt(s, i) ?? s.x[i]), least[i], Infinity, who);
      reach(at(x, hiAt(s, i) ?? s.x[i]), -Infinity, most[i], who);
    }
  });
  const y = Float64Array.from(there, (values) => (!values.length ? NaN : middle === 'median' ? medianOf(values) : values.reduce((sum, one) => sum + one, 0) / values.length));
  const around = spread === 'std' || spread === 'sem' || spread === 'ci';
  if (around) there.forEach((values, i) => { const d = spreadOf(values, spread); low[i] = y[i] - (d || 0); high[i] = y[i] + (d || 0); });
  return {
    run: id, key: members[0].key, axis: members[0].axis, raw: members.every((s) => s.raw), total: add(members, (s) => s.total), marked: add(members, (s) => s.marked),
    marks: members.flatMap((s) => s.marks), restarts: members.flatMap((s) => s.restarts), flags: members.flatMap((s) => s.flags ?? []), x, y,
    ...(spread !== 'none' && { low, high }), ...(extremes && { lowRank, highRank, who: members.map((s) => s.run) }), count: Int32Array.from(there, (values) => values.length),
  };
}

const add = (members: Series[], of: (s: Series) => number) => members.reduce((sum, s) => sum + of(s), 0);

function places(members: { x: ArrayLike<number> }[]): Float64Array {
  const all = new Set<number>();
  for (const s of members) for (let i = 0; i < s.x.length; i++) all.add(s.x[i]);
  const x = Float64Array.from(all).sort();
  if (x.length <= FINE) return x;
  const [from, to] = [x[0], x[x.length - 1]];
  return x.map((_, i) => from + ((to - from) * i) / (COARSE - 1)).slice(0, COARSE);
}

/** Call `tell` with the value of a series at each x within its range, interpolated linearly between points. */
function between(s: { x: ArrayLike<number>; y: ArrayLike<number> }, x: Float64Array, tell: (i: number, y: number) => void) {
  for (let i = 0, at = 0; i < x.length; i++) {
    if (!s.x.length || x[i] < s.x[0] || x[i] > s.x[s.x.length - 1]) continue;
    while (at + 1 < s.x.length && s.x[at + 1] <= x[i]) at++;
    const part = s.x[at] === x[i] || at + 1 === s.x.length ? 0 : (x[i] - s.x[at]) / (s.x[at + 1] - s.x[at]);
    const y = part ? s.y[at] + (s.y[at + 1] - s.y[at]) * part : s.y[at];
    if (Number.isFinite(y)) tell(i, y);
  }
}
