// One paint queue with a budget of a few milliseconds per frame, so that the page stays responsive while forty charts repaint.

const BUDGET = 8;
let jobs = new Map<object, () => void>();
let asked = false;

/** Queue a paint job; it replaces a pending job of the same owner. */
export function paint(owner: object, job: () => void): void {
  jobs.set(owner, job);
  if (!asked) { asked = true; requestAnimationFrame(work); }
}

function work() {
  const end = performance.now() + BUDGET;
  for (const [owner, job] of jobs) {
    jobs.delete(owner);
    job();
    if (performance.now() > end) break;
  }
  asked = jobs.size > 0;
  if (asked) requestAnimationFrame(work);
}
