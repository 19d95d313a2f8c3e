// The run table's columns without DOM: labels, sort order, layout, and group aggregates.
import { number } from './format';
import { medianOf, spreadOf, type Spread } from './group';

/** The statistics of a metric that can be columns, with their labels. */
export const STATS: Record<string, string> = { min: 'min', max: 'max', mean: 'mean', last: 'last', first: 'first', count: 'points', min_step: 'step of min', max_step: 'step of max' };
const LOW = /(^|[^a-z])(loss|error|err|perplexity|ppl|mae|mse|rmse|wer|cer|fid|nll|regret|bpb|bpc|latency)([^a-z]|$)|loss|perplexity/i;
const HIGH = /(^|[^a-z])(acc|accuracy|f1|auc|auroc|map|bleu|rouge\w*|reward|rewards|return|score|r2|precision|recall|iou|miou|dice|psnr|ssim|mfu|throughput|exact_match|win_rate|pass@\d+)([^a-z]|$)|accuracy/i;

export interface Part { kind: 'fact' | 'config' | 'metric' | 'stat'; key: string; stat: string }

/** Parse a column name: `status`, `config:lr`, `metric:loss`, `min:loss`. */
export function part(name: string): Part {
  const at = name.indexOf(':'), kind = name.slice(0, Math.max(0, at)), key = name.slice(at + 1);
  if (at < 0) return { kind: 'fact', key: name, stat: '' };
  return kind === 'config' || kind === 'metric' ? { kind, key, stat: '' } : { kind: 'stat', key, stat: kind };
}

/** Return whether low or high values of a metric are better: as set by define_metric, or else as its name suggests. */
export function goal(key: string, goals: Record<string, string>): 'min' | 'max' | '' {
  const told = goals[key];
  if (told === 'min' || told === 'max') return told;
  return LOW.test(key) ? 'min' : HIGH.test(key) ? 'max' : '';
}

export function label(name: string, goals: Record<string, string> = {}): string {
  const { kind, key, stat } = part(name);
  if (kind !== 'stat') return key;
  const best = goal(key, goals);
  return `${key} · ${best && stat === `${best}_step` ? 'best step' : (STATS[stat] ?? stat)}`;
}

/** Return the sort order of the first click: the best first, such as the lowest loss, the highest accuracy or the newest run. */
export function firstOrder(name: string, goals: Record<string, string>): string {
  const { kind, key, stat } = part(name);
  if (kind === 'fact') return ['created', 'duration', 'ranks'].includes(name) ? `-${name}` : name;
  if (kind === 'config' || stat.endsWith('_step') || stat === 'count') return name;
  return goal(key, goals) === 'max' ? `-${name}` : name;
}

/** Return the sort order after the next click on a column header: first, reversed, none. */
export function nextOrder(sort: string, name: string, goals: Record<string, string>): string {
  const first = firstOrder(name, goals), other = first.startsWith('-') ? name : `-${name}`;
  return sort === first ? other : sort === other ? '' : first;
}

/** Return the offset of each column, and the total width at the end. */
export function places(widths: number[]): number[] {
  const found = [0];
  for (const wide of widths) found.push(found[found.length - 1] + wide);
  return found;
}

/** Return the columns between two offsets: [first, end). */
export function between(starts: number[], left: number, right: number): [number, number] {
  const count = starts.length - 1;
  let first = 0, end = 0;
  for (let low = 0, high = count; low < high;) { const mid = (low + high) >> 1; if (starts[mid + 1] <= left) low = mid + 1; else high = mid; first = low; }
  for (let low = first, high = count; low < high;) { const mid = (low + high) >> 1; if (starts[mid] < right) low = mid + 1; else high = mid; end = low; }
  return count ? [Math.min(first, count - 1), Math.max(end, Math.min(first + 1, count))] : [0, 0];
}

/** Move a name in a list to the position of another. */
export function put(list: string[], name: string, at: string): string[] {
  const from = list.indexOf(name), to = list.indexOf(at);
  if (from < 0 || to < 0 || from === to) return list;
  const rest = list.filter((one) => one !== name);
  rest.splice(rest.indexOf(at) + (from < to ? 1 : 0), 0, name);
  return rest;
}

export const AGGREGATES: [string, string][] = [['std', 'mean ± std'], ['sem', 'mean ± std error'], ['ci', 'mean ± 95% CI'], ['median', 'median'], ['range', 'min – max'], ['count', 'number of runs']];
/** Return the aggregate of a group's values; runs without a number are left out. */
export function aggregate(values: (number | string | null)[], how: string): string {
  const found = values.filter((one): one is number => typeof one === 'number' && Number.isFinite(one));
  const n = found.length;
  if (!n) return '';
  if (how === 'count') return String(n);
  if (how === 'median') return number(medianOf(found));
  if (how === 'range') { const [low, high] = extent(found); return low === high ? number(low) : `${number(low)} – ${number(high)}`; }
  const mean = found.reduce((sum, one) => sum + one, 0) / n;
  if (n < 2) return number(mean);
  const spread = spreadOf(found, how as Spread);
  if (spread === 0) return number(mean);
  const digits = spread > 0 && Number.isFinite(spread) ? Math.min(20, Math.max(0, 1 - Math.floor(Math.log10(spread)))) : 20; // no more digits of the mean than its spread justifies
  return `${number(Number(mean.toFixed(digits)))} ± ${number(Number(spread.toPrecision(2)))}`;
}

/** Return the number by which a group is sorted: its median or mean; null if it has no numbers. */
export function middleOf(values: (number | string | null)[], how: string): number | null {
  const found = values.filter((one): one is number => typeof one === 'number' && Number.isFinite(one));
  return !found.length ? null : how === 'median' ? medianOf(found) : found.reduce((sum, one) => sum + one, 0) / found.length;
}

function extent(values: number[]): [number, number] {
  let low = Infinity, high = -Infinity;
  for (const one of values) { if (one < low) low = one; if (one > high) high = one; }
  return [low, high];
}

/** Return the color range of a column without the outer 2%, so that one outlier does not make all other cells look alike. */
export function shades(values: (number | string | null)[]): [number, number] | null {
  const sorted = values.filter((one): one is number => typeof one === 'number' && Number.isFinite(one)).sort((a, b) => a - b);
  if (sorted.length < 2) return null;
  const out = Math.floor(sorted.length / 50), low = sorted[out], high = sorted[sorted.length - 1 - out];
  return high > low ? [low, high] : null;
}

/** Return the color intensity of a cell, from 0 to 1: strongest for the best value, or for the highest if better is unknown. */
export function shade(value: number | string | null, range: [number, number] | null, best: 'min' | 'max' | ''): number {
  if (!range || typeof value !== 'number' || Number.isNaN(value)) return 0;
  const at = Math.min(1, Math.max(0, (value - range[0]) / (range[1] - range[0])));
  return best === 'min' ? 1 - at : at;
}

/** Parse the conditions of a URL on columns of a logged table: `["reward",">","0.5"]`. Invalid ones are left out. */
export function conditions(list: string[]): [string, string, string][] {
  return list.flatMap((one) => {
    try {
      const found: unknown = JSON.parse(one);
      return Array.isArray(found) && found.length === 3 && found.every((part) => typeof part === 'string') ? [found as [string, string, string]] : [];
    } catch { return []; }
  });
}

/** Return a table as CSV. Strings that a spreadsheet would run as formulas get a leading apostrophe. */
export function csv(head: string[], rows: (number | string | null)[][]): string {
  const cell = (value: number | string | null) => {
    const text = value === null ? '' : String(value), safe = typeof value === 'string' && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  return [head, ...rows].map((row) => row.map(cell).join(',')).join('\r\n') + '\r\n';
}
