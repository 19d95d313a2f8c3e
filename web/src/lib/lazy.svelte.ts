// Modules that are loaded on first use, and requested again if that fails.
import { outages } from './api';

/** Return a reactive function that returns the module once it is loaded, and null until then. */
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

/** Builds lines beyond the plain ones: groups, smoothing, charts of several metrics. */
export const shape = lazily(() => import('./shape'));
