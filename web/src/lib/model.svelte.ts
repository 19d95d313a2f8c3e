// The state of the runs: the project's list, which runs are shown, how they are drawn, and live updates.
import type { Theme } from './theme';
import { SvelteMap } from 'svelte/reactivity';
import { columns as fetchColumns, get, outages, quiet, type Project, type Run, type Runs, session, type Unreadable } from './api';
import { copy } from './copy';
import { COLOURS, DASHES, GROUNDS, colourAt, dashAt } from './colours';
import { shape } from './lazy.svelte';
import { watch, type Message } from './live';
import { hiding } from './shown';
import { settings, view } from './view.svelte';

export const MOST = 200; // lines per chart; the list says if there are more runs
export const FULL = 8; // lines drawn at full width if there are more runs than colors: the first of the list
const DASHED = 64, STEPS = 8; // above DASHED runs, no dashes; above STEPS values, a color scale instead of a color per value
const FIRST = 300; // runs in the first response: more than are drawn
const BLOCK = 400, COLUMNS = 150; // runs per request for statistics; columns kept up to date
const SOON = 1000, LATE = 30_000; // ms until a failed request is retried: at first, at most
const LOSS_LIKE = /loss|perplexity|error/i;

type Cells = (number | string | null)[];

class Model {
  projects = $state.raw<Project[]>([]);
  user = $state(''); // the logged-in user, if the server has logins
  runs = $state.raw<Run[]>([]);
  total = $state(0); // more than `runs` holds while the first charts are drawn
  #project = ''; // the one that is open
  #listing: { project: string; blocks: string[]; runs: Run[] } = { project: '', blocks: [], runs: [] }; // the last response
  keys = $state.raw<string[]>([]);
  media = $state.raw<string[]>([]);
  columns = $state.raw<string[]>([]);
  goals = $state.raw<Record<string, string>>({}); // whether a metric should be low or high, as set by define_metric
  unreadable = $state.raw<Unreadable[]>([]);
  passing = $state.raw<Set<string> | null>(null);
  cells = new SvelteMap<string, Map<string, number | string | null>>();
  loaded = $state(false);
  writable = $state(false);
  version = $state('');
  unread = $state(0); // runs whose statistics are being read: until then, an order by them is not final
  online = $state<'connecting' | 'online' | 'offline'>('connecting');
  error = $state('');
  filterError = $state('');
  news = $state.raw<{ n: number; runs: Set<string> | null }>({ n: 0, runs: new Set() });
  #pointed = $state('');
  #cursor = $state<number | null>(null);
  cursorAxis = $state('step');
  lit = $state.raw<{ run: string; x: number | null; axis: string }>({ run: '', x: null, axis: 'step' }); // `pointed` and `cursor`, throttled
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
  #recent = new Set<string>(); // column names, the most recently used last
  scale = $derived(this.#scale());
  groups = $derived({ colour: this.scale ? null : this.#places(view.colour, COLOURS), dash: this.#places(view.dash, DASHES.length) });
  /** The fields that define a group: those chosen, or the whole config except those. `fields` also has those of color and dash. */
  by = $derived(view.by[0] === '*' ? this.columns.filter((name) => name.startsWith('config:') && !view.by.includes(name)) : view.by);
  fields = $derived([...new Set([...this.by, this.scale ? '' : view.colour, view.dash].filter(Boolean))]);
  #teams = $derived(view.by.length && !view.colour && !view.each ? this.#ranked() : null);
  picked = $derived(settings(view.picked));
  failed = $derived(this.runs.filter((run) => !run.archived && run.failed).length);
  running = $derived(this.runs.filter((run) => run.status === 'running').length);

  /** The run under the pointer, in any chart or list. */
  get pointed() { return this.#pointed; }
  set pointed(run: string) { this.#pointed = run; this.#light(); }

  /** The x under the pointer, shared by all charts over the same axis. */
  get cursor() { return this.#cursor; }
  set cursor(x: number | null) { this.#cursor = x; this.#light(); }
  point(x: number, axis: string) { this.cursorAxis = axis; this.cursor = x; }

  /** Update the other charts ten times a second: twenty of them redraw a line and lay out a heading each time. */
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

  /** Return a run's cell: a basic fact, a config value (`config:lr`) or a metric (`metric:loss`). */
  value(run: Run, name: string): number | string | null {
    if (!name.includes(':')) return ((run as unknown as Record<string, unknown>)[name] as number | string | null) ?? null;
    return this.cells.get(name)?.get(run.id) ?? null;
  }

  /** Return the index of each value of a field, in order. If there are more values than `looks`, only those of shown runs count. */
  #places(field: string, looks: number): Map<string, number> | null {
    if (!field) return null;
    const all = this.groupsBy(this.runs, field);
    return new Map((all.length > looks ? this.groupsBy(this.shown, field) : all).map(([name], i) => [name, i]));
  }

  /** Group runs by the value of a field: numbers in order, strings in natural order, runs without a value last. */
  groupsBy(runs: Run[], field: string): [string, Run[]][] {
    const groups = Map.groupBy(runs, (run) => this.value(run, field));
    return order([...groups], ([value]) => value, 1).map(([value, members]) => [value === null ? '–' : String(value), members]);
  }

  /** Assign a palette index to each drawn run. Runs keep theirs while they are shown; no two share a color until all are taken. */
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

  /** Return the range of the color scale, used for a metric or for a field with many numbers; null if each value has its own color. */
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

  /** Group runs in list order. If grouped by the whole config, names only have the values that differ. */
  grouped(ids: string[]): Map<string, string[]> {
    const runs = ids.flatMap((id) => this.byId.get(id) ?? []);
    const fields = view.by[0] !== '*' ? this.fields : this.fields.filter((field) => runs.some((run) => this.value(run, field) !== this.value(runs[0], field)));
    const name = (id: string) => fields.map((field) => `${field.replace(/^config:/, '')}=${this.value(this.byId.get(id)!, field) ?? '–'}`).join(' ') || 'all runs';
    return Map.groupBy(runs.map((run) => run.id), name);
  }

  /** Return the palette index of each run's group. It does not depend on the list order, nor on which runs are hidden if colors suffice. */
  #ranked(): Map<string, number> {
    const all = this.teams(this.runs), kept = all.length > COLOURS ? this.teams(this.drawn) : all;
    return new Map(kept.flatMap(([, runs], i) => runs.map((run) => [run.id, i] as const)));
  }

  /** Group runs by the chosen fields only, sorted by their values. */
  teams(runs: Run[]): [string, Run[]][] {
    const some = new Set(this.by), fields = this.fields.filter((field) => some.has(field) && (view.by[0] !== '*' || runs.some((run) => this.value(run, field) !== this.value(runs[0], field))));
    const values = (run: Run) => fields.map((field) => this.value(run, field));
    const groups = [...Map.groupBy(runs, (run) => JSON.stringify(values(run))).values()];
    const sorted = fields.reduceRight((list, field) => order(list, ([first]) => this.value(first, field), 1), groups);
    return sorted.map((list) => [fields.map((field) => `${field.replace(/^config:/, '')} = ${this.value(list[0], field) ?? '–'}`).join(', ') || 'all runs', list]);
  }

  /** Return how a run is drawn everywhere: in its own color, its group's, or one on a scale. */
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

  /** Fetch the projects, and open the newest if the URL names none. */
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

  /** Show another project. */
  open(project: string): void {
    if (project === this.#project) return;
    this.#project = project;
    this.cells.clear();
    this.loaded = false;
    void this.refresh();
  }

  /** Fetch the project's runs again, and the cells in use. */
  async refresh(): Promise<void> {
    const project = view.project;
    if (!project) return this.start();
    try {
      const had = this.#listing.project === project ? this.#listing : { blocks: [], runs: [] };
      const count = !this.loaded && newestWillDo() ? FIRST : undefined;
      const answer = await get<Runs>('api/runs', { project, count, known: had.blocks.join(',') || undefined });
      if (project !== view.project) return;
      if (!this.loaded) await this.filter(); // do not draw runs that the filter would remove right away
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
      if (this.runs.length < this.total) { // charts first, then the rest of the list
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

  /** Fetch the named columns that are missing, or all of them if `anew`. */
  async need(names: string[], anew = false): Promise<void> {
    if (this.runs.length < this.total) return; // called again once all runs are loaded
    const missing = names.filter((name) => /:./.test(name) && (anew || !this.cells.has(name)));
    if (!anew) for (const name of names) { this.#recent.delete(name); this.#recent.add(name); }
    if (!missing.length) return;
    if (!anew) for (const name of missing) this.cells.set(name, new Map());
    const statistics = missing.filter((name) => !/^(config|metric):/.test(name));
    const plain = missing.filter((name) => !statistics.includes(name));
    await Promise.all([plain.length && this.#fetch(plain, null), statistics.length && this.#inBlocks(statistics, anew)]);
  }

  /** Fetch statistics in blocks of runs, starting at the top of the list: the first time, the server reads every point. */
  async #inBlocks(names: string[], anew: boolean): Promise<void> {
    const { project } = view, { runs } = this.news;
    const ids = [...new Set([...this.listed, ...this.runs].map((run) => run.id))].filter((id) => !anew || !runs || runs.has(id) || this.byId.get(id)?.status === 'running');
    for (let at = 0; at < ids.length && project === view.project; at += BLOCK) {
      if (!anew) this.unread = ids.length - at;
      await this.#fetch(names, ids.slice(at, at + BLOCK));
    }
    if (!anew) this.unread = 0;
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

  /** Drop columns that were only scrolled past, so that live updates do not refetch them. */
  #forget() {
    const old = [...this.#recent].slice(0, -COLUMNS);
    for (const name of old) { this.#recent.delete(name); this.cells.delete(name); }
  }

  #failed(why: unknown) {
    this.error = (why as Error).message;
    if (!(why as { code?: number }).code) this.online = 'offline';
  }

  /** Listen for live updates, and poll slowly for changes that write nothing, such as a lost node. */
  live(): () => void {
    if (copy) { this.online = 'online'; return () => {}; } // published files do not change
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
      for (const name of unknown) met.add(name); // fetch once, whether or not it is then listed
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
    // Retry after an outage, whether or not the event stream broke: charts and pages then fetch again what they are missing.
    let wait = SOON, again: ReturnType<typeof setTimeout> | undefined;
    outages.failed = () => {
      again ??= setTimeout(() => { again = undefined; hear({ kind: 'changed', runs: null }); }, wait);
      wait = Math.min(LATE, wait * 2);
    };
    outages.answered = () => { if (!again) wait = SOON; };
    return () => { stop(); clearInterval(slow); clearTimeout(again); };
  }
}

/** Return whether only the newest runs are drawn: nothing sorts, filters, groups or names others. */
const newestWillDo = () => view.page === 'charts' && ![view.sort, view.filter, view.colour, view.dash, view.split, view.by.length, view.baseline, view.failed, view.hidden.length].some(Boolean);

/** Merge a response into the list of runs: unchanged blocks keep the runs already loaded. */
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

/** Sort: numbers by value, strings in natural order; missing and NaN last in both directions. Each value is looked up once. */
export function order<T>(items: T[], value: (item: T) => number | string | null, back: number): T[] {
  const values = items.map(value), numbers = new Float64Array(items.length), places = new Uint32Array(items.length);
  const missing: number[] = [];
  let count = 0, figures = true;
  for (let i = 0; i < values.length; i++) {
    const one = values[i];
    if (one === null || one !== one) { missing.push(i); continue; }
    numbers[i] = typeof one === 'number' ? one : one.trim() ? Number(one) : NaN; // in a column with text, numbers arrive as text
    if (numbers[i] !== numbers[i]) figures = false;
    places[count++] = i;
  }
  const compare = (a: number, b: number) => {
    const [x, y] = [numbers[a], numbers[b]];
    return x === x && y === y ? x - y : x === x ? -1 : y === y ? 1 : people.compare(String(values[a]), String(values[b]));
  };
  // Sort indexes into a typed array, so that comparing numbers neither allocates nor dereferences objects.
  const there = places.subarray(0, count).sort(figures ? (a, b) => (numbers[a] - numbers[b]) * back : (a, b) => compare(a, b) * back);
  const found: T[] = [];
  for (const place of there) found.push(items[place]);
  for (const place of missing) found.push(items[place]);
  return found;
}
const people = new Intl.Collator('en', { numeric: true });

/** Sort keys: pinned first, then losses, then the rest as logged; system metrics last. */
export function orderKeys(keys: string[], pins: string[]): string[] {
  const rank = (key: string) => (pins.includes(key) ? 0 : key.startsWith('system/') ? 3 : LOSS_LIKE.test(key) ? 1 : 2);
  return keys.map((key, i) => [rank(key), i, key] as const).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(([, , key]) => key);
}

/** Group keys into sections by the part before the slash; the section with a loss first, system last. */
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
