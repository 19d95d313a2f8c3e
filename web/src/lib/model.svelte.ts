// What the page knows of the runs: the project's list, which of them are shown, how each looks, and what is new.
import type { Theme } from './theme';
import { SvelteMap } from 'svelte/reactivity';
import { columns as fetchColumns, get, outages, quiet, type Project, type Run, type Runs, session, type Unreadable } from './api';
import { copy } from './copy';
import { COLOURS, DASHES, GROUNDS, colourAt, dashAt } from './colours';
import { shape } from './lazy.svelte';
import { watch, type Message } from './live';
import { hiding } from './shown';
import { settings, view } from './view.svelte';

export const MOST = 200; // lines in one chart; the list says when there are more runs
export const FULL = 8; // lines of the full width, where there are more runs than colours: those highest in the list
const DASHED = 64, STEPS = 8; // runs that dashes tell apart; values that have a colour each, where more are on a scale
const FIRST = 300; // runs that the first answer has: more than are drawn
const BLOCK = 400, COLUMNS = 150; // runs whose statistics are asked for at once; columns kept up to date
const SOON = 1000, LATE = 30_000; // ms until what failed is asked for again
const LOSS_LIKE = /loss|perplexity|error/i;

type Cells = (number | string | null)[];

class Model {
  projects = $state.raw<Project[]>([]);
  user = $state(''); // who logged in, where people do
  runs = $state.raw<Run[]>([]);
  total = $state(0); // more than there are in `runs` while the first charts are drawn
  #listing: { project: string; blocks: string[]; runs: Run[] } = { project: '', blocks: [], runs: [] }; // as the server last sent it
  keys = $state.raw<string[]>([]);
  media = $state.raw<string[]>([]);
  columns = $state.raw<string[]>([]);
  goals = $state.raw<Record<string, string>>({}); // which metrics should be low or high, where define_metric says so
  unreadable = $state.raw<Unreadable[]>([]);
  passing = $state.raw<Set<string> | null>(null);
  cells = new SvelteMap<string, Map<string, number | string | null>>();
  loaded = $state(false);
  writable = $state(false);
  version = $state('');
  online = $state<'connecting' | 'online' | 'offline'>('connecting');
  error = $state('');
  filterError = $state('');
  news = $state.raw<{ n: number; runs: Set<string> | null }>({ n: 0, runs: new Set() });
  #pointed = $state('');
  #cursor = $state<number | null>(null);
  cursorAxis = $state('step');
  lit = $state.raw<{ run: string; x: number | null; axis: string }>({ run: '', x: null, axis: 'step' }); // the same a moment later
  #later: ReturnType<typeof setTimeout> | undefined;
  theme = $state<Theme>('auto');
  systemDark = $state(false);

  dark = $derived(this.theme === 'auto' ? this.systemDark : this.theme === 'dark');
  ground = $derived(GROUNDS[this.dark ? 'dark' : 'light']);
  byId = $derived(new Map(this.runs.map((run) => [run.id, run])));
  places = $derived(new Map([...this.runs].sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1)).map((run, i) => [run.id, i])));
  metric = $derived(view.metric && this.keys.includes(view.metric) ? view.metric : (orderKeys(this.keys, [])[0] ?? ''));
  listed = $derived(this.#sorted(this.runs.filter((run) => (!this.passing || this.passing.has(run.id)) && (view.archived || !run.archived) && (!view.failed || run.failed))));
  hidden = $derived(hiding(view.hidden));
  shown = $derived(this.listed.filter((run) => !this.hidden.has(run.id)));
  drawn = $derived(this.shown.slice(0, MOST));
  strong = $derived(new Set([...this.drawn.slice(0, FULL).map((run) => run.id), view.baseline]));
  slots = $derived(this.#slots());
  #kept = new Map<string, number>();
  #recent = new Set<string>(); // columns, the last one needed at the end
  scale = $derived(this.#scale());
  groups = $derived({ colour: this.scale ? null : this.#places(view.colour, COLOURS), dash: this.#places(view.dash, DASHES.length) });
  /** What makes a group: the fields chosen, or all of the config but those; and the fields of colour and dash. */
  by = $derived(view.by[0] === '*' ? this.columns.filter((name) => name.startsWith('config:') && !view.by.includes(name)) : view.by);
  fields = $derived([...new Set([...this.by, this.scale ? '' : view.colour, view.dash].filter(Boolean))]);
  #teams = $derived(view.by.length && !view.colour && !view.each ? this.#ranked() : null);
  picked = $derived(settings(view.picked));
  failed = $derived(this.runs.filter((run) => !run.archived && run.failed).length);
  running = $derived(this.runs.filter((run) => run.status === 'running').length);

  /** The run under the pointer, anywhere. */
  get pointed() { return this.#pointed; }
  set pointed(run: string) { this.#pointed = run; this.#light(); }

  /** The x under the pointer, on all charts over the same axis. */
  get cursor() { return this.#cursor; }
  set cursor(x: number | null) { this.#cursor = x; this.#light(); }
  point(x: number, axis: string) { this.cursorAxis = axis; this.cursor = x; }

  /** Let the charts elsewhere follow ten times a second: twenty of them redraw a line and lay out a title for it. */
  #light() {
    this.#later ??= setTimeout(() => {
      this.#later = undefined;
      this.lit = { run: this.#pointed, x: this.#cursor, axis: this.cursorAxis };
    }, 100);
  }

  #sorted(runs: Run[]): Run[] {
    const [back, name] = view.sort.startsWith('-') ? [-1, view.sort.slice(1)] : [1, view.sort];
    if (!name) return runs;
    const column = name.includes(':') ? (this.cells.get(name) ?? new Map()) : null;
    return order(runs, (run) => (column ? column.get(run.id) : this.value(run, name)) ?? null, back);
  }

  /** A run's cell: a basic fact, a setting (`config:lr`) or a figure (`metric:loss`). */
  value(run: Run, name: string): number | string | null {
    if (!name.includes(':')) return ((run as unknown as Record<string, unknown>)[name] as number | string | null) ?? null;
    return this.cells.get(name)?.get(run.id) ?? null;
  }

  /** The values of a field, in order. Where there are more than looks to tell them apart, only those that shown runs have. */
  #places(field: string, looks: number): Map<string, number> | null {
    if (!field) return null;
    const all = this.groupsBy(this.runs, field);
    return new Map((all.length > looks ? this.groupsBy(this.shown, field) : all).map(([name], i) => [name, i]));
  }

  /** Runs by the value of a field: numbers by size, texts as people sort them, runs without one last. */
  groupsBy(runs: Run[], field: string): [string, Run[]][] {
    const groups = Map.groupBy(runs, (run) => this.value(run, field));
    return order([...groups], ([value]) => value, 1).map(([value, members]) => [value === null ? '–' : String(value), members]);
  }

  /** Which place in the palette each coloured run has. It keeps it while it is shown; no two share one until all are taken. */
  #slots(): Map<string, number> {
    const wanted = [...new Set([...this.drawn.map((run) => run.id), ...view.compare, view.run])].filter((id) => this.byId.has(id));
    wanted.sort((a, b) => this.places.get(a)! - this.places.get(b)!);
    const found = new Map(wanted.filter((id) => (this.#kept.get(id) ?? COLOURS) < COLOURS).map((id) => [id, this.#kept.get(id)!]));
    const used = new Set(found.values());
    let next = 0;
    for (const id of wanted) {
      if (found.has(id)) continue;
      while (used.has(next)) next++;
      used.add(next);
      found.set(id, next);
    }
    return (this.#kept = found);
  }

  /** Where the values that colour the runs lie: a metric, or more numbers than one could name a colour for. */
  #scale(): { low: number; high: number; log: boolean } | null {
    const field = view.colour;
    if (!field.includes(':')) return null;
    const all = this.shown.map((run) => this.value(run, field)).filter((one) => one !== null);
    const values = all.filter((one) => typeof one === 'number' && Number.isFinite(one)) as number[];
    if (!values.length || (!field.startsWith('metric:') && (values.length < all.length || (!view.each && new Set(values).size <= STEPS)))) return null;
    let low = Infinity, high = -Infinity;
    for (const one of values) { if (one < low) low = one; if (one > high) high = one; }
    return { low, high, log: low > 0 && high / low > 100 };
  }

  /** Runs by what makes a group, in the order of the list. Of a whole config, only values that differ are named. */
  grouped(ids: string[]): Map<string, string[]> {
    const runs = ids.flatMap((id) => this.byId.get(id) ?? []);
    const fields = view.by[0] !== '*' ? this.fields : this.fields.filter((field) => runs.some((run) => this.value(run, field) !== this.value(runs[0], field)));
    const name = (id: string) => fields.map((field) => `${field.replace(/^config:/, '')}=${this.value(this.byId.get(id)!, field) ?? '–'}`).join(' ') || 'all runs';
    return Map.groupBy(runs.map((run) => run.id), name);
  }

  /** The place of each run's group in the palette, whatever the order of the list; of all runs' groups, so that it stays when some are hidden. */
  #ranked(): Map<string, number> {
    const all = this.teams(this.runs), kept = all.length > COLOURS ? this.teams(this.drawn) : all;
    return new Map(kept.flatMap(([, runs], i) => runs.map((run) => [run.id, i] as const)));
  }

  /** Runs by the chosen fields alone, in the order of their values. */
  teams(runs: Run[]): [string, Run[]][] {
    const some = new Set(this.by), fields = this.fields.filter((field) => some.has(field) && (view.by[0] !== '*' || runs.some((run) => this.value(run, field) !== this.value(runs[0], field))));
    const values = (run: Run) => fields.map((field) => this.value(run, field));
    const groups = [...Map.groupBy(runs, (run) => JSON.stringify(values(run))).values()];
    const sorted = fields.reduceRight((list, field) => order(list, ([first]) => this.value(first, field), 1), groups);
    return sorted.map((list) => [fields.map((field) => `${field.replace(/^config:/, '')} = ${this.value(list[0], field) ?? '–'}`).join(', ') || 'all runs', list]);
  }

  /** How a run is drawn, everywhere: in a colour of its own, in that of its group, or in one on a scale. */
  look(id: string, few = false): { colour: string; dash: number[]; strong: boolean } {
    const run = this.byId.get(id), { colour, dash } = this.groups;
    const place = this.#teams?.get(id) ?? this.slots.get(id) ?? (few ? (this.places.get(id) ?? 0) : -1);
    const strong = few || this.drawn.length <= COLOURS || this.strong.has(id);
    if (place < 0 && !(colour || this.scale)) return { colour: this.ground.faint, dash: [], strong: false };
    const in_ = (groups: Map<string, number>, field: string) => groups.get(String(run ? (this.value(run, field) ?? '–') : '–')) ?? 0;
    return {
      colour: this.picked.get(id) ?? (this.scale ? this.#onScale(run) : colourAt(this.ground, colour ? in_(colour, view.colour) : place)),
      dash: dash ? dashAt(in_(dash, view.dash) * COLOURS) : colour || this.scale || (!few && this.drawn.length > DASHED) ? [] : dashAt(place),
      strong,
    };
  }
  #onScale(run?: Run): string {
    const value = run ? this.value(run, view.colour) : null, { low, high, log } = this.scale!;
    if (typeof value !== 'number' || !Number.isFinite(value)) return this.ground.ink;
    const at = log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
    return shape()?.colourOf(Number.isFinite(at) ? at : 0.5, this.dark) ?? this.ground.ink;
  }

  /** Learn which projects there are, and open the newest where the address names none. */
  async start(): Promise<void> {
    try {
      await this.#projects();
    } catch (why) {
      this.error = (why as Error).message;
      this.loaded = true;
    }
  }

  async #projects(): Promise<void> {
    const answer = await get<{ projects: Project[]; write: boolean; version: string; user?: string }>('api/projects');
    session.user = this.user = answer.user ?? '';
    this.projects = answer.projects;
    this.writable = answer.write;
    this.version = answer.version;
    if (!view.project || !answer.projects.some((one) => one.name === view.project)) view.project ||= answer.projects[0]?.name ?? '';
    if (!view.project) this.loaded = true;
  }

  /** Read the project's runs anew, and the cells in use. */
  async refresh(): Promise<void> {
    const project = view.project;
    if (!project) return this.start();
    try {
      const had = this.#listing.project === project ? this.#listing : { blocks: [], runs: [] };
      const count = !this.loaded && newestWillDo() ? FIRST : undefined;
      const answer = await get<Runs>('api/runs', { project, count, known: had.blocks.join(',') || undefined });
      if (project !== view.project) return;
      if (!this.loaded) await this.filter(); // nothing is drawn that the filter would take away at once
      this.runs = listing(had.runs, answer, had.blocks.length > 0);
      this.total = answer.total ?? this.runs.length;
      this.#listing = { project, blocks: answer.blocks ?? [], runs: this.runs };
      this.keys = answer.keys;
      this.media = answer.media;
      this.columns = answer.columns;
      this.goals = answer.goals ?? {};
      this.#forget();
      this.unreadable = answer.unreadable ?? [];
      this.error = '';
      const again = this.loaded;
      this.loaded = true;
      if (this.runs.length < this.total) { // the charts come first, then the rest of the list
        await quiet();
        return await this.refresh();
      }
      await Promise.all([again && this.filter(), this.need([...this.cells.keys()], true)]);
    } catch (why) {
      this.#failed(why);
    }
  }

  async filter(): Promise<void> {
    const { project, filter } = view;
    if (!filter.trim()) {
      this.passing = null;
      this.filterError = '';
      return;
    }
    try {
      const { ids } = await get<{ ids: string[] }>('api/passing', { project, filter });
      if (filter !== view.filter || project !== view.project) return;
      this.passing = new Set(ids);
      this.filterError = '';
    } catch (why) {
      if (filter === view.filter) this.filterError = (why as Error).message;
    }
  }

  /** Fetch columns that are not here yet (or all of those named, again). */
  async need(names: string[], anew = false): Promise<void> {
    if (this.runs.length < this.total) return; // asked for again when all runs are here
    const missing = names.filter((name) => /:./.test(name) && (anew || !this.cells.has(name)));
    if (!anew) for (const name of names) { this.#recent.delete(name); this.#recent.add(name); }
    if (!missing.length) return;
    if (!anew) for (const name of missing) this.cells.set(name, new Map());
    const statistics = missing.filter((name) => !/^(config|metric):/.test(name));
    const plain = missing.filter((name) => !statistics.includes(name));
    await Promise.all([plain.length && this.#fetch(plain, null), statistics.length && this.#inBlocks(statistics, anew)]);
  }

  /** Statistics are read from every point the first time: some runs at a time, those on top of the list first. */
  async #inBlocks(names: string[], anew: boolean): Promise<void> {
    const { project } = view, { runs } = this.news;
    const ids = [...new Set([...this.listed, ...this.runs].map((run) => run.id))].filter((id) => !anew || !runs || runs.has(id) || this.byId.get(id)?.status === 'running');
    for (let at = 0; at < ids.length && project === view.project; at += BLOCK) await this.#fetch(names, ids.slice(at, at + BLOCK));
  }

  async #fetch(names: string[], runs: string[] | null): Promise<void> {
    const project = view.project;
    try {
      const { head, items } = await fetchColumns('api/columns', { project, names, runs });
      if (project !== view.project) return;
      const ids = head.runs as string[];
      for (const item of items) {
        const name = item.name as string, cells = new Map(runs ? this.cells.get(name) : []);
        cellsOf(item, ids.length).forEach((cell, i) => cells.set(ids[i], cell));
        this.cells.set(name, cells);
      }
    } catch (why) {
      this.#failed(why);
    }
  }

  /** Columns that were only scrolled past are not read again with every piece of news. */
  #forget() {
    const old = [...this.#recent].slice(0, -COLUMNS);
    for (const name of old) { this.#recent.delete(name); this.cells.delete(name); }
  }

  #failed(why: unknown) {
    this.error = (why as Error).message;
    if (!(why as { code?: number }).code) this.online = 'offline';
  }

  /** Listen for news, and look at the list now and then for what happens without a byte written, such as a lost node. */
  live(): () => void {
    if (copy) { this.online = 'online'; return () => {}; } // files that nobody changes
    let waiting = false;
    const met = new Set<string>();
    const hear = (message: Message) => {
      if (message.kind !== 'changed') {
        const back = message.kind === 'online' && (this.online === 'offline' || !!this.error);
        this.online = message.kind;
        if (back) hear({ kind: 'changed', runs: null });
        return;
      }
      const unknown = message.runs?.map(([project]) => project).filter((name) => !met.has(name) && !this.projects.some((one) => one.name === name)) ?? [];
      for (const name of unknown) met.add(name); // asked for once, whether or not it is listed then
      if (unknown.length) void this.start();
      const mine = !view.project ? null : message.runs?.filter(([project]) => project === view.project).map(([, id]) => id);
      if (mine && !mine.length) return;
      this.news = { n: this.news.n + 1, runs: mine ? new Set(mine) : null };
      if (waiting) return;
      waiting = true;
      setTimeout(() => { waiting = false; if (!document.hidden) void this.refresh(); }, this.runs.length > 500 ? 2000 : 400);
    };
    const stop = watch(hear);
    const slow = setInterval(() => { if (!document.hidden && this.running) void this.refresh(); }, 15_000);
    // What an outage kept from being read is read when it is over, whether or not the stream broke: charts and pages ask again.
    let wait = SOON, again: ReturnType<typeof setTimeout> | undefined;
    outages.failed = () => {
      again ??= setTimeout(() => { again = undefined; hear({ kind: 'changed', runs: null }); }, wait);
      wait = Math.min(LATE, wait * 2);
    };
    outages.answered = () => { if (!again) wait = SOON; };
    return () => { stop(); clearInterval(slow); clearTimeout(again); };
  }
}

/** Whether the newest runs are all that is drawn: nothing orders, filters, groups or names others. */
const newestWillDo = () => view.page === 'charts' && ![view.sort, view.filter, view.colour, view.dash, view.split, view.by.length, view.baseline, view.failed, view.hidden.length].some(Boolean);

/** The list of runs: of blocks that did not change, the runs are those that are here already. */
export function listing(had: Run[], answer: Runs, partly: boolean): Run[] {
  const { runs, total = runs.length, size = total, blocks = [], fresh = [] } = answer;
  if (!partly) return runs;
  const found: Run[] = [], sent = new Set(fresh);
  let next = 0;
  for (let i = blocks.length - 1; i >= 0; i--) {
    const count = Math.min(size, total - i * size), end = had.length - i * size;
    for (const run of sent.has(i) ? runs.slice(next, next + count) : had.slice(end - count, end)) found.push(run);
    if (sent.has(i)) next += count;
  }
  return found;
}

function cellsOf(item: { [fact: string]: unknown; columns: Record<string, ArrayLike<number>> }, count: number): Cells {
  if (item.texts) return item.texts as Cells;
  const missing = new Set(item.missing as number[]);
  return Array.from({ length: count }, (_, i) => (missing.has(i) ? null : item.columns.values[i]));
}

/** Numbers by value, texts as people sort them; what is missing or NaN last, whichever way. Each value is looked up once. */
export function order<T>(items: T[], value: (item: T) => number | string | null, back: number): T[] {
  const values = items.map(value), numbers = new Float64Array(items.length), places = new Uint32Array(items.length);
  const missing: number[] = [];
  let count = 0, figures = true;
  for (let i = 0; i < values.length; i++) {
    const one = values[i];
    if (one === null || one !== one) { missing.push(i); continue; }
    if (typeof one === 'number') numbers[i] = one;
    else figures = false;
    places[count++] = i;
  }
  // Places are sorted, and numbers lie in one block: no object is made or followed for a comparison.
  const there = places.subarray(0, count).sort(figures ? (a, b) => (numbers[a] - numbers[b]) * back : (a, b) => compare(values[a]!, values[b]!) * back);
  const found: T[] = [];
  for (const place of there) found.push(items[place]);
  for (const place of missing) found.push(items[place]);
  return found;
}
const compare = (a: number | string, b: number | string) => (typeof a === 'number' && typeof b === 'number' ? a - b : people.compare(String(a), String(b)));
const people = new Intl.Collator('en', { numeric: true });

/** Pinned first, then what is like a loss, then the rest as logged; system figures last. */
export function orderKeys(keys: string[], pins: string[]): string[] {
  const rank = (key: string) => (pins.includes(key) ? 0 : key.startsWith('system/') ? 3 : LOSS_LIKE.test(key) ? 1 : 2);
  return keys.map((key, i) => [rank(key), i, key] as const).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(([, , key]) => key);
}

/** Charts by what stands before the slash; the section with a loss first, system last. */
export function sections(keys: string[], pins: string[]): [string, string[]][] {
  const found = new Map<string, string[]>();
  for (const key of orderKeys(keys, pins)) {
    const name = pins.includes(key) ? 'pinned' : key.includes('/') ? key.slice(0, key.indexOf('/')) : 'metrics';
    if (!found.has(name)) found.set(name, []);
    found.get(name)!.push(key);
  }
  return [...found];
}

export const model = new Model();
