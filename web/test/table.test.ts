import { describe, expect, it } from 'vitest';
import { aggregate, between, conditions, csv, firstOrder, goal, label, nextOrder, places, put, shade, shades } from '../src/lib/table';

describe('columns', () => {
  it('know which way is better, from define_metric first', () => {
    expect([goal('val/loss', {}), goal('val/acc', {}), goal('eval/f1', {}), goal('lr', {}), goal('mapping', {})]).toEqual(['min', 'max', 'max', '', '']);
    expect(goal('val/loss', { 'val/loss': 'max' })).toBe('max');
    expect(goal('constructor', {})).toBe('');
  });
  it('sort best first, then the other way, then not at all', () => {
    expect([firstOrder('metric:loss', {}), firstOrder('max:acc', {}), firstOrder('config:lr', {}), firstOrder('created', {}), firstOrder('max_step:acc', {})])
      .toEqual(['metric:loss', '-max:acc', 'config:lr', '-created', 'max_step:acc']);
    expect(['', '-metric:acc', 'metric:acc'].map((sort) => nextOrder(sort, 'metric:acc', {}))).toEqual(['-metric:acc', 'metric:acc', '']);
  });
  it('are called by what they hold', () => {
    expect([label('config:lr'), label('min:loss'), label('min_step:loss'), label('max_step:loss'), label('a')]).toEqual(['lr', 'loss · min', 'loss · best step', 'loss · step of max', 'a']);
  });
  it('that lie in view are found at any width', () => {
    const starts = places([100, 50, 200, 10]);
    expect(starts).toEqual([0, 100, 150, 350, 360]);
    expect([between(starts, 0, 100), between(starts, 100, 151), between(starts, 99, 360), between(starts, 900, 1000), between([0], 0, 10)]).toEqual([[0, 1], [1, 3], [0, 4], [3, 4], [0, 0]]);
  });
  it('move to the place of another', () => {
    expect([put(['a', 'b', 'c'], 'a', 'c'), put(['a', 'b', 'c'], 'c', 'a'), put(['a', 'b'], 'a', 'x')]).toEqual([['b', 'c', 'a'], ['c', 'a', 'b'], ['a', 'b']]);
  });
});

describe('groups', () => {
  it('are summarised without runs that have no number', () => {
    const values = [1, 2, 3, null, NaN, 'x'];
    expect(['std', 'sem', 'ci', 'median', 'range'].map((how) => aggregate(values, how))).toEqual(['2 ± 1', '2 ± 0.58', '2 ± 2.5', '2', '1 – 3']);
    expect([aggregate([], 'std'), aggregate([4], 'ci'), aggregate([1, 2], 'median')]).toEqual(['', '4', '1.5']);
  });
});

describe('colours', () => {
  it('are strongest where a value is best, and an outlier does not take them all', () => {
    const range = shades([...Array(100).keys(), 1e9]);
    expect(range).toEqual([2, 98]);
    expect([shade(2, range, 'min'), shade(98, range, 'max'), shade(50, range, ''), shade(1e9, range, 'min'), shade(null, range, 'min'), shade(NaN, range, '')]).toEqual([1, 1, 0.5, 0, 0, 0]);
    expect(shades([3, 3, null])).toBeNull();
  });
});

describe('conditions', () => {
  it('that an address holds wrongly are left out', () => {
    expect(conditions(['["a","<","1"]', 'no', '[1,2,3]', '["a"]', 'null'])).toEqual([['a', '<', '1']]);
  });
});

describe('csv', () => {
  it('quotes, and keeps formulas from a spreadsheet', () => {
    expect(csv(['a', 'b'], [['x,y', '=1+1'], [-2, null], ['say "hi"', '-x']])).toBe('a,b\r\n"x,y",\'=1+1\r\n-2,\r\n"say ""hi""",\'-x\r\n');
  });
});
