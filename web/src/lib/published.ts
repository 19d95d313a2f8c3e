// The server's responses from a published folder. Most are files as they are; those that depend on the request (a filter, a subset of
// runs, a zoom, the rows of a table) are computed here from the complete file.
import type { Series } from './api';
import { nameOf } from './copy';
import { parse, type Row } from './filter';
import { conditions as known } from './table';
import { decode, type Answer, type Column, type Item } from './wire';
import { Refused } from './refused';

type Given = Record<string, unknown>;
interface Table { columns: string[]; rows: unknown[][]; numbers: number[]; media: [number, number, string, Given][]; found: number; total: number }
interface Points { run: string; points: { n?: number; step: number; rank: number; kind: string }[]; total: number }
export const UNABLE = 'This is a published copy of the dashboard, and this needs its server';
const texts = new Map<string, Promise<unknown>>(), binaries = new Map<string, Promise<ArrayBuffer>>();
const KEPT = 60; // cached series files

async function fetched(name: string, missing: string): Promise<Response> {
  const response = await fetch(name);
  if (!response.ok) throw new Refused(response.status === 404 ? missing : `${name}: ${response.statusText}`, response.status);
  return response;
}
function file<T>(...words: (string | number)[]): Promise<T> {
  const name = `${nameOf(...words)}.json`;
  if (!texts.has(name)) {
    const found = fetched(name, 'This is not in the published copy.').then((response) => response.json());
    found.catch(() => texts.delete(name));
    texts.set(name, found);
  }
  return texts.get(name) as Promise<T>;
}

/** Answer a request for JSON. */
export async function json(path: string, given: Given): Promise<unknown> {
  const project = String(given.project ?? '');
  switch (path) {
    case 'api/projects': return file(path);
    case 'api/runs': case 'api/alerts': case 'api/views': case 'api/rules': return file(path, project);
    case 'api/run': case 'api/profile': case 'api/goodput': return file(path, project, String(given.id));
    case 'api/console': return given.before === undefined ? file(path, project, String(given.id)) : { chunks: [], more: false };
    case 'api/passing': return { ids: await passing(project, String(given.filter)) };
    case 'api/media': return (await file<Points[]>(path, project, String(given.key))).filter((one) => (given.ids as string[]).includes(one.run));
    case 'api/table': return rowsOf(await file<Table>(path, project, String(given.id), String(given.key), Number(given.n ?? 0)), given);
    case 'api/sample': return sample(project, given);
  }
  throw new Refused(`${UNABLE}.`, 400);
}

async function passing(project: string, filter: string): Promise<string[]> {
  const { test, metrics } = parse(filter);
  const rows = await file<Row[]>('rows', project), stats = await Promise.all([...new Set(metrics)].map((key) => statistics(project, key)));
  const of = (row: Row) => Object.fromEntries([...new Set(metrics)].map((key, i) => [key, stats[i][row.id] ?? {}]));
  return rows.map((row) => ({ ...row, latest: odd(row.latest), summary: odd(row.summary), stats: of(row) })).filter(test).map((row) => row.id);
}
/** Convert numbers that JSON lacks from strings. */
const number = (value: unknown) => (value === 'NaN' ? NaN : value === 'Infinity' ? Infinity : value === '-Infinity' ? -Infinity : value);
const odd = (facts: Given): Given => Object.fromEntries(Object.entries(facts).map(([key, value]) => [key, number(value)]));
const statistics = async (project: string, key: string) =>
  Object.fromEntries(Object.entries(await file<Record<string, Given>>('stats', project, key).catch(() => ({}))).map(([id, facts]) => [id, odd(facts)]));

/** Answer a request for binary columns. */
export async function columns(path: string, body: Given): Promise<Answer> {
  if (path === 'api/columns') return cells(body as never);
  if (path === 'api/series') return series(body as never);
  throw new Refused(`${UNABLE}.`, 400);
}

async function cells({ project, names, runs }: { project: string; names: string[]; runs: string[] | null }): Promise<Answer> {
  const all = await file<Row[]>('rows', project), rows = runs ? all.filter((row) => runs.includes(row.id)) : all;
  const items = await Promise.all(names.map(async (name): Promise<Item> => {
    const kind = name.slice(0, name.indexOf(':')), key = name.slice(kind.length + 1);
    const stats = kind === 'config' || kind === 'metric' ? null : await statistics(project, key);
    const found = rows.map((row) => number((stats ? stats[row.id]?.[kind] : kind === 'config' ? flat(row.config)[key] : Object.hasOwn(row.summary, key) ? row.summary[key] : row.latest[key]) ?? null));
    if (!found.every((cell) => cell === null || typeof cell === 'number')) return { name, texts: found.map((cell) => (cell === null || typeof cell === 'string' ? cell : JSON.stringify(cell))), columns: {} };
    return { name, missing: found.flatMap((cell, i) => (cell === null ? [i] : [])), columns: { values: Float64Array.from(found, (cell) => (cell as number | null) ?? NaN) } };
  }));
  return { head: { runs: rows.map((row) => row.id) }, items };
}
function flat(config: Given, before = ''): Given {
  return Object.assign({}, ...Object.entries(config).map(([name, value]) =>
    (value && typeof value === 'object' && !Array.isArray(value) && Object.keys(value).length ? flat(value as Given, `${before}${name}.`) : { [before + name]: value })));
}

interface Wanted { project: string; keys: string[]; runs: string[]; x: string; fold: string | null; rank: number | null; lo: number | null; hi: number | null; log: boolean }

async function series(wanted: Wanted): Promise<Answer> {
  if (wanted.rank !== null || (wanted.fold && wanted.fold !== 'mean')) throw new Refused(`${UNABLE}: it has the lowest rank and the mean over ranks.`, 400);
  const runs = new Set(wanted.runs), items: Item[] = [];
  for (const key of wanted.keys)
    for (const item of await thinned(wanted, key)) if (runs.has(item.run as string)) items.push(zoomed(item, wanted));
  return { head: { axis: wanted.x }, items };
}
async function thinned({ project, x, fold }: Wanted, key: string): Promise<Item[]> {
  const plain = x === 'auto' || x === 'step';
  if (!plain && x !== 'time' && x !== 'relative') throw new Refused(`${UNABLE}: it has charts over steps and times.`, 400);
  const first = await binary(project, key, plain ? 'auto' : x, fold);
  // define_metric may give some runs another x axis than the step; only then is there a second file.
  return x === 'step' && first.some((item) => item.axis !== 'step' && item.axis !== 'relative') ? binary(project, key, 'step', fold) : first;
}
async function binary(project: string, key: string, x: string, fold: string | null): Promise<Item[]> {
  const name = `${nameOf('api/series', project, key, x, fold ?? '')}.bin`;
  if (!binaries.has(name)) {
    const found = fetch(name).then((response) => {
      if (response.status === 404) return new ArrayBuffer(0); // no run of this project logged it
      if (!response.ok) throw new Refused(`${key}: ${response.statusText}`, response.status);
      return response.arrayBuffer();
    });
    found.catch(() => binaries.delete(name));
    binaries.set(name, found);
    for (const old of [...binaries.keys()].slice(0, Math.max(0, binaries.size - KEPT))) binaries.delete(old);
  }
  const buffer = await binaries.get(name)!;
  return buffer.byteLength ? decode(buffer).items : [];
}

/** Return the buckets in a range, and one more on each side so that lines reach the edge. */
export function zoomed(item: Item, { lo, hi }: { lo: number | null; hi: number | null }): Item {
  if (lo === null && hi === null) return item;
  const x = item.columns.x, end = item.columns.xLast ?? x;
  let from = 0, to = x.length;
  while (lo !== null && from < to && end[from] < lo) from++;
  while (hi !== null && to > from && x[to - 1] > hi) to--;
  from = Math.max(0, from - 1);
  to = Math.min(x.length, to + 1);
  const cut = Object.fromEntries(Object.entries(item.columns).map(([name, column]) => [name, column.subarray(from, to) as Column]));
  const inside = (at: number) => (lo === null || at >= lo) && (hi === null || at <= hi);
  const { marks, restarts } = item as unknown as Series;
  return { ...item, marks: marks.filter(([at]) => inside(at)), restarts: restarts.filter(inside), columns: cut };
}

const text = (cell: unknown) => (typeof cell === 'string' ? cell : cell === null || cell === undefined ? '' : typeof cell === 'object' ? JSON.stringify(cell) : String(cell));

function rowsOf(table: Table, given: Given): Table {
  const { search = '', sort = '', where = '', start = 0, count = 100 } = given as { search?: string; sort?: string; where?: string; start?: number; count?: number };
  const media = Map.groupBy(table.media, ([row]) => row), word = search.trim().toLowerCase();
  let places = table.rows.map((_, i) => i);
  const cell = (row: number, column: number) => (media.get(row)?.some(([, at]) => at === column) ? null : table.rows[row][column]);
  for (const [column, op, value] of where ? (JSON.parse(where) as ReturnType<typeof known>) : []) {
    const at = table.columns.indexOf(column);
    places = places.filter((row) => fits(cell(row, at), op, value));
  }
  if (word) places = places.filter((row) => table.columns.some((_, i) => text(cell(row, i)).toLowerCase().includes(word)));
  if (sort) {
    const back = sort.startsWith('-') ? -1 : 1, at = table.columns.indexOf(sort.replace(/^-/, ''));
    const rank = (row: number) => { const one = cell(row, at); return typeof one === 'number' || typeof one === 'boolean' ? 0 : text(one) ? 1 : 2; };
    const compare = (a: unknown, b: unknown) => (typeof a === 'number' || typeof a === 'boolean' ? Number(a) - Number(b) : text(a) < text(b) ? -1 : text(a) > text(b) ? 1 : 0);
    places.sort((a, b) => rank(a) - rank(b) || compare(cell(a, at), cell(b, at)) * back);
  }
  const shown = places.slice(Number(start), Number(start) + Number(count));
  return { ...table, rows: shown.map((row) => table.rows[row]), numbers: shown.map((row) => table.numbers[row]), found: places.length,
    media: shown.flatMap((row, i) => (media.get(row) ?? []).map(([, ...rest]): Table['media'][number] => [i, ...rest])) };
}
function fits(cell: unknown, op: string, value: string): boolean {
  if (op === '~') return text(cell).toLowerCase().includes(value.toLowerCase());
  if (op === '=' || op === '!=') return same(cell, value) === (op === '=');
  const bound = Number(value);
  if (value.trim() === '' || Number.isNaN(bound)) throw new Refused(`'${value}' is not a number. ${op} compares numbers.`, 400);
  return typeof cell === 'number' && ({ '<': cell < bound, '<=': cell <= bound, '>': cell > bound, '>=': cell >= bound }[op] ?? false);
}
const same = (cell: unknown, value: string) => (typeof cell === 'number' ? Number(value) === cell && value.trim() !== '' : text(cell) === value);

async function sample(project: string, given: Given): Promise<unknown> {
  const { runs, key, row, column, value } = given as { runs: string[]; key: string; row: number; column: string | null; value: string | null };
  const all = (await file<Points[]>('api/media', project, key)).filter((one) => runs.includes(one.run));
  const points = all.flatMap((one) => one.points.filter((point) => point.kind === 'table').map((point) => ({ ...point, run: one.run }))).sort((a, b) => a.step - b.step);
  const found = await Promise.all(points.slice(-200).map(async (point) => {
    const table = await file<Table>('api/table', project, point.run, key, point.n!).catch(() => null);
    const at = !table ? -1 : column === null ? row : !table.columns.includes(column) ? -1
      : (table.rows[row] && same(table.rows[row][table.columns.indexOf(column)], value ?? '') ? row : table.rows.findIndex((cells) => same(cells[table.columns.indexOf(column)], value ?? '')));
    if (!table?.rows[at]) return null;
    return { run: point.run, step: point.step, rank: point.rank, n: point.n, row: table.numbers[at], columns: table.columns, cells: table.rows[at], media: table.media.filter(([one]) => one === at).map(([, ...rest]) => rest) };
  }));
  return { found: found.filter((one) => one !== null), tables: points.length };
}
