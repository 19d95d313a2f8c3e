import { describe, expect, it } from 'vitest';
import { kindName, kinds, lineName, onNodes, unitOf } from '../src/lib/system';

describe('system metrics', () => {
  it('have a unit', () => {
    expect(['system/cpu', 'system/gpu/3/util', 'system/gpu/0/memory_gb@8', 'system/gpu/1/power_w', 'system/gpu/1/temp_c', 'system/net/recv_mb_s', 'system/process/cpu', 'system/gpu/0/ecc_corrected', 'train/util'].map(unitOf))
      .toEqual(['%', '%', 'GB', 'W', '°C', 'MB/s', '% of one core', '', '']);
  });
  it('are one chart for all GPUs and nodes', () => {
    const nodes = { a: 0, b: 8 }, keys = onNodes(['system/cpu', 'system/gpu/10/util', 'system/gpu/2/util', 'system/gpu/2/temp_c'], nodes);
    expect(kinds(keys)).toEqual([
      { id: 'system/cpu', keys: ['system/cpu@0', 'system/cpu@8'] },
      { id: 'system/gpu/\\d+/util', keys: ['system/gpu/2/util@0', 'system/gpu/10/util@0', 'system/gpu/2/util@8', 'system/gpu/10/util@8'] },
      { id: 'system/gpu/\\d+/temp_c', keys: ['system/gpu/2/temp_c@0', 'system/gpu/2/temp_c@8'] },
    ]);
    expect(['system/cpu@8', 'system/gpu/2/util@0', 'system/gpu/2/util'].map((key) => lineName(key, nodes))).toEqual(['b', 'a gpu 2', 'gpu 2']);
    expect(kinds(keys).map((kind) => kindName(kind.id))).toEqual(['system/cpu · %', 'system/gpu/util · %', 'system/gpu/temp_c · °C']);
    expect(onNodes(['system/cpu'], { a: 0 })).toEqual(['system/cpu']);
  });
});
