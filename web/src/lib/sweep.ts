// Sweep logic without DOM: numeric and categorical axes, brushes, a trend line, and a smooth surface over two config values.

export { SCALES, colourOf } from './ramp';

export type Value = number | string | null;
export interface Axis { name: string; log: boolean; texts: string[] | null; lo: number; hi: number; missing: boolean }

/** Return an axis for some values: linear or log for numbers, evenly spaced in natural order for strings. */
export function axisOf(name: string, values: Value[], log = false): Axis {
  let lo = Infinity, hi = -Infinity, words = false, missing = false;
  for (const one of values) {
    if (one === null || one !== one) { missing = true; continue; }
    if (typeof one !== 'number') words = true;
    else if (Number.isFinite(one) && (!log || one > 0)) { if (one < lo) lo = one; if (one > hi) hi = one; } else missing = true;
  }
  if (words) {
    const texts = [...new Set(values.filter((one) => one !== null).map(String))].sort((a, b) => a.localeCompare(b, 'en', { numeric: true }));
    return { name, log: false, texts, lo: 0, hi: texts.length - 1, missing: values.includes(null) };
  }
  return { name, log, texts: null, lo, hi, missing };
}

/** Return whether numbers span so many powers of ten that a linear axis would squeeze most of them into its lower end. */
export function spreads(values: Value[]): boolean {
  const found = values.filter((one): one is number => typeof one === 'number' && Number.isFinite(one)).sort((a, b) => a - b), n = found.length;
  return n > 2 && found[0] > 0 && found[n - 1] / found[0] >= 30 && found[n >> 1] - found[0] < 0.2 * (found[n - 1] - found[0]);
}
/** Return whether an axis is logarithmic: as chosen (`lr` or `-lr` in the list), or else if its config values span powers of ten. */
export const logOf = (chosen: string[], axis: string, name: string, values: () => Value[]) => chosen.includes(axis) || (!chosen.includes(`-${axis}`) && name.startsWith('config:') && spreads(values()));
export const turnLog = (chosen: string[], axis: string, log: boolean) => [...chosen.filter((one) => one !== axis && one !== `-${axis}`), log ? axis : `-${axis}`];

/** Return the position of a value on its axis, from 0 to 1; NaN if it has none. */
export function placeOf(axis: Axis, value: Value): number {
  if (value === null) return NaN;
  if (axis.texts) return axis.texts.length > 1 ? axis.texts.indexOf(String(value)) / axis.hi : 0.5;
  const n = value as number;
  if (!Number.isFinite(n) || (axis.log && n <= 0)) return NaN;
  const at = axis.log ? (Math.log(n) - Math.log(axis.lo)) / (Math.log(axis.hi) - Math.log(axis.lo)) : (n - axis.lo) / (axis.hi - axis.lo);
  return Number.isFinite(at) ? at : 0.5;
}

/** Return the value at a position on an axis; for strings, their index. */
export function valueAt(axis: Axis, place: number): number {
  if (axis.texts) return place * axis.hi;
  return axis.log ? Math.exp(Math.log(axis.lo) + place * (Math.log(axis.hi) - Math.log(axis.lo))) : axis.lo + place * (axis.hi - axis.lo);
}

/** Parse the brushes of a URL: `config:lr=0.001..0.01`. */
export function readBrushes(list: string[]): Map<string, [number, number]> {
  const found = new Map<string, [number, number]>();
  for (const one of list) {
    const at = one.lastIndexOf('='), [lo, hi] = one.slice(at + 1).split('..').map(Number);
    if (at > 0 && Number.isFinite(lo) && Number.isFinite(hi) && lo <= hi) found.set(one.slice(0, at), [lo, hi]);
  }
  return found;
}
export const writeBrush = (name: string, [lo, hi]: [number, number]) => `${name}=${Number(lo.toPrecision(6))}..${Number(hi.toPrecision(6))}`;

/** Return whether a value is inside a brush of its axis; for strings, the brush is a range of indexes. */
export function inside(axis: Axis, value: Value, [lo, hi]: [number, number]): boolean {
  if (value === null || value !== value) return false;
  const at = axis.texts ? axis.texts.indexOf(String(value)) : (value as number);
  return at >= lo && at <= hi;
}

/** Return the brushes as a filter; null if a name cannot be written in the filter language. */
export function asFilter(axes: Axis[], brushes: Map<string, [number, number]>): string | null {
  const terms: string[] = [];
  for (const axis of axes) {
    const brush = brushes.get(axis.name);
    if (!brush) continue;
    const [kind, key] = [axis.name.slice(0, axis.name.indexOf(':')), axis.name.slice(axis.name.indexOf(':') + 1)];
    const name = kind === 'config' ? `config.${key}` : kind === 'metric' ? `summary.${key}` : `${key}.${kind}`;
    if (/[\s()<>=!~"']/.test(name)) return null;
    if (!axis.texts) { terms.push(`${name}>=${Number(brush[0].toPrecision(6))} and ${name}<=${Number(brush[1].toPrecision(6))}`); continue; }
    const words = axis.texts.filter((_, i) => i >= brush[0] && i <= brush[1]);
    if (!words.length || words.some((one) => /["\\]/.test(one))) return null;
    terms.push(words.length > 1 ? `(${words.map((one) => `${name}="${one}"`).join(' or ')})` : `${name}="${words[0]}"`);
  }
  return terms.join(' and ');
}

/** Return the least-squares line on the axes as drawn, and Spearman's rank correlation. */
export function trend(xs: number[], ys: number[], logX: boolean, logY: boolean): { at: (x: number) => number; rho: number } | null {
  const fx = logX ? Math.log : (n: number) => n, fy = logY ? Math.log : (n: number) => n, n = xs.length;
  if (n < 3) return null;
  let sx = 0, sy = 0, sxx = 0, sxy = 0;
  for (let i = 0; i < n; i++) { sx += fx(xs[i]); sy += fy(ys[i]); }
  const mx = sx / n, my = sy / n;
  for (let i = 0; i < n; i++) { const dx = fx(xs[i]) - mx; sxx += dx * dx; sxy += dx * (fy(ys[i]) - my); }
  if (!(sxx > 0)) return null;
  const slope = sxy / sxx;
  return { at: (x) => { const y = my + slope * (fx(x) - mx); return logY ? Math.exp(y) : y; }, rho: spearman(xs, ys) };
}

export function spearman(xs: number[], ys: number[]): number {
  const [a, b] = [ranks(xs), ranks(ys)], mean = (xs.length - 1) / 2;
  let ab = 0, aa = 0, bb = 0;
  for (let i = 0; i < a.length; i++) { const [p, q] = [a[i] - mean, b[i] - mean]; ab += p * q; aa += p * p; bb += q * q; }
  return aa && bb ? ab / Math.sqrt(aa * bb) : NaN;
}
function ranks(values: number[]): Float64Array {
  const order = Uint32Array.from(values.keys()).sort((i, j) => values[i] - values[j]), found = new Float64Array(values.length);
  for (let i = 0; i < order.length;) {
    let end = i;
    while (end < order.length && values[order[end]] === values[order[i]]) end++;
    for (let k = i; k < end; k++) found[order[k]] = (i + end - 1) / 2;
    i = end;
  }
  return found;
}

/** Return a surface over the unit square: at each cell, the distance-weighted mean of nearby runs; NaN far from all of them. */
export function surface(x: number[], y: number[], z: number[], wide: number, high: number): Float64Array {
  const n = x.length, near = Math.min(0.2, Math.max(0.05, 0.3 * n ** (-1 / 6))), found = new Float64Array(wide * high).fill(NaN);
  const every = Math.ceil(n / 2000);
  for (let j = 0; j < high; j++) for (let i = 0; i < wide; i++) {
    const [px, py] = [i / (wide - 1), j / (high - 1)];
    let sum = 0, all = 0, best = Infinity;
    for (let k = 0; k < n; k += every) {
      const d = ((x[k] - px) ** 2 + (y[k] - py) ** 2) / (near * near);
      if (d < best) best = d;
      if (d < 16) { const weight = Math.exp(-d / 2); sum += weight * z[k]; all += weight; }
    }
    if (best < 5) found[j * wide + i] = sum / all;
  }
  return found;
}

/** An index of points by the cells of a coarse grid: finding one among a hundred thousand checks only a few. */
export class Near {
  #cells = new Map<number, number[]>();
  constructor(readonly x: Float32Array, readonly y: Float32Array, readonly size: number) {
    for (let i = 0; i < x.length; i++) {
      const cell = this.#cell(x[i], y[i]), there = this.#cells.get(cell);
      if (there) there.push(i); else this.#cells.set(cell, [i]);
    }
  }
  #cell(x: number, y: number) { return Math.floor(x / this.size) * 65_536 + Math.floor(y / this.size); }
  /** Return the index of the nearest point within a cell's width; -1 if there is none. */
  find(x: number, y: number): number {
    let best = this.size * this.size, hit = -1;
    for (const dx of [-1, 0, 1]) for (const dy of [-1, 0, 1]) for (const i of this.#cells.get(this.#cell(x + dx * this.size, y + dy * this.size)) ?? []) {
      const far = (this.x[i] - x) ** 2 + (this.y[i] - y) ** 2;
      if (far < best) { best = far; hit = i; }
    }
    return hit;
  }
}
