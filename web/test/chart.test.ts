// Charts: extents, gaps, and smoothing.
import { describe, expect, it } from 'vitest';
import { beside, draw, extent, stretches, type Line } from '../src/lib/chart';
import { at, nearest } from '../src/lib/points';
import { labelled, scales, ticks } from '../src/lib/scale';
import { centred, exponential, smoothed } from '../src/lib/smooth';

const line = (x: number[], y: number[], more: Partial<Line> = {}): Line => ({
  run: 'r', colour: '#000', dash: [], width: 1, alpha: 1, x, y, raw: true, marks: [], restarts: [], ...more,
});

describe('the box beside the pointer', () => {
  const frame = { w: 400, h: 200, dpr: 1 };
  const falling = line([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 8, 3, 1, 0, 0, 0, 0, 0, 0]), rising = line(falling.x as number[], [0, 6, 8, 9, 9, 9, 9, 9, 9, 9]);
  const s = scales(frame, extent([falling], false, false, null)!);
  it('stands where it hides the fewest points', () => {
    expect(beside(100, [falling], frame, s, 120, 80)).toMatchObject({ from: 112, below: false });
    expect(beside(100, [rising], frame, s, 120, 80)).toMatchObject({ from: 112, below: true });
  });
  it('stays inside, on the side that has room', () => {
    expect(beside(380, [falling], frame, s, 120, 80)).toMatchObject({ from: 248, below: false });
    expect(beside(300, [], frame, s, 350, 80).from).toBe(0);
    expect(beside(100, [], frame, s, 350, 80).from).toBe(50);
  });
});

describe('extent', () => {
  it('includes the extremes of buckets and of ranks', () => {
    const view = extent([line([0, 1], [5, 6], { lo: [1, 5], hi: [5, 20], low: [-3, 0], high: [9, 9] })], false, false, null)!;
    expect(view.y0).toBeLessThanOrEqual(-3);
    expect(view.y1).toBeGreaterThanOrEqual(20);
  });
  it('passes over what a log axis cannot hold, and over NaN and infinities', () => {
    const view = extent([line([0, 1, 2, 3, 4], [-1, 0, NaN, Infinity, 8])], true, false, null)!;
    expect(view.y0).toBeGreaterThan(0);
    expect(view.y1).toBeLessThan(20);
  });
  it('has room for one point and for nothing but NaN, and none for nothing', () => {
    const one = extent([line([3], [7])], false, false, null)!;
    expect(one.x0).toBeLessThan(3);
    expect(one.y1).toBeGreaterThan(7);
    expect(extent([line([3], [NaN], { marks: [[3, 'nan']] })], false, false, null)).not.toBeNull();
    expect(extent([], false, false, null)).toBeNull();
    expect(extent([line([], [])], false, false, null)).toBeNull();
  });
  it('keeps to the zoom, and fits y to what is in it', () => {
    const view = extent([line([0, 5, 10], [100, 1, 2])], false, false, [4, 10])!;
    expect([view.x0, view.x1]).toEqual([4, 10]);
    expect(view.y1).toBeLessThan(5);
  });
});

describe('stretches', () => {
  it('ends at NaN and at holes, and keeps all else', () => {
    expect(stretches({ x: [0, 1, 2, 3, 4] }, [1, NaN, 3, 4, 5])).toEqual([[0, 1], [2, 5]]);
    expect(stretches({ x: [0, 1, 2, 3, 100, 101, 102] }, [1, 1, 1, 1, 1, 1, 1])).toEqual([[0, 4], [4, 7]]);
    expect(stretches({ x: [0, 1, 2, 3, 4, 6] }, [1, 1, 1, 1, 1, 1])).toEqual([[0, 6]]);
    expect(stretches({ x: [] }, [])).toEqual([]);
  });
});

describe('draw', () => {
  it('visits every extreme of every bucket', () => {
    const visited: number[] = [];
    const context = new Proxy({ measureText: () => ({ width: 10 }), lineTo: (_: number, y: number) => visited.push(y) } as Record<string, unknown>, {
      get: (target, name) => target[name as string] ?? (() => undefined), set: () => true,
    }) as unknown as CanvasRenderingContext2D;
    const view = { x0: 0, x1: 2, y0: 0, y1: 10, logX: false, logY: false };
    const frame = { w: 300, h: 200, dpr: 1 };
    draw(context, frame, view, [line([0, 1, 2], [5, 5, 5], { xLast: [0.9, 1.9, 2.9], first: [4, 6, 4], lo: [1, 2, 3], hi: [9, 8, 7], loAt: [0.1, 0.3, 0.5], hiAt: [0.2, 0.2, 0.2], raw: false })], { ground: '', ink: '', grid: '', band: false, xKind: 'number' });
    const { sy } = scales(frame, view);
    for (const value of [1, 2, 3, 7, 8, 9]) expect(visited).toContain(sy(value));
  });
});

describe('a dense line', () => {
  const drawn = (l: Line, view = { x0: 0, x1: 999, y0: -10, y1: 10, logX: false, logY: false }) => {
    const visited: [number, number][] = [], frame = { w: 388, h: 200, dpr: 1 };
    const context = new Proxy({ measureText: () => ({ width: 10 }), lineTo: (x: number, y: number) => visited.push([x, y]) } as Record<string, unknown>, {
      get: (target, name) => target[name as string] ?? (() => undefined), set: () => true,
    }) as unknown as CanvasRenderingContext2D;
    draw(context, frame, view, [l], { ground: '', ink: '', grid: '', band: false, xKind: 'number' });
    return { visited: visited.filter(([, y]) => y <= 180), s: scales(frame, view) };
  };
  const x = Array.from({ length: 1000 }, (_, i) => i), y = x.map((i) => Math.sin(i * i));
  it('reaches every extreme, and where it begins and ends, in two strokes per pixel', () => {
    y[500] = 9;
    y[501] = -9;
    const { visited, s } = drawn(line(x, y)), ys = visited.map(([, at]) => at);
    for (const value of [9, -9, y[0], y[999]]) expect(ys).toContain(s.sy(value));
    expect(visited.length).toBeLessThan(2 * s.pw + 30); // with the lines of the grid
    expect(visited.filter(([at]) => Math.abs(at - s.sx(500)) < 1).map(([, at]) => at)).toEqual(expect.arrayContaining([s.sy(9), s.sy(-9)]));
  });
  it('reaches the extremes of buckets, too', () => {
    const { visited, s } = drawn(line(x, y.map(() => 0), { lo: y.map(() => -3), hi: y.map((_, i) => (i === 700 ? 8 : 3)), xLast: x.map((i) => i + 0.5), raw: false }));
    for (const value of [-3, 3, 8]) expect(visited.map(([, at]) => at)).toContain(s.sy(value));
  });
  it('has no gap within a pixel, and one where points are missing', () => {
    const bursts = Array.from({ length: 1000 }, (_, i) => Math.floor(i / 10) * 10 + (i % 10) * 0.01); // ten at a time
    expect(stretches({ x: bursts }, y)).toHaveLength(1);
    expect(stretches({ x: x.map((i) => (i < 500 ? i : i + 200)) }, y)).toEqual([[0, 500], [500, 1000]]);
  });
});

describe('smoothing of many points', () => {
  it('is that of each point, as closely as can be seen', () => {
    const y = Array.from({ length: 3000 }, (_, i) => 1e6 + Math.sin(i / 150) + ((i * 7919) % 100) / 100);
    const found = centred(y, 0.7), reach = (0.49 * 3000) / 10;
    for (const i of [0, 1, 700, 1501, 2998, 2999]) {
      let weight = 0, lean = 0, spread = 0, sum = 0, slope = 0;
      for (let j = 0; j < 3000; j++) {
        const d = j - i, k = Math.abs(d) > 2.5 * reach + 1 ? 0 : Math.exp(-0.5 * (d / reach) ** 2);
        weight += k; lean += k * d; spread += k * d * d; sum += k * (y[j] - 1e6); slope += k * d * (y[j] - 1e6);
      }
      expect(found[i] - 1e6).toBeCloseTo((spread * sum - lean * slope) / (weight * spread - lean * lean), 2);
    }
  });
  it('leaves out values that are not finite', () => {
    const y = Array.from({ length: 2000 }, (_, i) => (i === 1000 ? NaN : 2)), found = centred(y, 0.9);
    expect(found[1000]).toBeNaN();
    expect(found[999]).toBeCloseTo(2);
    expect(centred([], 0.5)).toHaveLength(0);
  });
});

describe('scales', () => {
  it('go there and back, straight and logarithmic', () => {
    for (const log of [false, true]) {
      const s = scales({ w: 400, h: 200, dpr: 1 }, { x0: 1, x1: 1000, y0: 0.01, y1: 10, logX: log, logY: log });
      for (const v of [1, 17, 1000]) expect(s.ix(s.sx(v))).toBeCloseTo(v, 6);
      expect(s.iy(s.sy(0.5))).toBeCloseTo(0.5, 6);
    }
  });
  it('labels of neighbours differ, and say times in round units', () => {
    const labels = (lo: number, hi: number, kind?: 'span' | 'time') => labelled(lo, hi, 5, false, kind).map((one) => one.label);
    expect(labels(2_000_000, 2_000_040)).toEqual(['2M', '2.00001M', '2.00002M', '2.00003M', '2.00004M']);
    expect(labels(0, 3_000_000)).toEqual(['0', '500k', '1M', '1.5M', '2M', '2.5M', '3M']);
    expect(labelled(6e-5, 0.2, 4.9, true).map((one) => one.label)).toEqual(['0.001', '0.1']); // and on a log axis
    expect(labels(1e-5, 1.2e-5)).toEqual(['1e-5', '1.05e-5', '1.1e-5', '1.15e-5', '1.2e-5']);
    expect(labels(0, 1000, 'span')).toEqual(['0 min', '5 min', '10 min', '15 min']);
    expect(labels(0, 45, 'span')).toEqual(['0 s', '10 s', '20 s', '30 s', '40 s']);
    expect(labels(0, 30 * 3600, 'span')).toEqual(['0 h', '6 h', '12 h', '18 h', '24 h', '30 h']);
    for (const [lo, hi] of [[0.1, 0.100004], [1e9, 1e9 + 3], [-5, 5], [0.999, 1.001]]) expect(new Set(labels(lo, hi)).size).toBe(labels(lo, hi).length);
    const day = new Date(2026, 2, 1).getTime() / 1000;
    expect(labels(day, day + 2 * 86_400, 'time')).toEqual(['1 Mar', '12:00', '2 Mar', '12:00', '3 Mar']);
  });
  it('ticks are round, inside, and few', () => {
    expect(ticks(0, 10, 5)).toEqual([0, 2, 4, 6, 8, 10]);
    expect(ticks(0.001, 1000, 6, true)).toEqual([0.001, 0.01, 0.1, 1, 10, 100, 1000]);
    expect(ticks(0.2, 5, 6, true)).toEqual([0.2, 0.5, 1, 2, 5]);
    for (const [lo, hi] of [[0, 1e-9], [-5e8, 3], [1e15, 1e15 + 4], [7, 7]]) {
      const found = ticks(lo, hi, 5);
      expect(found.length).toBeLessThan(15);
      for (const t of found) expect(t).toBeGreaterThanOrEqual(lo - 1e-12);
    }
    expect(ticks(NaN, NaN, 5)).toEqual([]);
  });
  it('finds the point at and nearest to a place', () => {
    expect([at([0, 2, 4], 3), at([0, 2, 4], -1), at([], 3)]).toEqual([1, 0, 0]);
    const raw = { x: [0, 2, 4], y: [5, 6, 7] };
    expect([nearest(raw, 3.5), nearest(raw, 2.5), nearest({ x: [], y: [] }, 1)]).toEqual([{ x: 4, y: 7, i: 2 }, { x: 2, y: 6, i: 1 }, undefined]);
    const thin = { x: [0, 10], xLast: [9, 19], first: [1, 3], y: [2, 4], lo: [0, 3], hi: [8, 4] }; // two buckets, by their ends
    expect([1, 6, 9.4, 9.6, 14, 15, 99].map((t) => nearest(thin, t)?.y)).toEqual([1, 2, 2, 3, 3, 4, 4]);
    expect([1, 6, 9.4, 9.6, 14, 15, 99].map((t) => nearest(thin, t)?.x)).toEqual([0, 9, 9, 10, 10, 19, 19]);
  });
});

describe('smoothing', () => {
  it('leaves a straight line straight, ends included', () => {
    const y = Array.from({ length: 100 }, (_, i) => i);
    centred(y, 0.8).forEach((v, i) => expect(v).toBeCloseTo(i, 9));
  });
  it('ends at the trend, not at the last value', () => {
    const y = Array.from({ length: 200 }, (_, i) => i / 100 + (i % 2 ? 0.1 : -0.1));
    y[0] = -5;
    y[199] = 9;
    const out = centred(y, 0.9);
    expect(Math.abs(out[199] - 2)).toBeLessThan(1.2);
    expect(Math.abs(out[0])).toBeLessThan(1.2);
  });
  it('does not lag, where the exponential one does', () => {
    const y = Array.from({ length: 200 }, (_, i) => (i < 100 ? 0 : 1));
    expect(centred(y, 0.5)[99] + centred(y, 0.5)[100]).toBeCloseTo(1, 6);
    expect(exponential(y, 0.9)[105]).toBeLessThan(0.6);
  });
  it('passes over NaN and never spreads it', () => {
    const out = exponential([1, NaN, 1], 0.5);
    expect(out[0]).toBe(1);
    expect(out[1]).toBeNaN();
    expect(out[2]).toBe(1);
    expect(centred([1, NaN, 1, 1], 1)[2]).toBe(1);
  });
  it('does not flow across a hole', () => {
    const out = smoothed([0, 0, 0, 9, 9, 9], [[0, 3], [3, 6]], 1, '');
    expect([...out]).toEqual([0, 0, 0, 9, 9, 9]);
  });
});
