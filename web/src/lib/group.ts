// Runs of one group as one series: their mean, and the band between the lowest and the highest, with whose they are.
import type { Series } from './api';
import { at, ends, hiAt, loAt } from './points';

const FINE = 2000, COARSE = 1000; // up to so many places each x counts; of more, evenly spaced ones do

/** Bring series together. The mean is over the runs that reach a place, between their points; the band misses no extreme. */
export function united(id: string, members: Series[]): Series {
  const lines = members.map(ends);
  const x = places(lines);
  const sum = new Float64Array(x.length), count = new Int32Array(x.length);
  const low = new Float64Array(x.length).fill(NaN), high = new Float64Array(x.length).fill(NaN);
  const lowRank = new Int32Array(x.length), highRank = new Int32Array(x.length);
  const reach = (i: number, least: number, most: number, who: number) => {
    if (Number.isFinite(least) && !(low[i] <= least)) { low[i] = least; lowRank[i] = who; }
    if (Number.isFinite(most) && !(high[i] >= most)) { high[i] = most; highRank[i] = who; }
  };
  members.forEach((s, who) => {
    between(lines[who], x, (i, y) => { sum[i] += y; count[i]++; reach(i, y, y, who); });
    const [least, most] = [s.low ?? s.lo ?? s.y, s.high ?? s.hi ?? s.y];
    for (let i = 0; i < s.x.length; i++) {
      reach(at(x, loAt(s, i) ?? s.x[i]), least[i], Infinity, who);
      reach(at(x, hiAt(s, i) ?? s.x[i]), -Infinity, most[i], who);
    }
  });
  const y = sum.map((total, i) => (count[i] ? total / count[i] : NaN));
  return {
    run: id, key: members[0].key, axis: members[0].axis, raw: members.every((s) => s.raw), total: add(members, (s) => s.total), marked: add(members, (s) => s.marked),
    marks: members.flatMap((s) => s.marks), restarts: members.flatMap((s) => s.restarts), flags: members.flatMap((s) => s.flags ?? []), x, y, low, high, lowRank, highRank, who: members.map((s) => s.run),
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

/** Tell what a series says at each place within its range: the point there, or the straight line between its neighbours. */
function between(s: { x: ArrayLike<number>; y: ArrayLike<number> }, x: Float64Array, tell: (i: number, y: number) => void) {
  for (let i = 0, at = 0; i < x.length; i++) {
    if (!s.x.length || x[i] < s.x[0] || x[i] > s.x[s.x.length - 1]) continue;
    while (at + 1 < s.x.length && s.x[at + 1] <= x[i]) at++;
    const part = s.x[at] === x[i] || at + 1 === s.x.length ? 0 : (x[i] - s.x[at]) / (s.x[at + 1] - s.x[at]);
    const y = part ? s.y[at] + (s.y[at + 1] - s.y[at]) * part : s.y[at];
    if (Number.isFinite(y)) tell(i, y);
  }
}
