// Splits captured console output into lines: per rank and stream, progress bars in their last state, escape sequences removed.

export interface Chunk { t: number; stream: string | null; rank: number | null; text: string }
export interface Printed { rank: number; stream: string; text: string }

// eslint-disable-next-line no-control-regex
const ESCAPES = /\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])/g;

export function printed(chunks: Chunk[]): Printed[] {
  const found: Printed[] = [];
  const open = new Map<string, Printed>();
  for (const chunk of chunks) {
    const rank = chunk.rank ?? 0, stream = chunk.stream ?? 'stdout', source = `${rank} ${stream}`;
    const parts = chunk.text.replace(/\r\n/g, '\n').split('\n');
    parts.forEach((part, i) => {
      let line = open.get(source);
      if (!line) { line = { rank, stream, text: '' }; open.set(source, line); if (part || i < parts.length - 1) found.push(line); else open.delete(source); }
      line.text += part;
      if (i < parts.length - 1) open.delete(source);
    });
  }
  for (const line of found) line.text = last(line.text.replace(ESCAPES, ''));
  return found;
}

/** Return what a terminal would show of a line with carriage returns. */
function last(text: string): string {
  const parts = text.split('\r').filter(Boolean);
  return parts[parts.length - 1] ?? '';
}
