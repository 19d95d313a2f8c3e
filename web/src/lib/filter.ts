// The filter language of docs/query.md, for published folders, which have no server. tests/data/filter_cases.json specifies both
// implementations. Loaded on first use.

export interface Row {
  id: string; name: string; project: string; status: string; group: string | null; notes: string | null; tags: string[]; created: number; seen: number;
  duration: number; ranks: number; attempts: number; config: Facts; latest: Facts; summary: Facts; stats?: Record<string, Facts>;
}
type Facts = Record<string, unknown>;
type Test = (row: Row) => boolean;
interface Token { kind: 'op' | 'bracket' | 'quoted' | 'word'; text: string; column: number }

const FIELDS = ['id', 'name', 'project', 'status', 'group', 'notes', 'tags', 'created', 'seen', 'age', 'duration', 'ranks', 'attempts'];
const STATUSES = ['running', 'finished', 'failed', 'killed', 'preempted', 'lost'];
const STATISTICS = ['min', 'max', 'mean', 'first', 'last', 'count'];
const SECONDS: Record<string, number> = { s: 1, m: 60, min: 60, h: 3600, d: 86400, w: 604800, y: 31536000 };
const TOKEN = /\s*(?:(<=|>=|!=|!~|==|[<>=~])|([()])|("(?:[^"\\]|\\[^])*"|'(?:[^'\\]|\\[^])*')|([^\s()<>=!~"']+))/y;
const ORDER: Record<string, (a: number | string, b: number | string) => boolean> = { '<': (a, b) => a < b, '<=': (a, b) => a <= b, '>': (a, b) => a > b, '>=': (a, b) => a >= b };
const DEPTH = 100, LONGEST = 4000, MOST = 200;

export class FilterError extends Error {
  constructor(text: string, readonly column: number, what: string) { super(`the filter has a mistake at column ${column}: ${what}\n  ${text.replace(/[\n\t]/g, ' ')}\n  ${' '.repeat(column - 1)}^`); }
}

/** Parse a filter. Return its test, and the metrics whose statistics it needs (`loss.min`). */
export function parse(text: string, now = Date.now() / 1000): { test: Test; metrics: string[] } {
  if (text.length > LONGEST) throw new FilterError(text.slice(0, 60), 61, `it has ${text.length} characters, and at most ${LONGEST} are allowed.`);
  const tokens = tokensOf(text), metrics: string[] = [];
  let at = 0, depth = 0, conditions = 0;
  const next = (): Token | undefined => tokens[at];
  const is = (token: Token | undefined, word: string) => token?.kind === 'word' && token.text.toLowerCase() === word;
  const fail = (what: string, token?: Token) => new FilterError(text, token ? token.column : text.length + 1, what);

  function either(): Test {
    const tests = [both()];
    while (is(next(), 'or')) { at++; tests.push(both()); }
    return (row) => tests.some((test) => test(row));
  }
  function both(): Test {
    const tests = [unary()];
    for (let token = next(); token && !is(token, 'or') && token.text !== ')'; token = next()) {
      if (is(token, 'and')) at++;
      tests.push(unary());
    }
    return (row) => tests.every((test) => test(row));
  }
  function unary(): Test {
    const token = next();
    if (!token || is(token, 'and') || is(token, 'or') || (token.kind === 'bracket' && token.text === ')')) throw fail('a condition is missing here, such as lr<0.1.', token);
    if (++depth > DEPTH) throw fail(`brackets are nested more than ${DEPTH} deep.`, token);
    if (++conditions > MOST) throw fail(`there are more than ${MOST} conditions.`, token);
    at++;
    const test = condition(token);
    depth--;
    return test;
  }
  function condition(token: Token): Test {
    if (is(token, 'not')) { const test = unary(); return (row) => !test(row); }
    if (token.kind === 'bracket') {
      const test = either();
      if (!next()) throw fail('this bracket is never closed.', token);
      at++;
      return test;
    }
    if (token.kind === 'op') throw fail(`${token.text} has no name on its left.`, token);
    if (token.kind === 'word' && token.text.toLowerCase().startsWith('tag:')) return tag(token);
    if (next()?.kind === 'op') return comparison(token, tokens[at++]);
    const wanted = matcher(token.text);
    return (row) => wanted(row.name ?? '') || wanted(row.id ?? '');
  }
  function tag(token: Token): Test {
    let wanted = token.text.slice(4);
    if (!wanted) {
      if (next()?.kind !== 'quoted') throw fail('tag: needs a tag, such as tag:baseline.', token);
      wanted = tokens[at++].text;
    }
    return (row) => (row.tags ?? []).includes(wanted);
  }
  function comparison(name: Token, op: Token): Test {
    const value = next();
    if (!value || (value.kind !== 'word' && value.kind !== 'quoted')) throw fail(`${op.text} has no value on its right.`, value);
    at++;
    const key = name.text.slice(0, name.text.lastIndexOf('.'));
    if (STATISTICS.includes(name.text.slice(key.length + 1)) && key) metrics.push(key);
    return checked(name.text, op.text === '==' ? '=' : op.text, value);
  }
  function checked(name: string, op: string, value: Token): Test {
    const { text } = value, words = op === '~' || op === '!~';
    if (name === 'status' && (op === '=' || op === '!=') && !STATUSES.includes(text)) throw fail(`there is no status '${text}'. Known: ${STATUSES.join(', ')}.`, value);
    if ((name === 'created' || name === 'seen') && !words) {
      const span = moment(text);
      if (!span) throw fail(`'${text}' is not a date. Write 2026-01-31 or 2026-01-31T12:00, or use age<2d.`, value);
      const [start, lasts] = span, of = (row: Row) => row[name] || 0;
      if (op === '=' || op === '!=') return (row) => (start <= of(row) && of(row) < start + lasts) === (op === '=');
      return (row) => ORDER[op](of(row), start);
    }
    if ((name === 'age' || name === 'duration') && !words) {
      const seconds = length(text);
      if (seconds === null) throw fail(`'${text}' is not a duration. Write 90s, 15m, 3h, 2d or 1w.`, value);
      return compared(name, op, String(seconds), now);
    }
    return compared(name, op, text, now);
  }
  if (!tokens.length) return { test: () => true, metrics };
  const test = either();
  if (next()) throw fail('this bracket was never opened.', next());
  return { test, metrics };
}

function tokensOf(text: string): Token[] {
  const found: Token[] = [], end = text.trimEnd().length;
  for (let at = 0; at < end;) {
    TOKEN.lastIndex = at;
    const match = TOKEN.exec(text);
    if (!match) {
      at += text.slice(at).length - text.slice(at).trimStart().length;
      throw new FilterError(text, at + 1, /["']/.test(text[at]) ? 'this quote is never closed.' : `'${text[at]}' does not belong here. Put quotes around it, or write !=.`);
    }
    const place = [1, 2, 3, 4].find((i) => match[i] !== undefined)!, word = match[place];
    found.push({ kind: (['op', 'bracket', 'quoted', 'word'] as const)[place - 1], text: place === 3 ? word.slice(1, -1).replace(/\\([^])/g, '$1') : word, column: match.index + match[0].length - word.length + 1 });
    at = TOKEN.lastIndex;
  }
  return found;
}

function valueOf(row: Row, name: string, now: number): unknown {
  const dot = name.indexOf('.'), kind = name.slice(0, Math.max(0, dot)), rest = dot < 0 ? '' : name.slice(dot + 1);
  if (rest && kind === 'config') return configValue(row.config ?? {}, rest);
  if (rest && (kind === 'summary' || kind === 'latest')) return own(row[kind] ?? {}, rest);
  if (name === 'age') return now - row.created;
  if (FIELDS.includes(name)) return row[name as keyof Row] ?? null;
  return configValue(row.config ?? {}, name) ?? metricValue(row, name);
}
const own = (facts: Facts, name: string): unknown => (Object.hasOwn(facts, name) ? facts[name] : null);

function configValue(config: Facts, path: string): unknown {
  if (Object.hasOwn(config, path)) return config[path];
  for (const [key, value] of Object.entries(config))
    if (value && typeof value === 'object' && !Array.isArray(value) && path.startsWith(`${key}.`)) {
      const found = configValue(value as Facts, path.slice(key.length + 1));
      if (found !== null && found !== undefined) return found;
    }
  return null;
}

function metricValue(row: Row, name: string): unknown {
  for (const facts of [row.latest ?? {}, row.summary ?? {}]) if (Object.hasOwn(facts, name)) return facts[name];
  const dot = name.lastIndexOf('.'), key = name.slice(0, Math.max(0, dot)), which = name.slice(dot + 1);
  if (!STATISTICS.includes(which) || !Object.hasOwn(row.latest ?? {}, key)) return null;
  return which === 'last' ? row.latest[key] : own(row.stats?.[key] ?? {}, which);
}

/** Return a case-insensitive test: substring, or with * or ? a match of the whole string, which backtracks to the last * only. */
function matcher(pattern: string): (text: string) => boolean {
  const small = pattern.toLowerCase();
  if (!/[*?]/.test(small)) return (text) => text.toLowerCase().includes(small);
  return (text) => glob(small, text.toLowerCase());
}
function glob(pattern: string, text: string): boolean {
  let p = 0, t = 0, star = -1, from = 0;
  while (t < text.length) {
    if (p < pattern.length && (pattern[p] === '?' || (pattern[p] === text[t] && pattern[p] !== '*'))) { p++; t++; }
    else if (pattern[p] === '*') { star = p++; from = t; }
    else if (star >= 0) { p = star + 1; t = ++from; }
    else return false;
  }
  while (pattern[p] === '*') p++;
  return p === pattern.length;
}

function compared(name: string, op: string, text: string, now: number): Test {
  const negated = op.startsWith('!'), compare = comparer(negated ? op.slice(1) : op, text);
  return (row) => {
    const value = valueOf(row, name, now) ?? null;
    return (Array.isArray(value) ? value.some(compare) : compare(value)) !== negated;
  };
}
function comparer(op: string, text: string): (value: unknown) => boolean {
  if (op === '=') return (value) => same(value, text);
  if (op === '~') { const wanted = matcher(text); return (value) => value !== null && wanted(asText(value)); }
  const order = ORDER[op], wanted = number(text);
  return (value) => {
    if (value === null || value === undefined || (typeof value === 'object' && !Array.isArray(value))) return false;
    const found = numeric(value);
    if (found !== null && wanted !== null) return order(found, wanted);
    return typeof value === 'string' && found === null && wanted === null && order(value, text);
  };
}
const numeric = (value: unknown): number | null => (typeof value === 'number' ? value : typeof value === 'boolean' ? Number(value) : number(String(value)));

function same(value: unknown, text: string): boolean {
  const small = text.toLowerCase();
  if (value === null || value === undefined) return small === 'none' || small === 'null';
  if (typeof value === 'boolean') return small === String(value) || small === String(Number(value));
  const found = numeric(value), wanted = number(text);
  if (found === null || wanted === null) return asText(value) === text;
  return found === wanted || (Number.isNaN(found) && Number.isNaN(wanted));
}
const asText = (value: unknown) => (typeof value === 'object' ? JSON.stringify(value) : String(value));

function number(text: string): number | null {
  const bare = text.trim().toLowerCase();
  if (/^[+-]?(?:inf|infinity)$/.test(bare)) return bare.startsWith('-') ? -Infinity : Infinity;
  if (/^[+-]?nan$/.test(bare)) return NaN;
  return bare.length <= 400 && /^[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?$/.test(bare) ? Number(bare) : null;
}
function length(text: string): number | null {
  const match = /^(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)$/.exec(text.toLowerCase());
  const unit = match && (match[2] || 's');
  return match && unit && Object.hasOwn(SECONDS, unit) ? Number(match[1]) * SECONDS[unit] : null;
}
function moment(text: string): [number, number] | null {
  if (!/^\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:[zZ]|[+-]\d\d:\d\d)?)?$/.test(text)) return null;
  const zoned = /(?:[zZ]|[+-]\d\d:\d\d)$/.test(text.slice(10)) || text.length === 10;
  const when = Date.parse((zoned ? text : `${text}Z`).replace(' ', 'T')) / 1000;
  return Number.isNaN(when) ? null : [when, text.length === 10 ? 86400 : text.length === 16 ? 60 : 1];
}
