// Builds lines beyond the plain ones, loaded on demand: groups, smoothing, charts of several metrics, a y axis without outliers, and
// color scales.
import type { Line } from './chart';
export { united, type Middle, type Spread } from './group';
export { colourOf, SCALES } from './ramp';
export { smoothed } from './smooth';

export interface Plot { id: string; keys: string[] }

/** Compile a rule: a regular expression for whole metric names, such as `train/loss|val/loss`; null if it is invalid. */
export function rule(text: string): RegExp | null {
  if (text.length > 1000) return null;
  try { return new RegExp(`^(?:${text})$`); } catch { return null; }
}
export const literal = (key: string) => key.replace(/[\\^$.*+?()[\]{}|]/g, '\\$&');

/** Return the metrics that match a rule. */
export function matching(text: string, keys: string[]): string[] {
  const found = rule(text);
  return found ? keys.filter((key) => found.test(key)) : [];
}

const TRAIN = /(^|[/_.])(train|training)(?=[/_.])/, HELD_OUT = ['val', 'valid', 'validation', 'eval', 'test'];
/** Return the held-out counterparts of a metric: `val/loss` for `train/loss`, `val_loss` for `loss`. */
export function partners(key: string, known: Set<string>): string[] {
  const names = TRAIN.test(key) ? HELD_OUT.map((word) => key.replace(TRAIN, `$1${word}`)) : /[/]/.test(key) || HELD_OUT.some((word) => key.startsWith(`${word}_`)) ? [] : HELD_OUT.map((word) => `${word}_${key}`);
  return names.filter((name) => known.has(name));
}

/** Split metrics into charts. Metrics that match a rule, or that are a pair, share a chart at the position of the first. */
export function plots(keys: string[], mix: string[], pairs: boolean): Plot[] {
  const taken = new Map<string, Plot>(), known = new Set(keys);
  const take = (id: string, list: string[]) => { const plot = { id, keys: list }; for (const key of list) taken.set(key, plot); };
  for (const text of mix) {
    const list = matching(text, keys).filter((key) => !taken.has(key));
    if (list.length) take(text, list);
  }
  if (pairs) for (const key of keys) {
    const list = taken.has(key) ? [] : partners(key, known).filter((name) => !taken.has(name));
    if (list.length) take([key, ...list].map(literal).join('|'), [key, ...list]);
  }
  const found = new Set<Plot>();
  for (const key of keys) found.add(taken.get(key) ?? { id: key, keys: [key] });
  return [...found];
}

/** Return the range of most values: from the 2nd to the 98th percentile, plus a tenth on each side. */
export function trimmed(lines: Line[], logY: boolean, [from, to]: [number, number]): [number, number] | null {
  const values: number[] = [], every = Math.max(1, Math.floor(lines.reduce((sum, line) => sum + line.x.length, 0) / 50_000));
  for (const line of lines) for (let i = 0; i < line.x.length; i += every) {
    const y = (line.smooth ?? line.y)[i];
    if (Number.isFinite(y) && !(logY && y <= 0) && line.x[i] >= from && line.x[i] <= to) values.push(y);
  }
  values.sort((a, b) => a - b);
  const n = values.length - 1, low = values[Math.floor(n * 0.02)], high = values[Math.ceil(n * 0.98)];
  if (!(high > low)) return null;
  const room = (high - low) * 0.1;
  return logY ? [low / (high / low) ** 0.1, high * (high / low) ** 0.1] : [low - room, high + room];
}
