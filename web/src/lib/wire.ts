// The server's binary responses: a JSON header, then columns that typed arrays view without a copy.

export type Column = Float64Array | Float32Array | Int32Array | Uint16Array;
export interface Item { [fact: string]: unknown; columns: Record<string, Column> }
export interface Answer { head: Record<string, unknown>; items: Item[] }

export const VERSION = 1;
const TYPES = { f8: Float64Array, f4: Float32Array, i4: Int32Array, u2: Uint16Array };

/** Decode a response; throw if it is truncated or has another version. */
export function decode(buffer: ArrayBuffer): Answer {
  if (buffer.byteLength < 8) throw new Error('the answer is cut short');
  const front = new DataView(buffer);
  const version = front.getUint32(0, true);
  const length = front.getUint32(4, true);
  if (version !== VERSION) throw new Error(`the answer has version ${version}, this page reads ${VERSION}: reload the page`);
  const start = 8 + length;
  if (start > buffer.byteLength) throw new Error('the answer is cut short');
  const { items, ...head } = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  return { head, items: items.map((item: Item) => ({ ...item, columns: columnsOf(buffer, start, item.columns as never) })) };
}

function columnsOf(buffer: ArrayBuffer, start: number, named: Record<string, [keyof typeof TYPES, number, number]>) {
  const columns: Record<string, Column> = {};
  for (const [name, [type, at, count]] of Object.entries(named)) {
    const Type = TYPES[type];
    if (!Type) throw new Error(`the answer has a column of type ${type}, which this page does not know: reload the page`);
    if (start + at + count * Type.BYTES_PER_ELEMENT > buffer.byteLength) throw new Error('the answer is cut short');
    columns[name] = new Type(buffer, start + at, count);
  }
  return columns;
}
