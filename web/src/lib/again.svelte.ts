// What an outage kept from arriving is asked for again when it is over.
import { untrack } from 'svelte';
import { model } from './model.svelte';
import { Refused } from './refused';

/** Whether asking again may help: the server did not answer, or could not. */
export const temporary = (why: unknown) => !(why instanceof Refused) || why.code >= 500;

/** A number that changes with the news while something is missing: an effect that reads it asks again. */
export function again(missing: () => boolean): () => number {
  let times = $state(0);
  $effect(() => {
    void model.news.n;
    untrack(() => { if (missing()) times++; });
  });
  return () => times;
}
