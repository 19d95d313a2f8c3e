// An icicle: what lies within what, as wide as the time it took. The tree is thread, then scope, then operator.
import { DARK, LIGHT } from './colours';

export interface Op { op: string; scope: string; thread: string | number; label: string; count: number; total_ns: number; self_ns: number; max_ns: number; scale?: number; rank?: number; device_count?: number; device_ns?: number }
export interface Node { name: string; start: number; size: number; depth: number; deep: number; kids: Node[] }
export const ROW = 20;

/** Count each observed call for the ones it stands for: some operators are sampled, some are not, and shares must agree. */
export function estimated(ops: Op[]): Op[] {
  return ops.map((op) => {
    const scale = op.scale ?? 1;
    return { ...op, count: Math.round(op.count * scale), total_ns: op.total_ns * scale, self_ns: op.self_ns * scale };
  });
}

/** Add up what ranks, threads and overloads have under one name: one row for an operator in a scope under a label. */
export function together(ops: Op[]): Op[] {
  const found = new Map<string, Op>();
  for (const op of ops) {
    const key = JSON.stringify([op.op, op.scope, op.label]), into = found.get(key);
    if (!into) { found.set(key, { ...op }); continue; }
    into.count += op.count;
    into.total_ns += op.total_ns;
    into.self_ns += op.self_ns;
    into.max_ns = Math.max(into.max_ns, op.max_ns);
    into.device_count = (into.device_count ?? 0) + (op.device_count ?? 0);
    into.device_ns = (into.device_ns ?? 0) + (op.device_ns ?? 0);
  }
  return [...found.values()];
}

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
    const path = [[many ? `rank ${op.rank ?? 0}` : '', op.label, `thread ${op.thread}`].filter(Boolean).join(' · '), ...String(op.scope ?? '').split('/').filter(Boolean), op.op];
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
