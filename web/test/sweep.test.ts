import { describe, expect, it } from 'vitest';
import { Near, SCALES, asFilter, axisOf, colourOf, inside, logOf, placeOf, readBrushes, spearman, spreads, surface, trend, turnLog, valueAt, writeBrush } from '../src/lib/sweep';
import { GROUNDS } from '../src/lib/colours';

const light = (colour: string) => {
  const parts = colour.startsWith('#') ? [1, 3, 5].map((k) => parseInt(colour.slice(k, k + 2), 16)) : colour.match(/\d+/g)!.map(Number);
  const [r, g, b] = parts.map((one) => { const c = one / 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const contrast = (a: string, b: string) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };

describe('axes', () => {
  it('place numbers, logarithms and texts, and know what has no place', () => {
    const linear = axisOf('a', [0, 10, null]), log = axisOf('a', [0.001, 0.1, 0], true), words = axisOf('a', ['b', 'a10', 'a9', null]);
    expect([placeOf(linear, 5), placeOf(log, 0.01), placeOf(log, 0), placeOf(linear, null), placeOf(words, 'a10')]).toEqual([0.5, 0.5, NaN, NaN, 0.5]);
    expect([linear.missing, log.missing, words.missing, words.texts]).toEqual([true, true, true, ['a9', 'a10', 'b']]);
    expect([valueAt(linear, 0.5), Number(valueAt(log, 0.5).toFixed(6)), placeOf(axisOf('a', [3, 3]), 3)]).toEqual([5, 0.01, 0.5]);
  });
  it('keep their brushes in the address and turn them into a filter', () => {
    const brushes = readBrushes([writeBrush('config:lr', [0.001, 0.01]), 'config:opt=0..1', 'bad', 'x=2..1']);
    expect([...brushes]).toEqual([['config:lr', [0.001, 0.01]], ['config:opt', [0, 1]]]);
    const axes = [axisOf('config:lr', [0.001, 0.1], true), axisOf('config:opt', ['a', 'b', 'c'])];
    expect(asFilter(axes, brushes)).toBe('config.lr>=0.001 and config.lr<=0.01 and (config.opt="a" or config.opt="b")');
    expect([inside(axes[0], 0.005, [0.001, 0.01]), inside(axes[1], 'c', [0, 1]), inside(axes[0], null, [0, 1])]).toEqual([true, false, false]);
    expect(asFilter([axisOf('config:odd name', [1, 2])], new Map([['config:odd name', [1, 2]]]))).toBeNull();
    expect(asFilter([axisOf('min:loss', [1, 2])], new Map([['min:loss', [1, 2]]]))).toBe('loss.min>=1 and loss.min<=2');
  });
});

describe('a log axis', () => {
  const rates = Array.from({ length: 50 }, (_, i) => 10 ** (-5 + i / 12)), even = Array.from({ length: 50 }, (_, i) => 0.001 + i / 100);
  it('is offered to what spreads over powers of ten, not to an even range that begins near zero', () => {
    expect([spreads(rates), spreads(even), spreads([1e-4, 1e-3]), spreads([0, ...rates]), spreads([1e-4, 1e-4, 1e-3, 1e-2, null, 'x'])]).toEqual([true, false, false, false, true]);
  });
  it('is kept as it was chosen', () => {
    expect([logOf([], 'x', 'config:lr', () => rates), logOf([], 'x', 'metric:loss', () => rates), logOf(['-x'], 'x', 'config:lr', () => rates), logOf(['x'], 'x', 'config:p', () => even)]).toEqual([true, false, false, true]);
    expect(turnLog(turnLog(['y'], 'x', true), 'x', false)).toEqual(['y', '-x']);
  });
});

describe('trend', () => {
  it('is exact for a line, also on log axes', () => {
    expect(trend([1, 2, 3], [2, 4, 6], false, false)!.at(5)).toBeCloseTo(10);
    const power = trend([1, 10, 100], [2, 20, 200], true, true)!;
    expect([power.at(1000), power.rho]).toEqual([expect.closeTo(2000), 1]);
    expect(trend([1, 1, 1], [1, 2, 3], false, false)).toBeNull();
  });
  it('correlates ranks with ties', () => {
    expect(spearman([1, 2, 3, 4], [1, 1, 2, 2])).toBeCloseTo(0.8944, 4);
    expect(spearman([1, 2], [1, 1])).toBeNaN();
  });
});

describe('a surface', () => {
  it('passes near the runs and says nothing far from them', () => {
    const found = surface([0, 1, 0], [0, 0, 1], [0, 1, 0.5], 11, 11);
    expect([found[0], found[10], found[110]].map((one) => Number(one.toFixed(2)))).toEqual([0, 1, 0.5]);
    expect(found[120]).toBeNaN();
  });
});

describe('colours of a scale', () => {
  it('are told from their ground everywhere', () => {
    for (const [dark, ground] of [[false, GROUNDS.light.ground], [true, GROUNDS.dark.ground]] as const)
      for (let at = 0; at <= 1; at += 0.05) expect(contrast(colourOf(at, dark), ground)).toBeGreaterThanOrEqual(3);
  });
  it('grow lighter from low to high', () => {
    for (const stops of Object.values(SCALES)) expect(stops.map(light)).toEqual([...stops.map(light)].sort((a, b) => a - b));
  });
});

describe('a hundred thousand points', () => {
  it('are searched by the cell they lie in', () => {
    const n = 100_000, x = Float32Array.from({ length: n }, (_, i) => (i % 1000) * 0.5), y = Float32Array.from({ length: n }, (_, i) => Math.floor(i / 1000) * 2);
    const near = new Near(x, y, 14);
    expect(near.find(x[54_321] + 0.1, y[54_321] - 0.2)).toBe(54_321);
    expect(near.find(-100, -100)).toBe(-1);
  });
});
