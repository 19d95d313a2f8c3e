import { expect, it } from 'vitest';
import { flow } from '../src/lib/flow';

it('lets sections of one chart flow together, and leaves the others', () => {
  expect(flow([['train', ['a', 'b']], ['val', ['c']], ['metrics', ['d', 'e']], ['test', ['f']], ['system', ['g']]])).toEqual([['train', ['a', 'b']], ['metrics', ['c', 'd', 'e', 'f']], ['system', ['g']]]);
  expect(flow([['pinned', ['a']], ['val', ['c']], ['system', ['g']]])).toEqual([['pinned', ['a']], ['val', ['c']], ['system', ['g']]]);
  expect(flow([])).toEqual([]);
});
