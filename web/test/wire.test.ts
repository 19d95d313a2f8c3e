// Decodes what the server encodes: the server's tests produce the same bytes.
import { readFileSync } from 'node:fs';
import { describe, expect, it } from 'vitest';
import { decode } from '../src/lib/wire';

const file = readFileSync(new URL('../../tests/data/columns.bin', import.meta.url));
const bytes = (count = file.length) => file.buffer.slice(file.byteOffset, file.byteOffset + count) as ArrayBuffer;

describe('decode', () => {
  it('reads columns, facts and numbers that are none', () => {
    const { head, items } = decode(bytes());
    expect(head).toEqual({ axis: 'step' });
    expect(items[0]).toMatchObject({ run: 'é<img>', total: 4, raw: true });
    expect([...items[0].columns.x]).toEqual([0, 1, 2.5, 1e15]);
    expect([...items[0].columns.y]).toEqual([1, NaN, Infinity, -Infinity]);
    expect([...items[1].columns.ranks]).toEqual([3, 0, 7]);
    expect(items[1].columns.none).toHaveLength(0);
  });
  it('shares columns with the same content', () => {
    const { items } = decode(bytes());
    expect(items[0].columns.x.byteOffset).toBe(items[1].columns.x.byteOffset);
  });
  it('says that an answer is cut short, wherever it is cut', () => {
    for (let length = 0; length < file.length - 8; length += 7) expect(() => decode(bytes(length)), String(length)).toThrow(/cut short/);
  });
  it('refuses another version and unknown types', () => {
    const other = bytes();
    new DataView(other).setUint32(0, 9, true);
    expect(() => decode(other)).toThrow(/version 9/);
    const text = new TextEncoder().encode('{"items":[{"columns":{"x":["f2",0,1]}}]}'.padEnd(40));
    const odd = new Uint8Array(8 + text.length);
    new DataView(odd.buffer).setUint32(0, 1, true);
    new DataView(odd.buffer).setUint32(4, text.length, true);
    odd.set(text, 8);
    expect(() => decode(odd.buffer)).toThrow(/f2/);
  });
});
