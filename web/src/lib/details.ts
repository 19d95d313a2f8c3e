// Everything the server returns about one run, except its points.

export interface Verdict { status: string; rank: number | null; error: string | null; reason?: string | null; signal?: string | number | null }
export interface Alert { t: number; title: string; text: string; level: string; s?: number; rank?: number; run?: string; name?: string }
export interface Artifact { t: number; name: string; kind: string; files: { path: string; blob: string; size: number }[]; metadata?: Record<string, unknown>; s?: number }
export interface Evidence {
  title: string; text: string; columns: string[]; rows: unknown[][]; marked: number[]; files: { path: string; blob: string; size: number }[];
  curves: { key: string; times: number[]; values: number[] }[]; stacks: { title: string; lines: string[] }[];
}
export interface Asked { id: string; action: string; values: Record<string, unknown>; by: string; state: string; step: number | null; why: string; asked: number; answered: number | null }
export interface Details {
  fork: { project: string; run: string; step: number; name: string | null; missing: string | null } | null;
  id: string; project: string; name: string; status: string; verdict: Verdict; created: number; seen: number; tags: string[];
  notes: string | null; group: string | null; archived: boolean; config: Record<string, unknown>; values: Record<string, unknown>;
  summary: Record<string, unknown>; facts: Record<string, unknown>; attempts: (Verdict & { key: string; started: number })[];
  ranks: number[]; dropped: number; damaged: number; artifacts: Artifact[]; files: Record<string, unknown>[]; alerts: Alert[]; requests: Asked[]; knobs: Record<string, { value: unknown; min: number | null; max: number | null }>; path: string; console: boolean;
  blackbox: Evidence[]; nodes?: Record<string, number>; // one rank of each node
  keys: { number: string[]; system: string[]; text: string[]; media: string[] };
}

/** Flatten nested facts into dotted names. */
export function flat(facts: object, before = ''): Record<string, unknown> {
  return Object.fromEntries(Object.entries(facts).flatMap(([name, value]) => (value && typeof value === 'object' && !Array.isArray(value) ? Object.entries(flat(value, `${before}${name}.`)) : [[before + name, value]])));
}
