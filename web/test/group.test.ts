// The line of a group: the mean of its runs, and a band that misses no extreme.
import { describe, expect, it } from 'vitest';
import type { Series } from '../src/lib/api';
import { united } from '../src/lib/group';

const made = (run: string, x: number[], y: number[], more: object = {}) =>
  ({ run, key: 'k', axis: 'step', raw: true, total: x.length, marked: 0, marks: [], restarts: [], x: Float64Array.from(x), y: Float64Array.from(y), ...more }) as Series;

describe('a group', () => {
  it('is the mean over the runs that reach a place, with lowest and highest named', () => {
    const s = united('g', [made('a', [0, 1, 2], [1, 2, 3]), made('b', [0, 1], [3, 6])]);
    expect([...s.x]).toEqual([0, 1, 2]);
    expect([...s.y]).toEqual([2, 4, 3]);
    expect([...s.low!]).toEqual([1, 2, 3]);
    expect([...s.high!]).toEqual([3, 6, 3]);
    expect([...s.highRank!].map((i) => s.who![i])).toEqual(['b', 'b', 'a']);
    expect(s.total).toBe(5);
  });
  it('takes the line between points where runs log at other steps, and nothing across NaN', () => {
    const s = united('g', [made('a', [0, 4], [0, 4]), made('b', [2], [10])]);
    expect([...s.y]).toEqual([0, 6, 4]);
    expect([...united('g', [made('a', [0, 2], [0, NaN]), made('b', [1], [5])]).y]).toEqual([0, 5, NaN]);
  });
  it('keeps the extremes of buckets, and of more places than are drawn', () => {
    const bucket = made('a', [0, 1], [1, 1], { lo: [-9, 0], hi: [1, 7], raw: false });
    const s = united('g', [bucket, made('b', [0, 1], [2, 2])]);
    expect([[...s.low!], [...s.high!]]).toEqual([[-9, 0], [2, 7]]);
    const far = Array.from({ length: 5000 }, (_, i) => i);
    const many = united('g', [made('a', far, far.map((i) => (i === 3333 ? 1e9 : 0))), made('b', [0, 4999], [-5, 0])]);
    expect(many.x.length).toBe(1000);
    expect([Math.max(...many.high!), Math.min(...many.low!)]).toEqual([1e9, -5]);
  });
});
