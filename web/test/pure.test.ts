// URLs, chart order, number formats, console lines and diffs.
import { describe, expect, it } from 'vitest';
import { printed } from '../src/lib/console';
import { diff, lines, words } from '../src/lib/diff';
import { duration, elapsed, moment, number, placed, tick } from '../src/lib/format';
import { estimated, grow, hit, quantile, together } from '../src/lib/icicle';
import { csv, type Shown } from '../src/lib/export';
import { listing, order, orderKeys, sections } from '../src/lib/model.svelte';
import { DEFAULTS, copied, read, write } from '../src/lib/view.svelte';

describe('the list of runs', () => {
  const run = (id: string) => ({ id }) as never;
  const ids = (text: string) => [...text].map(run);
  const answer = (runs: string, total: number, fresh: number[]) =>
    ({ runs: ids(runs), total, size: 3, blocks: Array.from({ length: Math.ceil(total / 3) }, String), fresh, keys: [], media: [], columns: [] });
  it('keeps the runs of blocks that were not sent, counted from the end', () => {
    expect(listing(ids('gfedcba'), answer('', 7, []), true)).toEqual(ids('gfedcba'));
    expect(listing(ids('gfedcba'), answer('hg', 8, [2]), true)).toEqual(ids('hgfedcba'));
    expect(listing(ids('gfedcba'), answer('kjihg', 11, [3, 2]), true)).toEqual(ids('kjihgfedcba').slice(0, 5).concat(ids('fedcba')));
    expect(listing(ids('gfedcba'), answer('GFED', 7, [2, 1]), true)).toEqual(ids('GFEDcba'));
    expect(listing(ids('gfedcba'), answer('cba', 3, [0]), true)).toEqual(ids('cba'));
  });
  it('is what the answer says where nothing was known', () => {
    expect(listing([], answer('gfe', 7, []), false)).toEqual(ids('gfe'));
    expect(listing(ids('ab'), { runs: ids('xy'), keys: [], media: [], columns: [] }, false)).toEqual(ids('xy'));
  });
});

describe('the address', () => {
  it('is empty by default, and comes back as it was', () => {
    expect(write(read(''))).toBe('');
    const view = { ...structuredClone(DEFAULTS), project: 'a&b=c #1', filter: 'lr<1e-3 and tag:"x y"', hidden: ['a,b', '%'], zoom: [400, 670.5] as [number, number], logY: true, smooth: 0.3, page: 'table' as const };
    expect(read('#' + write(view))).toEqual(view);
  });
  it('keeps what each page shows', () => {
    const view = { ...structuredClone(DEFAULTS), scatterX: 'config:a b', scatterY: 'metric:x/y', same: true, changes: true, opSort: 'op', opSearch: 'aten::add', lineSearch: 'a&b', rank: '0', tables: ['train/loss', 'a,b'] };
    expect(read('#' + write(view))).toEqual(view);
    expect(write({ ...structuredClone(DEFAULTS), scatterX: 'config:lr', rank: '0' })).toBe('sx=config:lr&rank=0');
  });
  it('has one short name for each part', () => {
    const every = Object.fromEntries(Object.entries(DEFAULTS).map(([name, usual]) => [name, typeof usual === 'boolean' ? true : Array.isArray(usual) ? ['z'] : typeof usual === 'string' ? 'z' : name === 'zoom' ? [1, 2] : 5])) as never;
    const names = write(every).split('&').map((part) => part.split('=')[0]);
    expect(new Set(names).size).toBe(Object.keys(DEFAULTS).length);
  });
  it('is readable', () => {
    expect(write({ ...structuredClone(DEFAULTS), filter: 'lr=0.1', zoom: [400, 670] })).toBe('f=lr=0.1&zoom=400..670');
  });
  it('keeps a zoom on the clock and on large numbers to a fraction of a pixel', () => {
    for (const [from, to] of [[1795092194.1436677, 1795092201.5], [123456789012, 123456789500], [0, 1e-7], [-0.5, 1e9]]) {
      const [a, b] = read('#' + write({ ...structuredClone(DEFAULTS), zoom: [from, to] })).zoom!;
      expect(Math.max(Math.abs(a - from), Math.abs(b - to))).toBeLessThan((to - from) / 10_000);
    }
  });
  it('takes nonsense for the usual', () => {
    expect(read('#v=etc&zoom=9..1&s=x&step=y')).toEqual(structuredClone(DEFAULTS));
  });
});

describe('places on an axis', () => {
  it('differ from their neighbours', () => {
    expect([elapsed(0.0987, 0.0002), elapsed(11_525.4, 20), elapsed(11_525.4, 0.1), elapsed(93_784, 120), elapsed(59.9996, 1), elapsed(-3, 1)]).toEqual(['0.099 s', '3 h 12 min 5 s', '3 h 12 min 5.4 s', '1 d 2 h 3 min', '1 min 0 s', '−3 s']);
    expect(moment(1_795_092_194.5, 0.1)).toMatch(/:14\.500/);
    expect(moment(1_795_092_194.5, 5)).toMatch(/:14\b(?!\.)/);
    expect(moment(1_795_092_194.5)).not.toMatch(/:14\b/);
    expect([placed(1_000_005.26, 1), placed(0.25, 100), placed(0, 0)]).toEqual([1_000_005.26, 0.25, 0]);
  });
});

describe('copying', () => {
  it('says when there is no clipboard', async () => {
    expect(await copied('x')).toBe(false); // this process has no clipboard
  });
});

describe('the order of charts', () => {
  it('puts pins first, then losses, and the system last', () => {
    expect(orderKeys(['system/cpu', 'acc', 'val/loss', 'lr'], ['lr'])).toEqual(['lr', 'val/loss', 'acc', 'system/cpu']);
    expect(sections(['a/x', 'b/loss', 'y'], []).map(([name]) => name)).toEqual(['b', 'a', 'metrics']);
  });
  it('sorts what is missing last, both ways', () => {
    const sorted = (values: (number | string | null)[], back: number) => order(values, (value) => value, back);
    expect(sorted([3, null, NaN, 1, Infinity], 1)).toEqual([1, 3, Infinity, null, NaN]);
    expect(sorted([3, null, NaN, 1, -Infinity], -1)).toEqual([3, 1, -Infinity, null, NaN]);
    expect(sorted(['r10', null, 'r9'], 1)).toEqual(['r9', 'r10', null]);
    expect(sorted(['b', 10, 9, 'a'], 1)).toEqual([9, 10, 'a', 'b']);
    expect(sorted(['none', '10', '-1', '1e-5', '-1.5', 'inf'], 1)).toEqual(['-1.5', '-1', '1e-5', '10', 'inf', 'none']);
  });
});

describe('numbers', () => {
  it('have five digits, and what is none keeps its name', () => {
    expect([0.123456789, 3e-4, 1234567, -2, NaN, Infinity, -Infinity, null, 'x'].map(number)).toEqual(['0.12346', '3e-4', '1,234,567', '−2', 'NaN', '∞', '−∞', '', 'x']);
    expect([51000, 2e6, 0.5, 1e-5, 0].map((value) => tick(value))).toEqual(['51k', '2M', '0.5', '1e-5', '0']);
    expect([5, 65, 3700, 90_000].map(duration)).toEqual(['5 s', '1 min 5 s', '1 h 2 min', '1 d 1 h']);
    expect([0, 0.0001, 0.412, 0.9999, 59.7, 119.6].map(duration)).toEqual(['0 s', '1 ms', '412 ms', '1 s', '1 min 0 s', '2 min 0 s']);
  });
});

describe('the console', () => {
  const chunk = (text: string, rank = 0, stream = 'stdout') => ({ t: 0, stream, rank, text });
  it('joins lines over chunks, keeps ranks apart and shows progress bars as they ended', () => {
    const found = printed([chunk('he'), chunk('one\n', 1), chunk('llo\n10%\r50%\r100%\n'), chunk('\x1b[31mred\x1b[0m\r\n')]);
    expect(found.map((line) => [line.rank, line.text])).toEqual([[0, 'hello'], [1, 'one'], [0, '100%'], [0, 'red']]);
  });
});

describe('differences', () => {
  it('are the smallest, and put together give both texts', () => {
    const [a, b] = ['the cat sees the sea', 'the cat paints the red sea'];
    const pieces = diff(words(a), words(b));
    expect(pieces.filter(([kind]) => kind !== 'new').map(([, part]) => part).join('')).toBe(a);
    expect(pieces.filter(([kind]) => kind !== 'gone').map(([, part]) => part).join('')).toBe(b);
    expect(pieces.filter(([kind]) => kind === 'gone').map(([, part]) => part)).toEqual(['sees']);
    expect(diff(lines('a\nb\n'), lines('a\nb\n'))).toEqual([['same', 'a\nb\n']]);
  });
  it('read as one change where a passage was rewritten, and spaces around what is only gone stay', () => {
    expect(diff(words('It is 4. First, we count groups.'), words('It is 4. Let me explain this.'))).toEqual([['same', 'It is 4. '], ['gone', 'First, we count groups.'], ['new', 'Let me explain this.']]);
    expect(diff(words('one two three four'), words('one four')).filter(([kind]) => kind !== 'gone').map(([, part]) => part).join('')).toBe('one four');
    expect(diff([], words('many words '.repeat(50_000)))).toHaveLength(1);
  });
});

describe('the icicle', () => {
  it('weighs sampled calls for the ones they stand for', () => {
    const [one] = estimated([{ op: 'mm', scope: 'forward', thread: 'main', label: '', count: 3, total_ns: 9, self_ns: 6, max_ns: 4, scale: 10 }]);
    expect([one.count, one.total_ns, one.self_ns, one.max_ns]).toEqual([30, 90, 60, 4]);
  });
  it('has one row for what ranks and threads did under one name', () => {
    const op = (rank: number, thread: string, label: string, self_ns: number) => ({ op: 'mm', scope: 'forward', thread, label, count: 1, total_ns: 2 * self_ns, self_ns, max_ns: self_ns, rank, device_count: rank, device_ns: 5 * rank });
    const rows = together([op(0, 'main', '', 30), op(1, 'main', '', 50), op(1, 'thread', '', 10), op(0, 'main', 'model=a', 7)]);
    expect(rows.map((row) => [row.label, row.count, row.self_ns, row.total_ns, row.max_ns, row.device_count, row.device_ns])).toEqual([['', 3, 90, 180, 50, 2, 10], ['model=a', 1, 7, 14, 7, 0, 0]]);
  });
  it('keeps what workers did apart, in rows and boxes', () => {
    const op = (role: string, self_ns: number) => ({ op: 'sin', scope: 'forward', thread: 'main', label: '', count: 2, total_ns: self_ns, self_ns, max_ns: self_ns, role });
    const ops = [op('main', 30), op('worker', 50), op('worker', 10)];
    expect(together(ops).map((row) => [row.role, row.count, row.self_ns])).toEqual([['main', 2, 30], ['worker', 4, 60]]);
    expect(grow(ops).kids.map((kid) => [kid.name, kid.size])).toEqual([['worker · thread main', 60], ['thread main', 30]]);
  });
  it('says mean and p99 of all calls of a row, as the command line does', () => {
    const op = (hist: Record<string, number>, count: number, total_ns: number, max_ns: number) => ({ op: 'sin', scope: 'forward', thread: 'main', label: '', count, total_ns, self_ns: 1, max_ns, hist });
    const given = [op({ 9: 3, 40: 95 }, 98, 200_000, 2_400), op({ 40: 1, 50: 1 }, 2, 20_000, 14_000)];
    for (const _ of 'ab') expect(together(given).map((row) => [row.mean_ns, row.p99_ns, row.max_ns])).toEqual([[2_200, 2_560, 14_000]]); // does not modify its input
    expect(quantile({ 9: 3, 40: 96, 50: 1 }, 0.995)).toBe(13_312);
    expect(together([op({ 50: 1 }, 1, 12_300, 12_300)])[0].p99_ns).toBe(12_300);
    expect(quantile({}, 0.99)).toBe(0);
  });
  it('is as wide as the time, and finds what is pointed at', () => {
    const op = (name: string, scope: string, self_ns: number) => ({ op: name, scope, thread: 1, label: '', count: 1, total_ns: self_ns, self_ns, max_ns: self_ns });
    const root = grow([op('mm', 'forward/attn', 30), op('add', 'forward', 10), op('mm', 'backward', 60)]);
    expect([root.size, root.deep]).toEqual([100, 4]);
    expect(root.kids[0].kids.map((kid) => [kid.name, kid.start, kid.size])).toEqual([['backward', 0, 60], ['forward', 60, 40]]);
    expect(hit(root, root, 100, 70, 45)?.name).toBe('forward');
  });
});

describe('numbers in a file', () => {
  it('are said as they were logged, whether four bytes hold them or eight', () => {
    const line = { run: 'a', x: [0, 1, 2], y: Float32Array.from([0.01, 1 / 3, NaN]), raw: true } as unknown as Shown['lines'][0];
    const wide = { ...line, y: Float64Array.from([0.01, 1 / 3, 1e300]) };
    const made = csv({ axis: 'step', title: 'loss', lines: [wide, line], nameOf: (id: string) => id } as unknown as Shown).split('\n');
    expect(made.slice(1, 3)).toEqual(['a,0,0.01,0.01,0.01', 'a,1,0.33333334,0.33333334,0.33333334']);
    expect(made[5]).toBe(`a,1,${1 / 3},${1 / 3},${1 / 3}`);
  });
});
