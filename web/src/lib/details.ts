// Everything the server says about one run but its points.

export interface Verdict { status: string; rank: number | null; error: string | null; reason?: string | null; signal?: string | number | null }
export interface Alert { t: number; title: string; text: string; level: string; s?: number; rank?: number; run?: string; name?: string }
export interface Artifact { t: number; name: string; kind: string; files: { path: string; blob: string; size: number }[]; metadata?: Record<string, unknown>; s?: number }
export interface Details {
  id: string; project: string; name: string; status: string; verdict: Verdict; created: number; seen: number; tags: string[];
  notes: string | null; group: string | null; archived: boolean; config: Record<string, unknown>; values: Record<string, unknown>;
  summary: Record<string, unknown>; facts: Record<string, unknown>; attempts: (Verdict & { key: string; started: number })[];
  ranks: number[]; dropped: number; damaged: number; artifacts: Artifact[]; files: Record<string, unknown>[]; alerts: Alert[]; path: string; console: boolean;
  keys: { number: string[]; system: string[]; text: string[]; media: string[] };
}
