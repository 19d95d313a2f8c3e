import { describe, expect, it } from 'vitest';
import { hide, hiding } from '../src/lib/shown';

const every = Array.from({ length: 10 }, (_, i) => `r${i}`);

describe('hidden runs', () => {
  it('are named, or those that are not, whichever is shorter', () => {
    expect(hide([], every, ['r1', 'r2'], true)).toEqual(['r1', 'r2']);
    expect(hide(['r1'], every, every.slice(0, 8), true)).toEqual(['*', 'r8', 'r9']);
    expect(hide(['*', 'r8'], every, ['r1', 'r2', 'r3', 'r4', 'r5'], false)).toEqual(['r0', 'r6', 'r7', 'r9']);
    expect(hide(['*'], every, every, false)).toEqual([]);
  });
  it('say of each run whether it is one', () => {
    expect(['r1', 'r2'].map((id) => hiding(['r1']).has(id))).toEqual([true, false]);
    expect(['r1', 'r2'].map((id) => hiding(['*', 'r1']).has(id))).toEqual([false, true]);
  });
  it('never fill an address', () => {
    const many = Array.from({ length: 10_000 }, (_, i) => `r${i}`);
    expect(hide([], many, many.slice(0, 5000), true)).toEqual(['*']);
  });
});
