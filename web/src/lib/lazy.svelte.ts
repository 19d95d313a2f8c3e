// Code that is loaded when it is first used: asked for again as long as it did not arrive.
import { outages } from './api';

/** Return a function that answers with the module once it is here; who asks is told when it is. */
export function lazily<T>(load: () => Promise<T>): () => T | null {
  let found = $state.raw<T | null>(null), asked = false;
  return () => {
    if (!found && !asked) {
      asked = true;
      load().then((module) => (found = module), () => { asked = false; outages.failed(); });
    }
    return found;
  };
}

/** What makes lines of series where somebody asked for more than the plain ones: groups, smoothing, charts of several metrics. */
export const shape = lazily(() => import('./shape'));
