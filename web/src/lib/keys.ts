// Keyboard shortcuts. They are off inside a field, which Escape leaves.
import { model } from './model.svelte';
import { workspace } from './workspace.svelte';
import { PAGE_KEYS, copied, link, view } from './view.svelte';

const runs = (what: string) => () => { dispatchEvent(new CustomEvent('fanfold:runs', { detail: what })); };
const smooth = (by: number) => () => { view.smooth = Math.min(1, Math.max(0, Number((view.smooth + by).toFixed(2)))); };

const ACTIONS: Record<string, () => void> = {
  '/': () => document.getElementById('filter')?.focus(),
  j: runs('down'), k: runs('up'), ArrowDown: runs('down'), ArrowUp: runs('up'), x: runs('toggle'), p: runs('pin'), o: runs('open'), c: runs('compare'),
  l: () => { view.logY = !view.logY; },
  b: () => { view.band = !view.band; },
  '[': smooth(-0.1), ']': smooth(0.1),
  0: () => { view.zoom = null; },
  e: () => { view.list = view.list ? 0 : 300; },
  t: () => { model.theme = model.dark ? 'light' : 'dark'; },
  y: () => { void copied(link()).then((done) => done || prompt('The clipboard is not available here. Press Ctrl+C to copy the link.', link())); },
};

export function keyboard(help: () => void): () => void {
  const press = (event: KeyboardEvent) => {
    const target = event.target as HTMLElement;
    if (target.matches('input:not([type=checkbox]):not([type=range]), textarea, select, [contenteditable]')) {
      if (event.key === 'Escape') { event.preventDefault(); target.blur(); } // by default, browsers clear a search field on Escape without reporting it
      return;
    }
    const key = event.key.toLowerCase();
    if ((event.ctrlKey || event.metaKey) && !event.altKey && (key === 'z' || key === 'y')) {
      event.preventDefault();
      if (key === 'y' || event.shiftKey) workspace.redo();
      else workspace.undo();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.key.startsWith('Arrow') && target.matches('[role=grid], .scroller, input, [role=slider]')) return;
    const page = PAGE_KEYS[event.key];
    const action = event.key === '?' ? help : page ? () => { view.page = page; } : ACTIONS[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  };
  addEventListener('keydown', press);
  return () => removeEventListener('keydown', press);
}
