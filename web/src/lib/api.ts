// Asking the server. Addresses are relative to the page, so that it works under any path; answers that say why something
// failed become errors with that text.
import { decode, type Answer, type Column } from './wire';

export interface Project { name: string; runs: number; last: number }
export interface Run {
  id: string; name: string; status: string; created: number; seen: number; duration: number; tags: string[]; notes: string | null;
  group: string | null; ranks: number; attempts: number; archived: boolean; failed: boolean;
}
export interface Unreadable { path: string; reason: string }
export interface Runs { runs: Run[]; keys: string[]; media: string[]; columns: string[]; unreadable?: Unreadable[] }
export interface Series {
  run: string; key: string; total: number; raw: boolean; axis: string; marks: [number, string][]; marked: number; restarts: number[];
  x: Column; y: Column; xLast?: Column; first?: Column; lo?: Column; hi?: Column; loAt?: Column; hiAt?: Column; low?: Column; high?: Column; lowRank?: Column; highRank?: Column;
  who?: string[]; // of a group: the runs that lowRank and highRank count
}

export class Refused extends Error {
  constructor(message: string, readonly code: number) { super(message); }
}

export const session = { user: '' }; // who logged in, where people do

/** Hears of every answer, and of every one that did not come or that the server could not give: those are asked again. */
export const outages = { failed: () => {}, answered: () => {} };

async function ask(path: string, init?: RequestInit): Promise<Response> {
  const response = await fetch(path, init).catch((why: Error) => {
    if (why.name !== 'AbortError') outages.failed();
    throw why;
  });
  if (response.ok) { outages.answered(); return response; }
  if (response.status >= 500) outages.failed();
  if (response.status === 401 && session.user) location.assign('login'); // the session is over
  const said = await response.text();
  let message = said.trim() || response.statusText;
  try { message = JSON.parse(said).error ?? message; } catch { /* plain text */ }
  throw new Refused(message, response.status);
}

export function address(path: string, given: Record<string, unknown>): string {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(given))
    for (const one of Array.isArray(value) ? value : [value]) if (one !== undefined && one !== null) query.append(name, String(one));
  return `${path}?${query}`;
}

export async function get<T>(path: string, given: Record<string, unknown> = {}, signal?: AbortSignal): Promise<T> {
  return (await ask(address(path, given), { signal })).json();
}

export async function post<T>(path: string, body: unknown): Promise<T> {
  return (await ask(path, { method: 'POST', body: JSON.stringify(body), headers: { 'content-type': 'application/json' } })).json();
}

export async function file(path: string, body: unknown): Promise<Blob> {
  return (await ask(path, { method: 'POST', body: JSON.stringify(body), headers: { 'content-type': 'application/json' } })).blob();
}

export async function columns(path: string, body: unknown): Promise<Answer> {
  const response = await ask(path, { method: 'POST', body: JSON.stringify(body), headers: { 'content-type': 'application/json' } });
  return decode(await response.arrayBuffer());
}

export interface Wanted { project: string; runs: string[]; n: number; x: string; fold: string | null; rank: number | null; lo: number | null; hi: number | null; log: boolean }
interface Waiting { key: string; resolve: (found: Series[]) => void; reject: (why: unknown) => void }

const TOGETHER = 300; // series in one question: few questions, and the first chart need not wait for the last
let queue = new Map<string, { wanted: Wanted; waiting: Waiting[] }>();

/** Ask for one chart's series; what charts ask for in the same moment travels together. */
export function series(key: string, wanted: Wanted): Promise<Series[]> {
  if (!queue.size) setTimeout(send, 4);
  const sign = JSON.stringify(wanted);
  if (!queue.has(sign)) queue.set(sign, { wanted, waiting: [] });
  return new Promise((resolve, reject) => queue.get(sign)!.waiting.push({ key, resolve, reject }));
}

function send() {
  const asked = queue;
  queue = new Map();
  for (const { wanted, waiting } of asked.values()) {
    const charts = Math.max(1, Math.min(12, Math.floor(TOGETHER / wanted.runs.length)));
    for (let i = 0; i < waiting.length; i += charts) void deliver(wanted, waiting.slice(i, i + charts));
  }
}

async function deliver(wanted: Wanted, waiting: Waiting[]) {
  try {
    const keys = [...new Set(waiting.map((one) => one.key))];
    const { items } = await columns('api/series', { ...wanted, keys });
    const found = items.map(({ columns, ...facts }) => ({ ...facts, ...columns }) as unknown as Series);
    for (const one of waiting) one.resolve(found.filter((series) => series.key === one.key));
  } catch (why) {
    for (const one of waiting) one.reject(why);
  }
}
