// Requests to the server. URLs are relative to the page, so that it works under any path of a proxy. Error responses are thrown as
// errors with the server's message.
import { copy, fileAt } from './copy';
import { Refused } from './refused';
import { decode, type Answer, type Column } from './wire';

export interface Project { name: string; runs: number; last: number }
export interface Run {
  id: string; name: string; status: string; created: number; seen: number; duration: number; tags: string[]; notes: string | null;
  group: string | null; ranks: number; attempts: number; archived: boolean; failed: boolean;
}
export interface Unreadable { path: string; reason: string }
/** `runs` has all runs, the first ones, or those of the `fresh` blocks. Blocks have `size` runs each, counted from the end of the list. */
export interface Runs { runs: Run[]; total?: number; size?: number; blocks?: string[]; fresh?: number[]; keys: string[]; media: string[]; columns: string[]; goals?: Record<string, string>; unreadable?: Unreadable[] }
export interface Series {
  run: string; key: string; total: number; raw: boolean; axis: string; marks: [number, string][]; marked: number; restarts: number[]; flags?: [number, string][]; forked?: number | null;
  x: Column; y: Column; xLast?: Column; first?: Column; lo?: Column; hi?: Column; loAt?: Column; hiAt?: Column; low?: Column; high?: Column; lowRank?: Column; highRank?: Column;
  who?: string[]; // of a group: the run ids that lowRank and highRank index
  count?: Column; // of a group: the number of runs at each x
}

export { Refused };

const published = () => import('./published'); // answers requests without a server

/** The token of a share link. Embedded charts carry it in their URL, because third-party iframes get no cookies. */
export const share = typeof location === 'undefined' ? null : new URLSearchParams(location.search).get('share');
export const session = { user: '' }; // the logged-in user, if the server has logins

/** Called after each successful response, and after each network or server (5xx) error, whose request is retried. */
export const outages = { failed: () => {}, answered: () => {} };

async function ask(path: string, init?: RequestInit): Promise<Response> {
  const response = await fetch(path, share ? { ...init, headers: { ...init?.headers, authorization: `Bearer ${share}` } } : init).catch((why: Error) => {
    if (why.name !== 'AbortError') outages.failed();
    throw why;
  });
  if (response.ok) { outages.answered(); return response; }
  if (response.status >= 500) outages.failed();
  if (response.status === 401 && session.user) location.assign('login'); // the session has expired
  const said = await response.text();
  let message = said.trim() || response.statusText;
  try { message = JSON.parse(said).error ?? message; } catch { /* plain text */ }
  throw new Refused(message, response.status);
}

export function address(path: string, given: Record<string, unknown>): string {
  if (copy) return fileAt(path, given);
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(given))
    for (const one of Array.isArray(value) ? value : [value]) if (one !== undefined && one !== null) query.append(name, String(one));
  return `${path}?${query}`;
}

export async function get<T>(path: string, given: Record<string, unknown> = {}, signal?: AbortSignal): Promise<T> {
  if (copy) return (await published()).json(path, given) as Promise<T>;
  return (await ask(address(path, given), { signal })).json();
}

export async function post<T>(path: string, body: unknown, keepalive = false): Promise<T> {
  if (copy) return (await published()).json(path, body as Record<string, unknown>) as Promise<T>;
  return (await ask(path, { keepalive, method: 'POST', body: JSON.stringify(body), headers: { 'content-type': 'application/json' } })).json();
}

export async function file(path: string, body: unknown): Promise<Blob> {
  return (await ask(path, { method: 'POST', body: JSON.stringify(body), headers: { 'content-type': 'application/json' } })).blob();
}

export async function columns(path: string, body: unknown): Promise<Answer> {
  if (copy) return (await published()).columns(path, body as Record<string, unknown>);
  const response = await ask(path, { method: 'POST', body: JSON.stringify(body), headers: { 'content-type': 'application/json' } });
  return decode(await response.arrayBuffer());
}

export interface Wanted { project: string; runs: string[]; n: number; x: string; fold: string | null; rank: number | null; lo: number | null; hi: number | null; log: boolean }
interface Waiting { key: string; needed: () => boolean; resolve: (found: Series[]) => void; reject: (why: unknown) => void }

const TOGETHER = 300, FIRST = 100; // series per request: few requests, but the first chart does not wait for the last
// Requests in flight: one while answers are quick, as a server computes one at a time and several would all be late; more if a network
// or a database takes its time.
const AT_ONCE = 3, SLOW = 150;
let flying = 0, slow = false;
const line: (() => Promise<void>)[] = [];
let queue = new Map<string, { wanted: Wanted; waiting: Waiting[] }>();

/** Fetch one chart's series. Requests made at the same time are batched, and those no longer `needed` are dropped. */
export function series(key: string, wanted: Wanted, needed = () => true): Promise<Series[]> {
  if (!queue.size) setTimeout(send);
  const sign = JSON.stringify(wanted);
  if (!queue.has(sign)) queue.set(sign, { wanted, waiting: [] });
  return new Promise((resolve, reject) => queue.get(sign)!.waiting.push({ key, needed, resolve, reject }));
}

function send() {
  const asked = queue;
  queue = new Map();
  for (const { wanted, waiting } of asked.values()) {
    for (let from = 0; from < waiting.length; ) {
      const some = waiting.slice(from, from + Math.max(1, Math.min(12, Math.floor((from ? TOGETHER : FIRST) / wanted.runs.length))));
      line.push(() => deliver(wanted, some));
      from += some.length;
    }
  }
  next();
}

function next() {
  while (flying < (slow ? AT_ONCE : 1) && line.length) void line.shift()!();
}

/** Wait until no series are pending (at most `most` ms), so that other requests do not delay the charts. */
export async function quiet(most = 5000): Promise<void> {
  const end = Date.now() + most;
  do await new Promise((done) => setTimeout(done, 60));
  while ((flying || line.length || queue.size) && Date.now() < end);
}

async function deliver(wanted: Wanted, all: Waiting[]) {
  const waiting = all.filter((one) => one.needed() || one.resolve([]));
  if (!waiting.length) return;
  const keys = [...new Set(waiting.map((one) => one.key))];
  const late = setTimeout(() => { slow = true; next(); }, SLOW), began = performance.now();
  flying++;
  const asked = columns('api/series', { ...wanted, keys }).finally(() => { // the next request before these charts take the thread
    clearTimeout(late);
    flying--;
    slow = performance.now() - began > SLOW;
    next();
  });
  try {
    const { items } = await asked;
    const found = items.map(({ columns, ...facts }) => ({ ...facts, ...columns }) as unknown as Series);
    for (const one of waiting) one.resolve(found.filter((series) => series.key === one.key));
  } catch (why) {
    for (const one of waiting) one.reject(why);
  }
}
