// The palette: enough contrast to its background, and distinguishable in four kinds of color vision.
import { describe, expect, it } from 'vitest';
import { COLOURS, GROUNDS } from '../src/lib/colours';
import { SCALES, colourOf } from '../src/lib/ramp';

const VISION = { // Machado, Oliveira and Fernandes 2009, at full severity, in linear RGB
  normal: [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
  protan: [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
  deutan: [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
  tritan: [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
};
const linear = (hex: string) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
const times = (m: number[][], v: number[]) => m.map((row) => row.reduce((sum, k, i) => sum + k * v[i], 0));
const light = (hex: string) => times([[0.2126729, 0.7151522, 0.072175]], linear(hex))[0];
const contrast = (a: string, b: string) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
function lab(rgb: number[]) {
  const xyz = times([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]], rgb.map((c) => Math.min(1, Math.max(0, c))));
  const [x, y, z] = xyz.map((n, i) => n / [0.95047, 1, 1.08883][i]).map((n) => (n > 0.008856 ? Math.cbrt(n) : 7.787 * n + 16 / 116));
  return [116 * y - 16, 500 * (x - y), 200 * (y - z)];
}
const closest = (colours: string[], vision: number[][]) => {
  const found = colours.map((hex) => lab(times(vision, linear(hex))));
  return Math.min(...found.flatMap((a, i) => found.slice(i + 1).map((b) => Math.hypot(...a.map((n, k) => n - b[k])))));
};

describe.each(Object.entries(GROUNDS))('the palette on %s', (_, { ground, colours }) => {
  it('has sixteen colours of at least 3:1', () => {
    expect(new Set(colours).size).toBe(COLOURS);
    expect(Math.min(...colours.map((one) => contrast(one, ground)))).toBeGreaterThanOrEqual(3);
  });
  it.each(Object.entries(VISION))('is told apart in %s vision, the first eight best', (_name, vision) => {
    expect(closest(colours, vision)).toBeGreaterThanOrEqual(18);
    expect(closest(colours.slice(0, 8), vision)).toBeGreaterThanOrEqual(30);
  });
});

describe.each([['light', false, '#ffffff'], ['dark', true, '#15181c']] as const)('the scale on %s', (_, dark, ground) => {
  it('has a contrast of at least 3:1 everywhere', () => {
    for (let i = 0; i <= 100; i++) {
      const hex = '#' + colourOf(i / 100, dark).match(/\d+/g)!.map((n) => Number(n).toString(16).padStart(2, '0')).join('');
      expect(contrast(hex, ground)).toBeGreaterThanOrEqual(3);
    }
    expect(SCALES[dark ? 'dark' : 'light'].length).toBe(5);
  });
});
