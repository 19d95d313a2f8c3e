// The URL is the view: its fragment holds everything a colleague needs to see the same picture, without the defaults.
import { placed } from './format';

export const PAGES = ['charts', 'table', 'run', 'compare', 'sweep', 'media', 'logs', 'alerts', 'provenance', 'profile'] as const;
/** The key that opens each page: a digit for nine of them, `s` for Sweep. */
export const PAGE_KEYS: Record<string, Page> = { ...Object.fromEntries(PAGES.filter((page) => page !== 'sweep').map((page, i) => [String(i + 1), page])), s: 'sweep' };
export type Page = (typeof PAGES)[number];

export interface View {
  project: string; page: Page; run: string; filter: string; sort: string; metric: string; hidden: string[]; baseline: string;
  compare: string[]; pins: string[]; folded: string[]; search: string; x: string; ranks: string; smooth: number; kernel: string;
  logX: boolean; logY: boolean; band: boolean; zoom: [number, number] | null; zoomAxis: string; colour: string; dash: string; split: string; each: boolean;
  columns: string[]; differing: boolean; archived: boolean; failed: boolean; key: string; step: number | null;
  scatterX: string; scatterY: string; same: boolean; changes: boolean; opSort: string; opSearch: string; lineSearch: string; rank: string; tables: string[];
  sweep: string; byRun: boolean; axes: string[]; axisLogs: string[]; brushes: string[]; scatterLogX: string; scatterLogY: string; trend: boolean; contourX: string; contourY: string; contourLogs: string[];
  also: string[]; tableSearch: string; tableSort: string; where: string[]; plainImages: boolean; ownRange: boolean; // media: additional keys; rows of logged tables; without boxes and masks; a range per run
  frozen: string[]; widths: string[]; shaded: string[]; aggregate: string; closed: string[]; // table: pinned columns; `name=px`; colored columns; aggregate of groups; collapsed groups
  list: number; // width of the run list in px; 0 if collapsed
  mix: string[]; pairs: boolean; titles: string[]; ranges: string[]; sizes: string[]; clip: boolean; full: string; facet: string; // charts: rules for several metrics in one chart, pairs of train and val; `chart=…`; without outliers; the full-screen chart; the facet of an embedded one
  picked: string[]; by: string[]; middle: string; spread: string; ownY: boolean; // `run=color`; fields to group by, after `*` those to leave out; line and band of a group; a y axis per facet
}

export const DEFAULTS: View = {
  project: '', page: 'charts', run: '', filter: '', sort: '', metric: '', hidden: [], baseline: '', compare: [], pins: [], folded: [],
  search: '', x: 'auto', ranks: '', smooth: 0, kernel: '', logX: false, logY: false, band: false, zoom: null, zoomAxis: '', colour: '', dash: '',
  split: '', each: false, columns: [], differing: false, archived: false, failed: false, key: '', step: null,
  scatterX: '', scatterY: '', same: false, changes: false, opSort: 'self_ns', opSearch: '', lineSearch: '', rank: '', tables: [],
  sweep: '', byRun: false, axes: [], axisLogs: [], brushes: [], scatterLogX: '', scatterLogY: '', trend: false, contourX: '', contourY: '', contourLogs: [],
  also: [], tableSearch: '', tableSort: '', where: [], plainImages: false, ownRange: false,
  frozen: [], widths: [], shaded: [], aggregate: 'std', closed: [],
  list: 300,
  mix: [], pairs: false, titles: [], ranges: [], sizes: [], clip: false, full: '', facet: '',
  picked: [], by: [], middle: '', spread: '', ownY: false,
};

const NAMES: Record<keyof View, string> = {
  project: 'p', page: 'v', run: 'r', filter: 'f', sort: 'o', metric: 'm', hidden: 'hide', baseline: 'base', compare: 'with', pins: 'pin',
  folded: 'fold', search: 'q', x: 'x', ranks: 'ranks', smooth: 's', kernel: 'kernel', logX: 'logx', logY: 'log', band: 'band', zoom: 'zoom', zoomAxis: 'zoomx',
  colour: 'colour', dash: 'dash', split: 'split', each: 'each', columns: 'cols', differing: 'diff', archived: 'archived', failed: 'failed', key: 'key', step: 'step',
  scatterX: 'sx', scatterY: 'sy', same: 'same', changes: 'changes', opSort: 'by', opSearch: 'op', lineSearch: 'line', rank: 'rank', tables: 'tables',
  sweep: 'sweep', byRun: 'byrun', axes: 'axes', axisLogs: 'axislog', brushes: 'brush', scatterLogX: 'slx', scatterLogY: 'sly', trend: 'trend', contourX: 'cx', contourY: 'cy', contourLogs: 'clog',
  also: 'also', tableSearch: 'rows', tableSort: 'rowsby', where: 'where', plainImages: 'plain', ownRange: 'ownrange',
  frozen: 'freeze', widths: 'wide', shaded: 'shade', aggregate: 'agg', closed: 'closed',
  list: 'list',
  mix: 'mix', pairs: 'pairs', titles: 'title', ranges: 'y', sizes: 'size', clip: 'clip', full: 'full', facet: 'facet',
  picked: 'tint', by: 'group', middle: 'mid', spread: 'spread', ownY: 'owny',
};

export function read(fragment: string): View {
  const given = new URLSearchParams(fragment.replace(/^#/, ''));
  const found: Record<string, unknown> = structuredClone(DEFAULTS) as never;
  for (const [name, short] of Object.entries(NAMES)) {
    const text = given.get(short);
    if (text !== null) found[name] = parse(name as keyof View, text);
  }
  const view = found as unknown as View;
  if (!PAGES.includes(view.page)) view.page = 'charts';
  if (given.get('ema') === '1') view.kernel = 'ema'; // older links
  return view;
}

function parse(name: keyof View, text: string): unknown {
  const usual = DEFAULTS[name];
  if (name === 'zoom') {
    const ends = text.split('..').map(Number);
    return ends.length === 2 && ends.every(Number.isFinite) && ends[0] < ends[1] ? ends : null;
  }
  if (name === 'step') return Number.isFinite(Number(text)) ? Number(text) : null;
  if (Array.isArray(usual)) return text.split(',').filter(Boolean).map(plain);
  if (typeof usual === 'number') return Number.isFinite(Number(text)) ? Number(text) : usual;
  return typeof usual === 'boolean' ? text === '1' : text;
}

/** Decode an item of a list; one with invalid escapes is used as written. */
function plain(text: string): string {
  try { return decodeURIComponent(text); } catch { return text; }
}

export function write(view: View): string {
  const parts: string[] = [];
  for (const [name, short] of Object.entries(NAMES)) {
    const value = view[name as keyof View];
    const usual = DEFAULTS[name as keyof View];
    if (value === null || value === usual || (name === 'zoomAxis' && !view.zoom) || (Array.isArray(value) && !value.length)) continue;
    const shown = name === 'zoom' ? (value as number[]).map((n, _, [from, to]) => placed(n, to - from)).join('..')
      : Array.isArray(value) ? value.map((one) => encodeURIComponent(one)).join(',') : value === true ? '1' : String(value);
    parts.push(`${short}=${legible(shown)}`);
  }
  return parts.join('&');
}

/** Escape only what a fragment cannot contain, so that it stays readable. */
const legible = (text: string) => text.replace(/[%&+#\s"<>`]/g, (sign) => (sign === ' ' ? '+' : encodeURIComponent(sign)));

// A reload may begin before the latest change reaches the URL, or the browser's own note of it: sessionStorage keeps that change.
const LAST = 'fanfold last', SETTLED = 3000; // ms
function remember(address: string, fragment: string) {
  try { sessionStorage.setItem(LAST, JSON.stringify([address, fragment])); } catch { return; } // no storage in third-party iframes
}
function opened(): string {
  if (typeof location === 'undefined') return '';
  try {
    const [address, fragment] = JSON.parse(sessionStorage.getItem(LAST) ?? '[]') as string[];
    sessionStorage.removeItem(LAST);
    return address === location.hash ? fragment : location.hash;
  } catch { return location.hash; }
}

export const view: View = $state(read(opened()));

/** Whether the current view came from a link. Kept in history.state, so that it survives a reload. */
export const place = $state({ linked: false });

/** Keep the URL in sync with the view. Going to another page, project or run can be undone with Back. */
export function follow(): () => void {
  let last = { page: view.page, project: view.project, run: view.run };
  let late: string | null = null; // the fragment about to be written
  let replaced = '', when = -Infinity; // the hash that was replaced last
  const stop = $effect.root(() => {
    $effect(() => {
      const fragment = write(view), state = { linked: place.linked };
      if (history.state?.linked !== state.linked) history.replaceState(state, '');
      if (fragment === location.hash.slice(1)) return;
      const moved = last.page !== view.page || (last.project && last.project !== view.project) || last.run !== view.run;
      last = { page: view.page, project: view.project, run: view.run };
      if (moved) { history.pushState(state, '', '#' + fragment); return; }
      // replaceState blocks on the browser process: delay it until after the paint.
      late = fragment;
      const soon = setTimeout(() => {
        [late, replaced, when] = [null, location.hash, performance.now()];
        history.replaceState(state, '', '#' + fragment);
      }, 50);
      return () => { late = null; clearTimeout(soon); };
    });
  });
  const back = () => Object.assign(view, read(location.hash));
  const leave = () => {
    if (late !== null) remember(location.hash, late);
    else if (performance.now() - when < SETTLED) remember(replaced, location.hash);
  };
  addEventListener('popstate', back);
  addEventListener('pagehide', leave);
  return () => { stop(); removeEventListener('popstate', back); removeEventListener('pagehide', leave); };
}

/** Return the URL of the current view. */
export const link = () => `${location.href.split('#')[0]}#${write(view)}`;

/** Copy text to the clipboard, and return whether that worked: browsers offer one only on https and localhost. */
export async function copied(text: string): Promise<boolean> {
  try { await navigator.clipboard.writeText(text); return true; } catch { return false; }
}

/** Select text that could not be copied, so that Ctrl+C copies it. */
export const select = (element: Element) => getSelection()?.selectAllChildren(element);
export const UNCOPIED = 'no clipboard here: selected, press Ctrl+C';

/** Return a list of `name=value` as a map. */
export const settings = (list: string[]) => new Map(list.map((one) => [one.slice(0, one.lastIndexOf('=')), plain(one.slice(one.lastIndexOf('=') + 1))] as const));
/** Return such a list with a new value for a name, or without the name if the value is empty. */
export const setting = (list: string[], name: string, value: string) => [...list.filter((one) => one.slice(0, one.lastIndexOf('=')) !== name), ...(value ? [`${name}=${encodeURIComponent(value)}`] : [])];

export function toggle(list: string[], item: string): string[] {
  return list.includes(item) ? list.filter((one) => one !== item) : [...list, item];
}
