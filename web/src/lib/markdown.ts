// Parses Markdown notes into a tree of known node types. The page renders each type with its own element, so nothing in a note becomes
// markup. Images become links, since loading one would tell its server who reads the note. Every step only reads forward.
export type Inline = { kind: 'text'; text: string } | { kind: 'code'; text: string } | { kind: 'strong' | 'em' | 'del'; parts: Inline[] } | { kind: 'link'; href: string; parts: Inline[] };
export type Item = { done: boolean | null; blocks: Block[] };
export type Block = { kind: 'heading'; level: number; parts: Inline[] } | { kind: 'paragraph'; parts: Inline[] } | { kind: 'code'; text: string }
  | { kind: 'quote'; blocks: Block[] } | { kind: 'list'; ordered: boolean; start: number; items: Item[] } | { kind: 'rule' } | { kind: 'table'; head: Inline[][]; rows: Inline[][][] };

const DEEP = 8; // maximum nesting of quotes and lists
const FENCE = /^ {0,3}(```+|~~~+)/, HEADING = /^ {0,3}(#{1,6})[ \t]+(.*?)[ \t#]*$/, RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/, BULLET = /^( *)([-*+]|\d{1,9}[.)])[ \t]+(.*)$/;
const DASHES = /^ *\|? *:?-+:? *(\| *:?-+:? *)*\|? *$/;

export function markdown(text: string): Block[] { return blocks(text.replace(/\r\n?/g, '\n').replace(/\t/g, '    ').split('\n'), 0); }

function blocks(lines: string[], deep: number): Block[] {
  const found: Block[] = [];
  for (let i = 0; i < lines.length;) {
    const line = lines[i], fence = FENCE.exec(line), heading = HEADING.exec(line), bullet = BULLET.exec(line);
    if (!line.trim()) i++;
    else if (fence) {
      const to = end(lines, i + 1, (one) => one.trim().startsWith(fence[1]));
      found.push({ kind: 'code', text: lines.slice(i + 1, to).join('\n') });
      i = to + 1;
    } else if (heading) { found.push({ kind: 'heading', level: heading[1].length, parts: inline(heading[2]) }); i++; }
    else if (RULE.test(line)) { found.push({ kind: 'rule' }); i++; }
    else if (/^ {0,3}>/.test(line) && deep < DEEP) {
      const to = end(lines, i, (one) => !/^ {0,3}>/.test(one));
      found.push({ kind: 'quote', blocks: blocks(lines.slice(i, to).map((one) => one.replace(/^ {0,3}> ?/, '')), deep + 1) });
      i = to;
    } else if (bullet && deep < DEEP) i = list(lines, i, bullet, deep, found);
    else if (line.includes('|') && DASHES.test(lines[i + 1] ?? '') && lines[i + 1].includes('|')) {
      const to = end(lines, i + 2, (one) => !one.includes('|'));
      found.push({ kind: 'table', head: cells(line), rows: lines.slice(i + 2, to).map(cells) });
      i = to;
    } else {
      const to = end(lines, i + 1, (one) => !one.trim() || FENCE.test(one) || HEADING.test(one) || RULE.test(one) || /^ {0,3}>/.test(one) || BULLET.test(one));
      found.push({ kind: 'paragraph', parts: inline(lines.slice(i, to).join('\n').trim()) });
      i = to;
    }
  }
  return found;
}

function end(lines: string[], from: number, over: (line: string) => boolean): number {
  while (from < lines.length && !over(lines[from])) from++;
  return from;
}

function list(lines: string[], from: number, first: RegExpExecArray, deep: number, found: Block[]): number {
  const ordered = /\d/.test(first[2]), indent = first[1].length, items: Item[] = [];
  let i = from;
  while (i < lines.length) {
    const begin = BULLET.exec(lines[i]);
    if (!begin || begin[1].length > indent + 1 || begin[1].length < indent || /\d/.test(begin[2]) !== ordered || RULE.test(lines[i])) break;
    const inner = begin[0].length - begin[3].length, task = /^\[([ xX])\] +/.exec(begin[3]);
    const to = end(lines, i + 1, (one) => one.trim() !== '' && one.length - one.trimStart().length < Math.min(inner, indent + 2));
    const own = [begin[3].slice(task?.[0].length ?? 0), ...lines.slice(i + 1, to).map((one) => one.slice(Math.min(inner, one.length - one.trimStart().length)))];
    items.push({ done: task ? task[1] !== ' ' : null, blocks: blocks(own, deep + 1) });
    i = to;
  }
  found.push({ kind: 'list', ordered, start: ordered ? Number.parseInt(first[2]) : 1, items });
  return i;
}

const cells = (line: string) => line.trim().replace(/^\||\|$/g, '').split('|').map((cell) => inline(cell.trim()));

const SAFE = /^(https?:\/\/|mailto:)[^\s]+$/i;
const MARKS: [string, 'strong' | 'em' | 'del'][] = [['**', 'strong'], ['__', 'strong'], ['~~', 'del'], ['*', 'em'], ['_', 'em']];

/** Parse inline text. A mark without a closing partner is plain text; `none` remembers that there is none, so each is searched once. */
export function inline(text: string, deep = 0): Inline[] {
  const found: Inline[] = [], none = new Set<string>();
  let plain = '';
  const say = () => { if (plain) found.push({ kind: 'text', text: plain }); plain = ''; };
  for (let i = 0; i < text.length;) {
    const sign = text[i];
    if (sign === '\\' && /[!-/:-@[-`{-~]/.test(text[i + 1] ?? '')) { plain += text[i + 1]; i += 2; continue; }
    if (sign === '`' && !none.has('`')) {
      const ticks = /^`+/.exec(text.slice(i, i + 20))![0], to = text.indexOf(ticks, i + ticks.length);
      if (to > 0) { say(); found.push({ kind: 'code', text: text.slice(i + ticks.length, to).trim() }); i = to + ticks.length; continue; }
      none.add('`');
    }
    const link = sign === '[' || (sign === '!' && text[i + 1] === '[') ? linked(text, i, deep, none) : /^h/i.test(sign) && !/\w/.test(text[i - 1] ?? '') ? bare(text, i) : null;
    if (link) { say(); found.push(link[0]); i = link[1]; continue; }
    const mark = deep < DEEP && MARKS.find(([signs]) => text.startsWith(signs, i) && !none.has(signs) && /\S/.test(text[i + signs.length] ?? ' ') && !(signs.startsWith('_') && /\w/.test(text[i - 1] ?? '')));
    if (mark) {
      const [signs, kind] = mark, from = i + signs.length;
      let to = text.indexOf(signs, from);
      while (to > 0 && signs.length === 1 && text[to + 1] === signs) to = text.indexOf(signs, to + 2); // part of a longer mark
      if (to > from && /\S/.test(text[to - 1])) { say(); found.push({ kind, parts: inline(text.slice(from, to), deep + 1) }); i = to + signs.length; continue; }
      if (to < 0) none.add(signs);
    }
    plain += sign;
    i++;
  }
  say();
  return found;
}

function linked(text: string, at: number, deep: number, none: Set<string>): [Inline, number] | null {
  if (none.has('](') || deep >= DEEP) return null;
  const from = at + (text[at] === '!' ? 2 : 1), mid = text.indexOf('](', from), to = mid < 0 ? -1 : text.indexOf(')', mid);
  if (to < 0) { none.add(']('); return null; }
  const href = text.slice(mid + 2, to).trim().split(/\s/)[0], label = text.slice(from, mid);
  if (label.includes('[') || !SAFE.test(href)) return null;
  return [{ kind: 'link', href, parts: label ? inline(label, deep + 1) : [{ kind: 'text', text: href }] }, to + 1];
}

function bare(text: string, at: number): [Inline, number] | null {
  const found = /^https?:\/\/[^\s<>"'`]{1,2000}/i.exec(text.slice(at, at + 2010))?.[0].replace(/[.,;:!?)\]}*_]+$/, '');
  return found && found.length > 10 ? [{ kind: 'link', href: found, parts: [{ kind: 'text', text: found }] }, at + found.length] : null;
}
