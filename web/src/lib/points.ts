// Points of a series, exactly as logged. A downsampled series has buckets with the first, last, lowest and highest point of each; a full
// series has one point per bucket, and only the columns x and y.

type Numbers = ArrayLike<number>;
export interface Buckets {
  x: Numbers; // x of the first value
  y: Numbers; // the last value, or the only one
  xLast?: Numbers; // x of the last value
  first?: Numbers; // the first value
  lo?: Numbers; // the extremes
  hi?: Numbers;
  loAt?: Numbers; // their offset from x; not every store has it
  hiAt?: Numbers;
}
export interface Point { x: number; y: number; i: number }

export const xLast = (s: Buckets, i: number) => (s.xLast ?? s.x)[i];
export const first = (s: Buckets, i: number) => (s.first ?? s.y)[i];
export const several = (s: Buckets, i: number) => xLast(s, i) > s.x[i] || (!!s.lo && !!s.hi && s.hi[i] > s.lo[i]);
export const loAt = (s: Buckets, i: number) => (s.loAt ? s.x[i] + s.loAt[i] : several(s, i) ? null : s.x[i]);
export const hiAt = (s: Buckets, i: number) => (s.hiAt ? s.x[i] + s.hiAt[i] : several(s, i) ? null : s.x[i]);

/** Return the index of the last x ≤ t (0 if there is none). */
export function at(x: Numbers, t: number): number {
  let a = 0, b = x.length - 1;
  while (a < b) {
    const m = (a + b + 1) >> 1;
    if (x[m] <= t) a = m; else b = m - 1;
  }
  return Math.max(0, a);
}

/** Return the logged point nearest to t among the first and last of each bucket, so that runs with the same steps return the same step. */
export function nearest(s: Buckets, t: number): Point | undefined {
  const n = s.x.length;
  if (!n) return undefined;
  const i = at(s.x, t);
  const end = xLast(s, i);
  const here: Point = end - t < t - s.x[i] ? { x: end, y: s.y[i], i } : { x: s.x[i], y: first(s, i), i };
  const far = Math.abs(here.x - t);
  return i + 1 < n && s.x[i + 1] - t < far ? { x: s.x[i + 1], y: first(s, i + 1), i: i + 1 } : here;
}

/** Return the first and last points of all buckets in order, to interpolate between. */
export function ends(s: Buckets): { x: Numbers; y: Numbers } {
  if (!s.xLast) return s;
  const x: number[] = [], y: number[] = [];
  for (let i = 0; i < s.x.length; i++) {
    if (several(s, i)) { x.push(s.x[i]); y.push(first(s, i)); }
    x.push(xLast(s, i));
    y.push(s.y[i]);
  }
  return { x, y };
}
