import { describe, expect, it } from 'vitest';
import { boxesOf, classesOf, masksOf, polygonsOf } from '../src/lib/overlay';

describe('boxes', () => {
  it('are read in every shape people have them in', () => {
    const whole = { x: 10, y: 20, w: 30, h: 40 };
    const shapes = [
      { box: [10, 20, 40, 60], label: 'car', score: 0.9 }, { bbox: [10, 20, 30, 40], label: 'car', score: 0.9 }, { x: 10, y: 20, width: 30, height: 40, class: 'car', confidence: 0.9 },
      { position: { minX: 0.1, minY: 0.1, maxX: 0.4, maxY: 0.3 }, label: 'car', scores: { acc: 0.9 } }, { position: { middle: [25, 40], width: 30, height: 40 }, domain: 'pixel', label: 'car', score: 0.9 },
    ];
    expect(boxesOf(shapes, 100, 200)).toEqual(shapes.map(() => ({ ...whole, w: expect.closeTo(30), h: expect.closeTo(40), label: 'car', score: 0.9 })));
    const sets = { predictions: { box_data: [{ position: { minX: 0, minY: 0, maxX: 1, maxY: 1 }, class_id: 2 }], class_labels: { 2: 'dog' } } };
    expect(boxesOf(sets, 10, 20)).toEqual([{ x: 0, y: 0, w: 10, h: 20, label: 'dog', score: null }]);
  });
  it('that make no sense are left out', () => {
    expect(boxesOf([{ box: [1, 2, 'x', 4] }, null, 3, { box: [1, NaN, 2, 3] }, {}], 10, 10)).toEqual([]);
    expect([boxesOf(undefined, 1, 1), boxesOf('no', 1, 1)]).toEqual([[], []]);
  });
});

describe('masks', () => {
  it('are rows of classes, or runs down the columns', () => {
    const [rows, runs] = masksOf([{ data: [[0, 1], [2, 0]], labels: { 1: 'road' } }, { size: [2, 2], counts: [1, 2, 1], label: 'sky' }]);
    expect([[...rows.data], rows.labels]).toEqual([[0, 1, 2, 0], { 1: 'road' }]);
    expect([[...runs.data], runs.labels]).toEqual([[0, 1, 1, 0], { 1: 'sky' }]);
    expect(masksOf({ truth: { mask_data: [[1]], class_labels: { 1: 'a' } } })[0].labels).toEqual({ 1: 'a' });
    expect(masksOf([{ size: [1e9, 1e9], counts: [1] }, { size: [2, 2], counts: [-1] }, { data: [] }])).toEqual([]);
    expect(classesOf([], [rows, runs], [])).toEqual(['road', '2', 'sky']);
  });
  it('are outlines, too', () => {
    expect(polygonsOf([{ polygon: [[0, 0], [1, 0], [1, 1]], label: 'x' }], 10, 20)).toEqual([{ label: 'x', points: [[0, 0], [10, 0], [10, 20]] }]);
    expect(polygonsOf([{ segmentation: [[5, 5, 9, 5, 9, 9]] }], 10, 20)).toEqual([{ label: '', points: [[5, 5], [9, 5], [9, 9]] }]);
  });
});
