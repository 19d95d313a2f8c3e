// The dashboard's filter, tested with the same cases as the server's.
import { readFileSync } from 'node:fs';
import { describe, expect, it } from 'vitest';
import { FilterError, parse, type Row } from '../src/lib/filter';

const fixture = JSON.parse(readFileSync('../tests/data/filter_cases.json', 'utf8'));
const odd = (facts: Record<string, unknown>) => Object.fromEntries(Object.entries(facts ?? {}).map(([key, value]) => [key, value === 'NaN' ? NaN : value]));
const rows: Row[] = fixture.rows.map((row: Row) => ({ ...row, latest: odd(row.latest), summary: odd(row.summary) }));

describe('filter', () => {
  it.each(fixture.cases as { filter: string; ids: string[] }[])('$filter', ({ filter, ids }) => {
    const { test } = parse(filter, fixture.now);
    expect(rows.filter(test).map((row) => row.id)).toEqual(ids);
  });
  it.each(fixture.errors as { filter: string; column: number; says: string }[])('error: $filter', ({ filter, column, says }) => {
    let error: FilterError | null = null;
    try { parse(filter, fixture.now); } catch (why) { error = why as FilterError; }
    expect(error?.column).toBe(column);
    expect(error?.message).toContain(says);
  });
  it('names the metrics whose statistics it needs', () => expect(parse('loss.min<1 and val/acc.max>2 lr<3').metrics).toEqual(['loss', 'val/acc']));
});
