// A published folder: the same dashboard over files that `fanfold publish` wrote, without a server. A meta tag in index.html marks it.

export interface Copy { made: number; projects: string[] }

function found(): Copy | null {
  const said = typeof document === 'undefined' ? null : document.querySelector<HTMLMetaElement>('meta[name="fanfold-published"]')?.content;
  return said ? JSON.parse(said) : null;
}

/** The contents of the published folder; null if there is a server. */
export const copy: Copy | null = found();

const PLAIN = ['png', 'jpg', 'jpeg', 'gif', 'webp', 'bmp', 'wav', 'mp3', 'ogg', 'flac', 'm4a', 'mp4', 'webm', 'json', 'txt']; // the same list as in server/media.py

/** Return the name of the file that answers a request: FNV-1a of its words, as in publish/answers.py. */
export function nameOf(...words: (string | number)[]): string {
  let hash = 0xcbf29ce484222325n;
  for (const byte of new TextEncoder().encode(words.join('\0'))) hash = BigInt.asUintN(64, (hash ^ BigInt(byte)) * 0x100000001b3n);
  return `data/${hash.toString(16).padStart(16, '0')}`;
}

/** Return the path of a media file in the folder. */
export function fileAt(path: string, given: Record<string, unknown>): string {
  const ext = String(given.ext ?? '').toLowerCase();
  if (path === 'media') return `data/blobs/${given.blob}.${PLAIN.includes(ext) ? ext : 'bin'}`;
  if (path === 'html') return `${nameOf('html', ...asked(given, 'project', 'run', 'key', 'n'))}.txt`;
  return nameOf('cell', ...asked(given, 'project', 'run', 'key', 'n', 'row', 'column'));
}
const asked = (given: Record<string, unknown>, ...names: string[]) => names.map((name) => String(given[name]));
