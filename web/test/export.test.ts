// Exported charts: nothing in a name can break out of the file format.
import { describe, expect, it } from 'vitest';
import { csv, svg, type Shown } from '../src/lib/export';

const shown: Shown = {
  title: '<img src=x onerror=alert(1)>', axis: 'step', frame: { w: 300, h: 200, dpr: 1 }, view: { x0: 0, x1: 2, y0: 0, y1: 10, logX: false, logY: false },
  lines: [{ run: 'r', colour: '#123456', dash: [], width: 1, alpha: 1, x: [0, 1, 2], y: [1, NaN, 3], lo: [0, NaN, 2], hi: [2, NaN, 9], raw: false, marks: [[1, 'nan']], restarts: [1] }],
  look: { ground: '#fff', ink: '#000', grid: '#eee', band: true, xKind: 'number' }, nameOf: () => '=cmd|"x"',
};

describe('export', () => {
  it('writes SVG that holds names as text and closes what it opens', () => {
    const text = svg(shown);
    expect(text).not.toContain('<img');
    expect(text).toContain('stroke="#123456"');
    for (const tag of ['g', 'svg', 'text', 'clipPath', 'title']) expect(text.split(`<${tag}`).filter((_, i) => i).filter((part) => /^[\s>]/.test(part)).length, tag).toBe(text.split(`</${tag}>`).length - 1);
  });
  it('writes the numbers with their extremes, and no formula', () => {
    expect(csv(shown)).toBe('group,step,"<img src=x onerror=alert(1)> (mean of the group as drawn, thinned)",lowest,highest\n"\'=cmd|""x""",0,1,0,2\n"\'=cmd|""x""",1,NaN,NaN,NaN\n"\'=cmd|""x""",2,3,2,9\n');
  });
});
