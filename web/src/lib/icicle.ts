// Sums up operators, and draws them as an icicle chart: nested by thread, scope and operator, as wide as their self time.
import { DARK, LIGHT } from './colours';

export interface Op { op: string; scope: string; thread: string | number; label: string; count: number; total_ns: number; self_ns: number; max_ns: number; scale?: number; rank?: number; role?: string; hist?: Record<string, number>; device_count?: number; device_ns?: number }
export interface Node { name: string; start: number; size: number; depth: number; deep: number; kids: Node[] }
export interface Row extends Op { mean_ns: number; p99_ns: number }
export const ROW = 20;

/** Scale sampled calls up to estimates: only some operators are sampled, and their shares must be comparable. */
export function estimated(ops: Op[]): Op[] {
  return ops.map((op) => {
    const scale = op.scale ?? 1;
    return { ...op, count: op.count * scale, total_ns: op.total_ns * scale, self_ns: op.self_ns * scale };
  });
}

/** Sum over ranks, threads and overloads: one row per operator, scope and label, with workers separate. */
export function together(ops: Op[]): Row[] {
  const found = new Map<string, Op>();
  for (const op of ops) {
    const key = JSON.stringify([op.op, op.scope, op.label, op.role]), into = found.get(key);
    if (!into) { found.set(key, { ...op, hist: { ...op.hist } }); continue; }
    into.count += op.count;
    into.total_ns += op.total_ns;
    into.self_ns += op.self_ns;
    into.max_ns = Math.max(into.max_ns, op.max_ns);
    into.device_count = (into.device_count ?? 0) + (op.device_count ?? 0);
    into.device_ns = (into.device_ns ?? 0) + (op.device_ns ?? 0);
    for (const [bucket, count] of Object.entries(op.hist ?? {})) into.hist![bucket] = (into.hist![bucket] ?? 0) + count;
  }
  return [...found.values()].map((op) => ({ ...op, mean_ns: op.count ? op.total_ns / op.count : 0, p99_ns: Math.min(quantile(op.hist!, 0.99), op.max_ns) }));
}

/** Return where a histogram bucket begins, in nanoseconds: four buckets per octave. */
const begin = (bucket: number) => (bucket < 4 ? bucket : 2 ** (Math.floor(bucket / 4) + 1) * (1 + (bucket % 4) / 4));

/** Return a quantile of the call times, interpolated within its bucket. */
export function quantile(hist: Record<string, number>, share: number): number {
  let left = share * Object.values(hist).reduce((sum, count) => sum + count, 0);
  for (const [name, count] of Object.entries(hist)) { // in bucket order: integer keys iterate in ascending order
    const bucket = Number(name), low = begin(bucket);
    if (count >= left) return low + ((begin(bucket + 1) - low) * left) / count;
    left -= count;
  }
  return 0;
}

/** Describe where a row ran; the main process is not mentioned. */
export const where = (op: Op) => [op.role === 'worker' ? 'worker' : '', op.scope, op.label].filter(Boolean).join(' · ');

export function grow(ops: Op[]): Node {
  const make = (name: string, depth: number): Node => ({ name, start: 0, size: 0, depth, deep: depth, kids: [] });
  const root = make('all', 0);
  const named = new Map<Node, Map<string, Node>>();
  const under = (node: Node, name: string) => {
    const kids = named.get(node) ?? named.set(node, new Map()).get(node)!;
    if (!kids.has(name)) { const kid = make(name, node.depth + 1); kids.set(name, kid); node.kids.push(kid); }
    return kids.get(name)!;
  };
  const many = new Set(ops.map((op) => op.rank ?? 0)).size > 1;
  for (const op of ops) {
    const path = [[many ? `rank ${op.rank ?? 0}` : '', op.role === 'worker' ? 'worker' : '', op.label, `thread ${op.thread}`].filter(Boolean).join(' · '), ...String(op.scope ?? '').split('/').filter(Boolean), op.op];
    let node = root;
    node.size += op.self_ns;
    for (const name of path) { node = under(node, name); node.size += op.self_ns; }
  }
  place(root, 0);
  return root;
}

function place(node: Node, start: number): number {
  node.start = start;
  node.kids.sort((a, b) => b.size - a.size);
  for (const kid of node.kids) { node.deep = Math.max(node.deep, place(kid, start)); start += kid.size; }
  return node.deep;
}

export function time(ns: number): string {
  for (const [size, unit] of [[1e9, 's'], [1e6, 'ms'], [1e3, 'µs']] as const) if (ns >= size) return `${Number((ns / size).toPrecision(3))} ${unit}`;
  return `${Math.round(ns)} ns`;
}

function* each(node: Node): Generator<Node> {
  yield node;
  for (const kid of node.kids) yield* each(kid);
}

function span(node: Node, focus: Node, w: number): [number, number] {
  const k = w / (focus.size || 1);
  return [(node.start - focus.start) * k, (node.start + node.size - focus.start) * k];
}

export function drawIcicle(g: CanvasRenderingContext2D, w: number, h: number, root: Node, focus: Node, dark: boolean): void {
  g.clearRect(0, 0, w, h);
  g.font = '11px system-ui, sans-serif';
  g.textBaseline = 'middle';
  const hues = dark ? DARK : LIGHT;
  for (const node of each(root)) {
    const [a, b] = span(node, focus, w).map((x) => Math.max(0, Math.min(w, x)));
    if (b - a < 0.7) continue;
    const y = node.depth * ROW;
    g.globalAlpha = dark ? 0.34 : 0.24;
    g.fillStyle = hues[[...node.name].reduce((sum, sign) => (sum * 31 + sign.charCodeAt(0)) >>> 0, 7) % 8];
    g.fillRect(a, y, b - a - 0.6, ROW - 1);
    if (b - a < 34) continue;
    g.globalAlpha = 1;
    g.fillStyle = dark ? '#e3e7eb' : '#1b1f24';
    const room = Math.floor((b - a - 8) / 6.1);
    g.fillText(node.name.length > room ? node.name.slice(0, Math.max(1, room - 1)) + '…' : node.name, a + 4, y + ROW / 2);
  }
  g.globalAlpha = 1;
}

export function hit(root: Node, focus: Node, w: number, px: number, py: number): Node | null {
  const depth = Math.floor(py / ROW);
  for (const node of each(root)) {
    if (node.depth !== depth) continue;
    const [a, b] = span(node, focus, w);
    if (px >= a && px < b) return node;
  }
  return null;
}
