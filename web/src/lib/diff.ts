// Diffs two strings by words or lines. The common prefix and suffix are set aside first; the rest is compared exactly if it is small,
// and otherwise replaced as a whole.

export type Piece = ['same' | 'gone' | 'new', string];
const MOST = 1200; // maximum tokens per side for an exact comparison: its table then has 1.4 million cells

export const words = (text: string) => text.match(/\s+|[^\s]+/g) ?? [];
export const lines = (text: string) => text.match(/[^\n]*\n|[^\n]+$/g) ?? [];

export function diff(before: string[], after: string[]): Piece[] {
  let head = 0, tail = 0;
  while (head < before.length && head < after.length && before[head] === after[head]) head++;
  while (tail < before.length - head && tail < after.length - head && before[before.length - 1 - tail] === after[after.length - 1 - tail]) tail++;
  const middle = together(compare(before.slice(head, before.length - tail), after.slice(head, after.length - tail)));
  return join([...before.slice(0, head).map((part): Piece => ['same', part]), ...middle, ...before.slice(before.length - tail).map((part): Piece => ['same', part])]);
}

function compare(a: string[], b: string[]): Piece[] {
  if (a.length > MOST || b.length > MOST) return [...a.map((part): Piece => ['gone', part]), ...b.map((part): Piece => ['new', part])];
  const wide = b.length + 1;
  const common = new Uint16Array((a.length + 1) * wide);
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      common[i * wide + j] = a[i] === b[j] ? common[(i + 1) * wide + j + 1] + 1 : Math.max(common[(i + 1) * wide + j], common[i * wide + j + 1]);
  const found: Piece[] = [];
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { found.push(['same', a[i++]]); j++; }
    else if (i < a.length && (j >= b.length || common[(i + 1) * wide + j] >= common[i * wide + j + 1])) found.push(['gone', a[i++]]);
    else found.push(['new', b[j++]]);
  }
  return found;
}

/** Merge adjacent changes into one: a space between two changes belongs to both sides, and deletions come first. */
function together(pieces: Piece[]): Piece[] {
  let found: Piece[] = [];
  const changed = (at: number) => at < pieces.length && pieces[at][0] !== 'same';
  for (let i = 0, end = 0; i < pieces.length; i = end) {
    for (end = i; changed(end) || (end > i && changed(end + 1) && /^[^\S\n]+$/.test(pieces[end][1]));) end++;
    if (end === i) { found.push(pieces[end++]); continue; }
    const part = pieces.slice(i, end), sides = (['gone', 'new'] as const).map((kind) => part.filter(([one]) => one === kind || one === 'same').map(([, text]): Piece => [kind, text]));
    found = found.concat(sides.every((side) => side.length < part.length) ? sides.flat() : part);
  }
  return found;
}

function join(pieces: Piece[]): Piece[] {
  const found: Piece[] = [];
  for (const [kind, part] of pieces) {
    const last = found[found.length - 1];
    if (last && last[0] === kind) last[1] += part; else found.push([kind, part]);
  }
  return found;
}
