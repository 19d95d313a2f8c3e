// Charts of several metrics, group statistics, and a y axis without outliers.
import { describe, expect, it } from 'vitest';
import type { Series } from '../src/lib/api';
import type { Line } from '../src/lib/chart';
import { matching, plots, rule, trimmed, united } from '../src/lib/shape';
import { centred } from '../src/lib/smooth';

const KEYS = ['train/loss', 'train/lr', 'val/loss', 'loss', 'val_loss', 'a.b', 'axb'];
const ids = (found: { id: string; keys: string[] }[]) => found.map((one) => one.keys.join('+'));

describe('charts of several metrics', () => {
  it('are those whose whole name a rule matches, where the first of them was', () => {
    expect(matching('train/loss|val/loss', KEYS)).toEqual(['train/loss', 'val/loss']);
    expect(matching('.*loss', KEYS)).toEqual(['train/loss', 'val/loss', 'loss', 'val_loss']);
    expect(matching('(', KEYS)).toEqual([]);
    expect(rule('x'.repeat(2000))).toBe(null);
    expect(ids(plots(KEYS, ['.*/l.*'], false))).toEqual(['train/loss+train/lr+val/loss', 'loss', 'val_loss', 'a.b', 'axb']);
    expect(ids(plots(KEYS, ['train/loss|a\\.b', '.*loss'], false))).toEqual(['train/loss+a.b', 'train/lr', 'val/loss+loss+val_loss', 'axb']);
  });
  it('are pairs of training and held-out data', () => {
    expect(ids(plots(KEYS, [], true))).toEqual(['train/loss+val/loss', 'train/lr', 'loss+val_loss', 'a.b', 'axb']);
    expect(ids(plots(['train_acc', 'eval_acc', 'val_acc', 'train/x', 'test/y'], [], true))).toEqual(['train_acc+val_acc+eval_acc', 'train/x', 'test/y']);
    expect(ids(plots(KEYS, [], false))).toEqual(KEYS);
  });
});

describe('a group', () => {
  const made = (run: string, y: number[]) => ({ run, key: 'k', axis: 'step', raw: true, total: y.length, marked: 0, marks: [], restarts: [], x: Float64Array.from(y, (_, i) => i), y: Float64Array.from(y) }) as Series;
  const runs = [made('a', [1, 5]), made('b', [2, 6]), made('c', [6, 10]), made('d', [3])];
  const at = (s: Series, i: number) => [s.y[i], s.low?.[i], s.high?.[i], s.count![i]].map((n) => (n === undefined ? n : Number(n.toFixed(4))));
  it('is its mean or median with the spread that was asked for', () => {
    expect(at(united('g', runs, 'mean', 'std'), 0)).toEqual([3, 0.8398, 5.1602, 4]);
    expect(at(united('g', runs, 'mean', 'sem'), 0)).toEqual([3, 1.9199, 4.0801, 4]);
    expect(at(united('g', runs, 'mean', 'ci'), 0)).toEqual([3, -0.437, 6.437, 4]); // t for three degrees of freedom: 3.182
    expect(at(united('g', runs, 'median', 'range'), 0)).toEqual([2.5, 1, 6, 4]);
    expect(at(united('g', runs, 'median', 'none'), 1)).toEqual([6, undefined, undefined, 3]);
  });
});

describe('a running mean', () => {
  it('follows a line to its ends, and does not lag', () => {
    centred(Float64Array.from({ length: 50 }, (_, i) => 3 * i + 1), 0.8, true).forEach((v, i) => expect(v).toBeCloseTo(3 * i + 1, 9));
  });
  it('differs from the bell', () => {
    const y = Float64Array.from({ length: 100 }, (_, i) => Number(i === 50));
    expect(centred(y, 0.9, true)[50]).toBeCloseTo(1 / 31, 6); // 15 points on either side
    expect(centred(y, 0.9)[50]).toBeGreaterThan(1 / 31);
  });
});

describe('an axis without outliers', () => {
  it('spans what most values do', () => {
    const line = { x: Float64Array.from({ length: 1000 }, (_, i) => i), y: Float64Array.from({ length: 1000 }, (_, i) => (i === 500 ? 1e6 : i / 1000)) } as unknown as Line;
    const [low, high] = trimmed([line], false, [0, 999])!;
    expect(low).toBeCloseTo(-0.077, 2);
    expect(high).toBeCloseTo(1.077, 2);
    expect(trimmed([line], false, [5, 5])).toBe(null);
  });
});
