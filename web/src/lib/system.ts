// System metrics by kind: one chart for all GPUs and nodes, with its unit. The process of one rank samples each node, so a node
// is asked for by that rank: `system/cpu@8`.
export interface Kind { id: string; keys: string[] }

const GPU = /^(system\/gpu\/)(\d+)(\/[^@]+)(@\d+)?$/;
const ENDINGS: [RegExp, string][] = [[/_gb$/, 'GB'], [/_mb_s$/, 'MB/s'], [/_w$/, 'W'], [/_c$/, '°C'], [/_mhz$/, 'MHz'], [/\/process\/cpu$/, '% of one core'],
  [/^system\/(cpu|memory|disk)$|\/(util|memory|sm_active|sm_occupancy|tensor_active|dram_active)$/, '%']];

/** The unit of a system metric; '' where it counts something, or is not one. */
export function unitOf(key: string): string {
  const name = key.replace(/@\d+$/, '');
  return name.startsWith('system/') ? (ENDINGS.find(([ending]) => ending.test(name))?.[1] ?? '') : '';
}

/** The metrics of all GPUs by kind, with a star for the GPU; other system metrics alone. In the order of the keys. */
export function kinds(keys: string[]): Kind[] {
  const found = new Map<string, string[]>();
  for (const key of keys) {
    const gpu = GPU.exec(key), id = gpu ? `${gpu[1]}*${gpu[3]}` : key.replace(/@\d+$/, '');
    const list = found.get(id);
    if (list) list.push(key);
    else found.set(id, [key]);
  }
  return [...found].map(([id, list]) => ({ id, keys: list.sort((a, b) => place(a) - place(b)) }));
}
const place = (key: string) => Number(/@(\d+)$/.exec(key)?.[1] ?? 0) * 1000 + Number(GPU.exec(key)?.[2] ?? 0);

/** The same metrics for each node of a run; `nodes` names the rank that sampled each. */
export function onNodes(keys: string[], nodes: Record<string, number>): string[] {
  const ranks = Object.values(nodes);
  return ranks.length < 2 ? keys : keys.flatMap((key) => ranks.map((rank) => `${key}@${rank}`));
}

/** What a line of such a chart is called: `gpu 3`, `node-b`, `node-b gpu 3`. */
export function lineName(key: string, nodes: Record<string, number>): string {
  const rank = /@(\d+)$/.exec(key)?.[1], node = rank === undefined ? '' : (Object.entries(nodes).find(([, one]) => one === Number(rank))?.[0] ?? `rank ${rank}`);
  const gpu = GPU.exec(key)?.[2];
  return [node, gpu === undefined ? '' : `gpu ${gpu}`].filter(Boolean).join(' ') || key;
}
