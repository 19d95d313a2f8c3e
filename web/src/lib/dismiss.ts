// Closes a menu or panel on a click outside, or on Escape, which also returns the focus to its opener.

/** A Svelte action for <details>: `use:dismiss`. */
export function dismiss(box: HTMLDetailsElement) {
  const close = (back: boolean) => { box.open = false; if (back) box.querySelector('summary')?.focus(); };
  const away = (event: PointerEvent) => { if (box.open && !box.contains(event.target as Node)) close(false); };
  const press = (event: KeyboardEvent) => { if (box.open && event.key === 'Escape') { event.stopPropagation(); event.preventDefault(); close(true); } };
  addEventListener('pointerdown', away, true);
  box.addEventListener('keydown', press);
  return { destroy: () => { removeEventListener('pointerdown', away, true); box.removeEventListener('keydown', press); } };
}
